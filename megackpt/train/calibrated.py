"""The machine as training meets it: what our layers, steps and ranks take here, measured by training small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from megackpt.config.run import RunConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.mesh.rendezvous import init_process_group, shutdown
from megackpt.observe.calibrate import HOW, Figure
from megackpt.observe.calibrate_ranks import CROWD
from megackpt.plan.accelerators import Machine
from megackpt.plan.paces import Company
from megackpt.train.build import Trainer, build
from megackpt.train.host_times import measure_overheads
from megackpt.train.layer_times import SIZES, Flags, flags_of, measure_kernels
from megackpt.train.rank_times import measure_company

MOST_RANKS = 8  # that train together
SAID = "work, a message at each end and on its way, a collective"


def with_training(machine: Machine, nproc: int, tell: Callable[[Figure], None]) -> Machine:
    """The machine with what training takes on a core of this host, and beside others up to a crowd of `nproc` and as
    many more.  RuntimeError if ranks fail."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seam = DeviceSeam("cpu", torch.device("cpu"), "gloo")
    alone = not dist.is_initialized()

    def built(flags: Flags) -> Trainer:
        return build(RunConfig.from_flags(flags, 1), seam)

    if alone:
        init_process_group(RunConfig.from_flags(flags_of(SIZES[0], {}), 1).parallel, LaunchEnvironment.detect({}), seam)
    try:
        kernels, host = measure_kernels(built), measure_overheads(built)
    finally:
        if alone:
            shutdown()
        torch.set_num_threads(threads)
    product = kernels["product"].forward
    tell(Figure("kernels", f"{len(kernels)} kinds", HOW["kernels"]))
    tell(Figure("products in layers", f"{1e-9 / product.flop_s:.0f} GFLOP/s, {1e6 * product.op_s:.1f} us", "fp32"))
    tell(Figure("an action", f"{1e6 * host.action_s:.0f} us", "forward or backward of a micro-batch less its layers"))
    tell(Figure("a replay", f"{1e6 * host.span_s:.0f} us", "of neighbouring steps, less the steps themselves"))
    ends = f"{1e3 * host.step_s:.1f} ms, {1e9 * host.parameter_s:.1f} ns a parameter"
    tell(Figure("end of a step", ends, "gradients zeroed, measured, clipped; weights updated"))
    host = replace(host, message_byte_s=machine.overheads.message_byte_s)
    machine = replace(machine, kernels=kernels, overheads=host)
    companies = [measure_company(machine, world) for world in worlds(nproc)]
    for company in companies:
        tell(Figure(f"{company.ranks} ranks in steps", words(company), SAID))
    return replace(machine, companies=tuple(companies))


def worlds(nproc: int) -> list[int]:
    """Ranks that train together: two, and a crowd; with one, none."""
    return sorted({2, min(MOST_RANKS, CROWD * nproc)}) if nproc > 1 else []


def words(company: Company) -> str:
    """``x1.08, 120 + 170 us, 1.3 ms``"""
    message = f"{1e6 * company.message_s:.0f} + {1e6 * company.message_latency_s:.0f} us"
    return f"x{company.slowdown:.2f}, {message}, {1e3 * company.collective_s:.1f} ms"
