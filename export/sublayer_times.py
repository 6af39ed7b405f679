"""How long an encoder's sub-layers take by the number of their units, in onnxruntime on this machine (`timing`).

Graphs of one layer are timed on the workload that is served: with some numbers of heads and no FFN, with some numbers
of neurons and no attention, without either, and without the layer. What a sub-layer takes is the difference, so that
everything that the graph does around a product is counted; between measured numbers time is taken to be linear. A
model's time is the sum, and `speed` says by one measurement how far the sum can be trusted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..transformer.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from ..transformer.layer_config import MixerConfig
from ..transformer.progress import SILENT, Progress
from ..transformer.statistics import RatioInterval, ratio_interval
from .form_times import sizes_of
from .forms import Forms
from .latency import Workload
from .time_store import WHOLE, TimeStore
from .timing import graph_pass, interleaved, placeholder_state

HEADS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the units that are timed
NEURONS = (0.0, 1 / 48, 1 / 12, 1 / 6, 1 / 3, 1 / 2, 3 / 4, 1.0)
MULTIPLE = 32  # of the numbers of neurons that are timed, but for the greatest
ROWS = 2048  # of the tables: those of a model would be kept in memory once for each graph
SECONDS = 20.0
FEWEST, MOST = 5, 25  # rounds
Sublayer = MixerConfig | FeedForwardConfig
Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SublayerTimes:
    """Seconds of one pass through the workload.

    Attributes:
        outside: embeddings, head and what is not in layers.
        layer: a layer without sub-layers: its norms and biases.
        points: of each kind of sub-layer (`kind_of`), numbers of units, ascending, and the seconds they add to it.
        measured: whether these are of today or from a cache, in words.
    """

    outside: float
    layer: float
    points: Mapping[str, Points]
    measured: str = "measured"

    def of(self, kind: str, units: int) -> float:
        """What a sub-layer of a kind with so many units adds; KeyError for a kind that was not timed."""
        numbers, seconds = zip(*self.points[kind], strict=True)
        return float(np.interp(units, numbers, seconds))

    def total(self, config: TransformerConfig) -> float:
        """A whole encoder."""
        subs = sum(self.of(kind_of(sub), units(sub)) for sub in _sublayers(config))
        return self.outside + len(config.encoder) * self.layer + subs

    def rows(self) -> list[dict[str, Any]]:
        """All numbers in milliseconds, for people."""
        rest = (("embeddings and head", 0, self.outside), ("a layer without sub-layers", 0, self.layer))
        timed = [(kind, number, seconds) for kind, own in self.points.items() for number, seconds in own if number]
        return [
            {"part": part, "units": number, "ms": round(1e3 * seconds, 4)} for part, number, seconds in (*rest, *timed)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        points = {kind: [list(point) for point in own] for kind, own in self.points.items()}
        return {"outside": self.outside, "layer": self.layer, "points": points, WHOLE: True}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SublayerTimes":
        """`to_dict` undone; KeyError, TypeError or ValueError where it is not."""
        points = {
            str(kind): tuple((int(number), float(seconds)) for number, seconds in own)
            for kind, own in data["points"].items()
        }
        return cls(float(data["outside"]), float(data["layer"]), points, "from the cache")


def kind_of(sub: Sublayer) -> str:
    """What two sub-layers have in common whose times differ by the number of units alone."""
    formats = f"{sub.input_format} {sub.output_format}"
    if isinstance(sub, AttentionConfig):
        return f"heads of {sub.head_width}, {formats}"
    if isinstance(sub, FeedForwardConfig):
        return f"{sub.activation} neurons, {formats}"
    return f"{sub.kind} of {sub.units} units, {formats}"


def units(sub: Sublayer) -> int:
    """Heads or neurons; a cell is one."""
    if isinstance(sub, AttentionConfig):
        return sub.heads
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
    """Time the sub-layers of an encoder, as many units as it has and fewer.

    Args:
        config: the encoder, in the formats in which it is served.
        works: what is served, one pass of each a round.
        forms: of the graphs.
        threads: of onnxruntime.
        provider: of the sessions.
        seconds: of timing, once all graphs are open.
        stores: files of earlier measurements (`time_store`), the machine's last.
        progress: told of the graphs that are opened.
    """
    small, fed = _small(config, works)
    kinds = _greatest(config)
    widest = small.with_layers(tuple(_layer(sub) for sub in kinds.values()))
    store = TimeStore(
        stores, threads, provider, widest, sizes_of(works), what="sub-layers", forms=forms.to_dict(), seconds=seconds
    )
    known, _ = store.read(SublayerTimes.from_dict)
    if known is not None:
        return known
    graphs = {("outside", 0): (), ("layer", 0): (LayerConfig(None, None),)} | {
        (kind, number): (_layer(_with_units(sub, number)),)
        for kind, sub in kinds.items()
        for number in _numbers(sub)
        if number
    }
    progress.start("time heads and neurons", len(graphs), "graphs")
    passes: dict[tuple[str, int], Callable[[], float]] = {}
    for name, layers in graphs.items():
        passes[name] = opened(small.with_layers(layers), fed, forms=forms, threads=threads, provider=provider)
        progress.advance()
    progress.done()
    rounds = interleaved(passes, seconds=seconds, fewest=FEWEST, most=MOST)
    found = {name: median(own) for name, own in rounds.items()}
    outside, layer = found["outside", 0], found["layer", 0]
    points = {
        kind: ((0, 0.0), *((number, max(found[kind, number] - layer, 0.0)) for number in _numbers(sub) if number))
        for kind, sub in kinds.items()
    }
    times = SublayerTimes(outside, max(layer - outside, 0.0), points)
    store.write(times.to_dict())
    return times


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
    """How many times as fast as an encoder of the first config one of the second is, on the whole."""
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
    state = placeholder_state(config)
    run = graph_pass(config, state, forms, works, threads=threads, provider=provider)
    return partial(_sum, run)


def _sum(run: Callable[[], Sequence[float]]) -> float:
    return sum(run())


def _sublayers(config: TransformerConfig) -> list[Sublayer]:
    return [sub for layer in config.encoder for sub in (layer.mixer, layer.ffn) if sub is not None]


def _greatest(config: TransformerConfig) -> dict[str, Sublayer]:
    """Of each kind of sub-layer the one with most units."""
    found: dict[str, Sublayer] = {}
    for sub in _sublayers(config):
        kind = kind_of(sub)
        found[kind] = max(found.get(kind, sub), sub, key=units)
    return found


def _numbers(sub: Sublayer) -> list[int]:
    """Numbers of units that are timed, ascending."""
    most = units(sub)
    if isinstance(sub, FeedForwardConfig):
        rounded = {MULTIPLE * max(1, round(share * most / MULTIPLE)) for share in NEURONS if share}
        return sorted({0, most, *(number for number in rounded if number < most)})
    return sorted({0, *(max(1, round(share * most)) for share in HEADS if share)})


def _with_units(sub: Sublayer, number: int) -> Sublayer:
    if isinstance(sub, AttentionConfig):
        return replace(sub, heads=number)
    return replace(sub, width=number) if isinstance(sub, FeedForwardConfig) else sub


def _layer(sub: Sublayer) -> LayerConfig:
    """A layer of this sub-layer alone."""
    return LayerConfig(None, sub) if isinstance(sub, FeedForwardConfig) else LayerConfig(sub, None)


def _small(config: TransformerConfig, works: Sequence[Workload]) -> tuple[TransformerConfig, tuple[Workload, ...]]:
    """The config with a small table of tokens, and the workloads with ids that it has."""
    rows = min(ROWS, config.embedding.vocab_size)
    table = replace(config.embedding, vocab_size=rows)
    text = replace(config.text, pad_id=min(config.text.pad_id, rows - 1))
    fed = tuple(
        Workload(
            work.name, tuple({**batch, "input_ids": np.asarray(batch["input_ids"]) % rows} for batch in work.batches)
        )
        for work in works
    )
    return replace(config, embedding=table, text=text), fed
