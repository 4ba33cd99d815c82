"""How many operations the host dispatches for a step, forward and backward, as our kernels are written.

They matter where the host computes itself and tensors are small: then a step costs so many dispatches, whatever its
FLOPs say.  Counted on real tensors (`recompute/stepwise.py`); a test compares.
"""

from __future__ import annotations

from megackpt.plan.numbers import Layout, ModelNumbers

Counts = tuple[int, int]
"""forward, backward"""

EXCHANGE: Counts = (3, 3)  # a collective: room for the result, the call, the wait


def operations(name: str, model: ModelNumbers, layout: Layout) -> Counts:
    """Of the step ``name``; (0, 0) for one that nobody counted."""
    room, _, step = name.partition(".")
    if step == "norm":
        return _norm(model, layout)
    if step in ("gather", "reduce"):
        return EXCHANGE
    if step == "residual":
        return (10, 3) if model.hidden_dropout else (1 + (model.biases and layout.t > 1), 2)
    if step == "core":
        return _core(model, layout)
    if step == "dropout":
        return (9, 2) if model.hidden_dropout else (0, 0)
    if name == "attn.qknorm":
        forward, backward = (21, 40) if model.norm == "LayerNorm" else (17, 31)
        return (forward, backward) if layout.act_bytes == layout.wide_bytes else (forward + 2, backward + 3)
    if name == "attn.rope":
        return (44, 45) if layout.act_bytes == layout.wide_bytes else (48, 49)
    if name == "mlp.act":
        return {"gelu": (1, 2), "swiglu": (3, 14), "squared_relu": (2, 5)}[model.activation]
    if name == "embed.lookup":
        return (11, 9) if model.positions == "learned_absolute" else (8, 5)
    if room == "head":
        return _head(step, model, layout)
    return _product(step, model)


def _norm(model: ModelNumbers, layout: Layout) -> Counts:
    if model.norm == "LayerNorm":
        return 1, 6
    return (7, 13) if layout.act_bytes == layout.wide_bytes else (9, 17)


def _product(step: str, model: ModelNumbers) -> Counts:
    return (5 if step == "qkv" else 4), (13 if model.biases else 11)


def _core(model: ModelNumbers, layout: Layout) -> Counts:
    grouped, drops = model.kv_heads != model.heads, model.attention_dropout > 0
    if not model.fused_attention:
        return (41 if drops else 29) + 3 * grouped, (49 if drops else 46) + 4 * grouped
    if drops and layout.device == "cpu":  # plain products take its place
        return 31 + 8 * grouped, 32 + 6 * grouped
    heads = layout.micro_batch * model.heads // layout.t if layout.device == "cpu" else 0  # it goes head by head
    return 5 + heads, 13 + 2 * heads


def _head(step: str, model: ModelNumbers, layout: Layout) -> Counts:
    product, loss = (4, 11), (23 + 15 * (layout.t > 1), 18)
    if step != "chunk":
        return product if step == "logits" else loss
    parts = -(-model.seq // layout.c // max(1, model.loss_chunk))
    return parts * (product[0] + loss[0]), parts * (product[1] + loss[1])
