"""No code of ours unpickles anything but tensors and plain values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.pool import ROOT

SOURCES = sorted([*(ROOT / "megackpt").rglob("*.py"), ROOT / "pretrain_gpt.py"])
FORBIDDEN = ("pickle.load", "pickle.loads", "pickle.Unpickler", "numpy.load", "np.load", "joblib.load", "marshal.loads")


def faults(text: str) -> Iterator[str]:
    """Calls that could run what a file says."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name.endswith("torch.load") and given.get("weights_only") != "True":
            yield f"line {node.lineno}: {name} without weights_only=True"
        if name in FORBIDDEN and not (name.endswith("load") and given.get("allow_pickle") == "False"):
            yield f"line {node.lineno}: {name}"


def test_nothing_is_unpickled_without_limits() -> None:
    found = {str(path.relative_to(ROOT)): list(faults(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert len(found) > 100 and {name: lines for name, lines in found.items() if lines} == {}


def test_the_search_finds_what_it_should() -> None:
    assert list(faults("import torch\ntorch.load(f)\ntorch.load(f, weights_only=False)")) == [
        "line 2: torch.load without weights_only=True",
        "line 3: torch.load without weights_only=True",
    ]
    assert list(faults("pickle.loads(b)\nnp.load(f)")) == ["line 1: pickle.loads", "line 2: np.load"]
    assert list(faults("np.load(f, allow_pickle=False)\ntorch.load(f, weights_only=True)")) == []
