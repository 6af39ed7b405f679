"""How to train: the options of the loop (`training`), and the learning rate that they give each step."""

import math
from dataclasses import dataclass, fields
from typing import Any

from .errors import InputError

SCHEDULES = ("linear", "inverse_sqrt")
FLOAT32, BFLOAT16 = PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class TrainingOptions:
    """How to train.

    Attributes:
        lr: peak learning rate, after the warm-up.
        minutes: a time budget; or
        steps: the number of optimizer steps.
        warmup: steps of linear warm-up (at most a tenth of all).
        schedule: what follows it: "linear" decay to zero at the last step, or "inverse_sqrt", lr sqrt(warmup / step)
            (Vaswani et al. 2017, equation 3), which does not need to know the last step.
        weight_decay: of matrices; vectors have none.
        clip: greatest norm of the gradient.
        accumulate: batches whose gradients are averaged into one step.
        seed: of dropout and whatever else is random.
        precision: "float32"; or "bfloat16", in which the CPU multiplies matrices (sums, weights and all else stay
            float32), faster where it has instructions for it (AMX, AVX512-BF16).
    """

    lr: float = 3e-4
    minutes: float | None = None
    steps: int | None = None
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    accumulate: int = 1
    seed: int = 0
    schedule: str = "linear"
    precision: str = FLOAT32

    def __post_init__(self) -> None:
        problems = []
        if (self.minutes is None) == (self.steps is None):
            problems.append("give either minutes or steps")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            problems.append(f"minutes is {self.minutes}, not above 0")
        if self.steps is not None and self.steps < 1:
            problems.append(f"steps is {self.steps}, not at least 1")
        if not 0 < self.lr < 1:
            problems.append(f"lr is {self.lr}, not between 0 and 1")
        if self.schedule not in SCHEDULES:
            problems.append(f"schedule is {self.schedule!r}, not one of {', '.join(SCHEDULES)}")
        if self.precision not in PRECISIONS:
            problems.append(f"precision is {self.precision!r}, not one of {', '.join(PRECISIONS)}")
        if self.accumulate < 1 or self.warmup < 0 or not self.clip > 0 or not 0 <= self.weight_decay < math.inf:
            problems.append("accumulate must be at least 1, clip above 0, warmup and weight_decay not below 0")
        if problems:
            raise InputError("training: " + "; ".join(problems))


def one_budget(options: Any) -> list[str]:
    """The problem of options that say by more than one of epochs, steps and minutes how long to train."""
    given = [name for name in ("epochs", "steps", "minutes") if getattr(options, name) is not None]
    return [f"{' and '.join(given)} are given, which are ways to say the same: give one"] if given[1:] else []


def loop_options(options: Any, epochs_steps: int) -> TrainingOptions:
    """The loop's options, held by others under the same names; `epochs_steps` where they give no other length."""
    names = [field.name for field in fields(TrainingOptions) if hasattr(options, field.name)]
    kept = {name: getattr(options, name) for name in names}
    by_epochs = options.steps is None and options.minutes is None
    return TrainingOptions(**{**kept, "steps": epochs_steps if by_epochs else options.steps})


def learning_rate(step: int, steps: int, options: TrainingOptions) -> float:
    """Linear warm-up to `lr`, then the decay of the schedule."""
    warmup = min(options.warmup, max(1, steps // 10))
    if step < warmup:
        return options.lr * (step + 1) / warmup
    if options.schedule == "inverse_sqrt":
        return options.lr * math.sqrt(max(1, warmup) / (step + 1))
    return options.lr * (steps - step) / max(1, steps - warmup)
