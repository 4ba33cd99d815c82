"""Copies that must be equal to the bit, compared: a run whose copies drift apart trains another model on every rank.

The copies of a model and its optimizer are

* parameters and optimizer state that tensor-parallel ranks hold whole (norms, biases of row-parallel layers),
* a tied weight on the first and the last stage,
* everything that data-parallel ranks hold alike (with sharded optimizer state: the parameters),
* masters and the parameters that are their rounding.

Faulty memory, a kernel that is not deterministic or a missing reduction change one copy, and nothing in losses or
norms shows it for weeks (bigscience's 176B run lost its layer norms so).  A digest of each tensor is compared: one pass
over memory and one small collective per axis.

What has no copy is sealed instead (`train/seal.py`), where checks are asked for at an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megackpt.mesh.process_mesh import Axis, ProcessMesh
from megackpt.persist import NamedShard
from megackpt.train.agree import everyone
from megackpt.train.health import TrainingStopped
from megackpt.train.seal import Seal, digests

_MODEL, _MASTER = "model.", "optimizer.master."


@dataclass
class Guard:
    """Checks the copies of one rank's `shards` (parameters and optimizer state) against those of other ranks.

    All methods are collective calls of all ranks, and raise TrainingStopped on all of them alike.
    """

    mesh: ProcessMesh
    shards: Sequence[NamedShard]
    settle: Callable[[], None] = lambda: None
    """Wait for parameters that are still on their way."""
    seal: Seal | None = None
    """Finds what has no copy, and what does not stay changed until a check."""

    def check(self, when: str) -> None:
        """Compare all copies.  `when` is for the message: "after iteration 7"."""
        self._stop_on(self.differences(), when)

    def differences(self) -> list[str]:
        """What differs, as this rank sees it, in words."""
        mesh = self.mesh
        self.settle()
        of_digest = self._digests()
        whole = [shard for shard in self.shards if shard.record.shard_dim is None]
        tied = [shard for shard in self.shards if shard.record.tied]  # cut alike on both stages, where state is sharded
        copied = [shard for shard in self.shards if shard.flat_range is None]
        found = []
        for axis, shards, what in (
            (mesh.tp, whole, "tensor-parallel ranks"),
            (mesh.embedding, sorted(tied, key=lambda shard: shard.key), "the first and the last stage, ranks"),
            (mesh.dp, copied, "data-parallel ranks"),
        ):
            found += _compare(axis, [(shard.key, of_digest[id(shard)]) for shard in shards], what, self._device)
        changed = [] if self.seal is None else [f"{words} on rank {mesh.rank}" for words in self.seal.broken()]
        return changed + found + self._unrounded()  # the cause before what it led to

    def _digests(self) -> dict[int, int]:
        """By the id of each shard; of a parameter with what it was before the updates since the start."""
        now = digests([shard.local for shard in self.shards])
        if self.seal is not None:
            now[[shard.key.startswith(_MODEL) for shard in self.shards]] += self.seal.history
        return dict(zip(map(id, self.shards), now.tolist(), strict=True))

    @property
    def _device(self) -> torch.device:
        return self.shards[0].local.device if self.shards else torch.device("cpu")

    def _unrounded(self) -> list[str]:
        """Parameters that are not the rounding of their masters."""
        parameters = {shard.key.removeprefix(_MODEL): shard.local for shard in self.shards}
        found = []
        for shard in self.shards:
            if not shard.key.startswith(_MASTER):
                continue
            parameter = parameters[shard.key.removeprefix(_MASTER)].detach().reshape(-1)
            if shard.flat_range is not None:
                parameter = parameter[slice(*shard.flat_range)]
            if not torch.equal(parameter, shard.local.detach().reshape(-1).to(parameter.dtype)):
                found.append(f"{shard.key} does not round to its parameter on rank {self.mesh.rank}")
        return found

    def _stop_on(self, found: list[str], when: str) -> None:
        flag = torch.tensor([len(found)], device=self._device)
        if self.mesh.world.size > 1:
            dist.all_reduce(flag, group=self.mesh.world.group)
        if not int(flag.item()):
            return
        said = list(dict.fromkeys(line for lines in everyone(found) for line in lines))
        more = f"; and {len(said) - 8} more" if len(said) > 8 else ""
        raise TrainingStopped(f"copies have drifted apart, found {when}: {'; '.join(said[:8])}{more}")


def _compare(axis: Axis, values: list[tuple[str, int]], what: str, device: torch.device) -> list[str]:
    """Names whose digests are not the same on all ranks of `axis`, which must hold the same names in one order."""
    if axis.size == 1 or not values:
        return []
    mine = torch.tensor([value for _, value in values], dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(axis.size)]
    dist.all_gather(everyones, mine, group=axis.group)
    table = torch.stack(everyones).tolist()  # [ranks, names]
    found = []
    for column, (name, _) in enumerate(values):
        groups: dict[int, list[int]] = {}
        for rank, row in zip(axis.ranks, table, strict=True):
            groups.setdefault(row[column], []).append(rank)
        if len(groups) > 1:
            sides = " against ".join(", ".join(map(str, ranks)) for ranks in groups.values())
            found.append(f"{name} differs between {what} {sides}")
    return found
