"""The optimizer on masters, with its state by global parameter name.

The arithmetic is that of `Update`; what is added is *what it updates*:

* bf16 and fp16 parameters have fp32 masters, which are updated and then rounded into the parameters;
* fp32 and fp64 parameters are their own masters (an alias, no copy);
* with a sharded optimizer (ZeRO-1, Rajbhandari et al. 2020) both are those of this rank's shards, and all ranks gather
  what the others updated: 6 + 12/d bytes per 16-bit parameter on d ranks, instead of 18.

`Update` is given one tensor per parameter (or part of one) rather than one flat tensor: an element's result then
cannot depend on where its parameter lies on this rank, so replicated and tied copies stay bitwise equal.  (Flat
tensors would save a sixth of the update's time, which is itself below 1 % of a step.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from megackpt.config.optimizer import OptimizerConfig
from megackpt.mesh.parameter import ParameterRecord
from megackpt.optim.buffer import GradientBuffer
from megackpt.optim.gather import ParameterBuffer
from megackpt.optim.update import Update
from megackpt.precision.policy import wide_dtype

MASTER = "master"


class MasterOptimizer:
    """Updates the parameters of a `GradientBuffer` from its gradients."""

    def __init__(self, buffer: GradientBuffer, config: OptimizerConfig, *, overlap_gather: bool = False) -> None:
        """Masters are built from the parameters as they are now; see `refresh_masters`.

        A parameter must stay where it is (`copy_` into it, do not replace its `.data`).  If `buffer` is sharded, the
        parameters are moved into a flat buffer here; `overlap_gather`: see `ParameterBuffer`.
        """
        self.flat = ParameterBuffer(buffer, overlap=overlap_gather) if buffer.sharded else None
        self._parameters: list[Tensor]
        if self.flat is None:
            self._parameters = [entry.parameter for entry in buffer.entries]
            self._records = [entry.record for entry in buffer.entries]
            self._gradients = [entry.gradient for entry in buffer.entries]
            self._ranges: dict[str, tuple[int, int]] = {}
        else:
            parts = buffer.parts[buffer.dp.index]
            self._parameters = [self.flat.part(part) for part in parts]
            self._records = [part.record for part in parts]
            self._gradients = [part.gradient for part in parts]
            self._ranges = {part.record.name: (part.first, part.stop) for part in parts}
        wide = wide_dtype(self._parameters[0].dtype) if self._parameters else buffer.flat.dtype
        # `detach` shares memory and version counter: autograd still sees that a weight was changed.
        self._masters = [
            p.detach() if p.dtype == wide else p.detach().to(wide, copy=True) for p in self._parameters
        ]
        self._copies = bool(self._parameters) and self._parameters[0].dtype != wide
        self._update = Update(list(zip(self._masters, self._records, strict=True)), config)

    @torch.no_grad()
    def step(self, rate: float, decoupled_rate: float | None = None) -> None:
        """Update all parameters from the gradients in the buffer.

        `decoupled_rate`: the learning rate of the embedding and the output layer, where it is another.
        """
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient.to(master.dtype)  # the buffer's view itself unless it sums in 16 bits
        self._update.step(rate, decoupled_rate)
        self._round_masters()
        if self.flat is not None:
            self.flat.gather()

    def settle(self) -> None:
        """Wait until all parameters are those of the last step; for whoever reads them outside of a forward."""
        if self.flat is not None:
            self.flat.settle()

    @torch.no_grad()
    def refresh_masters(self, names: Collection[str] | None = None) -> None:
        """Take the parameters (those of `names`) as they are now: after weights were loaded without the masters.

        Without it the first step would bring back the weights from before the load.
        """
        if not self._copies:
            return
        for master, parameter, record in zip(self._masters, self._parameters, self._records, strict=True):
            if names is None or record.name in names:
                master.copy_(parameter)

    def _round_masters(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._parameters, self._masters)

    def masters(self) -> Iterable[tuple[Tensor, ParameterRecord]]:
        """The weights that are updated, with their records; for narrow parameters the fp32 copies.

        With a sharded optimizer those parts that this rank updates, 1-dimensional (see `flat_range`).
        """
        return zip(self._masters, self._records, strict=True)

    def written(self) -> dict[str, Tensor]:
        """Everything that an update on this rank writes, under the names it has in a checkpoint: the parameters (with a
        sharded optimizer its parts of them), their masters and state."""
        named = zip(self._parameters, self._records, strict=True)
        tensors = {f"model.{record.name}": parameter for parameter, record in named}
        for kind, state in self.state_tensors().items():
            tensors |= {f"optimizer.{kind}.{name}": tensor for name, tensor in state.items()}
        return tensors

    def flat_range(self, name: str) -> tuple[int, int] | None:
        """[first, stop) of the elements of a flattened parameter that this rank updates; None: nothing is sharded."""
        return self._ranges.get(name)

    @property
    def sharded(self) -> bool:
        return self.flat is not None

    @property
    def step_count(self) -> int:
        """Updates done, over all runs that this one resumed from."""
        return self._update.steps

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors by kind ("exp_avg", "exp_avg_sq"; with narrow parameters "master") and global name.

        All have their parameter's local shape and sharding, or with a sharded optimizer are this rank's `flat_range`
        of it; a parameter of which this rank has nothing is left out.  To restore in place, write into them and call
        `load_state_tensors` with them and the step count.
        """
        tensors = {
            kind: {record.name: self._update.state(master)[kind] for master, record in self.masters()}
            for kind in self._update.kinds
        }
        if self._copies:
            tensors[MASTER] = {record.name: master for master, record in self.masters()}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Mapping[str, Tensor]], step_count: int) -> None:
        """Restore what `state_tensors` and `step_count` gave; narrow parameters become their rounded masters.

        Raises:
            ValueError: a kind or parameter is missing, or a shape differs; nothing is changed then.
        """
        own = self.state_tensors()
        for kind, by_name in own.items():
            for name, target in by_name.items():
                source = tensors.get(kind, {}).get(name)
                if source is None:
                    raise ValueError(f"the optimizer state has no {kind} for parameter {name}")
                if source.shape != target.shape:
                    shapes = f"shape {tuple(source.shape)}, not {tuple(target.shape)}"
                    raise ValueError(f"{kind} of parameter {name} has {shapes}")
        for kind, by_name in own.items():
            for name, target in by_name.items():
                if tensors[kind][name] is not target:
                    target.copy_(tensors[kind][name])
        self._update.steps = step_count
        self._round_masters()
        if self.flat is not None:  # also on a rank whose shards are empty, which has no copies: the others wait for it
            self.flat.gather()
