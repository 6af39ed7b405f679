"""The model, the data and the form of a result that the benchmarks share."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.loading import load
from slimformer.transformer.metrics import TaskMetrics
from slimformer.transformer.statistics import paired_intervals

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/help-search"
MAX_LENGTH = 128


def minilm() -> Checkpoint:
    """all-MiniLM-L6-v2, its texts cut at 128 tokens."""
    found = subprocess.run([sys.executable, ROOT / "examples/minilm.py"], capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(found.stderr.strip())
    model = load(found.stdout.strip())
    return replace(model, config=replace(model.config, text=replace(model.config.text, max_length=MAX_LENGTH)))


def against(original: TaskMetrics, candidate: TaskMetrics) -> str:
    """The deciding metric, its difference and the paired 95 % interval."""
    name = candidate.deciding
    intervals = paired_intervals(
        original.statistics, candidate.statistics, candidate.groups, candidate.aggregate, seed=0
    )
    found = intervals[name]
    return f"{candidate.values()[name]:6.2f} ({found.difference:+.2f} [{found.low:+.2f}, {found.high:+.2f}])"
