"""The whole job: steps one after the other, each measured against the untouched model, then the proof.

OUT/ holds `run.json` (what was asked for), `stages/N-NAME/`, `model/`, `bundle/` and the report. Choices are made on
`valid`; `test` is opened once, when the last stage is done. The report is written again after every stage.
"""

import datetime
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import __version__
from ..export.bundle import check_served
from ..export.form_times import Chosen, measured
from ..export.forms import Forms
from ..export.machine import advice, available_threads, describe_machine, require_provider, require_target
from ..export.page import OWN_PAGES
from ..export.report import write_report
from ..export.runtime import load_bundle
from ..export.time_store import FORMS_FILE, SUBLAYERS_FILE, machine_store
from ..export.validation import TEXTS as PARITY_TEXTS
from ..transformer.checkpoint import Checkpoint, read_json
from ..transformer.config import ClassificationHead, EmbeddingHead, LanguageHead
from ..transformer.data import Data, LabelledData, PairData, SearchData, TextData, load_data
from ..transformer.errors import InputError
from ..transformer.evaluation import check_goes_on, check_writes, evaluate, has_split
from ..transformer.files import refuse_existing, replace_directory, write_file, writing
from ..transformer.loading import load
from ..transformer.metrics import TaskMetrics, changed_answers
from ..transformer.processes import ALONE, Processes, launched
from ..transformer.progress import SILENT, Progress
from ..transformer.sources import SourceReader, cut_by_split, summarizes
from ..transformer.statistics import Interval, RatioInterval, paired_intervals
from ..transformer.text_metrics import pair_signatures
from ..transformer.training import check_device
from .budget import MaxDrop
from .distill import Distill
from .latencies import Latencies, build_workloads, measure_stages
from .quantize import Quantize
from .recipe import Recipe, describe, steps_named
from .stage import BUNDLE, MODEL, Stage, make_stage, read_stage
from .step import StepContext

DEFAULT_STEPS = ("prune", "distill", "quantize")
ORIGINAL, WORK = "original", "work"
WORKLOADS = ("sorted", "mixed", "single")


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        met: every budget is held and proven.
        exit_code: 0, or 3 where a budget was missed or could not be proven.
        checkpoint: the last stage's model.
        bundle: what to deploy.
        drop: the deciding metric's difference to the original on the test split.
        speedup: the ratio on the workload that decides.
        report: the whole of report.json.
    """

    met: bool
    exit_code: int
    checkpoint: Checkpoint
    bundle: Path
    drop: Interval
    speedup: RatioInterval
    report: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """Everything that a run depends on, resolved."""

    recipe: Recipe
    max_drop: MaxDrop | None = None
    workload: str = "sorted"
    provider: str = "cpu"
    threads: int | None = None
    device: str = "cpu"
    seed: int = 0
    command: str = "slimformer.compress.compress(…)"
    target: str | None = None
    portable: bool = False
    keep_index: bool = False
    tensorboard: Path | None = None


def compress(
    model: Checkpoint | str | Path,
    data: Data | str | Path,
    *,
    out: str | Path,
    steps: Sequence[str] = DEFAULT_STEPS,
    recipe: Recipe | None = None,
    max_drop: str | float | None = None,
    workload: str = "sorted",
    provider: str = "cpu",
    threads: int | None = None,
    target: str | None = None,
    portable: bool = False,
    keep_index: bool = False,
    device: str = "cpu",
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    data_name: str | None = None,
    command: str = "slimformer.compress.compress(…)",
    progress: Progress = SILENT,
    tensorboard: Path | None = None,
    processes: Processes | None = None,
) -> Result:
    """Compress a model on data and prove what was gained and lost.

    Args:
        model: a checkpoint, or what `load` takes.
        data: loaded data, or a directory for `load_data`.
        out: the directory to make.
        steps: names of steps with their default options; `recipe` goes before it.
        recipe: steps with their options.
        max_drop: `1` or `1pt` (points of the deciding metric) or `2%`; None: nothing is required.
        workload: `sorted`, `mixed` or `single`, whose speed-up is named first.
        provider: `cpu` or `cuda`, which serves.
        threads: of onnxruntime; None: the cores that this process may use.
        target: the kind of CPU that serves (`export.machine.TARGETS`), for the bits of int8 weights; None: this one.
        portable: take the default forms of the graph; otherwise those that are fastest here (`export.form_times`).
        keep_index: the pages stay as the original embedded them: queries alone are embedded by the new model, which
            learns and is judged so; what it is worth with pages of its own is in the report, too.
        device: the torch device that trains.
        seed: of every random choice.
        resume: go on with a run that was broken off, or do nothing if it is done.
        force: replace `out`.
        data_name: what the report calls the data; None: its directory.
        command: shown in the report.
        progress: told of long work.
        tensorboard: a directory for TensorBoard, where each training step gets a folder while it runs.
        processes: those that train together, each of which calls this and gets the result; the main one does all that
            is not training. None: those that `accelerate launch` has started.

    Raises:
        InputError: something given cannot be used; `out` is then untouched.
    """
    request = Request(
        recipe or steps_named(steps),
        None if max_drop is None else MaxDrop.parse(max_drop),
        workload,
        provider,
        threads,
        device,
        seed,
        command,
        target,
        portable,
        keep_index,
        tensorboard,
    )
    source = model if isinstance(model, Checkpoint) else load(model)
    rows = load_data(data) if isinstance(data, str | Path) else data
    fitted, name = fit_to_data(source, rows, request.recipe.max_length), data_name or _name(data)
    fitted = fitted if target is None else fitted.with_provenance(target=target)
    together = launched(device) if processes is None else processes
    run = _Run(request, fitted, rows, Path(out), name, progress if together.main else SILENT, together)
    return together.from_main(run.go(resume=resume, force=force)) if together.main else run.follow()


def fit_to_data(model: Checkpoint, data: Data, max_length: int | None) -> Checkpoint:
    """The model with the head that the data asks for and the cut of texts that the recipe asks for."""
    config, notes = model.config, {}
    if isinstance(data, PairData):
        check_writes(config, data.task)
        if max_length is not None and not summarizes(config):
            raise InputError("max_length cuts texts, and a translation of half a text is none: leave it out")
    elif isinstance(data, TextData):
        check_goes_on(config)
        if max_length is not None:
            raise InputError("max_length cuts texts, and a language model reads them in windows: leave it out")
    elif isinstance(config.head, LanguageHead):
        if config.continues:
            raise InputError(
                "the model goes on from texts: give data with text alone, or say that its task is language"
            )
        fields = "text and summary" if summarizes(config) else "source and target"
        raise InputError(f"the model writes: give data with {fields}")
    elif isinstance(data, LabelledData):
        if not isinstance(config.head, ClassificationHead):
            raise InputError(
                "the data has labels and the model no classifier: fine-tune it first with slimformer train"
            )
        strange = sorted(set(data.labels) - set(config.head.labels))
        if strange:
            raise InputError(
                f"label {strange[0]!r} of the data is not among the model's: {', '.join(config.head.labels)}"
            )
    elif isinstance(config.head, ClassificationHead):
        raise InputError("the data is for search and the model classifies: give data with labels")
    elif config.head is None:
        config = replace(config, head=EmbeddingHead())
        notes["head"] = "the model names no pooling: mean over tokens and unit length were taken"
    if max_length is not None:
        config = replace(config, text=replace(config.text, max_length=max_length))
    return replace(model, config=config).with_provenance(**notes)


def int8_bits(recipe: Recipe, model: Checkpoint) -> list[int]:
    """Bits of the int8 weights that a recipe makes or trains for and that the model has; 0: those of the target."""
    steps = (one for one in recipe.steps if isinstance(one, Quantize | Distill))
    asked = [one.bits for one in steps if isinstance(one, Quantize) or one.quantization_aware]
    return [*asked, *([model.provenance["int8_weight_bits"]] if "int8_weight_bits" in model.provenance else [])]


def asked_formats(recipe: Recipe, model: Checkpoint) -> set[str]:
    """Formats that a recipe asks for and that the model has."""
    asked = [one for one in recipe.steps if isinstance(one, Quantize)]
    exceptions = {text.partition("=")[2] for one in asked for text in one.formats}
    return {one.format for one in asked} | exceptions | model.config.formats


def task_named(data: Data) -> str:
    """What the report calls the task of data."""
    if isinstance(data, PairData):
        return data.task
    if isinstance(data, TextData):
        return "language"
    return "classification" if isinstance(data, LabelledData) else "embedding"


def _name(data: object) -> str:
    return str(data) if isinstance(data, str | Path) else "(given in memory)"


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


class _Run:
    """One run of the pipeline."""

    def __init__(
        self,
        request: Request,
        original: Checkpoint,
        data: Data,
        out: Path,
        data_name: str,
        progress: Progress,
        processes: Processes = ALONE,
    ) -> None:
        require_provider(request.provider)
        check_served(asked_formats(request.recipe, original), request.provider)
        require_target(request.target, int8_bits(request.recipe, original))
        check_device(request.device)
        if request.workload not in WORKLOADS:
            raise InputError(f"workload {request.workload!r} is not one of {', '.join(WORKLOADS)}")
        if not any(has_split(data, split) for split in ("valid", "test")):
            raise InputError(f"{data_name}: there is nothing to judge the models on: neither valid nor test")
        if request.keep_index and not (isinstance(data, SearchData) and data.pages):
            raise InputError(f"{data_name}: there are no pages that an index could be kept of: leave out --keep-index")
        self.request, self.original, self.data, self.out, self.progress = request, original, data, out, progress
        self.processes = processes
        request.recipe.steps[0].check(original.config)
        self.threads = available_threads(request.threads)
        self._context(None).training_texts()
        self.data_name = data_name
        self.test = "test" if has_split(data, "test") else "valid"
        self.metrics: dict[tuple[str, str, bool], TaskMetrics] = {}

    def go(self, *, resume: bool, force: bool) -> Result:
        """All stages, then the proof."""
        asked = self._asked()
        self._open(asked, resume=resume, force=force)
        report = self._opening()
        stages: list[Stage] = []
        for number, step in enumerate([None, *self.request.recipe.steps]):
            name = ORIGINAL if step is None else step.name
            folder = self.out / "stages" / f"{number}-{name}"
            stage = read_stage(folder) or self._make(folder, step, stages)
            shutil.rmtree(folder / WORK, ignore_errors=True)
            stages.append(stage)
            self._write(report, stages)
        self.processes.from_main(None)
        self._judge_all(stages, self.test)
        latencies = self._latencies(stages)
        return self._conclude(report, stages, latencies)

    def follow(self) -> Result:
        """The part of the other processes in the steps that train; the main one's result."""
        nothing: Any = None
        while (work := self.processes.from_main(nothing)) is not None:
            step, before, folder = work
            step(before, self._context(folder))
        result: Result = self.processes.from_main(nothing)
        return result

    def _asked(self) -> dict[str, Any]:
        """What has to be the same in a resumed run."""
        from .teacher import digest

        request = self.request
        return {
            "version": __version__,
            "model": digest(self.original, []),
            "data": self.data.fingerprints(),
            "recipe": request.recipe.to_list(),
            "max_length": request.recipe.max_length,
            "seed": request.seed,
            "provider": request.provider,
            "threads": self.threads,
            "target": request.target,
            "portable": request.portable,
            "device": request.device,
            "keep_index": request.keep_index,
            **({"workload": request.workload} if request.recipe.times_decide else {}),
        }

    def _open(self, asked: dict[str, Any], *, resume: bool, force: bool) -> None:
        """Make the output directory, or check that the one that is there is of the same run."""
        asked = json.loads(json.dumps(asked))
        known = self.out / "run.json"
        if self.out.exists() and resume and not force:
            if not known.is_file():
                raise InputError(f"{self.out} is not the output of a run: give another -o, or --force to replace it")
            before = read_json(known)
            changed = [key for key in asked if before.get(key) != asked[key]]
            if changed:
                raise InputError(f"{self.out} was made with another {', '.join(changed)}: --force starts anew")
            return
        refuse_existing(self.out, force=force)
        if self.out.exists() and not known.is_file() and not _is_empty(self.out):
            raise InputError(f"{self.out} is not the output of a run, so --force does not remove it: give another -o")
        with writing(self.out):
            if self.out.exists():
                shutil.rmtree(self.out)
            self.out.mkdir(parents=True)
        write_file(known, json.dumps(asked, indent=2) + "\n")

    def _make(self, folder: Path, step: Any, stages: list[Stage]) -> Stage:
        """Run a step (None: take the original), export, check and judge."""
        start = time.monotonic()
        work = folder / WORK
        with writing(work):
            for left in folder.iterdir() if folder.exists() else ():  # of a run that was killed here
                if left != work:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            work.mkdir(parents=True, exist_ok=True)
        entry: dict[str, Any] = {"name": ORIGINAL, "options": {}, "details": self.original.provenance}
        checkpoint, before = self.original, None
        if step is not None:
            before = stages[-1].checkpoint
            if step.trains:
                self.processes.from_main((step, before, work))
            result = step(before, self._context(work))
            checkpoint = result.checkpoint
            entry = {"name": step.name, "options": describe(step), "details": result.details}
        entry["seconds"] = time.monotonic() - start
        chosen = None if step is None else self._forms(checkpoint)
        self.progress.start(f"{entry['name']}: export and compare with PyTorch", None, "")
        stage = make_stage(
            folder,
            checkpoint,
            entry,
            baseline=step is None,
            chosen=chosen,
            provider=self.request.provider,
            threads=self.threads,
            texts=self._texts_to_compare(),
            original=before
            if before is not None and before.config.is_float and not checkpoint.config.is_float
            else None,
            seed=self.request.seed,
        )
        self.progress.done()
        if has_split(self.data, "valid"):
            self._judge(stage, stages[0] if stages else stage, "valid")
        stage.finish()
        return stage

    def _forms(self, checkpoint: Checkpoint) -> Chosen | None:
        """The forms of a stage's graph, of an encoder alone; those of one shape are measured once."""
        request = self.request
        if isinstance(checkpoint.config.head, LanguageHead) or request.provider != "cpu":
            return None
        if request.portable:
            return Chosen.fixed(Forms(), "the portable default")
        workloads, _ = build_workloads(checkpoint, self.data, request.seed)
        stores = (self.out / FORMS_FILE, machine_store(FORMS_FILE))
        wanted = [workloads[request.workload]]
        return measured(checkpoint, wanted, threads=self.threads, stores=stores, progress=self.progress)

    def _texts_to_compare(self) -> tuple[str, ...]:
        """For parity: page texts, which are long, and texts that may be learnt from."""
        if isinstance(self.data, PairData):
            return self._context(None).training_texts()
        pages = self.data.pages if isinstance(self.data, SearchData) else ()
        return (*(page.text for page in pages[: PARITY_TEXTS // 2]), *self._context(None).training_texts())

    def _context(self, work: Path | None) -> StepContext:
        request = self.request
        return StepContext(
            self.data,
            teacher=self.original,
            workdir=work,
            seed=request.seed,
            device=request.device,
            target=request.target,
            workload=request.workload,
            provider=request.provider,
            threads=self.threads,
            keep_index=request.keep_index,
            stores=(self.out / SUBLAYERS_FILE, machine_store(SUBLAYERS_FILE)),
            progress=self.progress,
            processes=self.processes,
            board=None if work is None or request.tensorboard is None else request.tensorboard / work.parent.name,
        )

    def _judge(self, stage: Stage, first: Stage, split: str) -> None:
        """Evaluate a stage's bundle and enter the numbers and the paired intervals."""
        reference = self._metrics(first, first, split, kept=False)
        metrics = self._metrics(stage, first, split, kept=self.request.keep_index)
        entry = self._compared(reference, metrics, first=stage is first)
        if self.request.keep_index:
            own = self._metrics(stage, first, split, kept=False)
            entry[OWN_PAGES] = self._compared(reference, own, first=stage is first)
        stage.entry.setdefault("accuracy", {})[split] = entry
        stage.entry["deciding"], stage.entry["metric_names"] = metrics.deciding, list(metrics.names)

    def _compared(self, reference: TaskMetrics, metrics: TaskMetrics, *, first: bool) -> dict[str, Any]:
        """Numbers, and unless they are the first model's their differences from it."""
        entry: dict[str, Any] = {"metrics": metrics.values()}
        if not first:
            intervals = paired_intervals(
                reference.statistics, metrics.statistics, metrics.groups, metrics.aggregate, seed=self.request.seed
            )
            entry["difference"] = {name: asdict(interval) for name, interval in intervals.items()}
            entry["changed"] = 100 * changed_answers(reference, metrics)
        return entry

    def _metrics(self, stage: Stage, first: Stage, split: str, *, kept: bool) -> TaskMetrics:
        """With pages of its own, or (`kept`) of the first."""
        key = (stage.folder.name, split, kept and stage is not first)
        if key not in self.metrics:
            bundle = load_bundle(stage.bundle, threads=self.threads, provider=self.request.provider)
            memory, index = stage.memory, first.memory if key[2] else None
            self.metrics[key] = evaluate(
                self.data, bundle, split, memory=memory, original=first.memory, index=index, progress=self.progress
            )
        return self.metrics[key]

    def _judge_all(self, stages: list[Stage], split: str) -> None:
        for stage in stages:
            if split not in stage.entry.get("accuracy", {}):
                self._judge(stage, stages[0], split)
                stage.finish()

    def _latencies(self, stages: list[Stage]) -> Latencies:
        return measure_stages(
            stages,
            self.data,
            self.out / "latency.json",
            threads=self.threads,
            provider=self.request.provider,
            seed=self.request.seed,
            progress=self.progress,
        )

    def _opening(self) -> dict[str, Any]:
        """The part of the report that is known from the start."""
        request, config = self.request, self.original.config
        rows = {
            name: len(getattr(self.data, name))
            for name in ("train", "pages", "valid", "test", "texts")
            if hasattr(self.data, name)
        }
        notes = self.original.provenance
        skipped = [{"what": name, "why": "not part of the head that is used"} for name in notes.get("left_out", [])]
        if "head" in notes:
            skipped.append({"what": "pooling", "why": notes["head"]})
        return {
            "format": 1,
            "version": __version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": request.command,
            "seed": request.seed,
            "model": {
                "source": notes.get("source", "(given in memory)"),
                "family": notes.get("family", "slimformer"),
                "parameters": sum(value.numel() for value in self.original.state.values()),
                "layers": len(config.layers),
                "d_model": config.d_model,
                "max_length": config.text.max_length,
                "left_out": notes.get("left_out", []),
            },
            "data": {
                "directory": self.data_name,
                "task": task_named(self.data),
                "rows": rows,
                "fingerprints": self.data.fingerprints(),
                "overlaps": self.data.overlaps(),
                **self._of_pairs(),
            },
            "machine": describe_machine(),
            "threads": self.threads,
            "provider": request.provider,
            "target": request.target,
            "advice": advice(request.target),
            "recipe": request.recipe.to_list(),
            "skipped": skipped,
        }

    def _of_pairs(self) -> dict[str, Any]:
        """What the report says of pairs: how texts are scored, and how many sources are too long to be read whole."""
        if not isinstance(self.data, PairData):
            return {"signatures": {}}
        known: dict[str, Any] = {"signatures": pair_signatures(self.data.task)}
        if summarizes(self.original.config):
            reader = SourceReader(self.original.config, self.original.tokenizer)
            known["sources_cut"] = {"at": reader.limit, **cut_by_split(reader, self.data)}
        return known

    def _write(self, report: dict[str, Any], stages: Sequence[Stage]) -> None:
        report["stages"] = [stage.entry for stage in stages]
        for key in ("deciding", "metric_names"):
            report[key] = stages[0].entry.get(key)
        write_report(report, self.out)

    def _conclude(self, report: dict[str, Any], stages: list[Stage], latencies: Latencies) -> Result:
        last = stages[-1]
        for stage in stages:
            latencies.enter(stage)
        report["workloads"] = latencies.descriptions
        deciding = last.entry["deciding"]
        drop = Interval(**last.entry["accuracy"][self.test]["difference"][deciding])
        speedup = latencies.ratio(last, self.request.workload)
        original = stages[0].entry["accuracy"][self.test]["metrics"][deciding]
        report["verdict"] = verdict(self.request.max_drop, drop, original, deciding, stages)
        report["verdict"]["slower"] = slower(stages, latencies, self.request.workload)
        for name in (MODEL, BUNDLE):
            self._deliver(last.folder / name, self.out / name)
        self._write(report, stages)
        outcome = report["verdict"]
        return Result(outcome["met"], outcome["exit_code"], last.checkpoint, self.out / BUNDLE, drop, speedup, report)

    @staticmethod
    def _deliver(source: Path, target: Path) -> None:
        partial = target.with_name(f".{target.name}.partial")
        with writing(target):
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial)
            replace_directory(partial, target)


def slower(stages: Sequence[Stage], latencies: Latencies, workload: str) -> list[str]:
    """A line for each quantized stage that is proven to be slower than the float one before it, which it recommends."""
    lines = []
    for before, stage in pairwise(stages):
        ratio = latencies.over_float.get(stage.folder.name, {}).get(workload)
        if ratio is not None and ratio["high"] < 1:
            lines.append(
                f"{stage.entry['name']}: slower than the float model before it, {ratio['ratio']:.2f}x "
                f"[{ratio['low']:.2f}, {ratio['high']:.2f}] on {workload}; for speed take stages/{before.folder.name}/"
                f"{BUNDLE}"
            )
    return lines


def verdict(
    max_drop: MaxDrop | None, drop: Interval, original: float, deciding: str, stages: Sequence[Stage]
) -> dict[str, Any]:
    """Whether the budget is held and every graph computes what was evaluated."""
    budgets = []
    if max_drop is not None:
        limit = max_drop.points(original)
        held = max_drop.held(drop, original)
        budgets.append(
            {
                "state": "met" if held else "not proven" if drop.difference >= -limit else "missed",
                "flag": "--max-drop",
                "limit": f"{limit:.2f} points of {deciding}: at least {original - limit:.2f} of {original:.2f}",
                "value": f"{drop.difference:+.2f}, with 95 % confidence not below {drop.one_sided_low:+.2f}",
                "met": held,
            }
        )
    lines = [
        f"{stage.entry['name']}: the exported graph is not close enough to PyTorch"
        f" ({stage.entry['parity']['measured']}, limit {stage.entry['parity']['limit']:.3g})"
        for stage in stages
        if not stage.entry["parity"]["passed"]
    ]
    met = not lines and all(budget["met"] for budget in budgets)
    return {"met": met, "exit_code": 0 if met else 3, "budgets": budgets, "lines": lines}
