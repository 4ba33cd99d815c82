"""What surrounds the package: its requirements, the image, the shell scripts and the cluster examples."""
from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from megackpt.config.parse import parse
from tests.pool import ROOT

SCRIPTS = sorted(
    path for pattern in ("examples/**/*.sh", "examples/**/*.sbatch", "tools/*.sh", "tests/*.sh", ".ci/run")
    for path in ROOT.glob(pattern)
)  # fmt: skip
BASE = {"torch", "numpy", "safetensors", "pyyaml"}


def tool(name: str) -> str:
    """Path of a program that the lock file installs beside this interpreter, or a skip that says what is missing."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def requirement(text: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", text)
    assert name is not None
    return name.group().lower().replace("_", "-")


def declared() -> tuple[list[str], list[str]]:
    """Requirements in setup.py: of the base install, and of all extras."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    lists = [[element.value for element in node.elts if isinstance(element, ast.Constant)]
             for node in ast.walk(tree) if isinstance(node, ast.List)]
    texts = [[str(text) for text in entries if re.match(r"\S+[<>=]=", str(text))] for entries in lists]
    base = next(entries for entries in texts if any(requirement(text) == "torch" for text in entries))
    return base, [text for entries in texts if entries is not base for text in entries]


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split(";")[0].strip() for line in lines if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    return {requirement(pin): pin.split("==")[1] for pin in pins}


# -- requirements ----------------------------------------------------------------------------------------------------


def test_base_install_is_four_packages_and_the_lock_pins_all_that_is_declared() -> None:
    base, extras = declared()
    pins = locked()
    assert {requirement(text) for text in base} == BASE
    assert {requirement(text) for text in [*base, *extras]} <= set(pins)
    assert pins["torch"] == "2.13.0"


def test_no_requirement_names_a_package_that_is_found_at_run_time() -> None:
    base, extras = declared()
    names = {requirement(text) for text in [*base, *extras]} | set(locked())
    assert not names & {"apex", "transformer-engine", "deepspeed", "flash-attn"}


def test_this_environment_is_the_locked_one() -> None:
    installed = {name: version(name).split("+")[0] for name in sorted(BASE | {"pytest", "sentencepiece"})}
    assert installed == {name: locked()[name] for name in installed}


# -- documents -------------------------------------------------------------------------------------------------------


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)


def test_the_readme_example_of_recompute_runs() -> None:
    (example,) = blocks("README.md", "python")
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kept = [int(number.replace(",", "")) for number in re.findall(r"-> ([\d,]+) bytes", done.stdout)]
    rows, width, wide = 512, 256, 1024
    inputs, statistics = 4 * rows * width, 2 * 4 * rows  # x, and LayerNorm's mean and deviation
    normed, inner = inputs, 4 * rows * wide
    assert kept == [inputs + statistics + normed + inner, inputs + inner, inputs]


def test_the_readme_command_is_accepted() -> None:
    (command,) = (text for text in blocks("README.md", "") if "pretrain_gpt.py" in text)
    words = command.replace("\\\n", " ").split()
    config = parse(words[words.index("pretrain_gpt.py") + 1 :], {}, world_size=4)
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.data) == (2, 2, 1)


@pytest.mark.parametrize(
    "document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]),
    ids=lambda path: str(path.relative_to(ROOT)),
)  # fmt: skip
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


# -- the image -------------------------------------------------------------------------------------------------------


def test_dockerfile_lint() -> None:
    done = subprocess.run([tool("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_gpu_image_keeps_its_torch_and_gets_the_rest() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    gpu, rest = text[text.index("AS gpu"):].split("AS cpu")
    selected = re.search(r"grep -E '\^\(([^)]*)\)=='", gpu)
    assert selected is not None
    names = {requirement(name) for name in selected.group(1).split("|")}
    assert BASE - {"torch", "numpy"} <= names <= set(locked())
    assert not names & {"torch", "numpy"}
    installs = re.findall(r"pip install ([^&]*)", gpu + rest.split("FROM ${VARIANT}")[1])
    assert len(installs) == 2 and all("--no-deps" in install for install in installs)
    assert re.search(r"^USER [1-9]\d*$", text, re.M)
    assert re.search(r"^ARG GPU_BASE=\S+:\d\d\.\d\d-py3$", text, re.M)


# -- shell -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_is_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    command = [tool("shellcheck"), "--external-sources", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""


# -- Slurm -----------------------------------------------------------------------------------------------------------


def slurm(folder: Path, script: str, srun: str) -> subprocess.Popen[str]:
    """Run a job script as Slurm would, with programs of our own that record how they were called."""
    programs = folder / "bin"
    programs.mkdir()
    for name, body in {
        "srun": srun,
        "scancel": 'echo "$@" >>"$RECORD/scancel"',
        "scontrol": 'echo "$@" >>"$RECORD/scontrol"; [ "$1" = show ] && printf "n1\\nn2\\n"; true',
        "torchrun": 'printf "%s\\n" "$@" >"$RECORD/torchrun"',
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "RECORD": str(folder), "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1",
        "SLURM_GPUS_ON_NODE": "8",
    }
    command = ["bash", str(ROOT / "examples/slurm" / script)]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def flags(arguments: list[str]) -> list[str]:
    return arguments[arguments.index("pretrain_gpt.py") + 1:]


def test_torchrun_per_node(tmp_path: Path) -> None:
    run_the_task = 'shift 3; exec "$@"'  # what is left after srun's own three options
    assert slurm(tmp_path, "torchrun.sbatch", run_the_task).wait(30) == 0
    arguments = (tmp_path / "torchrun").read_text().splitlines()
    launch = arguments[:arguments.index("pretrain_gpt.py")]
    assert launch == [
        "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "8", "--master-addr", "n1", "--master-port", "24711",
        "--log-dir", "runs/slurm/4711/node-1", "--redirects", "3", "--tee", "3",
    ]
    config = parse(flags(arguments), {}, world_size=16)
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.data) == (8, 2, 1)
    assert config.train.exit_signal_handler and config.train.exit_signal == "SIGTERM"


def test_srun_as_the_launcher(tmp_path: Path) -> None:
    assert slurm(tmp_path, "srun.sbatch", 'printf "%s\\n" "$@" >"$RECORD/srun"').wait(30) == 0
    arguments = (tmp_path / "srun").read_text().splitlines()
    assert arguments[:3] == ["--kill-on-bad-exit=1", "--output=runs/slurm/4711/rank-%t.log", "python"]
    assert parse(flags(arguments), {}, world_size=32).parallel.data == 2


def test_the_signal_before_the_time_limit_asks_for_a_save_and_requeues(tmp_path: Path) -> None:
    job = slurm(tmp_path, "srun.sbatch", 'touch "$RECORD/running"; sleep 1; touch "$RECORD/over"; exit 3')
    deadline = time.monotonic() + 30
    while not (tmp_path / "running").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert (tmp_path / "scancel").read_text() == "--signal=TERM 4711\n"
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    assert (tmp_path / "scontrol").stat().st_mtime_ns > (tmp_path / "over").stat().st_mtime_ns  # not while it saves
    assert "job 4711 saves and is requeued" in output
    assert job.returncode == 3  # the script ends as its step did
