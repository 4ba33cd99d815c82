"""The worker pool itself: results by rank, failures named, hangs ended, nothing left behind."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import ROOT, DistributedFailure, DistributedTimeout, run_distributed


def summed(rank: int, world_size: int, scale: float) -> tuple[int, torch.Tensor, str]:
    value = torch.full((2,), scale * (rank + 1), dtype=torch.float64)
    dist.all_reduce(value)
    return rank, value, os.environ["RANK"] + os.environ["LOCAL_RANK"] + os.environ["WORLD_SIZE"]


def one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the culprit")
    dist.barrier()


def one_hangs(rank: int, world_size: int) -> None:
    if rank == 2:
        dist.barrier()  # the others never come


def one_dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def unpicklable(rank: int, world_size: int) -> Any:
    return lambda: None


def starts_a_child(rank: int, world_size: int, path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def spoils_state(rank: int, world_size: int) -> None:
    os.environ["SPOILED"] = "1"
    os.chdir("/")
    torch.manual_seed(rank)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    dist.new_group([0])


def state(rank: int, world_size: int) -> tuple[Any, ...]:
    return (
        "SPOILED" in os.environ,
        os.getcwd(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        dist.get_world_size(),
        torch.rand(1).item(),
    )


def open_files(rank: int, world_size: int) -> tuple[int, int]:
    dist.new_group([0, 1])
    return os.getpid(), len(os.listdir("/proc/self/fd"))


def test_results_come_by_rank_and_tensors_travel() -> None:
    for world_size in (1, 4, 2):
        results = run_distributed(summed, world_size, 0.5)
        assert [rank for rank, _, _ in results] == list(range(world_size))
        assert [environment for _, _, environment in results] == [f"{r}{r}{world_size}" for r in range(world_size)]
        expected = 0.5 * world_size * (world_size + 1) / 2
        assert all(value.tolist() == [expected, expected] for _, value, _ in results)


def test_a_failure_names_rank_and_line_and_ends_the_others_soon() -> None:
    run_distributed(summed, 2, 1.0)
    start = time.monotonic()
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(one_raises, 2)
    assert time.monotonic() - start < 5
    assert failure.value.rank == 1
    assert [report.status for report in failure.value.reports] == ["hung", "raised"]
    assert "the culprit" in str(failure.value) and "in one_raises" in str(failure.value)
    assert not isinstance(failure.value, DistributedTimeout)


def test_a_hang_is_killed_and_the_next_case_works() -> None:
    run_distributed(summed, 4, 1.0)
    start = time.monotonic()
    with pytest.raises(DistributedTimeout) as failure:
        run_distributed(one_hangs, 4, timeout=1)
    assert time.monotonic() - start < 10
    assert failure.value.rank == 2
    assert "in one_hangs" in str(failure.value) and "still running after 1 s" in str(failure.value)
    assert len(run_distributed(summed, 4, 1.0)) == 4


def test_a_dead_process_is_named_with_its_exit_code() -> None:
    with pytest.raises(DistributedFailure, match="rank 1 died: process exited with code 7") as failure:
        run_distributed(one_dies, 2)
    assert failure.value.rank == 1
    assert len(run_distributed(summed, 2, 1.0)) == 2


def test_what_a_killed_case_started_dies_too(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(DistributedTimeout):
        run_distributed(starts_a_child, 1, str(path), timeout=2)
    deadline = time.monotonic() + 5
    while running(int(path.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(DistributedFailure, match="rank 0 raised"):
        run_distributed(unpicklable, 1)


def test_only_module_level_functions_travel() -> None:
    with pytest.raises(ValueError, match="module level"):
        run_distributed(lambda rank, world_size: None, 1)


def test_nothing_of_a_case_reaches_the_next() -> None:
    clean = run_distributed(state, 2)
    run_distributed(spoils_state, 2)
    assert run_distributed(state, 2) == clean
    assert clean[0] == clean[1]
    assert clean[0][:6] == (False, str(ROOT), True, torch.float32, 1, 2)


def test_groups_leave_no_descriptor_and_a_warm_case_is_quick() -> None:
    first = run_distributed(open_files, 2)
    start = time.monotonic()
    for _ in range(10):
        last = run_distributed(open_files, 2)
    assert last == first  # the same processes with the same number of open files
    assert (time.monotonic() - start) / 10 < 1.0
