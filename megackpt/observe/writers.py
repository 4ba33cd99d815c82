"""Dashboards: TensorBoard and Weights & Biases under the scalar names that Megatron's users know.

One rank logs, the one that has the loss (the last, as Megatron). Only there are the packages imported, and
whatever goes wrong in them (not installed, broken install, no network, a full disk) is one warning: a
dashboard never ends a training run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from megackpt.observe.record import EvaluationRecord, IterationRecord
from megackpt.observe.redaction import redact

VS_SAMPLES = " vs samples"

# Scalars that are also written against consumed samples; times, rates and memory are not.
ALSO_VS_SAMPLES = frozenset(
    {
        "learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros",
        "params-norm", "lm loss validation", "lm loss validation ppl", "lm loss test", "lm loss test ppl",
    }
)  # fmt: skip


def logging_rank(world_size: int) -> int:
    """The one rank that prints the log line and owns every writer: the last, which has the loss."""
    return world_size - 1


def iteration_scalars(record: IterationRecord) -> dict[str, float]:
    """Scalars of one iteration by dashboard name; what was not measured is absent."""
    values: dict[str, float | None] = {
        "learning-rate": record.learning_rate,
        "batch-size": record.global_batch_size,
        "lm loss": record.lm_loss,
        "loss-scale": record.loss_scale,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "world-size": record.world_size,
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "iteration-time": record.iteration_time_s,
        "throughput": record.tflops_per_device,
        "skipped-train-samples": record.skipped_iterations * record.global_batch_size,
        # Ours.
        "tokens-per-second": record.tokens_per_s,
        "mfu": record.mfu,
        "hfu": record.hfu,
        "replay-overhead": record.replay_overhead,
    }
    if record.memory is not None:
        values["mem-allocated-bytes"] = record.memory.allocated
        values["mem-max-allocated-bytes"] = record.memory.max_allocated
        values["mem-reserved-bytes"] = record.memory.reserved
    if record.saved_activation_bytes:
        values["saved-activation-bytes"] = max(record.saved_activation_bytes)
    if record.peak_activation_bytes:
        values["peak-activation-bytes"] = max(record.peak_activation_bytes)
    return {name: float(value) for name, value in values.items() if value is not None}


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Scalars of one evaluation by dashboard name."""
    split = ("test" if record.split == "test" else "validation") + (f" {record.name}" if record.name else "")
    return {f"lm loss {split}": record.loss, f"lm loss {split} ppl": record.perplexity}


class ScalarWriter(Protocol):
    """Where named scalars go."""

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files in `directory`."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional package, seconds to import

        self._writer = SummaryWriter(directory)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if name in ALSO_VS_SAMPLES:
                self._writer.add_scalar(name + VS_SAMPLES, value, samples)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """One W&B run.

    W&B's own collection of metadata is off: it stores the command line and scheduler variables in clear.
    Output is not captured and no source is uploaded. Without credentials the run is written offline (`wandb
    sync` uploads it later): a login prompt would hang a launcher.
    """

    def __init__(
        self, project: str, name: str | None, config: Any, directory: str, warn: Callable[[str], None]
    ) -> None:
        """`config` is any mapping or dataclass and is redacted here; `directory` gets the `wandb` folder."""
        import wandb  # optional package, seconds to import

        os.makedirs(directory, exist_ok=True)
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            init_timeout=30,
        )
        self._end = wandb.teardown
        self._run = wandb.init(
            project=project,
            name=name,
            config=redact(config),
            dir=directory,
            mode=_mode(wandb, warn),
            settings=settings,
        )
        self._run.define_metric("samples", hidden=True)
        for scalar in sorted(ALSO_VS_SAMPLES):
            self._run.define_metric(scalar + VS_SAMPLES, step_metric="samples")

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        row = dict(values)
        row.update({name + VS_SAMPLES: value for name, value in values.items() if name in ALSO_VS_SAMPLES})
        row["samples"] = samples
        self._run.log(row, step=iteration)

    def close(self) -> None:
        self._run.finish()
        self._end()  # a service process writes the file; it may still be at it when `finish` returns


def _mode(wandb: Any, warn: Callable[[str], None]) -> Literal["offline"] | None:
    """None leaves the choice to the user's WANDB_MODE or settings file."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return None
    try:
        logged_in = wandb.login(prompt=False)
    except TypeError:  # a version whose login cannot be told not to ask
        logged_in = False
    if logged_in:
        return None
    warn("no W&B credentials found: writing an offline run; upload it with `wandb sync`")
    return "offline"


def warn_stderr(message: str) -> None:
    """Default place of warnings."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class Writers:
    """All dashboards of a run behind one guard.

    A writer that fails, when made or later, is dropped after one warning that names it; the others go on.
    """

    def __init__(
        self,
        makers: Sequence[tuple[str, Callable[[], ScalarWriter]]],
        warn: Callable[[str], None] = warn_stderr,
    ) -> None:
        """`makers`: (name for warnings, function that makes the writer)."""
        self._warn = warn
        self._writers: dict[str, ScalarWriter] = {}
        for name, make in makers:
            writer = self._guard(name, make)
            if writer is not None:
                self._writers[name] = writer

    def iteration(self, record: IterationRecord) -> None:
        self._scalars(iteration_scalars(record), record.iteration, record.consumed_samples)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._scalars(evaluation_scalars(record), record.iteration, record.consumed_samples)

    def close(self) -> None:
        """Flush and end every writer; may be called more than once."""
        writers, self._writers = self._writers, {}
        for name, writer in writers.items():
            self._guard(name, writer.close)

    def _scalars(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        for name, writer in list(self._writers.items()):
            self._guard(name, partial(writer.scalars, values, iteration, samples))

    def _guard(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (Exception, SystemExit) as error:  # broad on purpose: see the module's first lines
            self._writers.pop(name, None)
            reason = " ".join(str(error).split()) or "no reason given"
            self._warn(f"{name} is off for the rest of this run: {type(error).__name__}: {reason}")
            return None


def build_writers(
    *,
    is_logging_rank: bool,
    tensorboard_dir: str | None = None,
    wandb_project: str | None = None,
    wandb_exp_name: str | None = None,
    directory: str = ".",
    config: Any = None,
    warn: Callable[[str], None] = warn_stderr,
) -> Writers:
    """The dashboards that were asked for, made on the logging rank only; elsewhere an empty set.

    `directory` is where W&B's folder goes (the run directory), `config` what W&B shows of the run.
    """
    makers: list[tuple[str, Callable[[], ScalarWriter]]] = []
    if is_logging_rank and tensorboard_dir:
        makers.append(("TensorBoard", lambda: TensorBoardWriter(tensorboard_dir)))
    if is_logging_rank and wandb_project:
        makers.append(
            ("W&B", lambda: WandbWriter(wandb_project, wandb_exp_name, config or {}, directory, warn))
        )
    return Writers(makers, warn)
