"""The arithmetic of an update, apart from what is updated: AdamW, Adam and SGD, element by element.

`Update` is given wide weights with their records, whole parameters or any pieces of them, and makes torch's fused
optimizer (CPU and CUDA have one) over them.  All state is elementwise and has its weight's shape, so a piece's result
does not depend on where the piece was cut.

Megatron's `--optimizer adam` is AdamW: decay is decoupled from the gradient.  Without that
(`--no-decoupled-weight-decay`) decay is added to the gradient, as plain Adam and SGD do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megackpt.config.optimizer import OptimizerConfig
from megackpt.mesh.parameter import ParameterRecord

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)
_DECOUPLED = "decoupled_rate"  # key of a parameter group: the rate of the embedding and the output layer


def state_kinds(config: OptimizerConfig) -> tuple[str, ...]:
    """Names of the state tensors that the optimizer keeps for every weight, each of the weight's shape."""
    if config.optimizer == "adam":
        return MOMENTS
    return MOMENTUM if config.sgd_momentum > 0.0 else ()


class Update:
    """Updates wide weights in place from the gradients in their `.grad`.

    Attributes:
        kinds: the state tensors per weight, see `state_kinds`.
    """

    def __init__(self, weights: Sequence[tuple[Tensor, ParameterRecord]], config: OptimizerConfig) -> None:
        """`weights` may be pieces of parameters; a record says which decay and which rate theirs is."""
        self.kinds = state_kinds(config)
        self._weights = [weight for weight, _ in weights]
        self._steps = 0
        self._optimizer = _make(weights, config) if weights else None
        if self._optimizer is not None:
            for weight in self._weights:  # made here rather than in the first step: a load comes before it
                self._optimizer.state[weight] = {kind: torch.zeros_like(weight) for kind in self.kinds}
                if self.kinds == MOMENTS:
                    self._optimizer.state[weight]["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)

    @torch.no_grad()
    def step(self, rate: float, decoupled_rate: float | None = None) -> None:
        """Update all weights.  `decoupled_rate`: of the embedding and the output layer; None: as all others."""
        self._steps += 1
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = decoupled_rate if group[_DECOUPLED] and decoupled_rate is not None else rate
        self._optimizer.step()
        # The fused kernel writes unseen by autograd, which then could not tell that a saved weight changed.
        torch.autograd.graph.increment_version(self._weights)

    @property
    def steps(self) -> int:
        """Updates done.  Set it after the state was restored: Adam's bias correction counts them."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        if self._optimizer is not None and self.kinds == MOMENTS:
            for weight in self._weights:
                self._optimizer.state[weight]["step"].fill_(count)

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """The live state tensors of one weight by kind."""
        assert self._optimizer is not None
        return {kind: self._optimizer.state[weight][kind] for kind in self.kinds}


def _make(weights: Sequence[tuple[Tensor, ParameterRecord]], config: OptimizerConfig) -> torch.optim.Optimizer:
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for weight, record in weights:
        key = (record.decay, record.of_vocabulary)
        decay = config.weight_decay if record.decay else 0.0
        fresh = {"params": [], "weight_decay": decay, _DECOUPLED: record.of_vocabulary}
        groups.setdefault(key, fresh)["params"].append(weight)
    ordered = [groups[key] for key in sorted(groups, reverse=True)]
    if config.optimizer == "sgd":
        return torch.optim.SGD(ordered, lr=0.0, momentum=config.sgd_momentum, fused=True)
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return kind(ordered, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
