"""Sections of a run as they are stored: flag names and values, in YAML, and back without the rest of the run."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from megackpt.config.errors import UsageError
from megackpt.config.flag import Value
from megackpt.config.flags import FLAGS
from megackpt.config.model import ModelConfig
from megackpt.config.resolve import SECTION_TYPES, section_fields
from megackpt.config.sources import Source, expand, read_mapping


def section_document(section: str, config: object) -> dict[str, object]:
    """The flags of one section and their values in ``config``, as YAML would hold them."""
    document: dict[str, object] = {}
    for flag in FLAGS:
        if flag.target is None or not flag.target.startswith(f"{section}."):
            continue
        value = flag.user_value(getattr(config, flag.target.partition(".")[2]))
        document[flag.key] = list(value) or None if isinstance(value, tuple) else value
    if isinstance(config, ModelConfig):
        grouped = config.num_query_groups != config.num_attention_heads
        document["group-query-attention"] = grouped
        document["num-query-groups"] = config.num_query_groups if grouped else None
        padded = config.unpadded_query_groups != config.num_query_groups
        document["unpadded-query-groups"] = config.unpadded_query_groups if padded else None
    return document


def dump_sections(configs: Mapping[str, object]) -> str:
    """YAML of flag names by section."""
    document = {section: section_document(section, config) for section, config in configs.items()}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def read_section(text: str, section: str, **changes: Value) -> object:
    """One section of a stored run, with some fields changed.  Raises UsageError when it is not there whole."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"the stored configuration is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, Mapping) or not isinstance(document.get(section), Mapping):
        raise UsageError(f"the stored configuration has no section {section!r}")
    source = Source("the stored configuration")
    read_mapping(document, source)  # all of it: --vocab-size of the model counts for the data too
    problems = [*source.unknown, *source.refused, *source.errors]
    if problems:
        raise UsageError("\n".join(problems))
    fields = section_fields(expand(source.values))[section] | changes
    try:
        return SECTION_TYPES[section](**fields)
    except TypeError as error:
        raise UsageError(f"the stored configuration of the {section} is not whole: {error}") from None
