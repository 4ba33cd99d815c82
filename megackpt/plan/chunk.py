"""Forward and backward of one chunk: the ends, the layers, and groups of layers that are replayed as one step.

A group keeps its input alone.  At the first demand of its backward its forward runs again: keeping everything at once,
or, where the plan goes on inside it, by its inner groups and save-sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megackpt.plan.decision import KEEP, REPLAY, SHARD, ChunkPlan, Decision, Group, SaveSet, group_at
from megackpt.plan.kept import kept_bytes
from megackpt.plan.live import Clock, Layer, Span, backward_span, forward_span, rebuilt_span
from megackpt.plan.profile import LayerProfile, Profile

_INSIDE = SaveSet({}, Decision(masks=REPLAY))  # what a group's replay at once keeps: all but masks
_LAST = "mlp.residual"
_LAST_SAVED = "mlp.down"  # a group's replay ends where this step has saved its input


Spans = dict[tuple[object, ...], Span]


@dataclass
class ChunkModel:
    """Spans of one chunk, each computed once per save-set.

    ``watched``: gradients are added out of place, as under a dispatch mode (``observe.memory_tracker``).  ``split``:
    the backward puts weight gradients off, and their factors are alive at its end.
    """

    profile: Profile
    plan: ChunkPlan
    layers: range
    first: bool
    last: bool
    t: int = 1
    watched: bool = False
    split: bool = False
    _keeps_top: bool = False  # a weight gradient waits for the gradient that the chunk received
    _spans: Spans = field(default_factory=dict)

    # -- the chunk -----------------------------------------------------------------------------------------------

    def forward(self) -> Span:
        """Nothing of the chunk is alive at the start, though a received input is counted at once; at the end what is
        kept, and on a chunk that is not the last its output."""
        clock = Clock()
        clock.live += 0 if self.first else self.profile.boundary_bytes
        clock.touch(0, "forward")
        if self.first:
            clock.run(self._forward(self._end("embedding")))
        self._forward_of(clock, self.plan.groups, self.layers)
        if self.last:
            self._run_on(clock, self.layers, self._forward(self._end("head")))
            clock.live += self.tail_bytes - self.profile.head.steps[-1].output_bytes
        return clock.span()

    def backward(self) -> Span:
        """What is kept is alive at the start, and the gradient of the chunk's output if it is not the last, held by
        who received it; at the end that and the gradient of its input if it is not the first."""
        clock = Clock()
        if self.last:
            head = self._end("head")
            clock.live += self.profile.head.steps[-1].output_bytes  # the gradient of the losses
            clock.run(self._backward(head))
            clock.live -= self.tail_bytes
        for unit in self._ahead():
            clock.run(self._rebuilt(self._layer(unit.start)), f"layer {unit.start} ahead")
        self._backward_of(clock, self.plan.groups, self.layers)
        if self.first:
            held = not (self.last or self.layers)  # as the gradient of a last layer's output is
            clock.run(self._backward(self._end("embedding"), held=held, input_gradient=False))
        if not (self.first or self.last or self.layers):
            clock.live += self.profile.boundary_bytes  # an empty chunk hands on the gradient that it received
        clock.live += self.profile.boundary_bytes * self._keeps_top
        return clock.span()

    @property
    def tail_bytes(self) -> int:
        """The masked sum after the loss keeps which tokens count: one byte each."""
        return self.profile.head.steps[-1].held_bytes // 8

    def kept(self) -> int:
        """What is kept between the two, as ``Tape.saved_bytes`` counts it."""
        total = kept_bytes(self.profile.embedding, self.plan.save_set("embedding")) if self.first else 0
        place = self.layers.start
        while place < self.layers.stop:
            group = group_at(self.plan.groups, place)
            if group is not None:
                total, place = total + self._input_bytes(place), group.last + 1
                continue
            layer = self._layer(place)
            total += kept_bytes(layer.profile, layer.save_set, input_choice=layer.input_choice, t=self.t)
            place += 1
        if self.last:
            head = self._end("head")
            total += kept_bytes(head.profile, head.save_set, input_choice=head.input_choice, t=self.t)
        return total

    # -- layers and groups ---------------------------------------------------------------------------------------

    def _forward_of(self, clock: Clock, groups: Sequence[Group], layers: range) -> None:
        """The layers in order; the input of the first stays, whoever keeps it."""
        place = layers.start
        while place < layers.stop:
            group = group_at(groups, place)
            before = range(layers.start, place)
            if group is None:
                self._run_on(clock, before, self._forward(self._layer(place)), f"layer {place}")
                place += 1
                continue
            self._run_on(clock, before, self._group_forward(group), f"layers {group.first} to {group.last}")
            place = group.last + 1

    def _run_on(self, clock: Clock, before: range, span: Span, where: str = "") -> None:
        """A span after those layers; their output goes once it is done with, and what its tier has here stays."""
        dropped = bool(before) and self._choice(before.stop) != KEEP
        clock.live += self._input_bytes(before.stop) * dropped
        clock.run(span, where)
        clock.live -= self.profile.boundary_bytes * dropped

    def _group_forward(self, group: Group) -> Span:
        """The first forward of a group: nothing stays but its output."""
        clock = Clock()
        nothing = SaveSet({}, Decision(REPLAY, REPLAY, REPLAY))
        for layer in range(group.first, group.last + 1):
            clock.run(self._forward(Layer(self.profile.block, nothing, t=self.t), bare=True))
            if layer > group.first:
                clock.live -= self.profile.boundary_bytes
        return clock.span()

    def _ahead(self) -> list[range]:
        """Single layers that are rebuilt before their gradient is there.  A group is rebuilt at the first demand, which
        comes at once if it is the last of the chunk, and is not rebuilt ahead if it is not alone in it."""
        if self.last:
            return []
        return [unit for unit in self.plan.units_ahead(self.layers) if group_at(self.plan.groups, unit.start) is None]

    def _backward_of(self, clock: Clock, groups: Sequence[Group], layers: range) -> None:
        """The layers in reverse.  A group's replay waits for the first demand among its members; a tree of groups is
        walked with a list, since one for a single slot is as deep as its chain is long."""
        waiting = _tops(groups, layers)
        due: list[Group] = []  # to be replayed at the next demand, the outermost first
        while waiting:
            members, group = waiting.pop()
            if group is None:
                place = members.start
                ahead = not due and members in self._ahead()
                span = self._backward(self._layer(place), self._replay(due), held=self._top_is_held(place), ahead=ahead)
                clock.run(span, f"layer {place}")
                clock.live -= self._share_of_group(place)
                due = []
                continue
            due.append(group)
            if group.inner is not None:
                waiting += _tops(group.inner, members)
                continue
            whole = Layer(self.profile.block, _INSIDE, t=self.t)
            for place in reversed(members):
                span = self._backward(whole, self._replay(due), held=self._top_is_held(place))
                clock.run(span, f"layer {place}")
                clock.live -= self._share_of_group(place)
                due = []
            # the group's own input is let go by its first layer, which counts it as its own

    def _share_of_group(self, place: int) -> int:
        """What goes beside its input after the first layer of a group: this rank's part, if it was kept in parts."""
        first = any(group.first == place for group in self.plan.groups)
        return self._input_bytes(place) if first and self._choice(place) != KEEP else 0

    def _replay(self, due: Sequence[Group]) -> Callable[[Clock], None] | None:
        def replay(inner: Clock) -> None:
            for group in due:
                if group in self.plan.groups and self._choice(group.first) != KEEP:
                    inner.live += self.profile.boundary_bytes  # its input comes back whole
                    inner.touch(0, f"input of layer {group.first}")
                inner.run(self._replayed_forward(group), f"replay of layers {group.first} to {group.last}")

        return replay if due else None

    def _top_is_held(self, place: int) -> bool:
        """The executor holds the gradient that it received while the chunk's backward runs."""
        return not self.last and place == self.layers.stop - 1

    def _replayed_forward(self, group: Group) -> Span:
        """The second forward of a group, from its input up to the last tensor that anybody saved."""
        clock, members = Clock(), range(group.first, group.last + 1)
        if group.inner is None:
            whole = Layer(self.profile.block, _INSIDE, t=self.t)
            for place in members[:-1]:
                clock.run(self._forward(whole), f"layer {place}")
            clock.run(self._forward(whole, until=_LAST_SAVED), f"layer {group.last}")
            return clock.span()
        last, inner = _tops(group.inner, members)[-1]
        self._forward_of(clock, group.inner, range(members.start, last.start))
        if inner is not None:
            clock.run(self._group_forward(inner), f"layers {inner.first} to {inner.last}")
            clock.live -= self.profile.boundary_bytes  # it ends before its output
        else:
            layer = self._layer(group.last)
            clock.run(self._forward(layer, until=_LAST_SAVED), f"layer {group.last}")
            if layer.save_set[_LAST].masks == KEEP:  # then the mask is saved as well
                clock.live += self.profile.block[_LAST].mask_bytes
        return clock.span()

    # -- pieces, cached ------------------------------------------------------------------------------------------

    def _layer(self, place: int) -> Layer:
        return Layer(self.profile.block, self.plan.save_set(f"layers.{place}"), self._choice(place), self.t)

    def _end(self, kind: str) -> Layer:
        profile: LayerProfile = getattr(self.profile, kind)
        choice = self._choice(self.layers.stop) if kind == "head" else KEEP
        return Layer(profile, self.plan.save_set(kind), choice, self.t)

    def _choice(self, place: int) -> str:
        """What the layer before `place` decided about its output; a group's output stays."""
        before = place - 1
        if before < self.layers.start:
            return KEEP
        for group in self.plan.groups:
            if group.first <= before <= group.last:
                return group.output if before == group.last else KEEP
        return self.plan.save_set(f"layers.{before}")[_LAST].output

    def _input_bytes(self, place: int) -> int:
        """What stays here of the input of what comes at ``place``: all of it, this rank's share, or nothing."""
        choice = self._choice(place)
        return {KEEP: self.profile.boundary_bytes, SHARD: -(-self.profile.boundary_bytes // self.t)}.get(choice, 0)

    def _forward(self, layer: Layer, *, until: str = "", bare: bool = False) -> Span:
        key = ("F", layer.profile.kind, layer.save_set, layer.input_choice, until, bare)
        if key not in self._spans:
            self._spans[key] = forward_span(layer, until=until, bare=bare)
        return self._spans[key]

    def _rebuilt(self, layer: Layer) -> Span:
        key = ("A", layer.profile.kind, layer.save_set, layer.input_choice)
        if key not in self._spans:
            self._spans[key] = rebuilt_span(layer)
        return self._spans[key]

    def _backward(
        self,
        layer: Layer,
        need: Callable[[Clock], None] | None = None,
        *,
        held: bool = False,
        input_gradient: bool = True,
        ahead: bool = False,
    ) -> Span:
        key = ("B", layer.profile.kind, layer.save_set, layer.input_choice, held, input_gradient, ahead)
        span = self._spans.get(key) if need is None else None
        if span is None:
            span = backward_span(
                layer, on_first_need=need, watched=self.watched, input_gradient=input_gradient, held=held,
                split=self.split, ahead=ahead,
            )  # fmt: skip
        if need is None:
            self._spans[key] = span
        self._keeps_top = self._keeps_top or span.keeps_top
        return span


def _tops(groups: Sequence[Group], layers: range) -> list[tuple[range, Group | None]]:
    """The layers cut into outermost groups and single layers, in order."""
    cut: list[tuple[range, Group | None]] = []
    place = layers.start
    while place < layers.stop:
        group = group_at(groups, place)
        stop = place + 1 if group is None else group.last + 1
        cut.append((range(place, stop), group))
        place = stop
    return cut
