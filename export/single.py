"""The loop that writes one text a row, of the best tokens or of drawn ones; see `transformer.generation._Single`.

The loop writes on in rows that have ended, as long as there are others; what follows their end is taken away at last.

Shapes: R texts, S tokens written, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from .decoder import Decoder, Steps
from .graph import Graph
from .sampling import Sampling

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def single_text(g: Graph, decoder: Decoder, steps: Steps) -> list[str]:
    """Sequences (R, 1, S) and scores (R, 1)."""
    start = g.add("Expand", g.constant(decoder.head.start_id), steps.rows)
    ended = g.add("Expand", g.constant(False, np.bool_), steps.rows)
    sampling = Sampling(g, decoder.vocabulary, steps.most, steps.rows)
    end = g.constant(decoder.head.end_id)

    def body(b: Graph, place: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
        tokens, ended, *caches = carried
        logits, caches = steps.logits(b, place, tokens, caches)
        column = sampling.tokens(b, logits, place)
        chance = b.add("GatherElements", b.add("LogSoftmax", logits, axis=1), column, axis=1)
        chosen = b.add("Squeeze", column, b.constant([1]))
        ended = b.add("Or", ended, b.add("Equal", chosen, end))
        return _not_all(b, ended), [chosen, ended, *caches], [column, chance]

    _, scans = g.loop(steps.most, [start, ended, *steps.caches(g)], body, scanned=2)
    written, chances = (g.add("Reshape", scan, g.add("Concat", g.constant([-1]), steps.rows, axis=0)) for scan in scans)
    ends = g.add("Cast", g.add("Equal", written, end), to=INT64)  # (S, R)
    before = g.add("CumSum", ends, g.constant(0), exclusive=1)
    valid = g.add("Equal", before, g.constant(0))
    written = g.add("Where", valid, written, g.constant(decoder.config.text.pad_id))
    total = g.add("ReduceSum", g.add("Where", valid, chances, g.constant(0, np.float32)), g.constant([0]), keepdims=0)
    count = g.add("ReduceSum", g.add("Cast", valid, to=FLOAT), g.constant([0]), keepdims=0)
    length = g.add("Max", count, g.constant(1, np.float32))
    scores = g.add("Div", total, g.add("Pow", length, "length_penalty"))
    axis = g.constant([1])
    return [g.add("Unsqueeze", g.add("Transpose", written, perm=[1, 0]), axis), g.add("Unsqueeze", scores, axis)]


def _not_all(b: Graph, flags: str) -> str:
    least = b.add("ReduceMin", b.add("Cast", flags, to=INT64), keepdims=0)
    return b.add("Equal", least, b.constant(0))
