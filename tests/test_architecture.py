"""The source tree obeys its rules, and the check of those rules is able to fail."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import MAY_IMPORT, PACKAGE, violations
from tests.pool import ROOT


def test_the_tree_obeys_the_rules() -> None:
    assert "\n".join(violations(ROOT / PACKAGE)) == ""


def test_every_room_of_the_table_exists() -> None:
    assert [room for room in MAY_IMPORT if not (ROOT / PACKAGE / room / "__init__.py").is_file()] == []


@pytest.mark.parametrize("module", ["megackpt", "megackpt.plan", "megackpt.config", "megackpt.cli", "pretrain_gpt"])
def test_loads_without_torch(module: str) -> None:
    code = f"import {module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def tree(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(root / PACKAGE)


FAULTS = {
    "forbidden room": (
        {"recompute/a.py": "import torch\nfrom megackpt.tensor.linear import linear\n", "tensor/linear.py": ""},
        ["recompute/a.py:2 room 'recompute' must not import megackpt.tensor.linear"],
    ),
    "forbidden room by a relative import": (
        {"plan/a.py": "from ..mesh import layout\n", "mesh/layout.py": ""},
        ["plan/a.py:1 room 'plan' must not import megackpt.mesh.layout"],
    ),
    "forbidden room for types only": (
        {"optim/a.py": "if TYPE_CHECKING:\n    from megackpt.train import step\n", "train/step.py": ""},
        ["optim/a.py:2 room 'optim' must not import megackpt.train.step"],
    ),
    "forbidden room by name": (
        {"mesh/a.py": "import importlib\nimportlib.import_module('megackpt.model')\n"},
        ["mesh/a.py:2 room 'mesh' must not import megackpt.model"],
    ),
    "part of a room": (
        {"model/a.py": "from megackpt.plan import steps, policies\n", "plan/steps.py": "", "plan/policies.py": ""},
        ["model/a.py:1 room 'model' may import only megackpt.plan.steps, not megackpt.plan.policies"],
    ),
    "hidden import": (
        {"tensor/a.py": "def build():\n    from megackpt.mesh import layout\n", "mesh/layout.py": ""},
        ["tensor/a.py:2 imports megackpt.mesh.layout inside function build"],
    ),
    "hidden import of a third party": (
        {"tensor/a.py": "class A:\n    def build(self):\n        import numpy\n"},
        ["tensor/a.py:3 imports numpy inside function build"],
    ),
    "optional package at file level": (
        {"observe/a.py": "import wandb\n"},
        ["observe/a.py:1 imports the optional package wandb at file level"],
    ),
    "torch where there must be none": (
        {"plan/a.py": "import numpy, json\nimport torch.distributed\n", "config/b.py": "import yaml\nimport numpy\n"},
        ["config/b.py:2 room 'config' must load without numpy", "plan/a.py:2 room 'plan' must load without torch"],
    ),
    "the package itself": (
        {"__init__.py": "from megackpt import config\n", "config/__init__.py": ""},
        ["__init__.py:1 room '' must not import megackpt.config"],
    ),
    "unknown room": ({"utils/a.py": ""}, ["utils/a.py:1 is in room 'utils', which the table does not have"]),
    "cycle": (
        {"mesh/__init__.py": "from megackpt.mesh.a import x\n", "mesh/a.py": "from .b import x\n",
         "mesh/b.py": "from megackpt.mesh import x\n"},
        ["import cycle: megackpt.mesh -> megackpt.mesh.a -> megackpt.mesh.b -> megackpt.mesh"],
    ),
    "long file": ({"data/a.py": "x = 1\n" * 401}, ["data/a.py:1 has 401 lines, more than 400"]),
    "long function": (
        {"data/a.py": 'def f():\n    """Two\n    lines."""\n' + "    x = 1\n" * 60},
        ["data/a.py:1 function f has 61 lines, more than 60"],
    ),
    "global state": (
        {"data/a.py": "def f():\n    global x\n    x = 1\n"},
        ["data/a.py:2 changes a global: x"],
    ),
    "unfinished": (
        {"data/a.py": "def f():\n    raise NotImplementedError\n"},
        ["data/a.py:2 leaves something unfinished: raise NotImplementedError"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str, tmp_path: Path) -> None:
    files, expected = FAULTS[fault]
    assert tree(tmp_path, files) == expected


def test_what_is_allowed_is_not_a_fault(tmp_path: Path) -> None:
    files = {
        "cli/__init__.py": "def main():\n    from megackpt.train import loop\n    import torch\n",
        "train/loop.py": "from megackpt.model.gpt import GPT\nfrom megackpt.observe import a\n",
        "model/gpt.py": "from megackpt.plan.steps import NAMES\nimport torch\n",
        "model/__init__.py": "",
        "plan/steps.py": "import json\nimport numpy as np\nNAMES = ()\n",
        "observe/a.py": "def start():\n    import wandb\n    from torch.utils.tensorboard import SummaryWriter\n",
        "tensor/b.py": "from . import c\n",
        "recompute/a.py": "from megackpt.recompute.b import x\n",
        "recompute/b.py": "if TYPE_CHECKING:\n    from megackpt.recompute.a import x\n",
        "tensor/c.py": "def f():\n" + "    x = 1\n" * 59,
    }
    assert tree(tmp_path, files) == []
