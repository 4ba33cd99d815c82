"""Whatever goes wrong, the error says which rank, at which action, with whom, and what was done last."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.mesh.process_mesh import Axis
from megackpt.pipeline import ChunkSpecs, Executor, PipelineError, StageResult, TensorSpec, p2p
from megackpt.pipeline.errors import Progress
from megackpt.pipeline.p2p import Link
from megackpt.plan.schedule import Action
from tests.pipeline.chain import SPEC, Stage, boundary_specs, pipeline_mesh
from tests.pool import DistributedFailure, run_distributed

TIMEOUT_S = 1.0


def fail(rank: int, stages: int, how: str, micro_batches: int) -> dict[str, Any]:
    """The last rank fails in its own way at micro-batch 1; every rank tells what its error was."""
    stage = Stage(rank, stages, micro_batches)
    closed: list[int] = []

    def forward(chunk: int, micro_batch: int, received: Any) -> Any:
        if rank == stages - 1 and micro_batch == 1:
            if how == "raise":
                raise KeyError("no such token")
            if how == "stall":
                time.sleep(2.5)
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "shape":
                return (torch.zeros(1),)
        return stage(chunk, micro_batch, received)

    class Tape:
        def __init__(self, chunk: int, micro_batch: int) -> None:
            self.micro_batch = micro_batch

        def __enter__(self) -> None: ...

        def __exit__(self, *failure: object) -> None: ...

        def rebuild_ahead(self, in_flight: int) -> None: ...

        def close(self) -> None:
            closed.append(self.micro_batch)

        def saved_bytes(self) -> int:
            return 0

    executor = Executor(
        pipeline_mesh(stages),
        forward,
        boundary_specs(rank, stages, (SPEC,)),
        open_tape=Tape,
        timeout_s=TIMEOUT_S,
    )
    dist.barrier()  # ranks that start together: only the failure makes anyone wait
    start = time.monotonic()
    try:
        executor.run(micro_batches)
    except PipelineError as error:
        if how == "die":
            raise
        return {
            "text": str(error),
            "at": (error.rank, error.stage, error.action, error.peer),
            "cause": type(error.__cause__).__name__,
            "seconds": time.monotonic() - start,
            "closed": sorted(closed),
        }
    raise AssertionError("the run should have failed")


def test_a_raising_stage_is_named_and_its_peer_times_out() -> None:
    waiting, raising = run_distributed(fail, 2, "raise", 4, timeout=20)
    assert raising["at"] == (1, 1, "F1.0", None) and raising["cause"] == "KeyError"
    assert re.match(
        r"rank 1 \(stage 1 of 2\): compute for F1\.0 failed after \d\.\d s: KeyError: 'no such token'",
        raising["text"],
    )
    assert raising["text"].endswith("last completed: F0.0 B0.0")
    assert waiting["at"] == (0, 0, "B1.0", 1)
    assert re.match(
        r"rank 0 \(stage 0 of 2\): recv for B1\.0 from rank 1 failed after 1\.\d s: .*Timed out waiting 1000ms",
        waiting["text"],
    )
    assert waiting["text"].endswith("last completed: F0.0 F1.0 B0.0 F2.0")
    assert waiting["seconds"] < 4
    assert waiting["closed"] == [0, 1, 2] and raising["closed"] == [0, 1], "every tape is closed, also after a failure"


def test_a_stalled_stage_is_found_by_its_neighbour_after_the_time_out() -> None:
    first, second, _ = run_distributed(fail, 3, "stall", 4, timeout=20)
    assert second["at"] == (1, 1, "B1.0", 2)
    assert re.match(r"rank 1 \(stage 1 of 3\): recv for B1\.0 from rank 2 failed after 1\.\d s", second["text"])
    assert first["at"][0] == 0 and first["at"][3] == 1, "and the next one by its own neighbour"
    assert max(first["seconds"], second["seconds"]) < 5


def test_a_killed_rank_ends_the_others_with_its_name() -> None:
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(fail, 2, "die", 4, timeout=20)
    assert caught.value.rank == 1 and caught.value.reports[1].status == "died"
    survivor = caught.value.reports[0]
    assert survivor.status == "raised"
    assert "PipelineError: rank 0 (stage 0 of 2): " in survivor.summary and "from rank 1" in survivor.summary


def outputs_of_a_first_stage(rank: int, stages: int, kind: str) -> str:
    """What stage 0 of 2 says to outputs that the next stage does not expect (PP-06: another micro-batch shape)."""
    ids = torch.zeros(2, dtype=torch.int64)
    outputs: dict[str, Any] = {
        "shape": (torch.zeros(2, 5, dtype=torch.float64), ids),
        "dtype": (torch.zeros(3, 5), ids),
        "count": (torch.zeros(3, 5, dtype=torch.float64),),
        "type": torch.zeros(3, 5, dtype=torch.float64),
        "gradient": (torch.zeros(3, 5, dtype=torch.float64), torch.zeros(2, requires_grad=True)),
        "result": StageResult(torch.zeros(()), {}),
    }
    second = TensorSpec((2,), torch.float32 if kind == "gradient" else torch.int64, requires_grad=False)
    specs = boundary_specs(rank, stages, (SPEC, second))
    executor = Executor(pipeline_mesh(stages), lambda *_: outputs[kind], specs, timeout_s=TIMEOUT_S)
    if rank == 1:
        return ""
    with pytest.raises(PipelineError) as caught:
        executor.run(1)
    with pytest.raises(RuntimeError, match="an earlier run failed"):
        executor.run(1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", "output 0 of the stage is [2, 5] float64, the next stage expects [3, 5] float64"),
        ("dtype", "output 0 of the stage is [3, 5] float32, the next stage expects [3, 5] float64"),
        ("count", "the stage returned 1 tensors, the next stage expects 2"),
        ("type", "a stage that is not the last returns a tuple of tensors, got Tensor"),
        ("gradient", "output 1 of the stage requires a gradient, but the boundary returns none for it"),
        ("result", "a stage that is not the last returns a tuple of tensors, got StageResult"),
    ],
)
def test_outputs_that_do_not_fit_the_boundary_are_refused(kind: str, message: str) -> None:
    assert message in run_distributed(outputs_of_a_first_stage, 2, kind, timeout=20)[0]


def misuse(rank: int, stages: int) -> list[str]:
    mesh = pipeline_mesh(1)
    texts = []

    def caught(kind: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(kind) as error:
            call()
        texts.append(str(error.value))

    def run(output: Any, **options: Any) -> Callable[[], object]:
        return lambda: Executor(mesh, lambda *_: output, [ChunkSpecs()], **options).run(1)

    caught(PipelineError, run((torch.zeros(()),)))
    caught(PipelineError, run(StageResult(torch.zeros(2), {})))
    caught(ValueError, run(None, schedule=lambda *_: [Action("F", 0), Action("B", 0), Action("W", 0)]))
    caught(ValueError, lambda: Executor(mesh, run, [ChunkSpecs()]).run(0))
    caught(ValueError, lambda: Executor(mesh, run, [ChunkSpecs(received=(SPEC,))]))
    caught(ValueError, lambda: Executor(mesh, run, [ChunkSpecs(), ChunkSpecs()]))
    return texts


def test_misuse_is_refused() -> None:
    (texts,) = run_distributed(misuse, 1)
    assert "the last stage's forward returns a StageResult, got tuple" in texts[0]
    assert "the loss must be a scalar, got shape [2]" in texts[1]
    assert texts[2] == "a schedule with W actions needs a sink that puts weight gradients off"
    assert "at least 1 micro-batch, got 0" in texts[3]
    assert texts[4] == "stage 0 of 1 has no neighbour beyond its end of the model"
    assert texts[5] == "a single stage has one chunk, got specs for 2"


def test_a_tensor_that_cannot_have_a_gradient_is_refused_in_a_boundary() -> None:
    with pytest.raises(ValueError, match="int64 cannot require a gradient"):
        TensorSpec((2,), torch.int64)


def test_an_error_travels_between_processes() -> None:
    progress = Progress(rank=5, stage=1, stages=2)
    progress.enter("send", Action("F", 3), peer=7)
    error = pickle.loads(pickle.dumps(progress.error(TimeoutError("timed out"))))
    assert str(error).startswith("rank 5 (stage 1 of 2): send for F3.0 to rank 7 failed after 0.0 s: TimeoutError")
    assert (error.rank, error.stage, error.action, error.peer) == (5, 1, "F3.0", 7)


class FakeWork:
    """A transfer on a stream: waiting for it costs the host nothing.  As in NCCL it holds its tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.waits = tensor, []  # type: ignore[var-annotated]

    def wait(self, *limit: timedelta) -> None:
        self.waits.append(limit)


class FakeMark:
    """A place in the stream, reached when it was asked for so often."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def reached(self) -> bool:
        self.polls -= 1
        return self.polls < 0


def test_transfers_on_a_stream_are_looked_after_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    done, stuck = FakeMark(polls=3), FakeMark(polls=10**9)
    marks = iter((done, stuck))
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(p2p, "mark", lambda device: next(marks))
    axis = Axis(2, 0, (4, 6), group="group")  # type: ignore[arg-type]
    progress = Progress(rank=4, stage=0, stages=2)
    link = Link(axis, 1, torch.device("cpu"), timeout_s=0.05, progress=progress)
    work = FakeWork(torch.zeros(3))
    link.wait("recv", Action("B", 0), [work, None])  # type: ignore[list-item]
    assert work.waits == [()], "no time-out is passed: with one NCCL would block the host"
    tensor = weakref.ref(work.tensor)
    del work
    assert tensor() is None, "what has been waited for is the stream's: nothing here keeps it alive to the end of a run"
    link.finish()
    assert done.polls < 0
    link.wait("send", Action("F", 1), [FakeWork(torch.zeros(3))])  # type: ignore[list-item]
    with pytest.raises(TimeoutError, match="timed out after 0.05 s") as caught:
        link.finish()
    assert "send for F1.0 to rank 6 failed" in str(progress.error(caught.value))
