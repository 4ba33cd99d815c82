"""What recomputation costs and saves: ours against torch's, everything in one run.

    python tools/bench_recompute.py                      all parts, about five minutes on a quiet machine
    python tools/bench_recompute.py --parts host         host time added per replayed step and layer
    python tools/bench_recompute.py --parts none         what a tape costs that does nothing
    python tools/bench_recompute.py --json bench.json    the settings and every single run
    python tools/bench_recompute.py --quick              tiny shapes, one round: does it run at all

Parts: `host` (tiny tensors), `none` (a tape that does nothing), `stack` (a small GPT stack under every policy, one
thread), `tp` (two processes, against DTensor).  Needs no GPU; torch_remat is compared where it is installed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from tools import bench_recompute_host as host  # noqa: E402
from tools import bench_recompute_none as none  # noqa: E402
from tools import bench_recompute_stack as stack  # noqa: E402
from tools import bench_recompute_tp as tp  # noqa: E402
from tools.bench_common import machine, table, write_json  # noqa: E402
from tools.bench_plain import Model  # noqa: E402
from tools.bench_regions import absent  # noqa: E402

PARTS = ("host", "none", "stack", "tp")
ATTENTIONS = ("unfused", "fused")


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...] = PARTS
    effort: host.Effort = field(default_factory=host.Effort)
    model: Model = field(default_factory=partial(Model, layers=4, hidden=256, heads=8, seq=256, vocab=16))
    none_pairs: int = 24
    attentions: tuple[str, ...] = ATTENTIONS
    micro_batch: int = 2
    rounds: int = 9
    tp_job: tp.Job = field(default_factory=tp.Job)


QUICK = {
    "effort": host.Effort(rounds=1, repeats=1),
    "model": Model(layers=2, hidden=32, heads=2, seq=16, vocab=16),
    "none_pairs": 2,
    "rounds": 1,
    "tp_job": tp.Job(Model(layers=2, hidden=32, heads=2, seq=16, vocab=16), rounds=1),
}


@contextmanager
def old_objects_aside() -> Iterator[None]:
    """Collections between runs need not look at all that was imported."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def host_part(settings: Settings) -> dict[str, Any]:
    found = {}
    for subject in (host.steps_subject(), *host.layer_subjects(host.TINY)):
        found[subject.name] = measured = host.measure(subject, settings.effort)
        print(
            f"\nhost time added per replayed {subject.name}, us of processor time; without recompute "
            f"{measured['none_us']:.0f} forward and backward, {measured['forward_us']:.0f} forward"
        )
        header = ("way", "random state", "added", "engine", "added / torch's non-reentrant")
        print(table(header, host.rows_of(measured)), flush=True)
    return found


def none_part(settings: Settings) -> dict[str, Any]:
    job = none.Job(replace(settings.model, layers=1), settings.micro_batch, settings.none_pairs)
    measured = none.measure(job)
    m = job.model
    shape = f"one layer, hidden {m.hidden}, sequence {m.seq}, micro-batch {job.micro_batch}"
    print(f"\na tape that does nothing: {shape}, one thread; processor time")
    print(table(none.HEADER, none.rows_of(measured)), flush=True)
    return {"job": asdict(job), "measured": measured}


def stack_part(settings: Settings) -> dict[str, Any]:
    found = {}
    made = stack.jobs(settings.model, settings.attentions, settings.micro_batch, settings.rounds)
    for kind, job in made.items():
        measured = stack.measure(job)
        print(f"\n{stack.words(job)}, one thread")
        print(table(stack.HEADER, stack.rows_of(measured)), flush=True)
        found[kind] = {"job": asdict(job), "measured": stack.to_json(measured)}
    return found


def tp_part(settings: Settings) -> dict[str, Any]:
    job = settings.tp_job
    measured = tp.measure(job)
    m = job.model
    print(
        f"\ntensor parallel {tp.T} with sequence parallel, gloo: {m.layers} layers, hidden {m.hidden}, "
        f"{m.heads} heads, sequence {m.seq}, micro-batch {job.micro_batch}; of rank 0"
    )
    print(table(tp.HEADER, tp.rows_of(measured)), flush=True)
    return {"job": asdict(job), "measured": measured}


RUN = {"host": host_part, "none": none_part, "stack": stack_part, "tp": tp_part}


def parse(arguments: Sequence[str] | None) -> tuple[Settings, str | None]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS), help="of the stack")
    parser.add_argument("--rounds", type=int, help=f"of the stack and the two processes (default {Settings.rounds})")
    parser.add_argument("--host-rounds", type=int, help=f"of the host times (default {host.Effort.rounds})")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one round")
    parser.add_argument("--json", metavar="FILE", help="write settings, machine and every run there")
    a = parser.parse_args(arguments)
    chosen: dict[str, Any] = {"parts": tuple(a.parts), "attentions": tuple(a.attention)}
    if a.quick:
        chosen |= QUICK
    if a.rounds is not None:
        chosen |= {"rounds": a.rounds, "tp_job": replace(chosen.get("tp_job", tp.Job()), rounds=a.rounds)}
    if a.host_rounds is not None:
        chosen["effort"] = replace(chosen.get("effort", host.Effort()), rounds=a.host_rounds)
    return Settings(**chosen), a.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, path = parse(arguments)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{machine()}, load {load:.1f}; absent: {', '.join(absent()) or 'nothing'}")
    with old_objects_aside():
        found = {part: RUN[part](settings) for part in settings.parts}
    if path is not None:
        loads = {"load_before": load, "load_after": os.getloadavg()[0]}
        data = {"settings": asdict(settings), "machine": machine() | loads, "absent": absent(), **found}
        write_json(path, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
