"""Three of all-MiniLM-L6-v2's six layers, taught by the whole model, and by neighbouring sentences without a teacher.

usage: .venv/bin/python benchmarks/distillation.py [--seeds 0,1,2] [--minutes 10] [--threads N] [--split test|valid]
                                                   [--keep-index]

Both start from layers 0, 2 and 5 and train as long, with the same learning rate and batches, on the texts and pages of
the help. With a teacher: `distill` with the options of the demo's recipe. Without: of each sentence and the next one of
its page the vectors are to be nearer than those of other sentences of the batch (cross-entropy over cosines / 0.05,
both ways; Logeswaran & Lee 2018 in the form of van den Oord et al. 2018). With --keep-index the student's queries are
also searched in the pages as the whole model embeds them. Prints nDCG@10 with its difference from the untouched model
and the paired 95 % interval (pages resampled), and the means over seeds.
"""

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from help_search.setting import DATA, against, minilm
from torch import Tensor, nn

from slimformer.compress.distill import Distill
from slimformer.compress.prune import Prune
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.machine import advice, available_threads
from slimformer.export.runtime import load_bundle
from slimformer.transformer.batching import tensors, token_batches
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData, load_data
from slimformer.transformer.evaluation import Memory, evaluate
from slimformer.transformer.metrics import TaskMetrics
from slimformer.transformer.training import train

TEMPERATURE = 0.05
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


class Neighbours(nn.Module):
    """A student that learns which sentence follows."""

    def __init__(self, checkpoint: Checkpoint, data: SearchData) -> None:
        super().__init__()
        self.student, self.pad_id = checkpoint.to_torch(), checkpoint.config.text.pad_id
        encoder = checkpoint.text_encoder()
        pages = [[part for part in SENTENCE.split(page.text) if len(part.split()) > 2] for page in data.pages]
        pairs = [pair for page in pages for pair in pairwise(page)]
        sides = [encoder.encode([pair[side] for pair in pairs]) for side in (0, 1)]
        self.pairs = list(zip(*sides, strict=True))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each pair."""
        return [len(first) + len(second) for first, second in self.pairs]

    def loss(self, batch: Sequence[int]) -> Tensor:
        """Cross-entropy of the right neighbour, both ways."""
        sides = (tensors([self.pairs[i][side] for i in batch], self.pad_id, "cpu") for side in (0, 1))
        first, second = (F.normalize(self.student(*side).result, dim=1) for side in sides)
        scores, right = first @ second.T / TEMPERATURE, torch.arange(len(batch))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


def judged(model: Checkpoint, data: SearchData, split: str, memory: Memory, index: Memory | None = None) -> TaskMetrics:
    """Export and evaluate."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = load_bundle(export(model, Path(folder) / "bundle"))
        return evaluate(data, bundle, split, memory=memory, index=index)


def without_teacher(student: Checkpoint, data: SearchData, options: Distill, seed: int) -> tuple[Checkpoint, int]:
    """The student after as many minutes of neighbouring sentences, and the steps made."""
    lesson = Neighbours(student, data)

    def batches(epoch: int) -> list[list[int]]:
        return token_batches(lesson.lengths, tokens=options.batch_tokens, seed=seed, epoch=epoch)

    log = train(lesson, batches, lesson.loss, options.training(seed))
    state = {name: value.detach().clone() for name, value in lesson.student.state_dict().items()}
    return replace(student, state=state), log.steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", default=10.0, type=float)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--split", default="test", choices=["valid", "test"])
    parser.add_argument("--keep-index", action="store_true")
    options = parser.parse_args()
    model, data, threads = minilm(), load_data(DATA), available_threads(options.threads)
    assert isinstance(data, SearchData)
    torch.set_num_threads(threads)
    print(f"{threads} threads; {'; '.join(advice())}")
    index = Memory()
    original = judged(model, data, options.split, index)
    print(f"{'untouched':34s} {against(original, original)}", flush=True)
    distill = Distill(minutes=options.minutes, lr=5e-4, texts=15000, fragments=1.0, pages=2478)
    thin = Prune(keep_layers=(0, 2, 5), cost=1.0, importance="magnitude", agreement=0.0, refit=False)
    values: dict[str, list[float]] = {}

    def told(name: str, seed: int, steps: int, found: TaskMetrics) -> None:
        values.setdefault(name, []).append(found.values()[found.deciding])
        print(f"{f'{name}, seed {seed}':34s} {against(original, found)}  {steps} steps", flush=True)

    for seed in map(int, options.seeds.split(",")):
        context = StepContext(data, teacher=model, seed=seed, threads=threads, keep_index=options.keep_index)
        student = thin(model, replace(context, keep_index=False)).checkpoint
        taught = distill(student, context)
        steps = taught.details["steps"]
        told("by the teacher", seed, steps, judged(taught.checkpoint, data, options.split, Memory()))
        if options.keep_index:
            told("in its index", seed, steps, judged(taught.checkpoint, data, options.split, Memory(), index))
        alone, steps = without_teacher(student, data, distill, seed)
        told("by neighbours", seed, steps, judged(alone, data, options.split, Memory()))
    for name, found in values.items():
        share = 100 * mean(found) / original.values()[original.deciding]
        print(f"{f'{name}, mean':34s} {mean(found):6.2f}, {share:.1f} % of the untouched model's")


if __name__ == "__main__":
    main()
