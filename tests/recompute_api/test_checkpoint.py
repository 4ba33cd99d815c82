"""`checkpoint` keeps the calling convention and the guarantees of torch's non-reentrant one, which is the oracle."""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.recompute import (
    KeptBytes,
    ReplayError,
    RngLedger,
    Stream,
    Tape,
    checkpoint,
    dropout,
    is_replaying,
    step,
)
from tests.recompute_api.oracle import Saved, assert_same, by_torch, outcome, plainly

Call = Callable[..., Any]


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.LayerNorm(8))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(4, 8, requires_grad=True)


def test_a_network_with_dropout(net: nn.Sequential, x: Tensor) -> None:
    assert_same(lambda call: call(net, call(net, x)).pow(2).sum(), [x, *net.parameters()])


def test_what_is_saved_is_the_input_alone(net: nn.Sequential, x: Tensor) -> None:
    saved = []
    for call in (checkpoint, by_torch):
        with Saved(list(net.parameters())) as counter:
            call(net, x)
        saved.append(counter.bytes)
    assert saved == [4 * 8 * 4, 4 * 8 * 4]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    mask: Tensor | None
    scale: float
    inner: list[Tensor] = field(default_factory=list)


@dataclass
class Result:
    value: Tensor
    extra: dict[str, Any]


class TestArguments:
    """Cases RC-03, AR-02, AR-04, AR-06 and their relatives."""

    def test_by_keyword(self, x: Tensor) -> None:
        y = torch.randn(4, 8, requires_grad=True)

        def fn(a: Tensor, *, extra: Tensor, power: int, note: str | None = None) -> Tensor:
            return (a * extra).sin().pow(power)

        assert_same(lambda call: call(fn, x, extra=y, power=3, note="n").sum(), [x, y])

    def test_only_by_keyword(self, x: Tensor) -> None:
        assert_same(lambda call: call(lambda *, a: a.exp().sin(), a=x).sum(), [x])

    def test_none_and_values(self, x: Tensor) -> None:
        def fn(a: Tensor, mask: None, past: None, n: int, name: str, flag: bool) -> tuple[Tensor, None, int]:
            return a.exp().sin() * n, past, n

        def loss(call: Call) -> Tensor:
            out, past, n = call(fn, x, None, None, 3, "relu", True)
            assert past is None and n == 3
            return out.sum()

        assert_same(loss, [x])

    @pytest.mark.parametrize("kind", ["list", "dict", "ordered", "named", "deep"])
    def test_nested(self, x: Tensor, kind: str) -> None:
        y = torch.randn(4, 8, requires_grad=True)
        values: dict[str, Any] = {
            "list": [x, y], "dict": {"a": x, "b": y}, "ordered": OrderedDict(a=x, b=y), "named": Pair(x, y),
            "deep": [{"k": (x, [y, None, 1])}],
        }  # fmt: skip

        def fn(value: Any) -> Any:
            tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]
            assert type(value) is type(values[kind])
            return {"out": [(tensors[0] * tensors[1]).sin()], "n": 2}

        assert_same(lambda call: call(fn, values[kind])["out"][0].sum(), [x, y])

    def test_dataclasses_in_and_out(self, x: Tensor) -> None:
        y, z = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

        def fn(batch: Batch) -> Result:
            assert batch.mask is None and batch.scale == 2.0
            return Result((batch.tokens * batch.inner[0]).sin() * batch.scale, {"twice": [batch.inner[1].exp().cos()]})

        def loss(call: Call) -> Tensor:
            result = call(fn, Batch(x * 1, None, 2.0, [y * 2, z]))
            return (result.value * result.extra["twice"][0]).sum()

        assert_same(loss, [x, y, z])

    def test_a_dataclass_is_held_as_its_tensors(self, x: Tensor) -> None:
        """Its tensors are kept as any input is: an in-place change after the forward is an error, not a wrong
        gradient."""
        hidden = x.detach() * 1
        out = checkpoint(lambda b: (b.tokens * x).sin(), Batch(hidden, None, 1.0))
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            out.sum().backward()

    def test_inputs_that_need_no_gradient(self, net: nn.Sequential) -> None:
        """AR-01: parameters of a region whose inputs are constants get gradients."""
        constant = torch.randn(4, 8)
        assert_same(lambda call: call(net, constant).pow(2).sum(), list(net.parameters()))

    def test_outputs_of_other_types(self, x: Tensor) -> None:
        """AR-06: a mask and ids come out beside the values."""
        def fn(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return a.sin().exp(), a > 0, a.argsort()

        def loss(call: Call) -> Tensor:
            value, mask, order = call(fn, x)
            assert mask.dtype == torch.bool and order.dtype == torch.int64
            return (value.gather(1, order) * mask).sum()

        assert_same(loss, [x])

    def test_integer_and_boolean_inputs(self) -> None:
        table = torch.randn(5, 8, requires_grad=True)
        ids, mask = torch.tensor([0, 3, 3]), torch.tensor([True, False, True])
        assert_same(lambda call: call(lambda t, i, m: t[i].sin().exp()[m], table, ids, mask).sum(), [table])

    def test_one_tensor_twice(self, x: Tensor) -> None:
        assert_same(lambda call: call(lambda a, b: (a * b).sin(), x, x).sum(), [x])


class TestUse:
    def test_an_output_used_twice_and_one_unused(self, x: Tensor) -> None:
        def fn(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return a.sin().exp(), a.cos().exp(), a.tanh().exp()

        def loss(call: Call) -> Tensor:
            first, second, _ = call(fn, x)
            return (first * first).sum() + (first * second).sin().sum()

        assert_same(loss, [x])

    def test_views_as_inputs_and_outputs(self, x: Tensor) -> None:
        def fn(a: Tensor) -> tuple[Tensor, ...]:
            return a.sin().chunk(2, dim=-1)

        def loss(call: Call) -> Tensor:
            a, b = call(fn, x.t()[2:6].contiguous().view(4, 4).transpose(0, 1))
            return (a.t() @ b).exp().sum()

        assert_same(loss, [x])

    def test_complex_views(self, x: Tensor) -> None:
        def fn(a: Tensor) -> Tensor:
            z = torch.view_as_complex(a.sin().view(4, 4, 2))
            return torch.view_as_real(z * z.conj() + z.exp()).flatten(1)

        assert_same(lambda call: call(fn, call(fn, x)).abs().sum(), [x])

    def test_expanded_and_empty(self, x: Tensor) -> None:
        def fn(a: Tensor, empty: Tensor, point: Tensor) -> Tensor:
            return (a[:1].sin().expand(4, 8).exp() * point.exp()).sum() + empty.sin().sum()

        point = torch.tensor(0.5, requires_grad=True)
        assert_same(lambda call: call(fn, x, torch.empty(0, 8), point), [x, point])

    def test_in_place_inside(self, x: Tensor) -> None:
        assert_same(lambda call: call(lambda a: F.relu(a.sin().add_(1), inplace=True).exp(), x).sum(), [x])

    def test_in_place_on_the_result(self, x: Tensor) -> None:
        assert_same(lambda call: call(lambda a: a.sin() + a.cos().exp(), x).mul_(2).sum(), [x])

    def test_in_place_on_the_input_is_refused(self, x: Tensor) -> None:
        """AR-08: a region that writes into its own input says so."""
        with pytest.raises(RuntimeError, match=r"modified its own input in place.*out-of-place"):
            checkpoint(lambda a: a.add_(1).sin(), x * 1)

    def test_closures_over_parameters_and_tensors(self, x: Tensor) -> None:
        weight, scale = nn.Parameter(torch.randn(8, 8)), torch.randn(8)
        assert_same(lambda call: call(lambda a: (a @ weight).sin() * scale, x).sum(), [x, weight])

    def test_a_function_that_takes_gradients_itself(self, x: Tensor) -> None:
        """A force field: the region differentiates inside, and is differentiated."""
        def fn(a: Tensor) -> Tensor:
            energy = a.sin().pow(3).sum()
            (force,) = torch.autograd.grad(energy, a, create_graph=True)
            return (force * a).exp()

        assert_same(lambda call: call(fn, x.exp()).sum(), [x])

    def test_second_backward_and_double_backward(self, x: Tensor) -> None:
        plain = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)[0]
        out = checkpoint(lambda a: a.sin().exp(), x).sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        (again,) = torch.autograd.grad(out, x, create_graph=True)
        assert torch.equal(first, plain) and torch.equal(again, plain)
        twice = torch.autograd.grad(again.pow(2).sum(), x)[0]
        assert torch.equal(twice, torch.autograd.grad(plain.pow(2).sum(), x)[0])

    def test_tensor_and_module_hooks_run_once(self, net: nn.Sequential, x: Tensor) -> None:
        """Hooks on what the forward returned fire once; a forward hook inside fires in the replay as well, and can
        tell."""
        seen: list[str] = []
        net[0].register_forward_hook(lambda *_: seen.append("replay" if is_replaying() else "forward"))
        net[0].register_full_backward_hook(lambda *_: seen.append("backward"))
        out = checkpoint(net, x)
        out.register_hook(lambda g: seen.append("tensor") or g * 2)
        out.sum().backward()
        assert seen == ["forward", "tensor", "replay", "backward"]

    def test_worker_threads(self, net: nn.Sequential, x: Tensor) -> None:
        net.eval()  # the default generator is one for all threads
        leaves = [x, *net.parameters()]
        plain = outcome(lambda call: call(net, x).sum(), leaves, plainly)
        results: list[list[Tensor]] = []

        def work() -> None:
            results.append(list(torch.autograd.grad(checkpoint(net, x).sum(), leaves)))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 3
        for gradients in results:
            assert all(torch.equal(a, b) for a, b in zip(gradients, plain.gradients, strict=True) if b is not None)

    def test_backward_in_another_thread_than_forward(self, net: nn.Sequential, x: Tensor) -> None:
        plain = outcome(lambda call: call(net, x).sum(), [x], plainly)
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = checkpoint(net, x).sum()
        x.grad = None
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert torch.equal(x.grad, plain.gradients[0])  # type: ignore[arg-type]


class TestSurroundings:
    def test_without_gradients(self, net: nn.Sequential, x: Tensor) -> None:
        calls = []

        def context_fn() -> Any:
            calls.append(1)
            return torch.enable_grad(), torch.enable_grad()

        with torch.no_grad():
            out = checkpoint(net, x, context_fn=context_fn)
        assert not out.requires_grad
        with torch.inference_mode():
            assert checkpoint(net, x).is_inference()

    @pytest.mark.parametrize("inside", [True, False])
    def test_autocast(self, inside: bool) -> None:
        """RC-07: a tied weight is used outside and inside the region, so autocast's cache is warm in the forward."""
        torch.manual_seed(5)
        weight = nn.Parameter(torch.randn(8, 8))
        x = torch.randn(4, 8, requires_grad=True)

        def loss(call: Call) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = F.linear(x, weight)
                out = call(lambda a: F.linear(F.linear(a, weight).relu(), weight).float().exp(), h).mean()
                if inside:
                    out.backward(retain_graph=True)
            return out

        for _ in range(2):
            assert_same(loss, [x, weight])

    def test_default_device(self, x: Tensor) -> None:
        """The replay makes its tensors where the forward made them."""
        def fn(a: Tensor) -> Tensor:
            return (a + torch.ones(8)).sin()  # would be on the meta device after the block

        with torch.device("cpu"):
            out = checkpoint(fn, x)
        with torch.device("meta"):
            out.backward(torch.ones(4, 8, device="cpu"))
        assert torch.equal(x.grad, (x + 1).cos().detach())  # type: ignore[arg-type]

    def test_inside_an_open_tape_it_is_a_step(self, x: Tensor) -> None:
        account = KeptBytes()
        with Tape(ChunkPlan(), account=account) as tape:
            a = x * 2
            loss = checkpoint(lambda t: t.sin().exp(), a).sum()
        names = {"checkpoint(TestSurroundings.test_inside_an_open_tape_it_is_a_step.<locals>.<lambda>)": 128}
        assert tape.report() == names
        with Tape(ChunkPlan(), account=account) as tape:
            other = checkpoint(lambda t: t.sin().exp(), a, preserve_rng_state=False).sum()
        assert list(tape.report().values()) == [128]
        (loss + other).backward()
        assert tape.kept_now() == {}

    def test_streams_of_the_open_tape_are_reproduced(self, x: Tensor) -> None:
        ledger = RngLedger()
        stream = ledger.register(Stream("tensor", 5))

        def run(call: Call) -> tuple[Tensor, int]:
            stream.position = 0
            with Tape(ChunkPlan(), ledger):
                out = call(lambda a: dropout(a.sin(), 0.5, stream).exp(), x)
                dropout(x, 0.5, stream)
            return torch.autograd.grad(out.sum(), x)[0], stream.position

        (plain, end), (ours, position) = run(plainly), run(checkpoint)
        assert torch.equal(plain, ours) and position == end == 2


class TestNesting:
    """AR-10."""

    def test_full_layer_with_selective_attention_inside(self, x: Tensor) -> None:
        calls: list[str] = []
        weight = nn.Parameter(torch.randn(8, 8))

        def attention(a: Tensor) -> Tensor:
            calls.append("attention")
            return (a @ a.t()).softmax(-1) @ a

        def layer(call: Call, a: Tensor) -> Tensor:
            calls.append("layer")
            return a + call(attention, a @ weight).sin()

        plain = outcome(lambda call: call(layer, call, x).exp().sum(), [x, weight], plainly)
        for call in (by_torch, checkpoint):
            calls.clear()
            outcome(lambda c: c(layer, c, x).exp().sum(), [x, weight], call).assert_equal(plain)
            assert calls.count("attention") == 3 and calls.count("layer") == 2

    def test_three_deep(self, net: nn.Sequential, x: Tensor) -> None:
        def deep(call: Call, depth: int, a: Tensor) -> Tensor:
            return net(a) if depth == 0 else call(deep, call, depth - 1, a) + a

        assert_same(lambda call: call(deep, call, 2, x).sin().sum(), [x, *net.parameters()])

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_torch_inside_ours(self, net: nn.Sequential, x: Tensor, reentrant: bool) -> None:
        def theirs(fn: Any, a: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(fn, a, use_reentrant=reentrant)

        def loss(call: Call, inner: Call) -> Tensor:
            return call(lambda a: inner(net, a).sin() + a, x * 1).sum()

        plain = outcome(lambda _: loss(plainly, plainly), [x, *net.parameters()], None)
        outcome(lambda _: loss(checkpoint, theirs), [x, *net.parameters()], None).assert_equal(plain)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_ours_inside_torch(self, net: nn.Sequential, x: Tensor, reentrant: bool) -> None:
        def theirs(fn: Any, a: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(fn, a, use_reentrant=reentrant)

        def loss(outer: Call, call: Call) -> Tensor:
            return outer(lambda a: call(net, a).sin() + a, x * 1).sum()

        plain = outcome(lambda _: loss(plainly, plainly), [x, *net.parameters()], None)
        outcome(lambda _: loss(theirs, checkpoint), [x, *net.parameters()], None).assert_equal(plain)

    def test_inside_a_dropped_step(self, net: nn.Sequential, x: Tensor) -> None:
        dropped = ChunkPlan({"": SaveSet({}, Decision("keep", "replay"))})

        def loss(plan: ChunkPlan) -> Tensor:
            with Tape(plan):
                return step("outer", lambda a: checkpoint(net, a.sin()).exp() + a, x).sum()

        plain = outcome(lambda _: loss(ChunkPlan()), [x, *net.parameters()], None)
        outcome(lambda _: loss(dropped), [x, *net.parameters()], None).assert_equal(plain)

    def test_save_on_cpu_around(self, net: nn.Sequential, x: Tensor) -> None:
        def loss(call: Call) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return call(net, call(net, x)).sin().sum()

        assert_same(loss, [x, *net.parameters()])


class TestContexts:
    def test_both_are_entered(self, x: Tensor) -> None:
        seen: list[str] = []

        @contextmanager
        def context(name: str) -> Any:
            seen.append(f"{name} in")
            yield
            seen.append(f"{name} out")

        out = checkpoint(lambda a: a.sin().exp(), x, context_fn=lambda: (context("forward"), context("replay")))
        assert seen == ["forward in", "forward out"]
        out.sum().backward()
        assert seen[2] == "replay in"

    @pytest.mark.parametrize("form", ["policy", "list"])
    def test_selective_contexts_save_what_they_say(self, x: Tensor, form: str) -> None:
        weight = nn.Parameter(torch.randn(8, 8))
        counts: list[int] = []

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

        chosen = policy if form == "policy" else [torch.ops.aten.mm.default]

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(chosen)  # type: ignore[arg-type]

        def fn(a: Tensor) -> Tensor:
            return ((a.sin() @ weight).exp() @ weight).cos()

        def loss(call: Call) -> Tensor:
            return (call(fn, x, context_fn=contexts) if call is not plainly else fn(x)).sum()

        plain = outcome(loss, [x, weight], plainly)
        for call in (by_torch, checkpoint):
            with Products() as products:
                outcome(loss, [x, weight], call).assert_equal(plain)
            counts.append(products.count)
        assert counts == [6, 6]  # 2 in forward, 4 in backward, none replayed
        with Products() as products:
            outcome(lambda call: call(fn, x).sum(), [x, weight], checkpoint)
        assert products.count == 8

    def test_selective_contexts_refuse_a_second_backward(self, x: Tensor) -> None:
        weight = nn.Parameter(torch.randn(8, 8))
        contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])  # noqa: E731
        loss = checkpoint(lambda a: (a.sin() @ weight).exp().cos(), x, context_fn=contexts).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(ReplayError, match="extra time"):
            loss.backward()


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products that really run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class TestOptions:
    def test_early_stop(self, x: Tensor) -> None:
        calls: list[str] = []

        def fn(a: Tensor) -> Tensor:
            out = a.sin().exp()
            calls.append("end")
            return out + 1

        for early, count in ((True, 1), (False, 2)):
            calls.clear()
            checkpoint(fn, x, early_stop=early).sum().backward()
            assert len(calls) == count

    def test_random_state_is_not_preserved_if_told_so(self, x: Tensor) -> None:
        def region(a: Tensor) -> Tensor:
            return F.dropout(a.sin(), 0.5)

        def run(call: Call, **options: Any) -> tuple[Tensor, Tensor]:
            torch.manual_seed(1)
            gradient = torch.autograd.grad(call(region, x, **options).sum(), x)[0]
            return gradient, torch.get_rng_state()

        plain, kept = run(plainly), run(checkpoint)
        ours, theirs = run(checkpoint, preserve_rng_state=False), run(by_torch, preserve_rng_state=False)
        assert torch.equal(plain[0], kept[0]) and torch.equal(plain[1], kept[1])
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert not torch.equal(ours[0], plain[0]) and not torch.equal(ours[1], plain[1])

    @pytest.mark.parametrize("check", ["default", "none", "function"])
    def test_determinism_check(self, x: Tensor, check: str) -> None:
        """A region whose saved tensor changes its shape between forward and replay."""
        rows = [4]

        def fn(a: Tensor) -> Tensor:
            return (a[: rows[0]] * 2).sin().sum()

        how: Any = (lambda t: t.dtype) if check == "function" else check
        loss = checkpoint(fn, x, determinism_check=how)
        rows[0] = 3
        if check == "default":
            with pytest.raises(ReplayError, match=r"shape \(3, 8\).*in forward it had shape \(4, 8\)"):
                loss.backward()
            return
        with pytest.raises(RuntimeError) as error:
            loss.backward()  # autograd's own complaint about the gradient's shape: the check let it pass
        assert not isinstance(error.value, ReplayError)

    def test_determinism_check_by_a_function(self, x: Tensor) -> None:
        factor = [2.0]
        loss = checkpoint(lambda a: (a * factor[0]).sin().sum(), x, determinism_check=lambda t: t.sum().item())
        factor[0] = 3.0
        with pytest.raises(ReplayError, match="determinism_check gives"):
            loss.backward()

    def test_debug_lists_the_operations(self, x: Tensor) -> None:
        form = ["gelu"]

        def fn(a: Tensor) -> Tensor:
            return (F.gelu(a * 2) if form[0] == "gelu" else a[:3] * 2).sin()

        loss = checkpoint(fn, x, debug=True).sum()
        form[0] = "other"
        with pytest.raises(ReplayError) as error:
            loss.backward()
        text = str(error.value)
        assert "checkpoint(TestOptions.test_debug_lists_the_operations.<locals>.fn)" in text
        assert "aten.gelu.default(float32[4, 8])" in text and "aten.slice.Tensor(float32[4, 8], 0, 0, 3)" in text

    def test_refusals(self, x: Tensor) -> None:
        with pytest.raises(ValueError, match="use_reentrant=True"):
            checkpoint(torch.sin, x, use_reentrant=True)
        with pytest.raises(ValueError, match="determinism_check"):
            checkpoint(torch.sin, x, determinism_check="strict")
        with pytest.raises(ValueError, match="debug"):
            checkpoint(torch.sin, x, debug=True, context_fn=lambda: (torch.enable_grad(), torch.enable_grad()))
        assert torch.equal(checkpoint(torch.sin, x, use_reentrant=False), x.sin())


class TestErrors:
    def test_data_dependent_shape(self) -> None:
        """RC-09: routing changed between forward and replay; the message names the region and both shapes."""
        threshold = torch.zeros(())
        x = torch.arange(-3.0, 5.0, requires_grad=True)
        loss = checkpoint(lambda a: a[a > threshold].exp().sin().sum(), x)
        threshold.fill_(2.5)
        with pytest.raises(ReplayError, match=r"checkpoint\(.*shape \(2,\).*in forward it had shape \(4,\)"):
            loss.backward()

    def test_an_exception_in_the_replay_names_the_region(self, x: Tensor) -> None:
        def fn(a: Tensor) -> Tensor:
            if is_replaying():
                raise KeyError("gone")
            return a.sin().exp()

        torch.manual_seed(2)
        loss = checkpoint(fn, x).sum()
        state = torch.get_rng_state()
        with pytest.raises(ReplayError, match=r"checkpoint\(TestErrors.*fn\).*KeyError: 'gone'"):
            loss.backward()
        assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)

    def test_an_exception_in_the_forward_leaves_nothing(self, x: Tensor) -> None:
        def fn(a: Tensor) -> Tensor:
            a.sin().exp()
            raise KeyError("gone")

        with pytest.raises(KeyError):
            checkpoint(fn, x)
        assert_same(lambda call: call(lambda a: a.sin().exp(), x).sum(), [x])

    def test_transforms_are_refused(self, x: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"torch\.func"):
            torch.func.vmap(lambda row: checkpoint(torch.sin, row))(x)

    def test_fully_masked_rows_have_no_nan(self) -> None:
        """VC-10: the user's own remedy for a row without any key survives the replay."""
        scores = torch.randn(3, 4, requires_grad=True)
        mask = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])

        def attention(s: Tensor, keep: Tensor) -> Tensor:
            return s.masked_fill(~keep, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~keep, 0.0)

        assert_same(lambda call: call(attention, scores, mask).pow(2).sum(), [scores])
        assert torch.isfinite(scores.grad).all() and (scores.grad[1] == 0).all()  # type: ignore[index,arg-type]
