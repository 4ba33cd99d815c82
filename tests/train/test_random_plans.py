"""Any stored plan trains the same bits: random decisions per step, layer and stage through the real trainer, in a
pipeline of two stages, with dropout, three micro-batches and everything between `--recompute-plan` and the gradients
that the optimizer would see."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.plan import ChunkPlan, Decision, Group, Plan, SaveSet
from megackpt.plan.decision import KEEP, OFFLOAD_HOST, REPLAY, SHARD
from megackpt.plan.split import split_layers
from megackpt.plan.steps import BLOCK_NAMES, EMBED, HEAD, whole_outputs
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import FAMILIES, Flags, Layout, built
from tests.pool import run_distributed

STAGES = 2
SIZES: Flags = {
    "num-layers": 5,
    "hidden-size": 48,
    "ffn-hidden-size": 168,
    "seq-length": 20,
    "max-position-embeddings": 20,
    "global-batch-size": 6,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
}
LAYOUTS = [Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, pp=2, sp=True)]


def flags_of(seed: int) -> Flags:
    """Both families and both cores in turn."""
    backend = "fused" if seed // 2 % 2 == 0 else "unfused"
    return FAMILIES["llama" if seed % 2 else "gpt"] | SIZES | {"attention-backend": backend}


def random_plan(rng: random.Random, layout: Layout) -> Plan:
    """Save-sets for every address of both stages; some plans with groups, some with tensors in other places."""
    choices = [KEEP, REPLAY, OFFLOAD_HOST] if rng.random() < 0.5 else [KEEP, REPLAY]
    weights = [rng.random() for _ in choices]  # plans that mostly keep and plans that mostly drop
    shards = whole_outputs(layout.sp) if layout.tp > 1 and rng.random() < 0.5 else frozenset()

    def decision(name: str) -> Decision:
        output, internals = rng.choices(choices, weights, k=2)
        if name in shards and rng.random() < 0.5:
            output = SHARD
        return Decision(output, internals, rng.choice((KEEP, REPLAY)))

    def save_set(names: tuple[str, ...]) -> SaveSet:
        return SaveSet({name: decision(name) for name in names})

    ends = tuple(step.name for step in EMBED), tuple(step.name for step in HEAD)
    stages = []
    for layers in split_layers(int(str(SIZES["num-layers"])), STAGES):
        sets = {"embedding": save_set(ends[0]), "head": save_set(ends[1])}
        sets |= {f"layers.{layer}": save_set(BLOCK_NAMES) for layer in layers}
        groups: tuple[Group, ...] = ()
        if rng.random() < 0.3:
            first = rng.randint(layers.start, layers.stop - 1)
            last = rng.randint(first, layers.stop - 1)
            output = SHARD if "mlp.residual" in shards else KEEP
            groups = (Group(first, last, rng.choice([None, ()]), output),)
        stages.append((ChunkPlan(sets, groups),))
    return Plan(tuple(stages))


Outcome = tuple[float, Tensor, dict[str, int], Tensor]


def one_step(flags: Flags, layout: Layout) -> Outcome:
    """Loss, the whole gradient buffer, and the position of every random stream after it."""
    trainer = built(flags, layout)
    torch.manual_seed(0)
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        total, _ = Stepper(trainer).accumulate(batches)
    for tier in trainer.tiers.values():
        getattr(tier, "close", lambda: None)()
    assert trainer.buffer.flat.abs().sum() > 0
    return total, trainer.buffer.flat.clone(), trainer.ledger.state_dict(), torch.get_rng_state()


def differences(a: Outcome, b: Outcome) -> list[str]:
    found = [] if a[0] == b[0] else ["loss"]
    found += [] if torch.equal(a[1], b[1]) else ["gradients"]
    return found + ([] if a[2] == b[2] and torch.equal(a[3], b[3]) else ["random streams"])


def compare(
    rank: int, world_size: int, layout: Layout, seeds: list[int], count: int, folder: str
) -> dict[str, list[str]]:
    """What `count` plans per seed change, by the plan itself."""
    wrong = {}
    for seed in seeds:
        flags, rng = flags_of(seed), random.Random(seed)
        plain = one_step(flags, layout)
        assert seed % 2 or layout.sp or min(plain[2].values()) > 0  # the run drew
        path, done = Path(folder, f"{layout}-{seed}-{rank}.json"), 0
        while done < count:
            path.write_text(random_plan(rng, layout).dumps())
            try:
                found = one_step(flags | {"recompute-plan": str(path)}, layout)
            except UsageError:  # on every rank alike: another one
                continue
            done += 1
            if different := differences(found, plain):
                wrong[path.read_text()] = different
    return wrong


def check(layout: Layout, seeds: list[int], count: int, folder: Path) -> None:
    results = run_distributed(compare, layout.world_size, layout, seeds, count, str(folder), timeout=110)
    assert results == [{}] * layout.world_size


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_random_plans_in_a_pipeline(layout: Layout, tmp_path: Path) -> None:
    check(layout, [0, 1, 2, 3], 2, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 12))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_more_random_plans_in_a_pipeline(layout: Layout, seed: int, tmp_path: Path) -> None:
    check(layout, [seed], 10, tmp_path)


def _refused(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    with pytest.raises(UsageError) as refusal:
        built(flags, layout)
    return str(refusal.value)


@pytest.mark.parametrize(("layout", "step"), [(LAYOUTS[1], "attn.qkv"), (LAYOUTS[2], "attn.residual")], ids=str)
def test_a_split_output_is_not_spread(layout: Layout, step: str, tmp_path: Path) -> None:
    """Ranks hold different numbers in it: what a gather puts together would be another tensor, silently."""
    stages = split_layers(int(str(SIZES["num-layers"])), STAGES)
    sets = [{f"layers.{i}": SaveSet({step: Decision(output=SHARD)} if i == 1 else {}) for i in s} for s in stages]
    path = tmp_path / "plan.json"
    path.write_text(Plan(tuple((ChunkPlan(of_stage),) for of_stage in sets)).dumps())
    said = run_distributed(_refused, 4, flags_of(0) | {"recompute-plan": str(path)}, layout)
    how = "with" if layout.sp else "without"
    assert said[0] == (
        f"--recompute-plan {path}: layers.1 shards the output of {step}, of which every tensor-parallel rank holds a"
        f" part of its own {how} --sequence-parallel; whole there: {', '.join(sorted(whole_outputs(layout.sp)))}"
    )
