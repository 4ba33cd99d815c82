"""Runs a schedule: a small map from action kind to method, and nothing that knows which schedule it is.

    F   receive the input | forward on a tape | start to send the output, keep its graph edge, drop the tensor
    B   rebuild what the plan wants ahead | receive the gradients | one autograd call from the edges | close the tape
        | start to send gradients
    W   multiply the weight gradients that B put off; a schedule without W's puts none off

At one stage nothing is received or sent and the rest is the same. Forward-only runs the F's without a graph
or tapes. Where stages have several chunks, chunk c of the last stage feeds chunk c+1 of the first: the chain of
stages becomes a ring, and every stage still has one neighbour before it and one after it.

Overlap: the next message of each direction is posted for as soon as it can exist, mostly before the one at hand is
used, so it travels while this stage computes; what an action sends leaves while the next one computes, and is waited
for only before the one after. The two directions have communicators of their own and never wait for each other.
Nothing that needs no message (a W, what is rebuilt ahead) waits for one.

Memory: while a stage computes, the message that the action before sent is alive (without `overlap` it has left),
and one received message per direction may lie ahead. Which schedules are free of deadlock under these rules is what
`plan.machine.check_schedule` decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megackpt.mesh.deferred import DeferredSink
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.pipeline.boundary import (
    Arrival,
    Boundary,
    ChunkSpecs,
    StageResult,
    arrive,
    check_outputs,
    depart,
    gradient_specs,
)
from megackpt.pipeline.errors import Progress
from megackpt.pipeline.p2p import Inbox, Link, Message, Outbox
from megackpt.pipeline.tape import NoTape, OpenTape, TapeLike
from megackpt.plan.events import Event
from megackpt.plan.machine import needed_before
from megackpt.plan.schedule import Action, Generator, destination, forward_part, one_f_one_b, source

StageForward = Callable[[int, int, tuple[Tensor, ...]], tuple[Tensor, ...] | StageResult]
"""(chunk, micro_batch, received) -> what to send, or at the end of the model the result."""

DEFAULT_TIMEOUT_S = 600.0


class Executor:
    """One pipeline rank. `run` may be called any number of times, with any number of micro-batches, by all
    ranks alike.

    `specs` has one entry per chunk. `timeout_s` bounds every single transfer, in seconds. `open_tape(chunk,
    micro_batch)` gives the tape of a forward; it is closed when the backward of that micro-batch has ended.
    `on_last_backward(chunk)` is called just before the last backward of a chunk in a run starts; `deferred` is
    the sink of the model's weight gradients, for schedules that have W's.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        stage_forward: StageForward,
        specs: Sequence[ChunkSpecs],
        *,
        schedule: Generator = one_f_one_b,
        open_tape: OpenTape = NoTape,
        device: torch.device | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        overlap: bool = True,
        on_last_backward: Callable[[int], None] | None = None,
        deferred: DeferredSink | None = None,
    ) -> None:
        if len(specs) > 1 and mesh.pp.size == 1:
            raise ValueError(f"a single stage has one chunk, got specs for {len(specs)}")
        for end, boundary in ((0, specs[0].received), (mesh.pp.size - 1, specs[-1].sent)):
            if mesh.pp.index == end and boundary:
                raise ValueError(f"stage {end} of {mesh.pp.size} has no neighbour beyond its end of the model")
        self.mesh = mesh
        self.stage_forward = stage_forward
        self.specs = tuple(specs)
        self.schedule = schedule
        self.open_tape = open_tape
        self.device = device or torch.device("cpu")
        self.timeout_s = timeout_s
        self.overlap = overlap
        self.on_last_backward = on_last_backward
        self.deferred = deferred
        self.progress: Progress | None = None
        """Of the run that is going on, or that failed."""
        self._connected: set[str] = set()  # directions
        self._needs: dict[tuple[int, bool], dict[Action, int]] = {}
        self._unfinished = False

    def run(
        self, micro_batches: int, *, forward_only: bool = False, events: list[Event] | None = None
    ) -> list[dict[str, Tensor]]:
        """Run n >= 1 micro-batches; gradients accumulate in the parameters.

        Returns the reports of the last stage in micro-batch order, detached; on other stages an empty list.
        Appends one event per action to `events`. Afterwards nothing of the run is held. Raises PipelineError
        for every failure in the course of the run (several stages cannot run again after one), ValueError for
        n < 1.
        """
        pp = self.mesh.pp
        actions = self.schedule(pp.size, pp.index, micro_batches)
        actions = forward_part(actions) if forward_only else actions
        splits = any(action.kind == "W" for action in actions)
        if splits and self.deferred is None:
            raise ValueError("a schedule with W actions needs a sink that puts weight gradients off")
        if self._unfinished:
            raise RuntimeError("an earlier run failed and its messages may still be under way: start anew")
        self._unfinished = pp.size > 1
        self.progress = progress = Progress(self.mesh.rank, pp.index, pp.size)
        run = _Run(self, progress, actions, forward_only, events, self.deferred if splits else None)
        try:
            run.open(self._connected, self._needed(micro_batches, forward_only))
            with torch.set_grad_enabled(not forward_only):
                for action in actions:
                    run.step(action)
            run.finish()
            self._unfinished = False
        except Exception as cause:
            raise progress.error(cause) from cause
        finally:
            run.abandon()
        self.progress = None
        return [run.reports[m] for m in sorted(run.reports)]

    def _needed(self, micro_batches: int, forward_only: bool) -> dict[Action, int]:
        """What the messages of such a run need of this stage; kept, since runs repeat."""
        pp, key = self.mesh.pp, (micro_batches, forward_only)
        if key not in self._needs:
            lists = [self.schedule(pp.size, stage, micro_batches) for stage in range(pp.size)]
            lists = [forward_part(actions) for actions in lists] if forward_only else lists
            self._needs[key] = needed_before(lists, pp.index)
        return self._needs[key]


@dataclass(slots=True)
class _Flight:
    """What a micro-batch leaves on a chunk between its forward and its backward."""

    arrival: Arrival
    tape: TapeLike
    edges: list[GradientEdge | None] = field(default_factory=list)
    seed: Tensor | None = None  # the gradient of the loss: 1, on the last stage only
    saved_bytes: int = 0


class _Run:
    """The state of one `Executor.run`; empty again when it ends."""

    def __init__(
        self,
        owner: Executor,
        progress: Progress,
        actions: Sequence[Action],
        forward_only: bool,
        events: list[Event] | None,
        deferred: DeferredSink | None,
    ) -> None:
        self.owner, self.progress, self.actions, self.deferred = owner, progress, actions, deferred
        self.forward_only, self.events = forward_only, events
        self.last_backwards = set({a.chunk: a for a in actions if a.kind == "B"}.values())
        self.reports: dict[int, dict[str, Tensor]] = {}
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.inboxes: dict[str, Inbox] = {}
        self.outboxes: dict[str, Outbox] = {}
        self.previous: Action | None = None
        self.over = 0  # actions
        self.wait_s = 0.0
        self.sent_bytes = self.received_bytes = 0

    # -- exchange --------------------------------------------------------------------------------------

    def open(self, connected: set[str], needs: Mapping[Action, int]) -> None:
        """Links to the neighbours that messages come from or go to, and the receives posted that need nothing of this
        rank. `connected`: the directions that have carried messages already; extended."""
        incoming, outgoing, fresh = {}, {}, set()
        for kind in ("F", "B"):
            mine = [action for action in self.actions if action.kind == kind]
            messages = [Message(a, self._expected(a), needs[a]) for a in mine if self._source(a) is not None]
            if messages:
                link = self._link(kind, 1 if kind == "B" else -1)
                incoming[kind], self.inboxes[kind] = link, Inbox(link, messages)
            if any(self._destination(action) is not None for action in mine):
                outgoing[kind] = link = self._link(kind, -1 if kind == "B" else 1)
                self.outboxes[kind] = Outbox(link)
            if mine and kind not in connected:
                fresh.add(kind)
        _connect(self.progress, incoming, outgoing, fresh)
        connected |= fresh
        self.post()

    def post(self) -> None:
        """Post for the messages that can exist by now."""
        for inbox in self.inboxes.values():
            inbox.post(self.over)

    def _source(self, action: Action) -> tuple[int, Action] | None:
        pp = self.owner.mesh.pp
        return source(action, pp.index, pp.size, len(self.owner.specs))

    def _destination(self, action: Action) -> tuple[int, Action] | None:
        pp = self.owner.mesh.pp
        return destination(action, pp.index, pp.size, len(self.owner.specs))

    def _link(self, kind: str, step: int) -> Link:
        """To the neighbour `step` stages on, round the ring."""
        mesh, owner = self.owner.mesh, self.owner
        peer = mesh.pp.index + step
        wraps = not 0 <= peer < mesh.pp.size
        if kind == "F":
            axis = mesh.wrap_forward if wraps else mesh.pp_forward
        else:
            axis = mesh.wrap_backward if wraps else mesh.pp_backward
        return Link(axis, peer % mesh.pp.size, owner.device, owner.timeout_s, self.progress, wraps=wraps)

    def _expected(self, action: Action) -> Boundary:
        specs = self.owner.specs[action.chunk]
        return specs.received if action.kind == "F" else gradient_specs(specs.sent)

    def receive(self, action: Action) -> tuple[Tensor, ...]:
        """The message of `action` (() if none comes), and this rank's own earlier messages off its hands."""
        start = time.perf_counter()
        for outbox in self.outboxes.values():
            outbox.settle(but=self.previous if self.owner.overlap else None)
        comes = self._source(action) is not None
        tensors = self.inboxes[action.kind].receive(action, self.over) if comes else ()
        self.wait_s = time.perf_counter() - start
        self.received_bytes = sum(tensor.nbytes for tensor in tensors)
        return tensors

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        if self._destination(action) is not None:
            self.outboxes[action.kind].send(action, tensors)
            self.sent_bytes = sum(tensor.nbytes for tensor in tensors)

    # -- actions ---------------------------------------------------------------------------------------

    def step(self, action: Action) -> None:
        """One action, and its event."""
        if self.events is None:
            _METHODS[action.kind](self, action)
        else:
            self.sent_bytes = 0
            start = time.time()
            _METHODS[action.kind](self, action)
            end = max(start, time.time())
            saved = sum(flight.saved_bytes for flight in self.flights.values())
            mesh = self.owner.mesh
            self.events.append(
                Event(
                    mesh.rank, mesh.pp.index, action.kind, action.micro_batch, action.chunk, start, end,
                    self.wait_s, self.received_bytes, self.sent_bytes, saved,
                )
            )  # fmt: skip
        self.progress.complete(action)
        self.previous = action
        self.over += 1
        self.post()

    def forward(self, action: Action) -> None:
        received = self.receive(action)
        self.progress.enter("compute", action)
        if self.forward_only:
            result = self.owner.stage_forward(action.chunk, action.micro_batch, received)
            self._check(action, result)
        else:
            result = self._forward_on_tape(action, received)
        if isinstance(result, StageResult):
            self.reports[action.micro_batch] = {name: value.detach() for name, value in result.report.items()}
        else:
            self.send(action, result)

    def _forward_on_tape(self, action: Action, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        owner, specs = self.owner, self.owner.specs[action.chunk]
        inputs, arrival = arrive(received, specs.received)
        tape = owner.open_tape(action.chunk, action.micro_batch)
        flight = self.flights[_key(action)] = _Flight(arrival, tape)
        with tape:
            result = owner.stage_forward(action.chunk, action.micro_batch, inputs)
        self._check(action, result)
        if isinstance(result, StageResult):
            flight.edges = [get_gradient_edge(result.loss) if result.loss.requires_grad else None]
            flight.seed = torch.ones_like(result.loss)
        else:
            flight.edges = depart(result, specs.sent)
        if self.events is not None:
            flight.saved_bytes = tape.saved_bytes()
        return result

    def _check(self, action: Action, result: object) -> None:
        if self._destination(action) is not None:
            check_outputs(result, self.owner.specs[action.chunk].sent)
        elif not isinstance(result, StageResult):
            raise TypeError(f"the last stage's forward returns a StageResult, got {type(result).__name__}")
        elif result.loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, got shape {list(result.loss.shape)}")

    def backward(self, action: Action) -> None:
        if self._source(action) is not None:
            self.progress.enter("compute", action)
            self.flights[_key(action)].tape.rebuild_ahead(len(self.flights))
        gradients: Sequence[Tensor] = self.receive(action)
        self.progress.enter("compute", action)
        if action in self.last_backwards and self.owner.on_last_backward is not None:
            self.owner.on_last_backward(action.chunk)
        flight = self.flights.pop(_key(action))
        if flight.seed is not None:
            gradients = (flight.seed,)
        pairs = [(edge, g) for edge, g in zip(flight.edges, gradients, strict=True) if edge is not None]
        if pairs:
            with self.deferred.holding(_key(action)) if self.deferred else contextlib.nullcontext():
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        flight.tape.close()
        self.send(action, flight.arrival.take(self.owner.device))

    def weight(self, action: Action) -> None:
        assert self.deferred is not None
        self.receive(action)
        self.progress.enter("compute", action)
        self.deferred.release(_key(action))

    # -- end -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything sent has left, everything received is really here."""
        for inbox in self.inboxes.values():
            inbox.finish()
        for outbox in self.outboxes.values():
            outbox.finish()

    def abandon(self) -> None:
        """Hold nothing. After a failure that frees graphs and tapes too; their own failures must not hide the
        first.
        """
        for flight in self.flights.values():
            with contextlib.suppress(Exception):
                flight.tape.close()
        self.flights.clear()
        self.inboxes.clear()
        self.outboxes.clear()
        if self.deferred is not None:
            self.deferred.clear()


_METHODS: dict[str, Callable[[_Run, Action], None]] = {"F": _Run.forward, "B": _Run.backward, "W": _Run.weight}


def _key(action: Action) -> tuple[int, int]:
    return action.micro_batch, action.chunk


def _connect(progress: Progress, incoming: dict[str, Link], outgoing: dict[str, Link], kinds: set[str]) -> None:
    """Pass one byte along every link of these kinds: NCCL makes the communicator of a pair at its first message, and
    both ends wait.

    Later a receive is posted long before its message can exist; the first one must not be. The links that close
    the ring come last, so that each chain has an end to begin at. gloo is connected already.
    """
    for wraps in (False, True):
        for kind in sorted(kinds, reverse=True):  # F, B
            for verb, links in (("recv", incoming), ("send", outgoing)):
                link = links.get(kind)
                if link is None or link.wraps != wraps or not link.stream_ordered:
                    continue
                progress.enter(verb, None, link.peer_rank)
                byte = torch.zeros(1, dtype=torch.uint8, device=link.device)
                link.wait(verb, None, [link.irecv(byte) if verb == "recv" else link.isend(byte)])
