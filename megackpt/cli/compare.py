"""``megackpt compare A.json B.json``: two plans that ``megackpt plan --json`` wrote, side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.config.parse import refuse
from megackpt.observe.plan_compare import comparison
from megackpt.plan.report import VERSION


def main(argv: Sequence[str]) -> int:
    """Prints the comparison; 0, or 2 (SystemExit) for a file that is no plan."""
    parser = argparse.ArgumentParser(
        prog="megackpt compare",
        description="Two plans written by megackpt plan --json, side by side: as given, or with --best as recommended.",
    )
    parser.add_argument("a", metavar="A.json")
    parser.add_argument("b", metavar="B.json")
    parser.add_argument("--best", action="store_true", help="compare the recommended plans")
    own = parser.parse_args(list(argv))
    try:
        plans = [_read(path, "best" if own.best else "given") for path in (own.a, own.b)]
    except UsageError as error:
        refuse(error, 0)
    print(comparison(own.a, plans[0], own.b, plans[1]), end="")
    return 0


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
