"""Two tensor-parallel processes: our blocks with sequence parallel against torch's DTensor with torch's recompute.

The DTensor side is what `torch.distributed.tensor.parallel` is documented for: norms on sequence shards, column- and
row-parallel linears, gather before and reduce-scatter after them.  Both sides have the same weights and must give the
same loss.  Run by `bench_recompute.py`, which starts the processes.

b micro-batch, s sequence, h hidden, a heads, d head size, t tensor-parallel size.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from megackpt.mesh.process_mesh import Axis
from megackpt.mesh.rendezvous import shutdown
from megackpt.observe.memory_tracker import MemoryTracker
from tools.bench_common import Runs, in_turns, median_ratio
from tools.bench_plain import Model
from tools.bench_stacks import CPU_KERNELS, NAMES, OurStack, Training, copy_common, in_turn, qkv_parts

T = 2
TOLERANCE = 1e-4
OURS = {"ours, none": "none", "ours, full": "full", "ours, full, layer-input": "full, layer-input"}
DTENSOR = {"DTensor, none": False, "DTensor, checkpoint of layers": True}


@dataclass(frozen=True)
class Job:
    model: Model = field(default_factory=partial(Model, layers=2, hidden=128, heads=4, seq=128, vocab=16))
    micro_batch: int = 2
    rounds: int = 7


@dataclass
class Measured:
    """Of one rank."""

    runs: Runs
    flops: int
    collectives: int
    alive_bytes: int
    loss: float


class Attention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        h, self.d = model.hidden, model.hidden // model.heads
        self.query, self.key, self.value, self.proj = (nn.Linear(h, h) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h], in between [b, a/t, s, d]
        q, k, v = (part(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for part in (self.query, self.key, self.value))
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(core.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(model.hidden, 4 * model.hidden), nn.Linear(4 * model.hidden, model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """[b, s/t, h] -> [b, s/t, h], local tensors."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(model.hidden), nn.LayerNorm(model.hidden)
        self.attn, self.mlp = Attention(model), MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def spread() -> dict[str, ParallelStyle]:
    """What becomes of the modules of a layer."""
    gathered = partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns = ("attn.query", "attn.key", "attn.value", "mlp.up")
    return {
        "norm1": SequenceParallel(), "norm2": SequenceParallel(), "attn": gathered(), "mlp": gathered(),
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attn.proj", "mlp.down")},
    }  # fmt: skip


@torch.no_grad()
def dtensor_layers(model: Model) -> nn.ModuleList:
    """The layers, with the weights of ours, spread over the default group."""
    places = {"norm1": "norm1", "proj": "attn.proj", "norm2": "norm2", "up": "mlp.up", "down": "mlp.down"}
    names = {places[plain]: ours for plain, ours in NAMES.items()}
    mesh = init_device_mesh("cpu", (T,))
    layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
    for block, layer in zip(OurStack(model).blocks, layers, strict=True):
        copy_common(block, layer, names)
        for kind in ("weight", "bias"):
            parts = qkv_parts(block, kind, model.heads)
            for linear, part in zip((layer.attn.query, layer.attn.key, layer.attn.value), parts, strict=True):
                linear.get_parameter(kind).copy_(part)
        parallelize_module(layer, mesh, spread())
    return layers


def trainings(job: Job, rank: int) -> dict[str, Training]:
    model = job.model
    x, slope = (torch.randn(model.seq, job.micro_batch, model.hidden, generator=torch.Generator().manual_seed(n)).div(2)
                for n in (1, 2))  # fmt: skip
    x, slope = (tensor.chunk(T)[rank].contiguous() for tensor in (x, slope / slope.numel()))
    stack = OurStack(model, Axis(T, rank, tuple(range(T)), dist.group.WORLD), sequence_parallel=True)
    mine = list(stack.blocks.parameters())
    found = {name: Training(partial(stack, plan=stack.plan(p)), mine, x, slope) for name, p in OURS.items()}
    layers = dtensor_layers(model)
    regions = [partial(checkpoint, layer, use_reentrant=False) for layer in layers]
    batch_first = [tensor.transpose(0, 1).contiguous() for tensor in (x, slope)]
    for name, again in DTENSOR.items():
        forward = partial(in_turn, regions if again else layers)
        found[name] = Training(forward, list(layers.parameters()), *batch_first)
    return found


class _Local(TorchDispatchMode):
    """FLOPs and collectives of what runs on local tensors: a distributed tensor's operation is counted as what becomes
    of it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet in CPU_KERNELS:
            self.flops += CPU_KERNELS[packet](*(a.shape if isinstance(a, Tensor) else a for a in args))
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif func.namespace in ("c10d", "_c10d_functional") and not func.__name__.startswith(("wait", "_wrap")):
            self.collectives += 1
        return result


class LocalTracker(MemoryTracker):
    """Bytes of local tensors only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if DTensor in types else super().__torch_dispatch__(func, types, args, kwargs)


def _counts(training: Training) -> tuple[int, int, int]:
    """FLOPs, collectives, bytes allocated in the forward and alive at its end."""
    with _Local() as local:
        training.step()
    with LocalTracker() as tracker:
        loss = training.loss()
    alive = tracker.live_bytes
    loss.backward()  # the other rank waits in it
    return local.flops, local.collectives, alive


def on_rank(rank: int, world_size: int, job: Job) -> dict[str, Measured]:
    """All contenders in turns on this rank; the default group must exist.

    Raises RuntimeError when they do not compute the same.
    """
    found = trainings(job, rank)
    losses = {name: training.step() for name, training in found.items()}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > TOLERANCE * abs(first) for loss in losses.values()):
        raise RuntimeError(f"not one model: losses {losses}")
    counts = {name: _counts(training) for name, training in found.items()}
    runs = in_turns([partial(training.repeat, 1) for training in found.values()], job.rounds, warm_up=2)
    return {name: Measured(got, *counts[name], losses[name]) for name, got in zip(found, runs, strict=True)}


def _process(rank: int, folder: str, job: Job) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", T)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=T, timeout=datetime.timedelta(seconds=60))
    try:
        found = {name: asdict(got) for name, got in on_rank(rank, T, job).items()}
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    finally:
        shutdown()


def measure(job: Job) -> dict[str, dict[str, Any]]:
    """Start the processes; what rank 0 found, by contender."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(folder, job), nprocs=T)
        found: dict[str, dict[str, Any]] = json.loads(Path(folder, "0.json").read_text())
    return found


HEADER = ("two processes", "step ms", "CPU ms", "CPU / ours", "FLOPs / none", "collectives", "alive KiB")


def rows_of(measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Processor time also as a multiple of our none's; FLOPs to none of the same side."""
    ours = measured[next(iter(OURS))]
    rows = []
    for name, got in measured.items():
        base = measured[next(iter(OURS if name in OURS else DTENSOR))]
        rows.append([
            name, f"{statistics.median(got['runs']['wall']) * 1e3:.1f}",
            f"{statistics.median(got['runs']['cpu']) * 1e3:.1f}",
            f"{median_ratio(got['runs']['cpu'], ours['runs']['cpu']):.2f}", f"{got['flops'] / base['flops']:.4f}",
            str(got["collectives"]), f"{got['alive_bytes'] / 1024:.0f}",
        ])  # fmt: skip
    return rows
