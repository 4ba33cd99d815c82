"""From a command line to a RunConfig.  Strength: defaults < YAML (``--config``) < ``MEGACKPT_ARGS`` < command line.

``parse`` is the function; ``configure`` is what a command calls: it also answers ``--help`` and ``--print-config``,
and ends a process whose run is refused with code 2, on rank 0 with the reason.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megackpt.config.errors import UsageError
from megackpt.config.flag import Value
from megackpt.config.flags import BY_KEY
from megackpt.config.from_checkpoint import with_checkpoint
from megackpt.config.help import field_default, help_text
from megackpt.config.resolve import sections
from megackpt.config.run import RunConfig
from megackpt.config.sources import Source, merge, read_words, read_yaml

ENVIRONMENT = "MEGACKPT_ARGS"
USAGE_ERROR = 2
FIRST_SPEAKS_S = 10.0


@dataclass(frozen=True)
class Parsed:
    """A run and what its user should be told."""

    config: RunConfig
    notices: tuple[str, ...]
    print_config: bool


def parse(argv: Sequence[str], env: Mapping[str, str], world_size: int) -> RunConfig:
    """The run that ``argv`` (without the program's name) asks for.  Raises UsageError if it cannot start."""
    return parse_all(argv, env, world_size).config


def parse_all(argv: Sequence[str], env: Mapping[str, str], world_size: int) -> Parsed:
    """Like ``parse``, with notices: flags without effect, old names, ignored flags."""
    try:
        from_env = read_words(shlex.split(env.get(ENVIRONMENT, "")), ENVIRONMENT)
    except ValueError as error:
        raise UsageError(f"{ENVIRONMENT} cannot be split into words: {error}.") from None
    command = read_words(argv)
    files = [read_yaml(path) for path in (*from_env.config_files, *command.config_files)]
    sources = [*files, from_env, command]
    values = merge(source.values for source in sources)
    ignored = _problems(sources, ignore=bool(values.get("ignore-unsupported")))
    if values.get("use-checkpoint-args"):
        values, overruled = with_checkpoint(values)
        ignored = [*ignored, *overruled]
    config = RunConfig(**sections(values, world_size))  # type: ignore[arg-type]
    notices = (*ignored, *_notices(sources), *_about(config), *_idle(values, config))
    return Parsed(config, notices, bool(values.get("print-config")))


def configure(argv: Sequence[str], env: Mapping[str, str], *, rank: int, world_size: int) -> RunConfig:
    """The run, for a command.  Ends the process (SystemExit) with 0 after --help and --print-config, and with 2 if
    the run is refused; only rank 0 says anything."""
    quiet = rank != 0
    if wants_help(argv):
        if not quiet:
            print(help_text(), end="")
        raise SystemExit(0)
    try:
        parsed = parse_all(argv, env, world_size)
    except UsageError as error:
        refuse(error, rank)
    if not quiet:
        for notice in parsed.notices:
            print(f"megackpt: {notice}", file=sys.stderr)
    if parsed.print_config:
        if not quiet:
            print(parsed.config.to_yaml(), end="")
        raise SystemExit(0)
    return parsed.config


def wants_help(argv: Sequence[str]) -> bool:
    """``argv`` asks for the help page, whatever else it says."""
    return "-h" in argv or "--help" in argv


def refuse(error: UsageError, rank: int) -> NoReturn:
    """End this process with code 2; rank 0 says why."""
    say_once(error, rank)
    raise SystemExit(USAGE_ERROR)


def say_once(error: Exception, rank: int) -> None:
    """Rank 0 prints what all ranks know. The others wait: a launcher ends rank 0 when another rank has failed, and on a
    busy host it may not have spoken by then. They need not be done waiting; it ends them when rank 0 is gone.
    """
    if rank == 0:
        print(f"megackpt: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(FIRST_SPEAKS_S)


def _problems(sources: Sequence[Source], ignore: bool) -> list[str]:
    """Raise for everything that cannot be used, all at once; with ``ignore``, refused flags become notices."""
    unknown = [text for source in sources for text in source.unknown]
    errors = [text for source in sources for text in source.errors]
    refused = list(dict.fromkeys(text for source in sources for text in source.refused))
    fatal = [*unknown, *errors] if ignore else [*unknown, *errors, *refused]
    if fatal and refused and not ignore:
        fatal.append("--ignore-unsupported runs without refused flags; docs/flags.md lists all flags.")
    if len(fatal) > 1:
        raise UsageError("\n  ".join(["this command line cannot be used:", *fatal]))
    if fatal:
        raise UsageError(fatal[0])
    return [f"warning: ignored, {text}" for text in refused]


def _notices(sources: Sequence[Source]) -> list[str]:
    accepted = sorted({name for source in sources for name in source.accepted})
    given = dict.fromkeys(key for source in sources for key, value in source.values.items() if value is not False)
    notices = [f"warning: {BY_KEY[key].warning}" for key in given if BY_KEY[key].warning]
    if accepted:
        notices.append(f"accepted, no effect here: {', '.join(accepted)}")
    return notices


_DYNAMIC = ("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
_OF_ADAM = ("adam-beta1", "adam-beta2", "adam-eps")
_OF_ROPE = ("rotary-base", "rotary-percent", "rotary-seq-len-interpolation-factor", "use-rope-scaling",
            "rope-scaling-factor")  # fmt: skip


def _idle(values: Mapping[str, Value], config: RunConfig) -> list[str]:
    """Flags that were given and that nothing reads, as launch scripts are full of them.  What is as it is by default is
    not worth a word: a printed configuration names everything."""
    fp16, fixed = config.precision.params_dtype == "fp16", config.precision.loss_scale is not None
    optimizer, positions = config.optimizer.optimizer, config.model.position_embedding_type
    rope, stretches = positions == "rope", config.model.use_rope_scaling
    reasons = (
        (_DYNAMIC, not fp16, "no loss scale changes without --fp16"),
        (_DYNAMIC, fp16 and fixed, "--loss-scale is a fixed one"),
        (_OF_ADAM, optimizer != "adam", f"--optimizer is {optimizer}"),
        (("sgd-momentum",), optimizer != "sgd", f"--optimizer is {optimizer}"),
        (_OF_ROPE, not rope, f"--position-embedding-type is {positions}"),
        (("rope-scaling-factor",), rope and not stretches, "it is a detail of --use-rope-scaling"),
        (("recompute-ahead-layers",), config.parallel.pipeline == 1, "one stage waits for no gradient"),
        (("sequence-parallel", "distribute-saved-activations"), config.parallel.tensor == 1,
         "--tensor-model-parallel-size is 1"),
        (("eod-mask-loss", "split", "data-cache-path"), config.data.mock_data, "--mock-data reads no documents"),
    )  # fmt: skip
    notices = []
    for keys, idle, why in reasons:
        other = [key for key in keys if key in values and values[key] != field_default(BY_KEY[key])]
        given = ", ".join(f"--{key}" for key in other)
        if idle and given:
            notices.append(f"no effect here: {given} ({why})")
    return notices


def _about(config: RunConfig) -> list[str]:
    """Legal settings that do less than their user may think."""
    notices: list[str] = []
    core_only = set(config.recompute.modules) <= {"core_attn", "attn.core"}
    if config.recompute.granularity == "selective" and core_only and config.model.fused_attention:
        notices.append(
            "selective recomputation of core_attn saves almost nothing here: fused attention stores no s x s matrices"
            " and rebuilds them in backward anyway. Name other modules (--recompute-modules layernorm mlp), or use"
            " --recompute-granularity free or full."
        )
    return notices
