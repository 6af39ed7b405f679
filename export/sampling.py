"""Tokens drawn in ONNX as `transformer.generation` draws them: the same ones for a seed, in any batch.

The numbers of all rounds are worked out before the loop, in unsigned integers of 64 bits, in which no product of two of
32 bits overflows. Probabilities are summed as PyTorch sums them, in double precision.

Shapes: R rows, S rounds, M tokens kept, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from ..transformer.decoding import FACTORS, GOLDEN, MASK32
from .best import best_column, block_starts
from .encoder import Axes
from .graph import Graph
from .tensors import Array

DOUBLE, FLOAT, INT64 = onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
UINT64 = onnx.TensorProto.UINT64
INPUTS: Axes = {"seed": [], "temperature": [], "top_k": [], "top_p": []}
TYPES = {"temperature": FLOAT, "top_p": FLOAT}
DEFAULTS: dict[str, Array] = {
    "seed": np.array(-1),
    "temperature": np.array(1, np.float32),
    "top_k": np.array(0),
    "top_p": np.array(1, np.float32),
}


class Sampling:
    """The choice of each round's tokens: the best ones where `seed` is below 0, else drawn ones."""

    def __init__(self, g: Graph, vocabulary: int, most: str, rows: str) -> None:
        """`most` () is the number of rounds, `rows` (1,) R."""
        self.vocabulary, self.most = vocabulary, most
        self.starts = block_starts(g, rows, vocabulary)
        self.wanted = g.add("GreaterOrEqual", "seed", g.constant(0))
        self.numbers, self.count = g.choose(
            self.wanted, self._plan, lambda b: [b.constant([0], np.float32), b.constant([0])]
        )

    def _plan(self, g: Graph) -> Sequence[str]:
        """Numbers from 0 to below 1 (S,), and how many tokens are kept (1,)."""
        rounds = g.add("Cast", g.add("Range", g.constant(0), self.most, g.constant(1)), to=UINT64)
        hashed = hashes(g, g.add("Add", hashes(g, g.add("Cast", "seed", to=UINT64)), rounds))
        fraction = g.add("Cast", _shifted(g, hashed, 8), to=FLOAT)
        whole = g.constant(self.vocabulary)
        some = g.add("Where", g.add("Equal", "top_k", g.constant(0)), whole, g.add("Min", "top_k", whole))
        return [g.add("Mul", fraction, g.constant(2.0**-24, np.float32)), g.add("Reshape", some, g.constant([1]))]

    def tokens(self, g: Graph, logits: str, place: str) -> str:
        """Logits (R, V) and the number of the round () -> (R, 1)."""
        return g.choose(
            self.wanted,
            lambda b: [self._drawn(b, logits, place)],
            lambda b: [best_column(b, logits, self.vocabulary, self.starts)],
        )[0]

    def _drawn(self, g: Graph, logits: str, place: str) -> str:
        """See `transformer.generation._Single._drawn`."""
        scaled = g.add("Div", logits, "temperature")
        ordered, order = g.add_many("TopK", scaled, self.count, outputs=2, axis=1)  # (R, M), of equal ones the first
        chances = g.add("Softmax", ordered, axis=1)
        before = g.add("Sub", _sums(g, chances), chances)
        kept = g.add("Where", g.add("Less", before, "top_p"), chances, g.constant(0, np.float32))
        sums = _sums(g, kept)
        total = g.add("Gather", sums, g.constant([-1]), axis=1)
        number = g.add("Gather", self.numbers, place)
        passed = g.add("Cast", g.add("LessOrEqual", sums, g.add("Mul", number, total)), to=INT64)
        spot = g.add("ReduceSum", passed, g.constant([1]), keepdims=1)
        spot = g.add("Min", spot, g.add("Sub", self.count, g.constant(1)))
        return g.add("GatherElements", order, spot, axis=1)


def hashes(g: Graph, x: str) -> str:
    """uint64 (…) -> `transformer.decoding._mixed` of each."""
    x = _low(g, g.add("Add", x, g.constant(GOLDEN, np.uint64)))
    x = g.add("BitwiseXor", x, _shifted(g, x, 16))
    x = _low(g, g.add("Mul", x, g.constant(FACTORS[0], np.uint64)))
    x = g.add("BitwiseXor", x, _shifted(g, x, 13))
    x = _low(g, g.add("Mul", x, g.constant(FACTORS[1], np.uint64)))
    return g.add("BitwiseXor", x, _shifted(g, x, 16))


def _low(g: Graph, x: str) -> str:
    return g.add("BitwiseAnd", x, g.constant(MASK32, np.uint64))


def _shifted(g: Graph, x: str, bits: int) -> str:
    return g.add("BitShift", x, g.constant(bits, np.uint64), direction="RIGHT")


def _sums(g: Graph, x: str) -> str:
    """(R, M) -> sums from the left."""
    sums = g.add("CumSum", g.add("Cast", x, to=DOUBLE), g.constant(1))
    return g.add("Cast", sums, to=FLOAT)
