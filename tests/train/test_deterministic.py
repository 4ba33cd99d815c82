"""`--deterministic-mode` through the command's own entry: what it sets, what it refuses, and that runs repeat."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megackpt.config.run import RunConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.train.loop import run
from tests.layouts import SMALL_GPT, Flags, logged

FLAGS: Flags = SMALL_GPT | {
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "deterministic-mode": True,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(threads)


def test_runs_repeat_to_the_bit(tmp_path: Path) -> None:
    rows = []
    for name, threads in (("one", 1), ("two", 2)):
        torch.set_num_threads(threads)  # whatever the environment says, a deterministic run has one
        path = tmp_path / f"{name}.jsonl"
        assert run(RunConfig.from_flags(FLAGS | {"metrics-file": str(path)}), LaunchEnvironment.detect({})) == 0
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
        rows.append(logged(path, "lm_loss", "grad_norm"))
    assert rows[0] == rows[1] and len(rows[0]) == 5


def test_an_environment_that_contradicts_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device: here one that is claimed, since the refusal comes before its first use."""
    seam = DeviceSeam("cuda", torch.device("cuda", 0), "nccl")
    monkeypatch.setattr(DeviceSeam, "create", staticmethod(lambda *args: seam))
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert run(RunConfig.from_flags(FLAGS), LaunchEnvironment.detect({})) == 2
    assert "--deterministic-mode contradicts CUBLAS_WORKSPACE_CONFIG=:0:0" in capsys.readouterr().err
