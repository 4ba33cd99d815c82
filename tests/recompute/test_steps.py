"""What a step may take and give: any arguments, any outputs, any views; equal to the bit and replayed once."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.mesh.process_mesh import single_axis
from megackpt.plan import REPLAY, ChunkPlan, Decision, SaveSet
from megackpt.recompute import KeptBytes, RngLedger, Stream, Tape, dropout, is_replaying, step
from megackpt.recompute.tiers import HostTier
from megackpt.tensor.linear import ColumnLinear
from tests.recompute.harness import (
    DROP_ALL,
    Calls,
    assert_same,
    decisions_for,
    drop,
    gradients,
    numbers,
    plan,
)
from tests.recompute.probes import Census, Products
from tests.tensor.probes import tensor_parallel

X, W = numbers(6, 8), numbers(8, 8, seed=2)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


def tuple_of_two(x: Tensor, w: Tensor) -> Tensor:
    a, b = step("a", lambda x: (x.sin(), x.exp()), x)
    return step("b", lambda a, b: a * b, a, b) @ w + step("c", lambda b: b * b, b)


def dict_of_mixed(x: Tensor, w: Tensor) -> Tensor:
    out = step("a", lambda x: {"y": (x.tanh(), None), "count": 3, "deep": [x.cos()]}, x)
    assert out["count"] == 3 and out["y"][1] is None
    return step("b", lambda o, scale: o["y"][0] * o["deep"][0] * scale, out, scale=out["count"]) @ w


def named_tuple(x: Tensor, w: Tensor) -> Tensor:
    pair = step("a", lambda x: Pair(x.sigmoid(), None), x)
    assert isinstance(pair, Pair)
    return step("b", lambda p: p.first * p.first, pair) @ w


def keyword_tensor(x: Tensor, w: Tensor) -> Tensor:
    """RC-03: a differentiable tensor passed by keyword gets its gradient."""
    y = step("a", lambda x, *, extra, mode: x.sin() * extra if mode == "times" else x, x, extra=w[:6], mode="times")
    return step("b", lambda *, y: y * y, y=y)


def none_argument(x: Tensor, w: Tensor) -> Tensor:
    """AR-02: attention_mask=None, past=None."""
    y = step("a", lambda x, mask, past=None: x.exp() if mask is None and past is None else x, x, None, past=None)
    return step("b", lambda y, w, bias: F.linear(y, w, bias), y, w, None)


def integer_and_bool_outputs(x: Tensor, w: Tensor) -> Tensor:
    """AR-06: outputs that have no gradient beside one that has."""
    y, mask, ids = step("a", lambda x: (x.sin(), x > 0, x.argmax(-1)), x)
    assert mask.dtype == torch.bool and ids.dtype == torch.int64
    z = step("b", lambda y, mask: y.masked_fill(mask, 2.0) * y, y, mask)
    return step("c", lambda w, ids: F.embedding(ids, w), w, ids) * z


def chunks(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = step("a", lambda x, w: (x @ w.repeat(1, 3)).chunk(3, -1), x, w)
    return step("b", lambda q, k, v: torch.softmax(q @ k.t(), -1) @ v, q, k, v)


def views_outside(x: Tensor, w: Tensor) -> Tensor:
    """The consumer sees slices, a transpose, an expansion of the output, each with its strides and offset."""
    y = step("a", lambda x: x.exp(), x)
    z = step("b", lambda s, t: s @ t, y[1:4, ::2], y[2:, 1::2].t())
    return z.sum() + step("c", lambda e, w: (e * w).sin(), y[3, 2:3].expand(8, 8), w)


def view_with_offset_returned(x: Tensor, w: Tensor) -> Tensor:
    y = step("a", lambda x: (x.exp() + 1).t()[2:7, 1:], x)  # an output that is a view into its own storage
    return step("b", lambda y, w: w[:5, :5].exp() * y, y, w)


def scalar_and_empty(x: Tensor, w: Tensor) -> Tensor:
    total, nothing = step("a", lambda x: (x.exp().sum(), x[:0].exp()), x)
    return step("b", lambda t, n, w: t * t * w.sin() + n.sum(), total, nothing, w)


def complex_output(x: Tensor, w: Tensor) -> Tensor:
    z = step("a", lambda x, w: torch.complex(x.sin(), w[:6].cos()), x, w)
    y = step("b", lambda z: z * z.conj() + z, z)  # saves a lazy conjugate
    return step("c", lambda v: v * v, torch.view_as_real(y))  # saves another type of the same storage


def negated_view(x: Tensor, w: Tensor) -> Tensor:
    z = step("a", lambda x, w: torch.complex(x.sin(), w[:6].cos()), x, w)
    return step("b", lambda i: i * i.exp(), z.conj().imag)  # a lazily negated view


def input_returned(x: Tensor, w: Tensor) -> Tensor:
    y, same = step("a", lambda x: (x.sin(), x), x)
    assert same is x
    return step("b", lambda y, x, w: (y * x) @ w, y, same, w)


def view_of_input_returned(x: Tensor, w: Tensor) -> Tensor:
    y = step("a", lambda x: x.exp(), x)
    z = step("b", lambda y: y.t()[1:], y)
    return step("c", lambda z, w: w[:7, :6].sin() * z, z, w)


def parameter_returned(x: Tensor, w: Tensor) -> Tensor:
    weight = torch.nn.Parameter(torch.ones(8, 8))
    same, y = step("a", lambda x: (weight, x.exp()), x)
    assert same is weight
    return step("b", lambda y, same, w: y @ same * (y @ w), y, same, w)


def nested_argument_saved(x: Tensor, w: Tensor) -> Tensor:
    y = step("a", lambda x: x.exp(), x)
    return step("b", lambda pack, w: pack["ys"][0].sin() @ w, {"ys": [y, None]}, w)


def two_outputs_of_one_storage(x: Tensor, w: Tensor) -> Tensor:
    whole, part = step("a", lambda x: (lambda y: (y, y[1:3]))(x.exp()), x)
    return step("b", lambda a, p, w: (a @ w).sin().sum() + (p * p).sum(), whole, part, w)


def random_inside(x: Tensor, w: Tensor) -> Tensor:
    y = step("a", lambda x: F.dropout(x, 0.4), x)
    z = step("b", lambda y, w: F.dropout(torch.rand_like(y) * y @ w, 0.3), y, w)
    return step("c", lambda z: z * z, z) * torch.rand(())


BODIES = [
    tuple_of_two,
    dict_of_mixed,
    named_tuple,
    keyword_tensor,
    none_argument,
    integer_and_bool_outputs,
    chunks,
    views_outside,
    view_with_offset_returned,
    scalar_and_empty,
    complex_output,
    negated_view,
    input_returned,
    view_of_input_returned,
    parameter_returned,
    nested_argument_saved,
    two_outputs_of_one_storage,
    random_inside,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_equal_under_every_choice(body: Any) -> None:
    assert_same(body, [X, W], decisions_for("a", "b", "c"))
    with HostTier() as tier:
        away = plan(Decision("offload_host", "offload_host", "replay"))
        assert_same(body, [X, W], away, tiers={"offload_host": tier})


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_no_step_runs_a_third_time(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward once, replay at most once, whoever asks for what and however often."""
    calls, real = Calls(), step

    def counting(name: str, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return real(name, calls(name, fn), *args, **kwargs)

    monkeypatch.setattr("tests.recompute.test_steps.step", counting)
    gradients(body, [X, W], DROP_ALL)
    assert set(calls.count.values()) <= {1, 2} and 2 in calls.count.values()


def test_chunks_share_one_rebuilt_storage() -> None:
    """q, k, v of one chunked output: the product runs once again and one storage is rebuilt, not three."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with Tape(drop("a")):
        result = chunks(x, w)
    seen: list[int] = []
    with Products() as products, Census() as census:
        grads = torch.autograd.grad(result.sum(), (x, w), retain_graph=True)
        seen.append(census.bytes - sum(g.nbytes for g in grads))
    assert products.seen["mm", (6, 8, 24)] == 1
    assert seen == [0]  # and the rebuilt storage is gone when the backward has ended, though the graph is retained


def test_a_tensor_of_another_type_over_a_dropped_storage_is_kept() -> None:
    """view_as_real sees the storage through another type: it cannot be rebuilt by a view, so it stays in memory."""
    z = torch.complex(X, X).requires_grad_()
    kept = {}
    for name, seen in (("same", lambda y: y), ("real", torch.view_as_real)):
        with Tape(drop("a"), account=KeptBytes()) as tape:
            y = step("a", lambda z: z.exp(), z)
            result = step("b", lambda v: v * v, seen(y))
        kept[name] = tape.report()
        del y, result
    assert kept["same"] == {"a": X.numel() * 8}  # the input of the dropped step
    assert kept["real"] == {"a": X.numel() * 8, "b": X.numel() * 8}


def test_a_linear_is_never_run_again_for_its_input_and_weight() -> None:
    x, w = X.clone().requires_grad_(), torch.nn.Parameter(W)
    with Tape(drop("linear")):
        y = step("linear", F.linear, x, w)
        result = step("after", torch.exp, y)
        del y
    with Products() as products:
        result.sum().backward()
    assert sum(products.seen.values()) == 2  # the two gradients


def test_a_step_is_not_run_again_for_what_it_was_given() -> None:
    """An output that is the input, or a view of it, stays what it is: kept, or rebuilt by whoever made it."""
    calls = Calls()
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL):
        y = step("make", calls("make", lambda x: x + 1.0), x)
        same, view = step("pass", calls("pass", lambda x, y: (x, y.t()[1:])), x, y)
        result = step("use", calls("use", lambda a, b: a.sin().sum() + b.exp().sin().sum()), same, view)
        loss = result + (same * same).sum()
        del y, same, view, result
    loss.backward()
    assert calls.count == {"make": 2, "pass": 1, "use": 2}


def test_frozen_and_missing_gradients() -> None:
    """AR-01: inputs without gradient, frozen parameters, a parameter that nothing uses."""
    frozen = torch.nn.Parameter(W, requires_grad=False)
    trained = torch.nn.Parameter(W.clone())
    unused = torch.nn.Parameter(W.clone())

    def run(chunk: Any) -> list[Tensor]:
        trained.grad = None
        with Tape(chunk) if chunk is not None else torch.enable_grad():
            y = step("a", lambda x: F.linear(x, frozen).sin(), X)  # no graph at all
            z = step("b", lambda y: F.linear(y, trained).exp(), y)
            result = step("c", lambda z: F.linear(z, frozen) * z, z)
        result.sum().backward()
        assert unused.grad is None and frozen.grad is None and trained.grad is not None
        return [trained.grad]

    plain = run(None)
    for name, chunk in decisions_for("a", "b", "c").items():
        assert torch.equal(run(chunk)[0], plain[0]), name


def test_frozen_linear_of_our_own_in_an_outer_step() -> None:
    """A linear without any gradient packs nothing, so its product must not be taken for unwanted."""
    linear = ColumnLinear(tensor_parallel(single_axis(), dtype=torch.float32), 8, 8, name="a", std=0.3)
    linear.requires_grad_(False)
    assert_same(lambda w: step("a", lambda x: linear(x) * w, X.view(6, 1, 8)), [W[0]], drop("a"))


def test_tied_weight_inside_and_outside() -> None:
    """RC-07 without autocast: one weight in two dropped steps and in plain code."""

    def tied(x: Tensor, w: Tensor) -> Tensor:
        weight = torch.nn.Parameter(w.detach())  # one leaf for three uses
        y = step("a", lambda x: F.linear(x, weight).sin(), x)
        z = step("b", lambda y: F.linear(y.exp(), weight), y)
        result = F.linear(z, weight) * z
        (grad,) = torch.autograd.grad(result.sum(), weight, retain_graph=True)
        return result + grad.sum()

    assert_same(tied, [X, W], decisions_for("a", "b"))


def test_passes_through_without_a_graph() -> None:
    """In no_grad, in inference mode and without a tape a step is a plain call, and leaves nothing behind."""
    x = X.clone().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with Tape(DROP_ALL, account=KeptBytes()) as tape, context:
            assert torch.equal(step("a", torch.exp, x), X.exp())
        assert tape.saved_bytes() == 0
    assert torch.equal(step("a", torch.exp, x).detach(), X.exp())


def test_inference_tensors_as_inputs() -> None:
    """They have no version counter; torch itself refuses to save them, not to read them."""
    with torch.inference_mode():
        mask = torch.ones(6, 8)
    assert_same(lambda w: step("a", lambda m, w: (m.sum() * 0 + w).exp(), mask.clone(), w), [W])
    assert_same(lambda w: step("a", lambda m, w: w[: m.shape[0]].exp(), mask, w), [W])


def test_is_replaying() -> None:
    """True in a replay only; a metric counted under `if not is_replaying()` counts once."""
    seen: list[bool] = []

    def body(x: Tensor) -> Tensor:
        seen.append(is_replaying())
        return x.exp()

    assert not is_replaying()
    with Tape(drop("outer")):
        x = X.clone().requires_grad_()
        result = step("outer", lambda x: step("inner", body, x).sin(), x)
    result.sum().backward()
    assert seen == [False, True] and not is_replaying()


def test_kept_internals_hold_their_output() -> None:
    """Dropping an output that a kept internal holds anyway frees nothing: it stays, and is neither rebuilt nor put
    into a tier."""
    calls = Calls()
    for output in ("replay", "offload_host"):
        chunk = plan(a=Decision(output))
        with HostTier() as tier, Tape(chunk, tiers={"offload_host": tier}, account=KeptBytes()) as tape:
            x = X.clone().requires_grad_()
            y = step("a", calls("a", torch.exp), x)  # saves its result
            result = step("b", torch.sin, y)
            del y
        assert tape.report() == {"a": X.nbytes}  # the output; nothing needs the input
        result.sum().backward()
        assert torch.equal(x.grad, X.exp() * X.exp().cos())
    assert calls.count == {"a": 2}


def sparse_argument(x: Tensor, w: Tensor) -> Tensor:
    mixing = torch.eye(6).roll(1, 0).to_sparse()
    y = step("a", lambda m, x: torch.sparse.mm(m, x).sin(), mixing, x)
    pruned = step("b", lambda w: w.to_sparse(), w)  # an output without a storage of its own
    return step("c", lambda p, y: torch.sparse.mm(p, y.t()) * 2.0, pruned, y)


def test_sparse_tensors_are_kept() -> None:
    """They have no single storage to find them again by; everything around them is dropped as ever."""
    assert_same(sparse_argument, [X, W], decisions_for("a", "b", "c"))
    with HostTier() as tier:
        away = plan(Decision("offload_host", "offload_host"))
        assert_same(sparse_argument, [X, W], away, tiers={"offload_host": tier})


def test_what_the_report_leaves_out() -> None:
    """Views of parameters that are passed as arguments, and what a branch saved that nobody uses."""
    x, w = X.clone().requires_grad_(), torch.nn.Parameter(W)
    with Tape(drop("a"), account=KeptBytes()) as tape:
        y = step("a", lambda x, w: F.linear(x, w).sin(), x, w[:4])
        result = step("b", torch.exp, y)
        unused = step("dead", lambda x: (x * 2.0).sin().exp(), x)
        del y, unused
    assert tape.report() == {"a": X.nbytes, "b": 6 * 4 * 4}
    result.sum().backward()
    assert tape.kept_now() == {}


def test_a_kept_mask_stays_when_the_internals_of_its_step_go() -> None:
    """The residual is not run again for its mask, and nothing holds the product that went into it."""
    calls: list[str] = []
    stream = Stream("s", 3)
    x = torch.randn(5, 7, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        calls.append("product")
        return x * 3.0

    def residual(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append("residual")
        return x + dropout(y, 0.5, stream)

    plan = ChunkPlan({"": SaveSet({"residual": Decision(internals=REPLAY), "product": Decision(output=REPLAY)})})
    account = KeptBytes()
    with Tape(plan, RngLedger(defaults=False), account=account):
        y = step("residual", residual, x, step("product", product, x))
    assert account.live == 5 * 7
    y.sum().backward()
    assert calls == ["product", "residual"]
