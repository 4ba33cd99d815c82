"""AdamW on masters, with its state by global parameter name.

Megatron's `--optimizer adam` is AdamW: decay is decoupled from the gradient.  The arithmetic is PyTorch's own
fused kernel (CPU and GPU); what is added is *what it updates*:

* bf16 parameters have fp32 masters, which the kernel updates and which are then rounded into the parameters;
* fp32 and fp64 parameters are their own masters (an alias, no copy).

The kernel is given one tensor per parameter rather than one flat tensor: an element's result then cannot
depend on where its parameter lies on this rank, so replicated and tied copies stay bitwise equal.  (Flat
tensors would save a sixth of the update's time, which is itself below 1 % of a step.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megackpt.config.optimizer import OptimizerConfig
from megackpt.mesh.parameter import ParameterRecord
from megackpt.optim.buffer import GradientBuffer

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


class MasterAdamW:
    """Updates the parameters of a `GradientBuffer` from its gradients."""

    def __init__(self, buffer: GradientBuffer, config: OptimizerConfig) -> None:
        """Masters are built from the parameters as they are now; see `refresh_masters`.

        A parameter must stay where it is (`copy_` into it, do not replace its `.data`).
        """
        self._parameters: list[Tensor] = [entry.parameter for entry in buffer.entries]
        self._records = [entry.record for entry in buffer.entries]
        wide = buffer.flat.dtype
        # `detach` shares memory and version counter: autograd still sees that a weight was changed.
        self._masters = [
            p.detach() if p.dtype == wide else p.detach().to(wide, copy=True) for p in self._parameters
        ]
        self._copies = bool(self._parameters) and self._parameters[0].dtype != wide
        for master, entry in zip(self._masters, buffer.entries, strict=True):
            master.grad = entry.gradient
        self._optimizer = self._make(config) if self._masters else None

    def _make(self, config: OptimizerConfig) -> torch.optim.AdamW:
        pairs = list(zip(self._masters, self._records, strict=True))
        groups = [
            {"params": [m for m, record in pairs if record.decay], "weight_decay": config.weight_decay},
            {"params": [m for m, record in pairs if not record.decay], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,  # set by every step
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for master in self._masters:  # made here rather than in the first step: a load comes before it
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                **{kind: torch.zeros_like(master) for kind in MOMENTS},
            }
        return optimizer

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters with learning rate `lr` from the gradients in the buffer."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        # The fused kernel writes unseen by autograd, which then could not tell that a saved weight changed.
        torch.autograd.graph.increment_version(self._masters)
        self._round_masters()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the parameters as they are now: after weights were loaded without the optimizer's state.

        Without it the first step would bring back the weights from before the load.
        """
        if self._copies:
            torch._foreach_copy_(self._masters, self._parameters)

    def _round_masters(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._parameters, self._masters)

    def masters(self) -> Iterable[tuple[Tensor, ParameterRecord]]:
        """The weights that are updated, with their records; for bf16 the fp32 copies."""
        return zip(self._masters, self._records, strict=True)

    @property
    def step_count(self) -> int:
        """Updates done, over all runs that this one resumed from."""
        return int(self._state(self._masters[0])["step"].item()) if self._masters else 0

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors by kind ("exp_avg", "exp_avg_sq", for bf16 "master") and global parameter name.

        All have their parameter's local shape and sharding.  To restore in place, write into them and call
        `load_state_tensors` with them and the step count.
        """
        tensors = {
            kind: {record.name: self._state(master)[kind] for master, record in self.masters()}
            for kind in MOMENTS
        }
        if self._copies:
            tensors[MASTER] = {record.name: master for master, record in self.masters()}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Mapping[str, Tensor]], step_count: int) -> None:
        """Restore what `state_tensors` and `step_count` gave; bf16 parameters become their rounded masters.

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
        for master in self._masters:
            self._state(master)["step"].fill_(step_count)
        self._round_masters()

    def _state(self, master: Tensor) -> dict[str, Tensor]:
        assert self._optimizer is not None
        return self._optimizer.state[master]
