"""From the words after ``megackpt plan`` to what the planner takes: a model, a layout, a plan, a machine, a budget.

Words of three kinds: a launch script (first, no dashes), flags of this command (``OWN``), and the trainer's flags.
Of those only what sizes a run counts; data, learning rates and log files are left alone.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megackpt.config.errors import UsageError
from megackpt.config.flag import Layer, Value, key_of
from megackpt.config.flags import BY_KEY
from megackpt.config.from_checkpoint import checkpoint_vocabulary, with_checkpoint
from megackpt.config.launch_script import LaunchScript, read_launch_script
from megackpt.config.parse import ENVIRONMENT
from megackpt.config.resolve import sections
from megackpt.config.run import RunConfig
from megackpt.config.sources import Source, merge, read_words, read_yaml
from megackpt.observe.auto import Task, refuse_impossible
from megackpt.observe.numbers import layout_numbers, model_numbers, policy_of, split_of
from megackpt.observe.stored_plan import check_shards, read_plan
from megackpt.plan.accelerators import GIB, Machine, machine_named
from megackpt.plan.choose.choose import Options
from megackpt.plan.decision import Plan
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import plan_for

# Sections of RunConfig that do not change bytes or seconds.
WITHOUT_SIZE = ("optimizer", "train", "data", "checkpoint", "logging")
SIZED_ANYWAY = ("peak-tflops", "reset-attention-mask", "reset-position-ids")  # of those sections, all the same
FIT_TO_PLAN: Layer = {"lr": 1.0, "train-iters": 1, "data-path": ("data",)}

# Flags that the planner reads itself, whether this version's trainer runs them or not.
CONTEXT = "context-parallel-size"
TOKENIZER, MERGES, PADDED = "tokenizer-type", "merge-file", "padded-vocab-size"
PLANNED = (CONTEXT, TOKENIZER, MERGES, PADDED)

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
    options: Options  # what the recommended plan may use
    notices: tuple[str, ...]
    config: RunConfig
    vocab: int  # before padding


def read_inputs(own: argparse.Namespace, words: Sequence[str], env: Mapping[str, str]) -> Inputs:
    """Raises UsageError for everything that cannot be planned."""
    script = None if own.script is None else read_launch_script(own.script, env)
    values, notices = _values(words, env, script)
    world = _world(own, script, values, notices)
    config, vocab = _config(values, world, notices)
    machine = _machine(own.machine, config, values)
    model = model_numbers(config, vocab)
    asked = config.recompute.memory_budget_gib if own.memory_budget_gib is None else own.memory_budget_gib
    budget = machine.memory_bytes if asked is None else round(asked * GIB)
    options = Options(
        split=own.plan_split == "auto",
        slots=own.plan_slots == "on",
        ahead=own.plan_ahead == "on",
        offload=own.plan_offload,
        keep_gathered=False,
    )
    try:
        layout = _layout(config, values, machine)
        plan = _plan(config, layout, Task(model, layout, machine, budget))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Inputs(model, layout, plan, machine, budget, options, tuple(notices), config, vocab)


# -- flags ------------------------------------------------------------------------------------------------------------


def _values(
    words: Sequence[str], env: Mapping[str, str], script: LaunchScript | None
) -> tuple[dict[str, Value], list[str]]:
    """Flag values that size a run, weakest source first: YAML, MEGACKPT_ARGS, script, command line."""
    notices: list[str] = []
    lines = [(ENVIRONMENT, shlex.split(env.get(ENVIRONMENT, ""))), ("", list(words))]
    if script is not None:
        lines.insert(1, (script.path, list(script.words)))
        notices += script.notices
    own: dict[str, Value] = {}
    sources = []
    for name, line in lines:
        rest, found = _planned(line)
        own |= found
        sources.append(read_words(rest, name))
    files = [read_yaml(path) for source in sources for path in source.config_files]
    strict = [source for source in (*files, *sources) if script is None or source is not sources[1]]
    _refuse(strict, any(source.values.get("ignore-unsupported") for source in sources), notices)
    if script is not None:
        _list_unsupported(script, sources[1], notices)
    values = merge(source.values for source in (*files, *sources))
    if values.get("use-checkpoint-args"):
        vocab = checkpoint_vocabulary(values)
        values, overruled = with_checkpoint(values)
        notices += overruled
        if vocab is not None:  # whatever tokenizer it came from
            own = {key: value for key, value in own.items() if key == CONTEXT}
            values["vocab-size"] = vocab
    return own | merge([FIT_TO_PLAN, _sized(values)]), notices


def _planned(words: Sequence[str]) -> tuple[list[str], dict[str, Value]]:
    """The words without the flags of PLANNED, and their values."""
    rest: list[str] = []
    found: dict[str, Value] = {}
    place = 0
    while place < len(words):
        name, equals, attached = words[place].partition("=")
        key = key_of(name) if name.startswith("--") else ""
        place += 1
        if key not in PLANNED:
            rest.append(words[place - 1])
            continue
        flag = BY_KEY[key]
        raw = [attached] if equals else []
        if not equals and flag.kind != "switch" and place < len(words) and not words[place].startswith("--"):
            raw = [words[place]]
            place += 1
        found[key] = flag.convert(raw) if flag.kind != "text" else " ".join(raw)
    return rest, found


def _sized(values: Layer) -> dict[str, Value]:
    """Only flags that change bytes or seconds, and the vocabulary."""
    targets = {key: (BY_KEY[key].target or "").split(".")[0] for key in values}
    kept = {key: value for key, value in values.items() if targets[key] not in WITHOUT_SIZE}
    return kept | {key: values[key] for key in SIZED_ANYWAY if key in values}


def _refuse(sources: Iterable[Source], ignore: bool, notices: list[str]) -> None:
    """Say everything that cannot be used, all at once; with ``ignore``, refused flags become notices."""
    fatal: list[str] = []
    for source in sources:
        fatal += [*source.unknown, *source.errors]
        if ignore:
            notices += [f"left out of the plan: {text}" for text in source.refused]
        else:
            fatal += source.refused
    if fatal:
        raise UsageError("\n  ".join(["this command line cannot be planned:", *fatal] if len(fatal) > 1 else fatal))


def _list_unsupported(script: LaunchScript, source: Source, notices: list[str]) -> None:
    """A script's flags that this trainer does not have are listed, and planned without."""
    sizing = [text for text in source.errors if not _about_variable(script, text)]
    if sizing:
        raise UsageError("\n  ".join([f"{script.path} cannot be planned:", *sizing]))
    for text in (*source.refused, *source.unknown, *source.errors):
        notices.append(f"left out of the plan: {text.removeprefix(source.prefix)}")


def _about_variable(script: LaunchScript, text: str) -> bool:
    """An error about a flag without effect on a plan (a data path that only the cluster knows, say)."""
    names = [flag for flag in BY_KEY.values() if flag.name in text.split()]
    return bool(names) and all((f.target or "data.x").split(".")[0] in WITHOUT_SIZE for f in names)


# -- the run ----------------------------------------------------------------------------------------------------------


def _number(values: Layer, key: str, default: int) -> int:
    value = values.get(key, default)
    return value if isinstance(value, int) else default


def _world(own: argparse.Namespace, script: LaunchScript | None, values: Layer, notices: list[str]) -> int:
    """Ranks of the whole run, by --world-size, else as the script starts them, else one copy of the model."""
    if own.world_size is not None:
        return int(own.world_size)
    one = _number(values, CONTEXT, 1)
    for key in ("tensor-model-parallel-size", "pipeline-model-parallel-size"):
        one *= _number(values, key, 1)
    started = None if script is None else script.world_size
    if script is not None and started is not None and started >= one:
        notices.append(f"--world-size {started}, as {script.path} starts it")
        return started
    known = "--world-size is not given" if started is None else f"the script starts {started} ranks only"
    notices.append(f"{known}: planned for one copy of the model, {one} ranks; give --world-size")
    return one


def _config(values: Layer, world: int, notices: list[str]) -> tuple[RunConfig, int]:
    """The run, and its vocabulary before padding."""
    given = dict(values)
    context = _number(given, CONTEXT, 1)
    if context < 1 or world % context:
        raise UsageError(f"--world-size {world} is not divisible by --context-parallel-size {context}.")
    if context > 1 and BY_KEY[CONTEXT].state == "later":
        notices.append(f"--{CONTEXT} is planned; this version's trainer does not run it")
    vocab = _vocabulary(given)
    given["vocab-size"] = vocab
    rest = {key: value for key, value in given.items() if key not in PLANNED}
    return RunConfig(**sections(rest, world // context)), vocab  # type: ignore[arg-type]


def _vocabulary(values: Mapping[str, Value]) -> int:
    tokenizer = str(values.get(TOKENIZER, ""))
    for key in ("vocab-size", PADDED):
        if key in values:
            return _number(values, key, 0) + (key == "vocab-size" and tokenizer == "NullTokenizer")
    if not tokenizer and MERGES in values:
        tokenizer = "GPT2BPETokenizer"
    if tokenizer in VOCABULARIES:
        return VOCABULARIES[tokenizer]
    raise UsageError(
        "--vocab-size is needed: how many tokens there are before padding"
        + (f" (the plan does not open the files of {tokenizer})." if tokenizer else ".")
    )


def _layout(config: RunConfig, values: Layer, machine: Machine) -> Layout:
    device = config.parallel.device or ("cpu" if "cpu" in machine.name.lower() else "cuda")
    return replace(layout_numbers(config, split_of(config), device), c=_number(values, CONTEXT, 1))


def _plan(config: RunConfig, layout: Layout, task: Task) -> Plan:
    """The plan of the flags, or the one in --recompute-plan."""
    path = config.recompute.plan_file
    if config.recompute.granularity == "auto":
        refuse_impossible(task)
        return task.choose().choice.plan
    if path is None:
        return plan_for(layout.pieces, policy_of(config))
    plan = read_plan(path, layout.pieces)
    if layout.t > 1:
        check_shards(path, plan, layout.sequence_parallel)
    return plan


def _machine(name: str, config: RunConfig, values: Layer) -> Machine:
    """A row of the table or a file, with the peak of --peak-tflops where that is given."""
    try:
        machine = machine_named(name)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--machine: {error}.") from None
    peak = values.get("peak-tflops")
    if not isinstance(peak, int | float):
        return machine
    kind = config.precision.params_dtype
    sources = {**machine.sources, "peak_flops": "--peak-tflops"}
    return replace(machine, peak_flops={**machine.peak_flops, kind: peak * 1e12}, sources=sources)
