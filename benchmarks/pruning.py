"""One-shot pruning of all-MiniLM-L6-v2 without training: ours against magnitude, and against Torch-Pruning.

usage: .venv/bin/python benchmarks/pruning.py [cost|speed] [--cost 0.5] [--speedup 2] [--split test|valid] [--seed 0]
                                              [--python PATH] [--quick]

cost: our default, the Fisher information and magnitude, each with and without the fit of the output projections, at
the same share of the encoder's multiply-adds. speed: our default against Torch-Pruning, both at the same speed-up,
measured in onnxruntime on texts sorted by length. Torch-Pruning gets an environment of its own in .cache/, the
calibration texts of our step, and the best of its settings (pruners/search.py): each setting's ratio is found by
bisection, the best one by nDCG@10 on thinned validation queries. Its models are converted (pruners/conversion.py), so
that all are exported in fp32 and judged in one form of graph.
Printed: nDCG@10, its difference from the untouched model with the paired 95 % interval (pages resampled), the
multiply-adds, and at a speed-up the measured one with its interval.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from environments import check_versions, environment
from help_search.setting import DATA, against, minilm, minilm_folder
from pruners.process import ENVIRONMENT, VERSIONS, Worker
from pruners.search import Found, Search, first_settings, refined, searched

from slimformer.compress.calibration import Calibration
from slimformer.compress.costs import Serving
from slimformer.compress.prune import Prune
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.machine import advice
from slimformer.export.runtime import load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData, load_data
from slimformer.transformer.evaluation import evaluate
from slimformer.transformer.layer_config import FLOAT32
from slimformer.transformer.metrics import TaskMetrics
from slimformer.transformer.statistics import RatioInterval

OURS, MAGNITUDE = "surgeon, re-fitted", "magnitude"
FEW = 128  # queries, of which settings are chosen
REFINED = 3  # settings of which more options are tried
SECONDS, QUICK_SECONDS = 4.0, 1.0  # of timing for a step of a bisection
QUICK_SAMPLES = 64  # calibration texts


def judge(model: Checkpoint, data: SearchData, split: str) -> TaskMetrics:
    """Export and evaluate."""
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(data, load_bundle(export(model, Path(folder) / "bundle")), split)


def fewer(data: SearchData, count: int) -> SearchData:
    """So many validation queries, evenly taken, and their pages."""
    valid = data.valid[:: max(1, len(data.valid) // count)][:count]
    needed = {page for query in valid for page in query.pages}
    return replace(data, valid=valid, pages=tuple(page for page in data.pages if page.id in needed))


def half_lost(original: TaskMetrics, found: TaskMetrics) -> TaskMetrics:
    """What a model would be worth that loses half as much: nDCG is a mean, so that of every query is halfway."""
    return replace(found, statistics=(original.statistics + found.statistics) / 2)


def at_cost(model: Checkpoint, data: SearchData, original: TaskMetrics, options: argparse.Namespace) -> None:
    """Criteria at the same multiply-adds."""
    steps = {
        OURS: Prune(cost=options.cost),
        "surgeon": Prune(cost=options.cost, refit=False),
        "Fisher, re-fitted": Prune(cost=options.cost, importance="fisher", agreement=0.0),
        "Fisher": Prune(cost=options.cost, importance="fisher", agreement=0.0, refit=False),
        "magnitude, re-fitted": Prune(cost=options.cost, importance="magnitude", agreement=0.0),
        MAGNITUDE: Prune(cost=options.cost, importance="magnitude", agreement=0.0, refit=False),
    }
    chosen = {name: steps[name] for name in (OURS, MAGNITUDE)} if options.quick else steps
    found = {}
    for name, step in chosen.items():
        start = time.monotonic()
        pruned = step(model, StepContext(data, seed=options.seed)).checkpoint
        seconds, share = time.monotonic() - start, pruned.config.multiply_adds() / model.config.multiply_adds()
        found[name] = judge(pruned, data, options.split)
        print(f"{name:32s} {against(original, found[name])}  {share:.3f} of the cost, {seconds:.0f} s", flush=True)
    half = half_lost(original, found[MAGNITUDE])
    print(f"{'over magnitude':32s} {against(found[MAGNITUDE], found[OURS])}")
    print(f"{'over half of what it loses':32s} {against(half, found[OURS])}", flush=True)


def at_speed(model: Checkpoint, data: SearchData, original: TaskMetrics, options: argparse.Namespace) -> None:
    """Ours and Torch-Pruning at the same speed-up."""
    python = options.python or environment(ENVIRONMENT, VERSIONS)
    check_versions(python, VERSIONS)
    context = StepContext(data, seed=options.seed)
    serving = Serving.of(model, FLOAT32, context)
    step = Prune(speedup=options.speedup)
    if options.quick:
        step = replace(step, samples=QUICK_SAMPLES, refit_samples=QUICK_SAMPLES, agreement=0.0)
    drawn = Calibration.of(model, context, max(step.samples, step.refit_samples), step.pages)  # as the step draws them
    rows = drawn.ids[: step.samples]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with Worker(python, minilm_folder(), rows, folder) as worker:
            seconds = QUICK_SECONDS if options.quick else SECONDS
            search = Search(worker, model, serving, options.speedup, folder, seconds)
            best = best_setting(search, fewer(data, FEW // 2 if options.quick else FEW), options.quick)
            theirs = search.made(best)
    start = time.monotonic()
    mine = step(model, context).checkpoint
    print(f"\nours took {time.monotonic() - start:.0f} s", flush=True)
    found = {}
    for name, pruned in {f"ours, speedup {options.speedup:g}": mine, str(best.setting): theirs}.items():
        found[name] = judge(pruned, data, options.split)
        share = pruned.config.multiply_adds() / model.config.multiply_adds()
        speed = told(serving.speed(model.config, pruned.config))
        print(f"{name:58s} {against(original, found[name])}  {speed}  {share:.3f} of the cost", flush=True)
    first, second = found.values()
    print(f"{'ours over Torch-Pruning':58s} {against(second, first)}")


def best_setting(search: Search, few: SearchData, quick: bool) -> Found:
    """Torch-Pruning's best setting on the validation queries."""

    def score(model: Checkpoint) -> float:
        metrics = judge(model, few, "valid")
        return metrics.values()[metrics.deciding]

    print(f"\nTorch-Pruning at {search.wanted:g}x; untouched {score(search.original):.2f} on thinned valid", flush=True)
    found = dict(searched(search, first_settings(quick), score))
    for one in sorted(found, key=lambda one: found[one], reverse=True)[: 0 if quick else REFINED]:
        found |= dict(searched(search, refined(one.setting), score))
    if not found:
        raise RuntimeError(f"no setting of Torch-Pruning comes to {search.wanted:g} times the speed; ask for less")
    return max(found, key=lambda one: found[one])


def told(speed: RatioInterval) -> str:
    """A speed-up with its interval."""
    return f"{speed.ratio:.2f}x [{speed.low:.2f}, {speed.high:.2f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["cost", "speed"], help="one of the two comparisons; both without")
    parser.add_argument("--split", default="test", choices=["valid", "test"])
    parser.add_argument("--cost", default=0.5, type=float)
    parser.add_argument("--speedup", default=2.0, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--python", type=Path, help="the Python of an environment that has the pinned packages")
    parser.add_argument("--quick", action="store_true", help="few settings, queries and texts, to see that it runs")
    options = parser.parse_args()
    model, data = minilm(), load_data(DATA)
    assert isinstance(data, SearchData)
    print("\n".join(advice()))
    original = judge(model, data, options.split)
    print(f"{'untouched':32s} {against(original, original)}", flush=True)
    for part, measure in {"cost": at_cost, "speed": at_speed}.items():
        if options.part in (None, part):
            measure(model, data, original, options)


if __name__ == "__main__":
    main()
