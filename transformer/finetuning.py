"""Fine-tuning a classifier: a new head on any encoder, all weights trained on labelled rows by cross-entropy.

The head is BERT's (Devlin et al. 2019, section 4.1): logits = W tanh(P h + p) + b, h the first token's last state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .batching import sorted_batches, tensors, token_batches
from .checkpoint import Checkpoint
from .config import ClassificationHead
from .data import LabelledData, LabelledRow
from .errors import InputError
from .heads import build_head
from .lesson import asked_of, check_splits, teach
from .metrics import classification_metrics
from .model import Transformer
from .parts import Part
from .processes import ALONE, Processes
from .progress import SILENT, Progress
from .training_options import FLOAT32, TrainingOptions, loop_options, one_budget
from .zeros import keep_zeros, sparse_linears

EPOCHS = 3
PASS_TOKENS = 4096


@dataclass(frozen=True)
class FineTuning:
    """How to fine-tune.

    Attributes:
        epochs, steps, minutes: how long, by one of them; `EPOCHS` passes over the rows where none is given.
        lr: peak learning rate.
        batch_tokens: greatest number of tokens in a batch.
        warmup: optimizer steps of linear warm-up (at most a tenth of all).
        dropout: of embeddings and sub-layers.
        weight_decay, clip: as in `TrainingOptions`.
        max_length: cut of every text in tokens; None: the model's own.
        schedule: of the learning rate after it, as in `TrainingOptions`.
        precision: of products, as in `TrainingOptions`.
        seed: of the head and the order of the rows.
    """

    epochs: int | None = None
    steps: int | None = None
    minutes: float | None = None
    lr: float = 1e-4
    batch_tokens: int = 1024
    warmup: int = 100
    schedule: str = "linear"
    dropout: float = 0.0
    weight_decay: float = 0.01
    clip: float = 1.0
    max_length: int | None = None
    precision: str = FLOAT32
    seed: int = 0

    def __post_init__(self) -> None:
        problems = one_budget(self)
        if self.epochs is not None and self.epochs < 1:
            problems.append(f"epochs is {self.epochs}, not at least 1")
        if self.batch_tokens < 1:
            problems.append(f"batch_tokens is {self.batch_tokens}, not at least 1")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}, not from 0 to below 1")
        if problems:
            raise InputError("training: " + "; ".join(problems))
        self.training(1)

    def training(self, epochs_steps: int) -> TrainingOptions:
        """The loop's options; `epochs_steps` is the number of steps of all epochs, if it is they that count."""
        return loop_options(self, epochs_steps)


def finetune(
    checkpoint: Checkpoint,
    data: LabelledData,
    out: Path,
    options: FineTuning,
    *,
    device: str = "cpu",
    resume: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
    board: Path | None = None,
    processes: Processes = ALONE,
) -> Checkpoint:
    """Fine-tune, write a checkpoint directory whole, and return it; what happened is its provenance `training`.

    Args:
        checkpoint: an encoder in float; its own classifier is kept where it has the data's labels.
        data: rows of train (learnt from), valid (choosing the epoch) and test (opened once).
        out: the directory to make.
        options: how.
        device: the torch device.
        resume: go on with a training that was broken off; one that is finished is read and returned.
        force: replace `out`, and start anew.
        progress: told of every step.

    Raises:
        InputError: something given cannot be used; `out` is then untouched.
    """
    start = _start(checkpoint, data, options)
    return teach(
        start,
        lambda: _Lesson(start, data, options, device),
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


def with_classifier(checkpoint: Checkpoint, labels: Sequence[str], seed: int) -> Checkpoint:
    """The encoder with a classifier of `labels`: its own where it has one of these, else a new one drawn by `seed`."""
    head = checkpoint.config.head
    if isinstance(head, ClassificationHead) and set(head.labels) == set(labels):
        return checkpoint
    config = replace(checkpoint.config, head=ClassificationHead(tuple(labels)))
    state = {name: value for name, value in checkpoint.state.items() if not name.startswith("head.")}
    generator = torch.Generator().manual_seed(seed)
    assert config.head is not None
    for name, value in build_head(config.head, width=config.d_model).state_dict().items():
        drawn = torch.normal(0.0, 0.02, value.shape, generator=generator)
        state[f"head.{name}"] = drawn if name.endswith("weight") else torch.zeros_like(value)
    return replace(checkpoint, config=config, state=state)


def _start(checkpoint: Checkpoint, data: LabelledData, options: FineTuning) -> Checkpoint:
    """The model before its first step; InputError where model and data allow none."""
    if not checkpoint.config.is_float:
        raise InputError("training: the model is int8; fine-tune the one from before quantize")
    check_splits(data, "rows")
    if len(data.labels) < 2:
        raise InputError(f"training: train has the one label {data.labels[0]!r}, at least 2 are needed")
    model = with_classifier(checkpoint, data.labels, options.seed)
    if options.max_length is not None:
        text = replace(model.config.text, max_length=options.max_length)
        model = replace(model, config=replace(model.config, text=text))
    model.text_encoder()
    return model


class _Lesson:
    """The model and the rows as token ids; see `Lesson`."""

    deciding = "accuracy"

    def __init__(self, checkpoint: Checkpoint, data: LabelledData, options: FineTuning, device: str) -> None:
        head = checkpoint.config.head
        assert isinstance(head, ClassificationHead)
        self.model: Transformer = checkpoint.to_torch(dropout=options.dropout).to(device)
        keep_zeros(self.model, sparse_linears(checkpoint))
        self.data, self.options, self.device = data, options, device
        self.pad_id, self.encoder = checkpoint.config.text.pad_id, checkpoint.text_encoder()
        self.places = {label: i for i, label in enumerate(head.labels)}
        self.ids = self.encoder.encode([row.text for row in data.train])
        self.lengths = [len(one) for one in self.ids]

    def batches(self, epoch: int) -> list[list[int]]:
        """Rows of train, batch by batch."""
        return token_batches(self.lengths, tokens=self.options.batch_tokens, seed=self.options.seed, epoch=epoch)

    def loss(self, part: Part) -> Tensor:
        """The part's share of the mean cross-entropy of some rows of train."""
        result = self.model(*tensors([self.ids[i] for i in part], self.pad_id, self.device)).result
        labels = [self.places[self.data.train[i].label] for i in part]
        return part.share * F.cross_entropy(result, torch.tensor(labels, device=self.device))

    def measure(self, split: str) -> dict[str, float]:
        """Accuracy and macro-F1 in points."""
        rows: Sequence[LabelledRow] = getattr(self.data, split)
        labels = [self.places[row.label] for row in rows]
        logits = self.logits([row.text for row in rows])
        return classification_metrics(logits, labels, [row.group for row in rows]).values()

    def logits(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Texts -> (n, C)."""
        ids = self.encoder.encode(texts)
        result = np.zeros((len(ids), len(self.places)), np.float32)
        self.model.eval()
        for batch in sorted_batches([len(one) for one in ids], tokens=PASS_TOKENS):
            with torch.inference_mode():
                output = self.model(*tensors([ids[i] for i in batch], self.pad_id, self.device)).result
            result[batch] = output.cpu().numpy()
        return result
