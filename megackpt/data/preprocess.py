"""Text files to indexed datasets: what `tools/preprocess_data.py` does.

    inputs ── cut ──> part 0 │ part 1 │ … ── tokenised, several at once ──> datasets of parts ── joined ──> the dataset

The parts live in `<prefix>.preprocess/` until the dataset is complete. A run that was stopped, in whatever way, goes
on with the parts that are missing; the folder knows input and options, and parts made of others are thrown away. The
result does not depend on the number of parts or processes.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.data.cache import digest
from megackpt.data.merge import merge_datasets
from megackpt.data.preprocess_part import (
    Part,
    PreprocessOptions,
    PreprocessReport,
    cut_into_parts,
    output_prefix,
    read_part,
)
from megackpt.data.preprocess_pool import Progress, run_parts
from megackpt.data.tokenizer import build_tokenizer

_PART_BYTES = 1 << 28
_FORMAT = 1  # part of the key: raise it when the same input gives other parts

Say = Callable[[str], None]


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    prefix: str,
    options: PreprocessOptions,
    workers: int = 1,
    partitions: int = 1,
    say: Say = lambda line: None,
    interval_s: float = 2.0,
    part_bytes: int = _PART_BYTES,
) -> PreprocessReport:
    """Tokenise the documents of `inputs` into one indexed dataset per key, `<prefix>_<key>_document`.

    Documents keep their order. Empty and unreadable ones are left out and counted. `partitions` processes work at
    once, with `workers` tokenizing threads among them. `say` gets progress lines about every `interval_s` seconds.
    Raises UsageError for files or options that are wrong, and, leaving no files, if a key has no document at all.
    """
    paths = _paths(inputs)
    tokenizer = build_tokenizer(options.tokenizer)
    if options.append_eod:
        tokenizer.eod  # noqa: B018  refused before any work if there is none
    parts = cut_into_parts(paths, options, partitions, part_bytes)
    key = {
        "format": _FORMAT,
        "inputs": [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths],
        "tokenizer": tokenizer.digest,
        "options": {k: v for k, v in asdict(options).items() if k != "tokenizer"},
    }
    with _folder(Path(prefix + ".preprocess")) as folder:
        parts = _resume(folder, digest(key), parts, say)
        names = [str(folder / f"part-{number:05}") for number in range(len(parts))]
        found = [read_part(name) for name in names]
        missing = [number for number, report in enumerate(found) if report is None]
        progress = Progress(parts, found, say, interval_s)
        run_parts({n: (parts[n], names[n]) for n in missing}, options, tokenizer, workers, partitions, progress)
        report = PreprocessReport()
        for name in names:
            part = read_part(name)
            assert part is not None
            report.add(part)
        report.prefixes = {k: output_prefix(prefix, k) for k in options.keys}
        empty = _without_documents(report)
        if empty is None:
            for k in options.keys:
                _join([output_prefix(name, k) for name in names], report.prefixes[k])
        shutil.rmtree(folder)
    if empty is not None:
        raise UsageError(empty)
    return report


def _paths(inputs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Absolute paths; a name that is no file may be a pattern, as in Megatron."""
    paths: list[str] = []
    for given in (os.fspath(path) for path in inputs):
        found = [given] if os.path.exists(given) else sorted(glob.glob(given))
        if not found:
            raise UsageError(f"--input {given}: there is no such file")
        paths += map(os.path.abspath, found)
    return paths


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """The folder of parts, locked: two runs for one prefix would write the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder} is in use: another run writes to the same --output-prefix") from None
        yield folder


def _resume(folder: Path, key: str, parts: list[Part], say: Say) -> list[Part]:
    """The parts to work on: those of the run before, if it had the same input and options."""
    job = folder / "job.json"
    try:
        before: dict[str, Any] = json.loads(job.read_text(encoding="utf-8"))
        if before["key"] == key:
            parts = [Part(**part) for part in before["parts"]]
            done = sum(read_part(str(folder / f"part-{n:05}")) is not None for n in range(len(parts)))
            for stale in folder.glob("*.partial-*"):
                stale.unlink()
            say(f"going on: {done} of {len(parts)} parts are there, in {folder}")
            return parts
        say(f"{folder} is of another input or other options: starting afresh")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError):
        say(f"{job} cannot be read: starting afresh")
    for old in folder.iterdir():
        if old.name != "lock":
            old.unlink()
    partial = folder / "job.json.partial"
    partial.write_text(json.dumps({"key": key, "parts": [asdict(part) for part in parts]}), encoding="utf-8")
    os.replace(partial, job)
    return parts


def _without_documents(report: PreprocessReport) -> str | None:
    for key, documents in report.documents.items():
        if documents == 0:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(report.odd.items())) or "no lines"
            return f"no document with text under the key {key!r} in the input ({reasons})"
    return None


def _join(parts: Sequence[str], prefix: str) -> None:
    """The datasets of the parts as one: a lone one is moved, several are copied one after another."""
    if len(parts) == 1:
        Path(prefix + ".idx").unlink(missing_ok=True)  # an old index must never be seen beside new tokens
        for suffix in (".bin", ".idx"):
            os.replace(parts[0] + suffix, prefix + suffix)
        return
    merge_datasets(parts, prefix)
