"""Prompts in ONNX: read in one pass on packed tokens, causally, they leave the caches that the loop grows.

Before each prompt stands the start token, so that no row is empty. Caches of attention have a column for every column
of the batch; those of padding are hidden from the steps. Cells read all rows side by side, each as far as it goes.

Shapes: B prompts, R rows of the loop, S columns of the batch, N packed tokens, D model width, H heads, K head width, U
units, G gates, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx

from ..transformer.config import AttentionConfig
from ..transformer.layer_config import MixerConfig
from .decoder import Decoder
from .graph import Graph
from .layout import PackedLayout
from .mixers import Mixed, Old, keys_and_values, linear
from .reading import CellReading
from .tensors import Weights

INT64 = onnx.TensorProto.INT64


@dataclass(frozen=True)
class FromPrompts:
    """Steps from prompts; see `decoder.Steps`.

    Attributes:
        decoder: whose steps they are.
        rows: (1,) R.
        most: () rounds for which there are positions, at most max_new_tokens.
        lengths: (R,) tokens of each prompt, the start token included.
        hidden: (R, 1, 1, S) what is added to the scores of the prompts' columns; "" without attention.
        first: (R, V) logits of the token after each prompt.
        kept: the caches.
    """

    decoder: Decoder
    rows: str
    most: str
    lengths: str
    hidden: str
    first: str
    kept: tuple[str, ...]

    def caches(self, g: Graph) -> list[str]:
        """See `Steps`."""
        return list(self.kept)

    def old(self, g: Graph, place: str) -> tuple[str, str]:
        """See `Steps`: there is a start token at least, and the first round adds none."""
        written = g.add("Max", g.add("Sub", place, g.constant(1)), g.constant(0))
        return self._hidden(g, written), ""

    def logits(
        self, g: Graph, place: str, tokens: str, caches: Sequence[str], olds: Sequence[Old] | None = None
    ) -> tuple[str, list[str]]:
        """See `Steps`: the first round has them from the prompt."""

        def step(b: Graph) -> list[str]:
            hidden = self._hidden(b, place) if olds is None else ""
            logits, grown = self.decoder.step(b, tokens, self._places(b, place), caches, hidden, olds)
            return [logits, *grown]

        begun = g.add("Equal", place, g.constant(0))
        logits, *kept = g.choose(begun, lambda b: [self.first, *caches], step)
        return logits, kept

    def _places(self, g: Graph, place: str) -> str:
        """(R,) positions of the tokens of round `place` - 1, which that round is given."""
        return g.add("Add", self.lengths, g.add("Sub", place, g.constant(1)))

    def _hidden(self, g: Graph, place: str) -> str:
        """(R, 1, 1, S + place): all tokens after the prompts are seen."""
        if not self.hidden:
            return ""
        pads = g.add("Concat", g.constant([0] * 7), g.add("Reshape", place, g.constant([1])), axis=0)
        return g.add("Pad", self.hidden, pads)

    def with_beams(self, g: Graph, beams: str) -> "FromPrompts":
        """See `Steps`."""
        count = g.add("Squeeze", self.rows)
        column = g.add("Unsqueeze", g.add("Range", g.constant(0), count, g.constant(1)), g.constant([1]))
        every = g.add("Expand", column, g.add("Concat", self.rows, beams, axis=0))
        every = g.add("Reshape", every, g.constant([-1]))

        def repeated(value: str) -> str:
            return g.add("Gather", value, every, axis=0)

        return replace(
            self,
            rows=g.add("Mul", self.rows, beams),
            lengths=repeated(self.lengths),
            hidden=repeated(self.hidden) if self.hidden else "",
            first=repeated(self.first),
            kept=tuple(map(repeated, self.kept)),
        )


def read_prompts(graph: Graph, decoder: Decoder) -> FromPrompts:
    """`input_ids` and `attention_mask` (B, T) -> what the loop goes on from."""
    rows = graph.add("Shape", "input_ids", start=0, end=1)
    column = graph.add("Concat", rows, graph.constant([1]), axis=0)
    start, seen = (graph.add("Expand", graph.constant(value), column) for value in (decoder.head.start_id, 1))
    ids = graph.add("Concat", start, "input_ids", axis=1)
    form = PackedLayout(graph, ids, graph.add("Concat", seen, "attention_mask", axis=1), causal=True)
    x, kept = decoder.layers(graph, form.token_ids, form.positions, _Reading(graph, form).mix)
    last = graph.add("Gather", form.slots, graph.constant([-1]), axis=1)  # (B, 1) packed place of each row's last token
    last = graph.add("Squeeze", last, graph.constant([1]))
    lengths = graph.add("Cast", graph.add("Squeeze", form.length, graph.constant([1])), to=INT64)
    attends = any(isinstance(layer.mixer, AttentionConfig) for layer in decoder.config.decoder)
    return FromPrompts(
        decoder,
        rows,
        _most(graph, decoder, lengths),
        lengths,
        form.hidden() if attends else "",
        decoder.logits(graph, graph.add("Gather", x, last, axis=0)),
        tuple(kept),
    )


def _most(g: Graph, decoder: Decoder, lengths: str) -> str:
    """() tokens that the longest prompt leaves positions for; the last one written needs none."""
    embedding = decoder.config.decoder_embedding
    if embedding.position_kind == "none":
        return "max_new_tokens"
    longest = g.add("ReduceMax", lengths, keepdims=0)
    return g.add("Squeeze", g.add("Min", "max_new_tokens", g.add("Sub", g.constant(embedding.positions + 1), longest)))


class _Reading:
    """The mixers' pass over the prompts."""

    def __init__(self, graph: Graph, form: PackedLayout) -> None:
        self.graph, self.form = graph, form
        self.cells = CellReading(graph, form)

    def mix(self, config: MixerConfig, weights: Weights, y: str) -> Mixed:
        """(N, D) -> (N, D) and the caches."""
        if isinstance(config, AttentionConfig):
            return self._attention(config, weights, y)
        return self.cells.mix(config, weights, y)

    def _attention(self, config: AttentionConfig, weights: Weights, y: str) -> Mixed:
        g = self.graph
        qkv = linear(g, weights.at("qkv"), config.input_format, y)
        mixed = self.form.attention((qkv,), config)
        ends = (config.width, config.width + 2 * config.key_width)
        kv = g.add("Slice", qkv, *(g.constant([end]) for end in ends), g.constant([1]))
        rows = g.add("Gather", kv, self.form.slots, axis=0)
        return linear(g, weights.at("out"), config.output_format, mixed), keys_and_values(g, config, rows)
