"""Torch-Pruning's one-shot settings at one speed: the ratio of each by bisection, its model and its score.

A setting says what is scored, in which scope scores are compared, whether the residual stream's width goes too, whether
whole heads go or numbers within every head, and how much faster heads go than neurons. Its ratio is found by measuring
converted configs in onnxruntime beside the unpruned one (`Serving`), as our step does, on a thinned workload.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from slimformer.compress.costs import Serving
from slimformer.export.latency import Workload
from slimformer.export.machine import available_threads
from slimformer.export.sublayer_times import speed
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import TransformerConfig

from .conversion import config_of, converted
from .process import Worker

IMPORTANCES = (
    "L1",
    "L2",
    "L2, not normalised",
    "LAMP",
    "Taylor",
    "Taylor, not normalised",
    "Hessian",
    "Hessian, not normalised",
    "random",
)
SCALED = ("L2, not normalised", "LAMP", "Taylor, not normalised", "Hessian, not normalised")
SCOPES = ("local", "global", "isomorphic")
HEADS = (0.25, 0.5, 1.0, 1.5)  # the share of heads that goes, over that of neurons
WHOLE, WITHIN = "whole", "within"
ROUND = {WHOLE: 8, WITHIN: None}  # widths become multiples of it; for heads' widths it would be too coarse
CLOSE = 0.03  # of the speed-up
STEPS = 7
MOST = 0.97  # that goes
THINNED = 3  # of so many batches one is timed


@dataclass(frozen=True)
class Setting:
    """Options of Torch-Pruning, all but the ratio."""

    importance: str
    scope: str
    width: bool
    heads: str = WHOLE
    balance: float = 0.5

    def __str__(self) -> str:
        what = "heads, FFN, width" if self.width else "heads, FFN"
        ways = f"x{self.balance:g}" if self.heads == WHOLE else "within heads"
        return f"{self.importance}, {self.scope}, {what}, {ways}"


def first_settings(quick: bool) -> list[Setting]:
    """Those that are searched first; where scores are compared within a layer alone, scaling them changes nothing."""
    if quick:
        scored = (("L2", "local"), ("L2, not normalised", "global"), ("Taylor", "local"), ("Hessian", "isomorphic"))
        return [Setting(importance, scope, False) for importance, scope in scored]
    every = [Setting(*options) for options in product(IMPORTANCES, SCOPES, (False, True))]
    return [one for one in every if one.scope != "local" or one.importance not in SCALED]


def refined(setting: Setting) -> list[Setting]:
    """The same with other shares of heads, and with numbers within heads instead."""
    others = [replace(setting, balance=balance) for balance in HEADS if balance != setting.balance]
    return [*others, replace(setting, heads=WITHIN)]


@dataclass(frozen=True)
class Found:
    """A setting at a ratio, with the widths it leaves and the speed-up that they measured."""

    setting: Setting
    ratio: float
    config: TransformerConfig
    speedup: float


@dataclass(frozen=True)
class Search:
    """What a search needs.

    Attributes:
        worker: Torch-Pruning.
        original: the unpruned model.
        serving: how speed is measured.
        wanted: the speed-up.
        folder: for tensors.
        seconds: of timing for one measurement.
    """

    worker: Worker
    original: Checkpoint
    serving: Serving
    wanted: float
    folder: Path
    seconds: float

    def bisect(self, setting: Setting) -> Found:
        """The setting at the ratio that comes nearest to the speed-up; RuntimeError where it does not work."""
        low, high, tried = 0.0, MOST, list[Found]()
        for _ in range(STEPS):
            ratio = (low + high) / 2
            config = config_of(self.original.config, self._ask(setting, ratio))
            known = [found.speedup for found in tried if found.config == config]
            tried.append(Found(setting, ratio, config, known[0] if known else self._speedup(config)))
            if abs(tried[-1].speedup / self.wanted - 1) <= CLOSE:
                break
            low, high = (ratio, high) if tried[-1].speedup < self.wanted else (low, ratio)
        return min(tried, key=lambda found: abs(math.log(found.speedup / self.wanted)))

    def made(self, found: Found) -> Checkpoint:
        """Its model; ValueError where the conversion is not exact."""
        file = self.folder / "pruned.safetensors"
        return converted(self.original, self._ask(found.setting, found.ratio, file), file)

    def _ask(self, setting: Setting, ratio: float, file: Path | None = None) -> dict[str, object]:
        whole = setting.heads == WHOLE
        asked = {**asdict(setting), "ratio": ratio, "head_ratio": min(MOST, setting.balance * ratio) if whole else 0.0}
        return self.worker.ask(**asked, round_to=ROUND[setting.heads], file=None if file is None else str(file))

    def _speedup(self, config: TransformerConfig) -> float:
        one = self.serving
        works = tuple(Workload(work.name, work.batches[::THINNED]) for work in one.works)
        threads, provider = available_threads(one.context.threads), one.context.provider
        forms, first = one.forms, one.config(self.original.config)
        found = speed(
            first, one.config(config), works, forms=forms, threads=threads, provider=provider, seconds=self.seconds
        )
        return found.ratio


def searched(
    search: Search, candidates: Sequence[Setting], score: Callable[[Checkpoint], float]
) -> Iterator[tuple[Found, float]]:
    """Each setting that works and is as fast as it is to be, with its score; what does not is printed."""
    for setting in candidates:
        try:
            found = search.bisect(setting)
            model = search.made(found)
        except RuntimeError as error:
            print(f"  {setting!s:58s} does not work: {str(error)[:100]}", flush=True)
            continue
        value = score(model)
        missed = "" if found.speedup >= (1 - CLOSE) * search.wanted else "  too slow, left out"
        share = found.config.multiply_adds() / search.original.config.multiply_adds()
        print(
            f"  {setting!s:58s} {value:6.2f}  {found.speedup:4.2f}x  {share:.3f} of the cost, ratio {found.ratio:.3f}"
            f"{missed}",
            flush=True,
        )
        if not missed:
            yield found, value
