"""What stages send each other, in which order: seen from outside of the pipeline."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.pipeline import Executor, StageResult, TensorSpec
from tests.pipeline.chain import SPEC, Stage, boundary_specs, pipeline_mesh
from tests.pool import run_distributed


def log_transfers(rank: int, stages: int, micro_batches: int, overlap: bool) -> list[str]:
    """What a rank posts, waits for and computes, in order, seen from outside of the pipeline."""
    log: list[str] = []
    sent, received = itertools.count(), itertools.count()

    class Waited:
        def __init__(self, work: dist.Work, name: str) -> None:
            self.work, self.name = work, name

        def wait(self, *limit: Any) -> None:
            log.append(f"wait {self.name}")
            self.work.wait(*limit)

    real_send, real_receive = dist.isend, dist.irecv

    def isend(*args: Any, **kwargs: Any) -> Waited:
        name = f"send {next(sent)}"
        log.append(name)
        return Waited(real_send(*args, **kwargs), name)

    def irecv(*args: Any, **kwargs: Any) -> Waited:
        name = f"post {next(received)}"
        log.append(name)
        return Waited(real_receive(*args, **kwargs), name)

    stage = Stage(rank, stages, micro_batches)
    for parameter in list(stage.parameters())[-1:]:  # the first that a backward reaches
        parameter.register_hook(lambda _: log.append("B"))

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        log.append("F")
        return stage(chunk, micro_batch, received)

    specs = boundary_specs(rank, stages, (SPEC,))
    executor = Executor(pipeline_mesh(stages), forward, specs, timeout_s=20, overlap=overlap)
    dist.isend, dist.irecv = isend, irecv  # type: ignore[assignment]
    try:
        executor.run(micro_batches)
    finally:
        dist.isend, dist.irecv = real_send, real_receive
    return log


def test_messages_are_posted_early_and_waited_for_late() -> None:
    """Three micro-batches on two stages.  A receive is posted as soon as its message can exist, the first gradient's
    when the forward that it comes from is sent; later ones before the one at hand is used.  A send is waited for only
    when the action after it has been computed."""
    first, last = run_distributed(log_transfers, 2, 3, True)
    assert first == [
        *("F", "send 0", "post 0", "F", "send 1"),
        *("wait send 0", "wait post 0", "post 1", "B"),
        *("wait send 1", "F", "send 2"),
        *("wait post 1", "post 2", "B"),
        *("wait send 2", "wait post 2", "B"),
    ]
    assert last == [
        *("post 0", "wait post 0", "post 1", "F", "B", "send 0"),
        *("wait post 1", "post 2", "F", "wait send 0", "B", "send 1"),
        *("wait post 2", "F", "wait send 1", "B", "send 2", "wait send 2"),
    ]
    first, last = run_distributed(log_transfers, 2, 3, False)
    assert first[:8] == ["F", "send 0", "post 0", "wait send 0", "F", "send 1", "wait send 1", "wait post 0"]


def log_handshakes(rank: int, stages: int) -> list[list[str]]:
    """Sizes and directions of all messages of an evaluation, a training run and another, as NCCL would see them."""
    real_backend, real_send, real_receive = dist.get_backend, dist.isend, dist.irecv
    log: list[str] = []

    def isend(tensor: Tensor, **kwargs: Any) -> dist.Work:
        log.append(f"send {tensor.nbytes}")
        return real_send(tensor, **kwargs)

    def irecv(tensor: Tensor, **kwargs: Any) -> dist.Work:
        log.append(f"post {tensor.nbytes}")
        return real_receive(tensor, **kwargs)

    executor = Executor(pipeline_mesh(stages), Stage(rank, stages, 1), boundary_specs(rank, stages, (SPEC,)))
    dist.get_backend, dist.isend, dist.irecv = lambda group: "nccl", isend, irecv  # type: ignore[assignment]
    found = []
    try:
        for forward_only in (True, False, False):
            executor.run(1, forward_only=forward_only)
            found.append(log.copy())
            log.clear()
    finally:
        dist.get_backend, dist.isend, dist.irecv = real_backend, real_send, real_receive
    return found


def test_every_direction_is_opened_with_one_byte_before_it_is_needed() -> None:
    """Also where an evaluation comes before the first backward: its links are not those of the gradients."""
    first, last = run_distributed(log_handshakes, 2)
    send, post = f"send {SPEC.nbytes}", f"post {SPEC.nbytes}"
    assert first == [["send 1", send], ["post 1", send, post], [send, post]]
    assert last == [["post 1", post], ["send 1", post, send], [post, send]]


# -- size ------------------------------------------------------------------------------------------------------------


def large_messages(rank: int, stages: int, rows: int, micro_batches: int, repeats: int) -> list[float]:
    spec = TensorSpec((rows, 1024), torch.float32)
    weight = torch.ones((), requires_grad=True)

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        x = received[0] if received else torch.full(spec.shape, float(micro_batch + 1))
        output = x * weight
        return StageResult(output.mean(), {}) if rank == stages - 1 else (output,)

    executor = Executor(pipeline_mesh(stages), forward, boundary_specs(rank, stages, (spec,)), timeout_s=20)
    found = []
    for _ in range(repeats):
        weight.grad = None
        executor.run(micro_batches)
        found.append(weight.grad.item())  # type: ignore[attr-defined]
    return found


def test_messages_of_many_megabytes_do_not_block_each_other() -> None:
    """8 MiB a message, both directions crossing. A weight's gradient is the sum of the inputs' means, exactly."""
    for gradients in run_distributed(large_messages, 2, 2048, 5, 3):
        assert gradients == [15.0] * 3
    for gradients in run_distributed(large_messages, 4, 2048, 6, 1):
        assert gradients == [21.0]
