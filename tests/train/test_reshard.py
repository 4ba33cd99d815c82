"""A checkpoint goes on at any other layout: weights and moments to the bit, the losses that follow within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.mesh.parameter import gather_full
from megackpt.train.build import Trainer
from megackpt.train.checkpoint import Position, load_run
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, built, layouts, save_run, steps
from tests.pool import run_distributed

CUT = {"num-layers": 5, "micro-batch-size": 1, "params-dtype": "fp64", "recompute-granularity": "full"}
FAMILIES = {"gpt": SMALL_GPT | CUT, "llama": SMALL_LLAMA | CUT | {"qk-layernorm": True}}
START = Layout(tp=2, pp=2, vp=2)
SIX = Position(2, 8)  # after two steps of four samples


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and optimizer state of this stage, whole and without padding, by kind and global name."""
    trainer.optimizer.settle()
    local = {f"weight.{record.name}": (parameter, record) for parameter, record in trainer.parameters}
    own = trainer.optimizer.state_tensors()
    narrow = trainer.parameters[0][0].dtype == torch.bfloat16
    for kind in ("exp_avg", "exp_avg_sq", *(("master",) if narrow else ())):  # a rank may have nothing of some kind
        for parameter, record in trainer.parameters:
            state = over_data_parallel(trainer, own.get(kind, {}).get(record.name), parameter, record.name)
            local[f"{kind}.{record.name}"] = state, record
    whole = {}
    for name, (tensor, record) in local.items():
        full = gather_full(tensor.detach(), record, trainer.mesh.tp)
        whole[name] = record.without_padding(full).to(torch.float64, copy=True)  # exact, and alike whatever holds it
    return whole


def over_data_parallel(trainer: Trainer, state: Tensor | None, parameter: Tensor, name: str) -> Tensor:
    """The local tensor of some optimizer state, from the parts that data-parallel ranks have of it."""
    if not trainer.optimizer.sharded:
        assert state is not None and state.shape == parameter.shape
        return state
    flat = torch.zeros(parameter.numel(), dtype=torch.float64)
    if state is not None:
        start, stop = trainer.optimizer.flat_range(name) or (0, 0)
        flat[start:stop] = state
    if trainer.mesh.dp.size > 1:
        torch.distributed.all_reduce(flat, group=trainer.mesh.dp.group)
    return flat.view(parameter.shape)


def first(rank: int, world: int, flags: Flags, layout: Layout, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps, a save, two more steps."""
    trainer = built(flags | {"save": folder}, layout)
    steps(trainer, 2)
    save_run(trainer, SIX)
    state = everything(trainer)
    return state, steps(trainer, 2, consumed=SIX.consumed_samples).losses


def again(
    rank: int, world: int, flags: Flags, layout: Layout, source: str, target: str
) -> tuple[dict[str, Tensor], list[float], int]:
    """Load, save what was loaded, go on for two steps."""
    trainer = built(flags | {"load": source, "save": target}, layout)
    start = load_run(trainer)
    assert start.position == SIX
    state = everything(trainer)
    save_run(trainer, SIX)
    return state, steps(trainer, 2, consumed=SIX.consumed_samples).losses, trainer.optimizer.step_count


def joined(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of all stages; every rank that has a tensor has the same."""
    whole: dict[str, Tensor] = {}
    for state in of_ranks:
        for name, tensor in state.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


SHARDED = {"use-distributed-optimizer": True}


def check(
    flags: Flags, folder: Path, targets: list[tuple[Layout, Flags]], start: Layout = START, tolerance: float = 1e-12
) -> dict[str, Tensor]:
    """From `start` to every target and back; what was carried."""
    saved = run_distributed(first, start.world_size, flags, start, str(folder / "start"), timeout=60)
    state, losses = joined([of_rank for of_rank, _ in saved]), saved[0][1]
    for name, tensor in state.items():
        assert name.startswith("weight") or bool((tensor != 0).any()), name
    for place, (layout, extra) in enumerate(targets):
        other, there = str(folder / f"{layout}-{place}"), flags | extra
        found = run_distributed(again, layout.world_size, there, layout, str(folder / "start"), other, timeout=60)
        for _, now, count in found:
            near = all(abs(a - b) <= tolerance * b for a, b in zip(now, losses, strict=True))
            assert count == 4 and near, (layout, now, losses)
        loaded = joined([of_rank for of_rank, _, _ in found])
        assert loaded.keys() == state.keys()
        assert [name for name, tensor in state.items() if not torch.equal(loaded[name], tensor)] == [], layout
        back = run_distributed(again, start.world_size, flags, start, other, str(folder / "back"), timeout=60)
        returned = joined([of_rank for of_rank, _, _ in back])
        assert [name for name, tensor in state.items() if not torch.equal(returned[name], tensor)] == [], layout
        assert [now for _, now, _ in back] == [losses] * start.world_size  # the same layout: to the bit
    return state


def test_a_few_layouts_and_back(tmp_path: Path) -> None:  # CK-08
    plain = [(layout, {}) for layout in (Layout(), Layout(pp=2), Layout(tp=2, sp=True))]
    check(FAMILIES["gpt"], tmp_path, [*plain, (Layout(pp=2, dp=2), SHARDED)])


@pytest.mark.parametrize("start", [Layout(dp=2), Layout(tp=2, dp=2)], ids=str)
def test_a_sharded_optimizer_goes_on_whole_and_in_other_shards(tmp_path: Path, start: Layout) -> None:
    targets = [(Layout(), {}), (Layout(dp=4), SHARDED), (Layout(pp=2, dp=2, vp=2), SHARDED), (Layout(dp=2), {})]
    check(FAMILIES["llama"] | SHARDED, tmp_path, targets if start.tp == 1 else targets[:2], start)


def test_weights_in_bf16_and_their_masters_go_on_exactly(tmp_path: Path) -> None:
    """The masters are the weights' own, not made anew from 16 bits; losses are apart by the rounding of layouts."""
    flags = {key: value for key, value in FAMILIES["llama"].items() if key != "params-dtype"} | {"bf16": True} | SHARDED
    targets = [(Layout(), {}), (Layout(tp=2, dp=2), {}), (Layout(pp=2, dp=2, vp=2), {}), (Layout(tp=2, pp=2), {})]
    state = check(flags, tmp_path, targets, Layout(dp=2), tolerance=2**-10)
    kinds = {name.split(".", 1)[0] for name in state}
    assert kinds == {"weight", "master", "exp_avg", "exp_avg_sq"}
    for name, weight in state.items():
        if name.startswith("weight."):
            master = state[name.replace("weight.", "master.", 1)]
            assert torch.equal(weight, master.bfloat16().double())
    inexact = [name for name, tensor in state.items() if not torch.equal(tensor, tensor.bfloat16().double())]
    assert {name.split(".", 1)[0] for name in inexact} == {"master", "exp_avg", "exp_avg_sq"}


def test_heads_are_padded_and_the_padding_goes_again(tmp_path: Path) -> None:
    """9 heads in 3 groups, of one size; split over two ranks they are 12 in 4, and of other sizes they are 9 again."""
    flags = FAMILIES["llama"] | {"num-attention-heads": 9, "num-query-groups": 3, "kv-channels": 10}
    padded: Flags = {"num-attention-heads": 12, "num-query-groups": 4, "unpadded-query-groups": 3}
    targets = [(Layout(tp=2), padded), (Layout(dp=2), SHARDED), (Layout(tp=2, dp=2), padded | SHARDED)]
    check(flags, tmp_path, targets, Layout(pp=2))


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_up_to_four_processes_and_back(tmp_path: Path, family: str) -> None:
    wanted = [layout for layout in layouts(4) if layout.tp < 4 or family == "gpt"]  # two query groups
    wanted += [Layout(pp=2, vp=2), Layout(tp=2, pp=2, vp=2, sp=True), Layout(pp=2, dp=2, vp=2)]
    plain: list[tuple[Layout, Flags]] = [(layout, {}) for layout in wanted]
    check(FAMILIES[family], tmp_path, plain + [(layout, SHARDED) for layout in wanted if layout.dp > 1])
