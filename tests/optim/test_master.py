"""AdamW, Adam and SGD against PyTorch's own, masters, decay groups, state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.optim import GradientBuffer
from tests.optim.helpers import BETAS, adamw, buffer_of, draw

SHAPES = {"norm": (7,), "w": (5, 9), "bias": (5,), "tail": (509, 3)}
NO_DECAY = {"norm": {"decay": False}, "bias": {"decay": False}}


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: draw(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def set_gradients(buffer: GradientBuffer, step: int) -> None:
    for i, (name, gradient) in enumerate(sorted(buffer.gradients().items())):
        gradient.copy_(draw(*SHAPES[name], seed=100 * step + i, dtype=gradient.dtype))


def values(buffer: GradientBuffer) -> dict[str, Tensor]:
    return {entry.record.name: entry.parameter.detach().clone() for entry in buffer.entries}


KINDS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer], set[str]]] = {
    "adamw": ({}, partial(torch.optim.AdamW, betas=BETAS, eps=1e-8), {"exp_avg", "exp_avg_sq"}),
    "adam": (
        {"decoupled_weight_decay": False},
        partial(torch.optim.Adam, betas=BETAS, eps=1e-8),
        {"exp_avg", "exp_avg_sq"},
    ),
    "sgd": ({"optimizer": "sgd"}, partial(torch.optim.SGD, momentum=0.9), {"momentum_buffer"}),
    "plain sgd": ({"optimizer": "sgd", "sgd_momentum": 0.0}, torch.optim.SGD, set()),
}


def reference(dtype: torch.dtype, steps: int, kind: Callable[..., torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The same run with torch's unfused optimizer."""
    parameters = {name: Parameter(w) for name, w in weights(dtype).items()}
    groups = [
        {"params": [p for n, p in parameters.items() if n not in NO_DECAY], "weight_decay": 0.1},
        {"params": [p for n, p in parameters.items() if n in NO_DECAY], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=1.0, foreach=False)
    for step in range(steps):
        for i, (name, p) in enumerate(sorted(parameters.items())):
            p.grad = draw(*SHAPES[name], seed=100 * step + i, dtype=dtype)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_equals_torch_with_a_changing_rate_and_two_decay_groups(
    dtype: torch.dtype, tolerance: float, kind: str
) -> None:
    buffer = buffer_of(weights(dtype), **NO_DECAY)
    fields, oracle, state = KINDS[kind]
    optimizer = adamw(buffer, **fields)
    for step in range(6):
        set_gradients(buffer, step)
        optimizer.step(1e-2 / (step + 1))
    expected = reference(dtype, 6, oracle)
    for name, got in values(buffer).items():
        torch.testing.assert_close(got, expected[name], rtol=tolerance, atol=tolerance)
    assert optimizer.step_count == 6 and set(optimizer.state_tensors()) == state


def test_the_ends_follow_their_own_rate() -> None:
    """--decoupled-lr: the tensors with rows of the vocabulary, whether they decay or not."""
    of_vocabulary: dict[str, object] = {"of_vocabulary": True}
    ends = {"tail": of_vocabulary, "bias": {"decay": False, **of_vocabulary}}
    buffer = buffer_of(weights(torch.float64), **ends)
    before = values(buffer)
    buffer.flat.fill_(1.0)
    adamw(buffer, optimizer="sgd", weight_decay=0.0).step(0.5, 0.25)
    for name, after in values(buffer).items():
        torch.testing.assert_close(after, before[name] - (0.25 if name in ends else 0.5), rtol=1e-14, atol=1e-14)


def test_decay_alone_moves_only_the_decayed() -> None:
    buffer = buffer_of(weights(torch.float64), **NO_DECAY)
    before = values(buffer)
    adamw(buffer).step(0.5)  # gradients are zero
    after = values(buffer)
    for name in SHAPES:
        factor = 1.0 if name in NO_DECAY else 1 - 0.5 * 0.1
        torch.testing.assert_close(after[name], before[name] * factor, rtol=1e-15, atol=0)


def test_bf16_parameters_are_rounded_fp32_masters() -> None:
    """Steps of 1e-4 around 1 are below half a bf16 unit: without masters the weight would never move."""
    buffer = buffer_of({"w": torch.ones(4, dtype=torch.bfloat16)})
    optimizer = adamw(buffer, weight_decay=0.0)
    for _ in range(50):
        buffer.flat.fill_(1.0)
        optimizer.step(1e-4)
    ((master, _),) = optimizer.masters()
    torch.testing.assert_close(master, torch.full((4,), 1 - 50e-4), rtol=1e-6, atol=0)
    weight = buffer.entries[0].parameter.detach()
    assert torch.equal(weight, master.bfloat16()) and not torch.equal(weight, torch.ones_like(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_loaded_without_optimizer_state_survive_a_step_of_rate_zero(dtype: torch.dtype) -> None:
    # MP-01
    buffer = buffer_of(weights(dtype), **NO_DECAY)
    optimizer = adamw(buffer)
    loaded = {name: w + 1 for name, w in weights(dtype).items()}
    with torch.no_grad():
        for entry in buffer.entries:
            entry.parameter.copy_(loaded[entry.record.name])
    optimizer.refresh_masters()
    set_gradients(buffer, 0)
    optimizer.step(0.0)
    assert all(torch.equal(got, loaded[name]) for name, got in values(buffer).items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_place", [False, True])
def test_restored_state_continues_bit_for_bit(dtype: torch.dtype, in_place: bool, kind: str) -> None:
    fields, _, kinds = KINDS[kind]
    first = buffer_of(weights(dtype), **NO_DECAY)
    optimizer = adamw(first, **fields)
    for step in range(3):
        set_gradients(first, step)
        optimizer.step(1e-2)
    saved = {kind: {n: t.clone() for n, t in by.items()} for kind, by in optimizer.state_tensors().items()}
    assert set(saved) == kinds | ({"master"} if dtype == torch.bfloat16 else set())
    assert all(set(by_name) == set(SHAPES) for by_name in saved.values())

    start = values(first) if dtype == torch.float32 else weights(dtype)  # bf16 weights come from the masters
    second = buffer_of(start, **NO_DECAY)
    other = adamw(second, **fields)
    if in_place:
        live = other.state_tensors()
        for kind, by_name in saved.items():
            for name, tensor in by_name.items():
                live[kind][name].copy_(tensor)
        other.load_state_tensors(live, optimizer.step_count)
    else:
        other.load_state_tensors(saved, optimizer.step_count)
    assert other.step_count == 3
    for step in range(3, 6):
        for buffer, each in ((first, optimizer), (second, other)):
            set_gradients(buffer, step)
            each.step(1e-2)
    ours, restored = values(first), values(second)
    assert all(torch.equal(ours[name], restored[name]) for name in SHAPES)


def test_incomplete_state_is_refused_and_changes_nothing() -> None:
    buffer = buffer_of(weights(torch.float32))
    optimizer = adamw(buffer)
    state = {kind: {n: t + 1 for n, t in by.items()} for kind, by in optimizer.state_tensors().items()}
    state["exp_avg_sq"]["w"] = torch.zeros(9, 5)
    with pytest.raises(ValueError, match=r"exp_avg_sq of parameter w has shape \(9, 5\), not \(5, 9\)"):
        optimizer.load_state_tensors(state, 7)
    del state["exp_avg"]["bias"]
    with pytest.raises(ValueError, match="no exp_avg for parameter bias"):
        optimizer.load_state_tensors(state, 7)
    assert optimizer.step_count == 0
    assert not any(t.any() for by in optimizer.state_tensors().values() for t in by.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_does_not_depend_on_a_parameters_place(dtype: torch.dtype) -> None:
    """Copies of a tied weight lie elsewhere on their stages and must stay equal to the bit."""
    copies = []
    for names in (("tail", "norm"), ("norm", "bias", "w", "tail")):
        buffer = buffer_of({name: weights(dtype)[name] for name in names})
        optimizer = adamw(buffer)
        for step in range(4):
            buffer.gradients()["tail"].copy_(draw(*SHAPES["tail"], seed=step))
            optimizer.step(1e-2)
        copies.append(values(buffer)["tail"])
    assert torch.equal(*copies)


def test_autograd_still_notices_that_a_step_changed_a_weight_it_saved() -> None:
    buffer = buffer_of({"w": torch.ones(3)})
    weight = buffer.entries[0].parameter
    loss = (weight * weight).sum()
    adamw(buffer).step(0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_rank_without_parameters_can_step() -> None:
    optimizer = adamw(GradientBuffer())
    optimizer.step(0.1)
    assert optimizer.step_count == 1 and not any(optimizer.state_tensors().values())
