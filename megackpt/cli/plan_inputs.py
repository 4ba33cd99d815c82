"""From the words after ``megackpt plan`` to what the planner takes: a model, a layout, a plan, a machine, a budget.

Words of three kinds: a launch script (first, no dashes), flags of this command (``OWN``), and the trainer's flags.
Of those only what sizes a run counts; data, learning rates and log files are left alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megackpt.config.errors import UsageError
from megackpt.config.flag import Layer, Value
from megackpt.config.flags import BY_KEY
from megackpt.config.launch_script import LaunchScript, read_launch_script
from megackpt.config.parse import ENVIRONMENT
from megackpt.config.recompute import RecomputeConfig
from megackpt.config.resolve import sections
from megackpt.config.run import RunConfig
from megackpt.config.sources import Source, merge, read_words, read_yaml
from megackpt.plan.accelerators import GIB, Machine, machine_named
from megackpt.plan.decision import Plan
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy, plan_for

# Sections of RunConfig that do not change bytes or seconds.
WITHOUT_SIZE = ("optimizer", "train", "data", "checkpoint", "logging")
FIT_TO_PLAN: Layer = {"lr": 1.0, "train-iters": 1, "mock-data": True}

# Flags that the planner understands, whether this version's trainer runs them or not.
DISTRIBUTED, CONTEXT = "use-distributed-optimizer", "context-parallel-size"
CHUNK_LAYERS, CHUNKS = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
HALF = "fp16"
PLANNED = (DISTRIBUTED, CONTEXT, CHUNK_LAYERS, CHUNKS, HALF)

# Vocabularies of tokenizers that scripts name without saying their size.
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


@dataclass(frozen=True)
class Inputs:
    """What to plan, and what the user should be told about how it was read."""

    model: ModelNumbers
    layout: Layout
    plan: Plan
    machine: Machine
    budget_bytes: int
    notices: tuple[str, ...]


def read_inputs(own: argparse.Namespace, words: Sequence[str], env: Mapping[str, str]) -> Inputs:
    """Raises UsageError for everything that cannot be planned."""
    script = None if own.script is None else read_launch_script(own.script, env)
    values, notices = _values(words, env, script)
    world = _world(own, script, values, notices)
    config, vocab = _config(values, world, notices)
    machine = _machine(own.machine, config, values)
    model = model_numbers(config, vocab)
    try:
        layout = _layout(config, values, machine)
        plan = _plan(config, layout)
    except ValueError as error:
        raise UsageError(str(error)) from None
    budget = machine.memory_bytes if own.memory_budget_gib is None else round(own.memory_budget_gib * GIB)
    return Inputs(model, layout, plan, machine, budget, tuple(notices))


# -- flags ------------------------------------------------------------------------------------------------------------


def _values(
    words: Sequence[str], env: Mapping[str, str], script: LaunchScript | None
) -> tuple[dict[str, Value], list[str]]:
    """Flag values that size a run, weakest source first: YAML, MEGACKPT_ARGS, script, command line."""
    notices: list[str] = []
    from_env = read_words(shlex.split(env.get(ENVIRONMENT, "")), ENVIRONMENT)
    command = read_words(words)
    sources = [from_env, command]
    if script is not None:
        sources.insert(1, read_words(script.words, script.path))
        notices += script.notices
    files = [read_yaml(path) for source in sources for path in source.config_files]
    planned = [_planned(source) for source in (*files, *sources)]
    _refuse([*files, from_env, command], bool(command.values.get("ignore-unsupported")), notices)
    if script is not None:
        _list_unsupported(sources[1], notices)
    layers = [_sized(source.values) | own for source, own in zip([*files, *sources], planned, strict=True)]
    merged: dict[str, Value] = {}
    for key in PLANNED:
        for layer in layers:
            if key in layer:
                merged[key] = layer.pop(key)
    return merge(layers) | merged, notices


def _planned(source: Source) -> dict[str, Value]:
    """Takes out of a source what only the planner understands: refusals of those flags are its own business."""
    found: dict[str, Value] = {}
    for key in PLANNED:
        if key in source.values:
            found[key] = source.values.pop(key)
        elif key in source.seen:
            found[key] = source.seen[key]
            name = BY_KEY[key].name
            source.refused = [text for text in source.refused if not text.removeprefix(source.prefix).startswith(name)]
    return found
