"""The shape of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megackpt.config.checks import above_zero, at_least, nearest_divisors, nearest_multiples, one_of, within
from megackpt.config.errors import UsageError

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
DERIVED = 0
"""Asks for the value that follows from the other fields; never left in a finished ModelConfig."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the network is, whatever it runs on.  Derived fields are filled in at construction."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    """Tokens of a training sample."""
    num_query_groups: int = DERIVED
    """Key/value heads; as many as heads unless attention is grouped."""
    unpadded_query_groups: int = DERIVED
    """The first so many groups are the model's; the others are padding, zero, so that heads divide over ranks."""
    kv_channels: int = DERIVED
    """Size of one head; hidden / heads."""
    ffn_hidden_size: int = DERIVED
    """4 hidden; with SwiGLU 8/3 hidden rounded down to a multiple of 64 (at least 64), as Megatron has it."""
    max_position_embeddings: int = DERIVED
    """Rows of the learned position embedding; seq_length."""
    vocab_size: int | None = None
    """Rows of the vocabulary before padding; None = what the tokenizer has."""
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    """Share of a head's channels that are rotated."""
    rotary_interpolation: float = 1.0
    """Positions are divided by this before they turn anything (linear scaling)."""
    use_rope_scaling: bool = False
    """Long wavelengths are stretched as Llama 3.1 has it."""
    rope_scaling_factor: float = 8.0
    """How much they are stretched."""
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    """Every query and key is normed over its own channels, before it is rotated."""
    swiglu: bool = False
    squared_relu: bool = False
    add_bias_linear: bool = True
    tie_embeddings: bool = True
    """Input and output embedding are one matrix."""
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    fused_attention: bool = True
    """Attention by one fused kernel that never stores the s x s matrices."""
    compile: bool = False
    """Compile the functions of norms and activations."""
    loss_chunk_size: int | None = None
    """Positions whose logits exist at a time; None = all."""
    attention_softmax_in_fp32: bool = True
    """The unfused core computes its softmax in fp32 (in fp64 for an fp64 model)."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "seq_length",
            "make_vocab_size_divisible_by",
        ):
            at_least(_flag(name), getattr(self, name), 1)
        for name in (
            "num_query_groups",
            "unpadded_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "max_position_embeddings",
        ):
            at_least(_flag(name), getattr(self, name), DERIVED)
        at_least("--vocab-size", self.vocab_size, 1)
        at_least("--loss-chunk-size", self.loss_chunk_size, 1)
        self._derive()
        self._check_attention()
        self._check_positions()
        self._check_rest()

    @property
    def gated(self) -> bool:
        """The MLP's first product has a gate beside it (two matrices of ffn_hidden_size rows)."""
        return self.swiglu

    @property
    def unpadded_heads(self) -> int:
        """Query heads that are not padding."""
        return self.num_attention_heads // self.num_query_groups * self.unpadded_query_groups

    def with_query_groups(self, groups: int) -> ModelConfig:
        """The same model with ``groups`` groups of heads, those beyond its own being padding.

        Raises UsageError if that would take some of its own away.
        """
        if groups < self.unpadded_query_groups:
            raise UsageError(f"the model has {self.unpadded_query_groups} groups of heads, more than {groups}")
        heads = self.num_attention_heads // self.num_query_groups * groups
        return replace(self, num_attention_heads=heads, num_query_groups=groups)

    def padded_vocab_size(self, vocab: int, tensor_parallel: int) -> int:
        """``vocab`` rounded up to a multiple of make_vocab_size_divisible_by x tensor_parallel."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-vocab // multiple) * multiple

    def _derive(self) -> None:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.kv_channels == DERIVED:
            if hidden % heads:
                raise UsageError(
                    f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}. Nearest valid:"
                    f" --hidden-size {nearest_multiples(hidden, heads)}, --num-attention-heads"
                    f" {nearest_divisors(heads, hidden)}, or give the size of a head with --kv-channels."
                )
            object.__setattr__(self, "kv_channels", hidden // heads)
        if self.num_query_groups == DERIVED:
            object.__setattr__(self, "num_query_groups", heads)
        if self.unpadded_query_groups == DERIVED:
            object.__setattr__(self, "unpadded_query_groups", self.num_query_groups)
        if self.ffn_hidden_size == DERIVED:
            gated = max(64, int(4 * hidden * 2 / 3 / 64) * 64)
            object.__setattr__(self, "ffn_hidden_size", gated if self.swiglu else 4 * hidden)
        if self.max_position_embeddings == DERIVED:
            object.__setattr__(self, "max_position_embeddings", self.seq_length)

    def _check_attention(self) -> None:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            raise UsageError(
                f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}. Nearest valid:"
                f" --num-query-groups {nearest_divisors(groups, heads)}."
            )
        if self.unpadded_query_groups > groups:
            raise UsageError(
                f"--unpadded-query-groups {self.unpadded_query_groups} exceeds the {groups} groups that there are with"
                f" padding (--num-query-groups). Nearest valid: --unpadded-query-groups {groups}."
            )
        within("--attention-dropout", self.attention_dropout, 0.0, 1.0)
        within("--hidden-dropout", self.hidden_dropout, 0.0, 1.0)

    def _check_positions(self) -> None:
        one_of("--position-embedding-type", self.position_embedding_type, POSITION_EMBEDDINGS)
        above_zero("--rotary-base", self.rotary_base)
        above_zero("--rotary-seq-len-interpolation-factor", self.rotary_interpolation)
        above_zero("--rope-scaling-factor", self.rope_scaling_factor)
        if not 0 < self.rotary_percent <= 1:
            raise UsageError(f"--rotary-percent must be above 0 and at most 1; got {self.rotary_percent}.")
        if self.position_embedding_type == "learned_absolute" and self.seq_length > self.max_position_embeddings:
            raise UsageError(
                f"--seq-length {self.seq_length} exceeds --max-position-embeddings {self.max_position_embeddings}:"
                f" learned positions end there. Nearest valid: --max-position-embeddings {self.seq_length}."
            )
        rotated = int(self.kv_channels * self.rotary_percent)
        if self.position_embedding_type == "rope" and (rotated < 2 or rotated % 2):
            raise UsageError(
                f"--position-embedding-type rope rotates pairs of channels, but --rotary-percent {self.rotary_percent}"
                f" of {self.kv_channels} channels per head (--kv-channels) is {rotated}, which is not an even number"
                " of at least 2."
            )

    def _check_rest(self) -> None:
        one_of("--normalization", self.normalization, NORMALIZATIONS)
        above_zero("--norm-epsilon", self.norm_epsilon)
        above_zero("--init-method-std", self.init_method_std)
        if self.swiglu and self.squared_relu:
            raise UsageError("--swiglu and --squared-relu contradict each other: an MLP has one activation.")


def padding_words(model: ModelConfig) -> str:
    """What the user should know of padding heads."""
    return (
        f"{model.num_attention_heads} heads in {model.num_query_groups} groups, {model.unpadded_heads} in"
        f" {model.unpadded_query_groups} of them the model's: the others are zero and stay zero. Parameters are counted"
        " without them, FLOPs, throughput and memory with them."
    )


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
