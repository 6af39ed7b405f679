"""Movement: heads and neurons are masked while the student learns, by where their weights move, and cut out at the end.

The student is distilled as by `Distill`; every step adds to the score of each unit (`masks`). After a warm-up all units
of encoder and decoder compete for a budget of multiply-adds, which falls to the one asked for; what is masked may come
back. In the cool-down masks are fixed and the student learns to do with what is left. Sanh, Wolf & Rush 2020, sections
4 and 5; with a teacher and on structures as Lagunas et al. 2021.

A student that starts as its own teacher has next to no gradient until the first units are masked: they go by chance,
and come back where they are missed. That takes steps: some hundreds at least.
"""

import math
import time
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import TransformerConfig
from ..transformer.errors import InputError
from ..transformer.layer_config import INT8_DYNAMIC
from ..transformer.model import Transformer
from ..transformer.training import Update
from ..transformer.training_options import FLOAT32
from .costs import MultiplyAdds
from .distill import Distill
from .masks import Schedule, UnitMasks
from .prune import DEFAULT_COST, Prune
from .step import StepContext, StepResult, run_digest
from .surgery import remove_from
from .units import KINDS, Kept, left_of, sublayers


@dataclass(frozen=True)
class Movement:
    """Options of the step.

    Attributes:
        cost: share of the layers' multiply-adds that stays, at most.
        warm: share of the steps in which all units are there, before the first are masked.
        cool: share of the steps at the end in which masks are fixed.
        multiple: FFN widths are cut to multiples of it.
        minutes, steps: how long to train; neither: 10 minutes.
        lr and all others: as of `Distill`.
    """

    cost: float = DEFAULT_COST
    warm: float = 0.1
    cool: float = 0.4
    multiple: int = Prune.multiple
    minutes: float | None = None
    steps: int | None = None
    lr: float = Distill.lr
    batch_tokens: int = Distill.batch_tokens
    accumulate: int = Distill.accumulate
    warmup: int = Distill.warmup
    precision: str = FLOAT32
    cosine: float = Distill.cosine
    similarity: float = Distill.similarity
    hidden: float = Distill.hidden
    logits: float = Distill.logits
    labels: float = Distill.labels
    temperature: float = Distill.temperature
    beams: int = Distill.beams
    quantization_aware: bool = False
    aware_of: str = INT8_DYNAMIC
    bits: int = 0
    fragments: float = Distill.fragments
    texts: int = 0
    pages: int = Distill.pages

    name: ClassVar[str] = "movement"
    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            object.__setattr__(self, "minutes", 10.0)
        problems = []
        if not 0 < self.cost <= 1:
            problems.append(f"cost is {self.cost}, not a share over 0 and at most 1")
        shares = [name for name in ("warm", "cool") if not 0 <= getattr(self, name) < 1]
        problems += [f"{name} is {getattr(self, name)}, not a share from 0 to less than 1" for name in shares]
        if not shares and self.warm + self.cool >= 1:
            problems.append(f"warm {self.warm} and cool {self.cool} leave no steps to prune in: lower one of them")
        elif not shares and self.steps is not None and (problem := self._too_few(self.steps)):
            problems.append(problem)
        if self.multiple < 1:
            problems.append(f"multiple is {self.multiple}, not at least 1")
        try:
            self._distill()
        except InputError as error:
            problems.append(str(error))
        if problems:
            raise InputError("movement: " + "; ".join(problems))

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the model can be distilled, and has a unit within the cost."""
        if not config.is_float:
            raise InputError("movement: the model is int8 already; put movement before quantize")
        self._distill().check(config)
        units = {sub: min(sub.count, self.multiple if sub.part == "ffn" else 1) for sub in sublayers(config)}
        if not units:
            raise InputError("movement: the model has neither heads nor neurons that could go")
        costs, whole = MultiplyAdds(config), config.multiply_adds()
        least = costs.without_units(Kept.everything(config).layers) + min(costs.of(*one) for one in units.items())
        if self.cost * whole < least:
            reachable = math.ceil(1e4 * least / whole) / 1e4
            raise InputError(
                f"movement: cost {self.cost} leaves no head and no {self.multiple} neurons; ask for {reachable}"
            )

    def schedule(self, steps: int) -> Schedule:
        """Of a training of so many steps.

        Raises:
            InputError: they are too few.
        """
        if problem := self._too_few(steps):
            raise InputError(f"movement: {problem}")
        return Schedule(self.cost, _part(self.warm, steps), steps - _part(self.cool, steps))

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """A smaller dense model that has learnt from the untouched one.

        Raises:
            InputError: what `Distill` refuses, the cost leaves no unit, or the steps are too few.
        """
        started = time.monotonic()
        self.check(checkpoint.config)
        context = replace(context, teacher=context.teacher or checkpoint)
        context = replace(context, workdir=self._folder(checkpoint, context))
        shaper = _Shaper(self)
        taught = self._distill().shaped(checkpoint, context, shaper)
        kept = shaper.masks.kept()
        result = remove_from(taught.checkpoint, kept)
        share = result.config.multiply_adds() / max(checkpoint.config.multiply_adds(), 1)
        details = {**left_of(result.config, kept), "multiply_adds_kept": round(share, 4)}
        details |= shaper.told(taught.details["steps"])
        details |= {"steps": taught.details["steps"], "seconds": round(time.monotonic() - started, 1)}
        return StepResult(result, {**details, "distill": taught.details})

    def _too_few(self, steps: int) -> str:
        """The problem of a training of so many steps, if it is one."""
        warm, cool = _part(self.warm, steps), _part(self.cool, steps)
        if warm + cool < steps:
            return ""
        return (
            f"{steps} steps, {warm} of them in the warm-up and {cool} in the cool-down, leave none to prune in: "
            "train longer, or lower warm or cool"
        )

    def _distill(self) -> Distill:
        names = {field.name for field in fields(Distill)} & {field.name for field in fields(self)}
        return Distill(**{name: getattr(self, name) for name in names})

    def _folder(self, checkpoint: Checkpoint, context: StepContext) -> Path | None:
        """Of all that a training depends on: one that is kept under another name is of another run."""
        if context.workdir is None:
            return None
        return context.workdir / f"movement-{run_digest(self, checkpoint, context)}"


class _Shaper:
    """Masks the units of a student after a schedule."""

    def __init__(self, options: Movement) -> None:
        self.options = options
        self.masks: UnitMasks

    def begin(self, student: Transformer) -> nn.Module:
        """See `Shaper`."""
        self.masks = UnitMasks(student, multiple=self.options.multiple)
        return self.masks

    def after_step(self, update: Update) -> None:
        """See `Shaper`."""
        schedule = self.options.schedule(update.steps)
        self.masks.move(update.rate)
        if schedule.chooses(update.step):
            self.masks.choose(schedule.share(update.step))

    def told(self, steps: int) -> dict[str, Any]:
        """What the report says of the masks, after so many steps."""
        schedule, counts = self.options.schedule(steps), Counter[str]()
        for name, count in self.masks.came_back().items():
            counts[KINDS[name.rpartition(".")[2]]] += count
        return {"warm_steps": schedule.warm, "cool_steps": steps - schedule.fixed, "came_back": dict(counts)}


def _part(share: float, steps: int) -> int:
    """A share of the steps; at least 1 unless it is 0."""
    return max(1, round(share * steps)) if share else 0
