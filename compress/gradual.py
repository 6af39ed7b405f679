"""Gradual: rounds of pruning, each followed by distillation, until the model is as small or as fast as it is to be.

The share removed after round t of n is, of all that is to go, r(t) = 1 - (1 - t/n)^3 (Zhu & Gupta, "To prune, or not to
prune", 2017, equation 1), or t/n. With c the cost, or one divided by the speed-up, that is asked for at the end, the
model has 1 - (1 - c) r(t) of its cost, or of its time, after round t. `Prune` counts from the model that it is given:
each round asks for its target divided by what the rounds before have reached, so that their misses do not add up.
"""

import json
import time
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ..transformer.checkpoint import Checkpoint, load_own, read_json
from ..transformer.config import TransformerConfig
from ..transformer.errors import InputError
from ..transformer.files import write_file
from ..transformer.layer_config import FLOAT32, INT8_DYNAMIC, one_of
from .distill import Distill
from .prune import DEFAULT_COST, Prune
from .step import Step, StepContext, StepResult, run_digest
from .surgery import check_float

LINEAR, CUBIC = "linear", "cubic"
POWERS = {LINEAR: 1, CUBIC: 3}
OF_PRUNE = ("cost", "speedup", "format", "importance", "samples", "agreement", "damping", "multiple")


@dataclass(frozen=True)
class Gradual:
    """Options of the step.

    Attributes:
        rounds: of pruning and distillation.
        schedule: how much has gone after each: "cubic" takes most in the first rounds, "linear" as much in each.
        cost, speedup, format: at the end of all rounds, as of `Prune`.
        importance, samples, agreement, damping, multiple: as of `Prune`.
        page_share: the `pages` of `Prune`.
        minutes, steps: of all rounds together, each of which gets as much; neither: 10 minutes.
        lr and all others: as of `Distill`, in each round.
    """

    rounds: int = 4
    schedule: str = CUBIC
    cost: float | None = None
    speedup: float | None = None
    format: str = FLOAT32
    importance: str = Prune.importance
    samples: int = Prune.samples
    agreement: float = Prune.agreement
    page_share: float = Prune.pages
    damping: float = Prune.damping
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

    name: ClassVar[str] = "gradual"
    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            object.__setattr__(self, "minutes", 10.0)
        problems = one_of("schedule", self.schedule, tuple(POWERS))
        if self.rounds < 1:
            problems.append(f"rounds is {self.rounds}, not at least 1")
        elif self.steps is not None and self.steps < self.rounds:
            problems.append(f"steps is {self.steps}, fewer than the {self.rounds} rounds: give each at least 1")
        for part in (lambda: self._prune(self.cost, self.speedup), lambda: self._distill(1)):
            try:
                part()
            except InputError as error:
                problems.append(str(error))
        if problems:
            raise InputError("gradual: " + "; ".join(problems))

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the model can be pruned and distilled."""
        check_float(config)
        self._prune(self.cost, self.speedup).check(config)
        self._distill(1).check(config)

    def removed(self, done: int) -> float:
        """Share removed after so many rounds, of all that is to go."""
        return float(1 - (1 - done / self.rounds) ** POWERS[self.schedule])

    def target(self, done: int) -> float:
        """Share of the cost, or of the time, that the model has after so many rounds."""
        end = 1 / self.speedup if self.speedup is not None else DEFAULT_COST if self.cost is None else self.cost
        return 1 - (1 - end) * self.removed(done)

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """A smaller dense model that has learnt from the untouched one.

        Raises:
            InputError: what `Prune` and `Distill` refuse.
        """
        started = time.monotonic()
        self.check(checkpoint.config)
        context = replace(context, teacher=context.teacher or checkpoint)
        folder = (
            None if context.workdir is None else context.workdir / f"gradual-{run_digest(self, checkpoint, context)}"
        )
        model, reached, told = checkpoint, 1.0, list[dict[str, Any]]()
        for number in range(1, self.rounds + 1):
            place = None if folder is None else folder / f"round-{number}"
            board = None if context.board is None else context.board / f"round-{number}"
            own = replace(context, workdir=place, seed=context.seed + number - 1, board=board)
            with context.processes.main_first():
                pruned = _kept("prune", self._relative(number, reached), model, own)
            trained = _kept("distill", self._distill(number), pruned.checkpoint, own)
            model, reached = trained.checkpoint, self._reached(checkpoint, pruned, reached)
            shares = {"wanted": round(self.target(number), 4), "reached": round(reached, 4)}
            told.append({"round": number, **shares, "prune": pruned.details, "distill": trained.details})
        return StepResult(model, self._details(checkpoint, model, told, reached, time.monotonic() - started))

    def _prune(self, cost: float | None, speedup: float | None) -> Prune:
        options = {name: getattr(self, name) for name in OF_PRUNE} | {"cost": cost, "speedup": speedup}
        return Prune(**options, pages=self.page_share)

    def _distill(self, number: int) -> Distill:
        """Of one round; the first ones get the steps that are left over."""
        names = {field.name for field in fields(Distill)} & {field.name for field in fields(self)}
        options = {name: getattr(self, name) for name in names}
        rounds = max(self.rounds, 1)
        if self.steps is not None:
            options["steps"] = (self.steps + rounds - number) // rounds
        if self.minutes is not None:
            options["minutes"] = self.minutes / rounds
        return Distill(**options)

    def _relative(self, number: int, reached: float) -> Prune:
        """The pruning of a round, counted from the model of the rounds before, which has reached so much."""
        share = min(1.0, self.target(number) / reached)
        return self._prune(share, None) if self.speedup is None else self._prune(None, 1 / share)

    def _reached(self, first: Checkpoint, pruned: StepResult, before: float) -> float:
        """The share of the first model's cost that a pruned one has, or, measured, of its time."""
        if self.speedup is None:
            return pruned.checkpoint.config.multiply_adds() / max(first.config.multiply_adds(), 1)
        return before / float(pruned.details["speed"]["measured"])

    def _details(
        self, first: Checkpoint, last: Checkpoint, rounds: list[dict[str, Any]], reached: float, seconds: float
    ) -> dict[str, Any]:
        kept = last.config.multiply_adds() / max(first.config.multiply_adds(), 1)
        return {
            "schedule": self.schedule,
            "rounds": rounds,
            "multiply_adds_kept": round(kept, 4),
            **({} if self.speedup is None else {"speedup": round(1 / reached, 3)}),
            "steps": sum(one["distill"]["steps"] for one in rounds),
            "seconds": round(seconds, 1),
        }


def _kept(name: str, step: Step, checkpoint: Checkpoint, context: StepContext) -> StepResult:
    """A step's result, read from the workdir where it is finished, else made and kept there: the details last."""
    place = context.workdir
    if place is None:
        return step(checkpoint, context)
    model, details = place / name, place / f"{name}.json"
    if details.is_file():
        return StepResult(load_own(model), read_json(details))
    place.mkdir(parents=True, exist_ok=True)
    result = step(checkpoint, context)
    if context.processes.main:
        result.checkpoint.save(model, force=True)
        write_file(details, json.dumps(result.details, indent=2) + "\n")
    return result
