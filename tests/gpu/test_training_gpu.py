"""The whole trainer on one GPU: formats, the fused optimizer, the loss scale, and runs that repeat to the bit.

The same paths are proven on a CPU elsewhere; here is what a device may do otherwise: its kernels, its order of sums,
its copies that have not arrived yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megackpt.config.optimizer import OptimizerConfig
from megackpt.config.run import RunConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.rendezvous import init_process_group, shutdown
from megackpt.optim import Update
from megackpt.train.build import Trainer, build
from megackpt.train.loop import loader
from megackpt.train.seal import digest
from megackpt.train.step import Stepper
from tests.gpu.harness import DEVICE, numbers
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags

pytestmark = pytest.mark.gpu
DROPOUT: Flags = SMALL_GPT | {"hidden-dropout": 0.1, "attention-dropout": 0.1}
RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "free": {"recompute-granularity": "free"},
    "selective": {"recompute-granularity": "selective"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}


@pytest.fixture
def seam() -> Iterator[DeviceSeam]:
    """This device, deterministic, in a process group of one."""
    cuda = torch.backends.cuda
    before = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    here = DeviceSeam.create(DEVICE.type)
    here.make_deterministic(os.environ)
    init_process_group(RunConfig.from_flags(SMALL_GPT).parallel, LaunchEnvironment.detect({}), here)
    yield here
    shutdown()
    torch.utils.deterministic.fill_uninitialized_memory = True
    cuda.enable_mem_efficient_sdp(before[0])
    cuda.enable_cudnn_sdp(before[1])


def trained(seam: DeviceSeam, flags: Flags, steps: int) -> tuple[list[float], list[Tensor], Trainer]:
    """Losses, and the gradients and weights after the last of so many steps."""
    trainer = build(RunConfig.from_flags(flags | {"train-iters": 40}), seam)
    stepper, losses = Stepper(trainer), []
    samples = trainer.config.batch.global_batch_size
    with loader(trainer, trainer.datasets.train, 0) as batches:
        for step in range(steps):
            losses.append(stepper.train(batches, step * samples).loss)
    gradients = list(trainer.buffer.gradients().values())
    return losses, [*gradients, *(parameter.detach() for parameter, _ in trainer.parameters)], trainer


@pytest.mark.parametrize("flags", [SMALL_GPT, SMALL_LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_learns_as_fp32_does(flags: Flags, dtype: str, seam: DeviceSeam) -> None:
    flags = flags | {"lr": 2e-3, "initial-loss-scale": 4096}
    wide, _, _ = trained(seam, flags, 20)
    narrow, _, trainer = trained(seam, flags | {"params-dtype": dtype}, 20)
    assert wide[-1] < 0.85 * wide[0]
    assert max(abs(a - b) / b for a, b in zip(narrow, wide, strict=True)) < 0.02
    assert trainer.buffer.flat.dtype == torch.float32 and trainer.buffer.flat.device.type == DEVICE.type
    for weight, _ in trainer.optimizer.masters():
        assert weight.dtype == torch.float32


def test_fp32_equals_the_cpu(seam: DeviceSeam) -> None:
    losses, _, _ = trained(seam, SMALL_GPT | {"lr": 3e-4}, 3)
    expected, _, _ = trained(DeviceSeam.create("cpu"), SMALL_GPT | {"lr": 3e-4}, 3)
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_runs_repeat_to_the_bit_under_every_policy(dtype: str, seam: DeviceSeam) -> None:
    flags = DROPOUT | {"params-dtype": dtype, "initial-loss-scale": 1024}
    losses, tensors, _ = trained(seam, flags, 4)
    for name, more in [("again", {}), *RECOMPUTE.items()]:
        again, others, _ = trained(seam, flags | more, 4)
        assert again == losses, name
        assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True)), name


def test_the_loss_scale_falls_until_it_fits(seam: DeviceSeam) -> None:
    flags = SMALL_GPT | {"fp16": True, "initial-loss-scale": 2.0**28, "hysteresis": 1, "train-iters": 40}
    trainer = build(RunConfig.from_flags(flags), seam)
    stepper, skipped = Stepper(trainer), []
    with loader(trainer, trainer.datasets.train, 0) as batches:
        for step in range(40):
            before = [digest(parameter) for parameter, _ in trainer.parameters]
            outcome = stepper.train(batches, 4 * step)
            same = all(int(a) == int(digest(p)) for a, (p, _) in zip(before, trainer.parameters, strict=True))
            assert same == outcome.skipped and math.isfinite(outcome.loss)
            skipped.append(outcome.skipped)
    assert skipped[0] and not skipped[-1]
    assert trainer.scaler.scale == 2.0 ** (28 - sum(skipped))


KINDS = {
    "adamw": {},
    "adam": {"decoupled_weight_decay": False},
    "sgd": {"optimizer": "sgd"},
    "plain sgd": {"optimizer": "sgd", "sgd_momentum": 0.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_optimizer_equals_the_plain_one(kind: str) -> None:
    """Against the same arithmetic on a CPU in fp64, and cut in two without any difference."""
    config = OptimizerConfig(lr=1.0, weight_decay=0.1, **KINDS[kind])  # type: ignore[arg-type]
    record = ParameterRecord((4099,), "w")

    def run(pieces: list[Tensor]) -> Tensor:
        update = Update([(piece, record) for piece in pieces], config)
        for step in range(5):
            start = 0
            for piece in pieces:
                whole = numbers(4099, seed=10 + step).to(piece.device, piece.dtype)
                piece.grad = whole[start : start + piece.numel()].clone()
                start += piece.numel()
            update.step(1e-2 / (step + 1))
        return torch.cat(pieces)

    start = numbers(4099)
    got = run([start.clone()])
    torch.testing.assert_close(got.cpu().double(), run([start.cpu().double()]), rtol=1e-5, atol=1e-6)
    assert torch.equal(got, run([start[:1234].clone(), start[1234:].clone()]))


def test_the_update_is_few_kernels(seam: DeviceSeam) -> None:
    """Fused: the number of launches does not grow with that of the parameters (some 30 of them here)."""
    _, _, trainer = trained(seam, SMALL_GPT, 2)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        trainer.optimizer.step(1e-3)
        seam.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) < len(trainer.parameters)


def test_peak_memory_is_what_none_keeps_and_full_does_not(seam: DeviceSeam) -> None:
    """The allocator sees what the engine's own account says: none keeps more than full, by most of the difference."""
    deep = SMALL_GPT | {"num-layers": 12, "seq-length": 256, "max-position-embeddings": 256, "bf16": True}
    peaks, kept = {}, {}
    for name in ("none", "full"):
        trainer = build(RunConfig.from_flags(deep | RECOMPUTE[name]), seam)
        stepper = Stepper(trainer)
        stepper.count_bytes = True
        with loader(trainer, trainer.datasets.train, 0) as batches:
            stepper.train(batches, 0)
            seam.reset_peak()
            base = seam.allocated_bytes() or 0
            stepper.train(batches, 4)
        peaks[name], kept[name] = (seam.peak_bytes() or 0) - base, trainer.account.peak
        del trainer, stepper
    assert kept["none"] > 2 * kept["full"]
    assert peaks["none"] - peaks["full"] > 0.7 * (kept["none"] - kept["full"])


def test_evaluation_does_not_disturb_training(seam: DeviceSeam) -> None:
    trainer = build(RunConfig.from_flags(DROPOUT | {"bf16": True, "eval-iters": 1}), seam)
    plain, tensors, _ = trained(seam, DROPOUT | {"bf16": True}, 3)
    stepper, losses = Stepper(trainer), []
    assert trainer.datasets.valid is not None
    with loader(trainer, trainer.datasets.train, 0) as batches:
        for step in range(3):
            losses.append(stepper.train(batches, 4 * step).loss)
            with loader(trainer, trainer.datasets.valid, 0) as valid:
                stepper.evaluate(valid, 1)
    assert losses == plain
    got = [*trainer.buffer.gradients().values(), *(parameter.detach() for parameter, _ in trainer.parameters)]
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
