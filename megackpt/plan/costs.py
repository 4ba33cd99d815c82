"""Closed forms of every step, as our kernels are written.

``w`` bytes of an activation, ``wide`` of statistics and losses.  The workspaces follow the code line by line: what a
step holds besides what it returns and saves.  Scratch memory inside one kernel is counted where a kernel is known to
need a buffer of the size of an activation (fused attention's backward on a GPU), else not.
"""

from __future__ import annotations

from typing import Any

from megackpt.plan.buffers import scratch_rows
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
    """[rows, inputs] @ [inputs, outputs].  Of a 16-bit weight gradient a block of rows exists before it is added to
    the wide buffer; a strided input is copied for a kernel that wants rows."""
    w = x.act
    copy = x.rows * inputs * w if strided else 0
    weight_gradient = _narrow_product(outputs, inputs, x)
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
    if column and layout.sequence_parallel:  # its sum, scattered, is on its way beside the product for the weight
        row["backward_workspace_bytes"] += x.shard * inputs * w
    return row


def _narrow_product(rows: int, columns: int, x: Widths) -> int:
    return scratch_rows(rows, columns) * columns * x.act if x.act != x.grad else 0


def _qkv(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    row = _product(layout, x, x.hidden, x.packed, column=True)
    if _unpacks(model) and not model.qk_norm:
        row["workspace_bytes"] = row["output_bytes"]
    return row


def _unpacks(model: ModelNumbers) -> bool:
    """Whether queries, keys and values are laid side by side without being rotated."""
    return not model.rotated and model.kv_heads != model.heads


def _head_norm(model: ModelNumbers, x: Widths) -> Row:
    """See model/head_norm.py: three copies of queries and keys at a time in backward, in the wide type."""
    size, numbers = x.rows * x.packed * x.act, x.rows * (x.packed + x.queries) // 2
    biased = model.norm == "LayerNorm"
    row = x.rows * (x.packed + x.queries) // 2 // model.head_size * x.wide
    group, weight = (model.heads // model.kv_heads + 1) * model.head_size, model.head_size
    kept = weight * (2 * x.act if x.act != x.wide else x.act)  # of a weight's gradients what is not a part of `group`
    return {
        "output_bytes": size,
        "internal_bytes": row * (1 + biased),
        "workspace_bytes": max(numbers * x.wide if x.act != x.wide else 0, size if _unpacks(model) else 0),
        "backward_workspace_bytes": 3 * numbers * x.wide + row + (group * x.wide + kept) * (1 + biased),
        "bytes_moved": 2 * size,
    }


def _folds(model: ModelNumbers, layout: Layout) -> bool:
    """Whether a batched product over micro-batch and heads needs no copies: heads lie one behind the other, packed
    as the projection made them, or there is only one of either."""
    packed = model.kv_heads == model.heads and not model.rotated
    return packed or layout.micro_batch == 1 or model.kv_heads == layout.t


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


def _residual(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    count, w = x.shard * x.hidden, x.act
    dropout = model.hidden_dropout > 0
    bias = model.biases and layout.t > 1  # on one rank the product before it adds it
    return {
        "output_bytes": count * w,
        "mask_bytes": count if dropout else 0,
        "workspace_bytes": count * w * (bias + dropout),
        "backward_workspace_bytes": count * w if dropout else 0,
        "passes_gradient": not dropout,
        "bytes_moved": (3 + 2 * bias + 2 * dropout) * count * w,
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
    backward = flat  # three gradients; they are laid side by side when what the kernel saved is gone
    if layout.device == "cuda":  # the kernel's own: queries' gradient in fp32, one number per row
        backward = max(backward, flat + 4 * x.rows * x.queries + 4 * x.log_sum)
    return {
        "output_bytes": out,
        "internal_bytes": x.wide * x.log_sum + out,
        "output_is_internal": not model.resets_attention,  # then each document's kernel has its own
        "workspace_bytes": out if model.resets_attention else 0,  # samples, before they are joined
        "backward_workspace_bytes": backward,
        "bytes_moved": flat + out,
    }


def _math(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    """Plain products in the wide type; saves scaled queries and keys, values, softmax, noise, dropped softmax."""
    scores, out = x.scores * x.wide, x.rows * x.queries * x.wide
    # values that fold and are not converted are saved as they are
    whole = _folds(model, layout) and x.act == x.wide and model.kv_heads == model.heads
    result, inside, returned = x.rows * x.queries * x.act, 0, 0
    if x.act != x.wide:  # converted queries, keys, values; the narrow softmax that nobody reads; the mask as numbers
        shared = x.rows * (x.packed - x.queries) * x.wide if model.kv_heads != model.heads else 0
        inside = 2 * out + shared + x.scores * x.act + x.wide * (model.seq // layout.c) ** 2
        returned = out - result
    return {
        "output_bytes": result,
        "internal_bytes": 3 * scores + (2 if whole else 3) * out,
        "saves_input": whole,
        "workspace_bytes": out + inside,
        "backward_workspace_bytes": scores + out + returned,
        "bytes_moved": 6 * scores,
    }


def _unfused(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    """See model/core.py.  The scores in the softmax's type live as long as the forward's function runs."""
    count, w, length = x.scores, x.act, model.seq // layout.c
    out, weights = x.rows * x.queries * w, x.scores * w
    keys = (x.rows * x.packed * w - out) // 2
    grouped = out if model.kv_heads != model.heads else 0  # queries of a group stacked: a copy
    folds = _folds(model, layout)
    copied_keys, copied_queries = (0 if folds else keys), (0 if folds or grouped else out)
    narrowed = model.softmax_fp32 and w != x.wide
    scores, hidden = count * (x.wide if narrowed else w), length * length * model.heads // model.kv_heads * w
    drops = model.attention_dropout > 0
    mask, dropped = (count, weights) if drops else (0, 0)
    forward = (
        hidden + copied_queries + copied_keys + weights,
        weights + scores if narrowed else 0,
        2 * scores + (weights if narrowed else 0),
        scores + weights + (3 * mask if drops else 0),
        scores + weights + mask + dropped + max(copied_keys + out, 2 * out),
    )
    products = max(copied_keys + out, copied_queries + keys)
    backward = max(keys, copied_keys + weights, 2 * weights + products)
    return {
        "output_bytes": out,
        "internal_bytes": weights + dropped,
        "mask_bytes": mask,
        "workspace_bytes": grouped + max(forward) - out - weights - dropped - mask,
        "backward_workspace_bytes": 2 * grouped + x.rows * x.packed * w + backward,
        "bytes_moved": count * (4 * w + 2 * x.wide),
    }


# -- layer classes -----------------------------------------------------------------------------------------------


def _block(model: ModelNumbers, layout: Layout, x: Widths) -> dict[str, Row]:
    strided = core_kernel(model, layout) == "fused" and layout.device == "cpu" and layout.micro_batch > 1
    strided = strided and not model.resets_attention  # whose outputs are joined to rows
    return {
        "attn.norm": _norm(model, layout, x),
        "attn.gather": _gather(x),
        "attn.qkv": _qkv(model, layout, x),
        "attn.qknorm": _head_norm(model, x),
        "attn.rope": _rope(model, x),
        "attn.core": _core(model, layout, x),
        "attn.proj": _product(layout, x, x.queries, x.hidden, column=False, strided=strided),
        "attn.reduce": _reduce(layout, x),
        "attn.residual": _residual(model, layout, x),
        "mlp.norm": _norm(model, layout, x),
        "mlp.gather": _gather(x),
        "mlp.up": _product(layout, x, x.hidden, x.up, column=True),
        "mlp.act": _activation(model, x),
        "mlp.down": _product(layout, x, x.ffn, x.hidden, column=False),
        "mlp.reduce": _reduce(layout, x),
        "mlp.residual": _residual(model, layout, x),
    }


def _embedding(model: ModelNumbers, layout: Layout, x: Widths) -> dict[str, Row]:
    count, w = x.shard * x.hidden, x.act
    whole = x.rows * x.hidden * w
    learned = model.positions == "learned_absolute"
    position_table = model.max_positions * x.hidden * w if learned else 0
    reduced = {1: None}.get(layout.t, "reduce_scatter" if layout.sequence_parallel else "all_reduce")
    partial = whole if layout.t > 1 or learned else 0  # alive beside the sum that is returned
    summed = count * w if layout.t > 1 and learned else 0
    masked = whole if layout.t > 1 else 0
    gathered = whole if layout.sequence_parallel else 0
    widened = x.rows * x.hidden * x.wide if x.act != x.wide else 0  # for the buffer of main gradients
    return {
        "embed.lookup": {
            "output_bytes": count * w,
            "held_bytes": 8 * x.rows * (2 if learned and model.resets_positions else 1),
            "saves_input": False,
            "workspace_bytes": partial + summed,
            "backward_workspace_bytes": max(gathered + masked + widened, 2 * position_table),
            "collective": reduced,
            "backward_collective": "all_gather" if reduced == "reduce_scatter" else None,
            "collective_bytes": whole if reduced else 0,
            "bytes_moved": 2 * whole,
        },
        "embed.dropout": {
            "output_bytes": count * w,
            "mask_bytes": count,
            "backward_workspace_bytes": count * w,
            "bytes_moved": 2 * count * w,
        },
    }


def _head(model: ModelNumbers, layout: Layout, x: Widths) -> dict[str, Row]:
    return {
        "head.norm": _norm(model, layout, x),
        "head.gather": _gather(x),
        "head.logits": _product(layout, x, x.hidden, x.vocab, column=True),
        "head.loss": _loss(model, layout, x, x.rows),
        "head.chunk": _chunk(model, layout, x),
    }


def _loss(model: ModelNumbers, layout: Layout, x: Widths, rows: int) -> Row:
    """Cross entropy over this rank's columns; see tensor/cross_entropy.py."""
    losses, probabilities, logits = rows * x.wide, rows * x.vocab * x.wide, rows * x.vocab * x.act
    ranks = range(layout.t) if layout.tp_rank is None else (layout.tp_rank,)
    columns = [max(0, min(x.vocab, model.vocab - rank * x.vocab)) for rank in ranks]
    converted = layout.device == "cpu" and x.act != x.wide
    # a softmax before it is padded, or its operand
    second = rows * x.wide * max(c for c in (*columns, 0) if c < x.vocab or converted)
    return {
        "output_bytes": losses,
        "internal_bytes": probabilities,
        "held_bytes": 8 * rows,
        "collective": "all_reduce" if layout.t > 1 else None,
        "collective_bytes": 3 * losses if layout.t > 1 else 0,
        "workspace_bytes": second + 4 * losses,
        "backward_workspace_bytes": logits + 3 * losses + 8 * rows,
        "bytes_moved": 3 * probabilities + 2 * logits,
    }


def _chunk(model: ModelNumbers, layout: Layout, x: Widths) -> Row:
    """Logits and loss of a part of the sequence at a time, always replayed: its internals are those of one part."""
    if not model.loss_chunk:
        return {}
    rows = min(model.loss_chunk, model.seq // layout.c) * layout.micro_batch
    product, loss = _product(layout, x, x.hidden, x.vocab, column=True), _loss(model, layout, x, rows)
    logits, hidden = rows * x.vocab * x.act, x.rows * x.hidden * x.act
    before = (x.rows - rows) * x.hidden * x.act  # the first part is the last to go back: the others' gradients wait
    inside = loss["internal_bytes"]  # gone when the products' backward runs
    weight_gradient = _narrow_product(x.vocab, x.hidden, x)
    return product | {
        "output_bytes": x.rows * x.wide,
        "internal_bytes": inside,
        "held_bytes": 8 * x.rows,
        "workspace_bytes": logits + loss["workspace_bytes"],
        "replay_workspace_bytes": before,
        "backward_workspace_bytes": max(
            before + loss["backward_workspace_bytes"], hidden + logits + weight_gradient - inside, 2 * hidden - inside
        ),
        "collective": loss["collective"],
        "collective_bytes": 3 * x.rows * x.wide if layout.t > 1 else 0,
        "bytes_moved": product["bytes_moved"] + x.rows * x.vocab * (3 * x.wide + 2 * x.act),
    }
