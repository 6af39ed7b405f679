"""How long a model's sub-layers take by the number of their units, in onnxruntime on this machine (`timing`).

Graphs of one layer are timed on the workload that is served: with some numbers of heads and no FFN, with some numbers
of neurons and no attention, without either, and without the layer. What a sub-layer takes is the difference, so that
everything that the graph does around a product is counted; between measured numbers time is taken to be linear. A
model's time is the sum, and `speed` says by one measurement how far the sum can be trusted.

The encoder of a model that writes is timed by itself, its decoder in whole graphs that write with one layer, and with a
second one. A graph computes nothing of the encoder that no layer attends to: what the least encoder takes is taken off
where one does. Weights have no meaning here, so that no text would end: each has as many tokens as may be written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..transformer.config import AttentionConfig, FeedForwardConfig, LanguageHead, LayerConfig, TransformerConfig
from ..transformer.layer_config import MixerConfig
from ..transformer.progress import SILENT, Progress
from ..transformer.statistics import RatioInterval, ratio_interval
from .form_times import sizes_of
from .forms import Forms
from .latency import Feed, Workload
from .time_store import WHOLE, TimeStore
from .timing import graph_pass, interleaved, placeholder_state

HEADS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the units that are timed
NEURONS = (0.0, 1 / 48, 1 / 12, 1 / 6, 1 / 3, 1 / 2, 3 / 4, 1.0)
MULTIPLE = 32  # of the numbers of neurons that are timed, but for the greatest
ROWS = 2048  # of the tables: those of a model would be kept in memory once for each graph
SECONDS = 20.0
FEWEST, MOST = 5, 25  # rounds
PARTS = ("mixer", "cross", "ffn")
EMPTY = LayerConfig(None, None)
NEVER = -1e9  # the logit of a text's end
# Graphs are named by the kind of their only sub-layer and its units, or by what they have instead.
OUTSIDE, LAYER, WRITER, DECODER_LAYERS = "outside", "layer", "writer", "decoder layers"
Sublayer = MixerConfig | FeedForwardConfig
Points = tuple[tuple[int, float], ...]
Name = tuple[str, int]
Graphs = dict[Name, tuple[TransformerConfig, tuple[Workload, ...]]]


@dataclass(frozen=True)
class Kind:
    """Where sub-layers of a kind stand, and the one with most units."""

    stack: str
    part: str
    sub: Sublayer

    def layer(self, number: int) -> LayerConfig:
        """A layer of this sub-layer alone, with so many units."""
        changes: dict[str, Any] = {self.part: _with_units(self.sub, number)}
        return replace(EMPTY, **changes)


@dataclass(frozen=True)
class SublayerTimes:
    """Seconds of one pass through the workload.

    Attributes:
        outside: embeddings, head and what is not in layers.
        layer: a layer of the encoder without sub-layers: its norms and biases.
        points: of each kind of sub-layer (`kind_of`), numbers of units, ascending, and the seconds they add to it.
        measured: whether these are of today or from a cache, in words.
        decoder_layer: a layer of the decoder without sub-layers.
    """

    outside: float
    layer: float
    points: Mapping[str, Points]
    measured: str = "measured"
    decoder_layer: float = 0.0

    def of(self, kind: str, units: int) -> float:
        """What a sub-layer of a kind with so many units adds; KeyError for a kind that was not timed."""
        numbers, seconds = zip(*self.points[kind], strict=True)
        return float(np.interp(units, numbers, seconds))

    def total(self, config: TransformerConfig) -> float:
        """A whole model."""
        subs = sum(self.of(name, units(kind.sub)) for name, kind in _places(config))
        return self.outside + len(config.encoder) * self.layer + len(config.decoder) * self.decoder_layer + subs

    def rows(self) -> list[dict[str, Any]]:
        """All numbers in milliseconds, for people."""
        rest = [("embeddings and head", 0, self.outside), ("a layer without sub-layers", 0, self.layer)]
        if self.decoder_layer:
            rest.append(("the decoder's layer without sub-layers", 0, self.decoder_layer))
        timed = [(kind, number, seconds) for kind, own in self.points.items() for number, seconds in own if number]
        return [
            {"part": part, "units": number, "ms": round(1e3 * seconds, 4)} for part, number, seconds in (*rest, *timed)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        points = {kind: [list(point) for point in own] for kind, own in self.points.items()}
        layers = {"layer": self.layer, "decoder_layer": self.decoder_layer}
        return {"outside": self.outside, **layers, "points": points, WHOLE: True}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SublayerTimes":
        """`to_dict` undone; KeyError, TypeError or ValueError where it is not."""
        points = {
            str(kind): tuple((int(number), float(seconds)) for number, seconds in own)
            for kind, own in data["points"].items()
        }
        outside, layer, decoder_layer = (float(data[name]) for name in ("outside", "layer", "decoder_layer"))
        return cls(outside, layer, points, "from the cache", decoder_layer)


def kind_of(sub: Sublayer, stack: str = "encoder", part: str = "mixer") -> str:
    """What two sub-layers have in common whose times differ by the number of units alone."""
    formats = f"{sub.input_format} {sub.output_format}"
    if stack == "decoder":
        return f"{'cross' if part == 'cross' else 'decoder'} {kind_of(sub)}"
    if isinstance(sub, AttentionConfig):
        shared = f" in groups of {sub.group}" if sub.group > 1 else ""
        return f"heads of {sub.head_width}{shared}, {formats}"
    if isinstance(sub, FeedForwardConfig):
        return f"{sub.activation} neurons, {formats}"
    return f"{sub.kind} of {sub.units} units, {formats}"


def units(sub: Sublayer) -> int:
    """Heads, or groups of those that share keys, or neurons; a cell is one."""
    if isinstance(sub, AttentionConfig):
        return sub.groups
    return sub.width if isinstance(sub, FeedForwardConfig) else 1


def sublayer_times(
    config: TransformerConfig,
    works: Sequence[Workload],
    *,
    forms: Forms,
    threads: int,
    provider: str = "cpu",
    seconds: float = SECONDS,
    stores: Sequence[Path] = (),
    progress: Progress = SILENT,
) -> SublayerTimes:
    """Time the sub-layers of a model, as many units as it has and fewer.

    Args:
        config: an encoder or a model that writes, in the formats in which it is served.
        works: what is served, one pass of each a round.
        forms: of an encoder's graphs.
        threads: of onnxruntime.
        provider: of the sessions.
        seconds: of timing, once all graphs are open.
        stores: files of earlier measurements (`time_store`), the machine's last.
        progress: told of the graphs that are opened.
    """
    kinds = _greatest(config)
    more: dict[str, Any] = {"what": "sub-layers", "forms": forms.to_dict(), "seconds": seconds}
    if config.decoder:
        more["written"] = [[int(batch["max_new_tokens"]) for batch in work.batches] for work in works]
    store = TimeStore(stores, threads, provider, _widest(config, kinds), sizes_of(works), **more)
    known, _ = store.read(SublayerTimes.from_dict)
    if known is not None:
        return known
    graphs = _encoders(config, works, kinds) | (_writers(config, works, kinds) if config.decoder else {})
    progress.start("time heads and neurons", len(graphs), "graphs")
    passes: dict[Name, Callable[[], float]] = {}
    for name, (one, fed) in graphs.items():
        passes[name] = opened(one, fed, forms=forms, threads=threads, provider=provider)
        progress.advance()
    progress.done()
    rounds = interleaved(passes, seconds=seconds, fewest=FEWEST, most=MOST)
    times = _taken_apart({name: median(own) for name, own in rounds.items()}, kinds)
    store.write(times.to_dict())
    return times


def _encoders(config: TransformerConfig, works: Sequence[Workload], kinds: Mapping[str, Kind]) -> Graphs:
    """Encoders without layers, with one that has no sub-layer, and with one of each kind and number of units."""
    if not config.encoder and config.decoder:
        return {}
    alone = replace(config, decoder=(), head=None, target=None) if config.decoder else config
    small, fed = _small(alone, tuple(replace(work, batches=tuple(map(_read, work.batches))) for work in works))
    layers: dict[Name, tuple[LayerConfig, ...]] = {(OUTSIDE, 0): (), (LAYER, 0): (EMPTY,)}
    for name, kind, number in _numbered(kinds, "encoder"):
        layers[name, number] = (kind.layer(number),)
    return {name: (small.with_layers(own), fed) for name, own in layers.items()}


def _writers(config: TransformerConfig, works: Sequence[Workload], kinds: Mapping[str, Kind]) -> Graphs:
    """Models that write with one layer without sub-layers, the tables as they are or small, with two, and the same."""
    encoder = (EMPTY,) * bool(config.encoder)
    small, fed = _small(config, works)
    graphs: Graphs = {(WRITER, 0): (config.with_layers(encoder, (EMPTY,)), tuple(works))}
    for number in (1, 2):
        graphs[DECODER_LAYERS, number] = small.with_layers(encoder, (EMPTY,) * number), fed
    for name, kind, number in _numbered(kinds, "decoder"):
        graphs[name, number] = small.with_layers(encoder, (kind.layer(number),)), fed
    return graphs


def _numbered(kinds: Mapping[str, Kind], stack: str) -> Iterator[tuple[str, Kind, int]]:
    """Every kind of a stack with the numbers of its units, but 0."""
    for name, kind in kinds.items():
        if kind.stack == stack:
            yield from ((name, kind, number) for number in _numbers(kind.sub) if number)


def _taken_apart(found: Mapping[Name, float], kinds: Mapping[str, Kind]) -> SublayerTimes:
    """Seconds of whole graphs -> those of their parts, none of them below 0."""
    outside, one = found.get((OUTSIDE, 0), 0.0), found.get((LAYER, 0), 0.0)
    decoder_one = found.get((DECODER_LAYERS, 1), 0.0)
    decoder_layer = max(found.get((DECODER_LAYERS, 2), 0.0) - decoder_one, 0.0)
    without = {"mixer": decoder_one, "cross": decoder_one + one, "ffn": decoder_one}
    points = {}
    for name, kind in kinds.items():
        base = one if kind.stack == "encoder" else without[kind.part]
        timed = (number for number in _numbers(kind.sub) if number)
        points[name] = ((0, 0.0), *((number, max(found[name, number] - base, 0.0)) for number in timed))
    outside += max(found.get((WRITER, 0), 0.0) - decoder_layer, 0.0)
    return SublayerTimes(outside, max(one - found.get((OUTSIDE, 0), 0.0), 0.0), points, decoder_layer=decoder_layer)


def speed(
    first: TransformerConfig,
    second: TransformerConfig,
    works: Sequence[Workload],
    *,
    forms: Forms,
    threads: int,
    provider: str = "cpu",
    seconds: float = SECONDS / 2,
) -> RatioInterval:
    """How many times as fast as a model of the first config one of the second is, on the whole."""
    configs = {"first": first, "second": second}
    passes = {
        name: opened(config, works, forms=forms, threads=threads, provider=provider) for name, config in configs.items()
    }
    rounds = interleaved(passes, seconds=seconds, fewest=FEWEST, most=MOST)
    return ratio_interval([[a / b for a, b in zip(rounds["first"], rounds["second"], strict=True)]])


def opened(
    config: TransformerConfig, works: Sequence[Workload], *, forms: Forms, threads: int, provider: str
) -> Callable[[], float]:
    """A graph with weights of no meaning; each call gives the seconds of a pass through all workloads."""
    head = config.head
    if isinstance(head, LanguageHead):
        config = replace(config, head=replace(head, bias=True))
    state = placeholder_state(config)
    if isinstance(head, LanguageHead):  # no text ends before it has as many tokens as may be written
        state["head.bias"] = np.where(np.arange(len(state["head.bias"])) == head.end_id, np.float32(NEVER), 0)
    run = graph_pass(config, state, forms, works, threads=threads, provider=provider)
    return partial(_sum, run)


def _sum(run: Callable[[], Sequence[float]]) -> float:
    return sum(run())


def _places(config: TransformerConfig) -> Iterator[tuple[str, Kind]]:
    """Every sub-layer, with the name of its kind."""
    for stack, layers in (("encoder", config.encoder), ("decoder", config.decoder)):
        for layer in layers:
            for part in PARTS:
                if (sub := getattr(layer, part)) is not None:
                    yield kind_of(sub, stack, part), Kind(stack, part, sub)


def _greatest(config: TransformerConfig) -> dict[str, Kind]:
    """Of each kind of sub-layer the one with most units."""
    found: dict[str, Kind] = {}
    for name, kind in _places(config):
        found[name] = max(found.get(name, kind), kind, key=lambda one: units(one.sub))
    return found


def _widest(config: TransformerConfig, kinds: Mapping[str, Kind]) -> TransformerConfig:
    """A config of these kinds, each once: what times are of."""
    layers = {
        stack: tuple(kind.layer(units(kind.sub)) for kind in kinds.values() if kind.stack == stack)
        or (EMPTY,) * bool(getattr(config, stack))
        for stack in ("encoder", "decoder")
    }
    return config.with_layers(**layers)


def _numbers(sub: Sublayer) -> list[int]:
    """Numbers of units that are timed, ascending."""
    most = units(sub)
    if isinstance(sub, FeedForwardConfig):
        rounded = {MULTIPLE * max(1, round(share * most / MULTIPLE)) for share in NEURONS if share}
        return sorted({0, most, *(number for number in rounded if number < most)})
    return sorted({0, *(max(1, round(share * most)) for share in HEADS if share)})


def _with_units(sub: Sublayer, number: int) -> Sublayer:
    if isinstance(sub, AttentionConfig):
        return replace(sub, heads=number * sub.group)
    return replace(sub, width=number) if isinstance(sub, FeedForwardConfig) else sub


def _read(batch: Feed) -> Feed:
    """What an encoder is given of it."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _small(config: TransformerConfig, works: Sequence[Workload]) -> tuple[TransformerConfig, tuple[Workload, ...]]:
    """The config with small tables of tokens, and the workloads with ids that they have."""
    rows = min(ROWS, config.embedding.vocab_size)
    table, target, head = replace(config.embedding, vocab_size=rows), config.target, config.head
    if target is not None:
        target = replace(target, vocab_size=min(ROWS, target.vocab_size))
    if isinstance(head, LanguageHead):
        last = (target or table).vocab_size - 1
        head = replace(head, start_id=min(head.start_id, last), end_id=min(head.end_id, last))
    text = replace(config.text, pad_id=min(config.text.pad_id, rows - 1))
    fed = tuple(
        replace(
            work, batches=tuple({**batch, "input_ids": np.asarray(batch["input_ids"]) % rows} for batch in work.batches)
        )
        for work in works
    )
    return replace(config, embedding=table, target=target, head=head, text=text), fed
