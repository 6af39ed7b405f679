"""all-MiniLM-L6-v2 pruned to be N times as fast in float, and taught again for ten minutes, under several seeds.

usage: .venv/bin/python benchmarks/recovery.py [--speedups 2,3] [--seeds 0,1,2] [--minutes 10] [--threads N]
                                               [--split test|valid]

For each speed-up and seed: `prune` with the default options, then `distill` with those of the demo's recipe. The seed
is of the calibration texts, the order of training and the fragments; the teacher's pass does not count as training.
Prints nDCG@10 with its difference from the untouched model and the paired 95 % interval, before and after the training,
and the speed-up that pruning measured in onnxruntime on texts sorted by length; then the mean of the differences.
"""

import argparse
import time
from statistics import mean

import torch
from help_search.setting import DATA, against, minilm
from pruning import judge

from slimformer.compress.distill import Distill
from slimformer.compress.prune import Prune
from slimformer.compress.step import StepContext
from slimformer.export.machine import advice, available_threads
from slimformer.transformer.data import SearchData, load_data


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speedups", default="2,3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", default=10.0, type=float)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--split", default="test", choices=["valid", "test"])
    options = parser.parse_args()
    model, data, threads = minilm(), load_data(DATA), available_threads(options.threads)
    assert isinstance(data, SearchData)
    torch.set_num_threads(threads)
    print(f"{threads} threads; {'; '.join(advice())}")
    original = judge(model, data, options.split)
    name = original.deciding
    print(f"{'untouched':20s} {against(original, original)}", flush=True)
    distill = Distill(minutes=options.minutes, lr=5e-4, texts=15000, fragments=1.0, pages=2478)
    for speedup in map(float, options.speedups.split(",")):
        differences = []
        for seed in map(int, options.seeds.split(",")):
            context = StepContext(data, teacher=model, seed=seed, threads=threads)
            start = time.monotonic()
            pruned = Prune(speedup=speedup)(model, context)
            seconds, speed = time.monotonic() - start, pruned.details["speed"]
            measured = f"{speed['measured']:.2f}x [{speed['low']:.2f}, {speed['high']:.2f}]"
            label = f"{speedup:g}x, seed {seed}"
            before = against(original, judge(pruned.checkpoint, data, options.split))
            print(f"{label:20s} {before}  one-shot, {seconds:.0f} s, {measured}", flush=True)
            taught = distill(pruned.checkpoint, context)
            found = judge(taught.checkpoint, data, options.split)
            differences.append(found.values()[name] - original.values()[name])
            print(f"{label:20s} {against(original, found)}  after {taught.details['steps']} steps", flush=True)
        print(f"{f'{speedup:g}x, mean':20s} {name} {mean(differences):+.2f}", flush=True)


if __name__ == "__main__":
    main()
