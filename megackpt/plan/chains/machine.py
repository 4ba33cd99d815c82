"""An abstract machine that runs schedules of chains; it knows nothing of how a plan was made.

``schedule`` writes a plan out as actions, ``execute`` runs actions one by one, refuses what is not possible, and
counts.  The machine has one working place, which holds the state that the next forward reads, slots in two tiers, the
tapes, and the gradient.  A state's bytes count once, however many of these hold it.

=========  ====================================================================================================
``F3``     run stage 3 from the working state 3 without keeping anything; state 4 is the working one
``T3``     the same, keeping its tape
``E3``     keep its tape only, ending at the last tensor that the stage saves: the tail of a replay
``S3``     hold the working state 3 in a slot (``S3@disk``: write it there)
``L3``     make the held state 3 the working one (``L3@disk``: read it)
``D3``     empty the slot of state 3
``turn``   the loss is computed from the chain's output and gives the output's gradient
``B3``     run the backward of stage 3 with its tape and the gradient of its output; both die
=========  ====================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megackpt.plan.chains.types import DISK, RAM, Chain, ChainPlan, Drop, Keep, Move, length_of

FORWARD, TAPE, TAIL, STORE, LOAD, FREE, TURN, BACKWARD = "F", "T", "E", "S", "L", "D", "turn", "B"


class Action(NamedTuple):
    kind: str
    at: int  # a stage for F, T, E, B, a state for the others
    tier: str = RAM

    def __str__(self) -> str:
        if self.kind == TURN:
            return TURN
        return f"{self.kind}{self.at}" + ("" if self.tier == RAM else f"@{self.tier}")


class MachineError(ValueError):
    """The actions are no schedule of the chain: they use what is not there, or leave something undone."""


@dataclass(frozen=True)
class Report:
    """What a schedule took.  Bytes include the chain's input."""

    peak_bytes: int
    forward_peak_bytes: int  # until the loss
    backward_peak_bytes: int  # from the loss on
    held_bytes: int  # when the forward has ended: what waits for the backward, the output included
    forwards: tuple[int, ...]  # how often each stage ran, its taping included
    replays: int  # how often a held state was taken up again
    slots: int  # most states held in RAM slots at once
    disk_slots: int
    writes: int  # to disk
    reads: int
    forward_cost: float
    backward_cost: float
    transfer_cost: float

    @property
    def cost(self) -> float:
        return self.forward_cost + self.backward_cost + self.transfer_cost

    @property
    def extra_forwards(self) -> int:
        """Stage executions beyond one each."""
        return sum(self.forwards) - len(self.forwards)


def schedule(plan: ChainPlan) -> Iterator[Action]:
    """The plan's actions in order.  A slot is emptied as soon as its state is taken up for the last time."""
    moves, stage, held = plan.moves, 0, ""  # held: the tier in which the first move's input waits already
    turned = False
    todo: list[tuple[Move, int]] = []  # what the backward still has to do, the next one last
    while True:
        for place, move in enumerate(moves):
            if isinstance(move, Drop):
                if held != move.tier:
                    yield Action(STORE, stage, move.tier)
                yield from (Action(FORWARD, i) for i in range(stage, stage + move.length))
            else:
                yield Action(TAIL if turned and place == len(moves) - 1 else TAPE, stage)
            todo.append((move, stage))
            stage, held = stage + length_of(move), ""
        if not turned:
            yield Action(TURN, stage)
            turned = True
        while todo and isinstance(todo[-1][0], Keep):
            yield Action(BACKWARD, todo.pop()[1])
        if not todo:
            return
        move, stage = todo.pop()
        assert isinstance(move, Drop)
        yield Action(LOAD, stage, move.tier)
        moves, held = move.inner, move.tier
        if not isinstance(moves[0], Drop) or moves[0].tier != held:
            yield Action(FREE, stage, held)
            held = ""


def run(chain: Chain, plan: ChainPlan, *, write_cost: float = 0.0, read_cost: float = 0.0) -> Report:
    """Execute a plan of the chain.  Raises MachineError."""
    if len(plan) != len(chain):
        raise MachineError(f"the plan covers {len(plan)} stages, the chain has {len(chain)}")
    return execute(chain, schedule(plan), write_cost=write_cost, read_cost=read_cost)


def execute(chain: Chain, actions: Iterable[Action], *, write_cost: float = 0.0, read_cost: float = 0.0) -> Report:
    """Execute actions.  Raises MachineError on an action that needs what is not there, on a backward out of order,
    and on anything undone or left behind at the end."""
    machine = _Machine(chain)
    for action in actions:
        machine.do(action)
    return machine.report(write_cost, read_cost)


class _Machine:
    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.working: int | None = 0
        self.slots: dict[str, set[int]] = {RAM: set(), DISK: set()}
        self.tapes: dict[int, bool] = {}  # stage -> whether the tape holds the stage's output
        self.holders: Counter[int] = Counter({0: 2})  # state -> who holds it in RAM: the caller, and the working place
        self.live = self.peak = chain.input_bytes  # the peak of this phase
        self.forward_peak = self.held = 0
        self.turned = False
        self.gradient = len(chain)  # the state whose gradient is there, once turned
        self.forwards = [0] * len(chain)
        self.most = {RAM: 0, DISK: 0}
        self.replays = self.writes = self.reads = 0
        self.forward_cost = self.backward_cost = 0.0

    def do(self, action: Action) -> None:
        kind, at, tier = action
        if kind in (FORWARD, TAPE, TAIL):
            self.forward(kind, at)
        elif kind == STORE:
            self.store(at, tier)
        elif kind == LOAD:
            self.load(at, tier)
        elif kind == FREE:
            self.need(at in self.slots[tier], f"state {at} is not held in {tier}")
            self.slots[tier].remove(at)
            if tier == RAM:
                self.release(at)
        elif kind == TURN:
            self.turn()
        elif kind == BACKWARD:
            self.backward(at)
        else:
            raise MachineError(f"{action}: unknown action")
        self.touch()

    def need(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise MachineError(otherwise)

    def hold(self, state: int) -> None:
        if self.holders[state] == 0:
            self.live += self.chain.state_bytes(state)
        self.holders[state] += 1

    def release(self, state: int) -> None:
        self.holders[state] -= 1
        if self.holders[state] == 0:
            self.live -= self.chain.state_bytes(state)

    def work_on(self, state: int | None) -> None:
        if state is not None:
            self.hold(state)
        if self.working is not None:
            self.release(self.working)
        self.working = state

    def touch(self, beyond: int = 0) -> None:
        self.peak = max(self.peak, self.live + beyond)

    def forward(self, kind: str, stage: int) -> None:
        self.need(0 <= stage < len(self.chain), f"{kind}{stage}: there is no stage {stage}")
        self.need(self.working == stage, f"{kind}{stage}: state {stage} is not the working one ({self.working})")
        numbers = self.chain.stages[stage]
        self.forwards[stage] += 1
        self.forward_cost += numbers.forward_cost
        if kind == FORWARD:
            self.touch(numbers.output_bytes + numbers.forward_transient)
            self.work_on(stage + 1)
            return
        self.need(stage not in self.tapes, f"{kind}{stage}: its tape is there already")
        self.hold(stage)
        self.live += numbers.tape_bytes - numbers.output_bytes
        self.tapes[stage] = numbers.reads_output
        if numbers.reads_output:
            self.hold(stage + 1)
        if kind == TAIL:
            self.forward_cost -= numbers.spared_cost
        self.work_on(stage + 1 if kind == TAPE else None)
        self.touch(numbers.tape_transient)

    def store(self, state: int, tier: str) -> None:
        self.need(self.working == state, f"S{state}: state {state} is not the working one ({self.working})")
        self.need(state not in self.slots[tier], f"S{state}: state {state} is held in {tier} already")
        self.slots[tier].add(state)
        self.most[tier] = max(self.most[tier], len(self.slots[tier]))
        if tier == RAM:
            self.hold(state)
        else:
            self.writes += 1

    def load(self, state: int, tier: str) -> None:
        self.need(state in self.slots[tier], f"L{state}: state {state} is not held in {tier}")
        self.replays += 1
        self.reads += tier == DISK
        self.work_on(state)

    def turn(self) -> None:
        end = len(self.chain)
        self.need(not self.turned, "turn: the loss is computed already")
        self.need(self.working == end, f"turn: the chain's output is not the working state ({self.working})")
        self.forward_peak, self.held, self.turned = self.peak, self.live, True
        self.live += self.chain.gradient_bytes(end)
        self.peak = 0
        self.touch()  # the loss still has the output
        self.work_on(None)

    def backward(self, stage: int) -> None:
        self.need(self.turned, f"B{stage}: the loss is not computed yet")
        self.need(self.gradient == stage + 1, f"B{stage}: the next backward is that of stage {self.gradient - 1}")
        self.need(stage in self.tapes, f"B{stage}: stage {stage} has no tape")
        self.work_on(None)
        numbers = self.chain.stages[stage]
        self.live += self.chain.gradient_bytes(stage)
        self.touch(numbers.backward_transient)
        if self.tapes.pop(stage):
            self.release(stage + 1)
        self.release(stage)
        self.live -= numbers.tape_bytes - numbers.output_bytes + numbers.gradient_bytes
        self.gradient = stage
        self.backward_cost += numbers.backward_cost

    def report(self, write_cost: float, read_cost: float) -> Report:
        self.need(self.turned and self.gradient == 0, f"the backward of stage {self.gradient - 1} was never run")
        left = [f"state {i} in {tier}" for tier, states in self.slots.items() for i in sorted(states)]
        self.need(not left and not self.tapes, f"left behind: {', '.join(left)}")
        assert self.live == self.chain.input_bytes + self.chain.input_gradient_bytes
        return Report(
            max(self.forward_peak, self.peak), self.forward_peak, self.peak, self.held,
            tuple(self.forwards), self.replays, self.most[RAM], self.most[DISK], self.writes, self.reads,
            self.forward_cost, self.backward_cost, self.writes * write_cost + self.reads * read_cost,
        )  # fmt: skip
