"""Point-to-point transfers between neighbouring stages: one link per direction, in program order, with a hard
end.

Forward and backward messages use groups of their own, so crossing sends never queue behind each other in one
communicator. Within a link both ends call in the order of the schedule: one isend per tensor here, one irecv
per tensor there. The receiver posts for the next message as soon as that can exist, so a sender never waits for the
receiver's computation to end unless it runs two messages ahead.

No sooner, because a receive posted with NCCL is a kernel that occupies its part of the GPU until the message is there,
and CUDA does not promise that anything else gets past it: loading a kernel at its first launch, allocating or freeing
memory, making a communicator may all wait for what runs. If the message needed something that this rank has still to
do, neither would ever happen. So a posted receive needs nothing more of its own rank (`plan.machine.needed_before`).

gloo blocks the host until a transfer is done, and so carries the time-out itself. NCCL orders transfers on
the stream: waiting costs the host nothing, and `finish` looks at the end of a run whether they all came
through.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.mesh.device import Event, mark
from megackpt.mesh.process_mesh import Axis
from megackpt.pipeline.boundary import Boundary
from megackpt.pipeline.errors import Progress
from megackpt.plan.schedule import Action

_POLL_S = 0.001


class Link:
    """One direction between this rank and one neighbour (`peer` is its index on the axis). `wraps`: it is the one
    that closes the ring of stages.
    """

    def __init__(
        self,
        axis: Axis,
        peer: int,
        device: torch.device,
        timeout_s: float,
        progress: Progress,
        *,
        wraps: bool = False,
    ) -> None:
        if axis.group is None:
            raise ValueError("a link needs a group; an axis of size 1 has none")
        self.group, self.peer, self.peer_rank = axis.group, peer, axis.ranks[peer]
        self.stream_ordered = dist.get_backend(axis.group) == "nccl"
        self.device, self.wraps = device, wraps
        self.carrier = device if self.stream_ordered else torch.device("cpu")  # gloo moves host memory only
        self.progress = progress
        self._limit = timedelta(seconds=timeout_s)
        self._issued: list[tuple[str, Action | None, Event]] = []

    def isend(self, tensor: Tensor) -> dist.Work | None:
        """Start to send; None for a tensor without elements, which is not sent at all."""
        return dist.isend(tensor, group=self.group, group_dst=self.peer) if tensor.numel() else None

    def irecv(self, tensor: Tensor) -> dist.Work | None:
        """Start to receive into `tensor`; None for a tensor without elements."""
        return dist.irecv(tensor, group=self.group, group_src=self.peer) if tensor.numel() else None

    def wait(self, verb: str, action: Action | None, works: Sequence[dist.Work | None]) -> None:
        """Until the transfers are done (gloo), or until the stream will not run ahead of them (NCCL)."""
        self.progress.enter(verb, action, self.peer_rank)
        for work in works:
            if work is not None and self.stream_ordered:
                work.wait()
            elif work is not None:
                work.wait(self._limit)
        if self.stream_ordered:
            # Not the works, each of which holds its tensor for as long as it lives itself.
            self._issued.append((verb, action, mark(self.device)))

    def finish(self) -> None:
        """All waited-for transfers have really happened. Raises TimeoutError, with the first that has not
        entered.
        """
        end = time.monotonic() + self._limit.total_seconds()
        for verb, action, done in self._issued:
            self.progress.enter(verb, action, self.peer_rank)
            while not done.reached():
                if time.monotonic() > end:
                    raise TimeoutError(f"timed out after {self._limit.total_seconds():g} s")
                time.sleep(_POLL_S)
        self._issued.clear()


class Outbox:
    """Messages on their way out, oldest first. Each tensor is kept alive until it has left, no longer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leaving: deque[tuple[Action, list[dist.Work | None], list[Tensor]]] = deque()

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start to send the result of `action`. The caller should drop its own references."""
        self._link.progress.enter("send", action, self._link.peer_rank)
        carried = [tensor.detach().contiguous().to(self._link.carrier) for tensor in tensors]
        self._leaving.append((action, [self._link.isend(tensor) for tensor in carried], carried))

    def settle(self, but: Action | None = None) -> None:
        """Wait until all messages have left, but the one that the action `but` sent; free them."""
        while self._leaving and self._leaving[0][0] != but:
            action, works, _ = self._leaving[0]
            self._link.wait("send", action, works)
            self._leaving.popleft()

    def finish(self) -> None:
        self.settle()
        self._link.finish()


@dataclass(frozen=True, slots=True)
class Message:
    """What `action` takes; it cannot exist before `needs` actions of this rank are over."""

    action: Action
    boundary: Boundary
    needs: int = 0


class Inbox:
    """Messages to come, in the order of the schedule; the next one is posted as soon as it can exist."""

    def __init__(self, link: Link, expected: Sequence[Message]) -> None:
        self._link = link
        self._expected = deque(expected)
        self._posted: tuple[Action, list[Tensor], list[dist.Work | None]] | None = None

    def receive(self, action: Action, over: int) -> tuple[Tensor, ...]:
        """The message that `action` needs: fresh tensors on the device. Posts the next one before it returns; `over`:
        see `post`.
        """
        if self._posted is None or self._posted[0] != action:
            raise RuntimeError(f"{action} asks for a message out of the schedule's order")
        _, tensors, works = self._posted
        self._link.wait("recv", action, works)
        self._posted = None
        self.post(over)
        return tuple(tensor.to(self._link.device) for tensor in tensors)

    def post(self, over: int) -> None:
        """Post for the next message, if none is posted for and `over` actions of this rank are all that it needs."""
        if self._posted is not None or not self._expected or self._expected[0].needs > over:
            return
        message = self._expected.popleft()
        action, boundary = message.action, message.boundary
        self._link.progress.enter("recv", action, self._link.peer_rank)
        tensors = [spec.empty(self._link.carrier) for spec in boundary]
        self._posted = (action, tensors, [self._link.irecv(tensor) for tensor in tensors])

    def finish(self) -> None:
        self._link.finish()
