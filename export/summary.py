"""What the command line says of results: tables of plain text, and the key numbers of a report for other programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from ..transformer.vectors import Kept
from .latency import LatencyResult
from .numbers import at, between, decimals, difference, listed, mapped, megabytes, plain, points, ratio, sources_cut

KEPT = ("name", "format", "layers", "parameters", "bytes", "accuracy", "latency", "peak_memory_mib")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text, the first to the left and the others to the right; nothing is wrapped or cut."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    sides = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return "\n".join(
        "  ".join(side(text, width) for side, text, width in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    )


def decisive_split(report: Mapping[str, Any]) -> str:
    """`test` where the last stage was judged on it, else `valid`."""
    stages = listed(report.get("stages"))
    return "test" if stages and at(stages[-1], "accuracy", "test") else "valid"


def report_text(report: Mapping[str, Any]) -> str:
    """A line for each stage, what was left out, which texts are shared, and the verdict."""
    metric, split, workloads = (
        str(report.get("deciding")),
        decisive_split(report),
        list(mapped(report.get("workloads"))),
    )
    rows = []
    for stage in listed(report.get("stages")):
        judged = at(stage, "accuracy", split)
        against, changed = at(judged, "difference", metric), at(judged, "changed")
        row = [str(stage.get("name")), points(at(judged, "metrics", metric)), difference(against) if against else ""]
        row += [decimals(changed, 1, " %") if against else "", megabytes(stage.get("bytes"))]
        rows.append(row + [ratio(at(stage, "latency", name, "ratio")) for name in workloads])
    heads = ["stage", f"{metric}, {split}", "difference, 95 % interval", "changed", "MB", *workloads]
    lines = [table(heads, rows)]
    lines += [
        f"left out: {plain(item.get('what'))} ({plain(item.get('why'))})" for item in listed(report.get("skipped"))
    ]
    overlaps = [f"{pair} {count}" for pair, count in mapped(at(report, "data", "overlaps")).items()]
    lines.append(f"texts shared: {', '.join(overlaps) or 'none compared'}")
    if cut := sources_cut(at(report, "data")):
        lines.append(f"sources cut: {cut}")
    for budget in listed(at(report, "verdict", "budgets")):
        state = str(budget.get("state"))
        lines.append(f"{budget.get('flag')} {state}: {budget.get('value')}; limit {budget.get('limit')}")
    said = [line for key in ("lines", "slower") for line in listed(at(report, "verdict", key))]
    return "\n".join([*lines, *(f"verdict: {line}" for line in said)])


def key_numbers(report: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict and what each stage is worth, JSON-ready."""
    head = {key: report.get(key) for key in ("verdict", "deciding", "seed", "threads", "provider", "skipped")}
    stages = [{key: stage.get(key) for key in KEPT} for stage in listed(report.get("stages"))]
    return {**head, "split": decisive_split(report), "overlaps": at(report, "data", "overlaps"), "stages": stages}


def evaluation_text(result: Mapping[str, Any]) -> str:
    """What `judge` found."""
    heads = [f"{result['split']}, {result['examples']:,} examples", "model"]
    rows = [[name, points(value)] for name, value in result["metrics"].items()]
    more = f"\nsources cut at {result['cut_at']} tokens: {result['sources_cut']:,}" if "sources_cut" in result else ""
    more += f"\n\n{_forms_text(result['forms'])}" if "forms" in result else ""
    if "against" not in result:
        return table(heads, rows) + more
    rows = [[*row, points(result["against_metrics"][row[0]]), difference(result["difference"][row[0]])] for row in rows]
    lines = table([*heads, "against", "difference, 95 % interval"], rows)
    return f"{lines}\nanswers changed: {decimals(result['changed'], 2, ' %')}{more}"


def _forms_text(forms: Sequence[Mapping[str, Any]]) -> str:
    """What cheaper forms of the vectors are worth, and the difference of the first metric from whole float ones."""
    names = list(forms[0]["metrics"])
    rows = []
    for form in forms:
        other = f", {form['queries']} queries" if form["queries"] != form["precision"] else ""
        row = [f"{form['dimensions']} {form['precision']}{other}", str(form["bytes"])]
        row += [points(form["metrics"][name]) for name in names]
        rows.append([*row, difference(form["difference"][names[0]]) if "difference" in form else ""])
    heads = ["vectors", "bytes each", *names, f"difference of {names[0]}, 95 % interval"]
    return table(heads, rows)


def latency_text(result: LatencyResult) -> str:
    """Every model on every workload."""
    rows = [
        [
            f"{timing.workload}: {timing.model}",
            f"{ratio(timing.ratio)} {between(timing.ratio_low, timing.ratio_high)}",
            *(decimals(value, 2) for value in (timing.p50_ms, timing.p90_ms, timing.p99_ms)),
            decimals(timing.texts_per_second, 1),
        ]
        for timing in result.timings
    ]
    title = f"{result.provider}, {result.threads} thread{'s' * (result.threads > 1)}"
    return table([title, "speed-up, 95 % interval", "p50 ms", "p90 ms", "p99 ms", "texts/s"], rows)


def label_lines(labels: Sequence[tuple[str, float]], texts: Sequence[str]) -> str:
    """Label, probability and text of each, with tabs between."""
    pairs = zip(labels, texts, strict=True)
    return "".join(f"{label}\t{share:.4f}\t{' '.join(text.split(chr(9)))}\n" for (label, share), text in pairs)


def vector_lines(vectors: Kept, texts: Sequence[str]) -> str:
    """JSON lines of text and embedding (n, E), with the shortest digits that give the same number back."""
    pairs = zip(texts, vectors, strict=True)
    number = float if vectors.dtype == np.float32 else int
    rows = ({"text": text, "embedding": [number(str(x)) for x in row]} for text, row in pairs)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def vector_bytes(vectors: Kept) -> bytes:
    """The content of a .npy file."""
    buffer = BytesIO()
    np.save(buffer, vectors, allow_pickle=False)
    return buffer.getvalue()
