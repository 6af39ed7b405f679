"""What heads and neurons cost: multiply-adds, or seconds measured on this machine in the format that is served.

A model costs the sum of its sub-layers and of what it costs without them. Multiply-adds hold for any machine; seconds
hold for one, for a number of threads and for a workload (`export.sublayer_times`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..export.bundle import served_layout
from ..export.forms import Forms
from ..export.latency import Workload
from ..export.machine import available_threads
from ..export.sublayer_times import SublayerTimes, kind_of, speed, sublayer_times
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import LanguageHead, LayerConfig, RecurrentConfig, TransformerConfig
from ..transformer.data import PairData
from ..transformer.errors import InputError
from ..transformer.layer_config import FLOAT32
from ..transformer.statistics import RatioInterval
from .latencies import as_long, build_workloads
from .quantize import Quantize
from .step import StepContext
from .units import STACKS, Indices, Sublayer

Choice = TypeVar("Choice")
ATTEMPTS = 4
CLOSE = 0.02  # of the speed that is wished


class Costs(Protocol):
    """Of the units of one model."""

    def of(self, sub: Sublayer, count: int) -> float:
        """What a sub-layer of the model costs with so many units."""

    def without_units(self, layers: Mapping[str, Indices]) -> float:
        """What the model costs with these layers of each stack, none of which has units."""


@dataclass(frozen=True)
class MultiplyAdds:
    """Of the layers' linears for a token; those of recurrent cells stay with their layers."""

    config: TransformerConfig

    def of(self, sub: Sublayer, count: int) -> float:
        """See `Costs.of`."""
        return sub.unit_cost(self.config.d_model) * count

    def without_units(self, layers: Mapping[str, Indices]) -> float:
        """See `Costs.without_units`."""
        mixers = [getattr(self.config, stack)[i].mixer for stack, own in layers.items() for i in own]
        width = self.config.d_model
        return sum(mixer.multiply_adds(width) for mixer in mixers if isinstance(mixer, RecurrentConfig))


@dataclass(frozen=True)
class Seconds:
    """Of one pass of a model through a workload.

    Attributes:
        times: measured.
        config: of the model in the formats that are served.
    """

    times: SublayerTimes
    config: TransformerConfig

    def of(self, sub: Sublayer, count: int) -> float:
        """See `Costs.of`."""
        layer = getattr(self.config, sub.stack)[sub.layer]
        return self.times.of(kind_of(getattr(layer, sub.part), sub.stack, sub.part), count)

    def without_units(self, layers: Mapping[str, Indices]) -> float:
        """See `Costs.without_units`."""
        left = {stack: tuple(_empty(getattr(self.config, stack)[i]) for i in layers.get(stack, ())) for stack in STACKS}
        return self.times.total(self.config.with_layers(**left))


def _empty(layer: LayerConfig) -> LayerConfig:
    return LayerConfig(layer.mixer if isinstance(layer.mixer, RecurrentConfig) else None, None)


def in_format(config: TransformerConfig, format: str) -> TransformerConfig:
    """A float model's config as `Quantize` leaves it."""
    return config if format == FLOAT32 else Quantize(format=format).planned(config)


@dataclass(frozen=True)
class Serving:
    """How a model is served, and times of it.

    Attributes:
        format: of the linears, one of `Quantize`.
        works: what is served.
        forms: of an encoder's graph, the default of the layout.
        context: of the step.
    """

    format: str
    works: tuple[Workload, ...]
    forms: Forms
    context: StepContext

    @classmethod
    def of(cls, checkpoint: Checkpoint, format: str, context: StepContext) -> "Serving":
        """What the context says of who serves a model."""
        workloads, _ = build_workloads(checkpoint, context.data, context.seed)
        if isinstance(context.data, PairData):
            workloads = {name: as_long(work, checkpoint, context.data) for name, work in workloads.items()}
        forms = Forms.of_layout(served_layout(in_format(checkpoint.config, format), context.provider))
        return cls(format, (workloads[context.workload],), forms, context)

    @staticmethod
    def check(config: TransformerConfig) -> None:
        """Raise InputError where there are no times of a model."""
        if config.decoder and not isinstance(config.head, LanguageHead):
            raise InputError("prune: speedup is measured on what is served, and this decoder writes nothing; give cost")

    def config(self, config: TransformerConfig) -> TransformerConfig:
        """A float model's config in the format that is served."""
        return in_format(config, self.format)

    def costs(self, config: TransformerConfig) -> Seconds:
        """Of a float model's units, measured or from a cache."""
        served, context = self.config(config), self.context
        times = sublayer_times(served, self.works, **self._how(), stores=context.stores, progress=context.progress)
        return Seconds(times, served)

    def speed(self, first: TransformerConfig, second: TransformerConfig) -> RatioInterval:
        """How many times as fast as the first float model the second one is, both as they are served."""
        return speed(self.config(first), self.config(second), self.works, **self._how())

    def _how(self) -> dict[str, Any]:
        threads = available_threads(self.context.threads)
        return {"forms": self.forms, "threads": threads, "provider": self.context.provider}


@dataclass(frozen=True)
class Attempt:
    """A model that was chosen for a speed.

    Attributes:
        asked: the speed-up that the sum of times should have.
        predicted: the one that it has.
        measured: that of the whole graph.
    """

    asked: float
    predicted: float
    measured: RatioInterval

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        ratio, low, high = (round(x, 3) for x in (self.measured.ratio, self.measured.low, self.measured.high))
        times = {"asked": round(self.asked, 3), "predicted": round(self.predicted, 3)}
        return {**times, "measured": ratio, "low": low, "high": high}


@dataclass(frozen=True)
class Reached(Generic[Choice]):
    """What was chosen for a speed.

    Attributes:
        choice: the one whose measured speed-up is nearest to what was wanted.
        taken: its attempt.
        attempts: all of them, in order.
    """

    choice: Choice
    taken: Attempt
    attempts: tuple[Attempt, ...]

    def to_dict(self) -> dict[str, Any]:
        """What is said of it, JSON-ready."""
        return {**self.taken.to_dict(), "attempts": [one.to_dict() for one in self.attempts]}


def reach(wanted: float, attempt: Callable[[float], tuple[Choice, Attempt] | None]) -> Reached[Choice] | None:
    """Attempt a speed-up until the whole graph comes close to it.

    What is asked of the sum of times is corrected each time by what the whole graph came to. `attempt` gives None where
    the times allow no such speed; so does this where they do at once.
    """
    asked, tried = wanted, list[tuple[Choice, Attempt]]()
    while len(tried) < ATTEMPTS and (found := attempt(asked)) is not None:
        tried.append(found)
        ratio = found[1].measured.ratio
        if abs(ratio / wanted - 1) <= CLOSE:
            break
        asked *= wanted / ratio
    if not tried:
        return None
    choice, taken = min(tried, key=lambda one: abs(math.log(one[1].measured.ratio / wanted)))
    return Reached(choice, taken, tuple(one for _, one in tried))
