"""A plan on a module of others: the result is the same, less is kept, and nothing is left after undo."""
from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import Tensor, nn

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import (
    KeptBytes,
    RngLedger,
    Stream,
    Tape,
    apply,
    dropout,
    save_nothing,
    save_only_these_names,
    undo,
)
from tests.recompute_api.oracle import Outcome


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor, *, scale: float = 1.0, name: str = "", fn: str | None = None) -> tuple[Tensor, None]:
        return self.inner(x, x, x, need_weights=False)[0] * scale, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(self.norm(x), scale=0.5, name="n", fn="f")
        return x + y + self.mlp(self.norm(x + y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model: nn.Module) -> Outcome:
    torch.manual_seed(2)
    x = torch.randn(2, 5, 8, requires_grad=True)
    model.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    return Outcome(loss.detach(), [x.grad, *(p.grad for p in model.parameters())], torch.get_rng_state())


def forwards(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if "forward" in m.__dict__]


def test_chosen_by_pattern_and_type() -> None:
    model = Model()
    plain, names = train(model), list(model.state_dict())
    account = KeptBytes()
    steps = ["layers.*.attention", "layers.0.mlp", nn.LayerNorm]
    with apply(save_only_these_names("attention"), model, steps, account=account, label="mb 0") as applied:
        assert applied.steps == (
            "layers.0.attention", "layers.0.norm", "layers.0.mlp", "layers.1.attention", "layers.1.norm"
        )  # fmt: skip
        assert list(model.state_dict()) == names
        train(model).assert_equal(plain)
        loss = model(torch.randn(2, 5, 8)).sum()
        report = applied.report()
        assert set(report.by_tape()) == {"mb 0"} and set(report.by_layer()) == {"layers.0", "layers.1"}
        assert report.by_step()["attention"] > 0
        loss.backward()
        assert applied.report().nbytes == 0
    assert forwards(model) == []
    train(model).assert_equal(plain)


def test_less_is_kept_and_the_hooks_run_once() -> None:
    model, seen = Model(), []
    model.layers[0].mlp.register_forward_hook(lambda *_: seen.append("mlp"))  # type: ignore[union-attr]
    sizes = []
    for policy in (None, save_nothing()):
        storages: dict[int, int] = {}

        def pack(t: Tensor, storages: dict[int, int] = storages) -> Tensor:
            if not isinstance(t, nn.Parameter) and not isinstance(t._base, nn.Parameter):
                storages[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        handle = apply(policy, model, ["layers.*"]) if policy else None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(torch.randn(2, 5, 8)).sum()
        seen.clear()
        loss.backward()
        sizes.append(sum(storages.values()))
        assert seen == (["mlp"] if policy else [])  # inside the step `layers.0`, whose replay runs it
        if handle:
            handle.undo()
    assert sizes[1] < sizes[0] / 5
    with apply(save_nothing(), model, ["layers.0.mlp"]):
        loss = model(torch.randn(2, 5, 8)).sum()
        seen.clear()
        loss.backward()
    assert seen == []  # around the step: it ran in the forward alone


def test_a_plan_names_its_own_steps() -> None:
    model = Model()
    plain = train(model)
    plan = ChunkPlan({"layers.0": SaveSet({"mlp": REPLAY_ALL}), "": SaveSet({"head": Decision("keep", "replay")})})
    with apply(plan, model) as applied:
        assert applied.steps == ("layers.0.mlp", "head")
        train(model).assert_equal(plain)


def test_a_policy_alone_takes_the_children() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with apply(save_only_these_names("1"), model) as applied:
        assert applied.steps == ("0", "1", "2")


def test_undo_restores_what_was_there() -> None:
    model = Model()
    own = model.head.forward

    def special(x: Tensor) -> Tensor:
        return own(x) * 2

    model.head.forward = special  # type: ignore[method-assign]
    plain = train(model)
    applied = apply(save_nothing(), model, ["head", "layers.*"])
    assert inspect.signature(model.layers[0].forward) == inspect.signature(Layer().forward)
    train(model).assert_equal(plain)
    applied.undo()
    applied.undo()
    assert model.head.forward is special and forwards(model) == ["head"]


def test_a_backward_may_come_after_undo() -> None:
    model = Model()
    plain = train(model)
    torch.manual_seed(2)
    x = torch.randn(2, 5, 8, requires_grad=True)
    model.zero_grad()
    with apply(save_nothing(), model, ["layers.*"]):
        loss = model(x).pow(2).sum()
    loss.backward()
    Outcome(loss.detach(), [x.grad, *(p.grad for p in model.parameters())], plain.rng).assert_equal(plain)


def test_copies_are_wrapped_around_themselves() -> None:
    model = Model()
    applied = apply(save_nothing(), model, ["layers.*"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.layers[0].norm.weight.mul_(3)
        expected = train(other)
        assert not torch.equal(expected.loss, train(model).loss)
        undo(other)
        assert forwards(other) == []
        train(other).assert_equal(expected)
    applied.undo()
    assert forwards(model) == []


def test_inside_an_open_tape_and_without_gradients() -> None:
    model = Model()
    plain = train(model)
    account = KeptBytes()
    with apply(save_nothing(), model, ["layers.*"]):
        with Tape(ChunkPlan(), account=account) as outer:
            loss = model(torch.randn(2, 5, 8)).sum()
        assert outer.report() == {"layers 0": 2 * 5 * 8 * 4}  # the tape inside has no account of its own
        del loss
        with Tape(ChunkPlan()):
            train(model).assert_equal(plain)
        with torch.no_grad():
            model(torch.randn(2, 5, 8))


def test_refusals() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"layers.7.mlp matches no submodule of Model; it has layers, layers.0"):
        apply(save_nothing(), model, ["layers.7.mlp"])
    with pytest.raises(ValueError, match="Conv2d matches no submodule"):
        apply(save_nothing(), model, [nn.Conv2d])
    assert forwards(model) == []
    applied = apply(save_nothing(), model, ["head"])
    with pytest.raises(ValueError, match="has a plan on it already"):
        apply(save_nothing(), model, ["layers.*"])
    model.head.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="forward of Linear was replaced"):
        applied.undo()


def test_streams_of_an_enclosing_tape_are_reproduced() -> None:
    ledger = RngLedger()
    stream = ledger.register(Stream("tensor", 3))

    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return dropout(x.sin(), 0.5, stream).exp()

    model, x = nn.Sequential(Dropped(), Dropped()), torch.randn(4, 8, requires_grad=True)

    def run() -> Tensor:
        stream.position = 0
        with Tape(ChunkPlan(), ledger):
            out = model(x)
        gradient = torch.autograd.grad(out.sum(), x)[0]
        assert stream.position == 2
        return gradient

    plain = run()
    with apply(save_nothing(), model):
        assert torch.equal(run(), plain)
