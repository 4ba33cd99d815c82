"""Reduction, norm, clipping and update over tp, dp and pp, against numbers computed from whole tensors.

The model is a list of tensors that takes every role a parameter can have. A rank's gradient is a part of a
whole gradient that every rank can compute:

* over dp, and over the two copies of a tied weight, the parts are different draws that add up;
* over tp, a shard for sharded parameters; a share of 1/4, 3/4 (tp 2) for those that are partial under
  sequence parallelism; otherwise the same on all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.parameter import ParameterRecord, gather_full, local_shard
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.optim import GradientBuffer, GradientReduction, clip_, gradient_statistics, params_norm
from tests.optim.helpers import adamw, draw
from tests.pool import run_distributed

SCALE = 1 / 3
WORD, ROWS = "embedding.word.weight", 11  # 11 of 12 rows exist

RECORDS = {
    record.name: record
    for record in (
        ParameterRecord((12, 6), WORD, shard_dim=0, tied=True, valid=ROWS),
        ParameterRecord((6,), "layers.0.norm.weight", partial_under_sp=True, decay=False),
        ParameterRecord((8, 6), "layers.0.up.weight", shard_dim=0),
        ParameterRecord((8,), "layers.0.up.bias", shard_dim=0, decay=False),
        ParameterRecord((6, 8), "layers.0.down.weight", shard_dim=1),
        ParameterRecord((6,), "layers.0.down.bias", partial_under_sp=True, decay=False),
        ParameterRecord((3, 4), "layers.1.router.weight"),  # replicated, its gradient whole on every rank
        ParameterRecord((5,), "layers.1.head_norm.weight", partial=True, decay=False),
        ParameterRecord((6,), "final_norm.weight", partial_under_sp=True, decay=False),
    )
}


def names_of_stage(stage: int, stages: int) -> list[str]:
    """Which parameters a stage has; the tied copies have different places on theirs."""
    names = list(RECORDS)
    if stages == 1:
        return names
    return names[:4] if stage == 0 else [*names[4:], WORD]


def whole_part(name: str, dp: int, copy: int) -> Tensor:
    """The gradient that data-parallel rank `dp` and the stage with copy number `copy` contribute, fp64."""
    seed = 1000 * dp + 100 * copy + list(RECORDS).index(name)
    part = draw(*RECORDS[name].global_shape, seed=seed, dtype=torch.float64)
    if name == WORD:
        part[ROWS:] = 0
        part[0] = 0  # real zeros, which do count
    return part


def expected_gradient(name: str, dp_size: int, stages: int) -> Tensor:
    copies = 2 if name == WORD and stages > 1 else 1
    return SCALE * sum(whole_part(name, dp, copy) for dp in range(dp_size) for copy in range(copies))


def expected_norm(dp_size: int, stages: int) -> float:
    return math.sqrt(sum(float(expected_gradient(name, dp_size, stages).square().sum()) for name in RECORDS))


def start_norm() -> float:
    starts = [draw(*record.global_shape, seed=i).double() for i, record in enumerate(RECORDS.values())]
    return math.sqrt(sum(float(start.square().sum()) for start in starts))


def create_mesh(tp: int, dp: int, pp: int) -> ProcessMesh:
    parallel = ParallelConfig(tensor=tp, pipeline=pp, world_size=tp * dp * pp, device="cpu")
    return ProcessMesh.create(parallel, DeviceSeam.create("cpu"))


def stage_buffer(mesh: ProcessMesh, dtype: torch.dtype) -> GradientBuffer:
    pairs = []
    for name in names_of_stage(mesh.pp.index, mesh.pp.size):
        record = RECORDS[name]
        if name == WORD and mesh.pp.index > 0:
            record = ParameterRecord(record.global_shape, name, 0, tied=True, counted=False, valid=ROWS)
        start = draw(*record.global_shape, seed=list(RECORDS).index(name))
        pairs.append((Parameter(local_shard(start, record, mesh.tp).to(dtype, copy=True)), record))
    buffer = GradientBuffer()
    buffer.attach(pairs, dp=mesh.dp)
    return buffer


def accumulate(buffer: GradientBuffer, mesh: ProcessMesh, sequence_parallel: bool) -> None:
    """What forward and backward would leave, through autograd and the buffer's hooks."""
    for entry in buffer.entries:
        copy = 1 if entry.record.name == WORD and mesh.pp.index > 0 else 0
        part = local_shard(whole_part(entry.record.name, mesh.dp.index, copy), entry.record, mesh.tp)
        partial = entry.record.partial or (entry.record.partial_under_sp and sequence_parallel)
        if partial and mesh.tp.size > 1:
            shares = torch.arange(1, 2 * mesh.tp.size, 2, dtype=torch.float64)
            part = part * shares[mesh.tp.index] / shares.sum()
        (entry.parameter * part.to(entry.parameter.dtype)).sum().backward()


class CountedAllReduce:
    """Counts the calls of `dist.all_reduce` and their elements, from outside the product."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._real = dist.all_reduce

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(tensor.numel())
        return self._real(tensor, *args, **kwargs)

    def __enter__(self) -> list[int]:
        dist.all_reduce = self
        return self.sizes

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._real


def reduced_step(
    rank: int, world_size: int, tp: int, dp: int, pp: int, sequence_parallel: bool
) -> dict[str, Any]:
    mesh = create_mesh(tp, dp, pp)
    buffer = stage_buffer(mesh, torch.float64)
    accumulate(buffer, mesh, sequence_parallel)
    with CountedAllReduce() as in_finish:
        GradientReduction(buffer, mesh, sequence_parallel=sequence_parallel).finish(SCALE)
    with CountedAllReduce() as in_norm:
        statistics = gradient_statistics(buffer, mesh, count_zeros=True)
    gradients = {e.record.name: gather_full(e.gradient, e.record, mesh.tp) for e in buffer.entries}
    return {
        "gradients": gradients,
        "norm": statistics.norm,
        "zeros": statistics.num_zeros,
        "params_norm": params_norm([(e.parameter, e.record) for e in buffer.entries], mesh),
        "in_finish": in_finish,
        "in_norm": in_norm,
        "partial": buffer.partial(sequence_parallel).numel(),
        "buckets": [bucket.numel() for bucket in buffer.buckets],
        "stage": mesh.pp.index,
    }


LAYOUTS = [
    (1, 1, 1, False),
    (2, 1, 1, False),
    (2, 1, 1, True),
    (1, 2, 1, False),
    (1, 1, 2, False),
    (2, 1, 2, True),
    (2, 2, 1, True),
    (1, 2, 2, False),
    (4, 1, 1, True),
]


@pytest.mark.parametrize(("tp", "dp", "pp", "sequence_parallel"), LAYOUTS)
def test_gradients_norm_and_collectives(tp: int, dp: int, pp: int, sequence_parallel: bool) -> None:
    """TP-01, TP-03, TE-03, TE-04, LS-12: gathered gradients and norms to 1e-12, one collective per axis."""
    results = run_distributed(reduced_step, tp * dp * pp, tp, dp, pp, sequence_parallel)
    for result in results:
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, expected_gradient(name, dp, pp), rtol=1e-12, atol=1e-14)
        assert result["norm"] == results[0]["norm"] == pytest.approx(expected_norm(dp, pp), rel=1e-12)
        assert result["zeros"] == 6
        assert result["params_norm"] == pytest.approx(start_norm(), rel=1e-12)

        buckets = result["buckets"] if dp > 1 else []
        expected = [result["partial"]] * (tp > 1 and result["partial"] > 0) + buckets + [12 // tp * 6] * (pp > 1)
        assert result["in_finish"] == expected
        assert result["in_norm"] == ([tp * pp * dp * 3] if tp * pp > 1 else [])


def trained(rank: int, world_size: int, tp: int, dp: int, pp: int, steps: int, name: str) -> dict[str, Any]:
    mesh = create_mesh(tp, dp, pp)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
    buffer = stage_buffer(mesh, dtype)
    optimizer = adamw(buffer)
    reduction = GradientReduction(buffer, mesh, sequence_parallel=tp > 1)
    coefficients = []
    for step in range(steps):
        reduction.start(1)
        accumulate(buffer, mesh, sequence_parallel=tp > 1)
        buffer.scale_(1 + 0.1 * math.sin(step))
        reduction.finish(SCALE)
        coefficients.append(clip_(buffer, gradient_statistics(buffer, mesh).norm, 0.01))
        optimizer.step(1e-2)
    masters = {record.name: master for master, record in optimizer.masters()}
    return {
        "tp": mesh.tp.index,
        "stage": mesh.pp.index,
        "coefficients": coefficients,
        "weights": {e.record.name: e.parameter.detach().clone() for e in buffer.entries},
        "masters": masters,
    }


def test_replicated_weights_stay_equal_over_50_clipped_bf16_steps() -> None:  # TE-06
    a, b = run_distributed(trained, 2, 2, 1, 1, 50, "bf16")
    assert a["coefficients"] == b["coefficients"] and max(a["coefficients"]) < 0.02
    for name, record in RECORDS.items():
        for kind in ("weights", "masters"):
            assert torch.equal(a[kind][name], b[kind][name]) is (record.shard_dim is None)


def test_tied_copies_stay_equal_although_three_replicas_sum_in_another_order() -> None:  # TE-02
    """With three addends an fp32 sum depends on their order, and a ring's order on an element's place."""
    results = run_distributed(trained, 6, 1, 3, 2, 10, "fp32")
    copies = [result["weights"][WORD] for result in results]
    assert {result["stage"] for result in results} == {0, 1}
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    for name in RECORDS:
        replicas = [result["weights"][name] for result in results if name in result["weights"]]
        assert all(torch.equal(replica, replicas[0]) for replica in replicas)
