"""A plan from a file is run only if all of it is about this run; whatever else stands there is one clear message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megackpt.config.errors import UsageError
from megackpt.observe.stored_plan import read_plan
from megackpt.plan.decision import ChunkPlan, Group, Plan, SaveSet
from megackpt.plan.split import even_split

SPLIT = even_split(7, 2, 2)  # 0 to 1 and 4 to 5 on the first stage, 2 to 3 and 6 on the last


def plan() -> Plan:
    """Groups in groups, two slots on the first stage."""

    def chunk(stage: int, number: int, layers: range) -> ChunkPlan:
        ends = [] if (stage, number) not in ((0, 0), (1, 1)) else ["embedding" if stage == 0 else "head"]
        groups = (Group(layers[0], layers[-1], (Group(layers[0], layers[0]),)),) if len(layers) > 1 else ()
        return ChunkPlan({name: SaveSet() for name in [*ends, *(f"layers.{i}" for i in layers)]}, groups)

    rows = [[(chunk(s, c, layers),) for c, layers in enumerate(row)] for s, row in enumerate(SPLIT)]
    rows[0] = [slots * 2 for slots in rows[0]]
    return Plan.of_slots(rows, "by hand")


Edit = Callable[[dict[str, Any]], object]
FIRST = "stages", 0, 0, 0


def put(*path: Any) -> Edit:
    """Set the value at a path whose last word is the value."""
    *way, last, value = path

    def edit(document: dict[str, Any]) -> None:
        place: Any = document
        for step in way:
            place = place[step]
        place[last] = value

    return edit


NOT_A_PLAN = "not a plan of this version"
EDITS: list[tuple[Edit, str]] = [
    (put("version", 1), f"{NOT_A_PLAN} (plan version 1; this code reads version 2)"),
    (put("stages", None), f"{NOT_A_PLAN} (TypeError"),
    (put("stages", []), "is for 0 stages, this run has 2"),
    (put("stages", 0, 0, []), f"{NOT_A_PLAN} (a stage without a chunk, or a chunk without a slot)"),
    (lambda d: d["stages"].pop(), "is for 1 stages, this run has 2"),
    (lambda d: d["stages"][1].pop(), "stage 1 has 1 chunks there and 2 here"),
    (put("sets", 0, "default", "output", "kept"), f"{NOT_A_PLAN} (output='kept' is not one of keep, replay,"),
    (put("sets", 0, "decisions", "mlp.nope", {}), "embedding has no step named mlp.nope"),
    (put("sets", 0, "default", "output", "offload_disk"), "offload_disk is not a place that training can use"),
    (put(*FIRST, "save_sets", "layers.0", 7), f"{NOT_A_PLAN} (KeyError: 7)"),
    (put(*FIRST, "save_sets", "layers.0", -1), f"{NOT_A_PLAN} (KeyError: -1)"),
    (put(*FIRST, "save_sets", "layers.x", 0), "stage 0 has layers [0, 1, x] | [4, 5] there and [0, 1] | [4, 5] here"),
    (put(*FIRST, "save_sets", "layers.00", 0), "stage 0 has layers [0, 00, 1] | [4, 5] there and"),
    (put(*FIRST, "save_sets", "neck", 0), "no model has a part named 'neck'"),
    (put(*FIRST, "ahead", -1), f"{NOT_A_PLAN} (ahead=-1 is not a number of layers)"),
    (put(*FIRST, "ahead", "2"), f"{NOT_A_PLAN} (ahead='2' is not a number of layers)"),
    (put(*FIRST, "groups", [[0, 0, -1, True, "keep"]]), f"{NOT_A_PLAN} ([0, 0, -1, True, 'keep'] is not first, last,"),
    (put(*FIRST, "groups", [[0, 0, 10**9, True, "keep"]]), f"{NOT_A_PLAN} ([0, 0, 1000000000, True, 'keep'] is not"),
    (put(*FIRST, "groups", [[0, 0, 0, True, "drop"]]), f"{NOT_A_PLAN} (output='drop' of a group is not one of"),
    (put(*FIRST, "groups", [[0, 2, 0, True, "keep"]]), "stage 0, chunk 0: the group of layers 0 to 2 overlaps"),
    (
        put("stages", 0, 1, 1, "groups", [[4, 4, 0, True, "keep"], [4, 5, 0, True, "keep"]]),
        "stage 0, chunk 1: the group of layers 4 to 5 overlaps another, or leaves the chunk's layers 4 to 5",
    ),
    (
        put("stages", 0, 1, 0, "groups", [[4, 5, 0, False, "keep"], [4, 5, 1, True, "keep"]]),
        "stage 0, chunk 1: the group of layers 4 to 5 stands in one of the same layers",
    ),
    (
        put("stages", 0, 1, 0, "groups", [[4, 4, 0, True, "keep"]] * 100_000),
        "stage 0, chunk 1: the group of layers 4 to 4 overlaps another, or leaves the chunk's layers 4 to 5",
    ),
]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan().dumps())
    assert read_plan(str(tmp_path / "plan.json"), SPLIT) == plan()


@pytest.mark.parametrize(("edit", "message"), EDITS, ids=[f"{i}" for i in range(len(EDITS))])
def test_an_edited_plan_is_refused(edit: Edit, message: str, tmp_path: Path) -> None:
    document = json.loads(plan().dumps())
    edit(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError) as refused:
        read_plan(str(path), SPLIT)
    assert str(refused.value).startswith((f"--recompute-plan {path} {message}", f"--recompute-plan {path}: {message}"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 100_000, b"[1, 2]", b'"plan"', b"1" * 9999])
def test_what_is_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a plan of this version"):
        read_plan(str(path), SPLIT)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_plan(str(tmp_path), SPLIT)
