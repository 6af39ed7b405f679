"""The model, the data and the form of a result that the benchmarks share."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slimformer.export.runtime import Bundle
from slimformer.transformer.batching import tensors
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.evaluation import Floats
from slimformer.transformer.loading import load
from slimformer.transformer.metrics import TaskMetrics, changed_answers
from slimformer.transformer.progress import SILENT, Progress
from slimformer.transformer.statistics import paired_intervals
from slimformer.transformer.tokenizer import length_batches

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/help-search"
MAX_LENGTH = 128
FIRST_HITS = "first hits: another, right <-> wrong"  # heads what `first_hits` gives


def minilm_folder() -> Path:
    """The directory of all-MiniLM-L6-v2."""
    found = subprocess.run([sys.executable, ROOT / "examples/minilm.py"], capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(found.stderr.strip())
    return Path(found.stdout.strip())


def minilm() -> Checkpoint:
    """all-MiniLM-L6-v2, its texts cut at 128 tokens."""
    model = load(minilm_folder())
    return replace(model, config=replace(model.config, text=replace(model.config.text, max_length=MAX_LENGTH)))


def against(original: TaskMetrics, candidate: TaskMetrics) -> str:
    """The deciding metric, its difference and the paired 95 % interval."""
    name = candidate.deciding
    intervals = paired_intervals(
        original.statistics, candidate.statistics, candidate.groups, candidate.aggregate, seed=0
    )
    found = intervals[name]
    return f"{candidate.values()[name]:6.2f} ({found.difference:+.2f} [{found.low:+.2f}, {found.high:+.2f}])"


def first_hits(original: TaskMetrics, candidate: TaskMetrics) -> str:
    """Shares of the queries that get another page first, and whose first page has become right or wrong."""
    column = original.names.index("recall@1")
    turned = float(np.mean(original.statistics[:, column] != candidate.statistics[:, column]))
    shares = f"{100 * changed_answers(original, candidate):.2f} %, {100 * turned:.2f} %"
    return f"{shares:>{len(FIRST_HITS)}s}"


class Eager:
    """A checkpoint evaluated in PyTorch, in the batches that the runtime makes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config, self.model, self.encoder = checkpoint.config, checkpoint.to_torch(), checkpoint.text_encoder()

    def embed(
        self, texts: Sequence[str], *, prompt: str | None = None, batch: int = 32, progress: Progress = SILENT
    ) -> Floats:
        """Texts -> vectors (n, E)."""
        ids = self.encoder.encode([self.config.text.prompt(prompt) + text for text in texts])
        parts: dict[int, Floats] = {}
        for chosen in length_batches([len(one) for one in ids], batch):
            with torch.inference_mode():
                result = self.model(*tensors([ids[i] for i in chosen], self.config.text.pad_id)).result
            parts.update(zip(chosen.tolist(), result.numpy(), strict=True))
        return np.stack([parts[i] for i in range(len(ids))])


class Batched:
    """A model whose `embed` takes another number of texts a run."""

    def __init__(self, model: Eager | Bundle, batch: int) -> None:
        self.config, self.model, self.batch = model.config, model, batch

    def embed(self, texts: Sequence[str], *, prompt: str | None = None, progress: Progress = SILENT) -> Floats:
        """Texts -> vectors (n, E)."""
        return self.model.embed(texts, prompt=prompt, batch=self.batch, progress=progress)

    def logits(self, texts: Sequence[str], *, progress: Progress = SILENT) -> Floats:
        """Embedders have none."""
        raise TypeError("an embedder gives no logits")
