"""Causal language modelling: a decoder by itself, taught texts, judged by how probable it finds others.

The loss is that of `translation`, over the tokens of every text up to its end token. A text that is longer than the
positions is read in windows, each of which begins anew. After every epoch the model is judged on valid, and the best
epoch by likelihood, the geometric mean of the tokens' probabilities, is kept.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .batching import sorted_batches, token_batches
from .checkpoint import Checkpoint
from .config import LanguageHead
from .errors import InputError
from .lesson import asked_of, check_splits, teach
from .metrics import TaskMetrics
from .parts import Part
from .processes import ALONE, Processes
from .progress import SILENT, Progress
from .splits import TextData, TextRow
from .teaching import EPOCHS, Teaching
from .text_metrics import Reading, reading_metrics
from .tokenizer import windows
from .translation import forced_logits
from .zeros import keep_zeros, sparse_linears

PASS_TOKENS = 4096


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
    processes: Processes = ALONE,
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
        processes=processes,
    )


class _Lesson:
    """The model and the texts as windows of token ids; see `Lesson`."""

    deciding = "likelihood"

    def __init__(self, checkpoint: Checkpoint, data: TextData, options: Teaching, device: str) -> None:
        self.model = checkpoint.to_torch(dropout=options.dropout).to(device)
        keep_zeros(self.model, sparse_linears(checkpoint))
        self.checkpoint, self.data, self.options, self.device = checkpoint, data, options, device
        self.windows = [window for _, window in self._windows(data.train)]
        self.lengths = [len(window) for window in self.windows]

    def _windows(self, rows: Sequence[TextRow]) -> list[tuple[int, list[int]]]:
        texts, positions = [row.text for row in rows], self.checkpoint.config.embedding.positions
        return windows(texts, self.checkpoint.tokenizer, positions)

    def batches(self, epoch: int) -> list[list[int]]:
        """See `Lesson`."""
        return token_batches(self.lengths, tokens=self.options.batch_tokens, seed=self.options.seed, epoch=epoch)

    def loss(self, part: Part) -> Tensor:
        """See `Lesson`."""
        logits, wanted = self._logits([self.windows[i] for i in part])
        return part.share_of(self.lengths) * F.cross_entropy(logits, wanted, label_smoothing=self.options.smoothing)

    def _logits(self, windows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        return forced_logits(self.model, [([], window) for window in windows], self.device)

    def measure(self, split: str) -> dict[str, float]:
        """Likelihood in per cent, perplexity of a token, bits per byte."""
        return self.judge(getattr(self.data, split)).values()

    def judge(self, rows: Sequence[TextRow]) -> TaskMetrics:
        """What the model is worth on texts."""
        self.model.eval()
        found = self._windows(rows)
        readings: dict[int, Reading] = {}
        for batch in sorted_batches([len(window) for _, window in found], tokens=PASS_TOKENS):
            with torch.inference_mode():
                logits, wanted = self._logits([found[i][1] for i in batch])
                losses, best = F.cross_entropy(logits, wanted, reduction="none").cpu(), logits.argmax(1).cpu()
            sizes = [len(found[i][1]) for i in batch]
            for i, loss, first in zip(batch, torch.split(losses, sizes), torch.split(best, sizes), strict=True):
                readings[i] = Reading(found[i][0], loss.numpy(), first.numpy())
        return reading_metrics(rows, [readings[i] for i in range(len(found))])
