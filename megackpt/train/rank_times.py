"""What ranks on one host cost each other in the midst of a step, for the planner (`plan.paces.Company`).

A message alone takes less than one in a step, whose ranks sleep while they wait and are woken on cores that others may
be using; and work takes longer beside others' work.  So small models train for real, over as many stages as there are
ranks and by tensor parallelism.  What their steps take more than the planner says of ranks that cost each other nothing
is what company costs: of the processors first, which tells the work of small and large models from that of messages,
then of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megackpt.config.run import RunConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.rendezvous import shutdown
from megackpt.observe.calibrate_ranks import run_ranks
from megackpt.observe.numbers import layout_numbers, model_numbers, split_of
from megackpt.plan.accelerators import Machine
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.evaluation import Evaluation
from megackpt.plan.paces import Company
from megackpt.plan.policies import Policy, plan_for
from megackpt.train.build import Trainer, build
from megackpt.train.layer_times import SIZES, Flags, flags_of, typical
from megackpt.train.loop import loader
from megackpt.train.step import Stepper

LAYERS = 4  # at least, over stages
RUN_S = 1.2  # of each model
LEAST = 3  # turns of each kind of step, the first of which does not count
AT_ONCE = 4  # steps of a turn, the first of which does not count
MICRO_BATCH = 2  # samples
LIMIT_S = 180  # for ranks to start and train; they take some 15 where they are alone
ROUNDS = 3
CLOCK_S = 1e-7  # what is found by bisection is known to


@dataclass(frozen=True)
class Run:
    """Steps of a model on so many ranks: a short one and a long one, by their micro-batches."""

    flags: Flags
    world: int
    short: int
    long: int

    def config(self, micro_batches: int) -> RunConfig:
        return RunConfig.from_flags(self.flags | {"global-batch-size": MICRO_BATCH * micro_batches}, self.world)


@dataclass(frozen=True)
class Taken:
    """Seconds that both steps took, and those of all ranks' processors for one micro-batch more."""

    short: float
    long: float
    processors: float
    vocab: int  # as it was padded


def stages(size: Flags, world: int) -> Run:
    """Full and drained pipelines differ in what a micro-batch takes; both steps fill theirs."""
    flags = flags_of(size, {"pipeline-model-parallel-size": world, "num-layers": max(LAYERS, world)})
    return Run(flags, world, world, 2 * world + 4)


def shards(size: Flags, world: int) -> Run:
    """Every tensor in two, over stages if there are more ranks."""
    flags = flags_of(size, {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": world // 2})
    return Run(flags, world, world // 2, world // 2 + 3)


def runs(world: int) -> list[Run]:
    return [stages(SIZES[0], world), stages(SIZES[2], world), shards(SIZES[0], world)]


def measure_company(machine: Machine, world: int) -> Company:
    """Of `world` ranks, an even number."""
    taken: list[Taken] = run_ranks(_rank, world, (world,), LIMIT_S)
    return company_of(machine, runs(world), taken)


def company_of(machine: Machine, made: Sequence[Run], taken: Sequence[Taken]) -> Company:
    """What makes the planner say of the runs what they took; the last one is the one of shards."""
    world = made[0].world
    said = [Said(machine, run, seen.vocab) for run, seen in zip(made, taken, strict=True)]
    alone = Company(world, 1.0, 0.0, 0.0, 0.0)
    works = [one.work(alone) for one in said[:-1]]
    slowdown, message_s = work_and_messages(works, [seen.processors for seen in taken[:-1]], 4 * (world - 1))
    company = replace(alone, slowdown=slowdown, message_s=message_s)
    piped, sharded = list(zip(said[:-1], taken[:-1], strict=True)), (said[-1], taken[-1])
    for _ in range(ROUNDS):  # shards may lie on stages too, so that each price has a part in the other's runs
        company = replace(company, collective_s=_collective(company, *sharded))
        company = replace(company, message_latency_s=_latency(company, piped))
    return company


def _collective(company: Company, said: Said, taken: Taken) -> float:
    def apart(seconds: float) -> float:
        return said.apart(replace(company, collective_s=seconds))

    return solved(apart, taken.long - taken.short)


def _latency(company: Company, runs: Sequence[tuple[Said, Taken]]) -> float:
    """With which the runs are, on the average, as long as they were."""

    def shares(seconds: float) -> float:
        there = replace(company, message_latency_s=seconds)
        return sum(said.long(there) / taken.long for said, taken in runs)

    return solved(shares, len(runs))


class Said:
    """What the planner says of a run without replay."""

    def __init__(self, machine: Machine, run: Run, vocab: int) -> None:
        self.machine, self.run, self.vocab = machine, run, vocab

    def step(self, company: Company, micro_batches: int) -> Evaluation:
        config = self.run.config(micro_batches)
        layout = layout_numbers(config, split_of(config), "cpu")
        machine = replace(self.machine, companies=(company,))
        return Evaluator(model_numbers(config, self.vocab), layout, machine)(plan_for(layout.pieces, Policy()))

    def short(self, company: Company) -> float:
        return self.step(company, self.run.short).step_seconds

    def long(self, company: Company) -> float:
        return self.step(company, self.run.long).step_seconds

    def apart(self, company: Company) -> float:
        return self.long(company) - self.short(company)

    def work(self, company: Company) -> float:
        """Of all stages' processors for one micro-batch."""
        return sum(stage.forward + stage.backward for stage in self.step(company, 1).stages)


def work_and_messages(works: Sequence[float], took: Sequence[float], ends: int) -> tuple[float, float]:
    """(slowdown, seconds of an end of a message) with the least squares of relative errors of
    slowdown x work + ends x seconds = took; neither less than free."""
    took_ = np.array(took)
    table = np.stack([np.array(works) / took_, np.full(len(took_), ends) / took_], axis=1)
    slowdown, seconds = np.linalg.lstsq(table, np.ones(len(took_)), rcond=None)[0].tolist()
    if slowdown < 1:
        slowdown, seconds = 1.0, float(table[:, 1] @ (1 - table[:, 0]) / (table[:, 1] @ table[:, 1]))
    elif seconds < 0:
        slowdown = float(table[:, 0].sum() / (table[:, 0] @ table[:, 0]))
    return max(1.0, slowdown), max(0.0, seconds)


def solved(rising: Callable[[float], float], wanted: float) -> float:
    """Where a function that rises reaches what is wanted; 0 if it is above it there."""
    low, high = 0.0, CLOCK_S
    while rising(high) < wanted and high < 1:
        low, high = high, 2 * high
    while high - low > max(CLOCK_S, low / 1000):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return low


# -- in a rank -------------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, meet: Path, answer: Connection) -> None:
    torch.set_num_threads(1)
    seam = DeviceSeam("cpu", torch.device("cpu"), "gloo")
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    taken = [_taken(run, build(run.config(run.long), seam)) for run in runs(world)]
    if rank == 0:
        answer.send(taken)
    shutdown()


def _taken(run: Run, trainer: Trainer) -> Taken:
    """Steps of a kind follow each other, as in a run: the first of a turn finds what the other kind left."""
    stepper = Stepper(trainer)
    clocks: dict[int, tuple[list[float], list[float]]] = {run.short: ([], []), run.long: ([], [])}
    going, end, turns = torch.ones(1), 0.0, 0
    with loader(trainer, trainer.datasets.train, 0, lambda _: MICRO_BATCH) as batches:
        while going:
            for micro_batches, (walls, processors) in clocks.items():
                for step in range(AT_ONCE):
                    wall, processor = time.perf_counter(), time.process_time()
                    stepper.update(stepper.accumulate(batches, MICRO_BATCH * micro_batches), 0)
                    if turns and step:
                        walls.append(time.perf_counter() - wall)
                        processors.append(time.process_time() - processor)
            turns += 1
            end = end or time.perf_counter() + RUN_S
            going.fill_(turns < LEAST or time.perf_counter() < end)
            dist.broadcast(going, 0)
    (short, short_cpu), (long, long_cpu) = ([typical(times) for times in both] for both in clocks.values())
    added = torch.tensor((long_cpu - short_cpu) / (run.long - run.short), dtype=torch.float64)
    dist.all_reduce(added)
    return Taken(short, long, added.item(), trainer.vocab)
