"""The profile: what one step of a layer costs in bytes and operations, for one rank and one micro-batch.

One type serves three sources: the closed forms of this room (`profile`), the real model traced on fake tensors, and
measurements of any module.  Planner, predictor and simulator read nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megackpt.plan import costs
from megackpt.plan.demand import present_steps
from megackpt.plan.numbers import Layout, ModelNumbers, Widths
from megackpt.plan.operations import operations
from megackpt.plan.paces import kernel_of
from megackpt.plan.steps import BLOCK, EMBED, HEAD, HEAD_CHUNK, Step

KINDS = ("embedding", "block", "head")


@dataclass(frozen=True)
class StepCost:
    """One step.  Bytes are of this rank and one micro-batch; FLOPs are those that the kernels execute.

    What is alive while the forward runs, beside what was alive before: at most output + internals + masks +
    ``workspace_bytes``; while its backward runs, beside the output's gradient and what was saved: at most
    ``backward_workspace_bytes``, the gradient it returns included, and the mask where it is drawn again.
    """

    name: str
    reads: tuple[str, ...] = ("input",)
    output_bytes: int = 0
    internal_bytes: int = 0  # what autograd saves inside, masks apart
    mask_bytes: int = 0  # dropout masks, if stored
    held_bytes: int = 0  # other arguments that stay whatever is decided: token ids, targets
    saves_input: bool = False  # its backward needs what it read first
    output_is_internal: bool = False  # one of its internals is its output's own storage
    output_is_saved: bool = False  # somebody's backward needs its output
    passes_gradient: bool = False  # the gradient of its output is, without a copy, that of what it read last
    boundary: bool = False
    flops: int = 0
    backward_flops: int = 0
    bytes_moved: int = 0
    operations: int = 0  # that the host dispatches, see operations.py
    backward_operations: int = 0
    collective: str | None = None  # over tp: all_gather, reduce_scatter, all_reduce
    backward_collective: str | None = None
    collective_bytes: int = 0  # of the whole tensor, on any rank
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    kernel: str = ""  # its kind, see paces.py
    replay_workspace_bytes: int = 0  # what waits while it is replayed, beside what its forward needs
    seconds: float | None = None  # measured, where somebody did
    backward_seconds: float | None = None


@dataclass(frozen=True)
class LayerProfile:
    """The steps of a layer that exist, in the order of its forward, and the bytes of its input."""

    kind: str
    steps: tuple[StepCost, ...]
    input_bytes: int

    def __post_init__(self) -> None:
        known = {"input"}
        for step in self.steps:
            unknown = set(step.reads) - known
            if unknown:
                raise ValueError(f"{step.name} reads {', '.join(sorted(unknown))}, which no step before it makes")
            known.add(step.name)

    def __getitem__(self, name: str) -> StepCost:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"{name} is none of {', '.join(s.name for s in self.steps)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.name for step in self.steps)

    @property
    def held(self) -> frozenset[str]:
        """Steps whose output is one of their internals: a fused core's backward reads what it gave."""
        return frozenset(step.name for step in self.steps if step.output_is_internal)

    def bytes_of(self, name: str) -> int:
        """Bytes of a step's output, or of the layer's ``input``."""
        return self.input_bytes if name == "input" else self[name].output_bytes

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "input_bytes": self.input_bytes, "steps": [asdict(s) for s in self.steps]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> LayerProfile:
        steps = tuple(StepCost(**{**row, "reads": tuple(row["reads"])}) for row in data["steps"])
        return LayerProfile(data["kind"], steps, data["input_bytes"])


@dataclass(frozen=True)
class Profile:
    """The three layer classes of a GPT, and what crosses a stage boundary."""

    embedding: LayerProfile
    block: LayerProfile
    head: LayerProfile

    @property
    def boundary_bytes(self) -> int:
        """The hidden state that one stage sends to the next."""
        return self.block.input_bytes

    def to_json(self) -> dict[str, Any]:
        return {"version": 1, **{kind: getattr(self, kind).to_json() for kind in KINDS}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Profile:
        """Raises ValueError for another version."""
        if data.get("version") != 1:
            raise ValueError(f"profile version {data.get('version')!r}; this code reads version 1")
        return Profile(**{kind: LayerProfile.from_json(data[kind]) for kind in KINDS})


def absent_steps(model: ModelNumbers, layout: Layout) -> frozenset[str]:
    """Steps of the table that this model and layout do not have."""
    absent = set[str]()
    if not model.qk_norm:
        absent.add("attn.qknorm")
    if not layout.sequence_parallel:
        absent |= {"attn.gather", "mlp.gather", "head.gather"}
    if layout.t == 1:
        absent |= {"attn.reduce", "mlp.reduce"}
    if model.positions != "rope":
        absent.add("attn.rope")
    if not model.hidden_dropout:
        absent.add("embed.dropout")
    return frozenset(absent)


def profile(model: ModelNumbers, layout: Layout) -> Profile:
    """Closed forms for GPT and Llama shapes.  Raises ValueError when something does not divide over the ranks."""
    widths = Widths.of(model, layout)
    absent = absent_steps(model, layout)
    tables = {"embedding": EMBED, "block": BLOCK, "head": (*HEAD[:-2], HEAD_CHUNK) if model.loss_chunk else HEAD}
    ids = 8 * widths.rows
    inputs = {"embedding": ids, "block": widths.shard * widths.hidden * widths.act}
    inputs["head"] = inputs["block"]
    made = {}
    for kind, table in tables.items():
        rows = costs.of(kind, model, layout, widths)
        for name, row in rows.items():
            row["operations"], row["backward_operations"] = operations(name, model, layout)
            row["kernel"] = kernel_of(name, model, layout)
        made[kind] = LayerProfile(kind, _layer(present_steps(table, absent), rows), inputs[kind])
    return Profile(**made)


def _layer(steps: tuple[Step, ...], rows: Mapping[str, Mapping[str, Any]]) -> tuple[StepCost, ...]:
    """Table and closed forms joined.  Whether an output is saved follows from who reads it."""
    saves = {step.name: bool(rows[step.name].get("saves_input", step.saves_input)) for step in steps}
    saved = {name for step in steps if saves[step.name] for name in step.reads[:1]}
    return tuple(
        StepCost(
            **{
                "name": step.name,
                "reads": step.reads,
                "boundary": step.boundary,
                "output_is_saved": step.name in saved or bool(rows[step.name].get("output_is_internal")),
                **rows[step.name],
                "saves_input": saves[step.name],
            }
        )
        for step in steps
    )
