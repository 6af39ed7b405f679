"""report.json -> report.md and report.html: pure functions of what a run recorded.

The page answers its reader's questions in their order: may this model be deployed, what did each step cost and gain,
can the numbers be trusted, how were they made. What an interrupted run has not recorded stands as '-'.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..transformer.errors import InputError
from ..transformer.files import write_file
from .numbers import MISSING, at, count, decimals, plain
from .page import HEADLINES, SPLITS, delivered, facts, figures, sections, stages_of, verdict_state, workloads_of
from .tables import Table, cell
from .templating import environment

FORMAT = 1
JSON_FILE, MARKDOWN_FILE, HTML_FILE = "report.json", "report.md", "report.html"
OBJECTS = ("model", "data", "machine", "workloads", "verdict")
LISTS = ("recipe", "stages", "skipped")  # of objects
# What would be markup, and how it is written to stand for itself; links need their "](" or "][".
MARKDOWN = {sign: f"\\{sign}" for sign in "`*|~"} | {"](": "]\\(", "][": "]\\[", "__": "\\_\\_"}
MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | MARKDOWN


def load_report(path: str | Path) -> dict[str, Any]:
    """Read a report.json, or the one in a directory.

    Raises:
        InputError: there is none, it is not JSON, or it is not the report of a run.
    """
    file = Path(path) / JSON_FILE if Path(path).is_dir() else Path(path)
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; name a directory that slimformer compress wrote") from None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise InputError(f"{file}: not JSON ({error})") from error
    if problem := _problem(report):
        raise InputError(f"{file}: not a slimformer report: {problem}")
    assert isinstance(report, dict)
    return report


def _problem(report: Any) -> str:
    """What keeps a JSON value from being a report, or an empty string."""
    if not isinstance(report, dict):
        return "it is not an object"
    if report.get("format") != FORMAT:
        return f"its format is {report.get('format')!r}, this slimformer reads {FORMAT}"
    for key in OBJECTS:
        if not isinstance(report.get(key), dict | None):
            return f"{key} is not an object"
    for key in LISTS:
        items = [] if report.get(key) is None else report[key]
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            return f"{key} is not a list of objects"
    return ""


def write_report(report: dict[str, Any], directory: Path) -> None:
    """Write report.json, report.md and report.html into an existing directory, each whole or not at all.

    Raises:
        InputError: the disk does not take them.
    """
    markdown, html = render(report)
    text = json.dumps(_clean(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    for name, content in ((JSON_FILE, text), (MARKDOWN_FILE, markdown), (HTML_FILE, html)):
        write_file(directory / name, content)


def render(report: dict[str, Any]) -> tuple[str, str]:
    """(Markdown, HTML) of a report; the HTML needs no other file. Raises InputError if it is none (`load_report`)."""
    if problem := _problem(report):
        raise InputError(f"not a slimformer report: {problem}")
    clean = _clean(report)
    page = sections(clean)
    html = environment().get_template("report.html.j2").render(page, figures=figures(clean))
    return _compact(environment(_markdown).get_template("report.md.j2").render(page)), html


def _markdown(value: Any) -> Any:
    """Text as Markdown that shows it literally, on one line."""
    if hasattr(value, "__html__"):
        return value
    text = " ".join(str(value).split()).replace("\\", "\\\\")
    for sign, shown in MARKDOWN.items():
        text = text.replace(sign, shown)
    return Markup(text)


def _compact(markdown: str) -> str:
    """No two empty lines in a row, and none at the end."""
    return re.sub(r"\n{3,}", "\n\n", markdown).strip() + "\n"


def _clean(value: Any) -> Any:
    """A JSON value without NaN, infinities and lone surrogates, none of which a file can hold."""
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def compare_reports(reports: Mapping[str, dict[str, Any]]) -> str:
    """A Markdown table of what several runs deliver, a column each, and notes on what keeps them from comparison.

    Raises:
        InputError: one of them is not a report.
    """
    for label, report in reports.items():
        if problem := _problem(report):
            raise InputError(f"{label}: not a slimformer report: {problem}")
    clean = {label: _clean(report) for label, report in reports.items()}
    columns = [_column(report) for report in clean.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[cell(name), *(cell(column.get(name, MISSING)) for column in columns)] for name in names]
    page = {"table_of_runs": Table.of(["", *clean], rows), "notes": list(_notes(clean))}
    return _compact(environment(_markdown).get_template("compare.md.j2").render(page))


def _column(report: Mapping[str, Any]) -> dict[str, str]:
    stages = stages_of(report)
    last, machine = delivered(report), report.get("machine") or {}
    column = {
        "Model": plain(at(report, "model", "source")),
        "Steps": " → ".join(stage["label"] for stage in stages[1:]) or MISSING,
        "Verdict": HEADLINES[verdict_state(report)],
    }
    column |= {name: f"{value} ({note})" for name, value, note in facts(report) if not name.startswith("Answers")}
    column |= {"Parameters": count(last.get("parameters"))}
    for split in SPLITS:
        column[f"Answers changed, {split}"] = decimals(at(last, "accuracy", split, "changed"), 2, " %")
    for name in workloads_of(report):
        column[f"p50, {name}"] = decimals(at(last, "latency", name, "p50_ms"), 2, " ms")
    column["Peak memory"] = decimals(last.get("peak_memory_mib"), 1, " MiB")
    setting = f"{plain(at(machine, 'cpu'))}, {plain(report.get('threads'))} threads"
    return {**column, "Machine": setting, "Seed": plain(report.get("seed"))}


def _notes(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What differs between runs that must not differ for their numbers to be compared."""
    questions: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "The runs were not served by the same machine and threads: compare ratios, not times.": lambda r: (
            at(r, "machine", "cpu"),
            r.get("threads"),
            r.get("provider"),
        ),
        "The runs were not tested on the same texts: their accuracies do not compare.": lambda r: at(
            r, "data", "fingerprints", "test"
        ),
        "The runs did not start from the same model: their ratios have different baselines.": lambda r: (
            at(r, "model", "source"),
            at(r, "model", "parameters"),
        ),
    }
    for note, ask in questions.items():
        if len({repr(ask(report)) for report in reports.values()}) > 1:
            yield note
