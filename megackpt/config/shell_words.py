"""The words of a shell script: where they end, and what they become.  Nothing is executed.

Handles quotes, arrays, ``${NAME:-default}`` and its relatives, and arithmetic.  A command substitution becomes its
command's name in braces: only the machine that runs it knows its output.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping

Variable = str | list[str]

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#]+)(?:\[([^]]*)\])?(.*)", re.S)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=(.*)", re.S)
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def closing(text: str, place: int) -> int:
    """Where the quoted or ``$`` piece that begins at ``place`` ends (the index behind it)."""
    start = text[place]
    if start == "'":
        end = text.find("'", place + 1)
        return len(text) if end < 0 else end + 1
    if start in '"`':
        return _until(text, place + 1, start, nested=start == '"')
    if text[place : place + 2] in ("$(", "${"):
        return _until(text, place + 2, ")" if text[place + 1] == "(" else "}", nested=True, opening=text[place + 1])
    return place + 1


def _until(text: str, place: int, end: str, *, nested: bool, opening: str = "") -> int:
    depth = 1
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 2
            continue
        if char == end:
            depth -= 1
            if not depth:
                return place + 1
        elif char == opening and opening == "(":
            depth += 1
        elif nested and (char in "$`" or (char in "'\"" and end != '"')):
            place = closing(text, place)
            continue
        place += 1
    return len(text)


class Shell:
    """Variables, and what was asked for that nobody set."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.variables: dict[str, Variable] = dict(env)
        self.unset: list[str] = []
        self.notices: list[str] = []

    def say(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)

    # -- assignments ----------------------------------------------------------------------------------------------

    def assign(self, raw: str) -> bool:
        """Carry out ``NAME=value``, ``NAME+=value``, ``NAME=(...)``; False if the word is no assignment."""
        found = _ASSIGNMENT.fullmatch(raw)
        if found is None:
            return False
        name, index, adds, value = found.groups()
        old = self.variables.get(name, "")
        if value.startswith("(") and index is None:
            items = [word for part in _array_words(value[1:-1]) for word in self.expand(part)]
            self.variables[name] = (_items(old) if adds else []) + items
        elif index is not None:
            items = _items(old)
            place = int(index) if index.isdigit() else len(items)
            items += [""] * (place + 1 - len(items))
            items[place] = self.text(value)
            self.variables[name] = items
        elif adds and isinstance(old, list):
            self.variables[name] = [(old + [""])[0] + self.text(value), *old[1:]]
        else:
            self.variables[name] = (str(old) if adds else "") + self.text(value)
        return True

    # -- expansion ------------------------------------------------------------------------------------------------

    def text(self, raw: str) -> str:
        """The word without splitting, as the right side of an assignment is read."""
        return " ".join(self.expand(raw, split=False))

    def expand(self, raw: str, split: bool = True) -> list[str]:
        """The fields that a word becomes: none, one, or several."""
        fields = _Fields(split)
        self._walk(raw, fields, quoted=False)
        return fields.result()

    def _walk(self, raw: str, fields: _Fields, quoted: bool) -> None:
        place = 0
        while place < len(raw):
            char = raw[place]
            end = closing(raw, place) if char in "$`" or (char in "'\"" and not quoted) else place + 1
            piece = raw[place:end]
            if char == "\\" and place + 1 < len(raw):
                end = place + 2
                following = raw[place + 1]
                if following != "\n":
                    fields.literal(following if not quoted or following in '"\\$`' else "\\" + following)
            elif char == "'" and not quoted:
                fields.literal(piece[1:-1])
            elif char == '"' and not quoted:
                if len(piece) <= 2:
                    fields.literal("")
                self._walk(piece[1:-1], fields, quoted=True)
            elif char == "`" or piece.startswith("$("):
                fields.literal(self._arithmetic(piece) if piece.startswith("$((") else _unknown(piece))
            elif piece.startswith("${"):
                fields.value(self._braced(piece[2:-1]), quoted)
            elif char == "$" and (name := _NAME.match(raw, place + 1)):
                end = name.end()
                fields.value(self._value(name.group()), quoted)
            else:
                fields.literal(char)
            place = end

    def _value(self, name: str, index: str | None = None) -> Variable:
        """A variable's first element, the element of an index, or with ``@`` and ``*`` all."""
        if name in ("@", "*"):
            return []
        if name == "#":
            return "0"
        if name not in self.variables:
            if name not in self.unset and not name.isdigit() and name not in "?$!-":
                self.unset.append(name)
            return [] if index in ("@", "*") else ""
        value = self.variables[name]
        items = _items(value)
        if index == "@":
            return items
        if index == "*":
            return " ".join(items)
        place = int(index) if index is not None and index.isdigit() else 0
        return items[place] if place < len(items) else ""

    def _braced(self, inner: str) -> Variable:
        found = _BRACED.fullmatch(inner)
        if found is None:
            return ""
        counts, name, index, rest = found.groups()
        if counts and name:
            value = self._value(name, index)
            return str(len(value))
        if not rest:
            return self._value(name, index)
        known = self.variables.get(name, "")
        if match := re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.S):
            colon, action, word = match.groups()
            missing = name not in self.variables or (bool(colon) and not known)
            if action == "+":
                return "" if missing else self.text(word)
            if not missing:
                return self._value(name, index)
            if action == "=":
                self.variables[name] = self.text(word)
            return self._value(name) if action == "?" else self.text(word)
        return self._edited(str(self._value(name, index)), name, rest)

    def _edited(self, value: str, name: str, rest: str) -> str:
        """Prefixes, suffixes and replacements."""
        if match := re.fullmatch(r"(##?|%%?)(.*)", rest, re.S):
            kind, pattern = match.group(1), self.text(match.group(2))
            lengths = range(len(value) + 1)
            cuts = [value[:k] if kind[0] == "#" else value[len(value) - k :] for k in lengths]
            hits = [k for k, cut in zip(lengths, cuts, strict=True) if fnmatch.fnmatchcase(cut, pattern)]
            if not hits:
                return value
            size = max(hits) if len(kind) == 2 else min(hits)
            return value[size:] if kind[0] == "#" else value[: len(value) - size]
        if match := re.fullmatch(r"/(/?)([^/]+)/?(.*)", rest, re.S):
            count = -1 if match.group(1) else 1
            return value.replace(self.text(match.group(2)), self.text(match.group(3)), count)
        self.say(f"${{{name}{rest}}} is not understood; read as ${name}")
        return value

    def _arithmetic(self, raw: str) -> str:
        """``$((...))`` on whole numbers."""
        inner = re.sub(r"\$\{(\w+)\}|\$(\w+)|\b([A-Za-z_]\w*)", self._number, raw[3:-2])
        try:
            return str(_calculate(ast.parse(inner.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
            return _unknown(raw)

    def _number(self, found: re.Match[str]) -> str:
        return str(self._value(next(filter(None, found.groups())))).strip() or "?"


def _unknown(piece: str) -> str:
    """What stands for the output of a command: ``{date...}``, without white space, so that it stays one word."""
    inner = piece.strip("$()`").split()
    return f"{{{inner[0] if inner else ''}...}}"


def _items(value: Variable) -> list[str]:
    return list(value) if isinstance(value, list) else [value] if value else []


def _array_words(text: str) -> list[str]:
    """Raw words between the parentheses of an array, comments left out."""
    words, place, start = [], 0, None
    while place <= len(text):
        char = text[place] if place < len(text) else " "
        if char == "#" and start is None:
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
            continue
        if char.isspace():
            if start is not None:
                words.append(text[start:place])
            start = None
            place += 1
            continue
        if text.startswith("\\\n", place) and start is None:
            place += 2
            continue
        start = place if start is None else start
        place = place + 2 if char == "\\" else closing(text, place) if char in "'\"`$" else place + 1
    return words


def _calculate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    raise ValueError("not arithmetic on whole numbers")


class _Fields:
    """Grows the fields of one word: what is quoted joins, what is expanded bare splits at white space."""

    def __init__(self, split: bool) -> None:
        self.split = split
        self.done: list[str] = []
        self.current: str | None = None

    def literal(self, text: str) -> None:
        self.current = (self.current or "") + text

    def value(self, value: Variable, quoted: bool) -> None:
        if isinstance(value, list):
            for place, item in enumerate(value):
                if place:
                    self._end()
                self._bare(item) if self.split and not quoted else self.literal(item)
        elif quoted or not self.split:
            self.literal(value)
        else:
            self._bare(value)

    def _bare(self, text: str) -> None:
        if text[:1].isspace():
            self._end()
        for place, part in enumerate(text.split()):
            if place:
                self._end()
            self.literal(part)
        if text[-1:].isspace():
            self._end()

    def _end(self) -> None:
        if self.current is not None:
            self.done.append(self.current)
        self.current = None

    def result(self) -> list[str]:
        self._end()
        return self.done
