"""Any models and bundles outside a run: what they are worth on the user's data, and how fast they are.

What is judged is always onnxruntime: a model that is no bundle is exported to a temporary one.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..export.bundle import export
from ..export.contents import graph_file, is_bundle, read_own
from ..export.forms import only_packed
from ..export.latency import LatencyResult, Workload, compare, shape_workload, text_workloads, writing
from ..export.runtime import Bundle, load_bundle
from ..transformer.checkpoint import read_text
from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.data import Data, PairData, SearchData, load_data
from ..transformer.errors import InputError
from ..transformer.evaluation import FormMetrics, Memory, evaluate, evaluate_forms
from ..transformer.layer_config import FLOAT32
from ..transformer.loading import load
from ..transformer.metrics import TaskMetrics, changed_answers
from ..transformer.progress import SILENT, Progress
from ..transformer.sources import summarizes
from ..transformer.statistics import paired_intervals
from ..transformer.tokenizer import TextEncoder
from ..transformer.vectors import VectorForm
from .latencies import TEXTS, given, most_written, text_fields
from .pipeline import fit_to_data

BATCHES, LENGTHS = (1, 8, 32), (16, 128)


@contextmanager
def as_bundle(
    model: str | Path,
    *,
    provider: str = "cpu",
    layout: str | None = None,
    data: Data | None = None,
    progress: Progress = SILENT,
) -> Iterator[Path]:
    """A bundle's own directory, or that of a temporary one made of a model, with the head that `data` ask for."""
    if is_bundle(Path(model)):
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="slimformer-") as folder:
        progress.start(f"export {model}", None, "")
        checkpoint = load(model)
        checkpoint = checkpoint if data is None else fit_to_data(checkpoint, data, None)
        layout = None if only_packed(checkpoint.config) else layout
        path = export(checkpoint, Path(folder) / "bundle", layout=layout, provider=provider)
        progress.done()
        yield path


def judge(
    model: str | Path,
    directory: str | Path,
    *,
    against: str | Path | None = None,
    split: str = "test",
    task: str | None = None,
    beams: int = 1,
    keep_index: bool = False,
    dimensions: Sequence[int] = (),
    precisions: Sequence[str] = (),
    provider: str = "cpu",
    threads: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure a model or bundle on a split of a data directory, JSON-ready.

    `against` names another one: its metrics, the paired 95 % intervals of model - against, and the percentage of
    examples whose answer changed are added. Data without labels need it, for they only compare.

    With `keep_index` the model's queries are searched in the pages as `against` embeds them.

    `dimensions` and `precisions` name forms of the model's vectors: all columns and so many first ones, each in float32
    and in these precisions. What each is worth is added, with the intervals of its difference from the whole float
    vectors; see `transformer.vectors`.

    For summarizers the sources that they cut are counted. Models that write do so with `beams`, greedily with 1.

    Raises:
        InputError: a model, the data or the provider cannot be used, or they do not fit each other.
    """
    data = load_data(directory, task, require=())
    if isinstance(data, SearchData) and not data.pages and against is None:
        raise InputError(f"{directory} has no labels to judge by: name the model's original by --against")
    searches = isinstance(data, SearchData) and bool(data.pages)
    if keep_index and (against is None or not searches):
        raise InputError("--keep-index is about pages that the model of --against embedded: give both, or leave it out")
    wanted = [VectorForm(m, precision) for m in (0, *dimensions) for precision in (FLOAT32, *precisions)][1:]
    if wanted and not searches:
        raise InputError("--dimensions and --precision are about vectors of pages that are searched: leave them out")
    first = Memory()
    with ExitStack() as stack:
        found: list[TaskMetrics] = []
        forms: list[FormMetrics] = []
        cuts: list[dict[str, int]] = []
        names = [model] if against is None else [against, model]
        for name in names:
            path = stack.enter_context(as_bundle(name, provider=provider, data=data, progress=progress))
            bundle = load_bundle(path, threads=threads, provider=provider)
            own, index = (Memory(), first if keep_index else None) if found else (first, None)
            if isinstance(data, SearchData) and wanted and beams == 1 and len(cuts) + 1 == len(names):
                forms = evaluate_forms(data, bundle, split, wanted, index=index, progress=progress)
                metrics = forms[0].metrics
            else:  # which refuses beams of such data
                metrics = evaluate(
                    data, bundle, split, memory=own, original=first, index=index, beams=beams, progress=progress
                )
            found.append(metrics)
            cuts.append(_cut(bundle, data, split))
    last = found[-1]
    result = {"model": str(model), "split": split, "examples": len(last.answers), "metrics": last.values(), **cuts[-1]}
    if forms:
        result["forms"] = [forms[0].to_dict(), *({**one.to_dict(), **_apart(last, one.metrics)} for one in forms[1:])]
    if against is None:
        return result
    if found[0].statistics.shape != last.statistics.shape:
        raise InputError(f"{model} and {against} have other labels: they cannot be compared example by example")
    return {
        **result,
        "against": str(against),
        "against_metrics": found[0].values(),
        **{f"against_{name}": count for name, count in cuts[0].items()},
        **_apart(found[0], last),
    }


def _apart(before: TaskMetrics, after: TaskMetrics) -> dict[str, Any]:
    """The paired intervals of after - before, and the percentage of examples whose answer changed."""
    intervals = paired_intervals(before.statistics, after.statistics, after.groups, after.aggregate)
    return {
        "difference": {name: asdict(interval) for name, interval in intervals.items()},
        "changed": 100 * changed_answers(before, after),
    }


def _cut(bundle: Bundle, data: Data, split: str) -> dict[str, int]:
    """How many sources of a split a summarizer cuts, and where; nothing for others."""
    if not isinstance(data, PairData) or bundle.sources is None or not summarizes(bundle.config):
        return {}
    pairs = data.valid if split == "valid" else data.test
    return {"sources_cut": bundle.sources.cut([pair.source for pair in pairs]), "cut_at": bundle.sources.limit}


def time_models(
    models: Sequence[str],
    *,
    batches: Sequence[int] = (),
    lengths: Sequence[int] = (),
    directory: Path | None = None,
    task: str | None = None,
    threads: Sequence[int] = (),
    provider: str = "cpu",
    seed: int = 0,
    progress: Progress = SILENT,
) -> Iterator[LatencyResult]:
    """Time models and bundles side by side, once for each number of threads; the first is the baseline.

    A baseline that is no bundle is exported padded, in its own format; the others as they would be served. Models that
    write do so greedily, to the ends of their texts.

    Args:
        models: names of directories.
        batches, lengths: of batches of random tokens without padding; `BATCHES` and `LENGTHS` where there is no data.
        directory: data whose texts are timed as the workloads sorted, mixed and single, cut at the first model's.
        task: what the data is for; None: its tables say.
        threads: of onnxruntime, a measurement each; empty: one with all cores.
        provider: of the sessions.
        seed: of the workloads.
        progress: told of the rounds.

    Raises:
        InputError: something given cannot be used.
    """
    if len(set(models)) < len(models):
        raise InputError("a model is named twice: its ratio would be 1")
    with ExitStack() as stack:
        layouts = ["padded", *[None] * (len(models) - 1)]
        opened = [
            stack.enter_context(as_bundle(name, provider=provider, layout=layout, progress=progress))
            for name, layout in zip(models, layouts, strict=True)
        ]
        configs = [TransformerConfig.from_dict(read_own(path)["config"]) for path in opened]
        writers = [config for config in configs if isinstance(config.head, LanguageHead)]

        def works(path: Path) -> dict[str, Workload]:
            found = {} if directory is None else _texts(path, configs, directory, task, seed)
            if directory is None or batches or lengths:
                found |= _shapes(configs, batches or BATCHES, lengths or LENGTHS, seed)
            if not writers:
                return found
            most = min(most_written(config, found.values()) for config in writers)
            return {name: writing(work, most=most) for name, work in found.items()}

        vocabularies = [read_text(path / "tokenizer.json") for path in opened]
        found = zip(models, opened, vocabularies, strict=True)
        own = {name: works(path) for name, path, vocabulary in found if vocabulary != vocabularies[0]}
        graphs = {name: path / graph_file(config) for name, path, config in zip(models, opened, configs, strict=True)}
        for count in threads or (None,):
            yield compare(graphs, works(opened[0]), count, provider, own=own, seed=seed, progress=progress)


def _texts(
    bundle: Path, configs: Sequence[TransformerConfig], directory: Path, task: str | None, seed: int
) -> dict[str, Workload]:
    """Texts of the data as a bundle's tokenizer has them, cut where the shortest model cuts."""
    cut = min(config.text.max_length for config in configs)
    encoder = TextEncoder(read_text(bundle / "tokenizer.json"), cut)
    tables = text_fields(load_data(directory, task, require=()))
    fields = [given(configs[0], encoder.encode(texts[: 16 * TEXTS])) for _, texts in tables]
    return text_workloads(fields, seed, count=TEXTS)


def _shapes(
    configs: Sequence[TransformerConfig], batches: Sequence[int], lengths: Sequence[int], seed: int
) -> dict[str, Workload]:
    """Batches of tokens that every model has."""
    longest = min(config.embedding.positions for config in configs)
    if max(lengths) > longest:
        raise InputError(f"--seq {max(lengths)} is over the {longest} positions of a model: give less")
    vocabulary = min(config.embedding.vocab_size for config in configs)
    works = [shape_workload(batch, length, vocabulary, seed) for batch in batches for length in lengths]
    return {work.name: work for work in works}
