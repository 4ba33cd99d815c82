"""The rules of the source tree as data, and the reader that finds violations (see ARCHITECTURE.md).

A room is a package under `megackpt/`. The table says which other rooms it may import; everything else here keeps
that table honest: imports hidden in functions, cycles between files, rooms that nobody listed, files and functions
that outgrow a sitting.
"""
from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megackpt"

LOWER = ("plan", "config", "recompute", "mesh", "tensor", "model", "pipeline", "precision", "optim", "data",
         "persist", "observe")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": (),  # megackpt/__init__.py itself: importing one room must not load another
    "plan": (),
    "config": (),
    "recompute": ("plan",),
    "mesh": ("config",),
    "tensor": ("mesh", "recompute", "config"),
    "model": ("tensor", "recompute", "mesh", "config", "plan"),
    "pipeline": ("mesh", "plan", "recompute"),
    "precision": ("mesh", "config", "tensor", "recompute"),
    "optim": ("mesh", "config", "precision", "plan"),
    "data": ("config", "mesh"),
    "persist": ("mesh", "config"),
    "observe": ("config", "plan"),
    "train": LOWER,
    "cli": (*LOWER, "train"),
}
# A room that may import only part of another.
ONLY_MODULES = {("model", "plan"): (f"{PACKAGE}.plan.steps",), ("optim", "plan"): (f"{PACKAGE}.plan.buffers",)}
# Rooms that must load without torch: third-party packages they may import at all.
THIRD_PARTY = {"plan": ("numpy",), "config": ("yaml",)}
# Packages that may be missing or are slow to load: the only imports allowed inside a function (cli/ is free to).
OPTIONAL = ("apex", "deepspeed", "sentencepiece", "tensorboard", "tiktoken", "tokenizers", "torch.utils.tensorboard",
            "transformer_engine", "wandb", "zstandard")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without its docstring
# Longer on purpose: path below megackpt/, or path and function -> its own limit.
LONGER: dict[str, int] = {}
UNFINISHED = ("TODO", "FIXME", "XXX", "raise NotImplementedError")


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # dotted name of the imported module
    function: str  # name of the enclosing function, "" at file level
    for_types: bool  # under `if TYPE_CHECKING`: it never runs, so it closes no cycle


@dataclass(frozen=True)
class Source:
    path: Path
    relative: str  # path below the package, with slashes
    module: str  # dotted name
    room: str
    text: str
    tree: ast.Module


def read_tree(package: Path) -> list[Source]:
    """Every source file of the package, parsed, in the order of their paths."""
    sources = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        parts = [PACKAGE, *relative.with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        room = relative.parts[0] if len(relative.parts) > 1 else ""
        text = path.read_text(encoding="utf-8")
        sources.append(Source(path, relative.as_posix(), module, room, text, ast.parse(text, str(path))))
    return sources


def imports_of(source: Source, modules: set[str]) -> list[Import]:
    """All imports of a file; `from package import name` names the submodule if `modules` has one of that name."""
    found: list[Import] = []

    def visit(node: ast.AST, function: str, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner, typing = function, for_types
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = child.name
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                typing = True
            for target in _targets(child, source, modules):
                found.append(Import(child.lineno, target, function, for_types))  # type: ignore[attr-defined]
            visit(child, inner, typing)

    visit(source.tree, "", False)
    return found


def _targets(node: ast.AST, source: Source, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = source.module.split(".") if source.path.name == "__init__.py" else source.module.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if submodule in modules else base
    elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def violations(package: Path) -> list[str]:
    """Every broken rule as one sentence that begins with `path:line`, sorted by path."""
    sources = read_tree(package)
    modules = {source.module for source in sources}
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for source in sources:
        imports = imports_of(source, modules)
        running = {entry.target for entry in imports if entry.target in modules and not entry.for_types}
        graph[source.module] = running - {source.module}
        if source.room not in MAY_IMPORT:
            found.append(f"{source.relative}:1 is in room '{source.room}', which the table does not have")
            continue
        for entry in imports:
            found += [f"{source.relative}:{entry.line} {text}" for text in _import_faults(source, entry)]
        found += _size_faults(source)
        found += _text_faults(source)
    return found + [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]


def _import_faults(source: Source, entry: Import) -> Iterator[str]:
    top, *rest = entry.target.split(".")
    room = source.room
    if top == PACKAGE:
        target = rest[0] if rest else ""  # the package itself holds the version, which everyone may read
        if target not in ("", room) and target not in MAY_IMPORT[room]:
            yield f"room '{room}' must not import {entry.target}"
        elif (room, target) in ONLY_MODULES and entry.target not in ONLY_MODULES[room, target]:
            yield f"room '{room}' may import only {', '.join(ONLY_MODULES[room, target])}, not {entry.target}"
        if entry.function and room != "cli":
            yield f"imports {entry.target} inside function {entry.function}"
        return
    if room in THIRD_PARTY and top not in sys.stdlib_module_names and top not in THIRD_PARTY[room]:
        yield f"room '{room}' must load without {top}"
    optional = any(entry.target == name or entry.target.startswith(name + ".") for name in OPTIONAL)
    if entry.function and room != "cli" and not optional:
        yield f"imports {entry.target} inside function {entry.function}"
    if not entry.function and optional and room != "cli":
        yield f"imports the optional package {entry.target} at file level"


def _size_faults(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    limit = LONGER.get(source.relative, MAX_FILE_LINES)
    if lines > limit:
        yield f"{source.relative}:1 has {lines} lines, more than {limit}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
            limit = LONGER.get(f"{source.relative}:{node.name}", MAX_FUNCTION_LINES)
            if length > limit:
                yield f"{source.relative}:{node.lineno} function {node.name} has {length} lines, more than {limit}"


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def _text_faults(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        for word in UNFINISHED:
            if word in line:
                yield f"{source.relative}:{number} leaves something unfinished: {word}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.relative}:{node.lineno} changes a global: {', '.join(node.names)}"


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Each group of files that import one another, as a path that returns to its start."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module):], module])
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                walk(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found
