"""Leaving a run that failed on this rank alone."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from megackpt.mesh.rendezvous import leave_broken
from megackpt.train import loop
from megackpt.train.loop import CollectiveError


class Exited(BaseException):
    """In the place of the end of this process."""


class Board:
    """Remembers what was told; the real one prints it."""

    place = "rank 1"

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def failed(self, message: str, how: str) -> None:
        self.told.append((message, how))


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes that processes would have ended with."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return codes


def fail(monkeypatch: pytest.MonkeyPatch, backend: str, error: Exception) -> Board:
    """A run over that backend in which this rank fails so."""

    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(loop, "build", build)
    board = Board()
    try:
        loop._watched(None, None, board, 0.0)  # type: ignore[arg-type]
    except (Exited, type(error)):
        pass
    return board


def test_with_nccl_a_failing_rank_says_why_and_ends_before_its_groups_would_wait(
    monkeypatch: pytest.MonkeyPatch, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    board = fail(monkeypatch, "nccl", ZeroDivisionError("by zero"))
    assert board.told == [("rank 1: ZeroDivisionError: by zero", "it failed (ZeroDivisionError)")]
    assert exits == [1]
    said = capfd.readouterr().err
    assert said.startswith("Traceback") and said.endswith("ZeroDivisionError: by zero\n")
    board = fail(monkeypatch, "nccl", CollectiveError("rank 0 is gone"))
    assert (board.told, exits) == ([("rank 0 is gone", "its collective failed")], [1, 1])
    assert capfd.readouterr().err == ""


def test_with_gloo_it_leaves_in_the_usual_way(monkeypatch: pytest.MonkeyPatch, exits: list[int]) -> None:
    assert fail(monkeypatch, "gloo", ZeroDivisionError()).told
    assert exits == []


def test_a_process_on_its_own_leaves_in_the_usual_way(monkeypatch: pytest.MonkeyPatch, exits: list[int]) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    leave_broken(ZeroDivisionError())
    assert exits == []
