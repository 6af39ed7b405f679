"""The loop of beam search; see `transformer.generation._Beams`.

Shapes: B texts, K beams, R = B * K rows, S tokens written, M candidates, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from .best import best_sums
from .decoder import Decoder, Steps
from .graph import Graph

BOOL, FLOAT, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def beam_search(g: Graph, decoder: Decoder, steps: Steps) -> list[str]:
    """Sequences (B, K, S) and scores (B, K); `steps` have one row a text."""
    beams = g.add("Reshape", "num_beams", g.constant([1]))
    grid = g.add("Concat", steps.rows, beams, axis=0)
    return _Search(decoder, steps.with_beams(g, beams), steps.rows, beams, grid).run(g)


class _Search:
    def __init__(self, decoder: Decoder, steps: Steps, batch: str, beams: str, grid: str) -> None:
        """`batch` (1,) is B, `beams` (1,) is K, `grid` (2,) both; `steps` have R rows."""
        self.decoder, self.steps = decoder, steps
        self.batch, self.beams, self.grid = batch, beams, grid

    def run(self, g: Graph) -> list[str]:
        """The loop and what it gives."""
        first = g.add("Equal", g.add("Range", g.constant(0), "num_beams", g.constant(1)), g.constant(0))
        lowest = g.constant(-np.inf, np.float32)
        scores = g.add("Expand", g.add("Where", first, g.constant(0, np.float32), lowest), self.grid)
        none = g.add("Equal", self.steps.most, g.constant(0))
        nothing = g.add("Expand", g.add("Where", none, g.constant(0, np.float32), lowest), self.grid)
        zero = onnx.numpy_helper.from_array(np.zeros(1, np.int64))
        texts = g.add("ConstantOfShape", g.add("Concat", self.grid, g.constant([0]), axis=0), value=zero)
        still = g.add("Expand", g.constant(True, np.bool_), self.batch)
        start = g.add("Expand", g.constant(self.decoder.head.start_id), self.steps.rows)

        def body(b: Graph, place: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
            tokens, running, scores, finished, best, still, *caches = carried
            logits, caches = self.steps.logits(b, place, tokens, caches)
            chances = b.add("LogSoftmax", logits, axis=1)
            state: tuple[str, ...] = (running, scores, finished, best, still)
            tokens, state, taken = self._advance(b, place, chances, state)
            caches = [b.add("Gather", cache, taken, axis=0) for cache in caches]
            more = b.add("Cast", b.add("ReduceMax", b.add("Cast", state[4], to=INT64), keepdims=0), to=BOOL)
            return more, [tokens, *state, *caches], []

        initial = [start, texts, scores, texts, nothing, still, *self.steps.caches(g)]
        final, _ = g.loop(self.steps.most, initial, body, scanned=0)
        return [final[3], final[4]]

    def _advance(self, b: Graph, place: str, chances: str, state: tuple[str, ...]) -> tuple[str, tuple[str, ...], str]:
        """Log-probabilities (R, V) -> next tokens (R,), the state after them, and which rows (R,) they come from."""
        running, scores, finished, best, still = state
        beams, one, size = self.beams, b.constant(1), b.constant(self.decoder.vocabulary)
        number = b.add("Add", place, one)
        width = b.add("Min", b.add("Mul", beams, b.constant([2])), b.add("Mul", beams, size))
        scores, places = best_sums(b, scores, chances, self.decoder.vocabulary, width)
        origin = b.add("Div", places, size)
        tokens = b.add("Sub", places, b.add("Mul", origin, size))
        texts = b.add("Gather", _rows(b, running), self._flat(b, origin, beams), axis=0)
        column = b.add("Unsqueeze", tokens, b.constant([2]))
        texts = b.add("Concat", texts, column, axis=2)
        last = b.add("Equal", number, self.steps.most)
        ends = b.add("Or", b.add("Equal", tokens, b.constant(self.decoder.head.end_id)), last)
        order = b.add("Range", b.constant(0), b.add("Squeeze", width), one)
        allowed = b.add("And", ends, b.add("Less", order, beams))
        allowed = b.add("And", allowed, b.add("Unsqueeze", still, b.constant([1])))
        lowest = b.constant(-np.inf, np.float32)
        length = b.add("Pow", b.add("Cast", number, to=FLOAT), "length_penalty")
        fresh = b.add("Where", allowed, b.add("Div", scores, length), lowest)
        column = b.add("Concat", self.grid, b.constant([1]), axis=0)
        pad = b.add("Expand", b.constant(self.decoder.config.text.pad_id), column)
        every = b.add("Concat", b.add("Concat", finished, pad, axis=2), texts, axis=1)
        best, chosen = b.add_many("TopK", b.add("Concat", best, fresh, axis=1), beams, outputs=2, axis=1)
        finished = b.add("Gather", _rows(b, every), self._flat(b, chosen, b.add("Add", beams, width)), axis=0)
        scores, kept = b.add_many("TopK", b.add("Where", ends, lowest, scores), beams, outputs=2, axis=1)
        running = b.add("Gather", _rows(b, texts), self._flat(b, kept, width), axis=0)
        tokens = b.add("Reshape", b.add("GatherElements", tokens, kept, axis=1), b.constant([-1]))
        taken = b.add("GatherElements", origin, kept, axis=1)
        taken = b.add("Reshape", self._flat(b, taken, beams), b.constant([-1]))
        worst = b.add("ReduceMin", best, b.constant([1]), keepdims=0)
        reachable = b.add("Div", b.add("ReduceMax", scores, b.constant([1]), keepdims=0), length)
        done = b.add("And", b.add("Greater", worst, lowest), b.add("LessOrEqual", reachable, worst))
        still = b.add("And", still, b.add("Not", done))
        return tokens, (running, scores, finished, best, still), taken

    @staticmethod
    def _flat(b: Graph, columns: str, width: str) -> str:
        """Columns (B, M) of rows that are `width` (1,) wide -> places in the flattened rows."""
        count = b.add("Squeeze", b.add("Shape", columns, start=0, end=1))
        first = b.add("Mul", b.add("Range", b.constant(0), count, b.constant(1)), width)
        return b.add("Add", columns, b.add("Unsqueeze", first, b.constant([1])))


def _rows(b: Graph, texts: str) -> str:
    """(B, M, S) -> (B * M, S)."""
    tail = b.add("Shape", texts, start=2, end=3)
    return b.add("Reshape", texts, b.add("Concat", b.constant([-1]), tail, axis=0), allowzero=1)
