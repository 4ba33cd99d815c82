"""One flat buffer for the main gradients of everything a rank trains.

The problem: gradients of n micro-batches are summed, reduced over up to three axes, measured, clipped and
given to the optimizer.  With a tensor per parameter each of these is a loop of small operations and
collectives, and a bf16 sum would lose small terms.  So there is one fp32 buffer (fp64 for proofs, bf16 on request),
cut into buckets as `plan/buffers.py` lays them out, and every parameter has a view into it.  Two ways lead into it:

* **sink**: a linear of ours hands over the factors of its weight gradient and the buffer adds the product in
  one kernel (`addmm_` with beta = 1), an embedding of ours the rows it looked up: no gradient tensor ever exists,
  neither as memory nor as a second pass over it.  (No kernel adds a 16-bit product to a wider sum: of such a product
  a block of rows exists at a time, `SCRATCH` elements at most.);
* **hook**: for all other parameters autograd builds `.grad`; a post-accumulate hook adds it and drops it,
  once per backward, so that at most one micro-batch's gradient of one parameter is alive beside the buffer.

Both may meet in one parameter (a tied embedding).  A parameter that no micro-batch used has gradient zero.

With `sharded` each data-parallel rank finishes and updates only its part of each bucket: of a parameter that lies
across the border of two shards, two ranks have a `Part` each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import Axis
from megackpt.mesh.sink import AutogradSink, GradientSink
from megackpt.plan.buffers import BufferLayout, Member, default_bucket_size, lay_out, scratch_rows
from megackpt.precision.policy import wide_dtype


@dataclass(frozen=True)
class Entry:
    """A parameter, what is known about it, its view into the buffer (same shape as the parameter), and its bucket."""

    parameter: Parameter
    record: ParameterRecord
    gradient: Tensor
    bucket: int


@dataclass(frozen=True)
class Part:
    """The elements [first, stop) of a flattened parameter that lie in one shard; `gradient` is 1-dimensional."""

    entry: Entry
    first: int
    stop: int
    gradient: Tensor

    @property
    def record(self) -> ParameterRecord:
        return self.entry.record


class GradientBuffer(GradientSink):
    """The main gradients of a rank.

    The model needs its sink before parameters exist, so a buffer is made empty and given them by `attach`;
    until then it behaves as `AutogradSink`.

    Attributes:
        flat: the whole buffer, 1-dimensional.
        layout: where everything lies in it.
        entries: parameters in the order of the buffer.
        sharded: whether this rank finishes its own shards only.
        on_arrival: called with the number of an entry after each gradient that was added to it.
    """

    def __init__(self) -> None:
        self.flat: Tensor = torch.empty(0)
        self.layout: BufferLayout = lay_out((), 1, 1)
        self.entries: tuple[Entry, ...] = ()
        self.dp = Axis()
        self.sharded = False
        self.on_arrival: Callable[[int], None] | None = None
        self._sinks: dict[int, tuple[Tensor, int]] = {}  # id of a parameter -> its gradient as a matrix, its number
        self._hooks: list[RemovableHandle] = []
        self._fallback = AutogradSink()

    def attach(
        self,
        parameters: Iterable[tuple[Parameter, ParameterRecord]],
        dtype: torch.dtype | None = None,
        *,
        dp: Axis | None = None,
        bucket_size: int | None = None,
        sharded: bool = False,
    ) -> None:
        """Allocate a zeroed buffer for all `parameters` that require a gradient and start collecting.

        Parameters come in the order of the model.  `dtype` is that of the sums (None: fp32, or fp64 for fp64
        parameters); `dp` the axis that buckets are reduced over; `bucket_size` in elements (None: Megatron's).

        Raises:
            ValueError: the buffer has parameters already, a parameter or name is given twice, or dtypes or
                devices differ.
        """
        if self.entries:
            raise ValueError(f"the buffer already holds the gradients of {len(self.entries)} parameters")
        wanted = [(p, record) for p, record in parameters if p.requires_grad]
        _check_uniform(wanted)
        self.dp, self.sharded = dp or Axis(), sharded
        ranks = self.dp.size
        members = [_member(p, record) for p, record in wanted]
        self.layout = layout = lay_out(members, bucket_size or default_bucket_size(ranks), ranks)
        if not wanted:
            return
        first = wanted[0][0]
        self.flat = torch.zeros(layout.total, dtype=dtype or wide_dtype(first.dtype), device=first.device)
        self._order = [i for bucket in layout.buckets for i in bucket]
        buckets = [number for number, bucket in enumerate(layout.buckets) for _ in bucket]
        self.entries = tuple(
            self._entry(number, *wanted[i], layout.offsets[i], bucket)
            for number, (i, bucket) in enumerate(zip(self._order, buckets, strict=True))
        )

    def _entry(self, number: int, parameter: Parameter, record: ParameterRecord, offset: int, bucket: int) -> Entry:
        view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
        if parameter.dim() >= 2:
            # A gated weight [2, f/t, h] is used as the matrix [2f/t, h].
            self._sinks[id(parameter)] = (view.view(-1, parameter.shape[-1]), number)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._adds_into(view, number)))
        return Entry(parameter, record, view, bucket)

    def _adds_into(self, main: Tensor, number: int) -> Callable[[Tensor], None]:
        # The hook lives in the parameter, out of the garbage collector's sight: it must not hold the buffer, which
        # holds the parameter and, by way of the axes, whole process groups.
        itself = weakref.ref(self)

        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                main.add_(parameter.grad)
                parameter.grad = None
                buffer = itself()
                if buffer is not None:
                    buffer._arrived(number)

        return add

    def _arrived(self, number: int) -> None:
        if self.on_arrival is not None:
            self.on_arrival(number)

    def detach(self) -> None:
        """Stop collecting: parameters get their `.grad` from autograd again.  The buffer keeps its values."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._sinks.clear()

    # -- the sink ------------------------------------------------------------------------------------------------

    def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
        """Add `grad_output.t() @ input` to the gradient of `weight`.

        Args:
            weight: [..., k], taken as the matrix [m, k].
            grad_output: [n, m].
            input: [n, k].

        Returns:
            None, as the gradient is consumed; for a weight outside of the buffer the gradient, for autograd.
        """
        found = self._sinks.get(id(weight))
        if found is None:
            return self._fallback.weight_gradient(weight, grad_output, input)
        main, number = found
        if main.dtype == grad_output.dtype:
            main.addmm_(grad_output.t(), input)
        else:
            _add_narrow_product(main, grad_output.t(), input)
        self._arrived(number)
        return None

    def row_gradient(self, weight: Parameter, rows: Tensor, grad: Tensor) -> Tensor | None:
        """Add each line of `grad` [n, h] to the row of the gradient of `weight` [V, h] that `rows` [n] names.

        Returns as `weight_gradient` does.
        """
        found = self._sinks.get(id(weight))
        if found is None:
            return super().row_gradient(weight, rows, grad)
        main, number = found
        main.index_add_(0, rows, grad.to(main.dtype))
        self._arrived(number)
        return None

    # -- buckets and shards --------------------------------------------------------------------------------------

    def partial(self, sequence_parallel: bool) -> Tensor:
        """The slice of the gradients that are partial over tp."""
        layout = self.layout
        return self.flat[layout.bounds[layout.first_partial if sequence_parallel else layout.first_always] :]

    @cached_property
    def buckets(self) -> tuple[Tensor, ...]:
        """The buckets as slices of the buffer."""
        bounds = self.layout.bounds
        return tuple(self.flat[a:b] for a, b in zip(bounds, bounds[1:], strict=False))

    def shard(self, bucket: int) -> Tensor:
        """This rank's shard of a bucket."""
        return self.flat[slice(*self.layout.shard(bucket, self.dp.index))]

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The parts of parameters in the shards of each data-parallel rank."""
        return tuple(tuple(self._parts(rank)) for rank in range(self.dp.size))

    def _parts(self, rank: int) -> Iterable[Part]:
        for i, entry in zip(self._order if self.entries else (), self.entries, strict=True):
            numel = entry.parameter.numel()
            if (found := self.layout.part(i, numel, entry.bucket, rank)) is not None:
                yield Part(entry, *found, entry.gradient.view(-1)[slice(*found)])

    @property
    def finished_ranks(self) -> range:
        """The data-parallel ranks whose shards are whole here once the gradients are reduced: this one or all."""
        return range(self.dp.index, self.dp.index + 1) if self.sharded else range(self.dp.size)

    # -- all gradients at once -----------------------------------------------------------------------------------

    def zero_(self) -> None:
        """Start a step."""
        self.flat.zero_()

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply the reduced gradients by `factor` (a tensor: one element on the buffer's device)."""
        if isinstance(factor, Tensor) or factor != 1.0:
            for slice_ in [self.shard(k) for k in range(len(self.buckets))] if self.sharded else [self.flat]:
                slice_.mul_(factor)

    def gradients(self) -> dict[str, Tensor]:
        """Views into the buffer by global parameter name; sharded, only this rank's parts of them are reduced."""
        return {entry.record.name: entry.gradient for entry in self.entries}


def _add_narrow_product(main: Tensor, left: Tensor, right: Tensor) -> None:
    """`main += left @ right` for factors of a narrower type than `main` [m, k]: a block of rows at a time."""
    rows = scratch_rows(*main.shape)
    scratch = right.new_empty(rows, main.shape[1])
    for first in range(0, main.shape[0], rows):
        block = left[first : first + rows]
        product = scratch[: block.shape[0]]
        torch.mm(block, right, out=product)
        main[first : first + rows].add_(product)


def _member(parameter: Parameter, record: ParameterRecord) -> Member:
    partial, early = record.partial or record.partial_under_sp, record.tied and not record.counted
    return Member(parameter.numel(), partial, record.partial, record.tied, early)


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
