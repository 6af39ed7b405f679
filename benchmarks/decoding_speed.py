"""Whole translations in onnxruntime against CTranslate2: the same weights, int8, two threads, the same forced length.

usage: .venv/bin/python benchmarks/decoding_speed.py [MODEL…] [--tokens 24] [--rounds 9] [--threads 2]

MODEL is a checkpoint of a pre-norm encoder-decoder with one table (what `slimformer train --layers 6-2` makes); without
one, models of 6-2 and 6-6 layers, d 256, with random weights are taken: time does not depend on the values of weights.
CTranslate2 gets an environment of its own in .cache/, and for each case the fastest of its threads, splits of the batch
and back ends (MKL or not, instruction sets). Both write `--tokens` tokens for the same sources of the test split: in
our graph the end token has a bias that keeps it away, CTranslate2 has a least length. In float32 both have to write the
same tokens, which proves that the weights are the same. Each runs in a process of its own, in interleaved rounds.
At last: how much longer 256 tokens take than 32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from slimformer.export import export
from slimformer.export.machine import advice, available_threads
from slimformer.export.names import GENERATE_FILE
from slimformer.transformer.architecture import Architecture, new_model
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import LanguageHead
from slimformer.transformer.data import load_pairs
from slimformer.transformer.loading import load
from slimformer.transformer.model import sinusoids
from slimformer.transformer.statistics import ratio_interval
from slimformer.transformer.subwords import train_subwords

ROOT = Path(__file__).parents[1]
DATA = ROOT / "examples/help-translation"
HERE = Path(__file__).parent / "decoding"
VERSION = "4.8.5"
CASES = {"batch 1, greedy": (1, 1), "batch 32, greedy": (32, 1), "batch 1, beam 4": (1, 4), "batch 32, beam 4": (32, 4)}
BACKENDS: dict[str, dict[str, str]] = {
    "default": {},
    "without MKL": {"CT2_USE_MKL": "0"},
    "AVX2": {"CT2_FORCE_CPU_ISA": "AVX2"},
}
SPLITS = ((1, 2, 1), (1, 1, 1), (2, 1, 2))  # inter, intra, parts of the batch
GROWTH = (32, 256)
NEVER = -1e4


class Worker:
    """A process that answers lines."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._line()

    def ask(self, **request: Any) -> Any:
        """Send a request, wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self.process.args))} ended with {self.process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Setting:
    """How CTranslate2 is run."""

    backend: str
    inter: int
    intra: int
    parts: int

    def __str__(self) -> str:
        split = f"{self.inter} x {self.intra} threads"
        return f"{self.backend}, {split}" + (f", batch in {self.parts}" if self.parts > 1 else "")


def environment() -> Path:
    """CTranslate2's Python, its environment made where it is not there."""
    folder = ROOT / ".cache/ctranslate2"
    python = folder / "bin/python"
    if not (folder / ".installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"ctranslate2=={VERSION}", "numpy"], check=True)
        (folder / ".installed").touch()
    return python


def without_end(model: Checkpoint) -> Checkpoint:
    """The model whose end token is never the best."""
    head = model.config.head
    assert isinstance(head, LanguageHead)
    bias = torch.zeros(model.config.decoder_embedding.vocab_size)
    bias[head.end_id] = NEVER
    config = replace(model.config, head=replace(head, bias=True))
    return replace(model, config=config, state={**model.state, "head.bias": bias})


def convert(python: Path, model: Checkpoint, folder: Path) -> Path:
    """CTranslate2's model of the same weights."""
    config, head = model.config, model.config.head
    assert isinstance(head, LanguageHead)
    tokens = tokens_of(model)
    state = {name: value.numpy() for name, value in model.state.items()}
    places = torch.arange(config.embedding.positions)
    folder.mkdir()
    np.savez(folder / "weights.npz", **state, positions=sinusoids(places, config.d_model).numpy())
    mixer = config.decoder[0].attention
    assert mixer is not None
    shape = {
        "layers": [len(config.encoder), len(config.decoder)],
        "heads": mixer.heads,
        "tokens": tokens,
        "start": tokens[head.start_id],
        "end": tokens[head.end_id],
        "pad": tokens[config.text.pad_id],
    }
    (folder / "shape.json").write_text(json.dumps(shape), encoding="utf-8")
    script = HERE / "ctranslate2_worker.py"
    parts = [python, script, "convert", folder / "weights.npz", folder / "shape.json", folder / "model"]
    subprocess.run(parts, check=True)
    return folder / "model"


def tokens_of(model: Checkpoint) -> list[str]:
    """The vocabulary in the order of its ids, each token told apart by its number."""
    return [f"{i}" for i in range(model.config.embedding.vocab_size)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    python, threads = environment(), available_threads(options.threads)
    print("\n".join([*advice(), f"{threads} threads, {options.tokens} tokens, CTranslate2 {VERSION}", ""]))
    for name, model in chosen(options.models).items():
        compare(name, without_end(model), python, threads, options)


def chosen(paths: Sequence[Path]) -> dict[str, Checkpoint]:
    """The models by name."""
    if paths:
        return {str(path): load(path) for path in paths}
    texts = [text for pair in load_pairs(DATA).train for text in (pair.source, pair.target)]
    tokenizer = train_subwords(texts, vocab_size=8000)
    shapes = {"6-2": 2, "6-6": 6}
    return {name: new_model(Architecture(encoder=6, decoder=d), tokenizer, 0) for name, d in shapes.items()}


def compare(name: str, model: Checkpoint, python: Path, threads: int, options: argparse.Namespace) -> None:
    """All cases of one model."""
    sources = model.text_encoder().encode([pair.source for pair in load_pairs(DATA).test])
    batches = {1: sources[:8], 32: sources[:32]}
    for batch in batches.values():
        batch.sort(key=len)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        theirs = convert(python, model, folder / "ctranslate2")

        def peer(backend: str) -> Worker:
            script = HERE / "ctranslate2_worker.py"
            worker = Worker([python, script, "serve", theirs], BACKENDS[backend])
            stack.callback(worker.close)
            return worker

        def ours(form: str) -> Worker:
            graph = export(model, folder / form, format=form) / GENERATE_FILE
            worker = Worker([sys.executable, HERE / "onnxruntime_worker.py", graph, threads], {})
            stack.callback(worker.close)
            return worker

        peers = {backend: peer(backend) for backend in BACKENDS}
        mine, plain = ours("int8"), ours("fp32")
        equal = same_tokens(plain, peers["default"], batches[32], options.tokens)
        print(f"{name}: in float32 {equal:.1%} of the texts have the same tokens", flush=True)
        for case, (size, beams) in CASES.items():
            work = Case([[row] for row in batches[1]] if size == 1 else [batches[32]], options.tokens, beams)
            settings = [
                Setting(backend, *split) for backend in BACKENDS for split in SPLITS if size > 1 or split[2] == 1
            ]
            tried = {setting: work.theirs(peers[setting.backend], setting, "int8", 2) for setting in settings}
            best = min(settings, key=lambda setting: tried[setting])
            pairs = [
                (work.theirs(peers[best.backend], best, "int8", 1), work.ours(mine), work.ours(mine, tokens=1))
                for _ in range(options.rounds)
            ]
            ratio = ratio_interval([[theirs / ours for theirs, ours, _ in pairs]], seed=0)
            their, our, first = (1e3 * median(column) / len(work.batches) for column in zip(*pairs, strict=True))
            print(
                f"  {case:17s} {ratio.ratio:5.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]  ours {our:7.1f} ms, of which "
                f"{100 * first / our:2.0f} % encoder and first token; CTranslate2 {their:7.1f} ms ({best})",
                flush=True,
            )
        for size in (1, 32):
            work = Case([batches[size][-1:] if size == 1 else batches[32]], options.tokens, 1)
            seconds = [[work.ours(mine, tokens=tokens) for tokens in GROWTH] for _ in range(options.rounds)]
            growth = median(long / short for short, long in seconds)
            print(
                f"  batch {size}, greedy: {GROWTH[1]} tokens take {growth:.1f} times as long as {GROWTH[0]}", flush=True
            )


@dataclass(frozen=True)
class Case:
    """Batches of token ids to translate one after the other."""

    batches: list[list[list[int]]]
    tokens: int
    beams: int

    def theirs(self, worker: Worker, setting: Setting, form: str, passes: int) -> float:
        """Seconds of the fastest pass of CTranslate2."""
        worker.ask(do="open", compute_type=form, inter=setting.inter, intra=setting.intra)
        how = {"do": "run", "tokens": self.tokens, "beams": self.beams, "parts": setting.parts}
        rows = [[[str(i) for i in row] for row in batch] for batch in self.batches]
        worker.ask(sources=rows[-1], **how)
        return min(sum(worker.ask(sources=batch, **how)["seconds"] for batch in rows) for _ in range(passes))

    def ours(self, worker: Worker, tokens: int | None = None) -> float:
        """Seconds of a pass of onnxruntime."""
        how = {"tokens": self.tokens if tokens is None else tokens, "beams": self.beams}
        worker.ask(sources=self.batches[-1], **how)
        return sum(float(worker.ask(sources=batch, **how)["seconds"]) for batch in self.batches)


def same_tokens(ours: Worker, theirs: Worker, sources: list[list[int]], tokens: int) -> float:
    """Share of the texts that both write alike, greedily in float32."""
    theirs.ask(do="open", compute_type="float32", inter=1, intra=2)
    rows = [[str(i) for i in row] for row in sources]
    found = theirs.ask(do="run", sources=rows, tokens=tokens, beams=1, parts=1)["outputs"]
    written = ours.ask(sources=sources, tokens=tokens, beams=1)["outputs"]
    alike = [list(map(int, one)) == other for one, other in zip(found, written, strict=True)]
    return sum(alike) / len(alike)


if __name__ == "__main__":
    main()
