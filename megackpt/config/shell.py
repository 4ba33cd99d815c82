"""The statements of a shell script, followed without running anything.

Assignments change variables; ``if``, ``case`` and ``&&`` take the branch that known values say (commands are taken to
succeed, files not to exist); a loop's body is read once.  What is left are the simple commands, as words.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megackpt.config.shell_words import Shell, closing

__all__ = ["Shell", "statements"]

_OPERATORS = (";;", "&&", "||", "&>>", "&>", ">>", ">&", "<<<", "<<", "<", ">", ";", "|", "&", "(", ")", "\n")
_REDIRECTS = ("&>>", "&>", ">>", ">&", "<<<", "<", ">")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_COMPARE = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def tokens(text: str) -> Iterator[tuple[bool, str]]:
    """(is an operator, raw text); comments, redirections and here-documents are left out."""
    text = text.replace("\r\n", "\n")
    place, skip, heredoc = 0, False, ""
    while place < len(text):
        if text.startswith("\\\n", place):
            place += 2
        elif text[place] in " \t":
            place += 1
        elif text[place] == "#":
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
        elif (found := next((o for o in _OPERATORS if text.startswith(o, place)), None)) is not None:
            place += len(found)
            if found == "<<":
                name = re.compile(r"-?\s*(['\"]?)(\w+)\1").match(text, place)
                heredoc, place = (name.group(2), name.end()) if name else ("", place)
            elif found in _REDIRECTS:
                skip = True
            else:
                yield True, found
            if found == "\n" and heredoc:
                end_line = re.compile(rf"^\s*{heredoc}\s*$", re.M).search(text, place)
                place, heredoc = (end_line.end() if end_line else len(text)), ""
        else:
            end = _word_end(text, place)
            word = text[place:end]
            place = end
            if skip or (word.isdigit() and text[end : end + 1] in ("<", ">")):
                skip = False
                continue
            yield False, word


def _word_end(text: str, place: int) -> int:
    start = place
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 2
        elif char == "(" and re.fullmatch(r"[A-Za-z_]\w*\+?=", text[start:place]):
            place = _array_end(text, place + 1)
        elif char in "'\"`$":
            place = closing(text, place)
        elif char in " \t\n;&|<>()":
            break
        else:
            place += 1
    return place


def _array_end(text: str, place: int) -> int:
    fresh = True  # a comment may begin here
    while place < len(text) and text[place] != ")":
        char = text[place]
        if char == "#" and fresh:
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
            continue
        fresh = char.isspace()
        place = place + 2 if char == "\\" else closing(text, place) if char in "'\"`$" else place + 1
    return place + 1


@dataclass
class _Frame:
    """An open ``if``, loop or ``case``."""

    kind: str
    outer: bool  # whether what surrounds it is carried out
    active: bool
    taken: bool = False  # some branch was
    subject: str = ""  # of a case
    in_pattern: bool = False


class _Reader:
    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.frames: list[_Frame] = []
        self.status = True
        self.joined = ""  # && or || before this statement
        self.in_test = False  # inside [[ ... ]]

    @property
    def active(self) -> bool:
        return all(frame.active for frame in self.frames)

    def statement(self, words: list[str], end: str) -> list[str]:
        """Carry out one statement; the expanded words if it is a command."""
        frame = self.frames[-1] if self.frames else None
        if frame is not None and frame.kind == "case" and frame.in_pattern:
            return self._pattern(frame, words, end)
        if not words:
            return []
        if (handled := self._keyword(words, end)) is not None:
            return handled
        wanted = {"": True, "&&": self.status, "||": not self.status}[self.joined]
        if not self.active or not wanted:
            return []
        return self._simple(words)

    def _keyword(self, words: list[str], end: str) -> list[str] | None:
        first, rest = words[0], words[1:]
        frame = self.frames[-1] if self.frames else None
        if first in ("if", "while", "until", "for", "case"):
            return self._open(first, rest, end)
        if first in ("{", "}", "!", "do", "time", "exec"):
            return self.statement(rest, end)
        if frame is None or first not in ("then", "elif", "else", "fi", "done", "esac"):
            return None
        if first in ("fi", "done", "esac"):
            self.frames.pop()
            self.status = True
            return []
        if first == "then":
            frame.active = frame.outer and not frame.taken and self.status
            frame.taken |= frame.active
        elif first == "elif":
            frame.active = frame.outer and not frame.taken  # while its condition is read
            self.status, self.joined = True, ""
        else:
            frame.active = frame.outer and not frame.taken
        self.joined = "" if first != "elif" else self.joined
        return self.statement(rest, end)

    def _open(self, kind: str, rest: list[str], end: str) -> list[str]:
        frame = _Frame("if" if kind == "if" else kind, self.active, True)
        self.frames.append(frame)
        self.joined = ""
        if kind == "case":
            frame.subject = self.shell.text(rest[0]) if rest else ""
            frame.in_pattern, frame.active = True, False
        elif kind == "for":
            values = [v for word in rest[2:] for v in self.shell.expand(word)] if frame.outer else []
            if values:
                self.shell.variables[rest[0]] = values[0]
                if len(values) > 1:
                    self.shell.say(f"the loop over {rest[0]} is read for its first value, {values[0]}")
        else:
            return self.statement(rest, end)
        return []

    def _pattern(self, frame: _Frame, words: list[str], end: str) -> list[str]:
        if words[:1] == ["esac"]:
            self.frames.pop()
        elif end in (")", "|") and words:
            hit = fnmatch.fnmatchcase(frame.subject, self.shell.text(words[-1]))
            if hit and frame.outer and not frame.taken:
                frame.active = frame.taken = True
            if end == ")":
                frame.in_pattern = False
        return []

    def _simple(self, words: list[str]) -> list[str]:
        shell = self.shell
        first = words[0]
        if first in ("[", "[[", "test") or self.in_test:
            self.in_test = (first == "[[" and words[-1] != "]]") or (self.in_test and words[-1] != "]]")
            asked = list(shell.unset)  # asking whether a variable is set does not need it
            self.status = self._test([shell.text(word) for word in words if word not in ("[", "]", "[[", "]]", "test")])
            shell.unset[:] = asked
            return []
        self.status = True
        if first in _DECLARE:
            for word in words[1:]:
                shell.assign(word)
            return []
        place = 0
        while place < len(words) and shell.assign(words[place]):
            place += 1
        command = [field for word in words[place:] for field in shell.expand(word)]
        if command[:1] in (["source"], ["."]):
            shell.say(f"{' '.join(command)} is not followed: give what it sets in the environment")
            return []
        if command[:1] == ["unset"]:
            for name in command[1:]:
                shell.variables.pop(name, None)
            return []
        return command

    def _test(self, words: list[str]) -> bool:
        if words[:1] == ["!"]:
            return not self._test(words[1:])
        for joint in ("-o", "-a"):
            if joint in words[1:-1]:
                place = words.index(joint, 1)
                left, right = self._test(words[:place]), self._test(words[place + 1 :])
                return left or right if joint == "-o" else left and right
        if len(words) == 2 and words[0] in ("-z", "-n", "-v"):
            if words[0] == "-v":
                return words[1] in self.shell.variables
            return bool(words[1]) == (words[0] == "-n")
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return fnmatch.fnmatchcase(words[0], words[2]) == (words[1] != "!=")
        if len(words) == 3 and words[1] in _COMPARE:
            return _compared(words[0], _COMPARE[words[1]], words[2])
        if len(words) == 1:
            return bool(words[0])
        return False  # a file that only the cluster has, or a test that is not understood


def _compared(left: str, how: str, right: str) -> bool:
    try:
        a, b = int(left), int(right)
    except ValueError:
        return False
    return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[how]


def statements(shell: Shell, text: str) -> Iterator[list[str]]:
    """The commands that the text would run, expanded; assignments happen in ``shell`` on the way."""
    reader = _Reader(shell)
    words: list[str] = []
    for is_operator, raw in [*tokens(text), (True, "\n")]:
        if not is_operator:
            words.append(raw)
            continue
        command = reader.statement(words, raw)
        if command:
            yield command
        words = []
        frame = reader.frames[-1] if reader.frames else None
        if raw == ";;" and frame is not None and frame.kind == "case":
            frame.in_pattern, frame.active = True, False
        reader.joined = raw if raw in ("&&", "||") else ""
