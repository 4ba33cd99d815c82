"""One flipped bit in one copy of anything that ranks hold alike is found at the next check, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.train.health import TrainingStopped
from megackpt.train.loop import train
from megackpt.train.seal import digest
from megackpt.train.step import Stepper
from tests.layouts import SMALL_GPT, Flags, Layout, built
from tests.pool import run_distributed

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD, NORM, UP = "embedding.word.weight", "layers.1.mlp.norm.weight", "layers.0.mlp.up.weight"


def flip(tensor: Tensor, bit: int = 0) -> None:
    """One bit of the last element, below the sight of autograd and of every sum."""
    flat = tensor.detach().view(-1)
    with torch.no_grad():
        bits = flat.view(INTEGERS[flat.element_size()])
        bits[-1] = bits[-1] ^ (1 << bit)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_single_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = digest(tensor)
    for bit in range(8 * dtype.itemsize - 1):
        flip(tensor, bit)
        assert digest(tensor) != before
        flip(tensor, bit)
        assert digest(tensor) == before
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(torch.empty(0, dtype=dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_does_not_depend_on_where_a_tensor_lies(dtype: torch.dtype) -> None:
    values = torch.randn(9_000_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    memory = torch.zeros(9_000_008, dtype=dtype)
    for offset in range(4):
        there = memory[offset : offset + values.numel()]
        there.copy_(values)
        assert digest(there) == digest(values)


# what to spoil: (kind of optimizer state, or "" for the parameter; parameter; rank)
Place = tuple[str, str, int]


def ended(
    rank: int, world_size: int, flags: Flags, layout: Layout, place: Place, after: int, owner: type, method: str
) -> str:
    """How a run ends in which the lowest bit of the last element flips on one rank, after so many calls of a method
    that is called once in every iteration."""
    trainer = built(flags, layout)
    real, calls = getattr(owner, method), 0

    def spoiled(self: object, *args: object) -> object:
        nonlocal calls
        result = real(self, *args)
        calls += 1
        kind, name, where = place
        if (calls, rank) == (after, where):
            trainer.optimizer.settle()
            state = trainer.optimizer.state_tensors()
            flip((state[kind] if kind else {record.name: p for p, record in trainer.parameters})[name])
        return result

    setattr(owner, method, spoiled)
    try:
        train(trainer)
    except TrainingStopped as error:
        return str(error)
    finally:
        setattr(owner, method, real)
    return ""


BACKWARD, UPDATE = (Stepper, "accumulate"), (Stepper, "update")
SHARDED: Flags = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
TP, PP, DP = Layout(tp=2), Layout(pp=2), Layout(dp=2)
# Parameters that have a copy, and all that has none, in every kind of run: a shard of the optimizer begins as a shard.
# The last element of UP is in the shard of rank 1, so that rank 0 has a copy of it.
FLIPS: dict[str, tuple[Layout, Flags, Place, str]] = {
    "tp": (Layout(tp=2, sp=True), {}, ("", NORM, 1), f"model.{NORM} differs between tensor-parallel ranks 0 against 1"),
    "tied": (PP, {}, ("", WORD, 1), f"model.{WORD} differs between the first and the last stage, ranks 0 against 1"),
    "dp": (DP, {}, ("", UP, 0), f"model.{UP} differs between data-parallel ranks 0 against 1"),
    "dp-sharded": (DP, SHARDED, ("", UP, 0), f"model.{UP} differs between data-parallel ranks 0 against 1"),
    "own": (TP, {}, ("", UP, 1), f"model.{UP} has changed after update 2 on rank 1"),
    "own-sharded": (DP, SHARDED, ("", UP, 1), f"model.{UP} has changed after update 2 on rank 1"),
} | {
    kind + name: (layout, more, (kind, UP, 1), f"optimizer.{kind}.{UP} has changed after update 2 on rank 1")
    for kind in ("master", "exp_avg", "exp_avg_sq")
    for name, layout, more in (("", TP, {}), ("-sharded", DP, SHARDED))
}
NARROW = {"fp32": {}, "bf16": {"bf16": True}}


@pytest.mark.parametrize(
    ("dtype", "name"),
    # fp32 parameters are their own masters
    [(dtype, name) for dtype in NARROW for name in FLIPS if dtype == "bf16" or not name.startswith("master")],
)
def test_a_flipped_bit_is_found_at_the_next_check_and_named(dtype: str, name: str) -> None:
    """Flipped in the backward of iteration 3, so that the update of 3 uses or heals it; the check is due after 4."""
    layout, more, place, words = FLIPS[name]
    flags = SMALL_GPT | NARROW[dtype] | more | {"check-weight-hash-across-dp-replicas-interval": 2}
    for message in run_distributed(ended, layout.world_size, flags, layout, place, 3, *BACKWARD):
        assert message.startswith("copies have drifted apart, found after iteration 4: ")
        assert words in message


@pytest.mark.parametrize("more", [{}, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize(
    ("flags", "layout", "place", "copies"),
    [
        ({"params-dtype": "fp64"}, Layout(tp=2, dp=2), ("exp_avg_sq", NORM, 1), "tensor-parallel ranks 0 against 1"),
        ({"fp16": True}, Layout(pp=2, dp=2), ("exp_avg", WORD, 3), "the first and the last stage, ranks 1 against 3"),
    ],
    ids=["tp", "tied"],
)
def test_copies_of_state_are_compared_with_or_without_a_seal(
    flags: Flags, layout: Layout, place: Place, copies: str, more: Flags, tmp_path: Path
) -> None:
    key = f"optimizer.{place[0]}.{place[1]}"
    flags = SMALL_GPT | more | flags | {"train-iters": 2}
    flags |= {"initial-loss-scale": 1.0} if "fp16" in flags else {}
    for checks, seal in (({"check-replicas-interval": 1}, True), ({"save": str(tmp_path)}, False)):
        for message in run_distributed(ended, 4, flags | checks, layout, place, 2, *UPDATE):
            assert f"{key} differs between {copies}" in message
            assert (f"{key} has changed after update 2 on rank {place[2]}" in message) == seal


def test_a_save_is_checked_before_it_is_written(tmp_path: Path) -> None:
    flags = SMALL_GPT | {"save": str(tmp_path), "save-interval": 2}
    for message in run_distributed(ended, 2, flags, DP, ("", UP, 1), 4, *UPDATE):
        assert "found before iteration 4 is saved: " in message and f"model.{UP} differs" in message
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]


@pytest.mark.parametrize("more", [{}, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, sp=True), DP, Layout(pp=2, dp=2)], ids=str)
def test_copies_that_are_equal_are_left_alone(layout: Layout, more: Flags) -> None:
    flags = SMALL_GPT | more | {"check-replicas-interval": 1, "bf16": True}
    found = run_distributed(ended, layout.world_size, flags, layout, ("", UP, -1), 1, *UPDATE)
    assert found == [""] * layout.world_size
