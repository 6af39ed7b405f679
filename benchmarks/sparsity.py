"""Half of the weights at 0, without training: magnitude, Wanda and SparseGPT; what they lose, and what zips smaller.

usage: .venv/bin/python benchmarks/sparsity.py [loss|speed] [--model MODEL] [--minutes 14] [--split test|valid]
                                               [--samples 1000] [--threads N] [--seconds 60]

Without MODEL a language model of four layers is taught on the help topics first, in .cache/sparsity (kept for the next
run). Prints for each method with zeros in any places and with 2 of every 4, as the paper has it and with what stays
fitted to the model as it was: perplexity in onnxruntime, the share of what magnitude alone loses, the share of zeros
and the size of the weights in a zip file. Then how many times as fast all-MiniLM-L6-v2 with such zeros is as without,
in float and in int8, on texts sorted by length, each in its own process.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

from help_search.setting import DATA as SEARCH
from help_search.setting import ROOT, minilm

from slimformer.compress.latencies import build_workloads
from slimformer.compress.quantize import Quantize
from slimformer.compress.sparsify import MAGNITUDE, SPARSEGPT, WANDA, Sparsify
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.latency import compare
from slimformer.export.machine import advice, available_threads
from slimformer.export.names import MODEL_FILE
from slimformer.export.runtime import load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import TextData, load_data, load_texts
from slimformer.transformer.evaluation import evaluate
from slimformer.transformer.layer_config import FLOAT32, INT8_DYNAMIC
from slimformer.transformer.loading import load
from slimformer.transformer.trainings import NewModel, training_for
from slimformer.transformer.weights import SAFETENSORS

DATA = ROOT / "examples/help-topics"
PATTERNS = ("", "2:4")


def taught(minutes: float) -> Checkpoint:
    """The language model, taught where it is not yet there."""
    new = NewModel(layers=(0, 4), vocabulary=4000)
    teach = training_for(DATA, None, new, {"minutes": minutes}, "language")
    return teach(out=ROOT / f".cache/sparsity/{minutes:g}-minutes", resume=True)


def judge(model: Checkpoint, data: TextData, split: str) -> tuple[float, float]:
    """Perplexity, and MB of the zipped weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = load_bundle(export(model, folder / "bundle"))
        with zipfile.ZipFile(folder / "weights.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(model.save(folder / "model") / SAFETENSORS)
        return evaluate(data, bundle, split).values()["perplexity"], (folder / "weights.zip").stat().st_size / 1e6


def speeds(threads: int, seconds: float) -> None:
    """Of the encoder with zeros over itself."""
    data, model = load_data(SEARCH), minilm()
    context = StepContext(data, threads=threads)
    work = build_workloads(model, data, seed=0)[0]["sorted"]
    models = {"whole": model}
    for pattern in PATTERNS:
        models[pattern or "half"] = Sparsify(method=MAGNITUDE, pattern=pattern, refit=False)(model, context).checkpoint
    print(f"\n{threads} threads; {'; '.join(advice())}", flush=True)
    for format in (FLOAT32, INT8_DYNAMIC):
        step = Quantize(format=INT8_DYNAMIC)
        with tempfile.TemporaryDirectory() as folder:
            graphs = {}
            for name, one in models.items():
                served = one if format == FLOAT32 else step(one, context).checkpoint
                graphs[name] = export(served, Path(folder) / name) / MODEL_FILE
            timed = compare(graphs, {work.name: work}, threads=threads, seconds=seconds)
        for name in models:
            found = timed.timing(name, work.name)
            print(
                f"{format:14s} {name:6s} {found.ratio:.2f}x [{found.ratio_low:.2f}, {found.ratio_high:.2f}]", flush=True
            )


def losses(options: argparse.Namespace) -> None:
    """Of the language model with zeros."""
    data = load_texts(DATA)
    model = taught(options.minutes) if options.model is None else load(options.model)
    whole, size = judge(model, data, options.split)
    print(f"{'whole':28s} perplexity {whole:6.2f}  {size:4.1f} MB zipped", flush=True)
    for pattern in PATTERNS:
        alone = 0.0  # what magnitude by itself loses
        for method in (MAGNITUDE, WANDA, SPARSEGPT):
            for refit in (False, True):
                step = Sparsify(method=method, pattern=pattern, refit=refit, samples=options.samples)
                result = step(model, StepContext(data))
                found, size = judge(result.checkpoint, data, options.split)
                alone = alone or found - whole
                title = f"{method}, {pattern or 'half'}{', re-fitted' if refit else ''}"
                print(
                    f"{title:28s} perplexity {found:6.2f}  {size:4.1f} MB zipped  +{found - whole:.2f}, "
                    f"{(found - whole) / alone:.2f} of magnitude's  zeros {result.details['zeros']:.4f}",
                    flush=True,
                )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["loss", "speed"], help="one of the two; both without")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", default=14.0, type=float)
    parser.add_argument("--split", default="test", choices=["test", "valid"])
    parser.add_argument("--samples", default=Sparsify.samples, type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", default=60.0, type=float)
    options = parser.parse_args()
    if options.part != "speed":
        losses(options)
    if options.part != "loss":
        speeds(available_threads(options.threads), options.seconds)


if __name__ == "__main__":
    main()
