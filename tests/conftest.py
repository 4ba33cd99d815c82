"""Settings of every test run: one thread per process, a hard time-out per test, `--full` for the long ones."""
from __future__ import annotations

import os

from tests.pool import SINGLE_THREAD, shutdown

os.environ.update(SINGLE_THREAD)  # before torch is imported anywhere: equality to the bit needs one thread

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full (minutes, many processes)")
    parser.addoption("--interop", action="store_true", help="tests/interop, as tests/interop/run.sh gives it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = config.getoption("--full")
    gpu = torch.cuda.is_available()
    interop = config.getoption("--interop")
    for item in items:
        if item.get_closest_marker("full") and not full:
            item.add_marker(pytest.mark.skip(reason="part of the full suite: run with --full"))
        if "tests/interop/" in item.nodeid and not interop:
            item.add_marker(pytest.mark.skip(reason="other people's packages: bash tests/interop/run.sh"))
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests this run left out, by reason: a green run must not look more complete than it was."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"not run: {count} ({reason.removeprefix('Skipped: ')})")


@pytest.fixture(scope="session", autouse=True)
def _end_workers() -> object:
    yield
    shutdown()


@pytest.fixture(autouse=True)
def _fresh_state() -> object:
    """Each test begins with the same generator state and leaves torch's global switches as they were."""
    torch.manual_seed(1234)
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
