"""Does a model that was pruned to be N times as fast become so? all-MiniLM-L6-v2 or MODEL, in float and in int8.

usage: .venv/bin/python benchmarks/pruning_speed.py [--speedups 1.5,2,3] [--formats float32,int8] [--workload sorted]
                                                    [--threads N] [--seconds 90] [--importance surgeon]
                                                    [--model MODEL --data DATA [--task TASK]]

For each format the model is pruned once for every speed-up (one shot, not re-fitted: time does not depend on weights),
brought into the format, exported in the graph's default form, and timed beside the unpruned model in the same format
and form, each in its own process with default session options: models that write end their texts there, and pruned ones
elsewhere. Prints what was asked for, what the sum of measured
times predicts, what pruning measured by itself, and what it came to.
"""

import argparse
import tempfile
from pathlib import Path

from help_search.setting import DATA, minilm

from slimformer.compress.costs import Serving
from slimformer.compress.criteria import CRITERIA, SURGEON
from slimformer.compress.prune import Prune
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.latency import compare
from slimformer.export.machine import advice, available_threads
from slimformer.export.names import GENERATE_FILE, MODEL_FILE
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import load_data
from slimformer.transformer.layer_config import FLOAT32
from slimformer.transformer.loading import load


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speedups", default="1.5,2,3")
    parser.add_argument("--formats", default="float32,int8")
    parser.add_argument("--workload", default="sorted", choices=["sorted", "mixed", "single"])
    parser.add_argument("--importance", default=SURGEON, choices=list(CRITERIA))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--task")
    options = parser.parse_args()
    model = minilm() if options.model is None else load(options.model)
    data, threads = load_data(options.data, options.task), available_threads(options.threads)
    context = StepContext(data, workload=options.workload, threads=threads)
    (workload,) = Serving.of(model, FLOAT32, context).works
    print(f"workload {options.workload}, {threads} threads; {'; '.join(advice())}", flush=True)

    def served(one: Checkpoint, format: str, folder: Path) -> Path:
        made = one if format == FLOAT32 else Quantize(format=format, samples=64)(one, context).checkpoint
        return export(made, folder) / (GENERATE_FILE if made.config.decoder else MODEL_FILE)

    for format in options.formats.split(","):
        print(f"\n{format:10s} asked  predicted  pruning measured      measured")
        with tempfile.TemporaryDirectory() as folder:
            graphs, told = {"unpruned": served(model, format, Path(folder) / "unpruned")}, {}
            for wanted in options.speedups.split(","):
                step = Prune(speedup=float(wanted), format=format, importance=options.importance, refit=False)
                result = step(model, context)
                told[wanted] = result.details["speed"]
                graphs[wanted] = served(result.checkpoint, format, Path(folder) / wanted)
            timed = compare(graphs, {options.workload: workload}, threads=threads, seconds=options.seconds, seed=0)
        for wanted, said in told.items():
            found = timed.timing(wanted, options.workload)
            print(
                f"{'':10s} {wanted:>5s}  {said['predicted']:9.2f}  "
                f"{said['measured']:5.2f} [{said['low']:.2f}, {said['high']:.2f}]  "
                f"{found.ratio:5.2f} [{found.ratio_low:.2f}, {found.ratio_high:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
