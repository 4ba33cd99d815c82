"""Dashboards: names, one run on one rank, offline, and that their failure never reaches the run."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megackpt.observe.record import EvaluationRecord, IterationRecord, MemoryCounters
from megackpt.observe.writers import (
    Writers,
    build_writers,
    evaluation_scalars,
    iteration_scalars,
    logging_rank,
)

ROOT = Path(__file__).parents[2]
RECORD = IterationRecord(
    iteration=3,
    train_iters=10,
    consumed_samples=24,
    global_batch_size=8,
    iteration_time_s=0.25,
    learning_rate=1e-3,
    lm_loss=5.5,
    grad_norm=1.5,
    num_zeros=4,
    params_norm=9.0,
    world_size=4,
    tokens_per_s=100.0,
    tflops_per_device=0.5,
    saved_activation_bytes=[10, 30],
    memory=MemoryCounters(allocated=1, max_allocated=2, reserved=3),
)
MEGATRON = {
    "learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm",
    "iteration-time", "throughput", "skipped-train-samples", "mem-reserved-bytes", "mem-allocated-bytes",
    "mem-max-allocated-bytes",
}  # fmt: skip


def test_scalar_names() -> None:
    values = iteration_scalars(RECORD)
    assert values.keys() == MEGATRON | {"tokens-per-second", "saved-activation-bytes"}
    assert values["saved-activation-bytes"] == 30
    assert iteration_scalars(replace(RECORD, skipped_iterations=1))["skipped-train-samples"] == 8
    few = iteration_scalars(replace(RECORD, grad_norm=None, memory=None, lm_loss=None))
    assert not few.keys() & {"grad-norm", "mem-allocated-bytes", "lm loss"}
    evaluation = EvaluationRecord(iteration=3, consumed_samples=24, loss=0.0)
    assert evaluation_scalars(evaluation) == {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
    assert evaluation_scalars(replace(evaluation, split="test")).keys() == {"lm loss test", "lm loss test ppl"}


def test_tensorboard(tmp_path: Path) -> None:
    warnings: list[str] = []
    writers = build_writers(is_logging_rank=True, tensorboard_dir=str(tmp_path / "tb"), warn=warnings.append)
    writers.iteration(RECORD)
    writers.evaluation(EvaluationRecord(iteration=3, consumed_samples=24, loss=5.25))
    writers.close()
    assert warnings == []
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= MEGATRON | {"lm loss validation", "lm loss validation ppl"}
    versus = {tag.removesuffix(" vs samples") for tag in tags if tag.endswith(" vs samples")}
    assert versus == {
        "learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm",
        "lm loss validation", "lm loss validation ppl",
    }  # fmt: skip
    (loss,) = events.Scalars("lm loss")
    (by_samples,) = events.Scalars("lm loss vs samples")
    assert (loss.step, loss.value) == (3, 5.5)
    assert (by_samples.step, by_samples.value) == (24, 5.5)


def test_wandb_offline_is_one_run_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on tp 2 x pp 2: every rank builds its writers, one makes a run. No network: every proxy is a dead port."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MY_ENV_PASSWORD", "env-hunter2")
    monkeypatch.setenv("SLURM_JOB_COMMENT", "slurm-hunter2")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--some-token", "argv-hunter2"])
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    warnings: list[str] = []
    for rank in range(4):
        writers = build_writers(
            is_logging_rank=rank == logging_rank(4),
            wandb_project="project",
            wandb_exp_name="name",
            directory=str(tmp_path / "run"),
            config={"hidden_size": 96, "tokenizer_model": "shown.model", "hf_token": "config-hunter2"},
            warn=warnings.append,
        )
        writers.iteration(RECORD)
        writers.evaluation(EvaluationRecord(iteration=3, consumed_samples=24, loss=5.25))
        writers.close()
    assert warnings == []
    (run,) = (p for p in (tmp_path / "run" / "wandb").iterdir() if "-run-" in p.name and p.is_dir())
    assert run.name.startswith("offline-run-")
    (log,) = run.glob("*.wandb")
    content = log.read_bytes()
    for name in ("lm loss", "learning-rate", "grad-norm", "throughput", "mem-max-allocated-bytes", "lm loss vs samples",
                 "lm loss validation"):  # fmt: skip
        assert name.encode() in content
    assert b"shown.model" in content and b"hf_token" in content
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes(), file


def _fake_wandb(**attributes: object) -> types.ModuleType:
    module = types.ModuleType("wandb")
    working = {"Settings": lambda **_: None, "login": lambda prompt: True, "teardown": lambda: None}
    module.__dict__.update({**working, **attributes})
    return module


def _wandb_writers(tmp_path: Path, warnings: list[str]) -> Writers:
    return build_writers(is_logging_rank=True, wandb_project="p", directory=str(tmp_path), warn=warnings.append)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "ModuleNotFoundError: "),
        (_fake_wandb(), "AttributeError: "),
        (_fake_wandb(init=lambda **_: (_ for _ in ()).throw(RuntimeError("no\nnetwork"))), "RuntimeError: no network"),
        (_fake_wandb(init=lambda **_: sys.exit(1)), "SystemExit: 1"),
    ],
)
def test_a_wandb_that_cannot_start_is_one_warning(
    module: types.ModuleType | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    warnings: list[str] = []
    writers = _wandb_writers(tmp_path, warnings)
    writers.iteration(RECORD)
    writers.close()
    (warning,) = warnings
    assert warning.startswith(f"W&B is off for the rest of this run: {reason}")


def test_without_credentials_the_run_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    seen: list[object] = []

    def init(**arguments: object) -> object:
        seen.append(arguments["mode"])
        return types.SimpleNamespace(define_metric=lambda *a, **k: None, log=lambda *a, **k: None, finish=lambda: None)

    for logged_in, mode in ((False, "offline"), (True, None)):
        fake = _fake_wandb(init=init, login=lambda prompt, answer=logged_in: answer)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        warnings: list[str] = []
        _wandb_writers(tmp_path, warnings).close()
        assert seen.pop() == mode
        assert ["offline run" in w for w in warnings] == ([True] if mode else [])


class _Failing:
    def __init__(self, after: int) -> None:
        self.left = after
        self.closed = False

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed = True


def test_a_writer_that_fails_later_is_dropped_and_the_other_goes_on() -> None:
    bad, good = _Failing(after=2), _Failing(after=1000)
    warnings: list[str] = []
    writers = Writers([("bad", lambda: bad), ("good", lambda: good)], warnings.append)
    for _ in range(5):
        writers.iteration(RECORD)
    writers.close()
    (warning,) = warnings
    assert warning == "bad is off for the rest of this run: OSError: [Errno 28] No space left on device"
    assert bad.left == -1 and good.left == 1000 - 5 and good.closed


def test_nothing_heavy_is_imported_until_a_dashboard_is_made() -> None:
    code = (
        "import sys\n"
        "import megackpt.observe.log_line, megackpt.observe.metrics, megackpt.observe.report\n"
        "import megackpt.observe.throughput, megackpt.observe.progress, megackpt.observe.host_memory\n"
        "from megackpt.observe.writers import build_writers\n"
        "build_writers(is_logging_rank=False, tensorboard_dir='x', wandb_project='y')\n"
        "heavy = {'torch', 'wandb', 'tensorboard', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
