"""`checkpoint` in its surroundings: views and in-place operations, hooks, threads, grad modes, autocast, devices,
tapes, and other regions inside and around it."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.recompute import KeptBytes, RngLedger, Stream, Tape, checkpoint, dropout, is_replaying, step
from tests.recompute_api.oracle import assert_same, by_torch, outcome, plainly

Call = Callable[..., Any]


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
