"""Steps that must be left out because their gradients are not finite, and when that is the end of the run.

One bad batch is left out and reported; so is an overflow in fp16, which lowers the loss scale.  But a run whose every
step is left out only looks alive.  It ends after `limit` such steps in a row, not counting those that a lower loss
scale may still cure, and says in which parameter and on which ranks the numbers went wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor

from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.train.agree import everyone


class TrainingStopped(RuntimeError):
    """The run cannot go on.  Raised on every rank alike, with a message that is the same on all of them."""


class Health:
    """Counts the steps in a row that were left out.  `limit`: so many end the run; None: nothing does."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.suspects: list[str] | None = None

    @property
    def last_chance(self) -> bool:
        """Whether steps have been left out and the run ends if the next one is too.

        Worth a look at each rank's own gradients, and a wait for them.  A run that ends at its first such step is not
        slowed down by looking in every one: it looks at what is left after the reduction.
        """
        return self.limit is not None and self.in_a_row > 0 and self.in_a_row + 1 >= self.limit

    @property
    def hopeless(self) -> bool:
        return self.limit is not None and self.in_a_row >= self.limit

    def look(self, gradients: Iterable[tuple[ParameterRecord, Tensor]]) -> None:
        """Remember which of this rank's gradients are not finite, in the order given.  Before they are reduced: then
        they are so everywhere."""
        pairs = list(gradients)
        finite = torch.stack([torch.isfinite(gradient).all() for _, gradient in pairs]).tolist() if pairs else []
        self.suspects = [record.name for (record, _), good in zip(pairs, finite, strict=True) if not good]

    def update(self, healthy: bool, curable: bool) -> None:
        """One step is over; `curable`: the next one has a lower loss scale, or may have."""
        if healthy:
            self.in_a_row, self.suspects = 0, None
        elif not curable:
            self.in_a_row += 1

    def stop(self, mesh: ProcessMesh, iteration: int, loss: float, loss_scale: float) -> None:
        """Raise TrainingStopped with what all ranks have seen.  A collective call of all ranks."""
        place = f"rank {mesh.rank} (tp {mesh.tp.index}, dp {mesh.dp.index}, pp {mesh.pp.index})"
        found = everyone((place, self.suspects or []))
        everywhere = dict.fromkeys(name for _, names in found for name in names)
        what = f"the loss is {loss}"
        if everywhere:
            name = sorted(everywhere, key=_depth)[-1]
            places = ", ".join(where for where, names in found if name in names)
            layer = re.match(r"layers\.(\d+)\.", name)
            what = f"the gradient of {name}{f' (layer {layer[1]})' if layer else ''} is not finite on {places}"
            what += f"; {len(everywhere)} parameters have such gradients" if len(everywhere) > 1 else ""
        raise TrainingStopped(
            f"iteration {iteration}: {self.in_a_row} step(s) in a row had to be left out at loss scale {loss_scale:g},"
            f" which cannot fall further; in the last one {what}. No weight has changed since the last good step, and"
            " the newest checkpoint is untouched. --max-skipped-iterations sets how many steps may be left out."
        )


def _depth(name: str) -> float:
    """Backward goes from the head to the embedding and carries along what is not finite: it began where this is
    largest."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return float(layer[1]) if layer else -1.0 if name.startswith("embedding.") else math.inf
