"""From merged flag values to the sections of a RunConfig, with Megatron's defaults where one follows from others."""

from __future__ import annotations

from collections.abc import Mapping

from megackpt.config.batch import BatchConfig
from megackpt.config.data import DataConfig
from megackpt.config.errors import UsageError
from megackpt.config.flag import Layer, Value
from megackpt.config.flags import BY_KEY, FLAGS
from megackpt.config.model import ModelConfig
from megackpt.config.observe import LoggingConfig
from megackpt.config.optimizer import OptimizerConfig
from megackpt.config.parallel import ParallelConfig
from megackpt.config.persist import CheckpointConfig
from megackpt.config.precision import PrecisionConfig
from megackpt.config.recompute import RecomputeConfig
from megackpt.config.schedule import TrainConfig

SECTION_TYPES: Mapping[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "recompute": RecomputeConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


def sections(values: Layer, world_size: int) -> dict[str, object]:
    """The sections by name.  ``values`` are expanded and merged.  Raises UsageError on any contradiction in one."""
    missing = [flag.name for flag in FLAGS if flag.required and flag.key not in values]
    if missing:
        raise UsageError(f"Missing: {', '.join(missing)}.")
    fields = section_fields(values)
    fields["parallel"]["world_size"] = world_size
    made: dict[str, object] = {"parallel": ParallelConfig(**fields.pop("parallel"))}  # type: ignore[arg-type]
    parallel = made["parallel"]
    assert isinstance(parallel, ParallelConfig)
    micro = fields["batch"]["micro_batch_size"]
    assert isinstance(micro, int)
    fields["batch"].setdefault("global_batch_size", micro * parallel.data)
    for name, given in fields.items():
        made[name] = SECTION_TYPES[name](**given)
    return made


def section_fields(values: Layer) -> dict[str, dict[str, Value]]:
    """What ``values`` say of each section's fields, by section name.  Raises UsageError on contradictions."""
    fields: dict[str, dict[str, Value]] = {name: {} for name in SECTION_TYPES}
    for key, value in values.items():
        flag = BY_KEY[key]
        if flag.target is not None:
            section, name = flag.target.split(".")
            fields[section][name] = flag.field_value(value)
    if "vocab-size" in values:
        fields["data"]["vocab_size"] = values["vocab-size"]
    _query_groups(values, fields["model"])
    return fields


def _query_groups(values: Layer, model: dict[str, Value]) -> None:
    groups, heads = values.get("num-query-groups"), values.get("num-attention-heads")
    if values.get("group-query-attention"):
        model["num_query_groups"] = 1 if groups is None else groups
    elif groups is not None and groups != heads:
        raise UsageError(
            f"--num-query-groups {groups} has no effect without --group-query-attention: add it, or leave"
            " --num-query-groups out."
        )
