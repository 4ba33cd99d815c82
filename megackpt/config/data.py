"""What to train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.config.checks import at_least
from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import GPT2_BPE, TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Indexed datasets, or made-up samples."""

    data_path: tuple[str, ...] = ()
    """One prefix of .bin/.idx, or weight, prefix, weight, prefix, ..."""
    train_data_path: tuple[str, ...] = ()
    """Data of training alone, like data_path; then the other two name those of validation and test."""
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    multiple_validation_sets: bool = False
    """Each dataset of valid_data_path is evaluated on its own."""
    mock_data: bool = False
    split: str = "969,30,1"
    """Shares of training, validation and test; any numbers."""
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    """File of the tokenizer."""
    vocab_file: str | None = None
    """vocab.json of GPT-2's tokenizer."""
    merge_file: str | None = None
    """merges.txt of GPT-2's tokenizer; with it alone the tokenizer is GPT-2's."""
    tokenizer_hf_include_special_tokens: bool = False
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: tuple[str, ...] = ()
    """() = Megatron's seven."""
    vocab_size: int | None = None
    """Vocabulary of NullTokenizer, TikTokenizer and of mock data."""
    data_cache_path: str | None = None
    """Folder of the index caches; None = beside the data."""
    num_workers: int = 2
    """Background readers per process; 0 reads in the training thread."""
    eod_mask_loss: bool = False
    """The loss skips end-of-document tokens."""
    reset_position_ids: bool = False
    """Positions count anew in every document."""
    reset_attention_mask: bool = False
    """A token sees its own document only."""

    def __post_init__(self) -> None:
        self._check_source()
        if parse_split(self.split)[0] <= 0:
            raise UsageError(f"--split {self.split} leaves nothing to train on: its first number must be above 0.")
        at_least("--num-workers", self.num_workers, 0)
        at_least("--vocab-size", self.vocab_size, 1)
        if self.tokenizer is None and self.vocab_size is None:
            raise UsageError(
                "A run without --tokenizer-type needs --vocab-size: nothing else says how many tokens there are."
            )

    @property
    def tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer that the flags name, if any.  Raises UsageError for one that lacks its files."""
        kind = self.tokenizer_type or (GPT2_BPE if self.merge_file is not None else None)
        if kind is None:
            return None
        return TokenizerConfig(
            type=kind,
            model=self.tokenizer_model,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            vocab_size=self.vocab_size,
            include_special_tokens=self.tokenizer_hf_include_special_tokens,
            tiktoken_pattern=self.tiktoken_pattern,
            tiktoken_num_special_tokens=self.tiktoken_num_special_tokens,
            tiktoken_special_tokens=self.tiktoken_special_tokens,
        )

    def _check_source(self) -> None:
        by_split = {name: tuple(getattr(self, f"{name}_data_path")) for name in ("train", "valid", "test")}
        whole = [("--data-path", self.data_path), ("--train-data-path", self.train_data_path)]
        given = ["--mock-data"] * self.mock_data + [f"{flag} {' '.join(path)}" for flag, path in whole if path]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} contradict each other: give one of them.")
        if not given:
            raise UsageError("Data are missing: give --data-path PREFIX, or --mock-data for made-up samples.")
        for name in ("valid", "test"):
            if by_split[name] and not self.train_data_path:
                raise UsageError(f"--{name}-data-path {' '.join(by_split[name])} needs --train-data-path.")
        for flag, path in (("--data-path", self.data_path), *((f"--{n}-data-path", p) for n, p in by_split.items())):
            if path:
                parse_data_path(path, flag)
        resets = [n for n in ("reset_position_ids", "reset_attention_mask") if getattr(self, n)]
        if self.mock_data and resets:
            flags = " and ".join("--" + name.replace("_", "-") for name in resets)
            raise UsageError(f"{flags} with --mock-data has no effect: made-up samples have no documents.")
        if self.multiple_validation_sets:
            if not self.valid_data_path:
                raise UsageError("--multiple-validation-sets needs --valid-data-path with a prefix for each set.")
            if len(self.valid_data_path) > 1 and any(w is not None for w, _ in parse_data_path(self.valid_data_path)):
                raise UsageError(
                    "--multiple-validation-sets evaluates each set alone: leave the weights of --valid-data-path out."
                )


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of training, validation and test, summing to 1; fewer than three numbers leave the rest at 0."""
    words = [word.strip() for word in text.split(",")]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise UsageError(f"--split takes numbers separated by commas, such as 949,50,1; got {text!r}.") from None
    if len(numbers) > 3:
        raise UsageError(f"--split takes at most 3 numbers (training, validation, test); got {text!r}.")
    if any(number < 0 for number in numbers) or not 0 < sum(numbers) < math.inf:
        raise UsageError(f"--split takes numbers of at least 0, one of them above 0; got {text!r}.")
    train, validation, test = [*numbers, 0.0, 0.0][:3]
    total = train + validation + test
    return train / total, validation / total, test / total


def parse_data_path(data_path: Sequence[str], flag: str = "--data-path") -> tuple[tuple[float | None, str], ...]:
    """(weight, prefix) of every dataset, from `w1 p1 w2 p2 ...`, where the weights sum to 1, or from prefixes alone,
    where they are None: each dataset counts by its size."""
    if len(data_path) == 1 or not any(map(_is_number, data_path[::2])):
        for word in data_path if len(data_path) > 1 else ():
            if _is_number(word):
                raise UsageError(
                    f"{flag}: {data_path[0]!r} stands where the weight of {data_path[1]} is expected; with weights"
                    " each prefix has its own before it."
                )
        return tuple((None if len(data_path) > 1 else 1.0, prefix) for prefix in data_path)
    if len(data_path) % 2:
        raise UsageError(
            f"{flag} has {len(data_path)} words: give prefixes alone, or weights and prefixes in turn, such as"
            f" {flag} 30 corpus_a 70 corpus_b."
        )
    pairs = [(_weight(w, prefix, flag), prefix) for w, prefix in zip(data_path[::2], data_path[1::2], strict=True)]
    total = sum(weight for weight, _ in pairs)
    if total <= 0:
        raise UsageError(f"{flag}: all weights are 0; at least one must be above 0.")
    if not math.isfinite(total):
        raise UsageError(f"{flag}: the sum of the weights is not a finite number.")
    return tuple((weight / total, prefix) for weight, prefix in pairs)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _weight(word: str, prefix: str, flag: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        raise UsageError(
            f"{flag}: {word!r} stands where the weight of {prefix} is expected; with several datasets each"
            " prefix has its weight before it."
        ) from None
    if weight < 0 or not math.isfinite(weight):
        raise UsageError(f"{flag}: the weight {word} of {prefix} must be finite and at least 0.")
    return weight
