"""The text of --pipeline-model-parallel-layout, as Megatron writes it: ``Et*3|(tt|)*29,t|L``.

``|`` ends a chunk, ``E`` is the embedding, ``t`` a layer, ``L`` the head and the loss; ``x*3`` and ``(xy|)*3`` repeat,
commas and blanks mean nothing.  Chunks stand in the order of the model: the first chunk of every stage, then the
second of every stage.
"""

from __future__ import annotations

from megackpt.config.errors import UsageError

FLAG = "--pipeline-model-parallel-layout"
MOST = 100_000  # letters that a layout may come to: far above any model, far below what memory holds
DEEPEST = 50  # brackets in one another


def layer_counts(text: str) -> tuple[int, ...]:
    """Layers of every chunk in the order of the model.  Raises UsageError for a text that is no layout, or one whose
    ends of the model are not at its ends."""
    chunks = _Reader(text).read().split("|")
    for part, name, place in (("E", "the embedding", 0), ("L", "the loss", len(chunks) - 1)):
        found = [index for index, chunk in enumerate(chunks) if part in chunk]
        if found != [place] or chunks[place].count(part) > 1:
            end = "first" if part == "E" else "last"
            raise UsageError(f"{FLAG} {text!r}: {part} ({name}) belongs once into the {end} chunk, and nowhere else.")
    if chunks[0][0] != "E" or chunks[-1][-1] != "L":
        raise UsageError(f"{FLAG} {text!r}: E comes before all layers and L after all of them.")
    return tuple(chunk.count("t") for chunk in chunks)


class _Reader:
    """Reads one text from left to right; repetitions may stand in one another."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def read(self) -> str:
        whole = self._sequence()
        if self.at < len(self.text):
            raise self._wrong("a ) without its (")
        return whole

    def _sequence(self) -> str:
        parts = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            parts.append(self._item())
            if sum(map(len, parts)) > MOST:
                raise self._wrong(f"more than {MOST} letters so far")
        return "".join(parts)

    def _item(self) -> str:
        char = self.text[self.at]
        if char == "m":
            raise self._wrong("megackpt has no multi-token-prediction layers (m)")
        if char not in "EtL|(, ":
            raise self._wrong(f"{char!r} is none of E, t, L, |, *, ( and )")
        self.at += 1
        if char in ", ":
            return ""
        if char == "(":
            self.depth += 1
            if self.depth > DEEPEST:
                raise self._wrong(f"more than {DEEPEST} brackets in one another")
            char = self._sequence()
            if self.at == len(self.text):
                raise self._wrong("a ( without its )")
            self.at += 1
            self.depth -= 1
        times = self._times()
        if len(char) * times > MOST:
            raise self._wrong(f"repeated, this comes to more than {MOST} letters")
        return char * times

    def _times(self) -> int:
        if self.text[self.at : self.at + 1] != "*":
            return 1
        start = self.at = self.at + 1
        while self.text[self.at : self.at + 1] in tuple("0123456789"):
            self.at += 1
        if start == self.at:
            raise self._wrong("a number belongs after *")
        return int(self.text[start : self.at][:9])  # longer is too much anyway

    def _wrong(self, why: str) -> UsageError:
        return UsageError(f"{FLAG} {self.text!r}, at character {self.at + 1}: {why}.")
