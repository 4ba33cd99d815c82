"""Every layout trains what one process trains.

Factors: the layout (tp, pp, dp, sequence parallel), the number n of micro-batches of a step (around the number of
stages p, where warm-up and cool-down of the schedule meet), the model family, the number format and the attention
core.  `--full` runs the whole product; by default as few cases as cover every pair of values of two factors.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from tests.layouts import (
    FAMILIES,
    STEPS,
    TOLERANCES,
    Distance,
    Flags,
    Layout,
    Trace,
    built,
    distance,
    layouts,
    rate_of,
    steps,
)
from tests.pool import run_distributed
from tests.train.conftest import ReferenceRun


@dataclass(frozen=True)
class Case:
    layout: Layout
    micro_batches: int
    family: str
    dtype: str
    backend: str

    @property
    def flags(self) -> Flags:
        return FAMILIES[self.family] | {
            "params-dtype": self.dtype,
            "lr": rate_of(self.dtype),
            "attention-backend": self.backend,
            "micro-batch-size": self.micro_batch,
            "global-batch-size": self.global_batch,
        }

    @property
    def micro_batch(self) -> int:
        """2, as T0 has it, unless a step has so many micro-batches that the case would become slow."""
        return 2 if self.layout.dp * self.micro_batches <= 2 else 1

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.layout.dp * self.micro_batches

    def __str__(self) -> str:
        return f"{self.layout}-n{self.micro_batches}-{self.family}-{self.dtype}-{self.backend}"


def micro_batch_counts(p: int) -> list[int]:
    return sorted({n for n in (1, p - 1, p, p + 1, 2 * p + 1) if n >= 1})


def every_case(processes: int) -> list[Case]:
    found = []
    for layout in layouts(processes):
        rest = (micro_batch_counts(layout.pp), FAMILIES, ("fp64", "fp32"), ("fused", "unfused"))
        found += [Case(layout, *values) for values in itertools.product(*rest)]
    return found


def pairs(case: Case) -> set[tuple[object, ...]]:
    """All pairs of values of two factors in a case.  Sequence parallel counts as part of the layout."""
    values = [(number, value) for number, value in enumerate(astuple(case))]
    return set(itertools.combinations([(number, str(value)) for number, value in values], 2))


def covering(cases: list[Case]) -> list[Case]:
    """A few of the cases with every pair that occurs in any: greedily the one with the most new pairs, and of such
    the one whose pairs were least used."""
    missing: set[tuple[object, ...]] = set().union(*map(pairs, cases))
    used: Counter[tuple[object, ...]] = Counter()
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(pairs(case) & missing), -sum(used[pair] for pair in pairs(case))))
        chosen.append(best)
        missing -= pairs(best)
        used.update(pairs(best))
    return chosen


EVERY = every_case(4)
DEFAULT = covering(EVERY)
REST = [case for case in EVERY if case not in DEFAULT]
EIGHT = [  # TP, PP and DP together
    Case(Layout(2, 2, 2, sp=True), 3, "gpt", "fp64", "fused"),
    Case(Layout(2, 2, 2, sp=True), 3, "llama", "fp32", "unfused"),
]


def _beside_r0(rank: int, world_size: int, case: Case, path: Path) -> Distance:
    gradients_of = STEPS if case.dtype == "fp64" else 1
    trace = steps(built(case.flags, case.layout), STEPS, gradients_of=gradients_of)
    return distance(trace, Trace.read(path))


def check(case: Case, reference_run: ReferenceRun) -> None:
    path = reference_run(case.family, case.dtype, case.global_batch)
    found = run_distributed(_beside_r0, case.layout.world_size, case, path, timeout=60)
    for of_rank in found:
        of_rank.check(**TOLERANCES[case.dtype])
    names = {name for of_rank in found for name in of_rank.names}
    assert names == set(Trace.read(path).grads[0]), "a parameter of R0 is on no rank"


@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_layout_equals_one_process(case: Case, reference_run: ReferenceRun) -> None:
    check(case, reference_run)


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=str)
def test_rest_of_the_product(case: Case, reference_run: ReferenceRun) -> None:
    check(case, reference_run)


@pytest.mark.parametrize("case", EIGHT[:1], ids=str)
def test_eight_processes(case: Case, reference_run: ReferenceRun) -> None:
    check(case, reference_run)


@pytest.mark.full
@pytest.mark.parametrize("case", EIGHT[1:], ids=str)
def test_eight_processes_otherwise(case: Case, reference_run: ReferenceRun) -> None:
    check(case, reference_run)
