"""Copies that must be equal to the bit, compared: a run whose copies drift apart trains another model on every rank.

The copies of a model and its optimizer are

* parameters and optimizer state that tensor-parallel ranks hold whole (norms, biases of row-parallel layers),
* a tied weight on the first and the last stage,
* everything that data-parallel ranks hold alike (with sharded optimizer state: the parameters),
* masters and the parameters that are their rounding.

Faulty memory, a kernel that is not deterministic or a missing reduction change one copy, and nothing in losses or
norms shows it for weeks (bigscience's 176B run lost its layer norms so).  A digest of each tensor is compared: the sum
of its bytes read as integers, modulo 2^64, so that one flipped bit always changes it.  One pass over memory and one
small collective per axis.

State that has no copy is sealed instead: its digest is taken after an update and compared before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.mesh.process_mesh import Axis, ProcessMesh
from megackpt.persist import NamedShard
from megackpt.train.agree import everyone
from megackpt.train.health import TrainingStopped

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
_MASTER = "optimizer.master."


def digest(tensor: Tensor) -> Tensor:
    """Sum of the tensor's bytes, in order, as 8-byte integers: an int64 scalar on its device.

    No temporary of the tensor's size exists, wherever it lies in memory."""
    flat = tensor.detach().contiguous().view(-1)
    per_word = 8 // flat.element_size()
    whole = flat.numel() // per_word * per_word
    aligned = flat.storage_offset() % per_word == 0
    parts = [flat[:whole]] if aligned else [part.clone() for part in flat[:whole].split(_CHUNK)]
    tail = flat[whole:].view(_INTEGERS[flat.element_size()])
    return torch.stack([*(part.view(torch.int64).sum() for part in parts), tail.sum(dtype=torch.int64)]).sum()


@dataclass
class Guard:
    """Checks the copies of one rank's `shards` (parameters and optimizer state) against those of other ranks.

    All methods are collective calls of all ranks, and raise TrainingStopped on all of them alike.
    """

    mesh: ProcessMesh
    shards: Sequence[NamedShard]
    settle: Callable[[], None] = lambda: None
    """Wait for parameters that are still on their way."""
    _seal: dict[str, int] | None = None

    def check(self, when: str) -> None:
        """Compare all copies.  `when` is for the message: "after iteration 7"."""
        self._stop_on(self.differences(), when)

    def seal(self) -> None:
        """Take the digests of optimizer state, which nothing may touch until `check_seal` looks."""
        state = [shard for shard in self.shards if shard.key.startswith("optimizer.")]
        self._seal = dict(zip((shard.key for shard in state), _digests(state), strict=True))

    def check_seal(self, when: str) -> None:
        """Compare with the last `seal`, if there is one that was not checked yet."""
        seal, self._seal = self._seal, None
        if seal is None:
            return
        state = [shard for shard in self.shards if shard.key in seal]
        changed = [shard.key for shard, now in zip(state, _digests(state), strict=True) if seal[shard.key] != now]
        self._stop_on([f"{key} has changed on rank {self.mesh.rank} since the last update" for key in changed], when)

    def differences(self) -> list[str]:
        """What differs, as this rank sees it, in words."""
        mesh = self.mesh
        self.settle()
        of_digest = dict(zip(map(id, self.shards), _digests(self.shards), strict=True))
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
        return found + self._unrounded()

    @property
    def _device(self) -> torch.device:
        return self.shards[0].local.device if self.shards else torch.device("cpu")

    def _unrounded(self) -> list[str]:
        """Parameters that are not the rounding of their masters."""
        parameters = {shard.key.removeprefix("model."): shard.local for shard in self.shards}
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


def _digests(shards: Sequence[NamedShard]) -> list[int]:
    if not shards:
        return []
    return torch.stack([digest(shard.local) for shard in shards]).tolist()


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
