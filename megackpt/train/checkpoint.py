"""What of a run is saved, and how a run becomes what was saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from megackpt.config.errors import UsageError
from megackpt.config.persist import CheckpointConfig
from megackpt.data.position import DataPosition, resume_message
from megackpt.data.tokenizer import other_tokenizer
from megackpt.optim.lr_schedule import LearningRate
from megackpt.optim.update import state_kinds
from megackpt.persist import HostCopy, NamedShard, Retention, RunState, Saver, load
from megackpt.persist.load import LoadReport
from megackpt.train.build import Trainer
from megackpt.train.health import TrainingStopped

_MASTER = "optimizer.master."


@dataclass(frozen=True)
class Position:
    """Where a run stands."""

    iteration: int = 0
    consumed_samples: int = 0


class Saves:
    """The saves of a run, and what is said of them; of a run without ``--save``, nothing.

    As a context it leaves no save half done: at its end the last one is waited for.  A run that breaks off does not
    wait, since other ranks may be gone; what all ranks raise together (UsageError, TrainingStopped) is an end as well.
    """

    def __init__(self, trainer: Trainer, say: Callable[[str], None], group: ProcessGroup | None = None) -> None:
        """``group``: see ``persist.coordination_group``."""
        config = trainer.config.checkpoint
        self._trainer, self._say = trainer, say
        self._saver = config.save and Saver(
            config.save,
            trainer.mesh,
            group,
            host_copy=HostCopy(trainer.seam) if config.async_save else None,
            form=config.format,
            retention=Retention(config.retain_last, config.retain_interval),
        )

    def save(self, where: Position) -> None:
        """Write the run as the checkpoint of its iteration, or begin to.  Raises CheckpointError on all ranks."""
        if self._saver:
            self._tell(self._saver.finish())
            self._tell(self._saver.save(where.iteration, state_to_save(self._trainer, where)))

    def use(self, trainer: Trainer) -> None:
        """What is saved from now on: its plan may have changed."""
        self._trainer = trainer

    def look(self) -> None:
        """Commit what has been written since.  Raises CheckpointError on all ranks if that failed on one."""
        if self._saver:
            self._tell(self._saver.poll())

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._saver and (kind is None or issubclass(kind, UsageError | TrainingStopped)):
            self._tell(self._saver.finish())
        elif self._saver:
            self._saver.abandon()

    def _tell(self, path: Path | None) -> None:
        if path is not None:
            self._say(f"megackpt: saved {path}")


def state_to_save(trainer: Trainer, where: Position) -> RunState:
    """The run as it stands, as its checkpoint will hold it."""
    config = trainer.config.checkpoint
    state = run_state(trainer, optimizer=config.save_optim, rng=config.save_rng)
    state.extra = {
        "iteration": where.iteration,
        "consumed_samples": where.consumed_samples,
        "optimizer_steps": trainer.optimizer.step_count,
        "learning_rate": asdict(trainer.learning_rate),
        "loss_scale": trainer.scaler.state_dict(),
        "skipped_in_a_row": trainer.health.in_a_row,
        "data": DataPosition(
            where.consumed_samples, trainer.datasets.train.fingerprint, trainer.datasets.description
        ).to_dict(),
        "vocab_size": trainer.vocab,
        "padded_vocab_size": trainer.config.model.padded_vocab_size(trainer.vocab, trainer.mesh.tp.size),
        "tokenizer": trainer.tokenizer.identity() if trainer.tokenizer is not None else None,
        "plan": trainer.plan.to_json(),
        "config": trainer.config.to_yaml(),
    }
    return state


@dataclass(frozen=True)
class Start:
    """Where a run begins: afresh, or where a checkpoint left it.  ``messages`` are for the user."""

    position: Position
    learning_rate: LearningRate
    messages: tuple[str, ...] = ()


def load_run(trainer: Trainer, group: ProcessGroup | None = None) -> Start:
    """Continue from ``--load`` if it has a checkpoint, else begin with the weights of ``--pretrained-checkpoint``.

    ``group``: see ``persist.coordination_group``.  Raises UsageError if a checkpoint must be there and is not.
    """
    config = trainer.config.checkpoint
    tried = []
    for folder, finetune in ((config.load, config.finetune), (config.pretrained, True)):
        if folder is None:
            continue
        state, want = run_state(trainer, optimizer=True, rng=True), _wanted(config, finetune)
        step = config.step if folder == config.load else None
        report = load(
            folder, state, trainer.mesh, want=want, strictness=config.strictness, iteration=step, group=group
        )
        if report is not None:
            return _applied(trainer, state, report, want, finetune)
        tried.append(folder)
    if tried and config.exit_on_missing:
        raise UsageError(f"{' and '.join(tried)} has no checkpoint, and --exit-on-missing-checkpoint was given")
    messages = (f"{' and '.join(tried)} has no checkpoint: starting afresh",) if tried else ()
    return Start(Position(), trainer.learning_rate, messages)


def _wanted(config: CheckpointConfig, finetune: bool) -> set[str]:
    """The parts of a checkpoint that are read."""
    if finetune:
        return {"model"}
    return {"model"} | ({"optimizer"} if config.load_optim else set()) | ({"rng"} if config.load_rng else set())


def _applied(trainer: Trainer, state: RunState, report: LoadReport, want: set[str], finetune: bool) -> Start:
    try:
        return _apply(trainer, state, report, want, finetune)
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{report.directory} does not say where its run stood ({error!r}); --finetune takes its weights alone"
        ) from error


def _apply(trainer: Trainer, state: RunState, report: LoadReport, want: set[str], finetune: bool) -> Start:
    extra = report.extra
    messages = [*report.messages, f"loaded {report.directory} (iteration {report.iteration})"]
    other = other_tokenizer(extra.get("tokenizer"), trainer.tokenizer)
    if other is not None and not finetune:
        raise UsageError(f"{other} To go on with the weights alone, load with --finetune.")
    messages += [other] if other is not None else []
    if "optimizer" in want:
        _restore_optimizer(trainer, int(extra["optimizer_steps"]), report.missing)
    else:
        trainer.optimizer.refresh_masters()  # else the first step would bring back the weights from before
    if report.rng_loaded:
        restore_random_state(trainer, state)
    if finetune:
        messages.append("finetuning: starting at iteration 0 with the loaded weights")
        return Start(Position(), trainer.learning_rate, tuple(messages))
    trainer.scaler.load_state_dict(extra["loss_scale"])
    trainer.health.in_a_row = int(extra["skipped_in_a_row"])
    flags = trainer.config.optimizer
    rate = trainer.learning_rate.resumed(
        extra["learning_rate"], use_saved=flags.use_checkpoint_schedule, override=flags.override_schedule
    )
    said = resume_message(
        DataPosition.from_dict(extra["data"]), trainer.datasets.train.fingerprint, trainer.datasets.description
    )
    if said is not None:
        messages.append(said)
    where = Position(int(extra["iteration"]), int(extra["consumed_samples"]))
    if trainer.config.last_iteration(where.iteration, where.consumed_samples) <= where.iteration:
        train = trainer.config.train
        length = f"--train-samples {train.train_samples}" if train.by_samples else f"--train-iters {train.train_iters}"
        messages.append(f"nothing is left to train: the checkpoint is at the end of {length}, or past it")
    return Start(where, rate, tuple(messages))


def _restore_optimizer(trainer: Trainer, steps: int, missing: Collection[str]) -> None:
    """Go on with the state that was read, and without what `--dist-ckpt-strictness` let be `missing` from it: masters
    are then the weights that were read, and an optimizer without any of its moments has done no step."""
    optimizer, kinds = trainer.optimizer, state_kinds(trainer.config.optimizer)
    optimizer.refresh_masters({key.removeprefix(_MASTER) for key in missing if key.startswith(_MASTER)})
    names = {record.name for _, record in trainer.parameters}
    fresh = bool(kinds and names) and all(f"optimizer.{kinds[0]}.{name}" in missing for name in names)
    optimizer.load_state_tensors(optimizer.state_tensors(), 0 if fresh else steps)


def run_state(trainer: Trainer, *, optimizer: bool, rng: bool) -> RunState:
    """This rank's tensors under their global names, live: load fills them in place."""
    trainer.optimizer.settle()
    by_name = {record.name: (parameter, record) for parameter, record in trainer.parameters}
    shards = [NamedShard(f"model.{name}", p.detach(), record) for name, (p, record) in by_name.items()]
    if optimizer:
        for kind, tensors in trainer.optimizer.state_tensors().items():
            shards += [
                NamedShard(f"optimizer.{kind}.{name}", t, by_name[name][1], trainer.optimizer.flat_range(name))
                for name, t in tensors.items()
            ]
    return RunState(shards, random_state(trainer) if rng else {})


def random_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's random state: the position of each stream, and torch's own generators."""
    state = {f"stream.{name}": torch.tensor([at]) for name, at in trainer.ledger.state_dict().items()}
    return state | {f"default.{name}": value for name, value in trainer.seam.random_states().items()}


def restore_random_state(trainer: Trainer, state: RunState) -> None:
    """Put this rank's streams and generators where the file says they were."""
    trainer.ledger.load_state_dict({name: int(value.item()) for name, value in _of("stream.", state).items()})
    trainer.seam.set_random_states(_of("default.", state))


def _of(prefix: str, state: RunState) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.per_rank.items() if key.startswith(prefix)}
