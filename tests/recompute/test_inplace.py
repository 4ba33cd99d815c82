"""In-place changes: right gradients or an error that names the cause, never silence.

Saved-tensor hooks switch autograd's own check off (with any hook installed a changed saved tensor gives a wrong
gradient without an error), so the engine checks versions itself.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.plan import ChunkPlan, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import KeptBytes, ReplayError, Tape, at, step
from tests.recompute.harness import DROP_ALL, assert_same, decisions_for, drop, numbers, plan

X, W = numbers(6, 8), numbers(8, 8, seed=2)


def test_hooks_do_hide_it_from_autograd() -> None:
    """The trap itself, so that a torch without it is noticed."""
    x = torch.full((), 2.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = x * 1.0
        z = y * y
    with torch.no_grad():
        y.fill_(6.0)
    z.backward()
    assert x.grad == 12.0  # not 4


def test_output_changed_after_its_step_falls_back_to_kept() -> None:
    """The change comes before anyone saves the output: what is saved is the changed tensor, so it must stay."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = step("a", lambda x: x @ torch.eye(8), x)
        y.mul_(2.0)
        z = step("b", lambda y, w: (y @ w).sin(), y, w)
        y_part = step("c", lambda x: x + 1.0, x)
        y_part[2:4].add_(1.0)
        return step("d", lambda z, p: z * p, z, y_part)

    assert_same(body, [X, W], decisions_for("a", "b", "c", "d"))
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with Tape(drop("a"), account=KeptBytes()) as tape:
        y = step("a", lambda x: x + 1.0, x)
        y.mul_(2.0)
        result = step("b", lambda y: y.sin(), y)
        del y
    assert tape.report() == {"b": X.nbytes}  # kept by its consumer; nobody needs step a any more
    assert result.requires_grad and w.grad is None


def test_view_of_output_changed_after_its_step() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y = step("a", lambda x: x + 0.0, x)
        y.t()[1:3].mul_(3.0)
        return step("b", lambda y, w: (y @ w).exp(), y, w)

    assert_same(body, [X, W], decisions_for("a", "b"))


@pytest.mark.parametrize("chunk", [plan(), DROP_ALL, drop("a"), drop("b")], ids=["kept", "all", "a", "b"])
def test_changed_after_it_was_saved(chunk: object) -> None:
    """Plain autograd refuses.  Where the plan kept the tensor so do we; where it is rebuilt the gradient is that of
    the value that was saved."""
    x = X.clone().requires_grad_()
    y0 = X.detach() + 1.0
    with Tape(chunk, account=KeptBytes()):  # type: ignore[arg-type]
        y = step("a", lambda x: x + 1.0, x)
        z = step("b", lambda y: y * y, y)
        with torch.no_grad():
            y.zero_()
    try:
        z.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error) and "(6, 8)" in str(error)
        return
    assert chunk is not plan() and torch.equal(x.grad, 2 * y0)  # type: ignore[arg-type]
    dropped = chunk.save_set("")["a"].output == "replay"  # type: ignore[attr-defined]
    assert dropped, "a kept tensor was changed and nobody said so"


def test_kept_input_changed_before_the_replay() -> None:
    """An error even where plain autograd would not notice, since it did not save the input; the message says which."""
    x = X.clone().requires_grad_()
    data = X.clone()
    with Tape(drop("layer")):
        result = step("layer", lambda x, d: (x * 2.0 + d).exp(), x, data)
    data.add_(1.0)
    with pytest.raises(RuntimeError, match=r"layer was modified by an inplace operation: shape \(6, 8\), version 1"):
        result.sum().backward()


def test_parameter_changed_between_forward_and_backward() -> None:
    """An optimizer step before backward: refused where the weight was saved, as in plain autograd."""
    weight = torch.nn.Parameter(W.clone())
    for chunk in (plan(), DROP_ALL):
        with Tape(chunk, account=KeptBytes()):
            result = step("a", lambda x: F.linear(x, weight), X.clone().requires_grad_())
        with torch.no_grad():
            weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


@pytest.mark.parametrize("dropped_input", [False, True], ids=["kept-input", "dropped-input"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["data", "differentiable"])
def test_step_that_changes_its_own_input(dropped_input: bool, needs_grad: bool) -> None:
    """AR-08: refused at once, with a message that says what to do; also where the input is itself a dropped output,
    whose rebuilt value others would then see changed."""
    x, w = X.clone().requires_grad_(needs_grad), torch.nn.Parameter(W)
    with Tape(DROP_ALL if dropped_input else drop("b")):
        h = step("a", lambda x: x * 1.5, x)
        step("reader", lambda h: h @ w, h)
        with pytest.raises(RuntimeError, match="b modified its own input in place.*out-of-place"):
            step("b", lambda h: h.add_(1.0).exp() @ w, h)


def test_step_that_changes_what_it_made() -> None:
    """In-place on a step's own intermediates is its own affair."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = step("a", lambda x: x.clone().add_(1.0).mul_(2.0).relu_(), x)
        return step("b", lambda y, w: F.relu(y @ w, inplace=True) + 1.0, y, w)

    assert_same(body, [X, W], decisions_for("a", "b"))


def test_in_place_nested_argument() -> None:
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL):
        h = step("a", lambda x: x * 1.5, x)
        with pytest.raises(RuntimeError, match="modified its own input"):
            step("b", lambda pack: pack["h"].add_(1.0), {"h": h})


def test_kept_step_may_change_its_input() -> None:
    """Nothing of a kept step is replayed, so plain autograd's rules hold."""

    def body(x: Tensor) -> Tensor:
        h = step("a", lambda x: x * 1.5, x)
        return step("b", lambda h: h.add_(1.0).exp(), h)

    assert_same(body, [X], drop("a"))


def test_changed_shape_names_step_and_shapes() -> None:
    """RC-09: a data-dependent shape that differs in the replay; the message names layer, step and both shapes."""
    for rows in (4, 6):  # fewer and more than in the forward
        for mask_in_step in (True, False):
            mask = torch.tensor([True] * 5 + [False] * 5)
            x = numbers(10, 8).requires_grad_()
            with Tape(ChunkPlan({"layers.3": SaveSet({}, REPLAY_ALL)})):
                here = at("layers.3")
                if mask_in_step:
                    result = here("route", lambda x, mask=mask: x[mask].exp(), x)
                else:
                    chosen = here("route", lambda x, mask=mask: x[mask], x)
                    result = here("expert", F.gelu, chosen)
                    del chosen
            mask.zero_()
            mask[:rows] = True
            wanted = rf"replay of layers\.3 route: .*shape \({rows}, 8\).*in forward it had shape \(5, 8\)"
            with pytest.raises(ReplayError, match=wanted):
                result.sum().backward()


def test_changed_number_of_saved_tensors() -> None:
    """Unfrozen between forward and backward, or a branch that turned: not a pure function of its arguments."""
    weight = torch.nn.Parameter(W.clone(), requires_grad=False)
    x = X.clone().requires_grad_()
    with Tape(drop("layer")):
        y = step("layer", lambda x: (x @ weight).sin().clone(), x)
        result = step("after", torch.sin, y)
        del y
    weight.requires_grad_()
    with pytest.raises(ReplayError, match=r"replay of layer saved 3 tensors for backward, its forward 2"):
        result.sum().backward()


def test_fewer_outputs_than_in_the_forward() -> None:
    turns = iter([2, 1])
    x = X.clone().requires_grad_()
    with Tape(drop("layer")):
        outputs = step("layer", lambda x: tuple((x + float(i)).view(6, 8) for i in range(next(turns))), x)
        result = step("after", torch.sin, outputs[1])
        del outputs
    with pytest.raises(ReplayError, match="replay of layer returned 1 tensors"):
        result.sum().backward()
