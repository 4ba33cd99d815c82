"""One flat buffer for the main gradients of everything a rank trains.

The problem: gradients of n micro-batches are summed, reduced over up to three axes, measured, clipped and
given to the optimizer.  With a tensor per parameter each of these is a loop of small operations and
collectives, and a bf16 sum would lose small terms.  So there is one fp32 buffer (fp64 for proofs)::

    [ partial under sequence parallel | everything else ]
      └── one all-reduce over tp ──┘
    └─────────── one all-reduce over dp ───────────────┘

and every parameter has a view into it.  Two ways lead into the buffer:

* **sink**: a linear of ours hands over the factors of its weight gradient and the buffer adds the product in
  one kernel (`addmm_` with beta = 1), an embedding of ours the rows it looked up: no gradient tensor ever exists,
  neither as memory nor as a second pass over it;
* **hook**: for all other parameters autograd builds `.grad`; a post-accumulate hook adds it and drops it,
  once per backward, so that at most one micro-batch's gradient of one parameter is alive beside the buffer.

Both may meet in one parameter (a tied embedding).  A parameter that no micro-batch used has gradient zero.
There is no padding between parameters: the bytes of each collective are the bytes of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.sink import AutogradSink, GradientSink
from megackpt.precision.policy import wide_dtype


@dataclass(frozen=True)
class Entry:
    """A parameter, what is known about it, and its view into the buffer (same shape as the parameter)."""

    parameter: Parameter
    record: ParameterRecord
    gradient: Tensor


class GradientBuffer(GradientSink):
    """The main gradients of a rank.

    The model needs its sink before parameters exist, so a buffer is made empty and given them by `attach`;
    until then it behaves as `AutogradSink`.

    Attributes:
        flat: the whole buffer, 1-dimensional.
        partial: its leading slice, the gradients that are partial over tp under sequence parallelism.
        entries: parameters in the order of the buffer.
    """

    def __init__(self) -> None:
        self.flat: Tensor = torch.empty(0)
        self.partial: Tensor = self.flat
        self.entries: tuple[Entry, ...] = ()
        self._matrices: dict[int, Tensor] = {}  # id of a parameter -> its gradient as a matrix
        self._hooks: list[RemovableHandle] = []
        self._fallback = AutogradSink()

    def attach(
        self, parameters: Iterable[tuple[Parameter, ParameterRecord]], dtype: torch.dtype | None = None
    ) -> None:
        """Allocate a zeroed buffer for all `parameters` that require a gradient and start collecting.

        `dtype` is that of the sums; None: fp32, or fp64 for fp64 parameters.

        Raises:
            ValueError: the buffer has parameters already, a parameter or name is given twice, or dtypes or
                devices differ.
        """
        if self.entries:
            raise ValueError(f"the buffer already holds the gradients of {len(self.entries)} parameters")
        wanted = [(p, record) for p, record in parameters if p.requires_grad]
        _check_uniform(wanted)
        if not wanted:
            return
        wanted.sort(key=lambda pair: not pair[1].partial_under_sp)  # stable: else the model's order
        first = wanted[0][0]
        total = sum(p.numel() for p, _ in wanted)
        self.flat = torch.zeros(total, dtype=dtype or wide_dtype(first.dtype), device=first.device)
        entries = []
        offset = 0
        for parameter, record in wanted:
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            entries.append(Entry(parameter, record, view))
            offset += parameter.numel()
            if record.partial_under_sp:
                self.partial = self.flat[:offset]
            if parameter.dim() >= 2:
                # A gated weight [2, f/t, h] is used as the matrix [2f/t, h].
                self._matrices[id(parameter)] = view.view(-1, parameter.shape[-1])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_adds_into(view)))
        self.entries = tuple(entries)
        if not self.entries[0].record.partial_under_sp:
            self.partial = self.flat[:0]

    def detach(self) -> None:
        """Stop collecting: parameters get their `.grad` from autograd again.  The buffer keeps its values."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._matrices.clear()

    def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
        """Add `grad_output.t() @ input` to the gradient of `weight`.

        Args:
            weight: [..., k], taken as the matrix [m, k].
            grad_output: [n, m].
            input: [n, k].

        Returns:
            None, as the gradient is consumed; for a weight outside of the buffer the gradient, for autograd.
        """
        main = self._matrices.get(id(weight))
        if main is None:
            return self._fallback.weight_gradient(weight, grad_output, input)
        if main.dtype == grad_output.dtype:
            main.addmm_(grad_output.t(), input)
        else:
            main.add_(grad_output.t() @ input)
        return None

    def row_gradient(self, weight: Parameter, rows: Tensor, grad: Tensor) -> Tensor | None:
        """Add each line of `grad` [n, h] to the row of the gradient of `weight` [V, h] that `rows` [n] names.

        Returns as `weight_gradient` does.
        """
        main = self._matrices.get(id(weight))
        if main is None:
            return super().row_gradient(weight, rows, grad)
        main.index_add_(0, rows, grad.to(main.dtype))
        return None

    def zero_(self) -> None:
        """Start a step."""
        self.flat.zero_()

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients by `factor` (a tensor: one element on the buffer's device)."""
        if isinstance(factor, Tensor) or factor != 1.0:
            self.flat.mul_(factor)

    def gradients(self) -> dict[str, Tensor]:
        """Views into the buffer by global parameter name."""
        return {entry.record.name: entry.gradient for entry in self.entries}


def _adds_into(main: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main.add_(parameter.grad)
            parameter.grad = None

    return add


def _check_uniform(parameters: list[tuple[Parameter, ParameterRecord]]) -> None:
    names: set[str] = set()
    seen: set[int] = set()
    for parameter, record in parameters:
        if record.name in names or id(parameter) in seen:
            raise ValueError(f"parameter {record.name} is given twice")
        names.add(record.name)
        seen.add(id(parameter))
        first = parameters[0][0]
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ValueError(
                f"parameter {record.name} is {parameter.dtype} on {parameter.device}, but "
                f"{parameters[0][1].name} is {first.dtype} on {first.device}: one buffer holds one kind"
            )
