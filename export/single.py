"""The loop that writes one text a row, of the best tokens or of drawn ones; see `transformer.generation._Single`.

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
    zero = g.add("Expand", g.constant(0, np.float32), steps.rows)
    count = g.add("Expand", g.constant(0), steps.rows)

    sampling = Sampling(g, decoder.vocabulary, steps.most)

    def body(b: Graph, place: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
        tokens, ended, score, count, *caches = carried
        logits, caches = steps.logits(b, place, tokens, caches)
        column = sampling.tokens(b, logits, place)
        chance = b.add("GatherElements", b.add("LogSoftmax", logits, axis=1), column, axis=1)
        chosen = b.add("Squeeze", column, b.constant([1]))
        score = b.add("Where", ended, score, b.add("Add", score, b.add("Squeeze", chance, b.constant([1]))))
        count = b.add("Where", ended, count, b.add("Add", count, b.constant(1)))
        written = b.add("Where", ended, b.constant(decoder.config.text.pad_id), chosen)
        ended = b.add("Or", ended, b.add("Equal", chosen, b.constant(decoder.head.end_id)))
        return _not_all(b, ended), [chosen, ended, score, count, *caches], [written]

    final, (written,) = g.loop(steps.most, [start, ended, zero, count, *steps.caches(g)], body, scanned=1)
    length = g.add("Cast", g.add("Max", final[3], g.constant(1)), to=FLOAT)
    scores = g.add("Div", final[2], g.add("Pow", length, "length_penalty"))
    axis = g.constant([1])
    table = g.add("Reshape", written, g.add("Concat", g.constant([-1]), steps.rows, axis=0))  # (S, R)
    return [g.add("Unsqueeze", g.add("Transpose", table, perm=[1, 0]), axis), g.add("Unsqueeze", scores, axis)]


def _not_all(b: Graph, flags: str) -> str:
    least = b.add("ReduceMin", b.add("Cast", flags, to=INT64), keepdims=0)
    return b.add("Equal", least, b.constant(0))
