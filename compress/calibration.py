"""What pruning and quantization look at: token ids of texts or pairs of the training data, in batches of like length.

A decoder is given the start token and then the text that it should write, all but the last token.
"""

import random
from dataclasses import dataclass

from torch import Tensor

from ..transformer.batching import tensors
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import LanguageHead
from ..transformer.data import PairData, SearchData
from ..transformer.errors import InputError
from ..transformer.model import Output, Transformer
from ..transformer.sources import position_limits
from ..transformer.tokenizer import length_batches, windows
from ..transformer.translation import TokenPair, read_pairs
from .step import StepContext

BATCH = 32


@dataclass(frozen=True)
class Batch:
    """What a model is given.

    Attributes:
        ids, mask: (B, T) int64, of the encoder, or of a decoder by itself.
        target_ids, target_mask: (B, T') int64, of a decoder beside an encoder.
    """

    ids: Tensor
    mask: Tensor
    target_ids: Tensor | None = None
    target_mask: Tensor | None = None

    def every(self, step: int) -> "Batch":
        """The first row and each `step` rows on another."""
        target_ids, target_mask = (None if one is None else one[::step] for one in (self.target_ids, self.target_mask))
        return Batch(self.ids[::step], self.mask[::step], target_ids, target_mask)

    def run(self, model: Transformer) -> Output:
        """The model's output, with the states between layers."""
        output: Output = model(
            self.ids, self.mask, target_ids=self.target_ids, target_mask=self.target_mask, with_states=True
        )
        return output


@dataclass(frozen=True)
class Calibration:
    """Examples in random order; who needs fewer takes the first ones.

    Attributes:
        ids: what the encoder or a decoder by itself is given, row by row.
        targets: what a decoder beside an encoder is given, row by row; empty without one.
        pad_id: of the rows in batches.
        left_out: pairs that were drawn and are over the model's positions, or have an empty side.
    """

    ids: tuple[list[int], ...] = ()
    targets: tuple[list[int], ...] = ()
    pad_id: int = 0
    left_out: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint, context: StepContext, count: int, share: float) -> "Calibration":
        """At most `count` examples, drawn with the context's seed.

        Those of an encoder are texts, a share of them pages, the model's default prompt before each; those of a decoder
        by itself windows of texts; those of an encoder-decoder the pairs of train that its positions hold.
        """
        if not count:
            return cls()
        config, drawing = checkpoint.config, random.Random(context.seed)
        if not config.decoder:
            return cls(_texts(checkpoint, context, drawing, count, share), pad_id=config.text.pad_id)
        if not isinstance(config.head, LanguageHead):
            raise InputError(
                "a decoder without a language head has no start token to be calibrated with; "
                "prune it by magnitude, without refit"
            )
        start = config.head.start_id
        if config.encoder:
            pairs, left_out = _pairs(checkpoint, context, drawing, count)
            begun = tuple([start, *target[:-1]] for _, target in pairs)
            return cls(tuple(source for source, _ in pairs), begun, config.text.pad_id, left_out)
        found = _windows(checkpoint, context, drawing, count)
        return cls(tuple([start, *window[:-1]] for window in found), pad_id=config.text.pad_id)

    def batches(self, count: int, device: str, *, first: int = 0, size: int = BATCH) -> list[Batch]:
        """Examples from number `first` up to `count` in batches of like length, at most `size` in each, on the device.

        Args:
            count: how many of all examples are taken, those before `first` among them.
            device: of the tensors.
            first: how many of these were taken before.
            size: greatest number of rows.
        """
        sides = [side[first:] for side in self._sides(count)]
        result = []
        for places in length_batches([sum(map(len, example)) for example in zip(*sides, strict=True)], size):
            parts = [part for side in sides for part in tensors([side[i] for i in places], self.pad_id, device)]
            result.append(Batch(*parts))
        return result

    def _sides(self, count: int) -> list[tuple[list[int], ...]]:
        return [side[:count] for side in (self.ids, self.targets) if side]

    @property
    def kind(self) -> str:
        """What an example is."""
        return "pairs" if self.targets else "texts"

    def counts(self, count: int) -> dict[str, int]:
        """How many examples and tokens the first `count` examples really are."""
        tokens = sum(len(row) for side in self._sides(count) for row in side)
        return {self.kind: len(self.ids[:count]), "tokens": tokens}


def _texts(
    checkpoint: Checkpoint, context: StepContext, drawing: random.Random, count: int, share: float
) -> tuple[list[int], ...]:
    texts = context.training_texts()
    pages = [page.text for page in context.data.pages] if isinstance(context.data, SearchData) else []
    whole = min(int(share * count), len(pages))
    chosen = drawing.sample(texts, min(count - whole, len(texts)))
    if whole:
        chosen += drawing.sample(pages, whole)
        drawing.shuffle(chosen)
    prompt = checkpoint.config.text.prompt()
    return tuple(row for row in checkpoint.text_encoder().encode([prompt + text for text in chosen]) if row)


def _windows(checkpoint: Checkpoint, context: StepContext, drawing: random.Random, count: int) -> list[list[int]]:
    texts = context.training_texts()
    chosen = drawing.sample(texts, min(count, len(texts)))
    found = [window for _, window in windows(chosen, checkpoint.tokenizer, checkpoint.config.embedding.positions)]
    return drawing.sample(found, min(count, len(found)))


def _pairs(
    checkpoint: Checkpoint, context: StepContext, drawing: random.Random, count: int
) -> tuple[list[TokenPair], int]:
    data = context.data
    if not isinstance(data, PairData) or not data.train:
        raise InputError("an encoder-decoder is calibrated on pairs: give DATA a train file of sources and targets")
    limits = position_limits(checkpoint.config)
    chosen = drawing.sample(data.train, min(count, len(data.train)))
    found = [pair for pair in read_pairs(checkpoint, chosen).ids if all(pair)]
    if not found:
        raise InputError(
            f"of {len(chosen)} pairs of train none is within the model's {limits[0]} positions of a source and "
            f"{limits[1]} of a target"
        )
    return found, len(chosen) - len(found)
