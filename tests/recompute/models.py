"""The product's GPT with all sizes distinct, and one forward and backward of it under a plan.

Letters: s sequence, b micro-batch, h hidden, a heads, g key/value heads, d head size, f feed-forward size,
V padded vocabulary, L layers, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megackpt.config.model import ModelConfig
from megackpt.mesh.process_mesh import Axis, single_axis
from megackpt.mesh.sink import AutogradSink
from megackpt.model import GPTChunk, build_chunk
from megackpt.plan import ChunkPlan, chunk_plan
from megackpt.recompute import KeptBytes, RngLedger, Stream, Tape
from megackpt.tensor.context import REPLICATED, TENSOR, TensorParallel

L, A, D, H, F, S, B, VOCAB = 5, 6, 8, 48, 168, 20, 3, 257

POLICIES: dict[str, dict[str, Any]] = {
    "none": {"granularity": "none"},
    "free": {"granularity": "free"},
    "core": {"granularity": "selective"},
    "norms": {"granularity": "selective", "modules": ("layernorm",)},
    "mlp": {"granularity": "selective", "modules": ("mlp",)},
    "modules": {"granularity": "selective", "modules": ("core_attn", "layernorm", "mlp")},
    "up": {"granularity": "selective", "modules": ("mlp.up",)},
    "full": {"granularity": "full"},
    "full-input": {"granularity": "full", "keep": "layer-input"},
    "uniform-2": {"granularity": "full", "num_layers": 2},
    "uniform-3": {"granularity": "full", "num_layers": 3},
    "block-1": {"granularity": "full", "method": "block", "num_layers": 1},
    "block-3": {"granularity": "full", "method": "block", "num_layers": 3},
    "block-3-input": {"granularity": "full", "method": "block", "num_layers": 3, "keep": "layer-input"},
}


def plan_of(policy: str, layers: range = range(L)) -> ChunkPlan:
    return chunk_plan(layers, **POLICIES[policy])


def shape(family: str, **changes: Any) -> ModelConfig:
    """`gpt`: GPT-2 style.  `llama`: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, untied."""
    common: dict[str, Any] = {
        "num_layers": L,
        "hidden_size": H,
        "num_attention_heads": A,
        "ffn_hidden_size": F,
        "seq_length": S,
        "max_position_embeddings": S,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if family == "llama":
        common |= {
            "num_query_groups": 3,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "tie_embeddings": False,
        }
    return ModelConfig(**(common | changes))


@dataclass
class Outcome:
    """Of one forward and backward: everything that recomputation must not change, bit for bit."""

    losses: Tensor
    gradients: dict[str, Tensor]
    streams: dict[str, int]
    default_generator: Tensor

    def differences(self, other: Outcome) -> list[str]:
        """Names of what is not equal to the bit."""
        named = {"losses": self.losses, "default generator": self.default_generator, **self.gradients}
        theirs = {"losses": other.losses, "default generator": other.default_generator, **other.gradients}
        assert named.keys() == theirs.keys()
        found = [name for name, tensor in named.items() if not torch.equal(tensor, theirs[name])]
        return found + [name for name, position in self.streams.items() if other.streams[name] != position]


@dataclass
class Subject:
    """A whole model on one tensor-parallel rank, with its random streams."""

    config: ModelConfig
    axis: Axis = field(default_factory=single_axis)
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.ledger = RngLedger(defaults=False)
        self.ledger.register(Stream(REPLICATED, 11))
        self.ledger.register(Stream(TENSOR, 100 + self.axis.index))
        tp = TensorParallel(
            self.axis, self.sequence_parallel, self.ledger, AutogradSink(), self.dtype, torch.device("cpu"), 1234
        )
        layers = range(self.config.num_layers)
        self.chunk: GPTChunk = build_chunk(self.config, tp, VOCAB, layers, first=True, last=True)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(0, VOCAB, (B, self.config.seq_length + 1), generator=generator)
        self.tokens, self.labels = ids[:, :-1], ids[:, 1:]

    def reset(self) -> None:
        self.chunk.zero_grad()
        self.ledger.load_state_dict({name: 0 for name in self.ledger.state_dict()})
        torch.manual_seed(0)

    def forward(self, plan: ChunkPlan | None, account: KeptBytes | None = None) -> tuple[Tensor, Tape | None]:
        """Sum of the losses, a scalar; `plan` None is plain autograd without any tape."""
        if plan is None:
            return self.chunk(self.tokens, self.labels).sum(), None
        tape = Tape(plan, self.ledger, account=account)
        with tape:
            losses = self.chunk(self.tokens, self.labels)
        return losses.sum(), tape

    def run(self, plan: ChunkPlan | None) -> Outcome:
        self.reset()
        loss, _ = self.forward(plan)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.chunk.named_parameters() if p.grad is not None}
        assert len(gradients) == len(list(self.chunk.parameters()))
        return Outcome(loss.detach(), gradients, self.ledger.state_dict(), torch.get_rng_state())
