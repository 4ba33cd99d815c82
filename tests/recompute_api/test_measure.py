"""Measured bytes and operations are those that can be counted by hand; measuring leaves no trace."""
from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from megackpt.plan.chains import Chain
from megackpt.recompute import ModuleProfile, Profile, measure

UNIT = 16 * 32 * 4  # bytes of a [16, 32] tensor


def only(profile: Profile) -> ModuleProfile:
    assert len(profile.modules) == 1
    return profile.modules[0]


def x(width: int = 32) -> Tensor:
    return torch.randn(16, width, requires_grad=True)


def test_linear() -> None:
    linear = nn.Linear(32, 64)
    m = only(measure(linear, x()))
    weights = (32 * 64 + 64) * 4
    assert (m.input_bytes, m.output_bytes, m.saved_bytes) == (UNIT, 2 * UNIT, 0)
    assert (m.reads_input, m.reads_output) == (True, False)
    assert (m.gradient_bytes, m.input_gradient_bytes, m.parameter_bytes) == (2 * UNIT, UNIT, weights)
    assert (m.forward_flops, m.spared_flops, m.backward_flops) == (2 * 16 * 32 * 64, 2 * 16 * 32 * 64, 4 * 16 * 32 * 64)
    assert m.forward_transient == m.tape_transient == 0
    assert m.backward_transient == weights  # both gradients are there before they are added up
    assert m.forward_seconds > 0 and m.backward_seconds > 0


def test_what_hooks_see_and_what_dies_early() -> None:
    tanh = only(measure(nn.Tanh(), x()))
    assert (tanh.saved_bytes, tanh.reads_output, tanh.reads_input) == (0, True, False)
    two = only(measure(_whole(nn.Tanh(), nn.Linear(32, 32)), x()))
    assert two.saved_bytes == UNIT and not two.reads_output
    assert two.spared_flops == two.forward_flops == 2 * 16 * 32 * 32
    flat = only(measure(nn.Flatten(), x()))
    assert flat.backward_transient == -UNIT  # the gradient goes through as it is
    three = only(measure(_whole(nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid()), x()))
    assert three.saved_bytes == 2 * UNIT  # all three outputs, kept
    assert three.forward_transient == UNIT  # what the last one reads, if nothing is


def _whole(*modules: nn.Module) -> nn.Module:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*modules)

        def forward(self, t: Tensor) -> Tensor:
            return self.inner(t)

    return Whole()


def test_shared_storages_count_once_and_views_are_outputs() -> None:
    def fn(t: Tensor) -> tuple[Tensor, Tensor]:
        h = t.exp()
        a, b = h.chunk(2, dim=-1)
        return a * b, h

    m = only(measure(fn, x()))
    assert m.output_bytes == UNIT // 2 + UNIT  # the product, and the storage that exp and both factors share
    assert m.saved_bytes == 0 and m.reads_output


def test_arguments() -> None:
    def fn(pair: tuple[Tensor, Tensor], scale: float) -> dict[str, Tensor | None]:
        return {"out": pair[0].sin() * pair[1] * scale, "none": None}

    m = only(measure(fn, ((x(), torch.randn(16, 32)), 2.0)))
    assert m.input_bytes == 2 * UNIT and m.input_gradient_bytes == UNIT
    frozen = only(measure(nn.Linear(32, 32).requires_grad_(False), torch.randn(16, 32)))
    assert (frozen.gradient_bytes, frozen.backward_flops) == (0, 0)


def test_a_chain_feeds_itself() -> None:
    profile = measure(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), x())
    assert [m.name for m in profile.modules] == ["0 Linear", "1 GELU", "2 Linear"]
    assert [m.output_bytes for m in profile.modules] == [2 * UNIT, 2 * UNIT, UNIT // 4]
    chain = profile.chain()
    assert isinstance(chain, Chain) and (chain.input_bytes, chain.input_gradient_bytes) == (UNIT, UNIT)
    assert chain.stages[0].forward_cost == 2 * 16 * 32 * 64 + 10 * profile.modules[0].forward_moved
    assert profile.chain("seconds").stages[0].forward_cost == profile.modules[0].forward_seconds
    with pytest.raises(ValueError, match='"work" or "seconds"'):
        profile.chain("cost")


def test_json_and_table() -> None:
    profile = measure([nn.Linear(32, 64), nn.GELU()], x())
    assert Profile.from_json(json.loads(profile.dumps())) == profile
    with pytest.raises(ValueError, match="version 2"):
        Profile.from_json({"version": 2})
    assert str(profile).splitlines()[1].split()[:5] == ["0", "Linear", "4,096", "0", "65,536"]


def test_nothing_is_left_behind() -> None:
    net = _whole(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5))
    keep = net.inner[0].weight.grad = torch.ones(32, 32)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    sample = x()
    state = torch.get_rng_state()
    measure(net, sample)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.inner[0].weight.grad is keep and (keep == 1).all()
    assert net.inner[0].bias.grad is None and sample.grad is None
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
