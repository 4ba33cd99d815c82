"""Policies are functions that return decisions; they compose, and a tape takes them as they are."""
from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megackpt.plan import ChunkPlan, Decision, Plan
from megackpt.plan.decision import KEEP_ALL, REPLAY_ALL
from megackpt.recompute import (
    KeptBytes,
    Policy,
    Tape,
    at,
    both,
    either,
    save_and_offload_only_these_names,
    save_anything_except_these_names,
    save_boundaries,
    save_everything,
    save_if,
    save_nothing,
    save_only_these_names,
)
from megackpt.recompute.tiers import HostTier

OUTPUT = Decision("keep", "replay", "replay")
OFFLOADED = Decision("offload_host", "offload_host", "keep")


def test_each_says_what_its_name_says() -> None:
    assert save_everything()("core") == KEEP_ALL
    assert save_nothing()("core") == REPLAY_ALL
    only = save_only_these_names("core", "layers.2.up")
    assert [only("core"), only("up"), only("up", "layers.2"), only("up", "layers.1")] == [
        KEEP_ALL, REPLAY_ALL, KEEP_ALL, REPLAY_ALL]  # fmt: skip
    rest = save_anything_except_these_names("core")
    assert [rest("core"), rest("up", "layers.0")] == [REPLAY_ALL, KEEP_ALL]
    assert [save_boundaries()(n) for n in ("attn.residual", "mlp.residual", "embed.dropout", "mlp.up")] == [
        OUTPUT, OUTPUT, OUTPUT, REPLAY_ALL]  # fmt: skip
    assert [save_boundaries("block")(n) for n in ("block", "mlp.residual")] == [OUTPUT, REPLAY_ALL]
    assert save_if(lambda name, address: address == "layers.1")("any", "layers.1") == KEEP_ALL
    away = save_and_offload_only_these_names(["a"], ["b"])
    assert [away(n) for n in "abc"] == [KEEP_ALL, OFFLOADED, REPLAY_ALL]


def test_they_compose() -> None:
    a, b = save_only_these_names("a", "x"), save_only_these_names("b", "x")
    away = save_and_offload_only_these_names([], ["a"])
    assert [(a | b)(n) for n in "abxc"] == [KEEP_ALL, KEEP_ALL, KEEP_ALL, REPLAY_ALL]
    assert [(a & b)(n) for n in "abxc"] == [REPLAY_ALL, REPLAY_ALL, KEEP_ALL, REPLAY_ALL]
    assert [either(a, b, save_nothing())(n) for n in "ac"] == [KEEP_ALL, REPLAY_ALL]
    assert [both(a, b, save_everything())(n) for n in "ax"] == [REPLAY_ALL, KEEP_ALL]
    assert (away | save_nothing())("a") == OFFLOADED
    assert (away | a)("a") == KEEP_ALL
    assert (away & save_everything())("a") == OFFLOADED
    assert (away & save_nothing())("a") == REPLAY_ALL
    mixed = save_boundaries("a") | save_only_these_names("b")
    assert mixed("a") == OUTPUT and mixed("b") == KEEP_ALL
    assert (save_boundaries("a") & save_only_these_names("a"))("a") == OUTPUT


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            layer = at(f"layers.{i}")
            h = layer("act", torch.sin, layer("up", up, x))
            x = layer("residual", torch.add, x, layer("down", down, h))
        return x


BYTES = 4 * 8 * 4  # a [4, 8] tensor


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (save_everything(), {"layers.0": 5, "layers.1": 5, "layers.2": 5}),
        (save_only_these_names("residual", "down"), {"layers.0": 1, "layers.1": 1, "layers.2": 1}),
        (save_only_these_names("residual", "down", "layers.1.up"), {"layers.0": 1, "layers.1": 3, "layers.2": 1}),
        (save_boundaries("residual", "down"), {"layers.0": 1, "layers.1": 1, "layers.2": 1}),
        (save_nothing(), {"layers.0": 1}),
    ],
    ids=["everything", "names", "qualified", "boundaries", "nothing"],
)
def test_a_tape_takes_one(policy: Policy, kept: dict[str, int]) -> None:
    """Bytes by layer, in units of a [4, 8] tensor: the input 1, the outputs of up and act 2 each."""
    model = Layers()
    x = torch.randn(4, 8, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    account = KeptBytes()
    with Tape(policy, account=account) as tape:
        out = model(x)
    by_layer: dict[str, int] = {}
    for where, nbytes in tape.report().items():
        by_layer[where.split()[0]] = by_layer.get(where.split()[0], 0) + nbytes // BYTES
    assert by_layer == kept
    ours = torch.autograd.grad(out.sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_offloading_by_name() -> None:
    model, x = Layers(), torch.randn(4, 8, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), x)[0]
    policy = save_and_offload_only_these_names(["residual"], ["up"])
    with HostTier() as host, Tape(policy, tiers={"offload_host": host}):
        out = model(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)


def test_frozen_into_a_plan() -> None:
    steps = {"layers.0": ["up", "down"], "": ["head"]}
    plan = save_only_these_names("up").plan(steps)
    assert type(plan) is ChunkPlan
    assert plan.save_set("layers.0")["up"] == KEEP_ALL and plan.save_set("")["head"] == REPLAY_ALL
    whole = Plan(((plan,),), "by names")
    assert Plan.from_json(json.loads(whole.dumps())) == whole


def test_a_predicate_is_asked_once_a_step() -> None:
    asked: list[tuple[str, str]] = []

    def predicate(name: str, address: str) -> bool:
        asked.append((name, address))
        return True

    policy, model = save_if(predicate), Layers()
    for _ in range(2):
        with Tape(policy):
            model(torch.randn(4, 8))
    assert len(asked) == len(set(asked)) == 12


def test_types() -> None:
    as_function: Callable[[str, str], Decision] = save_nothing()
    as_plan: ChunkPlan = save_nothing()
    assert as_function("a", "") == as_plan.save_set("")["a"]
