"""Verify mode: is what a replay gives back, to the bit, what the forward had, and if not, why?

A replay that differs gives wrong gradients without a word: shapes and types agree, only values do not.  In verify
mode each dropped tensor leaves a digest, and each step a trace of its operations.  When a digest differs, both traces
are walked together to the first operation that had equal inputs and unequal results, or that was given something else;
what kind of operation it is says what went wrong:

=========  =============================================================================================
RNG        a random operation found its generator in another state: one that is not in the ledger
STATE      a parameter, buffer, captured tensor, argument or Python value was changed in between
DTYPE      an operation computed in another type: autocast, default type, or another numeric setting
KERNEL     an operation with equal inputs and no random numbers gave other bits: a non-deterministic one
=========  =============================================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megackpt.recompute.batchnorm import statistics_of, training_norms
from megackpt.recompute.context import MERGED, state
from megackpt.recompute.handle import Meta, ReplayError
from megackpt.recompute.trace import Operation, Trace, digest, names_of
from megackpt.recompute.watch import Call, Watch

if TYPE_CHECKING:
    from megackpt.recompute.replay import Record
    from megackpt.recompute.rng import RngLedger

RNG = "RNG"
STATE = "state mutated in between"
DTYPE = "autocast or dtype"
KERNEL = "non-deterministic kernel"
UNKNOWN = "unknown"


class VerifyError(ReplayError):
    """A replay gave back something else.  ``where``: layer and step; ``tensor``: which one; ``cause``: one of RNG,
    STATE, DTYPE, KERNEL, UNKNOWN."""

    def __init__(self, where: str, tensor: str, cause: str, detail: str) -> None:
        super().__init__(f"replay of {where} does not give back {tensor}; cause: {cause}: {detail}")
        self.where = where
        self.tensor = tensor
        self.cause = cause


@dataclass(frozen=True)
class Run:
    """One execution of a step."""

    operations: list[Operation]
    settings: dict[str, object]


@dataclass(frozen=True)
class Finding:
    """Why two runs differ, and the operation of which it was seen."""

    cause: str
    detail: str
    place: int = -1


class Verifier(Watch):
    """Looks on while one dropped step runs; ``other`` is a watch that would look on anyway."""

    __slots__ = (
        "_digests", "_first", "_inputs", "_ledger", "_other", "_outside", "_record", "_second", "_statistics", "_trace",
        "_wrong",
    )  # fmt: skip

    def __init__(self, record: Record, ledger: RngLedger, other: Watch | None) -> None:
        self._record = weakref.ref(record)  # which holds us
        self._ledger = ledger
        self._other = Watch() if other is None else other
        self._digests: dict[tuple[str, int], bytes] = {}
        self._first = Run([], {})
        self._second = Run([], {})
        self._inputs: tuple[Any, Any] = ((), {})
        self._statistics: set[int] = set()
        self._trace = Trace({})
        self._outside: str | None = None  # what the wrong tensor is, if the step did not make it
        self._wrong = ""

    @property
    def early_stop(self) -> bool:  # type: ignore[override]
        return self._other.early_stop

    def forward(self, fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._first, trace = _new_run(fn, args, kwargs)
        self._statistics = {t.untyped_storage()._cdata for t in statistics_of(training_norms(fn))}
        with trace:
            return self._other.forward(fn, args, kwargs)

    def saved(self, number: int, tensor: Tensor) -> None:
        self._other.saved(number, tensor)
        # Running statistics are saved in training mode too, but no gradient reads them, and they move on.
        if tensor.untyped_storage()._cdata not in self._statistics:
            self._digests["saved tensor", number] = digest(tensor)

    def returned(self, index: int, tensor: Tensor) -> None:
        self._other.returned(index, tensor)
        self._digests["output", index] = digest(tensor)

    def replay(self, fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._wrong = ""
        self._inputs = (args, kwargs)
        self._outside = None
        self._second, self._trace = _new_run(fn, args, kwargs)
        with self._trace:
            return self._other.replay(fn, args, kwargs)

    def rebuilt(self, what: str, number: int, tensor: Tensor, now: Meta, then: Meta) -> bool:
        if not self._other.rebuilt(what, number, tensor, now, then):
            self._note(f"{what} {number} ({_words(then)}; the replay's is {_words(now)})", tensor)
            return False
        original = self._digests.get((what, number))
        if original is not None and original != digest(tensor):
            self._note(f"{what} {number} ({_words(then)}{self._maker(original)})", tensor)
        return True

    def _note(self, wrong: str, tensor: Tensor) -> None:
        if not self._wrong:  # the first one is nearest to the cause
            self._wrong, self._outside = wrong, self._trace.describe(tensor)

    def settle(self) -> None:
        self._other.settle()
        if self._wrong:
            raise self._error() from None  # not from what ended the replay
        self._inputs, self._trace = ((), {}), Trace({})

    def explain(self, error: ReplayError) -> ReplayError:
        if isinstance(error, VerifyError):
            return error
        self._wrong = self._wrong or f"what its forward saved ({error})"
        return self._error()

    def _error(self) -> VerifyError:
        finding = compare(self._first, self._second)
        if finding.place < 0 and self._outside is not None:  # an operation saves what it reads before it runs
            finding = Finding(STATE, f"{self._outside} has other values")
        if finding.cause == KERNEL:
            finding = self._run_again(finding)
        self._inputs, self._trace = ((), {}), Trace({})
        return VerifyError(self._step.where, self._wrong, finding.cause, finding.detail)

    @property
    def _step(self) -> Record:
        record = self._record()
        assert record is not None  # it is being replayed
        return record

    def _maker(self, original: bytes) -> str:
        made = [o.name for o in self._first.operations if original in o.writes]
        return f", result of {made[0]}" if made else ""

    def _run_again(self, finding: Finding) -> Finding:
        """Replay once more: does the suspected operation differ from itself?"""
        (args, kwargs), step, now = self._inputs, self._step, state.now
        run, trace = _new_run(step.fn, args, kwargs)
        if step.rng is not None:
            self._ledger.restore(step.rng)
        ambient = now.tape, now.frame, now.masks, now.inner
        now.tape, now.frame, now.masks, now.inner = None, None, step.masks, MERGED
        try:
            with trace, torch.autograd.graph.saved_tensors_hooks(_same, _same):
                step.fn(*args, **kwargs)
        finally:
            now.tape, now.frame, now.masks, now.inner = ambient
        again = compare(self._second, run)
        if again.cause == KERNEL and again.place == finding.place:
            return Finding(KERNEL, f"{finding.detail}, and two replays in a row differ as well", finding.place)
        return Finding(KERNEL, f"{finding.detail}, though two replays in a row agree", finding.place)


def compare(first: Run, second: Run) -> Finding:
    """The first operation at which two runs of one step part, and why."""
    for place, (a, b) in enumerate(zip(first.operations, second.operations, strict=False)):
        if a.name != b.name:
            path = f"{b.name} ran where {a.name} had run: a value that the step's code reads was changed"
            return Finding(STATE, path, place)
        if a.dtypes != b.dtypes:
            types = f"{b.name} gave {_types(b)} where it had given {_types(a)}"
            return Finding(DTYPE, types + _settings(first, second), place)
        if a.random is not None and a.random != b.random:
            return Finding(RNG, f"{b.name} drew from {b.source}, whose state was not put back", place)
        if a.writes == b.writes:
            continue
        changed = [b.outside[i] or a.outside[i] for i in _unequal(a, b) if (b.outside[i] or a.outside[i]) is not None]
        if changed:
            return Finding(STATE, f"{b.name} read other values in {changed[0]}", place)
        if a.scalars != b.scalars:
            return Finding(STATE, f"{b.name} was given {b.scalars} where it had been given {a.scalars}", place)
        if a.reads == b.reads:
            settings = _settings(first, second)
            detail = f"{b.name} gave other bits for equal inputs"
            return Finding(DTYPE if settings else KERNEL, detail + settings, place)
    rest = len(first.operations) - len(second.operations)
    settings = _settings(first, second)
    if settings:
        return Finding(DTYPE, f"no operation of its own accounts for it{settings}")
    return Finding(UNKNOWN, f"no operation accounts for it ({rest} fewer ran in the replay)")


def _unequal(a: Operation, b: Operation) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(a.reads, b.reads, strict=False)) if x != y]


def _new_run(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Run, Trace]:
    trace = Trace(names_of(fn, args, kwargs))
    return Run(trace.operations, numeric_settings()), trace


def numeric_settings() -> dict[str, object]:
    """What changes results without being an argument."""
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)],
    }


def _settings(first: Run, second: Run) -> str:
    changed = [f"{k} {v} then, {second.settings[k]} now" for k, v in first.settings.items() if v != second.settings[k]]
    return f" ({'; '.join(changed)})" if changed else ""


def _types(operation: Operation) -> str:
    return ", ".join(str(t) for t in operation.dtypes)


def _words(meta: Meta) -> str:
    return f"shape {tuple(meta[0])}, {meta[1]}"


def _same(value: Any) -> Any:
    return value
