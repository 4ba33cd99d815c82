"""GPT cut into chunks: the forward is a loop over named children, absent ends are absent, names survive the cut.

s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.config.model import ModelConfig
from megackpt.model.attention import Attention
from megackpt.model.documents import Documents
from megackpt.model.ends import Embedding, Head, TiedWord
from megackpt.model.mlp import MLP
from megackpt.model.norm import LayerNorm, RMSNorm
from megackpt.recompute import at, chain
from megackpt.tensor.context import TensorParallel


class Block(nn.Module):
    """One transformer layer (pre-norm), [s/t, b, h] -> [s/t, b, h]; ``index`` counts over the whole model."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int) -> None:
        super().__init__()
        self.step = at(f"layers.{index}", pure=True)
        self.attn = Attention(config, tp, f"layers.{index}.attn")
        self.mlp = MLP(config, tp, f"layers.{index}.mlp")

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        return self.mlp(self.step, self.attn(self.step, x, documents))


class GPTChunk(nn.Module):
    """The part of the model that one pipeline rank holds for one virtual stage."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, vocab: int, layers: range, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        split_ends = first != last
        self.embedding: nn.Module | None = None
        if first:
            self.embedding = Embedding(config, tp, vocab, tied=config.tie_embeddings and split_ends)
        elif last and config.tie_embeddings:
            self.embedding = nn.ModuleDict({"word": TiedWord(config, tp, vocab)})
        self.layers = nn.ModuleDict({str(i): Block(config, tp, i) for i in layers})
        self.head = Head(config, tp, vocab, self._tied_weight(config, last)) if last else None
        self._first = first
        self._chain = [(i, self.layers[str(i)]) for i in layers]

    def _tied_weight(self, config: ModelConfig, last: bool) -> Parameter | None:
        if not (last and config.tie_embeddings):
            return None
        assert self.embedding is not None
        word = self.embedding["word"] if isinstance(self.embedding, nn.ModuleDict) else self.embedding.word
        return word.weight  # type: ignore[return-value, union-attr]

    def hidden(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Token ids [b, s] on the first chunk, else received hidden states [s/t, b, h] -> [s/t, b, h].

        ``documents``: those of the micro-batch, if positions or attention stay inside them."""
        if self._first:
            assert self.embedding is not None
            x = self.embedding(x, documents.positions if documents is not None else None)
        if documents is None:
            return chain(self._chain, x)
        # Bound to the layers, not left in the model: a replay comes when other micro-batches have been there.
        return chain([(i, partial(layer, documents=documents)) for i, layer in self._chain], x)

    def forward(self, x: Tensor, labels: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """As :meth:`hidden`; on the last chunk the loss of each token, [s, b], for ``labels`` [b, s]."""
        x = self.hidden(x, documents)
        return x if self.head is None else self.head(x, labels)


def compile_steps(chunk: GPTChunk) -> None:
    """Compile the functions of the steps that are made of small operations: norms and activations.

    Each is compiled once, and forward and replay call the same compiled function, so replay stays bitwise; compiling a
    forward and a replayed region separately would not.  Products and attention are single kernels already.
    """
    norms = [module for module in chunk.modules() if isinstance(module, (LayerNorm, RMSNorm))]
    for norm in norms:
        norm.compile(dynamic=False)
    for mlp in (module for module in chunk.modules() if isinstance(module, MLP)):
        mlp.activation = torch.compile(mlp.activation, dynamic=False)


def build_chunk(
    config: ModelConfig, tp: TensorParallel, vocab: int, layers: range, *, first: bool, last: bool
) -> GPTChunk:
    """A chunk with the global ``layers``, its weights filled as every other layout would fill them."""
    return GPTChunk(config, tp, vocab, layers, first=first, last=last)
