"""What every tensor-parallel layer is built with, as one value.

Two random streams belong to it. "replicated" gives the same numbers on all ranks of a tensor-parallel group: for
dropout of activations that each of them holds whole. "tensor" gives different ones: for dropout of activations that
are split over them. Both differ between data-parallel ranks, context-parallel ranks and pipeline stages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from megackpt.mesh.process_mesh import Axis, ProcessMesh
from megackpt.mesh.sink import GradientSink
from megackpt.recompute import RngLedger, Stream

REPLICATED, TENSOR = "replicated", "tensor"


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis and all that its layers share."""

    axis: Axis
    sequence_parallel: (
        bool  # activations outside the split parts are sharded along the sequence; False if t = 1
    )
    ledger: RngLedger  # owns the streams "replicated" and "tensor"
    sink: GradientSink  # receives the weight gradients of linear layers
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    seed: int | None  # of the weights; None leaves them unfilled (a model that is only looked at)

    @staticmethod
    def create(
        mesh: ProcessMesh,
        *,
        sequence_parallel: bool,
        ledger: RngLedger,
        sink: GradientSink,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> TensorParallel:
        """Register the two streams of this rank in `ledger` and make the value."""
        here = mesh.coordinates
        elsewhere = f"cp{here.cp}/dp{here.dp}/pp{here.pp}"
        ledger.register(Stream(REPLICATED, seed_of(seed, REPLICATED, elsewhere), device))
        ledger.register(Stream(TENSOR, seed_of(seed, TENSOR, f"tp{here.tp}/{elsewhere}"), device))
        return TensorParallel(
            axis=mesh.tp,
            sequence_parallel=sequence_parallel and mesh.tp.size > 1,
            ledger=ledger,
            sink=sink,
            dtype=dtype,
            device=device,
            seed=seed,
        )

    @property
    def hidden_stream(self) -> Stream:
        """For dropout between the split parts ([s/t, b, h] with sequence parallel, else [s, b, h] on every rank)."""
        return self.ledger.stream(TENSOR if self.sequence_parallel else REPLICATED)

    @property
    def attention_stream(self) -> Stream:
        """For dropout of attention probabilities, whose heads are split over the ranks."""
        return self.ledger.stream(TENSOR)

    @property
    def input_gradient_axis(self) -> Axis | None:
        """The axis over which a column-parallel layer sums its input gradient; None where nothing is to be summed.

        With sequence parallel the gather before the layer sums it, in its backward.
        """
        return self.axis if self.axis.size > 1 and not self.sequence_parallel else None


def seed_of(seed: int, *words: str) -> int:
    """A 63-bit seed from a number and words, the same in every process and Python version."""
    text = "/".join((str(seed), *words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
