"""One flipped bit in one copy of anything that ranks hold alike is found at the next check, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.train.guard import digest
from megackpt.train.health import TrainingStopped
from megackpt.train.loop import Loop, train
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


# what to spoil: (kind of optimizer state, or "" for the parameter; parameter; rank; bit)
Place = tuple[str, str, int, int]


def ended(
    rank: int, world_size: int, flags: Flags, layout: Layout, place: Place, after: int, owner: type, method: str
) -> str:
    """How a run ends in which one bit of one rank flips after so many calls of a method: one of every iteration."""
    kind, name, where, bit = place
    trainer = built(flags, layout)
    real, calls = getattr(owner, method), 0

    def spoiled(self: object, *args: object) -> object:
        nonlocal calls
        result = real(self, *args)
        calls += 1
        if (calls, rank) == (after, where):
            trainer.optimizer.settle()
            state = trainer.optimizer.state_tensors()
            tensors = state[kind] if kind else {record.name: p for p, record in trainer.parameters}
            flip(tensors[name], bit)
        return result

    setattr(owner, method, spoiled)
    try:
        train(trainer)
    except TrainingStopped as error:
        return str(error)
    finally:
        setattr(owner, method, real)
    return ""


UPDATE, AT_THE_END = (Stepper, "update"), (Loop, "_guard")

SHARDED: Flags = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
LAYOUTS: list[tuple[str, Layout, Flags, Place, str]] = [
    (
        "tp",
        Layout(tp=2, sp=True),
        {},
        ("", NORM, 1, 0),
        f"model.{NORM} differs between tensor-parallel ranks 0 against 1",
    ),
    (
        "tp-moment",
        Layout(tp=2),
        {"params-dtype": "fp64"},
        ("exp_avg_sq", NORM, 0, 51),
        f"optimizer.exp_avg_sq.{NORM} differs between tensor-parallel ranks 0 against 1",
    ),
    (
        "tied",
        Layout(pp=2),
        {},
        ("", WORD, 1, 3),
        f"model.{WORD} differs between the first and the last stage, ranks 0 against 1",
    ),
    ("dp", Layout(dp=2), {}, ("", UP, 1, 0), f"model.{UP} differs between data-parallel ranks 0 against 1"),
    (
        "dp-moment",
        Layout(dp=2),
        {"optimizer": "sgd"},
        ("momentum_buffer", UP, 0, 0),
        f"optimizer.momentum_buffer.{UP} differs between data-parallel ranks 0 against 1",
    ),
    (
        "sharded-tp",
        Layout(tp=2, dp=2),
        SHARDED,
        ("exp_avg", NORM, 1, 0),  # ranks 0 and 1 are tp, with one dp index
        f"optimizer.exp_avg.{NORM} differs between tensor-parallel ranks 0 against 1",
    ),
    (
        "sharded-tied",
        Layout(pp=2, dp=2),
        SHARDED,
        ("exp_avg_sq", WORD, 3, 0),
        f"optimizer.exp_avg_sq.{WORD} differs between the first and the last stage, ranks 1 against 3",
    ),
    (
        "sharded-parameter",
        Layout(dp=2),
        SHARDED,
        ("", UP, 0, 0),  # in the shard of rank 1, so rank 0 holds a copy
        f"model.{UP} differs between data-parallel ranks 0 against 1",
    ),
    (
        "sharded-master",
        Layout(dp=2),
        SHARDED | {"bf16": True},
        ("master", UP, 1, 20),
        f"optimizer.master.{UP} does not round to its parameter on rank 1",
    ),
    (
        "master",
        Layout(pp=2),
        {"bf16": True},
        ("master", NORM, 1, 20),
        f"optimizer.master.{NORM} does not round to its parameter on rank 1",
    ),
]


@pytest.mark.parametrize(("layout", "more", "place", "words"), [c[1:] for c in LAYOUTS], ids=[c[0] for c in LAYOUTS])
def test_a_flipped_bit_is_found_at_the_next_check_and_named(
    layout: Layout, more: Flags, place: Place, words: str
) -> None:
    flags = SMALL_GPT | more | {"check-weight-hash-across-dp-replicas-interval": 2, "lr": 0.0, "min-lr": 0.0}
    # An update rounds the master anew, and makes it the truth; a sharded parameter is gathered anew.
    anew = place[0] == "master" or (place[0] == "" and "use-distributed-optimizer" in more)
    after = 4 if anew else 3
    for message in run_distributed(ended, layout.world_size, flags, layout, place, after, *UPDATE):
        assert message.startswith("copies have drifted apart, found after iteration 4: ")
        assert words in message


def test_a_save_is_checked_before_it_is_written(tmp_path: Path) -> None:
    flags = SMALL_GPT | {"save": str(tmp_path), "save-interval": 2}
    for message in run_distributed(ended, 2, flags, Layout(dp=2), ("", UP, 1, 20), 3, *UPDATE):
        assert "found before iteration 4 is saved: " in message and f"model.{UP} differs" in message
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]


@pytest.mark.parametrize(("layout", "more"), [(Layout(tp=2), {}), (Layout(dp=2), SHARDED)], ids=["tp", "sharded"])
def test_state_without_a_copy_is_sealed_between_updates(layout: Layout, more: Flags) -> None:
    """A moment of a sharded weight is on one rank only.  Flipped after iteration 3, it is found before iteration 4."""
    flags = SMALL_GPT | more | {"check-replicas-interval": 1}
    for message in run_distributed(ended, 2, flags, layout, ("exp_avg", UP, 1, 0), 3, *AT_THE_END):
        expected = f"optimizer.exp_avg.{UP} has changed on rank 1 since the last update"
        assert message == f"copies have drifted apart, found before iteration 4: {expected}"


@pytest.mark.parametrize("more", [{}, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, sp=True), Layout(dp=2), Layout(pp=2, dp=2)], ids=str)
def test_copies_that_are_equal_are_left_alone(layout: Layout, more: Flags) -> None:
    flags = SMALL_GPT | more | {"check-replicas-interval": 1, "bf16": True}
    untouched = ("", UP, -1, 0)
    found = run_distributed(ended, layout.world_size, flags, layout, untouched, 1, *UPDATE)
    assert found == [""] * layout.world_size
