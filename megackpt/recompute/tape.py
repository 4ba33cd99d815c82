"""The tape: what one forward of a micro-batch on a chunk leaves for its backward.

Opened by the pipeline around each forward, it applies the plan: every step that runs under it asks it for its
decision.  It owns no tensor; what is kept hangs on the autograd graph and goes with it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from megackpt.plan import ChunkPlan
from megackpt.recompute.account import KeptBytes
from megackpt.recompute.call import TwoPhase
from megackpt.recompute.context import LIVE, state
from megackpt.recompute.demand import demand
from megackpt.recompute.handle import Kept, Tag
from megackpt.recompute.opaque import opaque
from megackpt.recompute.producer import Producer
from megackpt.recompute.replay import Record
from megackpt.recompute.rng import RngLedger
from megackpt.recompute.tiers.base import Stored, Tier
from megackpt.recompute.verify import Verifier
from megackpt.recompute.watch import Watch

_LAYER = re.compile(r"layers[ .](\d+)")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Tape:
    """Applies one chunk's plan to one forward.

    ``ledger``: the random state that replays must reproduce (default: torch's own generators).
    ``account``: also count the bytes kept, per storage, and book them there until the tape is closed; a plan that
    keeps everything costs nothing without it.
    ``tiers``: the places of the decisions that put tensors elsewhere, by the decision's name.
    ``clear_after_backward``: False for a caller that splits one backward into several calls on purpose.
    ``verify``: compare everything that is replayed with a digest of the original (slow; see verify.py).
    ``observer``: takes every step in its place, with address, name, function and arguments (see stepwise.py).
    ``on_replay(where, start, end)``: told of every replayed step, with host seconds of ``time.time``.
    ``layers``: those of the chunk, the last of which the plan's ``ahead`` means.

    A tape opened while another is open shares that one's ``verify``, and its account if it has none of its own.
    """

    __slots__ = (
        "plan", "ledger", "label", "clear_after_backward", "verify", "observer", "on_replay", "live", "notes_records",
        "layers", "dropped", "outer", "counts", "tags", "_account", "_tiers", "_booked", "_arguments", "_stored",
        "_two_phase", "_rebuildable", "_kept", "_alive", "_previous", "_around", "_transparent", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        plan: ChunkPlan,
        ledger: RngLedger | None = None,
        *,
        account: KeptBytes | None = None,
        tiers: Mapping[str, Tier] | None = None,
        label: str = "",
        clear_after_backward: bool = True,
        verify: bool = False,
        observer: Callable[[str, str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any] | None = None,
        on_replay: Callable[[str, float, float], None] | None = None,
        layers: range = range(0),
    ) -> None:
        self.plan, self.layers = plan, layers
        self.ledger = RngLedger() if ledger is None else ledger
        self.label = label
        self.clear_after_backward = clear_after_backward
        self.verify = verify
        self.observer = observer
        self.on_replay = on_replay
        self.live = account is not None or not plan.keeps_all
        self.notes_records = plan.ahead > 0
        self.dropped = False  # whether an output has been dropped that a step may be given
        self.outer: tuple[Any, Any] | None = None
        self.counts = account is not None  # somebody wants to know the bytes kept
        self._account = account
        self._tiers = tiers or {}
        self._booked = 0
        self.tags: list[weakref.ref[Tag]] = []
        self._arguments: list[tuple[weakref.ref[Kept], str]] = []
        self._stored: list[weakref.ref[Stored]] = []
        self._two_phase: list[weakref.ref[Record]] = []
        self._rebuildable: list[weakref.ref[Record]] = []  # only where some are to be rebuilt ahead
        self._kept: dict[str, int] | None = None  # by step, once the forward has ended
        self._alive: list[tuple[weakref.ref[Kept], str]] = []
        self._previous: Tape | None = None
        self._around: Tape | None = None  # accounts for us
        self._transparent = False

    def __enter__(self) -> Tape:
        if torch.compiler.is_compiling():
            return opaque(Tape.__enter__)(self)
        now = state.now
        self._transparent = now.inner != LIVE  # inside a dropped step: its replay, not we, decides
        if not self._transparent:
            self._previous = now.tape
            if self._previous is None:
                self.outer = _top_hooks(True)
            else:
                self.dropped = self._previous.dropped
                self.outer = self._previous.outer
                self.verify = self.verify or self._previous.verify
                if self._account is None and self._previous.counts:
                    self._around, self.counts = self._previous, True
            now.tape = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._transparent:
            return
        state.now.tape, self._previous = self._previous, None
        if self.tags:
            self.cut()
        if self._account is not None:
            self._alive += self._arguments
            self._arguments.clear()
            self._kept = self.kept_now()
            self._booked = self.saved_bytes()
            self._account.add(self._booked)

    def close(self) -> None:
        """The backward of this forward has ended: nothing of it is kept any more."""
        if self._account is not None:
            self._account.add(-self._booked)
            self._booked = 0

    def cut(self) -> None:
        """Cut storages loose from the steps that made them, else a detached output that somebody holds would hold
        its step and the step's inputs."""
        for ref in self.tags:
            tag = ref()
            if tag is not None:
                tag.producer = None
        self.tags.clear()

    def ahead(self) -> None:
        """Begin what can be begun of the rebuilding (copies from tiers, collectives whose inputs are there), for a
        caller that knows the backward is near.  All ranks of a group must call it at the same place."""
        places: list[weakref.ref[Any]] = [*self._stored, *self._two_phase]
        for place in places:
            producer: Producer | None = place()
            if producer is not None:
                producer.ahead()

    def rebuild_ahead(self, in_flight: int) -> None:
        """Rebuild the last layers of the plan's ``ahead`` now, the last one first, as their backward would: for a
        caller that waits for a gradient, with so many forwards whose backward is not done.  The values are the same
        and live until they are used.  All ranks of a group must call it at the same place."""
        if self.plan.goes_ahead(in_flight):
            units = {unit.start for unit in self.plan.units_ahead(self.layers)}
            for ref in reversed(self._rebuildable):
                if (record := ref()) is not None and _first_layer_of(record.where) in units:
                    demand(record)
        self._rebuildable.clear()

    def store(self, choice: str, where: str, tensor: torch.Tensor) -> Producer:
        """Put a tensor's storage into the tier of that name.  Raises ValueError if the tape was given none."""
        tier = self._tiers.get(choice)
        if tier is None:
            raise ValueError(f"the plan says {choice} for {where}, but this run has no tier of that name")
        stored = Stored(where, tier, tensor)
        self._stored.append(weakref.ref(stored))
        return stored

    def watch_for(self, record: Record, watch: Watch | None) -> Watch | None:
        """Who looks on while the step of ``record`` runs, besides ``watch``."""
        return Verifier(record, self.ledger, watch) if self.verify else watch

    def note_record(self, record: Record) -> None:
        if self.plan.ahead:
            self._rebuildable.append(weakref.ref(record))
        if isinstance(record.fn, TwoPhase):
            self._two_phase.append(weakref.ref(record))

    def note_argument(self, kept: Kept, where: str) -> None:
        """Count what a dropped step holds, after all that autograd saves."""
        if self._account is None:
            if self._around is not None:
                self._around.note_argument(kept, where)
        else:
            self._arguments.append((weakref.ref(kept), where))

    def note_kept(self, kept: Kept, where: str) -> None:
        """Count a kept tensor, if it lives to the end of the forward."""
        if self._account is None:
            if self._around is not None:
                self._around.note_kept(kept, where)
        else:
            self._alive.append((weakref.ref(kept), where))

    def saved_bytes(self) -> int:
        """Bytes kept for backward: storages of kept tensors and of the inputs that dropped steps hold; parameters
        and random states excluded.  Complete when the forward has ended; needs an ``account``."""
        return sum(self.report().values())

    def kept_now(self) -> dict[str, int]:
        """As :meth:`report`, of what is alive at this moment: each storage once, for the step that kept it first."""
        bytes_by_step: dict[str, int] = {}
        seen: set[int] = set()
        for ref, where in self._alive:
            kept = ref()
            storage = kept.storage if kept is not None else None
            if storage is not None and storage._cdata not in seen:
                seen.add(storage._cdata)
                bytes_by_step[where] = bytes_by_step.get(where, 0) + storage.nbytes()
        for place in self._stored:
            if (stored := place()) is not None:
                bytes_by_step[stored.where] = bytes_by_step.get(stored.where, 0) + stored.ticket.held_bytes()
        return bytes_by_step

    def report(self) -> dict[str, int]:
        """Bytes kept by step (``layers.3 attn.core``), in the order of the forward."""
        return dict(self._kept) if self._kept is not None else self.kept_now()


def _first_layer_of(where: str) -> int:
    """Of the layer (``layers.3 attn.core``) or the group of layers (``layers 2 to 5``) that a step is of; -1: none."""
    found = _LAYER.match(where)
    return int(found[1]) if found else -1
