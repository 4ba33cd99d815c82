"""Draw docs/policies.svg: for each recompute policy, what a layer keeps and what its backward rebuilds.

The picture is derived, not drawn by hand: from the step table (`megackpt/plan/steps.py`) and the decisions of each
policy (`megackpt/plan/policies.py`), by what backward then asks for (`megackpt/plan/demand.py`).

    python tools/draw_policies.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.observe.svg import INK, QUIET, Canvas  # noqa: E402
from megackpt.plan.decision import SaveSet  # noqa: E402
from megackpt.plan.demand import present_steps, replayed_steps  # noqa: E402
from megackpt.plan.flops import PRODUCT_OF_STEP, ModelShape, replay_share  # noqa: E402
from megackpt.plan.policies import free_tier, full_layer, keep_everything, selective  # noqa: E402
from megackpt.plan.steps import BLOCK, Step  # noqa: E402

OUTPUT = ROOT / "docs" / "policies.svg"
GPT3 = ModelShape.gpt(layers=1, hidden=12288, heads=96, padded_vocab=51200, seq=2048)

# A GPT layer has neither; what reads them reads what they read.
ABSENT = ("attn.qknorm", "attn.rope")
# Bytes of each step's output over s·b·h/t in 16 bits; gathers, whose output is not divided by t, are always dropped.
BYTES = {"input": 2, "attn.norm": 2, "attn.qkv": 6, "attn.core": 2, "attn.residual": 2, "mlp.norm": 2, "mlp.up": 8,
         "mlp.act": 8}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One policy: outputs that stay in memory (`input` is the layer's) and steps that run again in backward."""

    name: str
    note: str
    kept: frozenset[str]
    rebuilt: frozenset[str]

    @property
    def kept_bytes(self) -> int:
        """Over s·b·h/t, fused attention, dropout masks and norm statistics aside."""
        return sum(BYTES.get(name, 0) for name in self.kept)

    @property
    def share(self) -> float:
        """Replayed FLOPs over the layer's own, at GPT-3 175B's shape with 2,048 tokens."""
        return replay_share(GPT3, [[step for step in self.rebuilt if step in PRODUCT_OF_STEP]])


def layer_steps() -> tuple[Step, ...]:
    return present_steps(BLOCK, ABSENT)


def row(name: str, note: str, save_set: SaveSet) -> Row:
    """What is rebuilt, and of the rest what backward or a rebuilt step reads."""
    rebuilt = frozenset(replayed_steps(save_set, ABSENT))
    read = {each for step in layer_steps() if step.saves_input or step.name in rebuilt for each in step.reads}
    return Row(name, note, frozenset(read) - rebuilt, rebuilt)


def rows() -> tuple[Row, ...]:
    every = frozenset(step.name for step in layer_steps())
    return (
        row("none", "norm outputs stay as shards", keep_everything()),
        row("free", "what costs next to nothing", free_tier()),
        row("selective", "core attention; for the unfused core", selective()),
        row("full", "both boundaries stay", full_layer()),
        row("full, layer input only", "--recompute-keep layer-input", full_layer("layer-input")),
        Row("torch.utils.checkpoint", "around the layer, with dropout", frozenset({"input"}), every),
    )


KEPT, REBUILT, GATHER, IDLE = "#2f6fb3", "#e08a2e", "#f3cf9f", "#eceff3"
LEFT, TOP, CELL, HEIGHT, GAP = 250, 150, 44, 40, 10
SHARE_X = 120


def draw(table: Sequence[Row]) -> str:
    steps = layer_steps()
    right = LEFT + CELL * (len(steps) + 1) + 20
    bottom = TOP + len(table) * (HEIGHT + GAP)
    canvas = Canvas(right + 230, bottom + 60, "What a layer keeps and what its backward runs again")
    canvas.text(24, 32, "What one transformer layer keeps, and what its backward runs again", 17, weight="bold")
    legend = ((KEPT, "output kept"), (REBUILT, "rebuilt in backward"), (GATHER, "gathered again"),
              (IDLE, "neither: nothing needs it"))  # fmt: skip
    x = 24.0
    for colour, label in legend:
        canvas.rect(x, 46, 14, 14, colour)
        canvas.text(x + 20, 58, label, 12, fill=QUIET)
        x += 42 + 7.0 * len(label)
    for place, name in enumerate(["input", *(step.name for step in steps)]):
        canvas.text(LEFT + CELL * place + CELL / 2 + 4, TOP - 8, name, 11.5, fill=QUIET, turned=True)
    canvas.text(right, TOP - 26, "kept", 12, fill=QUIET)
    canvas.text(right, TOP - 10, "bytes / (sbh/t)", 12, fill=QUIET)
    canvas.text(right + SHARE_X, TOP - 26, "run again", 12, fill=QUIET)
    canvas.text(right + SHARE_X, TOP - 10, "of step FLOPs", 12, fill=QUIET)
    for place, entry in enumerate(table):
        _draw_row(canvas, entry, steps, TOP + place * (HEIGHT + GAP), right)
    canvas.text(24, canvas.height - 22, FOOTNOTE, 11.5, fill=QUIET)
    return canvas.document()


FOOTNOTE = (
    "Bytes: 16-bit activations, sequence parallel, fused attention, without masks and statistics. "
    "FLOPs: GPT-3 175B, 2,048 tokens; share of the layer's forward and backward."
)


def _draw_row(canvas: Canvas, entry: Row, steps: Sequence[Step], y: float, right: float) -> None:
    canvas.text(24, y + 17, entry.name, 14, weight="bold")
    canvas.text(24, y + 33, entry.note, 10.5, fill=QUIET)
    cells: Mapping[str, Step | None] = {"input": None, **{step.name: step for step in steps}}
    for place, (name, step) in enumerate(cells.items()):
        colour = KEPT if name in entry.kept else IDLE
        if name in entry.rebuilt:
            colour = GATHER if step is not None and step.collective == "all_gather" else REBUILT
        canvas.rect(LEFT + CELL * place, y, CELL - 4, HEIGHT, colour, tip=name)
    canvas.text(right, y + 26, str(entry.kept_bytes), 15, weight="bold", fill=INK)
    canvas.text(right + SHARE_X, y + 26, f"{100 * entry.share:.1f} %", 15, weight="bold", fill=INK)


if __name__ == "__main__":
    OUTPUT.write_text(draw(rows()), encoding="utf-8")
    print(OUTPUT.relative_to(ROOT))
