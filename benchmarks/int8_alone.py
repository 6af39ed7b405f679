"""int8 without pruning or training: all-MiniLM-L6-v2 against its own fp32 graph, padded, on the help-search data.

usage: .venv/bin/python benchmarks/int8_alone.py [OTHER_BUNDLE…] [--threads N] [--formats int8_dynamic,int8_static]

Prints for each format the relative error of the last layer's tokens on some queries of valid and pages, nDCG@10 on
the test queries with its paired interval, the shares of queries that get another page first and whose first page has
become right or wrong (recall@1), file sizes, and the speed-up on every workload (384 texts). Formats that are
calibrated read the data's texts.
With --eager, int8 models are also evaluated in PyTorch, to count the first hits that differ from onnxruntime's: one
text at a time, and in batches of 32, whose texts share their ranges, so that one flipped rounding moves all of them.
With --bits 8 formats are evaluated in PyTorch alone, one text at a time, and not timed: what a processor with VNNI
computes, on any other.
Other bundles (such as runs/demo/bundle) are timed and judged in the same run.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from help_search.setting import DATA, FIRST_HITS, MAX_LENGTH, Batched, Eager, against, first_hits, minilm
from numpy.typing import NDArray

from slimformer.compress.latencies import build_workloads
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.latency import compare
from slimformer.export.machine import advice, available_threads
from slimformer.export.names import MODEL_FILE
from slimformer.export.runtime import load_bundle
from slimformer.transformer.batching import tensors
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData, load_data
from slimformer.transformer.evaluation import evaluate
from slimformer.transformer.metrics import changed_answers

FIRST = "fp32 padded"
SHOWN = 256  # queries whose tokens are compared, and as many pages


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--formats", default="int8_dynamic,int8_static,int8_blocks")
    parser.add_argument("--bits", type=int, choices=[7, 8])
    options = parser.parse_args()
    model, data = minilm(), load_data(DATA)
    threads = available_threads(options.threads)
    assert isinstance(data, SearchData)
    if options.bits:
        in_pytorch(model, data, options.formats.split(","), options.bits)
        return
    models = {form: Quantize(format=form)(model, StepContext(data)).checkpoint for form in options.formats.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        bundles = {
            FIRST: export(model, Path(folder) / "fp32", layout="padded"),
            **{form: export(quantized, Path(folder) / form) for form, quantized in models.items()},
            **{str(path): path for path in options.bundles},
        }
        opened = {name: load_bundle(path, threads=threads) for name, path in bundles.items()}
        metrics = {name: evaluate(data, bundle, "test") for name, bundle in opened.items()}
        workloads, descriptions = build_workloads(model, data, seed=0, texts=384)
        graphs = {name: path / MODEL_FILE for name, path in bundles.items()}
        sizes = {name: graph.stat().st_size / 1e6 for name, graph in graphs.items()}
        errors = hidden_errors(model, data, graphs)
        timed = compare(graphs, workloads, threads=threads, seconds=300)
    print("\n".join([*advice(), f"{threads} threads; texts cut at {MAX_LENGTH} tokens", ""]))
    for name, text in descriptions.items():
        print(f"{name}: {text}")
    heads = f"error  {FIRST_HITS}  nDCG@10 (difference, 95 %)  "
    print(f"\n{'model':32s} {'MB':>6s}  {heads}" + "  ".join(f"{w:>18s}" for w in workloads))
    for name in bundles:
        ratios = [timed.timing(name, workload) for workload in workloads]
        cells = "  ".join(f"{t.ratio:5.2f}x [{t.ratio_low:.2f}, {t.ratio_high:.2f}]" for t in ratios)
        lost = f"{errors[name]:5.3f}  {first_hits(metrics[FIRST], metrics[name])}"
        print(f"{name[-32:]:32s} {sizes[name]:6.1f}  {lost}  {against(metrics[FIRST], metrics[name])}  {cells}")
    for form, quantized in models.items() if options.eager else ():
        for batch in (1, 32):
            pair = [evaluate(data, Batched(one, batch), "test") for one in (Eager(quantized), opened[form])]
            changed = 100 * changed_answers(*pair)
            print(f"first hits of {form}, PyTorch against onnxruntime, {batch} at a time: {changed:.2f} % differ")


def in_pytorch(model: Checkpoint, data: SearchData, formats: Sequence[str], bits: int) -> None:
    """Print what formats with weights of so many bits lose, computed in PyTorch."""
    rows, original = rows_shown(model, data), evaluate(data, Eager(model), "test")
    expected = tokens_of(model, rows)
    print(f"weights of {bits} bits, in PyTorch, one text at a time\n")
    print(f"{'model':32s} error  {FIRST_HITS}  nDCG@10 (difference, 95 %)")
    for form in formats:
        quantized = Quantize(format=form, bits=bits)(model, StepContext(data)).checkpoint
        error = relative_error(tokens_of(quantized, rows), expected)
        metrics = evaluate(data, Batched(Eager(quantized), 1), "test")
        print(f"{form:32s} {error:5.3f}  {first_hits(original, metrics)}  {against(original, metrics)}", flush=True)


@torch.inference_mode()
def tokens_of(checkpoint: Checkpoint, rows: Sequence[list[int]]) -> NDArray[np.float32]:
    """The last layer's tokens (N, D) of token ids, one text at a time."""
    network, pad = checkpoint.to_torch(), checkpoint.config.text.pad_id
    return np.concatenate([network(*tensors([row], pad)).hidden.numpy() for row in rows])


def rows_shown(model: Checkpoint, data: SearchData) -> list[list[int]]:
    """Token ids of some of valid's queries and of as many pages."""
    queries = [query.query for query in data.valid[:SHOWN]]
    ids: list[list[int]] = model.text_encoder().encode([*queries, *(page.text for page in data.pages[: len(queries)])])
    return ids


def hidden_errors(model: Checkpoint, data: SearchData, graphs: Mapping[str, Path]) -> dict[str, float]:
    """`relative_error` of each graph against the first, one text at a time."""
    rows = rows_shown(model, data)
    found: dict[str, list[NDArray[np.float32]]] = {}
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    for name, graph in graphs.items():
        session = onnxruntime.InferenceSession(graph, quiet, providers=["CPUExecutionProvider"])
        feeds = ({"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), np.int64)} for row in rows)
        found[name] = [session.run(["last_hidden_state"], feed)[0][0] for feed in feeds]
    tokens = {name: np.concatenate(parts) for name, parts in found.items()}
    return {name: relative_error(one, tokens[FIRST]) for name, one in tokens.items()}


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Mean over tokens (N, D) of |found - expected| / |expected|."""
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).mean())


if __name__ == "__main__":
    main()
