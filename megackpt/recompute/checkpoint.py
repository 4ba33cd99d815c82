"""Drop-in for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

The same calling convention and guarantees, on our engine: the function is one dropped step whose output is kept.  What
differs: registered random streams of an open tape are reproduced too, BatchNorm's statistics are updated once, a value
that is needed by several backward nodes is rebuilt once, and errors are :class:`ReplayError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from megackpt.plan import KEEP, REPLAY, ChunkPlan, Decision
from megackpt.recompute.context import LIVE, state
from megackpt.recompute.handle import Meta, ReplayError
from megackpt.recompute.opaque import opaque
from megackpt.recompute.rng import RngLedger
from megackpt.recompute.step import run_step
from megackpt.recompute.tape import Tape
from megackpt.recompute.trace import Names
from megackpt.recompute.watch import Call, Watch

T = TypeVar("T")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_REGION = Decision(output=KEEP, internals=REPLAY, masks=REPLAY)
_KEEPING = ChunkPlan()  # for the steps that stand beside the region
_TORCHS, _NO_RANDOMNESS = RngLedger(), RngLedger(defaults=False)  # they have no stream, so they have no state
_function_modes = torch._C._len_torch_function_stack  # how many


def noop_context_fn() -> Contexts:
    """Two contexts that do nothing: one for the forward, one for the replay."""
    return nullcontext(), nullcontext()


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str | Callable[[Tensor], Any] = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> T:
    """Run ``function(*args, **kwargs)``; what autograd saves inside it is dropped and rebuilt in backward.

    Tensors in ``args`` and ``kwargs`` get gradients wherever they stand: by keyword, in tuples, lists, dicts and
    dataclasses.  Inside an open :class:`Tape` the call is a step of it; alone it opens its own.

    ``function`` must do the same again in backward.  Random numbers (torch's own, generators and streams among the
    arguments, streams of the tape) and BatchNorm's statistics are seen to; other state that it changes while it runs
    (vectors of a spectral norm, the executor of a TorchScript function before it has settled) is not, and gives other
    gradients: under a tape with ``verify=True`` such a replay is an error that names the cause.  Parameters that
    ``torch.func.functional_call`` puts in the place of a module's go in as arguments, with it as the function.

    ``preserve_rng_state``: False saves looking at the random state; the replay then draws other numbers, on.
    ``context_fn``: returns two contexts, entered around the forward and around the replay
    (``torch.utils.checkpoint.create_selective_checkpoint_contexts`` among them).
    ``determinism_check``: "default" compares shape, type and device of what the replay saves with the forward's,
    "none" nothing; a function of a tensor compares what it returns.
    ``debug``: errors list the operations of forward and replay.
    ``early_stop``: False runs the replay to the end of ``function`` instead of the last tensor that is wanted.
    ``use_reentrant``: accepted for its callers if False or None.

    Raises ValueError for ``use_reentrant=True``, for an unknown ``determinism_check`` and for ``debug`` together with
    ``context_fn``; ReplayError in backward if the replay does not save what the forward did.
    """
    _check(use_reentrant, determinism_check, debug, context_fn)
    if torch.compiler.is_compiling():
        return opaque(checkpoint)(
            function, *args, preserve_rng_state=preserve_rng_state, context_fn=context_fn, debug=debug,
            determinism_check=determinism_check, early_stop=early_stop, **kwargs,
        )  # fmt: skip
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    where = f"checkpoint({getattr(function, '__qualname__', type(function).__qualname__)})"
    device, region = _device_context() if _function_modes() else None, None
    if not early_stop or debug or device or context_fn is not noop_context_fn or determinism_check != "default":
        region = Region(where, context_fn(), determinism_check, debug, early_stop, device)
    now = state.now
    if now.inner != LIVE:  # inside a step that is dropped as a whole: its replay decides
        return function(*args, **kwargs) if region is None else region.forward(function, args, kwargs)
    tape = now.tape
    if tape is not None and preserve_rng_state:
        return run_step(tape, where, _REGION, function, args, kwargs, watch=region)  # type: ignore[no-any-return]
    with Tape(_KEEPING, _TORCHS if preserve_rng_state else _NO_RANDOMNESS) as own:
        return run_step(own, where, _REGION, function, args, kwargs, watch=region)  # type: ignore[no-any-return]


def _check(
    use_reentrant: bool | None,
    determinism_check: str | Callable[[Tensor], Any],
    debug: bool,
    context_fn: Callable[[], Contexts],
) -> None:
    """Raise ValueError for what a call of `checkpoint` may not ask for."""
    if use_reentrant:
        raise ValueError(
            "use_reentrant=True re-enters autograd and cannot see keyword or nested tensors; this checkpoint has the "
            "guarantees of use_reentrant=False: pass that or nothing"
        )
    if determinism_check not in ("default", "none") and not callable(determinism_check):
        raise ValueError(f'determinism_check is "default", "none" or a function of a tensor, not {determinism_check!r}')
    if debug and context_fn is not noop_context_fn:
        raise ValueError("debug=True brings its own contexts and cannot be combined with context_fn")


class Region(Watch):
    """What ``checkpoint`` was told about one call."""

    __slots__ = ("where", "early_stop", "_contexts", "_check", "_debug", "_device", "_meta", "_forward", "_replay")

    def __init__(
        self,
        where: str,
        contexts: Contexts,
        check: str | Callable[[Tensor], Any],
        debug: bool,
        early_stop: bool,
        device: torch.device | None,
    ) -> None:
        self.where = where
        self.early_stop = early_stop
        self._contexts = contexts
        self._check = check
        self._debug = debug
        self._device = device
        self._meta: dict[int, Any] = {}
        self._forward: list[str] = []
        self._replay: list[str] = []

    def forward(self, fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._names(self._forward), self._contexts[0]:
            return fn(*args, **kwargs)

    def saved(self, number: int, tensor: Tensor) -> None:
        if callable(self._check):
            with torch.no_grad():
                self._meta[number] = self._check(tensor)

    def replay(self, fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._replay.clear()
        device = nullcontext() if self._device is None else self._device
        with self._names(self._replay), device, self._contexts[1]:
            return fn(*args, **kwargs)

    def rebuilt(self, what: str, number: int, tensor: Tensor, now: Meta, then: Meta) -> bool:
        if self._check == "default":
            return now == then
        if not callable(self._check):
            return True
        with torch.no_grad():
            meta = self._check(tensor)
        if meta != self._meta[number]:
            raise ReplayError(
                f"replay of {self.where}: determinism_check gives {meta!r} for {what} {number}, "
                f"in forward it gave {self._meta[number]!r}"
            )
        return True

    def explain(self, error: ReplayError) -> ReplayError:
        if not self._debug:
            return error
        lines = itertools.zip_longest(self._forward, self._replay, fillvalue="-")
        table = [f"  {i:3} {a}\n      {'= same' if a == b else b}" for i, (a, b) in enumerate(lines)]
        return ReplayError("\n".join([f"{error}", "operations of the forward, and under each the replay's:", *table]))

    def _names(self, lines: list[str]) -> AbstractContextManager[Any]:
        return Names(lines) if self._debug else nullcontext()


def _device_context() -> torch.device | None:
    """The ``with torch.device(...)`` that is open now: backward runs outside it."""
    modes = _get_current_function_mode_stack()
    return next((torch.device(mode.device) for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)
