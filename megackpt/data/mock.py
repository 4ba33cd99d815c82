"""`--mock-data`: endless synthetic text that a model can learn, made from the sample number alone.

Each token is followed by a fixed other one (an affine map of a small alphabet), except that with probability
`noise` a fresh symbol is drawn. A model that learns the alphabet reaches ln(alphabet) nats per token; one that
learns the rule reaches `entropy()`, far below. The alphabet is spread over the whole vocabulary, so every shard
of a split embedding is used.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from megackpt.config.errors import UsageError
from megackpt.data.dataset import Sample, fingerprint_of, training_sample
from megackpt.data.hashing import hash64

_ALPHABET = 127  # a prime: every multiplier then gives a permutation
_MULTIPLIER = 48
_NOISE_BITS = 53


class MockDataset:
    """`samples` samples of seq_length + 1 tokens; sample i depends on (seed, purpose, i) alone."""

    def __init__(
        self,
        samples: int,
        seq_length: int,
        vocab_size: int,
        seed: int,
        purpose: str = "train",
        noise: float = 0.1,
    ) -> None:
        if vocab_size < 2:
            raise UsageError(f"--mock-data needs a vocabulary of at least 2 tokens, not {vocab_size}")
        self._samples = samples
        self._seq_length = seq_length
        self._seed = seed
        self._purpose = purpose
        self._noise = noise
        self.alphabet = min(_ALPHABET, vocab_size)
        # A multiplier prime to the alphabet's size, so that the rule is a permutation for any vocabulary.
        self._a = next(a for a in range(min(_MULTIPLIER, self.alphabet), 0, -1) if math.gcd(a, self.alphabet) == 1)
        self._ids = np.arange(self.alphabet, dtype=np.int64) * (vocab_size - 1) // (self.alphabet - 1)
        # rule applied j times: x -> power[j] * x + shift[j] (mod alphabet)
        power, shift = np.ones(seq_length + 1, np.int64), np.zeros(seq_length + 1, np.int64)
        for j in range(1, seq_length + 1):
            power[j] = power[j - 1] * self._a % self.alphabet
            shift[j] = (shift[j - 1] * self._a + 1) % self.alphabet
        self._power, self._shift = power, shift
        self.fingerprint = fingerprint_of(
            {"mock": purpose, "seed": seed, "seq_length": seq_length, "vocab_size": vocab_size, "noise": repr(noise)}
        )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        return training_sample(self.text(index))

    def text(self, index: int) -> NDArray[np.int64]:
        """The seq_length + 1 tokens of sample `index`."""
        place = np.arange(self._seq_length + 1, dtype=np.int64)
        group = np.int64(index)
        chance = hash64(self._seed, self._purpose + " mock noise", group, place) >> np.uint64(64 - _NOISE_BITS)
        fresh = chance < np.uint64(round(self._noise * 2**_NOISE_BITS))
        fresh[0] = True
        symbols = hash64(self._seed, self._purpose + " mock symbols", group, place) % np.uint64(self.alphabet)
        # Between fresh symbols the text is the rule applied to the last one.
        last = np.maximum.accumulate(np.where(fresh, place, 0))
        distance = place - last
        values = (self._power[distance] * symbols.astype(np.int64)[last] + self._shift[distance]) % self.alphabet
        out: NDArray[np.int64] = self._ids[values]
        return out

    def entropy(self) -> float:
        """Nats per token that remain for a model which knows the rule: the floor of the loss."""
        other = self._noise / self.alphabet  # a given symbol by noise, the right one included
        right = 1 - self._noise + other
        rest = (self.alphabet - 1) * other
        return -right * math.log(right) - (rest * math.log(other) if rest > 0 else 0.0)
