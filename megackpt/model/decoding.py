"""Continuing a text: the forward of new tokens only, on keys and values that are kept from the earlier ones.

s new tokens, b sequences, h hidden, g key/value heads, d head size, V vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megackpt.model.attention import Attention
from megackpt.model.ends import Embedding
from megackpt.model.gpt import Block, GPTChunk
from megackpt.model.rope import unpack
from megackpt.tensor.collectives import reduce_from_tp
from megackpt.tensor.context import TensorParallel


@dataclass
class _Memory:
    """Keys and values of one layer, [b, g/t, capacity, d] each; the first `Decoder.length` positions are filled."""

    keys: Tensor
    values: Tensor


class Decoder:
    """Logits of the next token for growing sequences.

    `chunk` is a whole model (first and last chunk in one) built without sequence parallelism; `capacity` is the most
    positions that will be asked for, at most the model's own `seq_length`.
    """

    def __init__(self, chunk: GPTChunk, tp: TensorParallel, *, sequences: int, capacity: int) -> None:
        if tp.sequence_parallel or chunk.head is None or not isinstance(chunk.embedding, Embedding):
            raise ValueError("decoding needs a whole model without sequence parallelism")
        self.chunk, self.tp = chunk.eval(), tp
        self.embedding, self.head = chunk.embedding, chunk.head
        self.length = 0
        self.capacity = capacity
        self._memories = [self._memory(block.attn, sequences) for block in self._blocks]

    @property
    def _blocks(self) -> Sequence[Block]:
        return [block for block in self.chunk.layers.values() if isinstance(block, Block)]

    def _memory(self, attention: Attention, sequences: int) -> _Memory:
        shape = (sequences, attention.groups, self.capacity, attention.config.kv_channels)
        keys = torch.empty(shape, dtype=self.tp.dtype, device=self.tp.device)
        return _Memory(keys, torch.empty_like(keys))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """New tokens [b, s] -> logits [b, V] of what comes after the last of them, the same on every rank.

        Raises ValueError beyond `capacity`.
        """
        new = tokens.shape[1]
        if self.length + new > self.capacity:
            raise ValueError(f"{self.length} + {new} tokens are more than the {self.capacity} that were asked for")
        x = self._embed(tokens)
        for block, memory in zip(self._blocks, self._memories, strict=True):
            x = block.mlp(block.step, self._attend(block.attn, memory, x))
        self.length += new
        logits = self.head.logits(self.head.norm(x[-1:]))[0]  # [b, V/t]
        return self._whole(logits)[:, : self.head.vocab]

    def _embed(self, tokens: Tensor) -> Tensor:
        x = reduce_from_tp(self.embedding.word(tokens.t().contiguous()), self.tp.axis)  # [s, b, h]
        position = self.embedding.position
        if position is None:
            return x
        rows = position.weight[self.length : self.length + tokens.shape[1]]
        return x + rows.unsqueeze(1)

    def _attend(self, attention: Attention, memory: _Memory, x: Tensor) -> Tensor:
        """The attention half of a layer, [s, b, h] -> [s, b, h], with every earlier position in sight."""
        start, end = self.length, self.length + x.shape[0]
        packed = attention.norm_heads(attention.packed(attention.norm(x)))  # [s, b, g/t, r + 2, d]
        tables = attention.tables[:, start:end] if attention.rotated else None
        heads, groups = unpack(packed, tables).permute(1, 2, 0, 3), attention.groups  # [b, (a + 2g)/t, s, d]
        query, key, value = heads.split((heads.shape[1] - 2 * groups, groups, groups), dim=1)
        memory.keys[:, :, start:end], memory.values[:, :, start:end] = key, value
        seen = None if x.shape[0] == 1 else self._seen(start, end)
        y = F.scaled_dot_product_attention(
            query,
            memory.keys[:, :, :end],
            memory.values[:, :, :end],
            attn_mask=seen,
            enable_gqa=query.shape[1] != groups,
        )
        y = attention.proj(y.permute(2, 0, 1, 3).flatten(2))
        return attention.residual(x, reduce_from_tp(y, self.tp.axis))  # type: ignore[no-any-return]

    def _seen(self, start: int, end: int) -> Tensor:
        """Which positions [end] each of the new ones [end - start] may look at."""
        places = torch.arange(end, device=self.tp.device)
        return places <= places[start:].unsqueeze(1)

    def _whole(self, logits: Tensor) -> Tensor:
        """[b, V/t] of each rank -> [b, V]."""
        axis = self.tp.axis
        if axis.size == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(axis.size)]
        dist.all_gather(parts, logits.contiguous(), group=axis.group)
        return torch.cat(parts, dim=-1)
