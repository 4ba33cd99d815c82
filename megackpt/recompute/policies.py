"""Policies in the manner of JAX: functions from the name of a step to a decision, which compose.

    plan = save_only_these_names("core", "up") | save_boundaries()
    with Tape(plan):
        ...

A policy is a plan for any model whose steps have names, made before anybody knows which names there are: the tape asks
it as the steps run.  A name matches a step by the step's own name (``attn.core``) or with its place before it
(``layers.3.attn.core``).

JAX names values; here a name stands for a step.  What is *saved* of a step is its output and what autograd saves inside
it, so a saved step is never replayed; ``save_boundaries`` saves outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from megackpt.plan import KEEP, REPLAY, ChunkPlan, Decision, SaveSet
from megackpt.plan.decision import KEEP_ALL, OFFLOAD_HOST, REPLAY_ALL
from megackpt.plan.steps import BLOCK, EMBED

Decide = Callable[[str, str], Decision]
"""Name and address of a step -> decision."""

_BOUNDARY = Decision(output=KEEP, internals=REPLAY, masks=REPLAY)
_OFFLOAD = Decision(output=OFFLOAD_HOST, internals=OFFLOAD_HOST, masks=KEEP)
BOUNDARIES = tuple(step.name for step in (*EMBED, *BLOCK) if step.boundary)


class _Decisions(Mapping[str, Decision]):
    """The decisions at one address, asked for as they are needed."""

    def __init__(self, decide: Decide, address: str) -> None:
        self._decide = decide
        self._address = address
        self._known: dict[str, Decision] = {}

    def __getitem__(self, name: str) -> Decision:
        decision = self._known.get(name)
        if decision is None:
            decision = self._known[name] = self._decide(name, self._address)
        return decision

    def get(self, name: str, default: object = None) -> Decision:  # type: ignore[override]
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


@dataclass(frozen=True)
class Policy(ChunkPlan):
    """A plan by rule.  Call it, hand it to a :class:`Tape`, or freeze it for known addresses with :meth:`plan`.

    ``a | b`` keeps what either keeps, ``a & b`` what both keep; outputs, internals and masks each for themselves.
    """

    decide: Decide = field(kw_only=True)
    _sets: dict[str, SaveSet] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, name: str, address: str = "") -> Decision:
        """The decision for the step ``name`` of ``address``."""
        return self.decide(name, address)

    def save_set(self, address: str) -> SaveSet:
        save_set = self._sets.get(address)
        if save_set is None:
            save_set = self._sets[address] = SaveSet(_Decisions(self.decide, address))
        return save_set

    @property
    def keeps_all(self) -> bool:
        return False  # nobody knows before the steps have named themselves

    def plan(self, steps: Mapping[str, Collection[str]]) -> ChunkPlan:
        """The plan as plain data (JSON, digest) for the steps named, by address."""
        return ChunkPlan(
            {address: SaveSet({name: self(name, address) for name in names}) for address, names in steps.items()}
        )

    def __or__(self, other: Policy) -> Policy:
        return either(self, other)

    def __and__(self, other: Policy) -> Policy:
        return both(self, other)


def save_if(predicate: Callable[[str, str], bool]) -> Policy:
    """Saves the steps for which ``predicate(name, address)`` holds; the rest is replayed."""
    return Policy(decide=_If(predicate))


def save_everything() -> Policy:
    """As without recompute."""
    return Policy(decide=_Among((), KEEP_ALL, KEEP_ALL))


def save_nothing() -> Policy:
    """Only what enters the tape's first steps is kept.  The first demand of the backward then rebuilds the whole chain
    at once, so use it for short stretches, or with ``|``."""
    return Policy(decide=_Among((), KEEP_ALL, REPLAY_ALL))


def save_only_these_names(*names: str) -> Policy:
    """Saves the named steps, replays the rest."""
    return Policy(decide=_Among(names, KEEP_ALL, REPLAY_ALL))


def save_anything_except_these_names(*names: str) -> Policy:
    """Replays the named steps, saves the rest."""
    return Policy(decide=_Among(names, REPLAY_ALL, KEEP_ALL))


def save_boundaries(*names: str) -> Policy:
    """Saves the outputs alone of the named steps; without names, of those that come out of a tensor-parallel reduction
    in our transformer layers (``attn.residual``, ``mlp.residual``, ``embed.dropout``)."""
    return Policy(decide=_Among(names or BOUNDARIES, _BOUNDARY, REPLAY_ALL))


def save_and_offload_only_these_names(saved: Collection[str], offloaded: Collection[str]) -> Policy:
    """Saves the one, sends the other to host memory (the tape needs a tier ``offload_host``), replays the rest."""
    away = Policy(decide=_Among(tuple(offloaded), _OFFLOAD, REPLAY_ALL))
    return save_only_these_names(*saved) | away


def either(*policies: Policy) -> Policy:
    """Keeps what any of them keeps; what none keeps but one offloads is offloaded."""
    return Policy(decide=_Merged(policies, first=KEEP, last=REPLAY))


def both(*policies: Policy) -> Policy:
    """Keeps only what all of them keep; what none replays but one offloads is offloaded."""
    return Policy(decide=_Merged(policies, first=REPLAY, last=KEEP))


@dataclass(frozen=True)
class _If:
    predicate: Callable[[str, str], bool]

    def __call__(self, name: str, address: str) -> Decision:
        return KEEP_ALL if self.predicate(name, address) else REPLAY_ALL


@dataclass(frozen=True)
class _Among:
    names: Collection[str]
    then: Decision
    otherwise: Decision

    def __call__(self, name: str, address: str) -> Decision:
        found = name in self.names or (address != "" and f"{address}.{name}" in self.names)
        return self.then if found else self.otherwise


@dataclass(frozen=True)
class _Merged:
    """The choice ``first`` wins, then any other than ``last``."""

    policies: tuple[Policy, ...]
    first: str
    last: str

    def __call__(self, name: str, address: str) -> Decision:
        asked = [policy(name, address) for policy in self.policies]
        return Decision(
            self._choose([d.output for d in asked]),
            self._choose([d.internals for d in asked]),
            self._choose([d.masks for d in asked]),
        )

    def _choose(self, choices: list[str]) -> str:
        return min(choices, key=lambda choice: (choice != self.first, choice == self.last))
