"""Run a chain of modules under a byte budget, or in segments.

    y = sequential(model, x, budget_bytes=200 << 20)          # measures, plans, runs
    fitted = fit(model, x, budget_bytes=200 << 20)            # measures and plans once ...
    y = fitted(x)                                             # ... for many runs on inputs of that shape

The modules are measured one by one, the chain planner finds the least extra work whose peak fits, and the engine
executes exactly that plan.  Counted are activations and their gradients: ``x``, what modules keep and make, temporary
weight gradients, the scalar loss.  Not counted are parameters, their gradients, and what else the caller's loss makes
beside the output's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megackpt.plan import ChunkPlan
from megackpt.plan.chains import Chain, ChainPlan, Report, heterogeneous, least_budget, run, uniform_plan
from megackpt.recompute.batchnorm import statistics_of, training_norms
from megackpt.recompute.context import state
from megackpt.recompute.measure import Layer, Profile, measure
from megackpt.recompute.rng import RngLedger
from megackpt.recompute.step import chain as run_chain
from megackpt.recompute.tape import Tape

Layers = Sequence[Layer] | nn.Sequential

_LOSS_BYTES = 16  # a scalar and its gradient, in the widest type


@dataclass(frozen=True)
class Fitted:
    """A chain with its plan.  What was measured and predicted is None for plans that were made without."""

    modules: tuple[Layer, ...]
    plan: ChainPlan
    profile: Profile | None = None
    chain: Chain | None = None
    predicted: Report | None = None

    def least_bytes(self) -> int:
        """The smallest budget for which there is a plan."""
        if self.chain is None:
            raise ValueError("this chain was not measured: fit it with budget_bytes")
        return least_budget(self.chain)

    def __call__(self, x: Tensor, ledger: RngLedger | None = None) -> Any:
        """Run the chain.  The random streams of an enclosing tape are reproduced too."""
        enclosing = state.now.tape
        if ledger is None and enclosing is not None:
            ledger = enclosing.ledger
        with Tape(ChunkPlan(groups=self.plan.to_groups()), ledger):
            return run_chain(list(enumerate(self.modules)), x)

    def __str__(self) -> str:
        lines = [str(self.plan)]
        if self.predicted is not None:
            extra, peak = self.predicted.extra_forwards, self.predicted.peak_bytes
            lines.append(f"peak {peak:,} bytes, {extra} of {len(self.modules)} modules run once more")
        return "\n".join(lines)


def sequential(
    modules: Layers,
    x: Tensor,
    *,
    budget_bytes: int | None = None,
    segments: int | None = None,
    ledger: RngLedger | None = None,
) -> Any:
    """``modules`` one after another on ``x``, rebuilding in backward what was not kept.

    Either ``budget_bytes``, the most bytes that may be alive at once (see above what counts), or ``segments``, so many
    parts of equal length, of which all but the last are replayed (``torch.utils.checkpoint.checkpoint_sequential``).
    Measuring costs three runs of each module: for training loops call :func:`fit` once.

    Raises InfeasibleBudget, a ValueError, with the least feasible bytes.
    """
    return fit(modules, x, budget_bytes=budget_bytes, segments=segments)(x, ledger)


def fit(modules: Layers, x: Tensor, *, budget_bytes: int | None = None, segments: int | None = None) -> Fitted:
    """Measure and plan; see :func:`sequential`."""
    members: tuple[Layer, ...] = tuple(modules)  # type: ignore[arg-type]
    if (budget_bytes is None) == (segments is None):
        raise ValueError(f"one of budget_bytes and segments, not budget_bytes={budget_bytes} and segments={segments}")
    if not members:
        raise ValueError("a chain of no modules has nothing to plan")
    if segments is not None:
        return Fitted(members, uniform_plan(len(members), segments))
    assert budget_bytes is not None
    profile = measure(list(members), x)
    measured = profile.chain()
    statistics = statistics_of([norm for member in members for norm in training_norms(member)])
    aside = _LOSS_BYTES + sum(t.nbytes for t in statistics)  # a replay holds copies of running statistics
    chain = Chain(measured.stages, measured.input_bytes + aside, measured.input_gradient_bytes)
    plan = heterogeneous(chain, budget_bytes)
    return Fitted(members, plan, profile, chain, run(chain, plan))
