"""Runs a schedule: a small map from action kind to method, and nothing that knows which schedule it is.

    F   receive the input | forward on a tape | start to send the output, keep its graph edge, drop the tensor
    B   receive the gradients | one autograd call from the edges | close the tape | start to send gradients

At one stage nothing is received or sent and the rest is the same. Forward-only runs the F's without a graph
or tapes.

Memory: while a stage computes, none of its sent outputs is alive (`sends_in_flight` = 0; a higher value lets
that many messages per direction leave during computation, for the price of their bytes), and one received
message per direction may lie ahead. Which schedules are free of deadlock under these rules is what
`plan.machine.check_schedule` decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

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
from megackpt.pipeline.p2p import Inbox, Link, Outbox
from megackpt.pipeline.tape import NoTape, OpenTape, TapeLike
from megackpt.plan.events import Event
from megackpt.plan.schedule import Action, Generator, forward_part, one_f_one_b

StageForward = Callable[[int, int, tuple[Tensor, ...]], tuple[Tensor, ...] | StageResult]
"""(chunk, micro_batch, received) -> what to send, or on the last stage the result."""

DEFAULT_TIMEOUT_S = 600.0


class Executor:
    """One pipeline rank. `run` may be called any number of times, with any number of micro-batches, by all
    ranks alike.

    `specs` has one entry per chunk (one so far: the schedules here have a single chunk). `timeout_s` bounds
    every single transfer, in seconds. `open_tape(chunk, micro_batch)` gives the tape of a forward; it is
    closed when the backward of that micro-batch has ended.
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
        sends_in_flight: int = 0,
    ) -> None:
        if len(specs) != 1:
            raise ValueError(f"the executor runs one chunk per stage, got specs for {len(specs)}")
        for end, boundary in ((0, specs[0].received), (mesh.pp.size - 1, specs[0].sent)):
            if mesh.pp.index == end and boundary:
                raise ValueError(f"stage {end} of {mesh.pp.size} has no neighbour beyond its end of the model")
        self.mesh = mesh
        self.stage_forward = stage_forward
        self.specs = tuple(specs)
        self.schedule = schedule
        self.open_tape = open_tape
        self.device = device or torch.device("cpu")
        self.timeout_s = timeout_s
        self.sends_in_flight = sends_in_flight
        self._connected = False
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
        unknown = {action.kind for action in actions} - set(_METHODS)
        if unknown:
            raise ValueError(f"no method runs actions of kind {', '.join(sorted(unknown))}")
        if self._unfinished:
            raise RuntimeError("an earlier run failed and its messages may still be under way: start anew")
        self._unfinished = pp.size > 1
        progress = Progress(self.mesh.rank, pp.index, pp.size)
        run = _Run(self, progress, forward_only, events)
        try:
            run.open(actions, connect=not self._connected)
            self._connected = True
            with torch.set_grad_enabled(not forward_only):
                for action in actions:
                    run.step(action)
            run.finish()
            self._unfinished = False
        except Exception as cause:
            raise progress.error(cause) from cause
        finally:
            run.abandon()
        return [run.reports[m] for m in sorted(run.reports)]


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

    def __init__(self, owner: Executor, progress: Progress, forward_only: bool, events: list[Event] | None) -> None:
        self.owner, self.progress, self.forward_only, self.events = owner, progress, forward_only, events
        self.is_last = owner.mesh.pp.index == owner.mesh.pp.size - 1
        self.reports: dict[int, dict[str, Tensor]] = {}
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.inboxes: dict[str, Inbox] = {}
        self.outboxes: dict[str, Outbox] = {}
        self.wait_s = 0.0
        self.sent_bytes = self.received_bytes = 0

    # -- exchange --------------------------------------------------------------------------------------

    def open(self, actions: Sequence[Action], connect: bool) -> None:
        """Links to both neighbours, and the first receive of each direction posted."""
        mesh = self.owner.mesh
        before, after = mesh.pp.index - 1, mesh.pp.index + 1
        incoming, outgoing = {}, {}
        if before >= 0:
            incoming["F"] = self._link("F", before)
            outgoing["B"] = self._link("B", before)
        if after < mesh.pp.size:
            outgoing["F"] = self._link("F", after)
            incoming["B"] = self._link("B", after)
        if connect:
            for kind in ("F", "B"):
                _connect(self.progress, incoming.get(kind), outgoing.get(kind))
        self.outboxes = {kind: Outbox(link) for kind, link in outgoing.items()}
        for kind, link in incoming.items():
            messages = [(action, self._expected(action)) for action in actions if action.kind == kind]
            self.inboxes[kind] = Inbox(link, messages)

    def _link(self, kind: str, peer: int) -> Link:
        mesh, owner = self.owner.mesh, self.owner
        axis = mesh.pp_forward if kind == "F" else mesh.pp_backward
        return Link(axis, peer, owner.device, owner.timeout_s, self.progress)

    def _expected(self, action: Action) -> Boundary:
        specs = self.owner.specs[action.chunk]
        return specs.received if action.kind == "F" else gradient_specs(specs.sent)

    def receive(self, action: Action) -> tuple[Tensor, ...]:
        """The message of `action` (() if none comes), and this rank's own earlier messages off its hands."""
        start = time.perf_counter()
        inbox = self.inboxes.get(action.kind)
        tensors = inbox.receive(action) if inbox else ()
        for outbox in self.outboxes.values():
            outbox.settle(self.owner.sends_in_flight)
        self.wait_s = time.perf_counter() - start
        self.received_bytes = sum(tensor.nbytes for tensor in tensors)
        return tensors

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        outbox = self.outboxes.get(action.kind)
        if outbox:
            outbox.send(action, tensors)
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
        flight = self.flights[action.micro_batch, action.chunk] = _Flight(arrival, tape)
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
        if not self.is_last:
            check_outputs(result, self.owner.specs[action.chunk].sent)
        elif not isinstance(result, StageResult):
            raise TypeError(f"the last stage's forward returns a StageResult, got {type(result).__name__}")
        elif result.loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, got shape {list(result.loss.shape)}")

    def backward(self, action: Action) -> None:
        gradients: Sequence[Tensor] = self.receive(action)
        self.progress.enter("compute", action)
        flight = self.flights.pop((action.micro_batch, action.chunk))
        if flight.seed is not None:
            gradients = (flight.seed,)
        pairs = [(edge, g) for edge, g in zip(flight.edges, gradients, strict=True) if edge is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        flight.tape.close()
        self.send(action, flight.arrival.take(self.owner.device))

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


_METHODS: dict[str, Callable[[_Run, Action], None]] = {"F": _Run.forward, "B": _Run.backward}


def _connect(progress: Progress, incoming: Link | None, outgoing: Link | None) -> None:
    """Pass one byte along a direction: NCCL makes the communicator of a pair at its first message, and both
    ends wait.

    Later a receive is posted long before its message can exist; the first one must not be. gloo is connected
    already.
    """
    for verb, link in (("recv", incoming), ("send", outgoing)):
        if link is None or not link.stream_ordered:
            continue
        progress.enter(verb, None, link.peer_rank)
        byte = torch.zeros(1, dtype=torch.uint8, device=link.device)
        link.wait(verb, None, [link.irecv(byte) if verb == "recv" else link.isend(byte)])
