"""The two ends of the model: embedding on the first stage, head and loss on the last.

s sequence, b micro-batch, h hidden, V padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.config.model import ModelConfig
from megackpt.model.norm import make_norm
from megackpt.model.residual import gather_step
from megackpt.recompute import at, dropout
from megackpt.tensor.collectives import reduce_from_tp, reduce_scatter_sequence
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.cross_entropy import vocab_parallel_cross_entropy
from megackpt.tensor.embedding import VocabEmbedding
from megackpt.tensor.linear import linear
from megackpt.tensor.parameters import new_parameter


class PositionEmbedding(nn.Module):
    """One learned row per position, on every tensor-parallel rank."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.weight = new_parameter(
            tp,
            (config.max_position_embeddings, config.hidden_size),
            name=f"{name}.weight",
            kind="normal",
            std=config.init_method_std,
            partial_under_sp=True,
        )

    def of(self, positions: Tensor) -> Tensor:  # [b, s] -> [s/t, b, h], of this rank's part; saves the positions
        own = positions.t()
        if self.tp.sequence_parallel:
            own = own.chunk(self.tp.axis.size)[self.tp.axis.index]
        return F.embedding(own, self.weight)

    def forward(self, length: int) -> Tensor:  # -> [s/t, 1, h], the rows of this rank's part; saves nothing
        if self.tp.sequence_parallel:
            length //= self.tp.axis.size
            return self.weight.narrow(0, self.tp.axis.index * length, length).unsqueeze(1)
        return self.weight[:length].unsqueeze(1)


class Embedding(nn.Module):
    """Token ids [b, s] to hidden states [s/t, b, h]."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, vocab: int, *, tied: bool) -> None:
        super().__init__()
        self.p, self.tp = config.hidden_dropout, tp
        padded = config.padded_vocab_size(vocab, tp.axis.size)
        self.word = VocabEmbedding(
            tp,
            padded,
            config.hidden_size,
            name="embedding.word",
            std=config.init_method_std,
            valid_vocab=vocab,
            tied=tied,
        )
        self.position = None
        if config.position_embedding_type == "learned_absolute":
            self.position = PositionEmbedding(config, tp, "embedding.position")

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:  # [b, s] both
        step = at("embedding")
        counted_anew = (positions,) if positions is not None and self.position is not None else ()
        x = step("embed.lookup", self._lookup, tokens, *counted_anew)
        return step("embed.dropout", self._dropout, x)

    def _lookup(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        partial_sum = self.word(tokens.t().contiguous())  # [s, b, h], zero for ids of other ranks
        reduction = reduce_scatter_sequence if self.tp.sequence_parallel else reduce_from_tp
        x = reduction(partial_sum, self.tp.axis)
        if self.position is None:
            return x
        return x + (self.position(tokens.shape[1]) if positions is None else self.position.of(positions))

    def _dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.tp.hidden_stream if self.p else None, self.training)


class TiedWord(nn.Module):
    """The last stage's copy of a tied word embedding; its name is the embedding's own."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, vocab: int) -> None:
        super().__init__()
        self.weight = new_parameter(
            tp,
            (config.padded_vocab_size(vocab, tp.axis.size), config.hidden_size),
            name="embedding.word.weight",
            kind="normal",
            std=config.init_method_std,
            shard_dim=0,
            tied=True,
            counted=False,
            valid=vocab,
            of_vocabulary=True,
        )


class Head(nn.Module):
    """Hidden states [s/t, b, h] and labels [b, s] to the loss of each token [s, b].

    With ``loss_chunk_size`` logits and their softmax exist for that many positions at a time only, in forward and in
    backward: 6sbV/t bytes never stand at once.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, vocab: int, tied_weight: Parameter | None) -> None:
        super().__init__()
        self.loss_chunk_size = config.loss_chunk_size
        self.tp, self.vocab = tp, vocab
        self.norm = make_norm(config, tp, "head.norm")
        self.weight: Parameter | None = None
        self._tied = (tied_weight,)  # in a tuple: registered where it belongs
        if tied_weight is None:
            self.weight = new_parameter(
                tp,
                (config.padded_vocab_size(vocab, tp.axis.size), config.hidden_size),
                name="head.weight",
                kind="normal",
                std=config.init_method_std,
                shard_dim=0,
                valid=vocab,
                of_vocabulary=True,
            )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        step = at("head")
        y = step("head.norm", self.norm, x)
        for name, gather in gather_step("head.gather", self.tp):
            y = step(name, gather, y)  # [s, b, h]
        targets = labels.t().contiguous()  # [s, b]
        if self.loss_chunk_size is None:
            y = step("head.logits", self.logits, y)  # [s, b, V/t]; the gathered input is not held while the loss runs
            return step("head.loss", self._loss, y, targets)
        # One split and one cat, not slices: a slice's backward would write a whole [s, b, h] of zeros per part.
        parts = zip(y.split(self.loss_chunk_size), targets.split(self.loss_chunk_size), strict=True)
        return torch.cat([step("head.chunk", self._logits_and_loss, *part) for part in parts])

    def _logits_and_loss(self, y: Tensor, targets: Tensor) -> Tensor:  # [c, b, h], [c, b] -> [c, b]
        return self._loss(self.logits(y), targets)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:  # [s, b, V/t], [s, b] -> [s, b]
        return vocab_parallel_cross_entropy(logits, targets, self.tp.axis, self.vocab)

    def logits(self, y: Tensor) -> Tensor:
        """Normalised hidden states [s, b, h] to this rank's columns of the logits, [s, b, V/t]."""
        weight = self.weight if self.weight is not None else self._tied[0]
        assert weight is not None
        return linear(y, weight, None, self.tp.sink.at_once, self.tp.input_gradient_axis)


def masked_loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the losses [s, b] of unmasked tokens and their number, both scalars; ``mask`` is [b, s].

    A masked token contributes nothing, not even a NaN.
    """
    mask = mask.t()
    total = torch.where(mask > 0, losses * mask, losses.new_zeros(())).sum()
    return total, mask.sum(dtype=torch.float64)
