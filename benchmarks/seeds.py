"""The demo's recipe under several seeds: what the result owes to chance.

usage: .venv/bin/python benchmarks/seeds.py [--seeds 0,1,2] [--recipe examples/help-search/recipe.toml] [-o runs/seeds]

Runs the whole pipeline once a seed (some 20 minutes each on two cores; a run that was broken off goes on) and prints
nDCG@10 on the test queries with the interval of each run, the mean of the differences, and the speed-ups.
"""

import argparse
from pathlib import Path
from statistics import mean

from help_search.setting import DATA, ROOT, minilm

from slimformer.compress import compress, read_recipe


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--recipe", type=Path, default=ROOT / "examples/help-search/recipe.toml")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs/seeds")
    options = parser.parse_args()
    differences = []
    for seed in [int(text) for text in options.seeds.split(",")]:
        result = compress(
            minilm(),
            DATA,
            out=options.output / str(seed),
            recipe=read_recipe(options.recipe),
            max_drop=2,
            seed=seed,
            resume=True,
            command=f"benchmarks/seeds.py --seeds {seed}",
        )
        last = result.report["stages"][-1]
        differences.append(result.drop.difference)
        speeds = "  ".join(f"{name} {one['ratio']:.2f}x" for name, one in last["latency"].items())
        interval = f"{result.drop.difference:+.2f} [{result.drop.low:+.2f}, {result.drop.high:+.2f}]"
        print(
            f"seed {seed}: {result.report['deciding']} {interval}  {last['bytes'] / 1e6:.1f} MB  {speeds}", flush=True
        )
    print(f"mean difference over {len(differences)} seeds: {mean(differences):+.2f}")


if __name__ == "__main__":
    main()
