"""The data-parallel side of a step on two processes: ours, DDP with ZeroRedundancyOptimizer, and FSDP2.

All three train one stack of MLPs from the same weights on the same numbers: n micro-batches of forward and backward,
gradients averaged over the ranks once, clipping by the global norm, AdamW on shards, parameters whole again.  They run
in turns, a step each, and are compared by the median of the ratios within pairs.  The losses of all steps must agree.

    python tools/bench_optimizer.py [--rounds 21] [--json FILE]

Ours is what the trainer runs with --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather.  The others
get what makes them fast: no synchronisation before the last micro-batch, gradients as views of DDP's buckets, ZeRO's
parameters as views of its buckets, FSDP2 without resharding after the forward, torch's fused AdamW throughout.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import socket
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from bench_common import Runs, in_turns, machine, median_ratio, table, write_json
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from megackpt.config.optimizer import OptimizerConfig
from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.mesh.rendezvous import shutdown
from megackpt.mesh.sink import GradientSink
from megackpt.observe.memory_tracker import MemoryTracker
from megackpt.optim import GradientBuffer, GradientReduction, MasterOptimizer, clip_, gradient_statistics
from megackpt.tensor.linear import linear

RANKS = 2
RATE, BETAS, EPSILON, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 0.5
NAMES = ("ours", "DDP + ZeRO", "FSDP2")


class Layer(nn.Module):
    """x + down(gelu(up(x))).  With a sink the products are those of our linear, else torch's."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden, dtype=dtype), nn.Linear(4 * hidden, hidden, dtype=dtype)
        self.sink: GradientSink | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x + self._product(self.down, F.gelu(self._product(self.up, x)))

    def _product(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x) if self.sink is None else linear(x, layer.weight, layer.bias, self.sink)


def stack(layers: int, hidden: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer(hidden, dtype) for _ in range(layers)))


def loss_of(model: nn.Module, x: Tensor, n: int) -> Tensor:
    out: Tensor = model(x)
    return out.float().square().mean() / n


Step = Callable[[], float]


def ours(model: nn.Sequential, batches: list[Tensor], mesh: ProcessMesh) -> Step:
    buffer, n = GradientBuffer(), len(batches)
    for layer in model:
        layer.sink = buffer
    named = [(p, ParameterRecord(tuple(p.shape), name)) for name, p in model.named_parameters()]
    buffer.attach(named, dp=mesh.dp, sharded=True)
    reduction = GradientReduction(buffer, mesh, overlap=True)
    config = OptimizerConfig(
        lr=RATE, weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPSILON, clip_grad=CLIP
    )
    optimizer = MasterOptimizer(buffer, config, overlap_gather=True)
    assert optimizer.flat is not None
    for layer in model:
        optimizer.flat.guard(layer, layer.parameters())

    def step() -> float:
        reduction.start(n)
        total = 0.0
        for x in batches:
            loss = loss_of(model, x, n * mesh.dp.size)  # as in the trainer: the seed divides, not a pass over the sum
            loss.backward()
            total += loss.item() * mesh.dp.size
        reduction.finish()
        clip_(buffer, gradient_statistics(buffer, mesh).norm, CLIP)
        optimizer.step(RATE)
        return total

    return step


def torchs(model: nn.Module, batches: list[Tensor], optimizer: Any, synced: Callable[[bool], Any]) -> Step:
    n = len(batches)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, x in enumerate(batches):
            with synced(number == n - 1):
                loss = loss_of(model, x, n)
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        return total

    return step


SETTINGS: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY, "fused": True}


def ddp_and_zero(model: nn.Module, batches: list[Tensor]) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **SETTINGS
    )
    return torchs(wrapped, batches, optimizer, lambda last: nullcontext() if last else wrapped.no_sync())


def fsdp2(model: nn.Sequential, batches: list[Tensor]) -> Step:
    device_mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=device_mesh, reshard_after_forward=False)
    fully_shard(model, mesh=device_mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)

    def synced(last: bool) -> Any:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    return torchs(model, batches, optimizer, synced)


def _rank(rank: int, port: int, args: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    parallel = ParallelConfig(world_size=RANKS, device="cpu", distributed_optimizer=True, overlap_param_gather=True)
    mesh = ProcessMesh.create(parallel, DeviceSeam.create("cpu"))
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(args.rows, args.hidden, generator=generator) for _ in range(args.micro_batches)]
    plain = stack(args.layers, args.hidden, torch.float32)
    count = sum(p.numel() for p in plain.parameters())
    makers = {
        "ours": lambda model: ours(model, batches, mesh),
        "DDP + ZeRO": lambda model: ddp_and_zero(model, batches),
        "FSDP2": lambda model: fsdp2(model, batches),
    }
    steps, held, losses = [], {}, {name: [] for name in NAMES}
    for name in NAMES:
        step, held[name] = counted(makers[name], plain)
        steps.append(logging(step, losses[name]))
    narrow = [x.bfloat16() for x in batches]
    _, held["ours, bf16"] = counted(lambda m: ours(m, narrow, mesh), stack(args.layers, args.hidden, torch.bfloat16))
    runs = in_turns(steps, args.rounds, warm_up=3)
    agree(losses)
    if rank == 0:
        write_json(path, {"parameters": count, "held": held, "runs": [vars(run) for run in runs], "losses": losses})
    dist.barrier()
    shutdown()


def counted(make: Callable[[nn.Sequential], Step], model: nn.Sequential) -> tuple[Step, int]:
    """The step, and the bytes that it holds between steps: weights, gradients, optimizer state, buffers."""
    with MemoryTracker() as tracker:
        own = copy.deepcopy(model)
        step = make(own)
        for _ in range(2):
            step()
        del own
    return step, tracker.live_bytes


def logging(step: Step, losses: list[float]) -> Callable[[], None]:
    def run() -> None:
        dist.barrier()
        losses.append(step())

    return run


def agree(losses: dict[str, list[float]]) -> None:
    for name in NAMES[1:]:
        for a, b in zip(losses[NAMES[0]], losses[name], strict=True):
            if not math.isclose(a, b, rel_tol=1e-4):
                raise RuntimeError(f"losses of ours and {name} differ: {a} and {b}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 21), ("layers", 8), ("hidden", 256), ("rows", 64), ("micro-batches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        mp.spawn(_rank, (port, args, str(path)), nprocs=RANKS)
        found = json.loads(path.read_text())
    runs, count = [Runs(**run) for run in found["runs"]], found["parameters"]
    rows = []
    for name, run in zip(NAMES, runs, strict=True):
        wall, cpu = sorted(run.wall)[len(run.wall) // 2], sorted(run.cpu)[len(run.cpu) // 2]
        ratios = [f"{median_ratio(getattr(run, kind), getattr(runs[0], kind)):.2f}" for kind in ("wall", "cpu")]
        rows.append([name, f"{wall * 1e3:.1f}", f"{cpu * 1e3:.1f}", *ratios, f"{found['held'][name] / count:.2f}"])
    rows.append(["ours, bf16", "", "", "", "", f"{found['held']['ours, bf16'] / count:.2f}"])
    print(f"{count:,} parameters, {RANKS} processes, medians of {args.rounds} paired steps; losses agree")
    print(table(["", "ms", "CPU ms", "time / ours", "CPU / ours", "bytes per parameter"], rows))
    print(f"expected of ours: fp32 8 + 8/d = {8 + 8 / RANKS:g}, bf16 6 + 12/d = {6 + 12 / RANKS:g}")
    if args.json:
        write_json(args.json, {"settings": vars(args), "machine": machine(), **found})


if __name__ == "__main__":
    main()
