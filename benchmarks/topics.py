"""One-shot pruning of a classifier: all-MiniLM-L6-v2 fine-tuned on the help topics, to half its multiply-adds.

usage: .venv/bin/python benchmarks/topics.py [--cost 0.5] [--epochs 2] [--model MODEL] [--seed 0]

Without MODEL the model is fine-tuned first, in .cache/topics (some ten minutes; kept for the next run). Prints the
accuracy on the rows of test and valid, the difference from the unpruned model with the paired 95 % interval (pages
resampled), what pruning took, and how many texts it took until its decisions agreed.
"""

import argparse
import tempfile
import time
from pathlib import Path

from help_search.setting import ROOT, against, minilm_folder

from slimformer.compress.prune import Prune
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.runtime import load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import LabelledData, load_data
from slimformer.transformer.evaluation import evaluate
from slimformer.transformer.finetuning import FineTuning, finetune
from slimformer.transformer.loading import load
from slimformer.transformer.metrics import TaskMetrics

DATA = ROOT / "examples/help-topics"
SPLITS = ("test", "valid")


def judge(model: Checkpoint, data: LabelledData) -> dict[str, TaskMetrics]:
    """Export and evaluate on each split."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = load_bundle(export(model, Path(folder) / "bundle"))
        return {split: evaluate(data, bundle, split) for split in SPLITS}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", default=0.5, type=float)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seed", default=0, type=int)
    options = parser.parse_args()
    data = load_data(DATA, "classification")
    assert isinstance(data, LabelledData)
    if options.model is None:
        out = ROOT / f".cache/topics/{options.epochs}-epochs"
        model = finetune(load(minilm_folder()), data, out, FineTuning(epochs=options.epochs), resume=True)
    else:
        model = load(options.model)
    original = judge(model, data)
    for split in SPLITS:
        print(f"unpruned, {split:5s} {against(original[split], original[split])}", flush=True)
    start = time.monotonic()
    result = Prune(cost=options.cost)(model, StepContext(data, seed=options.seed))
    seconds, told = time.monotonic() - start, result.details
    found = judge(result.checkpoint, data)
    for split in SPLITS:
        print(f"pruned, {split:7s} {against(original[split], found[split])}")
    print(f"{told['multiply_adds_kept']:.3f} of the multiply-adds; {seconds:.0f} s; {told['agreement']}")


if __name__ == "__main__":
    main()
