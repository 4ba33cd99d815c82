"""Self-attention as a chain of steps.

s sequence, b micro-batch, h hidden, a heads, g key/value heads, r = a/g, d head size, t tensor-parallel size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megackpt.config.model import ModelConfig
from megackpt.model.core import fused_core, unfused_core
from megackpt.model.documents import Documents
from megackpt.model.head_norm import HeadNorm, norm_heads
from megackpt.model.norm import make_norm
from megackpt.model.residual import Residual, gather_step, reduce_step
from megackpt.model.rope import rope_tables, unpack
from megackpt.recompute import Scope
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.linear import ColumnLinear, RowLinear


class Attention(nn.Module):
    """Norm, projection, core, projection, reduction, residual.  ``name`` is the global name (``layers.3.attn``)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        heads, groups, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
        self.groups, own = groups // tp.axis.size, config.unpadded_query_groups
        padded = own < groups  # groups beyond are zero: they add nothing, and their gradients are zero
        self.norm = make_norm(config, tp, f"{name}.norm")
        self.qkv = ColumnLinear(
            tp,
            config.hidden_size,
            (heads + 2 * groups) * d,
            name=f"{name}.qkv",
            std=config.init_method_std,
            bias=config.add_bias_linear,
            valid=own * (heads // groups + 2) * d if padded else None,
        )
        self.normed = config.qk_layernorm
        if self.normed:
            self.q_norm = HeadNorm(config, tp, f"{name}.q_norm")
            self.k_norm = HeadNorm(config, tp, f"{name}.k_norm")
        self.proj = RowLinear(
            tp,
            heads * d,
            config.hidden_size,
            name=f"{name}.proj",
            std=config.init_method_std / (2.0 * config.num_layers) ** 0.5,
            bias=config.add_bias_linear,
            valid=own * (heads // groups) * d if padded else None,
        )
        self.residual = Residual(config, tp, self.proj.bias_after)
        self.rotated = int(d * config.rotary_percent) if config.position_embedding_type == "rope" else 0
        self.tables: Tensor
        if self.rotated:
            tables = rope_tables(config, self.rotated, tp.dtype, tp.device)
            self.register_buffer("tables", tables, persistent=False)

    def forward(self, step: Scope, x: Tensor, documents: Documents | None = None) -> Tensor:  # [s/t, b, h] twice
        core, rotate = self._core, self._rotate
        if documents is not None:
            core = partial(core, documents=documents if documents.segments is not None else None)
            rotate = partial(rotate, documents=documents if documents.positions is not None else None)
        steps = (
            ("attn.norm", self.norm),  # [s/t, b, h]
            *gather_step("attn.gather", self.tp),  # [s, b, h]
            ("attn.qkv", self._project),  # [s, b, g/t, r + 2, d], or unpacked to [s, b, (a + 2g)/t, d]
            *((("attn.qknorm", self._norm_heads),) if self.normed else ()),  # likewise
            *((("attn.rope", rotate),) if self.rotated else ()),  # [s, b, (a + 2g)/t, d]
            ("attn.core", core),  # [s, b, a d / t]
            ("attn.proj", self.proj),  # [s, b, h], partial
            *reduce_step("attn.reduce", self.tp),  # [s/t, b, h]
        )
        return step.branch(x, steps, ("attn.residual", self.residual))

    def _project(self, x: Tensor) -> Tensor:
        packed = self.packed(x)
        return packed if self.normed else self._unpacked(packed)

    def packed(self, x: Tensor) -> Tensor:
        """[s, b, h] -> queries, keys and values by group, [s, b, g/t, r + 2, d]."""
        y = self.qkv(x)
        return y.view(*y.shape[:2], self.groups, -1, self.config.kv_channels)

    def _norm_heads(self, packed: Tensor) -> Tensor:
        return self._unpacked(self.norm_heads(packed))

    def norm_heads(self, packed: Tensor) -> Tensor:
        """Queries and keys normed, where the model does so."""
        return norm_heads(packed, self.q_norm, self.k_norm, self.config.norm_epsilon) if self.normed else packed

    def _unpacked(self, packed: Tensor) -> Tensor:
        """As the core wants it, unless the rotation is still to come."""
        return packed if self.rotated or packed.shape[3] == 3 else unpack(packed, None)

    def _rotate(self, packed: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is not None:
            return unpack(packed, documents.tables(self.tables))
        return unpack(packed, self.tables[:, : packed.shape[0]])

    def _core(self, packed: Tensor, documents: Documents | None = None) -> Tensor:
        p = self.config.attention_dropout if self.training else 0.0
        stream = self.tp.attention_stream if p else None
        if self.config.fused_attention:
            return fused_core(packed, self.groups, p, stream, documents)
        return unfused_core(packed, self.groups, self.config.attention_softmax_in_fp32, p, stream, documents)
