"""Each rival's best: the artefact and setting that are fastest on a workload, among those that keep the answers.

First every artefact is timed in its engine's default setting on three workloads, and of each workload's fastest ones
those are kept whose nDCG@10 on the validation queries is at most a point below that of float32 (`Judge`). Then each of
these is timed in every setting on every workload. Text workloads are thinned for the search: every third batch.
"""

from collections.abc import Callable, Mapping, Sequence

from slimformer.export.latency import Workload
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData
from slimformer.transformer.evaluation import Memory, evaluate
from slimformer.transformer.metrics import TaskMetrics

from .contenders import Artefact, Bench, Contender, Embedder

PROBES = ("sorted", "single", "8x128")  # on which artefacts are chosen
KEPT = 2  # artefacts of each of them
MAX_DROP = 1.0  # points of the deciding metric
THINNED = 3  # of so many batches one is timed, where there are more than one


class Judge:
    """Scores of artefacts, each evaluated once a split."""

    def __init__(self, bench: Bench, model: Checkpoint, data: SearchData, original: Artefact) -> None:
        self.bench, self.model, self.data, self.original = bench, model, data, original
        self.pages: dict[Artefact, Memory] = {}
        self.found: dict[tuple[Artefact, str], TaskMetrics] = {}
        self.drops: dict[Artefact, float] = {}

    def metrics(self, artefact: Artefact, split: str) -> TaskMetrics:
        """What an artefact is worth on "valid" or "test"."""
        if (artefact, split) not in self.found:
            with self.bench.open(self.bench.plain(artefact)) as running:
                embedder = Embedder(running, self.model)
                memory = self.pages.setdefault(artefact, Memory())
                self.found[artefact, split] = evaluate(self.data, embedder, split, memory=memory)
        return self.found[artefact, split]

    def keeps(self, artefact: Artefact) -> bool:
        """Whether an artefact is good enough to be compared; says so where not."""
        if artefact not in self.drops:
            original, found = (self.metrics(one, "valid") for one in (self.original, artefact))
            drop = original.values()[original.deciding] - found.values()[original.deciding]
            self.drops[artefact] = drop
            if drop > MAX_DROP:
                print(
                    f"  {artefact.rival} {artefact.name}: {drop:.2f} points below fp32 on valid, left out", flush=True
                )
        return self.drops[artefact] <= MAX_DROP


def thinned(workloads: Mapping[str, Workload]) -> dict[str, Workload]:
    """The workloads by which rivals' options are chosen."""
    return {name: Workload(name, one.batches[::THINNED]) for name, one in workloads.items()}


def seconds(bench: Bench, contender: Contender, workloads: Sequence[str], minimum: float) -> dict[str, float]:
    """The fastest pass of each workload, of as many as fit into `minimum` seconds; nothing where it does not run."""
    try:
        with bench.open(contender) as running:
            found = {}
            for name in workloads:
                running.ask(do="warm", workload=name)
                found[name] = min(running.ask(do="round", workload=name, minimum=minimum)["seconds"])
            return found
    except RuntimeError as error:
        print(f"  {contender.artefact.rival} does not run: {error}", flush=True)
        return {}


def best(
    bench: Bench,
    artefacts: Sequence[Artefact],
    workloads: Sequence[str],
    keeps: Callable[[Artefact], bool],
    minimum: float,
) -> dict[str, Contender]:
    """One rival's best contender for each workload."""
    probes = [name for name in PROBES if name in workloads]
    first = {artefact: seconds(bench, bench.plain(artefact), probes, minimum) for artefact in artefacts}
    timed = {
        contender: seconds(bench, contender, workloads, minimum)
        for artefact in shortlist({one: found for one, found in first.items() if found}, keeps)
        for contender in (Contender(artefact, setting) for setting in bench.settings(artefact.engine))
    }
    rows = {contender: found for contender, found in timed.items() if found}
    print(f"  {artefacts[0].rival}: {len(first)} artefacts timed, then {len(rows)} contenders", flush=True)
    return {name: min(rows, key=lambda one: rows[one][name]) for name in workloads}


def shortlist(timed: Mapping[Artefact, Mapping[str, float]], keeps: Callable[[Artefact], bool]) -> list[Artefact]:
    """The fastest artefacts of each workload that keep the answers; the fastest ones where none does."""
    chosen: dict[Artefact, None] = {}
    for name in next(iter(timed.values())):
        order = sorted(timed, key=lambda one: timed[one][name])
        kept: list[Artefact] = []
        for artefact in order:
            if len(kept) < KEPT and keeps(artefact):
                kept.append(artefact)
        chosen.update(dict.fromkeys(kept or order[:KEPT]))
    return list(chosen)
