"""all-MiniLM-L6-v2 in int8: our exported file against Optimum, OpenVINO with NNCF, and CTranslate2, each at its best.

usage: .venv/bin/python benchmarks/encoder_rivals.py [BUNDLE…] [--threads 2] [--rounds 7] [--shape minilm|bert-base]
                                                     [--python PATH] [--quick]

Ours is the int8 recipe of examples/help-search, with dynamic int8 and padded fp32 beside it, in plain sessions with
default options; or the bundles given, the first of which all are compared with. The rivals get an environment of their
own in .cache/ (some gigabytes; set PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU builds to need less), make every
artefact that their documentation offers for int8 on a CPU (encoders/make_rivals.py), and for each workload the fastest
of these and of the documented ways to run them is taken (encoders/search.py), with the same number of threads. Then the
winners are timed beside ours: one batch after the other, each model in a process of its own, stopped while others run,
in interleaved rounds of two restarts. All get token ids, made into what their engine takes before the clock starts; our
graphs end with the sentence's vector, the rivals' with the last layer's tokens, so that pooling is still to be done.
Printed: each rival's time over ours (above 1: ours is faster) with its 95 % interval and the options that won, then
nDCG@10 on the test queries, its difference from fp32, first hits that changed, and file sizes.
bert-base has random weights: it is timed on 8x128 alone and not judged, and its rivals have fewer options.
"""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from encoders.artefacts import ENVIRONMENT, VERSIONS, opened, ours, random_bert, rivals
from encoders.contenders import Artefact, Bench, Contender, write_feeds
from encoders.search import MAX_DROP, Judge, best, thinned
from environments import check_versions, environment
from help_search.setting import DATA, FIRST_HITS, MAX_LENGTH, against, first_hits, minilm_folder

from slimformer.compress.latencies import build_workloads
from slimformer.export.latency import Workload, shape_workload
from slimformer.export.machine import advice, available_threads
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData, load_data
from slimformer.transformer.statistics import ratio_interval

SHAPES = ((1, 16), (1, 128), (8, 128), (32, 64))
SECONDS = 0.5  # of passes of a workload, in the search and in a round
FEW_QUERIES = 32

Rounds = list[list[float]]  # processes x rounds: seconds of a pass


def workloads_of(
    model: Checkpoint, data: SearchData, shape: str, count: int
) -> tuple[dict[str, Workload], dict[str, str]]:
    """The workloads, those of text with `count` texts, and what the latter are."""
    vocabulary = model.text_encoder().vocab_size
    dense = {one.name: one for one in (shape_workload(*sizes, vocabulary, seed=0) for sizes in SHAPES)}
    if shape != "minilm":
        return {"8x128": dense["8x128"]}, {}
    texts, descriptions = build_workloads(model, data, seed=0, texts=count)
    return {**texts, **dense}, descriptions


def fewer(data: SearchData) -> SearchData:
    """A few queries of each split and their pages."""
    valid, test = data.valid[:FEW_QUERIES], data.test[:FEW_QUERIES]
    needed = {page for query in (*valid, *test) for page in query.pages}
    return replace(data, valid=valid, test=test, pages=tuple(page for page in data.pages if page.id in needed))


def measure(
    bench: Bench, contenders: Sequence[Contender], workload: str, rounds: int, processes: int, minimum: float
) -> dict[Contender, Rounds]:
    """Median seconds of a pass in each round, of every contender."""
    found: dict[Contender, Rounds] = {contender: [] for contender in contenders}
    for _ in range(processes):
        with ExitStack() as stack:
            running = [stack.enter_context(bench.open(contender)) for contender in contenders]
            for one in running:
                one.ask(do="warm", workload=workload)
                found[one.contender].append([])
            for number in range(rounds):
                turn = number % len(running)
                for one in [*running[turn:], *running[:turn]]:
                    passes = one.ask(do="round", workload=workload, minimum=minimum)["seconds"]
                    found[one.contender][-1].append(median(passes))
    return found


def print_timings(timed: Mapping[Contender, Rounds], workload: Workload) -> None:
    """Each contender's time over the first's."""
    first = next(iter(timed.values()))
    print(f"\n{workload.name} ({len(workload.batches)} batches)")
    for contender, rounds in timed.items():
        ratios = [[a / b for a, b in zip(*process, strict=True)] for process in zip(rounds, first, strict=True)]
        found = ratio_interval(ratios, seed=0)
        milliseconds = 1e3 * median(seconds for process in rounds for seconds in process) / len(workload.batches)
        times = f"{found.ratio:5.2f}x [{found.low:.2f}, {found.high:.2f}]  {milliseconds:8.2f} ms a batch"
        print(f"  {contender.artefact.rival[-32:]:32s} {times}  {contender}", flush=True)


def print_scores(judge: Judge, artefacts: Sequence[Artefact]) -> None:
    """What each artefact is worth on the test queries."""
    print(f"\n{'':32s} {'MB':>6s}  {FIRST_HITS}  nDCG@10 (difference, 95 %)")
    original = judge.metrics(judge.original, "test")
    for artefact in artefacts:
        found = judge.metrics(artefact, "test")
        line = f"{artefact.megabytes:6.1f}  {first_hits(original, found)}  {against(original, found)}  {artefact.name}"
        print(f"{artefact.rival[-32:]:32s} {line}", flush=True)


def options_given() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="of each of two restarts of the processes")
    parser.add_argument("--shape", choices=["minilm", "bert-base"], default="minilm")
    parser.add_argument("--python", type=Path, help="the Python of an environment that has the pinned packages")
    parser.add_argument("--quick", action="store_true", help="few options, texts and rounds, to see that it runs")
    return parser.parse_args()


def main() -> None:
    """Make the artefacts, and say what is compared."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that no stopped process is left
    options, data = options_given(), load_data(DATA)
    assert isinstance(data, SearchData)
    python, threads = options.python or environment(ENVIRONMENT, VERSIONS), available_threads(options.threads)
    check_versions(python, VERSIONS)
    real = options.shape == "minilm"
    few = options.quick or not real
    folder = minilm_folder() if real else random_bert(python)
    model = opened(folder)
    mine = ours(model, data, options.shape, options.bundles)
    theirs = rivals(python, folder, model, data, options.shape, few)
    workloads, descriptions = workloads_of(model, data, options.shape, 96 if options.quick else 384)
    versions = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    print("\n".join([*advice(), f"{threads} thread(s); texts cut at {MAX_LENGTH} tokens", versions]))
    print("\n".join(f"{name}: {text}" for name, text in descriptions.items()))
    with TemporaryDirectory() as temporary:
        bench = Bench(python, write_feeds(workloads, Path(temporary) / "all.npz"), threads, few)
        search = replace(bench, feeds=write_feeds(thinned(workloads), Path(temporary) / "thinned.npz"))
        judge = Judge(bench, model, fewer(data) if options.quick else data, mine[-1]) if real else None
        compare(bench, search, judge, mine, theirs, workloads, options)


def compare(
    bench: Bench,
    search: Bench,
    judge: Judge | None,
    mine: Sequence[Artefact],
    theirs: Sequence[Artefact],
    workloads: Mapping[str, Workload],
    options: argparse.Namespace,
) -> None:
    """Search, measure and print."""
    rounds, processes, minimum = (2, 1, 0.0) if options.quick else (options.rounds, 2, SECONDS)
    print(f"\nsearch among {len(theirs)} artefacts; left out is what loses over {MAX_DROP:g} points", flush=True)
    chosen = {}
    for rival in dict.fromkeys(one.rival for one in theirs):
        artefacts = [one for one in theirs if one.rival == rival]
        keeps = judge.keeps if judge else lambda _: True
        chosen[rival] = best(search, artefacts, list(workloads), keeps, minimum)
    for name, workload in workloads.items():
        contenders = [*map(bench.plain, mine), *(winners[name] for winners in chosen.values())]
        print_timings(measure(bench, contenders, name, rounds, processes, minimum), workload)
    if judge:
        winners = dict.fromkeys(one.artefact for by_name in chosen.values() for one in by_name.values())
        print_scores(judge, [*mine, *winners])


if __name__ == "__main__":
    main()
