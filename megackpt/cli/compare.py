"""``megackpt compare A B``: two plans that ``megackpt plan --json`` wrote, or two event records, side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.config.parse import refuse
from megackpt.observe.plan_compare import comparison
from megackpt.plan.events import Record
from megackpt.plan.report import VERSION


def main(argv: Sequence[str]) -> int:
    """Prints the comparison; 0, or 2 (SystemExit) for a file that is no plan."""
    parser = argparse.ArgumentParser(
        prog="megackpt compare",
        description="Two plans written by megackpt plan --json, side by side: as given, or with --best as recommended."
        " Or two event records, of a run (--timeline) or of a plan (megackpt plan --timeline): which stage was busy,"
        " replayed, communicated and waited how long, as a table, a picture and a trace.",
    )
    parser.add_argument("a", metavar="A", help="plan document (.json) or folder of an event record")
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument("--best", action="store_true", help="of documents: compare the recommended plans")
    parser.add_argument("--html", metavar="FILE", help="of records: write the picture")
    parser.add_argument("--trace", metavar="FILE", help="of records: write a trace for Perfetto or chrome://tracing")
    own = parser.parse_args(list(argv))
    folders = [Path(path).is_dir() for path in (own.a, own.b)]
    try:
        if all(folders):
            _records(own)
            return 0
        if any(folders):
            raise UsageError(f"{own.a} and {own.b}: one is a folder, the other is not. Give two of a kind.")
        if own.html or own.trace:
            raise UsageError("--html and --trace are for two event records; megackpt plan has them for one plan.")
        plans = [_read(path, "best" if own.best else "given") for path in (own.a, own.b)]
    except UsageError as error:
        refuse(error, 0)
    print(comparison(own.a, plans[0], own.b, plans[1]), end="")
    return 0


def _records(own: argparse.Namespace) -> None:
    """Raises UsageError for folders that hold no record, and files that cannot be written."""
    from megackpt.observe.timeline_compare import comparison as table
    from megackpt.observe.timeline_compare import page, shown, trace

    found = []
    for path in (own.a, own.b):
        try:
            found.append(shown(Record.read(path)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not the folder of an event record: {error}.") from None
    a, b = found
    texts = {own.html: lambda: page(a, b), own.trace: lambda: json.dumps(trace(a, b))}
    for name, text in texts.items():
        if name:
            try:
                Path(name).write_text(text(), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"{name} cannot be written: {error.strerror or error}.") from None
    print(table(a, b), end="")


def _read(path: str, which: str) -> Mapping[str, Any]:
    """One plan of a document.  Raises UsageError when there is none."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(document, Mapping) or document.get("version") != VERSION or "given" not in document:
        raise UsageError(f"{path} is not a document of megackpt plan --json, version {VERSION}.")
    if document[which] is None:
        raise UsageError(f"{path} has no plan that fits: {document['why_nothing_fits']}.")
    budget = {"memory_budget_bytes": document["memory_budget_bytes"], "machine": document["machine"]["name"]}
    return {**document[which], **budget}
