"""The event record that a run is predicted to write, from the simulated step."""

from __future__ import annotations

from megackpt.plan.evaluation import Evaluation
from megackpt.plan.events import Event, Record, Span, StepRecord


def predicted(e: Evaluation) -> Record:
    """One step; rank numbers are those of each stage's first rank.

    What a stage waits before an action is part of the action, as in a run's record. What a backward replays is put at
    its start, in one span, though it happens layer by layer.
    """
    ranks = e.devices // e.layout.p
    step = StepRecord()
    for index, stage in enumerate(e.timeline.stages):
        free, rank = 0.0, index * ranks
        rows = zip(stage.actions, stage.starts, stage.ends, stage.levels, strict=True)
        for action, start, end, level in rows:
            step.events.append(
                Event(
                    rank, index, action.kind, action.micro_batch, action.chunk, free, end,
                    wait_s=start - free, saved_bytes=max(0, level - stage.before),
                )
            )  # fmt: skip
            replay = e.replay_of(index, action)
            if replay > 0:
                step.spans.append(Span(rank, index, "replay", f"replay for {action}", start, min(end, start + replay)))
            free = end
    name = f"{e.name}, predicted for {e.machine.name}"
    return Record({"kind": "predicted", "name": name, "stages": e.layout.p}, {0: step})
