"""What a report's page says, as text and tables: a pure function of report.json that both templates show."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from .figure import Point, draw
from .forms import decision_text
from .numbers import (
    MISSING,
    at,
    between,
    count,
    decimals,
    difference,
    listed,
    mapped,
    megabytes,
    number,
    plain,
    points,
    ratio,
    scientific,
    sources_cut,
)
from .tables import Cell, Table, bytes_beside, bytes_lead, bytes_table, cell, flatten

SPLITS = ("valid", "test")
OWN_PAGES = "own_pages"  # in what was measured of a split, where the original's index is kept
STATES = ("met", "missed", "not proven")
HEADLINES = {
    "met": "Budget met",
    "missed": "Budget missed",
    "not proven": "Budget not proven",
    "failed": "A check failed",
    "no budget": "Measured, no budget given",
    "unfinished": "Run not finished",
}
ROLES = {
    "train": "trained on",
    "texts": "trained and calibrated on",
    "pages": "searched",
    "valid": "every choice made on",
    "test": "tested on, at the end",
}

Stage = Mapping[str, Any]


def sections(report: dict[str, Any]) -> dict[str, Any]:
    """Everything that both templates show, as text and tables."""
    stages, state = stages_of(report), verdict_state(report)
    source = str(at(report, "model", "source") or "unknown model")
    return {
        "report": report,
        "name": source.replace("\\", "/").rstrip("/").rpartition("/")[2] or source,
        "route": " → ".join(stage["label"] for stage in stages[1:]),
        "state": state,
        "headline": HEADLINES[state],
        "warnings": list(_warnings(report)),
        "about": _about(report, state),
        "facts": list(facts(report)),
        "budgets": _budgets(report),
        "lines": [str(line) for key in ("lines", "slower") for line in listed(at(report, "verdict", key))],
        "stages": _stage_table(report, stages),
        "baseline": ", ".join(str(stages[0].get(key) or MISSING) for key in ("format", "layout"))
        if stages
        else MISSING,
        "latency": [_latency(report, stages, name) for name in workloads_of(report)],
        "accuracy": [table for split in SPLITS if _has(stages, split) for table in _accuracies(report, stages, split)],
        "bytes": _bytes(report),
        "parity": _parity(stages),
        "steps": [_step(stage) for stage in stages[1:]],
        "skipped": _skipped(report),
        "hands": list(_hands(report)),
        "setting": list(_setting(report)),
        "advice": [str(line) for line in listed(report.get("advice"))],
        "command": " ".join(str(report.get("command") or MISSING).split()),
    }


def stages_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stages, each with a `label` and whether it is the `baseline`; those the run has not reached are there too."""
    found = listed(report.get("stages"))
    missing = listed(report.get("recipe"))[max(len(found) - 1, 0) :]
    stages = [*found, *({"name": item.get("name"), "options": item} for item in missing)]
    if not found:
        stages = [{"name": "original"}, *stages]
    names = [str(stage.get("name") or MISSING) for stage in stages]
    labels = [
        name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)
    ]
    return [
        {**stage, "label": label, "baseline": i == 0}
        for i, (stage, label) in enumerate(zip(stages, labels, strict=True))
    ]


def verdict_state(report: Mapping[str, Any]) -> str:
    """A key of HEADLINES: by each budget's `state`, or where it has none by its `met` (None: not proven)."""
    verdict = report.get("verdict")
    planned, found = len(listed(report.get("recipe"))), len(listed(report.get("stages")))
    if not verdict or found < planned + 1:
        return "unfinished"
    states = [budget_state(budget) for budget in listed(verdict.get("budgets"))]
    for state in ("missed", "not proven"):
        if state in states:
            return state
    if verdict.get("met") is False:
        return "failed"  # of what no budget speaks: parity
    return "met" if states else "no budget"


def budget_state(budget: Any) -> str:
    """One of STATES."""
    if at(budget, "state") in STATES:
        return str(at(budget, "state"))
    met = at(budget, "met")
    return "met" if met is True else "not proven" if met is None else "missed"


def workloads_of(report: Mapping[str, Any]) -> list[str]:
    """Names of the workloads, those described and those measured."""
    measured = [name for stage in listed(report.get("stages")) for name in mapped(at(stage, "latency"))]
    return list(dict.fromkeys([*mapped(report.get("workloads")), *measured]))


def _has(stages: Sequence[Stage], split: str) -> bool:
    return any(at(stage, "accuracy", split) for stage in stages)


def _decisive(stages: Sequence[Stage]) -> str:
    """The split on which all measured stages can be compared: test where each has it, else valid."""
    measured = [stage for stage in stages if at(stage, "accuracy")]
    return "test" if measured and all(at(stage, "accuracy", "test") for stage in measured) else "valid"


def delivered(report: Mapping[str, Any]) -> Stage:
    """The last stage beside the original of which something was measured; empty where there is none."""
    measured = [stage for stage in stages_of(report)[1:] if any(stage.get(key) for key in ("bytes", "accuracy"))]
    return measured[-1] if measured else {}


def _about(report: Mapping[str, Any], state: str) -> str:
    """Which model the verdict's numbers are of."""
    last = delivered(report)
    if not last:
        return "No step has been measured."
    form = " ".join(str(last[key]) for key in ("format", "layout") if last.get(key))
    what = "So far" if state == "unfinished" else "The model delivered"
    return f"{what}: after {last['label']}" + (f", {form}." if form else ".")


def _over(whole: Any, part: Any) -> float | None:
    above, below = number(whole), number(part)
    return above / below if above is not None and below else None


def _warnings(report: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the test that were learnt from: they void the accuracy, so they stand above it."""
    for pair, shared in mapped(at(report, "data", "overlaps")).items():
        names = pair.split("~")
        if (number(shared) or 0) > 0 and "test" in names and not {"texts", "train"}.isdisjoint(names):
            learnt = next(name for name in names if name != "test")
            yield f"{count(shared)} texts of test are also in {learnt}: accuracy on test is not that of unseen texts"


def facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, number, what qualifies it) of the model delivered against the original."""
    last, first, metric = delivered(report), stages_of(report)[0], str(report.get("deciding") or "accuracy")
    before, saved = megabytes(first.get("bytes")), _over(first.get("bytes"), last.get("bytes"))
    smaller = f"{ratio(saved)} smaller than {before} MB" if saved and saved >= 1 else f"the original: {before} MB"
    yield "Size", f"{megabytes(last.get('bytes'))} MB", smaller
    split = "test" if at(last, "accuracy", "test") else "valid"
    entry = at(last, "accuracy", split, "difference", metric)
    before, after = (points(at(stage, "accuracy", split, "metrics", metric)) for stage in (first, last))
    interval = between(at(entry, "low"), at(entry, "high")) or MISSING
    changed = decimals(at(last, "accuracy", split, "changed"), 2, " %")
    name = f"{metric} on {split}"
    yield name, decimals(at(entry, "difference"), 2, " points", "+"), f"95 % interval {interval}; {before} to {after}"
    yield f"Answers changed on {split}", changed, "first answers that differ from the original's"
    for name in workloads_of(report):
        entry = at(last, "latency", name)
        interval = between(at(entry, "low"), at(entry, "high")) or MISSING
        yield f"Speed-up, {name}", ratio(at(entry, "ratio")), f"95 % interval {interval}"


def _budgets(report: Mapping[str, Any]) -> Table:
    marks = {"met": "good", "missed": "bad", "not proven": "bad"}
    rows = []
    for budget in listed(at(report, "verdict", "budgets")):
        state = budget_state(budget)
        flag, limit, value = (cell(plain(at(budget, key))) for key in ("flag", "limit", "value"))
        rows.append([flag, Cell(state, mark=marks[state]), limit, value])
    return Table.of(["Budget", "Verdict", "Limit", "Measured"], rows, numeric=False)


def _speedup(stage: Stage, workload: str) -> Cell:
    entry = at(stage, "latency", workload)
    interval = "" if stage["baseline"] else between(at(entry, "low"), at(entry, "high"))
    return Cell(ratio(at(entry, "ratio")), interval)


def _accuracy_cell(stage: Stage, split: str, metric: str, *more: str) -> Cell:
    entry = at(stage, "accuracy", split, *more)
    against = at(entry, "difference", metric)
    return Cell(
        points(at(entry, "metrics", metric)), "" if against is None or stage["baseline"] else difference(against)
    )


def _stage_table(report: Mapping[str, Any], stages: Sequence[Stage]) -> Table:
    metric, splits = str(report.get("deciding") or "accuracy"), [s for s in SPLITS if _has(stages, s)] or ["test"]
    decisive, workloads = _decisive(stages), workloads_of(report)
    rows = []
    for stage in stages:
        form = " ".join(str(stage[key]) for key in ("format", "layout") if stage.get(key))
        row = [Cell(stage["label"], form), cell(count(stage.get("layers"))), cell(count(stage.get("parameters")))]
        row += [cell(megabytes(stage.get("bytes")))]
        row += [_accuracy_cell(stage, split, metric) for split in splits]
        row += [cell(decimals(at(stage, "accuracy", decisive, "changed"), 2, " %"))]
        rows.append(row + [_speedup(stage, name) for name in workloads])
    heads = ["Stage", "Layers", "Parameters", "MB", *(f"{metric}, {split}" for split in splits)]
    return Table.of([*heads, f"Changed, {decisive}", *(f"Speed-up, {name}" for name in workloads)], rows)


def _latency(report: Mapping[str, Any], stages: Sequence[Stage], workload: str) -> tuple[str, str, Table]:
    """(workload, its description, table)."""
    rows = []
    for stage in stages:
        entry = at(stage, "latency", workload)
        row = [cell(stage["label"]), *(cell(decimals(at(entry, f"p{p}_ms"), 2)) for p in (50, 90, 99))]
        row += [cell(decimals(at(entry, "texts_per_second"), 1)), _speedup(stage, workload)]
        rows.append([*row, cell(decimals(stage.get("peak_memory_mib"), 1))])
    heads = ["Stage", "p50, ms", "p90, ms", "p99, ms", "Texts/s", "Speed-up", "Peak, MiB"]
    return workload, str(at(report, "workloads", workload) or ""), Table.of(heads, rows)


def _metrics(report: Mapping[str, Any], stages: Sequence[Stage]) -> list[str]:
    said = [str(name) for name in listed(report.get("metric_names"))]
    found = [name for stage in stages for split in SPLITS for name in mapped(at(stage, "accuracy", split, "metrics"))]
    return list(dict.fromkeys([*said, *found]))


def _accuracies(report: Mapping[str, Any], stages: Sequence[Stage], split: str) -> Iterator[tuple[str, Table]]:
    """One table; where the original's index is kept, another of models that search pages of their own."""
    if not any(at(stage, "accuracy", split, OWN_PAGES) for stage in stages):
        yield split, _accuracy(report, stages, split)
        return
    yield f"{split}: queries by each model, pages by the original", _accuracy(report, stages, split)
    yield f"{split}: queries and pages by each model", _accuracy(report, stages, split, OWN_PAGES)


def _accuracy(report: Mapping[str, Any], stages: Sequence[Stage], split: str, *more: str) -> Table:
    metrics, rows = _metrics(report, stages), []
    for stage in stages:
        changed = cell(decimals(at(stage, "accuracy", split, *more, "changed"), 2, " %"))
        cells = (_accuracy_cell(stage, split, metric, *more) for metric in metrics)
        rows.append([cell(stage["label"]), *cells, changed])
    return Table.of(["Stage", *metrics, "First answers changed"], rows)


def _bytes(report: Mapping[str, Any]) -> dict[str, Any]:
    """Where the bytes of the model delivered are; empty for runs from before that was recorded."""
    last = delivered(report)
    accounting = mapped(last.get("accounting"))
    if not accounting:
        return {}
    lead = f"After {last['label']}: {bytes_lead(accounting)}."
    return {"lead": lead, "table": bytes_table(accounting), "beside": bytes_beside(accounting)}


def _parity(stages: Sequence[Stage]) -> Table:
    if any("greedy_equal" in mapped(stage.get("parity")) for stage in stages):
        return _decoding_parity(stages)
    errors = ("max_absolute", "max_relative", "median_relative", "quantization_relative", "alone_vs_beside")
    rows = []
    for stage in stages:
        parity = mapped(stage.get("parity"))
        of = str(parity.get("measured") or "").replace("_", " ")
        row = [cell(stage["label"]), *(cell(scientific(parity.get(key))) for key in errors)]
        row += [Cell(scientific(parity.get("limit")), of and f"of {of}"), cell(count(parity.get("shapes")))]
        rows.append([*row, cell(plain(parity.get("empty_rows"))), _passed(parity)])
    heads = ["Stage", "Absolute, largest", "Relative, largest", "Relative, median", "int8, against fp32"]
    return Table.of([*heads, "Alone, against beside", "Limit", "Shapes", "Padding alone, finite", "Passed"], rows)


def _decoding_parity(stages: Sequence[Stage]) -> Table:
    rows = []
    for stage in stages:
        parity = mapped(stage.get("parity"))
        shares = [_share(parity.get(key)) for key in ("greedy_equal", "beams_equal", "tokens_equal", "steps_equal")]
        of = str(parity.get("measured") or "").replace("_", " ")
        row = [cell(stage["label"]), cell(count(parity.get("texts"))), *map(cell, shares)]
        rows.append([*row, Cell(_share(parity.get("limit")), of and f"of {of}"), _passed(parity)])
    heads = ["Stage", "Texts", "Equal, greedily", "Equal, with beams", "Tokens chosen alike", "One at a time"]
    return Table.of([*heads, "Limit", "Passed"], rows)


def _share(value: Any) -> str:
    part = number(value)
    return MISSING if part is None else decimals(100 * part, 1, " %")


def _passed(parity: Mapping[str, Any]) -> Cell:
    passed = parity.get("passed")
    return Cell(plain(passed), mark="good" if passed is True else "bad" if passed is False else "")


def _step(stage: Stage) -> dict[str, Any]:
    """What a step was asked for and what it says it did."""
    options = {key: value for key, value in mapped(stage.get("options")).items() if key != "name"}
    details = {key: value for key, value in mapped(stage.get("details")).items() if key != "seconds"}
    lines, tables = flatten(details)
    lines = [*lines, *_forms(mapped(stage.get("forms")))]
    said = ", ".join(f"{key} {plain(value)}" for key, value in options.items() if value not in (None, [], ""))
    took = decimals(stage.get("seconds"), 1, " s")
    return {"label": stage["label"], "options": said or "defaults", "seconds": took, "lines": lines, "tables": tables}


def _forms(forms: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The forms of the exported graph, and what was measured of the others."""
    if forms:
        yield "graph forms", ", ".join(f"{name} {plain(value)}" for name, value in mapped(forms.get("forms")).items())
        works = "; ".join(str(work) for work in listed(forms.get("workloads")))
        yield "graph forms, how", ", ".join([*map(str, listed(forms.get("notes"))), *([works] if works else [])])
        for one in listed(forms.get("decisions")):
            yield f"graph forms, {at(one, 'choice')} {at(one, 'value')}", decision_text(mapped(one))


def _skipped(report: Mapping[str, Any]) -> Table:
    rows = [[cell(plain(item.get("what"))), cell(plain(item.get("why")))] for item in listed(report.get("skipped"))]
    named = {item.get("what") for item in listed(report.get("skipped"))}
    if left := [name for name in listed(at(report, "model", "left_out")) if name not in named]:
        rows.append([cell(plain(left)), cell("tensors of the original that this task does not use")])
    return Table.of(["What", "Why"], rows, numeric=False)


def _hands(report: Mapping[str, Any]) -> Iterator[Table]:
    """What was trained, chosen and tested on, and what those texts share."""
    data = report.get("data") or {}
    prints, sizes = mapped(at(data, "fingerprints")), mapped(at(data, "rows"))
    names = dict.fromkeys([*(name for name in ROLES if name in {*prints, *sizes}), *sizes, *prints])
    rows = [
        [cell(name), cell(ROLES.get(name, MISSING)), cell(count(sizes.get(name))), cell(plain(prints.get(name)))]
        for name in names
    ]
    if rows:
        yield Table.of(["Split", "Used as", "Texts", "SHA-256 of its texts"], rows, numeric=False)
    shared = mapped(at(data, "overlaps"))
    marked = [
        [cell(pair.replace("~", " and ")), Cell(count(n), mark="bad" if (number(n) or 0) > 0 else "")]
        for pair, n in shared.items()
    ]
    if marked:
        yield Table.of(["Splits", "Texts in both"], marked)


def _setting(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Everything needed to make the numbers again: (name, value)."""
    machine, data, model = (report.get(key) or {} for key in ("machine", "data", "model"))
    flags = [name for name, there in mapped(at(machine, "flags")).items() if there]
    versions = {"slimformer": report.get("version"), "python": at(machine, "python"), **mapped(at(machine, "versions"))}
    size, layers, width = (at(model, key) for key in ("parameters", "layers", "d_model"))
    shape = f"{count(size)} parameters, {plain(layers)} layers, d {plain(width)}"
    yield "Model", f"{plain(at(model, 'source'))} ({plain(at(model, 'family'))}; {shape})"
    yield "Data", f"{plain(at(data, 'directory'))} ({plain(at(data, 'task'))})"
    if scores := mapped(at(data, "signatures")):
        yield "Scores", ", ".join(f"{name} {signature}" for name, signature in scores.items())
    if cut := sources_cut(data):
        yield "Sources cut", cut
    yield "Seed", plain(report.get("seed"))
    yield "Served by", f"{plain(report.get('provider'))}, {plain(report.get('threads'))} threads"
    if target := report.get("target"):
        yield "Target", f"{plain(target)}, for the bits of int8 weights"
    yield "CPU", f"{plain(at(machine, 'cpu'))} ({', '.join(flags) or 'no int8 instructions known'})"
    quota = "no quota" if at(machine, "cores_quota") is None else f"quota {plain(at(machine, 'cores_quota'))}"
    yield "Cores", f"{plain(at(machine, 'cores_affinity'))} usable, {quota}"
    yield "Memory", decimals(at(machine, "memory_gib"), 1, " GiB")
    if devices := at(machine, "cuda_devices"):
        yield "CUDA devices", plain(devices)
    yield "Platform", plain(at(machine, "platform"))
    yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or MISSING
    yield "Created", plain(report.get("created"))


def figures(report: dict[str, Any]) -> list[tuple[str, str, Markup]]:
    """(workload, split, SVG) for each workload on which a stage beside the original is measured."""
    stages, metric = stages_of(report), str(report.get("deciding") or "accuracy")
    split = _decisive(stages)
    drawn = []
    for i, workload in enumerate(workloads_of(report)):
        marks = [Point(stages[0]["label"], (1, 1, 1), (0, 0, 0))]
        for stage in stages[1:]:
            gain, loss = at(stage, "latency", workload), at(stage, "accuracy", split, "difference", metric)
            x, y = _ends(gain, "ratio"), _ends(loss, "difference")
            if x and y:
                marks.append(Point(stage["label"], x, y))
        if len(marks) > 1:
            drawn.append((workload, split, Markup(draw(marks, metric, f"figure{i}"))))
    return drawn


def _ends(entry: Any, key: str) -> tuple[float, float, float] | None:
    """(middle, low, high) of an interval, its ends the middle where they are missing; None without a middle."""
    middle, low, high = (number(at(entry, name)) for name in (key, "low", "high"))
    if middle is None:
        return None
    return middle, middle if low is None else low, middle if high is None else high
