"""Closed forms of every step, as our kernels are written.

``w`` bytes of an activation, ``wide`` of statistics and losses.  The workspaces follow the code line by line: what a
step holds besides what it returns and saves.  Scratch memory inside one kernel is counted where a kernel is known to
need a buffer of the size of an activation (fused attention's backward on a GPU), else not.
"""

from __future__ import annotations

from typing import Any

from megackpt.plan.numbers import Layout, ModelNumbers, Widths

Row = dict[str, Any]


def of(kind: str, model: ModelNumbers, layout: Layout, widths: Widths) -> dict[str, Row]:
    """Fields of ``StepCost`` by step name, for one layer class."""
    makers = {"embedding": _embedding, "block": _block, "head": _head}
    return makers[kind](model, layout, widths)


def core_kernel(model: ModelNumbers, layout: Layout) -> str:
    """``fused``, ``unfused``, or ``math``: what a CPU takes where its fused kernel has no dropout."""
    if not model.fused_attention:
        return "unfused"
    return "math" if layout.device == "cpu" and model.attention_dropout else "fused"


# -- pieces ------------------------------------------------------------------------------------------------------


def _norm(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    size, weights = x.shard * x.hidden * x.act, x.hidden * x.act
    converted = 0 if x.act == x.wide else x.shard * x.hidden * x.wide
    if model.norm == "RMSNorm":  # x in the wide type, its product with the statistic; see model/norm.py
        return {
            "output_bytes": size,
            "internal_bytes": x.wide * x.shard,
            "workspace_bytes": 2 * converted,
            "backward_workspace_bytes": 4 * converted if converted else 3 * size,
            "bytes_moved": 2 * size,
        }
    # the CPU's kernel stores mean and 1/deviation in the activation's type, the GPU's in the wide one
    statistic = x.act if layout.device == "cpu" else x.wide
    return {
        "output_bytes": size,
        "internal_bytes": 2 * statistic * x.shard,
        "backward_workspace_bytes": size + 2 * weights,
        "bytes_moved": 2 * size,
    }


def _gather(x: Widths) -> Row:
    whole = x.rows * x.hidden * x.act
    return {
        "output_bytes": whole,
        "collective": "all_gather",
        "backward_collective": "reduce_scatter",
        "collective_bytes": whole,
        "backward_workspace_bytes": x.shard * x.hidden * x.act,
        "bytes_moved": whole,
    }


def _reduce(layout: Layout, x: Widths) -> Row:
    whole = x.rows * x.hidden * x.act
    if not layout.sequence_parallel:
        return {
            "output_bytes": whole,
            "collective": "all_reduce",
            "collective_bytes": whole,
            "passes_gradient": True,
            "bytes_moved": whole,
        }
    return {
        "output_bytes": x.shard * x.hidden * x.act,
        "collective": "reduce_scatter",
        "backward_collective": "all_gather",
        "collective_bytes": whole,
        "backward_workspace_bytes": whole,
        "bytes_moved": whole,
    }


def _product(
    layout: Layout, x: Widths, inputs: int, outputs: int, *, column: bool, strided: bool = False
) -> Row:
    """[rows, inputs] @ [inputs, outputs].  A 16-bit weight gradient exists for a moment before it is added to the wide
    buffer; a strided input is copied for a kernel that wants rows."""
    w = x.act
    copy = x.rows * inputs * w if strided else 0
    weight_gradient = inputs * outputs * w if x.act != x.wide else 0
    flops = 2 * x.rows * inputs * outputs
    row: Row = {
        "output_bytes": x.rows * outputs * w,
        "workspace_bytes": copy,
        "backward_workspace_bytes": x.rows * inputs * w + copy + weight_gradient,
        "flops": flops,
        "backward_flops": 2 * flops,
        "bytes_moved": (x.rows * (inputs + outputs) + inputs * outputs) * w,
    }
    if column and layout.t > 1 and not layout.sequence_parallel:
        row |= {"backward_collective": "all_reduce", "collective_bytes": x.rows * inputs * w}
    return row


def _qkv(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    row = _product(layout, x, x.hidden, x.packed, column=True)
    if model.positions != "rope":  # the same step lays queries, keys and values side by side
        row["workspace_bytes"] = row["output_bytes"]
    return row


def _rope(model: ModelNumbers, x: Widths) -> Row:
    """Half the rotated channels of the queries at a time: three products, two conversions where needed."""
    size = x.rows * x.packed * x.act
    half = x.rows * x.queries * model.rotated // model.head_size // 2
    temporary = half * x.wide * (5 if x.act != x.wide else 3)
    return {
        "output_bytes": size,
        "workspace_bytes": temporary,
        "backward_workspace_bytes": size + temporary + model.seq * model.rotated // 2 * x.wide,
        "bytes_moved": 2 * size,
    }


def _residual(model: ModelNumbers, x: Widths) -> Row:
    count, w = x.shard * x.hidden, x.act
    dropout = model.hidden_dropout > 0
    return {
        "output_bytes": count * w,
        "mask_bytes": count if dropout else 0,
        "workspace_bytes": count * w * (model.biases + dropout),
        "backward_workspace_bytes": max(count * w + count, 3 * count) if dropout else 0,
        "passes_gradient": not dropout,
        "bytes_moved": (3 + 2 * model.biases + 2 * dropout) * count * w,
    }


def _activation(model: ModelNumbers, x: Widths) -> Row:
    inner, wide = x.rows * x.ffn * x.act, x.rows * x.up * x.act
    return {
        "output_bytes": inner,
        "backward_workspace_bytes": wide + 3 * inner if model.gated else wide,
        "bytes_moved": inner + wide,
    }


# -- attention core ----------------------------------------------------------------------------------------------


def _core(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    flops = 4 * x.rows * model.seq * x.queries
    row = {"unfused": _unfused, "fused": _fused, "math": _math}[core_kernel(model, layout)](model, layout, x)
    if core_kernel(model, layout) == "fused":  # skips the masked half; its backward rebuilds the scores
        return row | {"flops": flops // 2, "backward_flops": flops * 5 // 4}
    return row | {"flops": flops, "backward_flops": 2 * flops}


def _fused(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    out, flat = x.rows * x.queries * x.act, x.rows * x.packed * x.act
    backward = 2 * flat  # three gradients, then side by side
    if layout.device == "cuda":  # the kernel's own: queries' gradient in fp32, one number per row
        backward = max(backward, flat + 4 * x.rows * x.queries + 4 * x.log_sum)
    return {
        "output_bytes": out,
        "internal_bytes": x.wide * x.log_sum + out,
        "output_is_internal": True,
        "backward_workspace_bytes": backward,
        "bytes_moved": flat + out,
    }


def _math(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    """Plain products in the wide type; saves scaled queries and keys, values, softmax, noise, dropped softmax."""
    scores, out = x.scores * x.wide, x.rows * x.queries * x.wide
    whole = layout.micro_batch == 1 and x.act == x.wide and model.kv_heads == model.heads  # values need no copy
    return {
        "output_bytes": x.rows * x.queries * x.act,
        "internal_bytes": 3 * scores + (2 if whole else 3) * out,
        "saves_input": whole,
        "workspace_bytes": scores + out,
        "backward_workspace_bytes": 2 * scores + 2 * out,
        "bytes_moved": 6 * scores,
    }


def _unfused(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    """See model/core.py.  The scores in the wide type live as long as the forward's function runs."""
    count, w = x.scores, x.act
    out, flat = x.rows * x.queries * w, x.rows * x.packed * w
    keys = (flat - out) // 2
    grouped = out if model.kv_heads != model.heads else 0  # queries of a group stacked: a copy
    masked = (model.seq // layout.c) * model.seq
    dropout = model.attention_dropout > 0
    narrowed = model.softmax_fp32 and w != x.wide
    kept_scores = count * (x.wide if narrowed else w)
    weights = count * w
    # scores, their softmax and its narrowed copy at once; or scores, weights, dropped and the mask's random words
    at_softmax = kept_scores + masked + (count * x.wide + weights if narrowed else weights)
    at_end = kept_scores + masked + weights + (weights + count if dropout else 0) + 2 * out + keys
    saved = weights * (2 if dropout else 1)
    row: Row = {
        "output_bytes": out,
        "internal_bytes": saved,
        "mask_bytes": count if dropout else 0,
        "workspace_bytes": grouped + max(at_softmax, at_end) - out - saved - (count if dropout else 0),
        "bytes_moved": count * (4 * w + 2 * x.wide),
    }
    # gradients of the output (by group), the input, the weights and then the scores
    row["backward_workspace_bytes"] = grouped * 2 + flat + 2 * weights + max(keys, 0) + (count if dropout else 0)
    return row


# -- layer classes -----------------------------------------------------------------------------------------------


def _block(model: ModelNumbers, layout: Layout, x: Widths) -> dict[str, Row]:
    strided = core_kernel(model, layout) == "fused" and layout.device == "cpu" and layout.micro_batch > 1
    return {
        "attn.norm": _norm(model, layout, x),
        "attn.gather": _gather(x),
        "attn.qkv": _qkv(model, layout, x),
        "attn.rope": _rope(model, x),
        "attn.core": _core(model, layout, x),
        "attn.proj": _product(layout, x, x.queries, x.hidden, column=False, strided=strided),
        "attn.reduce": _reduce(layout, x),
        "attn.residual": _residual(model, x),
        "mlp.norm": _norm(model, layout, x),
        "mlp.gather": _gather(x),
        "mlp.up": _product(layout, x, x.hidden, x.up, column=True),
        "mlp.act": _activation(model, x),
        "mlp.down": _product(layout, x, x.ffn, x.hidden, column=False),
        "mlp.reduce": _reduce(layout, x),
        "mlp.residual": _residual(model, x),
    }


def _embedding(model: ModelNumbers, layout: Layout, x: Widths) -> dict[str, Row]:
    count, w = x.shard * x.hidden, x.act
    whole, table = x.rows * x.hidden * w, x.vocab * x.hidden * w
    learned = model.positions == "learned_absolute"
    position_table = model.max_positions * x.hidden * w if learned else 0
    reduced = {1: None}.get(layout.t, "reduce_scatter" if layout.sequence_parallel else "all_reduce")
    partial = whole if layout.t > 1 or learned else 0  # alive beside the sum that is returned
    summed = count * w if layout.t > 1 and learned else 0
    masked = whole if layout.t > 1 else 0
    gathered = whole if layout.sequence_parallel else 0
    return {
        "embed.lookup": {
            "output_bytes": count * w,
            "held_bytes": 8 * x.rows,
            "saves_input": False,
            "workspace_bytes": partial + summed,
            "backward_workspace_bytes": max(gathered + masked + table, 2 * position_table),
            "collective": reduced,
            "backward_collective": "all_gather" if reduced == "reduce_scatter" else None,
            "collective_bytes": whole if reduced else 0,
            "bytes_moved": 2 * whole,
        },
        "embed.dropout": {
            "output_bytes": count * w,
            "mask_bytes": count,
            "backward_workspace_bytes": max(count * w + count, 3 * count),
            "bytes_moved": 2 * count * w,
        },
    }


def _head(model: ModelNumbers, layout: Layout, x: Widths) -> dict[str, Row]:
    losses = x.rows * x.wide
    probabilities = x.rows * x.vocab * x.wide
    logits = x.rows * x.vocab * x.act
    return {
        "head.norm": _norm(model, layout, x),
        "head.gather": _gather(x),
        "head.logits": _product(layout, x, x.hidden, x.vocab, column=True),
        "head.loss": {
            "output_bytes": losses,
            "internal_bytes": probabilities,
            "held_bytes": 8 * x.rows,
            "collective": "all_reduce" if layout.t > 1 else None,
            "collective_bytes": 2 * losses if layout.t > 1 else 0,
            "workspace_bytes": 4 * losses + 8 * x.rows + 2 * x.rows,
            "backward_workspace_bytes": logits + 3 * losses + 8 * x.rows,
            "bytes_moved": 3 * probabilities + 2 * logits,
        },
    }
