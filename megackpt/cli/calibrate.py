"""``megackpt calibrate``: measures this machine and writes a file that ``megackpt plan --machine FILE`` takes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megackpt.config.errors import UsageError
from megackpt.config.parse import refuse

MOST_RANKS = 64


def main(argv: Sequence[str]) -> int:
    """0 when the file is written; 2 (SystemExit) for what cannot be measured or written."""
    own = read_own(argv)
    try:
        _check_writable(own.out)
        _calibrate(own)
    except UsageError as error:
        refuse(error, 0)
    return 0


def read_own(argv: Sequence[str]) -> argparse.Namespace:
    """This command's flags."""
    parser = argparse.ArgumentParser(
        prog="megackpt calibrate",
        allow_abbrev=False,
        description="Measures products, memory, copies, collectives and shared cores of this machine in under a minute,"
        " and writes what it found for megackpt plan --machine FILE.",
    )
    parser.add_argument("--out", default="machine.json", metavar="FILE", help="file to write (default %(default)s)")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks that measure together (default: 2, or all GPUs)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: CUDA if there is any)")
    parser.add_argument("--name", help="name of the machine in the file (default: calibrated and the device)")
    own = parser.parse_args(list(argv))
    if own.nproc is not None and not 1 <= own.nproc <= MOST_RANKS:
        parser.error(f"--nproc must be 1 to {MOST_RANKS}; got {own.nproc}")
    if not own.out.endswith(".json"):
        parser.error(f"--out {own.out}: megackpt plan takes a machine from a .json file; name it {own.out}.json")
    return own


def _check_writable(name: str) -> None:
    """Before a minute is spent on measuring."""
    folder = Path(name).resolve().parent
    if not folder.is_dir():
        raise UsageError(f"--out {name}: there is no folder {folder}.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out {name}: {folder} cannot be written to.")


def _calibrate(own: argparse.Namespace) -> None:
    import torch

    from megackpt.observe.calibrate import Figure, calibrate
    from megackpt.train.calibrated import with_training

    devices = torch.cuda.device_count()
    device = own.device or ("cuda" if devices else "cpu")
    if device == "cuda" and not devices:
        raise UsageError("--device cuda: there is no CUDA device here. Nearest valid: --device cpu.")
    nproc = own.nproc or (devices if device == "cuda" else 2)
    if device == "cuda" and nproc > devices:
        raise UsageError(f"--nproc {nproc}: this machine has {devices} CUDA devices. Nearest valid: --nproc {devices}.")

    def tell(figure: Figure) -> None:
        print(f"{figure.name:<28}{figure.value:>24}   {figure.how}", flush=True)

    start = time.perf_counter()
    print(f"measuring {device} with {nproc} ranks ...", file=sys.stderr, flush=True)
    try:
        machine = calibrate(device, nproc, tell)
        if device == "cpu":
            machine = with_training(machine, nproc, tell)
    except RuntimeError as error:
        raise UsageError(f"this machine could not be measured: {error}.") from error
    data = machine.to_json() | ({"name": own.name} if own.name else {})
    try:
        Path(own.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{own.out} cannot be written: {error.strerror or error}.") from None
    print(f"written to {own.out} in {time.perf_counter() - start:.0f} s: megackpt plan --machine {own.out} ...")
