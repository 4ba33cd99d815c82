"""The step table: every named, replayable piece of a layer's forward, as data.

::

    x ─┬─ norm ─ gather ─ qkv ─ (qknorm) ─ (rope) ─ core ─ proj ─ reduce ─┐
       └──────────────────────────────────────────────────────────── residual ─▶ boundary
    x ─┬─ norm ─ gather ─ up ─ act ─ down ─ reduce ─┐
       └────────────────────────────────────── residual ─▶ boundary (input of the next layer)

``gather`` exists only under sequence parallelism, ``reduce`` only when t > 1, ``qknorm`` and ``rope`` only where the
model has them.  A boundary came out of a tensor-parallel reduction: keeping it means no reduction is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One row: its name, the steps whose outputs it reads (``input`` = the layer's), and its kind."""

    name: str
    reads: tuple[str, ...]
    product: bool = False  # a matrix product with a weight, or the attention core
    collective: str | None = None  # forward collective over tp
    boundary: bool = False
    saves_input: bool = False  # its backward needs what it read
    has_internals: bool = False  # ... or what it computed on the way


EMBED = (
    Step("embed.lookup", ("input",), collective="reduce", saves_input=True),
    Step("embed.dropout", ("embed.lookup",), boundary=True),
)

BLOCK = (
    Step("attn.norm", ("input",), saves_input=True, has_internals=True),
    Step("attn.gather", ("attn.norm",), collective="all_gather"),
    Step("attn.qkv", ("attn.gather",), product=True, saves_input=True),
    Step("attn.qknorm", ("attn.qkv",), saves_input=True, has_internals=True),
    Step("attn.rope", ("attn.qknorm",)),
    Step("attn.core", ("attn.rope",), product=True, saves_input=True, has_internals=True),
    Step("attn.proj", ("attn.core",), product=True, saves_input=True),
    Step("attn.reduce", ("attn.proj",), collective="reduce"),
    Step("attn.residual", ("input", "attn.reduce"), boundary=True),
    Step("mlp.norm", ("attn.residual",), saves_input=True, has_internals=True),
    Step("mlp.gather", ("mlp.norm",), collective="all_gather"),
    Step("mlp.up", ("mlp.gather",), product=True, saves_input=True),
    Step("mlp.act", ("mlp.up",), saves_input=True),
    Step("mlp.down", ("mlp.act",), product=True, saves_input=True),
    Step("mlp.reduce", ("mlp.down",), collective="reduce"),
    Step("mlp.residual", ("attn.residual", "mlp.reduce"), boundary=True),
)

HEAD = (
    Step("head.norm", ("input",), saves_input=True, has_internals=True),
    Step("head.gather", ("head.norm",), collective="all_gather"),
    Step("head.logits", ("head.gather",), product=True, saves_input=True),
    Step("head.loss", ("head.logits",), has_internals=True),
)

# With a loss chunk, logits and loss of a part of the sequence are one step: only one part's logits exist at a time.
HEAD_CHUNK = Step("head.chunk", ("head.gather",), product=True, saves_input=True, has_internals=True)

# Products whose weight gradient can wait.  The head's cannot: the gradient of the logits is too large to keep.
DEFERRED = tuple(s.name for s in BLOCK if s.product and s.name != "attn.core")

BLOCK_NAMES = tuple(s.name for s in BLOCK)
NORMS = tuple(s.name for s in BLOCK if s.name.endswith(".norm"))
GATHERS = tuple(s.name for s in (*BLOCK, *HEAD) if s.collective == "all_gather")

# The steps that only feed the boundary at the end of their half of a layer.
CONSUMERS = {"attn": ("attn.proj", "attn.reduce"), "mlp": ("mlp.down", "mlp.reduce")}

# Megatron's names for what selective recompute drops, as steps of ours.
MODULES = {
    "core_attn": ("attn.core",),
    "layernorm": ("attn.norm", "mlp.norm"),
    "mlp": ("mlp.gather", "mlp.up", "mlp.act"),
}


def whole_outputs(sequence_parallel: bool) -> frozenset[str]:
    """Steps whose output every tensor-parallel rank holds whole and equal, so that each may keep a part of it."""
    if sequence_parallel:
        return frozenset(GATHERS)
    reduced = {s.name for s in (*EMBED, *BLOCK) if s.collective == "reduce"}
    return frozenset({s.name for s in (*EMBED, *BLOCK) if s.boundary} | reduced | {*NORMS, "head.norm"})
