"""``--recompute-granularity auto``: from a run's configuration and a device to a plan, or to a refusal that helps.

Needs no torch and no other rank: every rank can refuse by itself, before any process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from megackpt.observe.numbers import layout_numbers, model_numbers, split_of
from megackpt.plan.accelerators import GIB, MACHINES, Machine
from megackpt.plan.choose.choose import Options
from megackpt.plan.choose.engine import Chosen, choose_for, least_bytes
from megackpt.plan.choose.problem import DoesNotFit
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.split import even_split

BUDGET = "--memory-budget-gib"
CPU_MARGIN = 4096  # bytes of small tensors that nobody counts: sums of losses, statistics of a step
# What the trainer executes: its own split and schedule, no host memory.
OPTIONS = Options(slots=True, ahead=True, keep_gathered=False)


@dataclass(frozen=True)
class Task:
    """What auto has to solve: the fastest plan of a run within ``budget_bytes`` of each rank's memory."""

    model: ModelNumbers
    layout: Layout
    machine: Machine
    budget_bytes: int
    scales: tuple[float, ...] | None = None  # by stage: activations as measured over as predicted

    @property
    def watched(self) -> bool:
        """On a CPU bytes are counted by a dispatch mode, under which some gradients are added out of place."""
        return self.layout.device == "cpu"

    def choose(self, budget_bytes: int | None = None) -> Chosen:
        """Raises DoesNotFit."""
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        return choose_for(
            self.model, self.layout, self.machine, budget, OPTIONS, watched=self.watched, scales=self.scales
        )

    def least_bytes(self) -> int:
        """The least budget at which `choose` finds a plan."""
        return least_bytes(
            self.model, self.layout, self.machine, OPTIONS, watched=self.watched, scales=self.scales
        )


def machine_of(device: str, name: str = "", memory_bytes: int | None = None) -> Machine:
    """The machine of a run: ``device`` cpu or cuda, the driver's ``name`` of a GPU and the memory it has.

    A CPU's tensors are all that is counted there; a GPU that the table does not have is priced as an H100, which
    decides seconds and not bytes.
    """
    if device == "cpu":
        return replace(MACHINES["cpu"], communicator_bytes=0, context_bytes=0, margin_bytes=CPU_MARGIN)
    known = [m for m in MACHINES.values() if m.name.split("-")[0] in name.lower()] or [MACHINES["h100-80gb"]]
    if memory_bytes is None:
        return known[-1]
    nearest = min(known, key=lambda m: abs(m.memory_bytes - memory_bytes))
    return replace(nearest, memory_bytes=memory_bytes, margin_bytes=memory_bytes // 50)


def task_of(config: RunConfig, vocab: int, machine: Machine, device: str) -> Task:
    """``vocab`` before padding.  Raises UsageError on a CPU without a budget."""
    given = config.recompute.memory_budget_gib
    if given is None and device == "cpu":
        raise UsageError(
            f"--recompute-granularity auto needs {BUDGET} on a CPU: its memory is not a rank's own. It counts weights,"
            " gradients, optimizer state and activations of one rank."
        )
    budget = machine.memory_bytes if given is None else int(given * GIB)
    layout = layout_numbers(config, split_of(config), device)
    return Task(model_numbers(config, vocab), layout, machine, budget)


def refuse_impossible(task: Task) -> None:
    """Raises UsageError where not even the leanest plan fits, with the nearest budget and what would reach this one."""
    least = task.least_bytes()
    if least <= task.budget_bytes:
        return
    try:
        task.choose()
    except DoesNotFit as short:
        ways = [f"{flag} ({gib(size)} GiB)" for flag, size in _ways(task) if size <= task.budget_bytes]
        help_ = f"What reaches it: {', or '.join(ways)}." if ways else "More tensor or pipeline parallelism is needed."
        asked = f"{task.budget_bytes / GIB:.6g}" if task.budget_bytes else "of less than a byte"
        raise UsageError(
            f"{BUDGET} {asked} is impossible: even with everything replayed {short}."
            f" Nearest possible: {BUDGET} {gib(least)}. {help_}"
        ) from None


def gib(size: int) -> str:
    """The shortest number of GiB that is at least ``size`` bytes and at most a thousandth above."""
    for digits in range(1, 13):
        number = math.ceil(size / GIB * 10**digits) / 10**digits
        if int(number * GIB) >= size and number * GIB <= size * 1.001:
            return f"{number:.{digits}f}"
    return f"{size / GIB}"


def _ways(task: Task) -> Iterator[tuple[str, int]]:
    """(flags, least bytes) of runs like this one with one thing changed."""
    model, layout = task.model, task.layout
    changes: list[tuple[str, ModelNumbers, Layout]] = []
    if layout.micro_batch > 1:
        lean = replace(layout, micro_batch=1, n=layout.n * layout.micro_batch)
        changes.append(("--micro-batch-size 1", model, lean))
    if not model.loss_chunk and model.seq > 1:
        chunk = max(1, model.seq // 8)
        changes.append((f"--loss-chunk-size {chunk}", replace(model, loss_chunk=chunk), layout))
    if layout.t > 1 and not layout.sequence_parallel:
        changes.append(("--sequence-parallel", model, replace(layout, sequence_parallel=True)))
    if layout.d > 1 and not layout.sharded_optimizer:
        changes.append(("--use-distributed-optimizer", model, replace(layout, sharded_optimizer=True)))
    t, p = 2 * layout.t, 2 * layout.p
    ranks = layout.t * layout.c * layout.d * layout.p * 2
    changes.append((f"--tensor-model-parallel-size {t} on {ranks} ranks", model, replace(layout, t=t)))
    if p * layout.v <= model.layers:
        wide = replace(layout, pieces=even_split(model.layers, p, layout.v))
        changes.append((f"--pipeline-model-parallel-size {p} on {ranks} ranks", model, wide))
    for flag, other, place in changes:
        try:
            yield flag, replace(task, model=other, layout=place).least_bytes()
        except ValueError:  # does not divide
            continue
