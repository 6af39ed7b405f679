"""Tiny trainings of every task, by one process or several: `python tests/together.py OUT` is one of several.

OUT gets of each task the weights, the losses and what each process was given.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from models import pair_data, translator
from tiny import LABELS, labelled_data, layer, search_data, tiny, tiny_config, with_head
from torch import Tensor

from slimformer.compress import distill, distill_writers
from slimformer.compress.distill import Distill
from slimformer.compress.examples import gather_examples
from slimformer.compress.inner import compared
from slimformer.compress.step import StepContext
from slimformer.compress.teacher import teach
from slimformer.transformer import training
from slimformer.transformer.batching import tensors, token_batches
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead
from slimformer.transformer.parts import Part
from slimformer.transformer.processes import ALONE, Processes, launched
from slimformer.transformer.progress import SILENT
from slimformer.transformer.training import Update, train
from slimformer.transformer.training_options import TrainingOptions
from slimformer.transformer.translation import forced_logits

STEPS = 20


@dataclass
class Training:
    """A lesson whose loss is asked for, and how long its examples are."""

    lesson: Any
    lengths: list[int]
    outputs: Callable[[], Tensor]

    def run(self, processes: Processes, *, cut: int = 1, double: bool = True, **ways: Any) -> dict[str, Any]:
        """Train; batches are cut into `cut` ones, which accumulate. Several processes try one batch first."""
        lesson = self.lesson.double() if double else self.lesson
        given: list[tuple[list[int], bool]] = []

        def loss(part: Part) -> Tensor:
            if part.seen is None:
                given.append((list(part), part.counted))
            value: Tensor = lesson.loss(part)
            return value

        options = TrainingOptions(steps=STEPS, lr=1e-3, warmup=3, accumulate=cut)
        ways |= {"coupled": lesson.coupled, "processes": processes}
        log = train(lesson, lambda epoch: self.batches(epoch, cut), loss, options, **ways)
        with torch.inference_mode():
            outputs = self.outputs()
        state = {name: value.clone() for name, value in lesson.state_dict().items()}
        return {
            "state": state,
            "losses": log.losses,
            "given": given[processes.number > 1 :],
            "texts": log.texts,
            "idle": log.without_gradient,
            "seed": torch.initial_seed(),
            "outputs": outputs,
        }

    def batches(self, epoch: int, cut: int = 1) -> list[list[int]]:
        """Of some texts each, and one of a single text."""
        whole = [one for one in token_batches(self.lengths, tokens=160, seed=3, epoch=epoch) if len(one) >= 4]
        found = [one for batch in whole for one in (batch[i::cut] for i in range(cut))]
        return [*found[: 4 * cut], whole[-1][:1]]


def embedder(context: dict[str, Any] | None = None, **options: Any) -> Training:
    """A student of one layer of its teacher's two, of another width where relations and hidden states are asked for."""
    teacher = tiny()
    wide = options.get("relations") or options.get("hidden")
    options |= {"cosine": 0.0} if wide else {}
    student = tiny(tiny_config((layer(2, 6, 16),), d_model=12)) if wide else _first_layer(teacher)
    return _lesson(Distill(steps=STEPS, fragments=1.0, **options), student, teacher, search_data(), **(context or {}))


def classifier() -> Training:
    """Of rows some of which have labels."""
    teacher, data = with_head(ClassificationHead(LABELS)), labelled_data()
    data = replace(data, texts=(*data.texts, *(row.text + " again" for row in data.train[:30])))
    return _lesson(Distill(steps=STEPS), _first_layer(teacher), teacher, data)


def _lesson(options: Distill, student: Checkpoint, teacher: Checkpoint, data: Any, **context: Any) -> Training:
    context = StepContext(data, teacher=teacher, **context)
    examples = gather_examples(options, student, context)
    layers = options._layer_map(student, teacher, examples.ids)
    what = compared(options, student.config, teacher.config, layers)
    where: dict[str, Any] = {"folder": None, "device": "cpu", "progress": SILENT}
    targets = teach(teacher, examples.ids, tokens=what.theirs, **where)
    lesson = distill._Lesson(options, student, teacher, examples, what, targets, context)
    some = tensors(examples.ids[:8], student.config.text.pad_id)
    return Training(lesson, examples.lengths, lambda: lesson.student(*some).result)


def _first_layer(teacher: Checkpoint) -> Checkpoint:
    config = teacher.config.with_layers(teacher.config.encoder[:1])
    state = {name: value for name, value in teacher.state.items() if not name.startswith("encoder.1.")}
    return replace(teacher, config=config, state=state)


def writer(encoder: int) -> Training:
    """A translator, or (0) a language model."""
    torch.manual_seed(4)
    teacher = translator() if encoder else translator(encoder=0)
    student = translator(seed=6) if encoder else translator(encoder=0, seed=6)
    ids = student.text_encoder().encode([text for pair in pair_data().train for text in (pair.source, pair.target)])
    pairs = [(ids[i] if encoder else [], ids[i + 1]) for i in range(0, len(ids), 2)]
    options, rows = Distill(steps=STEPS, smoothing=0.1), teacher.config.output_width
    targets = distill_writers._distributions(options, teacher, rows, pairs, StepContext(pair_data()))
    lesson = distill_writers._Lesson(options, student, pairs, targets, "cpu")
    lengths = [len(source) + len(target) for source, target in pairs]
    return Training(lesson, lengths, lambda: forced_logits(lesson.student, pairs[:8], "cpu")[0])


TASKS: dict[str, Callable[[], Training]] = {
    "embedder": embedder,
    "relations": lambda: embedder(relations=1.0, hidden=0.3),
    "nested": lambda: embedder(nested=(4, 8)),
    "layers": lambda: embedder(hidden=0.3, layers=(0,), attention=0.1),
    "recomputed": lambda: embedder(relations=1.0, hidden=0.3, gradient_checkpointing=True),
    "idle": lambda: embedder(relations=1.0, similarity=0.0),
    "cka": lambda: embedder(hidden=0.3, hidden_by="cka"),
    "index": lambda: embedder({"keep_index": True}),
    "classifier": classifier,
    "translator": lambda: writer(1),
    "language": lambda: writer(0),
}


def main() -> None:
    """Run all tasks as one of the processes that were started."""
    torch.set_num_threads(1)
    out, processes = Path(sys.argv[1]), launched("cpu")
    for name, task in TASKS.items():
        for cut in (1, 2):
            torch.save(task().run(processes, cut=cut), out / f"{name}-{cut}-{processes.rank}.pt")
        torch.save(task().run(processes, double=False), out / f"{name}-single-{processes.rank}.pt")
    torch.save(embedder(dropout=0.1).run(processes), out / f"whole-{processes.rank}.pt")
    torch.save(killed_and_resumed(processes, out / "state.pt"), out / f"resumed-{processes.rank}.pt")


class Killed(Exception):
    """Raised in the middle of a training."""


def killed_and_resumed(processes: Processes, state: Path, at: int = 7) -> dict[str, Any]:
    """The embedder's training with dropout, ended before a step, which loses what was done since the last state."""
    training.SAVE_SECONDS = -1.0

    def stop(update: Update) -> None:
        if update.step == at:
            raise Killed

    try:
        embedder(dropout=0.1).run(processes, state_path=state, after_step=stop)
    except Killed:
        return embedder(dropout=0.1).run(processes, state_path=state)
    raise AssertionError("the training was not ended")


def start(*arguments: str, number: int = 2) -> list[str]:
    """Run a program of Python in several processes, as a launcher does; what each prints on stdout."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    running = []
    for rank in range(number):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "MASTER_PORT": port}
        told = {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, *arguments]
        running.append(subprocess.Popen(command, env={**os.environ, **told}, stdout=subprocess.PIPE, text=True))
    printed = [one.communicate(timeout=800)[0] for one in running]
    assert [one.returncode for one in running] == [0] * number
    return printed


def alone(name: str, **ways: Any) -> dict[str, Any]:
    """The same training by this process."""
    return TASKS[name]().run(ALONE, **ways)


if __name__ == "__main__":
    main()
