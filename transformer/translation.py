"""Sequence to sequence: an encoder-decoder taught to translate or to summarize by pairs of texts, and what it writes.

The loss is cross-entropy of the target's next token, smoothed: 1 - e of the weight on the token, e on all evenly
(Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4), a mean over valid tokens. Batches are counted in
tokens of both sides. After every epoch the model writes for texts of valid, and the best epoch by BLEU, of summaries by
ROUGE-L, is kept. A translation of half a text is none, so pairs that are too long are left out; a summary of a text's
beginning is one, so a source that is to be summarized is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .batching import sorted_batches, tensors, token_batches
from .checkpoint import Checkpoint
from .config import LanguageHead
from .errors import InputError
from .generation import Decoding, generate
from .head_config import LANGUAGE
from .lesson import asked_of, check_splits, teach
from .metrics import TaskMetrics, joined
from .model import Transformer
from .parts import Part
from .processes import ALONE, Processes
from .progress import SILENT, Progress
from .sources import SourceReader, position_limits, summarizes
from .splits import SUMMARIZATION, Pair, PairData
from .teaching import EPOCHS, Teaching
from .text_metrics import DECIDING, pair_metrics, token_accuracy_metrics
from .tokenizer import TextEncoder
from .zeros import keep_zeros, sparse_linears

PASS_TOKENS = 4096
SPARE = 10  # tokens a text may be longer than the longest reference

TokenPair = tuple[list[int], list[int]]  # ids of source and target


def teach_pairs(
    checkpoint: Checkpoint,
    data: PairData,
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
    """Train an encoder-decoder on pairs; see `lesson.teach` for the arguments and what is written.

    What it is taught is what it does from then on: its head's kind follows the data's task.

    Raises:
        InputError: the model is no float encoder-decoder, a split has no pairs, or no pair fits the positions.
    """
    config = checkpoint.config
    if not (config.encoder and isinstance(config.head, LanguageHead)) or not config.is_float:
        raise InputError(f"training: {data.task} needs an encoder-decoder with a language head, in float")
    check_splits(data, "pairs")
    checkpoint = with_task(checkpoint, data.task)
    lesson = _Lesson(checkpoint, data, options, device)
    lesson.check()
    return teach(
        checkpoint.with_provenance(**lesson.pairs.counts("pairs_left_out")),
        lambda: lesson,
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


def with_task(checkpoint: Checkpoint, task: str) -> Checkpoint:
    """The model with a head that says what pairs of a task teach it."""
    head = checkpoint.config.head
    assert isinstance(head, LanguageHead)
    kind = SUMMARIZATION if task == SUMMARIZATION else LANGUAGE
    return replace(checkpoint, config=replace(checkpoint.config, head=replace(head, kind=kind)))


def translate(
    model: Transformer,
    encoder: TextEncoder,
    texts: Sequence[str],
    options: Decoding,
    *,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> list[str]:
    """The best text for each text, its translation or summary; sources longer than `encoder` cuts lose their ends.

    Args:
        model: an encoder-decoder in evaluation mode.
        encoder: of its tokenizer.
        texts: the sources.
        options: how to decode.
        device: where the model is.
        progress: told of each batch.
    """
    ids = encoder.encode(texts)
    written = [""] * len(ids)
    progress.start("translate", len(ids), "texts")
    for batch in sorted_batches([len(one) for one in ids], tokens=PASS_TOKENS // options.beams):
        found = generate(model, [ids[i] for i in batch], options, device=device).sequences[:, 0]
        for i, text in zip(batch, encoder.decode_batch(found.tolist()), strict=True):
            written[i] = text
        progress.advance(len(batch))
    progress.done()
    return written


@dataclass(frozen=True)
class ReadPairs:
    """Pairs as token ids.

    Attributes:
        ids: of source and target of the pairs that the positions hold.
        left_out: pairs that they do not hold.
        cut: how many of `ids` have a source of which only the beginning is read; None where no source is cut.
    """

    ids: list[TokenPair]
    left_out: int
    cut: int | None

    def counts(self, left_out: str) -> dict[str, int]:
        """What was left out, under this name, and what was cut, where sources are cut."""
        return {left_out: self.left_out} | ({} if self.cut is None else {"sources_cut": self.cut})


def read_pairs(checkpoint: Checkpoint, pairs: Sequence[Pair]) -> ReadPairs:
    """Token ids of pairs; those with a target that is too long, or a translator's source, are left out."""
    _, limit = position_limits(checkpoint.config)
    sources = SourceReader(checkpoint.config, checkpoint.tokenizer).read([pair.source for pair in pairs])
    targets = TextEncoder(checkpoint.tokenizer, limit + 1).encode([pair.target for pair in pairs])
    rows = zip(sources.ids, targets, sources.cut, strict=True)
    kept = [((source, target), cut) for source, target, cut in rows if source is not None and len(target) <= limit]
    cut = sum(cut for _, cut in kept) if summarizes(checkpoint.config) else None
    return ReadPairs([pair for pair, _ in kept], len(pairs) - len(kept), cut)


def forced_logits(model: Transformer, pairs: Sequence[TokenPair], device: str) -> tuple[Tensor, Tensor]:
    """Logits (N, V) of every token of the targets, given the source and the tokens before it, and the tokens (N,).

    A decoder by itself has no sources: they are not looked at.
    """
    head, pad_id = model.config.head, model.config.text.pad_id
    assert isinstance(head, LanguageHead)
    begun, mask = tensors([[head.start_id, *target[:-1]] for _, target in pairs], pad_id, device)
    if model.config.encoder:
        sources, source_mask = tensors([source for source, _ in pairs], pad_id, device)
        logits = model(sources, source_mask, target_ids=begun, target_mask=mask).result
    else:
        logits = model(begun, mask).result
    return logits, torch.tensor([token for _, target in pairs for token in target], device=device)


class _Lesson:
    """The model and the pairs as token ids; see `Lesson`."""

    def __init__(self, checkpoint: Checkpoint, data: PairData, options: Teaching, device: str) -> None:
        self.deciding = DECIDING[data.task]
        self.model = checkpoint.to_torch(dropout=options.dropout).to(device)
        keep_zeros(self.model, sparse_linears(checkpoint))
        self.checkpoint, self.data, self.options, self.device = checkpoint, data, options, device
        self.encoder, self.limits = checkpoint.text_encoder(), position_limits(checkpoint.config)
        self.pairs = read_pairs(checkpoint, data.train)
        self.ids = self.pairs.ids
        self.lengths = [len(source) + len(target) for source, target in self.ids]
        self.written = [len(target) for _, target in self.ids]

    def check(self) -> None:
        """Raise InputError where nothing is short enough to learn from, or something too long to judge on."""
        limits = f"the model's {self.limits[0]} positions of a source and {self.limits[1]} of a target"
        if not self.ids:
            raise InputError(f"training: no pair of train is within {limits}")
        for split in ("valid", "test"):
            over = read_pairs(self.checkpoint, getattr(self.data, split)).left_out
            if over:
                raise InputError(
                    f"training: {over} pairs of {split} are over {limits}: give the model more, or cut them"
                )

    def batches(self, epoch: int) -> list[list[int]]:
        """See `Lesson`."""
        return token_batches(self.lengths, tokens=self.options.batch_tokens, seed=self.options.seed, epoch=epoch)

    def loss(self, part: Part) -> Tensor:
        """See `Lesson`."""
        logits, wanted = forced_logits(self.model, [self.ids[i] for i in part], self.device)
        return part.share_of(self.written) * F.cross_entropy(logits, wanted, label_smoothing=self.options.smoothing)

    def measure(self, split: str) -> dict[str, float]:
        """BLEU and chrF, or ROUGE, and token accuracy; of valid on `valid_texts` pairs drawn by the seed."""
        pairs: list[Pair] = list(getattr(self.data, split))
        if split == "valid" and len(pairs) > self.options.valid_texts:
            drawn = np.random.default_rng(self.options.seed).choice(len(pairs), self.options.valid_texts, replace=False)
            pairs = [pairs[i] for i in sorted(drawn)]
        return self.judge(pairs).values()

    def judge(self, pairs: Sequence[Pair]) -> TaskMetrics:
        """What the model is worth on pairs, greedily."""
        self.model.eval()
        ids = read_pairs(self.checkpoint, pairs).ids
        longest = max(len(target) for _, target in ids) + SPARE
        options = Decoding(max_new_tokens=min(longest, self.limits[1]))
        texts = translate(self.model, self.encoder, [pair.source for pair in pairs], options, device=self.device)
        groups = [pair.group for pair in pairs]
        correct = np.zeros(len(ids), np.int64)
        for batch in sorted_batches([len(source) + len(target) for source, target in ids], tokens=PASS_TOKENS):
            with torch.inference_mode():
                logits, wanted = forced_logits(self.model, [ids[i] for i in batch], self.device)
                right = (logits.argmax(1) == wanted).cpu()
            for i, part in zip(batch, torch.split(right, [len(ids[i][1]) for i in batch]), strict=True):
                correct[i] = int(part.sum())
        return joined(
            pair_metrics(self.data.task, texts, [pair.target for pair in pairs], groups),
            token_accuracy_metrics(correct, [len(target) for _, target in ids], groups),
        )
