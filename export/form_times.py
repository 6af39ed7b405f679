"""Which of a graph's equivalent forms (`forms`) are fastest on this machine, measured choice by choice.

From the default on, each choice's other values are timed against the form in place, on the same batches in interleaved
rounds. Sessions live in one process with spinning turned off for all, or the idle ones would slow the others down. A
value is taken only where the 95 % interval of its speed lies above 1, and in the end all that was taken is opened anew
and has to prove itself against the default: so noise changes nothing.
"""

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.progress import SILENT, Progress
from ..transformer.statistics import RatioInterval, ratio_interval
from ..transformer.weights import to_numpy
from .forms import CHOICES, Forms, decision_text, not_offered
from .latency import Workload, shape_workload
from .machine import available_threads
from .time_store import WHOLE, TimeStore
from .timing import Pass, graph_pass

SHAPES = ((1, 16), (8, 128), (32, 64))
MIXED = (32, 128)  # rows, and tokens of the longest of them
SECONDS = 30.0
LOST, FEWEST, MOST = 2, 7, 25  # rounds: who is slower in all of the first is dropped; what is taken has so many
TOGETHER = "together"
UNTIMED, DROPPED = "not timed", "faster alone, but not proven together with the others: not taken"

Decision = dict[str, Any]


@dataclass(frozen=True)
class Chosen:
    """The forms to export with, and how that was decided.

    Attributes:
        forms: what was taken.
        decisions: for each choice and value, JSON-ready: `choice`, `value`, `taken`, `why`, and where it was timed
            `speed`: times as fast as what was in place (`against`), with its interval, in `rounds`.
        workloads: what was timed, in words.
        measured: date and time.
        notes: whether it was read from a cache, and which cache could not be used.
    """

    forms: Forms
    decisions: tuple[Decision, ...]
    workloads: tuple[str, ...]
    measured: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        timed = any("speed" in one for one in self.decisions)
        whole = timed and not any(one["why"].startswith(UNTIMED) for one in self.decisions)
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**plain, WHOLE: whole}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Chosen":
        """`to_dict` undone; InputError, KeyError or TypeError where it is not."""
        lists = {name: tuple(data[name]) for name in ("decisions", "workloads", "notes")}
        return cls(Forms.from_dict(data["forms"]), measured=str(data["measured"]), **lists)

    @classmethod
    def fixed(cls, forms: Forms, why: str) -> "Chosen":
        """Forms that were not timed."""
        return cls(forms, (), (), "", (why,))

    def without_parity(self) -> "Chosen":
        """The default, because a graph of these forms is too far from PyTorch."""
        taken = ", ".join(f"{name} {value}" for name, value in self.forms.to_dict().items())
        return replace(
            self, forms=Forms(), notes=(*self.notes, f"not close enough to PyTorch, so the default: {taken}")
        )

    def lines(self) -> list[str]:
        """A line for each note and decision."""
        named = (f"{one['choice']} {one['value']}: {decision_text(one)}" for one in self.decisions)
        return [*self.notes, *named]


def measured(
    checkpoint: Checkpoint,
    workloads: Sequence[Workload] = (),
    *,
    threads: int | None = None,
    seconds: float | None = None,
    stores: Sequence[Path] = (),
    progress: Progress = SILENT,
) -> Chosen:
    """The fastest forms of an encoder's graph on this machine's CPU.

    Args:
        checkpoint: the model, in the format in which it is exported.
        workloads: what is timed, one pass of each a round; empty: `default_workloads`.
        threads: of onnxruntime; None: the cores that this process may use.
        seconds: no choice is begun after them, so that large models may end later; None: `SECONDS`.
        stores: files of earlier measurements, the machine's last. The first that knows this one spares it, and all
            learn of it, but the machine's of none that `seconds` cut short or where there was nothing to time.
        progress: told of the choices.

    Raises:
        InputError: the model writes.
    """
    config = checkpoint.config
    if isinstance(config.head, LanguageHead):
        raise InputError("models that write have no forms to choose from")
    works = tuple(workloads) or default_workloads(config)
    used, allowed = available_threads(threads), SECONDS if seconds is None else seconds
    sizes = sizes_of(works)
    store = TimeStore(stores, used, "cpu", config, sizes, seconds=allowed)
    known, notes = store.read(Chosen.from_dict)
    if known is not None:
        return replace(known, notes=(*notes, f"from the cache, measured on {known.measured}"))
    state = {name: to_numpy(value) for name, value in checkpoint.state.items()}

    def opened(forms: Forms) -> Pass:
        return graph_pass(config, state, forms, works, threads=used)

    forms, decisions = choose(Forms(), not_offered(config), opened, seconds=allowed, progress=progress)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    chosen = Chosen(forms, tuple(decisions), sizes, now)
    notes += store.write(chosen.to_dict())
    return replace(chosen, notes=tuple(notes))


def default_workloads(config: TransformerConfig) -> tuple[Workload, ...]:
    """One text, dense batches and a batch of mixed lengths, of random tokens, cut where the model's positions end."""
    longest, vocabulary = config.embedding.positions, config.embedding.vocab_size
    found = [shape_workload(rows, min(tokens, longest), vocabulary, seed=0) for rows, tokens in SHAPES]
    rows, tokens = MIXED[0], min(MIXED[1], longest)
    ids = shape_workload(rows, tokens, vocabulary, seed=0).batches[0]["input_ids"]
    lengths = np.geomspace(min(4, tokens), tokens, rows).astype(np.int64)  # most are short
    mask = (np.arange(tokens) < np.random.default_rng(0).permutation(lengths)[:, None]).astype(np.int64)
    mixed = Workload(f"{rows} of mixed lengths", ({"input_ids": ids, "attention_mask": mask},))
    return (*{work.name: work for work in found}.values(), mixed)


def choose(
    first: Forms,
    refused: Mapping[tuple[str, str], str],
    opened: Callable[[Forms], Pass],
    *,
    seconds: float,
    progress: Progress = SILENT,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Forms, list[Decision]]:
    """Coordinate descent through the choices from `first` on; `opened` builds a graph of a form.

    Returns the forms taken, and a decision for each value that was not in place.
    """
    end, best, decisions = clock() + seconds, first, list[Decision]()
    running: Pass | None = None
    progress.start("time the graph's forms", len(CHOICES), "choices")
    for left, (choice, values) in zip(range(len(CHOICES), 0, -1), CHOICES.items(), strict=True):
        place = getattr(best, choice)
        others = [value for value in values if value != place]
        why = {value: f"not offered: {refused[choice, value]}" for value in others if (choice, value) in refused}
        offered = [value for value in others if value not in why]
        now = clock()
        if now >= end:
            why |= dict.fromkeys(offered, f"{UNTIMED}: {seconds:g} s were over")
            offered = []
        decisions += [_decision(choice, value, text) for value, text in why.items()]
        if offered:
            running = running or _warm(opened(best))
            candidates = {value: replace(best, **{choice: value}) for value in offered}
            passes = {value: _warm(opened(forms)) for value, forms in candidates.items()}
            speeds = _race(running, passes, now + (end - now) / left, clock)
            winner = _proven(speeds)
            best, running = candidates.get(winner, best), passes.get(winner, running)
            decisions += [_timed(choice, value, place, *speeds[value], winner == value) for value in offered]
        progress.advance(1, f"{choice} {getattr(best, choice)}")
    progress.done()
    return (best, decisions) if best == first else _together(first, best, decisions, opened, clock)


def _together(
    first: Forms, best: Forms, decisions: list[Decision], opened: Callable[[Forms], Pass], clock: Callable[[], float]
) -> tuple[Forms, list[Decision]]:
    """All that was taken against the default, in new sessions."""
    speed, rounds = _race(_warm(opened(first)), {TOGETHER: _warm(opened(best))}, clock(), clock)[TOGETHER]
    before = first.to_dict()
    names = ", ".join(f"{name} {value}" for name, value in best.to_dict().items() if value != before[name])
    proven = speed.low > 1
    last = _timed(TOGETHER, names, "the default", speed, rounds, proven)
    if proven:
        return best, [*decisions, last]
    return first, [*({**one, "taken": False, "why": DROPPED} if one["taken"] else one for one in decisions), last]


def _proven(speeds: Mapping[str, tuple[RatioInterval, int]]) -> str:
    """The fastest of those that are proven to be faster, or nothing."""
    proven = {value: speed.ratio for value, (speed, _) in speeds.items() if speed.low > 1}
    return max(proven, key=lambda value: proven[value], default="")


def _warm(run: Pass) -> Pass:
    """The same after a first pass, which takes longer."""
    run()
    return run


def _race(
    place: Pass, candidates: Mapping[str, Pass], end: float, clock: Callable[[], float]
) -> dict[str, tuple[RatioInterval, int]]:
    """How many times as fast as the form in place each candidate is, and in how many rounds.

    A round's speed is the geometric mean over the workloads. Rounds rotate, and go on until `end` of the clock, but
    for the fewest; a candidate that has lost its first ones all gets no more.
    """
    passes = {"": place, **candidates}
    speeds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(MOST):
        live = [name for name, found in speeds.items() if len(found) < LOST or max(found[:LOST]) > 1]
        if not live or (number >= FEWEST and clock() >= end):
            break
        order = ["", *live]
        turn = number % len(order)
        seconds = {name: passes[name]() for name in [*order[turn:], *order[:turn]]}
        for name in live:
            logs = [math.log(a / b) for a, b in zip(seconds[""], seconds[name], strict=True)]
            speeds[name].append(math.exp(sum(logs) / len(logs)))
    return {name: (ratio_interval([found]), len(found)) for name, found in speeds.items()}


def _decision(choice: str, value: str, why: str) -> Decision:
    return {"choice": choice, "value": value, "taken": False, "why": why}


def _timed(choice: str, value: str, against: str, speed: RatioInterval, rounds: int, taken: bool) -> Decision:
    why = "taken" if taken else "not proven to be faster" if speed.low <= 1 else "another one is faster"
    timed = {"taken": taken, "speed": asdict(speed), "against": against, "rounds": rounds}
    return {**_decision(choice, value, why), **timed}


def sizes_of(works: Sequence[Workload]) -> tuple[str, ...]:
    """What workloads are, in words that tell their shapes."""
    return tuple(map(_size, works))


def _size(work: Workload) -> str:
    batches = f"{len(work.batches)} batches" if len(work.batches) > 1 else "1 batch"
    return f"{work.name}: {batches}, {work.rows} rows, {work.tokens} tokens, {work.padded_tokens} with padding"
