"""Causal language modelling: a decoder by itself, taught texts, judged by how probable it finds others.

The loss is that of `translation`, over the tokens of every text up to its end token. A text that is longer than the
positions is read in windows, each of which begins anew. After every epoch the model is judged on valid, and the best
epoch by likelihood, the geometric mean of the tokens' probabilities, is kept.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .batching import sorted_batches, tensors, token_batches
from .checkpoint import Checkpoint
from .config import LanguageHead
from .errors import InputError
from .lesson import asked_of, check_splits, teach
from .metrics import TaskMetrics
from .progress import SILENT, Progress
from .splits import TextData, TextRow
from .teaching import EPOCHS, Teaching
from .text_metrics import perplexity_metrics
from .tokenizer import TextEncoder

PASS_TOKENS = 4096
WHOLE = 2**30  # tokens: no text is cut before it is in windows


def teach_texts(
    checkpoint: Checkpoint,
    data: TextData,
    out: Path,
    options: Teaching,
    *,
    device: str = "cpu",
    resume: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
    board: Path | None = None,
) -> Checkpoint:
    """Train a decoder on texts; see `lesson.teach` for the arguments and what is written.

    Raises:
        InputError: the model is no float decoder by itself, or a split has no texts.
    """
    config = checkpoint.config
    if config.encoder or not isinstance(config.head, LanguageHead) or not config.is_float:
        raise InputError("training: language modelling needs a decoder by itself with a language head, in float")
    check_splits(data, "texts")
    return teach(
        checkpoint,
        lambda: _Lesson(checkpoint, data, options, device),
        options,
        EPOCHS,
        asked_of(checkpoint, data, options),
        out,
        device=device,
        resume=resume,
        force=force,
        progress=progress,
        board=board,
    )


def windows(texts: Sequence[str], encoder: TextEncoder, positions: int) -> list[tuple[int, list[int]]]:
    """Every text's number, once for each of its windows of at most `positions` tokens, and the window's token ids."""
    found = []
    for number, ids in enumerate(encoder.encode(texts)):
        found += [(number, ids[at : at + positions]) for at in range(0, len(ids), positions)]
    return found


class _Lesson:
    """The model and the texts as windows of token ids; see `Lesson`."""

    deciding = "likelihood"

    def __init__(self, checkpoint: Checkpoint, data: TextData, options: Teaching, device: str) -> None:
        head = checkpoint.config.head
        assert isinstance(head, LanguageHead)
        self.model = checkpoint.to_torch(dropout=options.dropout).to(device)
        self.data, self.options, self.device, self.start_id = data, options, device, head.start_id
        self.pad_id, self.positions = checkpoint.config.text.pad_id, checkpoint.config.embedding.positions
        self.encoder = TextEncoder(checkpoint.tokenizer, WHOLE)
        self.windows = [window for _, window in self._windows(data.train)]
        self.lengths = [len(window) for window in self.windows]

    def _windows(self, rows: Sequence[TextRow]) -> list[tuple[int, list[int]]]:
        return windows([row.text for row in rows], self.encoder, self.positions)

    def batches(self, epoch: int) -> list[list[int]]:
        """See `Lesson`."""
        return token_batches(self.lengths, tokens=self.options.batch_tokens, seed=self.options.seed, epoch=epoch)

    def loss(self, batch: list[int]) -> Tensor:
        """See `Lesson`."""
        logits, wanted = self._logits([self.windows[i] for i in batch])
        return F.cross_entropy(logits, wanted, label_smoothing=self.options.smoothing)

    def _logits(self, windows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Logits (N, V) of every token, and the tokens (N,)."""
        begun, mask = tensors([[self.start_id, *window[:-1]] for window in windows], self.pad_id, self.device)
        logits = self.model(begun, mask).result
        return logits, torch.tensor([token for window in windows for token in window], device=self.device)

    def measure(self, split: str) -> dict[str, float]:
        """Likelihood in per cent, perplexity of a token, bits per byte."""
        return self.judge(getattr(self.data, split)).values()

    def judge(self, rows: Sequence[TextRow]) -> TaskMetrics:
        """What the model is worth on texts."""
        self.model.eval()
        windows = self._windows(rows)
        loss, tokens = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
        for batch in sorted_batches([len(window) for _, window in windows], tokens=PASS_TOKENS):
            with torch.inference_mode():
                logits, wanted = self._logits([windows[i][1] for i in batch])
                each = F.cross_entropy(logits, wanted, reduction="none").double().cpu()
            for i, part in zip(batch, torch.split(each, [len(windows[i][1]) for i in batch]), strict=True):
                loss[windows[i][0]] += float(part.sum())
                tokens[windows[i][0]] += len(part)
        sizes = [len(row.text.encode()) for row in rows]
        return perplexity_metrics(loss, tokens, sizes, [row.group for row in rows])
