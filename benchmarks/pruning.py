"""One-shot pruning to half the encoder's multiply-adds, without training: surgeon and re-fit against others.

usage: .venv/bin/python benchmarks/pruning.py [--split valid|test] [--cost 0.5] [--seed 0]

Prints nDCG@10 of the untouched model, of the pruned ones, and the paired interval of the difference between their
losses: pages resampled, every model exported in fp32 and judged in onnxruntime.
"""

import argparse
import tempfile
import time
from pathlib import Path

from help_search.setting import DATA, against, minilm

from slimformer.compress.prune import Prune
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.runtime import load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData, load_data
from slimformer.transformer.evaluation import evaluate
from slimformer.transformer.metrics import TaskMetrics


def judge(model: Checkpoint, data: SearchData, split: str) -> TaskMetrics:
    """Export and evaluate."""
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(data, load_bundle(export(model, Path(folder) / "bundle")), split)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test", choices=["valid", "test"])
    parser.add_argument("--cost", default=0.5, type=float)
    parser.add_argument("--seed", default=0, type=int)
    options = parser.parse_args()
    model, data = minilm(), load_data(DATA)
    assert isinstance(data, SearchData)
    context = StepContext(data, seed=options.seed)
    original = judge(model, data, options.split)
    print(f"{'untouched':28s} {against(original, original)}", flush=True)
    found = {}
    steps = {
        "surgeon, re-fitted": Prune(cost=options.cost),
        "Fisher, re-fitted": Prune(cost=options.cost, importance="fisher", agreement=0.0),
        "magnitude": Prune(cost=options.cost, importance="magnitude", refit=False),
        "magnitude, re-fitted": Prune(cost=options.cost, importance="magnitude"),
    }
    for name, step in steps.items():
        start = time.monotonic()
        pruned = step(model, context).checkpoint
        seconds = time.monotonic() - start
        share = pruned.config.multiply_adds() / model.config.multiply_adds()
        found[name] = judge(pruned, data, options.split)
        print(f"{name:28s} {against(original, found[name])}  {share:.3f} of the cost, {seconds:.0f} s", flush=True)
    print(f"{'surgeon over magnitude':28s} {against(found['magnitude'], found['surgeon, re-fitted'])}")


if __name__ == "__main__":
    main()
