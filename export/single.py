"""The loop that writes one text a row, of the best tokens or of drawn ones; see `transformer.generation._Single`.

Rounds run in blocks. Within a block the caches of attention begin empty and stay small, for every round copies them;
what the blocks before have left is read where it lies, and grows once a block. So a late token costs no more copies
than an early one. The loop writes on in rows that have ended, as long as there are others; what follows their end is
taken away at last.

Shapes: R texts, S tokens written, P of them in blocks before, V vocabulary, H heads, K head width.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import onnx

from ..transformer.config import AttentionConfig
from ..transformer.layer_config import MixerConfig
from .decoder import Decoder, Steps
from .graph import Graph
from .mixers import Old, cache_count, empty_caches, turned_keys
from .sampling import Sampling

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
BLOCK = 32


def single_text(g: Graph, decoder: Decoder, steps: Steps) -> list[str]:
    """Sequences (R, 1, S) and scores (R, 1)."""
    writing = _Writing(decoder, steps, Sampling(g, decoder.vocabulary, steps.most, steps.rows))
    start = g.add("Expand", g.constant(decoder.head.start_id), steps.rows)
    ended = g.add("Expand", g.constant(False, np.bool_), steps.rows)
    nothing = g.add("Concat", g.constant([0]), steps.rows, axis=0)
    written = g.add("ConstantOfShape", nothing, value=onnx.numpy_helper.from_array(np.zeros(1, np.int64)))
    initial = [start, ended, written, g.add("ConstantOfShape", nothing), *writing.begun(g)]
    blocks = g.add("Div", g.add("Add", steps.most, g.constant(BLOCK - 1)), g.constant(BLOCK))
    final, _ = g.loop(blocks, initial, writing.block, scanned=0)
    return _without_rest(g, decoder, *final[2:4])


class _Writing:
    """Both loops. The outer one keeps keys turned, (R, H, K, P), and values (R, H, P, K); cells keep their states."""

    def __init__(self, decoder: Decoder, steps: Steps, sampling: Sampling) -> None:
        self.decoder, self.steps, self.sampling = decoder, steps, sampling

    def begun(self, g: Graph) -> list[str]:
        """What the outer loop begins with."""
        kept: list[str] = []
        for mixer, (first, *others) in self._by_layer(self.steps.caches(g)):
            kept += [turned_keys(g, first) if isinstance(mixer, AttentionConfig) else first, *others]
        return kept

    def block(self, g: Graph, number: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
        """Body of the outer loop: tokens and ends (R,), what was written (P, R) and its chances, what is kept."""
        tokens, ended, written, chances, *kept = carried
        before = g.add("Mul", number, g.constant(BLOCK))
        rounds = g.add("Min", g.add("Sub", self.steps.most, before), g.constant(BLOCK))
        hidden, some = self.steps.old(g, before)
        olds, fresh = list[Old](), list[str]()
        for mixer, own in self._by_layer(kept):
            attends = isinstance(mixer, AttentionConfig)
            olds += [Old(own[0], own[1], hidden, some)] if attends else []
            fresh += empty_caches(g, mixer, self.steps.rows) if attends else own

        def body(b: Graph, place: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
            return self._round(b, b.add("Add", before, place), carried, olds)

        (tokens, ended, *new), scans = g.loop(rounds, [tokens, ended, *fresh], body, scanned=2)
        shape = g.add("Concat", g.constant([-1]), self.steps.rows, axis=0)
        written, chances = (
            g.add("Concat", so_far, g.add("Reshape", scan, shape), axis=0)
            for so_far, scan in zip((written, chances), scans, strict=True)
        )
        return _not_all(g, ended), [tokens, ended, written, chances, *self._grown(g, kept, new)], []

    def _round(
        self, g: Graph, place: str, carried: Sequence[str], olds: Sequence[Old]
    ) -> tuple[str, list[str], list[str]]:
        tokens, ended, *caches = carried
        logits, caches = self.steps.logits(g, place, tokens, caches, olds)
        column = self.sampling.tokens(g, logits, place)
        chance = g.add("GatherElements", g.add("LogSoftmax", logits, axis=1), column, axis=1)
        tokens = g.add("Squeeze", column, g.constant([1]))
        ended = g.add("Or", ended, g.add("Equal", tokens, g.constant(self.decoder.head.end_id)))
        return _not_all(g, ended), [tokens, ended, *caches], [column, chance]

    def _grown(self, g: Graph, kept: Sequence[str], new: Sequence[str]) -> list[str]:
        """What is kept, with a block's caches."""
        grown: list[str] = []
        for (mixer, before), (_, after) in zip(self._by_layer(kept), self._by_layer(new), strict=True):
            if isinstance(mixer, AttentionConfig):
                grown.append(g.add("Concat", before[0], turned_keys(g, after[0]), axis=3))
                grown.append(g.add("Concat", before[1], after[1], axis=2))
            else:
                grown += after
        return grown

    def _by_layer(self, caches: Sequence[str]) -> Iterator[tuple[MixerConfig, list[str]]]:
        """The mixers, and what each keeps."""
        left = iter(caches)
        for layer in self.decoder.config.decoder:
            if layer.mixer is not None:
                yield layer.mixer, list(islice(left, cache_count(layer.mixer)))


def _not_all(g: Graph, flags: str) -> str:
    least = g.add("ReduceMin", g.add("Cast", flags, to=INT64), keepdims=0)
    return g.add("Equal", least, g.constant(0))


def _without_rest(g: Graph, decoder: Decoder, written: str, chances: str) -> list[str]:
    """Tokens and their log-probabilities (S, R) -> sequences (R, 1, S), padding after the end, and scores (R, 1)."""
    ends = g.add("Cast", g.add("Equal", written, g.constant(decoder.head.end_id)), to=INT64)
    valid = g.add("Equal", g.add("CumSum", ends, g.constant(0), exclusive=1), g.constant(0))
    written = g.add("Where", valid, written, g.constant(decoder.config.text.pad_id))
    first, axis = g.constant([0]), g.constant([1])
    total = g.add("ReduceSum", g.add("Where", valid, chances, g.constant(0, np.float32)), first, keepdims=0)
    count = g.add("ReduceSum", g.add("Cast", valid, to=FLOAT), first, keepdims=0)
    length = g.add("Pow", g.add("Max", count, g.constant(1, np.float32)), "length_penalty")
    scores = g.add("Unsqueeze", g.add("Div", total, length), axis)
    return [g.add("Unsqueeze", g.add("Transpose", written, perm=[1, 0]), axis), scores]
