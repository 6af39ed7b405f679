"""The training loop: AdamW, warm-up then decay of the learning rate, gradient clipping and accumulation, resume.

A run is a function of its seed, its data and its number of steps. A time budget is turned into a number of steps once,
before the first step, and kept with the state on disk, so that a resumed run is the same run.
"""

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .curves import CurvePoint
from .errors import InputError
from .files import write_file
from .parts import Part, collect, parts_of
from .processes import ALONE, Processes
from .progress import SILENT, Progress
from .randomness import random_states, restore_random
from .training_options import FLOAT32, TrainingOptions, learning_rate

SAVE_SECONDS = 60.0
CURVE_POINTS = 200
# Of a run, in its state.
KEPT = ("step", "epoch", "place", "texts", "losses", "seconds", "curve", "without_gradient", "ended")
STACKS = ("encoder", "decoder")
WARM_STEPS, TIMED_STEPS = 4, 12
STEP_OVERHEAD = 1.1  # the optimizer's share on top of forwards and backwards

Batches = Callable[[int], Sequence[list[int]]]
Loss = Callable[[Part], Tensor]


@dataclass(frozen=True)
class TrainingLog:
    """What happened: steps, texts and passes over them, seconds, mean losses of up to 20 equal parts, and the curve.

    `without_gradient` names parameters that the loss does not depend on, which stay as they were.
    """

    steps: int
    texts: int
    epochs: int
    seconds: float
    losses: tuple[float, ...]
    curve: tuple[CurvePoint, ...] = ()
    without_gradient: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The summary, JSON-ready; the curve is left out, being as long as all else of a report."""
        return {name: value for name, value in asdict(self).items() if name != "curve"}


@dataclass(frozen=True)
class Update:
    """An optimizer step that was made.

    Attributes:
        step: its number, from 1.
        steps: of the whole run.
        rate: its learning rate, times the share of the gradient that clipping left.
    """

    step: int
    steps: int
    rate: float


def train(
    modules: nn.Module,
    batches: Batches,
    loss: Loss,
    options: TrainingOptions,
    *,
    state_path: Path | None = None,
    title: str = "train",
    progress: Progress = SILENT,
    clock: Callable[[], float] = time.monotonic,
    after_epoch: Callable[[int, int], None] | None = None,
    watch: Callable[[CurvePoint], None] | None = None,
    after_step: Callable[[Update], bool | None] | None = None,
    coupled: bool = False,
    processes: Processes = ALONE,
) -> TrainingLog:
    """Train `modules` in place.

    Args:
        modules: all parameters that learn.
        batches: epoch -> batches of example indices, the same for the same epoch.
        loss: part of a step's examples -> its share of their loss: those of all parts add up to it (`parts`).
        options: how.
        state_path: where the state is kept and taken up from; None: nowhere.
        title: shown with the progress.
        progress: told of every step.
        clock: seconds.
        after_epoch: called with the number (from 0) of every epoch that ends and the steps that were made, `modules`
            being in evaluation mode; a resumed run calls it again for epochs that ended after the state was kept.
        watch: called with every point of the curve; a resumed run calls it again for points after the state was kept.
        after_step: called with every step that was made, before the state is kept, which it may change in `modules`;
            True, in all processes, ends the training there.
        coupled: whether the loss wants rows of other parts (`Part.joined`); steps of several batches then go through
            the model twice, first without gradients.
        processes: those that train, each of which calls this; `after_epoch`, `watch` and `progress` are told of it by
            the main one alone.

    Raises:
        InputError: there is no batch to train on, the loss is not finite, or the state is of other options.
    """
    if not batches(0):
        raise InputError(f"{title}: there is no text to train on")
    torch.manual_seed(options.seed + processes.rank)
    modules.train()
    run = _Run(modules, loss, options, processes, coupled, state_path, clock, watch, after_step)
    run.begin(batches)
    if processes.main:
        progress.start(title, run.steps, "steps")
        progress.advance(run.step)
    while run.goes_on:
        epoch = run.epoch
        run.epoch_of(batches, progress)
        if after_epoch is not None and run.epoch > epoch and processes.main:
            modules.eval()
            after_epoch(epoch, run.step)
            modules.train()
    run.save()
    run.end()
    if processes.main:
        progress.done()
    modules.eval()
    return run.log()


class _Whole(nn.Module):
    """Modules and their loss as one module, whose forward pass is the loss of a part."""

    def __init__(self, modules: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.modules_that_learn, self.loss = modules, loss

    def forward(self, part: Part) -> Tensor:
        """The part's share of the step's loss."""
        return self.loss(part)


class _Run:
    """The moving parts of one training."""

    def __init__(
        self,
        modules: nn.Module,
        loss: Loss,
        options: TrainingOptions,
        processes: Processes,
        coupled: bool,
        state_path: Path | None,
        clock: Callable[[], float],
        watch: Callable[[CurvePoint], None] | None,
        after_step: Callable[[Update], bool | None] | None,
    ) -> None:
        self.modules, self.options, self.processes = modules, options, processes
        self.whole, self.optimizer = _Whole(modules, loss), _optimizer(modules, options)
        self.prepared: nn.Module = self.whole
        self.without_gradient: list[str] | None = None
        self.twice = coupled and options.accumulate > 1
        self.state_path, self.clock, self.watch, self.after_step = state_path, clock, watch, after_step
        self.step = self.epoch = self.place = self.texts = 0
        self.ended = False
        self.losses: list[float] = []
        self.curve: list[dict[str, Any]] = []

    def begin(self, batches: Batches) -> None:
        """Take up the state that is kept, or find how many steps there are to be and keep the first."""
        if self.processes.number > 1:
            self._try(batches(0)[0])
        idle = bool(self.without_gradient)
        self.prepared, self.optimizer = self.processes.begin(self.whole, self.optimizer, idle=idle)
        state = self._load()
        self.steps = int(state["steps"]) if state else self.options.steps or self._budget(batches)
        self.every = -(-self.steps // CURVE_POINTS)
        self.seconds, self.mark = 0.0, self.clock()
        self.saved = self.clock()
        if state:
            self.restore(state)
        elif self.state_path is not None:
            self.save()

    @property
    def goes_on(self) -> bool:
        """Whether there is a step to make."""
        return self.step < self.steps and not self.ended

    def end(self) -> None:
        """Let go of what was prepared."""
        self.processes.end()

    def epoch_of(self, batches: Batches, progress: Progress) -> None:
        """Go on through the current epoch, to its end or to the last step."""
        order = batches(self.epoch)
        groups = range(self.place, len(order), self.options.accumulate)
        for start in groups:
            if not self.goes_on:
                return
            chosen = order[start : start + self.options.accumulate]
            save = self._update(chosen)
            self.place = start + len(chosen)
            if self.processes.main:
                progress.advance(note=f"loss {self.losses[-1]:.4f}")
            if save:
                self.save()
        self.epoch, self.place = self.epoch + 1, 0

    def _update(self, chosen: Sequence[list[int]]) -> bool:
        """A step; whether it is time to keep the state."""
        rate = learning_rate(self.step, self.steps, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        share = self._gradients(chosen)
        late = self.processes.main and self.state_path is not None and self.clock() - self.saved > SAVE_SECONDS
        total, savers = self.processes.totals([share, late])
        count = sum(map(len, chosen))
        if not math.isfinite(total):
            raise InputError(f"the loss is {total} at step {self.step + 1}; lower the learning rate {self.options.lr}")
        norms = gradient_norms(self.modules) if self._at_point(self.step + 1) else {}
        if self.without_gradient is None:
            self.without_gradient = idle_parameters(self.modules)
        norm = self.processes.clip(self.modules.parameters(), self.options.clip)
        self.optimizer.step()
        self.step, self.texts = self.step + 1, self.texts + count
        self.losses.append(total)
        if norms:
            self._note(rate, norms)
        if self.after_step is not None:
            left = min(1.0, self.options.clip / (float(norm) + 1e-6))  # as torch clips
            self.ended = bool(self.after_step(Update(self.step, self.steps, rate * left)))
        return bool(savers)

    def _try(self, batch: Sequence[int]) -> None:
        """Find the parameters without a gradient before processes are to wait for those of each other."""
        with self._nothing_kept():
            self.whole(Part(batch)).backward()
            self.without_gradient = idle_parameters(self.modules)

    @contextmanager
    def _nothing_kept(self) -> Iterator[None]:
        """Within, nothing is learnt: gradients, random numbers and buffers that a forward pass moves are put back."""
        with _buffers_kept(self.modules):
            yield
        self.modules.zero_grad()
        torch.manual_seed(self.options.seed + self.processes.rank)

    def _gradients(self, chosen: Sequence[list[int]]) -> float:
        """Add up the gradients of a step's batches; this process's share of the loss."""
        parts, total = parts_of(chosen, self.processes), 0.0
        with products(self.options.precision):
            if self.twice:
                with _buffers_kept(self.modules):
                    collect(parts, self.whole, self.processes)
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                with nullcontext() if last else self.processes.holding(self.prepared):
                    value = self.prepared(part) * part.counted
                    self.processes.backward(value)
                total += float(value.detach())
        return total

    def _at_point(self, step: int) -> bool:
        """Whether the curve has a point at a step: every some steps, and the last one."""
        return step % self.every == 0 or step == self.steps

    def _note(self, rate: float, norms: dict[str, float]) -> None:
        """Enter a point of the curve."""
        since = self.curve[-1]["step"] if self.curve else 0
        point = CurvePoint(self.step, fmean(self.losses[since:]), rate, norms)
        self.curve.append(asdict(point))
        if self.watch is not None and self.processes.main:
            self.watch(point)

    def save(self) -> None:
        """Write the state whole, or leave the last one."""
        self._count_seconds()
        if self.state_path is None:
            return
        random = self.processes.all_of(random_states())
        if self.processes.main:
            state = {
                "modules": self.modules.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "random": random,
                "steps": self.steps,
                "options": asdict(self.options),
                **{name: getattr(self, name) for name in KEPT},
            }
            write_file(self.state_path, _to_bytes(state))
        self.saved = self.clock()

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_random(state["random"][self.processes.rank])
        for name in KEPT:
            setattr(self, name, state[name])

    def _load(self) -> dict[str, Any] | None:
        path = self.state_path
        if path is None or not self.processes.from_main(path.is_file()):
            return None
        if not path.is_file():
            raise InputError(
                f"{path} is not there for process {self.processes.rank}: all have to see the main one's files"
            )
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state["options"] != asdict(self.options):
            raise InputError(f"{path} is of a training with other options: remove it, or go on with the same ones")
        if len(state["random"]) != self.processes.number:
            raise InputError(
                f"{path} is of a training by {len(state['random'])} processes, and there are {self.processes.number}: "
                "start as many, or remove it"
            )
        return state

    def _budget(self, batches: Batches) -> int:
        """How many steps fit the time: a few batches go forwards and backwards, and nothing is learnt or kept."""
        assert self.options.minutes is not None
        times = []
        with self._nothing_kept():
            for batch in batches(0)[: WARM_STEPS + TIMED_STEPS]:
                start = self.clock()
                self._gradients([batch])
                times.append(self.clock() - start)
        seconds = self.options.accumulate * median(times[WARM_STEPS:] or times)
        steps = max(1, int(self.options.minutes * 60 / (STEP_OVERHEAD * max(seconds, 1e-6))))
        return self.processes.from_main(steps)

    def _count_seconds(self) -> None:
        now = self.clock()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    def log(self) -> TrainingLog:
        """The summary."""
        self._count_seconds()
        parts = [part for part in torch.tensor(self.losses).tensor_split(min(20, len(self.losses))) if len(part)]
        means = tuple(round(float(part.mean()), 6) for part in parts)
        curve = tuple(CurvePoint(**point) for point in self.curve)
        epochs = self.epoch + bool(self.place)
        return TrainingLog(
            self.step, self.texts, epochs, self.seconds, means, curve, tuple(self.without_gradient or ())
        )


@contextmanager
def _buffers_kept(modules: nn.Module) -> Iterator[None]:
    """Put back what forward passes within move of the buffers."""
    kept = [(buffer, buffer.clone()) for buffer in modules.buffers()]
    yield
    for buffer, before in kept:
        buffer.copy_(before)


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Multiply matrices in a precision of `TrainingOptions` within.

    Attention is then made of products too: its fused kernel on CPU works in blocks too small for bfloat16.
    """
    if precision == FLOAT32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def idle_parameters(modules: nn.Module) -> list[str]:
    """Names of the parameters that are to learn and have no gradient."""
    return [name for name, value in modules.named_parameters() if value.requires_grad and value.grad is None]


def gradient_norms(modules: nn.Module) -> dict[str, float]:
    """Norm of the gradient of every layer (`encoder.0`, ...) and of each part beside the layers (`embeddings`, ...)."""
    squares: dict[str, list[Tensor]] = {}
    for name, value in modules.named_parameters():
        if value.grad is not None:
            squares.setdefault(_part(name), []).append(value.grad.detach().float().square().sum())
    return {part: math.sqrt(float(sum(values))) for part, values in squares.items()}


def _part(name: str) -> str:
    """The layer of a parameter, or else the module around its own."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part in STACKS:
            return f"{part}.{parts[place + 1]}"
    return ".".join(parts[:-2] or parts[:1])


def check_device(device: str) -> None:
    """Raise InputError where torch cannot put a tensor on the device."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = " ".join(str(error).split())
        raise InputError(f"device {device} cannot be used by torch ({reason}): choose cpu") from error


def _optimizer(modules: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    learning = [p for p in modules.parameters() if p.requires_grad]
    matrices, vectors = [p for p in learning if p.ndim > 1], [p for p in learning if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, fused=True)


def _to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
