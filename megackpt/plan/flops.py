"""Floating-point operations of a GPT training step, as pure functions of numbers.

Two figures must never be mixed:

* **model FLOPs** are what the mathematics of the step needs: 3x the forward (backward is two products per
  forward product). They do not depend on what is replayed. MFU is model FLOPs / (time x peak).
* **hardware FLOPs** add what recomputation executes a second time. HFU is hardware FLOPs / (time x peak).

Only products are counted (a multiply and an add are 2 FLOPs), as in Korthikanti et al. 2022
(arXiv:2205.05198, appendix A). Letters: s sequence, B sequences, h hidden, L layers, V padded vocabulary,
q = heads x head size, k = kv heads x head size, f = ffn, g = 2 for a gated MLP (gate and up), else 1.

    qkv     2 B s h (q + 2k)
    core    4 B s^2 q            scores and context; halved when counted causally
    proj    2 B s q h
    up      2 B s h f g
    down    2 B s f h
    logits  2 B s h V            once per model

With q = k = h, f = 4h, g = 1 this is 72 B L s h^2 (1 + s/6h + V/12hL) per step. The paper counts the core in
full although half of it is masked; so do we unless `causal` is set.

The counted backward of the core is 4 products' worth (2C). A fused attention backward rebuilds the scores
and so executes 5 (2.5C, what a FLOP counter on a GPU shows): `fused_backward_extra` is that difference. It
belongs to neither figure above unless the caller adds it and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megackpt.plan.steps import BLOCK_NAMES

PRODUCTS = ("qkv", "core", "proj", "up", "down")

# The step (plan.steps vocabulary) that executes each product.
PRODUCT_OF_STEP = {
    "attn.qkv": "qkv",
    "attn.core": "core",
    "attn.proj": "proj",
    "mlp.up": "up",
    "mlp.down": "down",
}

# A step costs its forward three times: once forward, twice backward.
STEP_TO_FORWARD = 3


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a GPT model that its FLOPs depend on. All are whole-model sizes, never shards."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Width of the MLP's inner activation (of one of the two branches when gated)."""
    padded_vocab: int
    """Rows of the head that is really multiplied, padding included."""
    seq: int
    """Tokens per sequence."""
    gated: bool = False
    causal: bool = False
    """Count only the unmasked half of the core. False is the paper's and Megatron's count."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "padded_vocab", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @staticmethod
    def gpt(
        layers: int, hidden: int, heads: int, padded_vocab: int, seq: int, causal: bool = False
    ) -> ModelShape:
        """The classic shape: as many kv heads as heads, head size h/a, ffn 4h, not gated.

        Raises ValueError when `hidden` is not a multiple of `heads`.
        """
        if hidden % heads:
            raise ValueError(f"hidden {hidden} is not a multiple of heads {heads}")
        return ModelShape(
            layers, hidden, heads, heads, hidden // heads, 4 * hidden, padded_vocab, seq, causal=causal
        )


@dataclass(frozen=True)
class LayerFlops:
    """Forward FLOPs of one transformer layer by product."""

    qkv: int
    core: int
    proj: int
    up: int
    down: int

    @property
    def total(self) -> int:
        return self.qkv + self.core + self.proj + self.up + self.down

    def of(self, product: str) -> int:
        """FLOPs of one product, by name or step name (`qkv`, `attn.qkv`); 0 for the block's other steps.

        Raises ValueError on any other name.
        """
        name = PRODUCT_OF_STEP.get(product, product)
        if name in PRODUCTS:
            return int(getattr(self, name))
        if name in BLOCK_NAMES:
            return 0
        known = ", ".join(PRODUCTS)
        raise ValueError(f"unknown product {product!r}; expected one of {known} or a step of the block")


def layer_forward(shape: ModelShape, sequences: int) -> LayerFlops:
    """Forward FLOPs of one layer over `sequences` sequences of `shape.seq` tokens."""
    tokens = sequences * shape.seq
    q = shape.heads * shape.head_size
    k = shape.kv_heads * shape.head_size
    core = 4 * tokens * shape.seq * q
    return LayerFlops(
        qkv=2 * tokens * shape.hidden * (q + 2 * k),
        core=core // 2 if shape.causal else core,
        proj=2 * tokens * q * shape.hidden,
        up=2 * tokens * shape.hidden * shape.ffn * (2 if shape.gated else 1),
        down=2 * tokens * shape.ffn * shape.hidden,
    )


def logits_forward(shape: ModelShape, sequences: int) -> int:
    """Forward FLOPs of the output head (one product with the padded vocabulary)."""
    return 2 * sequences * shape.seq * shape.hidden * shape.padded_vocab


def model_forward(shape: ModelShape, sequences: int) -> int:
    """Forward FLOPs of the whole model over `sequences` sequences."""
    return shape.layers * layer_forward(shape, sequences).total + logits_forward(shape, sequences)


def model_flops(shape: ModelShape, sequences: int) -> int:
    """Model FLOPs of one iteration over a global batch of `sequences`: the numerator of MFU."""
    return STEP_TO_FORWARD * model_forward(shape, sequences)


def replayed_flops(shape: ModelShape, sequences: int, replayed: Sequence[Iterable[str]]) -> int:
    """FLOPs executed again by recomputation in one iteration over `sequences` sequences.

    `replayed` holds, for each of the model's layers, what is replayed there, by product or step name; a name
    given twice is replayed twice. Steps without a product cost nothing.
    Raises ValueError when there is not one entry per layer, or on an unknown name.
    """
    if len(replayed) != shape.layers:
        raise ValueError(f"replayed products given for {len(replayed)} layers, the model has {shape.layers}")
    layer = layer_forward(shape, sequences)
    return sum(layer.of(product) for products in replayed for product in products)


def hardware_flops(shape: ModelShape, sequences: int, replayed: Sequence[Iterable[str]]) -> int:
    """Model FLOPs plus replayed FLOPs of one iteration: the numerator of HFU. See `replayed_flops`."""
    return model_flops(shape, sequences) + replayed_flops(shape, sequences, replayed)


def fused_backward_extra(shape: ModelShape, sequences: int) -> int:
    """FLOPs by which a fused attention backward exceeds the counted one, per iteration: C/2 per layer."""
    return shape.layers * layer_forward(shape, sequences).core // 2


def replay_share(shape: ModelShape, replayed: Sequence[Iterable[str]]) -> float:
    """Replayed FLOPs as a share of the layers' model FLOPs (no head), as the policy table counts it."""
    layers = STEP_TO_FORWARD * shape.layers * layer_forward(shape, 1).total
    return replayed_flops(shape, 1, replayed) / layers


def utilisation(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """MFU or HFU: `flops` of an iteration of `seconds` over what `devices` of `peak_flops` FLOP/s each could do.

    Raises ValueError when a divisor is not positive.
    """
    if seconds <= 0 or devices < 1 or peak_flops <= 0:
        raise ValueError(f"need positive seconds, devices, peak; got {seconds}, {devices}, {peak_flops}")
    return flops / (seconds * devices * peak_flops)
