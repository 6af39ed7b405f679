"""Torch-Pruning: where its environment is, what is in it, and its process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from help_search.setting import ROOT

ENVIRONMENT = ROOT / ".cache/pruners/environment"
WORKER = Path(__file__).parent / "torch_pruning_worker.py"
VERSIONS = {"torch": "2.13.0", "torch-pruning": "1.6.1", "transformers": "5.24.0", "numpy": "2.4.6"}


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
