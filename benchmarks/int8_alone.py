"""int8 without pruning or training: all-MiniLM-L6-v2 against its own fp32 graph, padded, on the help-search data.

usage: .venv/bin/python benchmarks/int8_alone.py [OTHER_BUNDLE…] [--threads N]

Prints nDCG@10 on the test queries with its paired interval, file sizes, and the speed-up on every workload (384 texts).
With --eager, the int8 model is also evaluated in PyTorch, to count the first hits that differ from onnxruntime's: one
text at a time, and in batches of 32, whose texts share their ranges, so that one flipped rounding moves all of them.
Other bundles (such as runs/demo/bundle) are timed and judged in the same run.
"""

import argparse
import tempfile
from pathlib import Path

from help_search.setting import DATA, MAX_LENGTH, Batched, Eager, against, minilm

from slimformer.compress.latencies import build_workloads
from slimformer.export import export
from slimformer.export.bundle import in_format
from slimformer.export.latency import compare
from slimformer.export.machine import advice, available_threads
from slimformer.export.names import MODEL_FILE
from slimformer.export.runtime import load_bundle
from slimformer.transformer.data import load_data
from slimformer.transformer.evaluation import evaluate
from slimformer.transformer.metrics import changed_answers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    model, data = minilm(), load_data(DATA)
    threads = available_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        bundles = {
            "fp32 padded": export(model, Path(folder) / "fp32", layout="padded"),
            "int8 packed": export(model, Path(folder) / "int8", format="int8"),
            **{str(path): path for path in options.bundles},
        }
        metrics = {name: evaluate(data, load_bundle(path, threads=threads), "test") for name, path in bundles.items()}
        int8 = load_bundle(bundles["int8 packed"], threads=threads)
        workloads, descriptions = build_workloads(model, data, seed=0, texts=384)
        graphs = {name: path / MODEL_FILE for name, path in bundles.items()}
        sizes = {name: graph.stat().st_size / 1e6 for name, graph in graphs.items()}
        timed = compare(graphs, workloads, threads=threads, seconds=300)
    print("\n".join([*advice(), f"{threads} threads; texts cut at {MAX_LENGTH} tokens", ""]))
    for name, text in descriptions.items():
        print(f"{name}: {text}")
    print(f"\n{'model':32s} {'MB':>6s}  nDCG@10 (difference, 95 %)    " + "  ".join(f"{w:>18s}" for w in workloads))
    for name in bundles:
        ratios = [timed.timing(name, workload) for workload in workloads]
        cells = "  ".join(f"{t.ratio:5.2f}x [{t.ratio_low:.2f}, {t.ratio_high:.2f}]" for t in ratios)
        print(f"{name[-32:]:32s} {sizes[name]:6.1f}  {against(metrics['fp32 padded'], metrics[name])}  {cells}")
    if options.eager:
        eager = Eager(in_format(model, "int8"))
        for batch in (1, 32):
            pair = [evaluate(data, Batched(one, batch), "test") for one in (eager, int8)]
            changed = 100 * changed_answers(*pair)
            print(f"first hits, PyTorch against onnxruntime, {batch} at a time: {changed:.2f} % differ", flush=True)


if __name__ == "__main__":
    main()
