"""An environment of its own for Torch-Pruning, made once into .cache/pruners/, and its process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from help_search.setting import ROOT

CACHE = ROOT / ".cache/pruners"
WORKER = Path(__file__).parent / "torch_pruning_worker.py"
VERSIONS = {"torch": "2.13.0", "torch-pruning": "1.6.1", "transformers": "5.24.0", "numpy": "2.4.6"}


def environment() -> Path:
    """The rival's Python, its environment made where it is not there."""
    folder = CACHE / "environment"
    python = folder / "bin/python"
    if not (folder / ".installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pinned = [f"{name}=={version}" for name, version in VERSIONS.items()]
        subprocess.run([python, "-m", "pip", "install", "-q", *pinned], check=True)
        (folder / ".installed").touch()
    return python


def check_versions(python: Path) -> None:
    """Exit where an environment has other versions than those compared here."""
    code = (
        "import json, sys; from importlib.metadata import version as v; print(json.dumps([v(n) for n in sys.argv[1:]]))"
    )
    done = subprocess.run([python, "-c", code, *VERSIONS], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python}: {done.stderr.strip().splitlines()[-1]}")
    for (name, wanted), found in zip(VERSIONS.items(), json.loads(done.stdout), strict=True):
        if found.partition("+")[0] != wanted:
            sys.exit(f"{python} has {name} {found}; compared is {wanted}")


def minilm_folder() -> Path:
    """The directory of all-MiniLM-L6-v2."""
    found = subprocess.run([sys.executable, ROOT / "examples/minilm.py"], capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(found.stderr.strip())
    return Path(found.stdout.strip())


class Worker:
    """Torch-Pruning's process on one BERT directory."""

    def __init__(self, python: Path, model: Path, rows: Sequence[Sequence[int]], folder: Path) -> None:
        """`folder` is for what goes between the processes; `rows` are token ids of calibration texts."""
        self.log = folder / "log"
        given = folder / "rows.json"
        given.write_text(json.dumps(rows), encoding="utf-8")
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [python, WORKER, model, given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One answer. Raises RuntimeError with what went wrong there; exits where the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the log says why
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
            sys.exit(f"Torch-Pruning's process has ended: {' '.join(last)[:300]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
