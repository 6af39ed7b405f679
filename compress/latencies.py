"""Speed of every stage beside the untouched model, on workloads made of the user's own texts."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ..export.latency import LatencyResult, Workload, compare, shape_workload, text_workloads, writing
from ..export.machine import describe_machine
from ..transformer.checkpoint import Checkpoint, read_json
from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.data import Data, LabelledData, PairData, TextData
from ..transformer.errors import InputError
from ..transformer.files import write_file
from ..transformer.progress import Progress
from ..transformer.statistics import RatioInterval, ratio_interval
from ..transformer.translation import read_pairs
from .stage import Stage

TEXTS = 192
DENSE = (8, 128)
BEAMS, BEAM_TEXTS = 4, 64
PROMPT, CONTINUED = 32, 32
LIKE = 1000  # pairs that say how long translations are
SECONDS = 75.0


@dataclass(frozen=True)
class Latencies:
    """Timings by stage folder and workload, and what each workload is.

    Attributes:
        timings: of each stage, beside the untouched model.
        costs: peak memory of each stage's process in MiB.
        descriptions: of the workloads.
        over_float: of quantized stages, their speed over that of the float stage before them: ratio, low and high.
    """

    timings: dict[str, dict[str, dict[str, Any]]]
    costs: dict[str, float]
    descriptions: dict[str, str]
    over_float: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def enter(self, stage: Stage) -> None:
        """Put a stage's timings into its line of the report."""
        stage.entry["latency"] = self.timings[stage.folder.name]
        stage.entry["peak_memory_mib"] = self.costs[stage.folder.name]

    def ratio(self, stage: Stage, workload: str) -> RatioInterval:
        """A stage's speed-up on a workload."""
        timing = self.timings[stage.folder.name][workload]
        return RatioInterval(timing["ratio"], timing["low"], timing["high"])


def text_fields(data: Data) -> list[tuple[str, list[str]]]:
    """The kinds of text that are served: queries, titles and page texts; or rows; or sources; or texts."""
    if isinstance(data, LabelledData | TextData):
        return [("rows", [row.text for row in data.test or data.valid])]
    if isinstance(data, PairData):
        return [("sources", [pair.source for pair in data.test or data.valid])]
    if not data.pages:
        return [("texts", list(data.texts))]
    queries = data.test or data.valid
    titles = [page.title for page in data.pages if page.title]
    fields = [
        ("queries", [query.query for query in queries]),
        ("titles", titles),
        ("page texts", [p.text for p in data.pages]),
    ]
    return [field for field in fields if field[1]]


def build_workloads(
    checkpoint: Checkpoint, data: Data, seed: int, texts: int = TEXTS
) -> tuple[dict[str, Workload], dict[str, str]]:
    """Workloads of `texts` texts, and their descriptions."""
    encoder, fields = checkpoint.text_encoder(), text_fields(data)
    sample = [Random(seed).sample(field, min(len(field), 16 * texts)) for _, field in fields]
    config = checkpoint.config
    encoded = [given(config, encoder.encode(field)) for field in sample]
    workloads = text_workloads(encoded, seed, count=texts)
    cut = prompt_length(config) if config.continues else encoder.max_length
    parts = f"{texts} texts in equal parts from {', '.join(name for name, _ in fields)}, cut at {cut} tokens"
    descriptions = {
        "sorted": f"{parts}; batches of 32 in order of length",
        "mixed": f"{parts}; batches of 32, shuffled",
        "single": f"64 {fields[0][0]}, one at a time",
    }
    if isinstance(config.head, LanguageHead):
        most, beams = most_written(config, workloads.values()), f"{BEAMS} beams"
        few = text_workloads(encoded, seed, count=BEAM_TEXTS)["sorted"]
        written = {name: writing(workload, most=most) for name, workload in workloads.items()}
        until = f"up to {most} tokens more" if config.continues else "to their ends"
        descriptions = {name: f"{text}; written greedily, {until}" for name, text in descriptions.items()}
        descriptions[beams] = f"{BEAM_TEXTS} of these texts sorted, written with {beams}, {until}"
        return {**written, beams: writing(replace(few, name=beams), most=most, beams=BEAMS)}, descriptions
    dense = shape_workload(DENSE[0], min(DENSE[1], config.embedding.positions), encoder.vocab_size, seed)
    descriptions[dense.name] = "one batch of random tokens, without padding"
    return {**workloads, dense.name: dense}, descriptions


def prompt_length(config: TransformerConfig) -> int:
    """How many tokens of a text a language model is given to go on from."""
    return min(PROMPT, config.embedding.positions // 2)


def given(config: TransformerConfig, texts: Sequence[list[int]]) -> list[list[int]]:
    """What a model is given of texts: all tokens; a language model as many as a prompt has, never the end."""
    if not config.continues:
        return list(texts)
    assert isinstance(config.head, LanguageHead)
    end, most = config.head.end_id, prompt_length(config)
    return [[token for token in ids[:most] if token != end] for ids in texts]


def most_written(config: TransformerConfig, workloads: Iterable[Workload]) -> int:
    """How many tokens a model that writes may write: as its positions allow; a language model a few.

    Raises:
        InputError: a prompt leaves a language model no position to write to.
    """
    positions: int = config.decoder_embedding.positions
    if not config.continues:
        return positions
    longest: int = max(batch["input_ids"].shape[1] for workload in workloads for batch in workload.batches)
    if config.embedding.position_kind != "none" and longest >= positions:
        raise InputError(f"{longest} tokens leave a model of {positions} positions none to write to: give less")
    return min(CONTINUED, positions - longest)


def as_long(work: Workload, checkpoint: Checkpoint, data: PairData) -> Workload:
    """Of what a translator is given, batches that write as many tokens as train has for sources of that length."""
    pairs = read_pairs(checkpoint, data.train[:LIKE]).ids
    if not pairs:
        return work
    ratio = sum(len(target) for _, target in pairs) / sum(len(source) for source, _ in pairs)
    batches = []
    for batch in work.batches:
        most = min(int(batch["max_new_tokens"]), max(1, round(ratio * batch["input_ids"].shape[1])))
        batches.append({**batch, "max_new_tokens": np.array(most)})
    return replace(work, batches=tuple(batches))


def measure_stages(
    stages: Sequence[Stage],
    data: Data,
    path: Path,
    *,
    threads: int,
    provider: str,
    seed: int,
    progress: Progress,
) -> Latencies:
    """Measure every stage's graph, the first one being the baseline; encoders of one shape are timed once.

    Args:
        stages: the untouched model first.
        data: whose texts make the workloads.
        path: where the measurement is kept, and read from if it is there and of this machine.
        threads: of onnxruntime.
        provider: of the sessions.
        seed: of the workloads.
        progress: told of the rounds.
    """
    machine = describe_machine()
    if kept := _read(path, machine):
        return kept
    workloads, descriptions = build_workloads(stages[0].checkpoint, data, seed)
    timed: dict[tuple[str, ...], str] = {}
    same = {}
    for stage in stages:
        forms = json.dumps(stage.entry.get("forms", {}).get("forms", stage.entry["layout"]))
        shape = (stage.checkpoint.config.to_json(), forms, *_written(stage))
        same[stage.folder.name] = timed.setdefault(shape, stage.folder.name)
    graphs = {stage.folder.name: stage.graph for stage in stages if stage.folder.name in timed.values()}
    own = {
        stage.folder.name: build_workloads(stage.checkpoint, data, seed)[0]
        for stage in stages
        if stage.folder.name in graphs and stage.checkpoint.tokenizer != stages[0].checkpoint.tokenizer
    }
    ways: dict[str, Any] = {"threads": threads, "provider": provider, "seconds": SECONDS, "seed": seed}
    result = compare(graphs, workloads, own=own, **ways, progress=progress)
    by_model: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in graphs}
    for timing in result.timings:
        by_model[timing.model][timing.workload] = {
            "ratio": timing.ratio,
            "low": timing.ratio_low,
            "high": timing.ratio_high,
            **{name: getattr(timing, name) for name in ("p50_ms", "p90_ms", "p99_ms", "texts_per_second")},
        }
    costs = {cost.name: cost.peak_mib for cost in result.models}
    found = Latencies(
        {name: by_model[twin] for name, twin in same.items()},
        {name: costs[twin] for name, twin in same.items()},
        descriptions,
        _over_float(stages, same, result, seed),
    )
    whole = {"machine": machine, "measured": result.to_dict(), "found": asdict(found)}
    write_file(path, json.dumps(whole, indent=2) + "\n")
    return found


def _over_float(
    stages: Sequence[Stage], same: dict[str, str], result: LatencyResult, seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """See `Latencies.over_float`; `same`: under which name a stage was timed."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for before, stage in pairwise(stages):
        if stage.checkpoint.config.is_float or not before.checkpoint.config.is_float:
            continue
        found[stage.folder.name] = {}
        for size in result.workloads:
            times = [result.timing(same[one.folder.name], size.name).pass_seconds for one in (before, stage)]
            ratios = [[a / b for a, b in zip(*process, strict=True)] for process in zip(*times, strict=True)]
            found[stage.folder.name][size.name] = asdict(ratio_interval(ratios, seed=seed))
    return found


def _written(stage: Stage) -> tuple[str, ...]:
    """What tells apart stages of one shape: nothing, but models that write take the time that their texts take."""
    return (stage.folder.name,) if isinstance(stage.checkpoint.config.head, LanguageHead) else ()


def _read(path: Path, machine: dict[str, Any]) -> Latencies | None:
    """What was measured before, if that was on this machine."""
    if not path.is_file():
        return None
    try:
        kept = read_json(path)
        found, same = Latencies(**kept["found"]), kept["machine"] == machine
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged; remove it to measure again") from error
    return found if same else None
