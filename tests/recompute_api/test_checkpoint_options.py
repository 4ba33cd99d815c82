"""The options of `checkpoint`, and what it says when something goes wrong."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from megackpt.recompute import ReplayError, checkpoint, is_replaying
from tests.recompute_api.oracle import assert_same, by_torch, outcome, plainly

Call = Callable[..., Any]


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
