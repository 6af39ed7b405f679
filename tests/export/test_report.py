"""Reports: what they say of a finished, an interrupted and a hostile run; numbers worked out by hand."""

import copy
import errno
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from slimformer.export import page
from slimformer.export.numbers import decimals, plain, ranges
from slimformer.export.page import verdict_state
from slimformer.export.report import compare_reports, load_report, render, write_report
from slimformer.transformer.errors import InputError

METRICS = ("nDCG@10", "MRR")
HOSTILE = "</style><script>alert(1)</script><img src=x onerror=y>|`$\\frac{"


def accuracy(value: float, difference: float, changed: float) -> dict[str, Any]:
    interval = {"difference": difference, "low": difference - 0.8, "high": difference + 0.6, "one_sided_low": -9.0}
    return {
        "metrics": {"nDCG@10": value, "MRR": value - 5},
        "difference": dict.fromkeys(METRICS, interval),
        "changed": changed,
    }


def stage(name: str, size: int, speed: float, drop: float, form: str = "fp32", **more: Any) -> dict[str, Any]:
    latency = {"ratio": speed, "low": speed - 0.1, "high": speed + 0.2, "p50_ms": 40 / speed}
    return {
        "name": name,
        "options": {"name": name, "cost": 0.5},
        "details": {},
        "seconds": 12.34,
        "bytes": size,
        "parameters": 17_389_056,
        "layers": 3,
        "format": form,
        "layout": "packed",
        "accuracy": {"valid": accuracy(61.5 + drop, drop, 13.7), "test": accuracy(62.34 + drop, drop, 14.6)},
        "parity": {"max_absolute": 1.24e-6, "shapes": 12, "limit": 1e-4, "passed": True},
        "latency": {"mixed": {**latency, "p90_ms": 50.0, "p99_ms": 61.256, "texts_per_second": 1234.56}},
        "peak_memory_mib": 210.04,
        **more,
    }


def finished() -> dict[str, Any]:
    return {
        "format": 1,
        "version": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
        "command": "slimformer compress models/mini -o out",
        "seed": 7,
        "model": {"source": "models/mini", "family": "bert", "parameters": 22_713_216, "left_out": ["pooler.weight"]},
        "data": {
            "rows": {"valid": 1125, "test": 3526, "texts": 34635},
            "fingerprints": {"test": "ab" * 32},
            "overlaps": {"texts~test": 0, "valid~test": 3},
        },
        "machine": {"cpu": "Some CPU", "flags": {"avx2": True, "amx_int8": False}, "versions": {"onnxruntime": "1.32"}},
        "threads": 2,
        "provider": "cpu",
        "deciding": "nDCG@10",
        "metric_names": list(METRICS),
        "recipe": [{"name": "prune", "cost": 0.5}, {"name": "quantize"}],
        "stages": [
            stage("original", 90_900_000, 1.0, 0.0, options={}, layout="padded"),
            stage("prune", 69_400_000, 4.4, -9.4, details={"kept": {"layers": [0, 5], "heads": [[0, 1, 2], [7]]}}),
            stage("quantize", 17_640_000, 9.1, -0.94, "int8"),
        ],
        "workloads": {"mixed": "all texts, shuffled"},
        "verdict": {
            "met": True,
            "exit_code": 0,
            "budgets": [{"flag": "--max-drop", "limit": "2.0 points", "value": "bound -1.6", "met": True}],
            "lines": ["proven on test"],
        },
        "skipped": [{"what": "search", "why": "the recipe states all"}],
    }


def interrupted() -> dict[str, Any]:
    report = finished()
    del report["verdict"], report["skipped"], report["data"]["rows"]
    report["stages"] = [*report["stages"][:1], {"name": "prune", "options": {}}]
    return report


def accounting() -> dict[str, Any]:
    """Of 17.64 MB: two tensors of 11.72 and 0.59 MB, 84 that sum to 5.0 MB, a graph of 0.33 MB."""

    def part(size: int) -> dict[str, Any]:
        return {"bytes": size, "share": size / 17_640_000}

    table = {"name": "embeddings.tokens.weight", "format": "int8", "shape": [30522, 384], **part(11_720_448)}
    linear = {"name": "encoder.0.ffn.up.weight", "format": "uint8 blocks of 4 bits", "shape": [1536, 12, 16]}
    return {
        "of": "all files in onnx/",
        "bytes": 17_640_000,
        "over": 0.01,
        "tensors": [
            {**table, "why": "8 bits: no less; also the output layer: stored once"},
            {**linear, **part(589_824), "why": "4 bits: no less"},
        ],
        "smaller": {"tensors": 84, **part(5_000_000)},
        "graphs": {"files": 1, **part(329_728)},
        "beside": {"files": 9, "bytes": 471_234, "largest": "tokenizer.json"},
    }


def accounted(**changes: Any) -> dict[str, Any]:
    """A finished run whose last stage says where its bytes are; `changes` to what it says."""
    report = finished()
    report["stages"][-1]["accounting"] = {**accounting(), **changes}
    return report


class Elements(HTMLParser):
    """Tags and attributes of a page, and the text outside style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._style = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data + " "


def row(markdown: str, heading: str, name: str) -> list[str]:
    """The cells of the row that begins with `name` in the first table below `heading`."""
    lines = markdown[markdown.index(f"\n{heading}\n") :].splitlines()
    found = next(line for line in lines if line.startswith(f"| {name}"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_finished_run_in_numbers() -> None:
    markdown, html = render(finished())
    assert markdown.startswith("# mini: Budget met\n")
    assert row(markdown, "## Stages", "quantize") == [
        "quantize (int8 packed)",
        "3",
        "17,389,056",
        "17.6",
        "60.56 (-0.94 [-1.74, -0.34])",
        "61.40 (-0.94 [-1.74, -0.34])",
        "14.60 %",
        "9.10x [9.00, 9.30]",
    ]
    assert "- Size: **17.6 MB** (5.15x smaller than 90.9 MB)" in markdown  # 90.9 / 17.64 = 5.153
    assert "**-0.94 points** (95 % interval [-1.74, -0.34]; 62.34 to 61.40)" in markdown
    assert row(markdown, "### mixed", "prune") == [
        *("prune", "9.09", "50.00", "61.26", "1,234.6"),  # 40 / 4.4 = 9.0909
        *("4.40x [4.30, 4.60]", "210.0"),
    ]
    assert row(markdown, "## Parity", "prune") == ["prune", "1.2e-06", *"----", "1.0e-04", "12", "-", "yes"]
    assert row(markdown, "### On valid", "original") == ["original", "61.50", "56.50", "13.70 %"]
    text = Elements(html).text
    assert "the baseline is the original in fp32, padded, with default session options" in markdown
    for said in (
        "original in fp32, padded, with",
        "Budget met",
        "17.6 MB",
        "-0.94 points",
        "9.10x",
        "proven on test",
        "the recipe states all",
    ):
        assert said in text
    assert "not finished" not in text


def test_the_baseline_is_what_it_was() -> None:
    """Models that write have no padded graph."""
    report = finished()
    report["stages"][0]["layout"] = "packed"
    for text in render(report):
        assert "the baseline is the original in fp32, packed, with default session options" in text


def test_where_the_bytes_are() -> None:
    markdown, html = render(accounted())
    section = markdown[markdown.index("## Where the bytes are") : markdown.index("## Parity")]
    assert section == (
        "## Where the bytes are\n\n"
        "After quantize: tensors over 1 % of 17.64 MB (all files in onnx/), then the rest.\n\n"
        "| Tensor | Format | Shape | MB | Share | Why it is not smaller |\n"
        "| --- | --- | ---: | ---: | ---: | --- |\n"
        "| embeddings.tokens.weight | int8 | 30522 x 384 | 11.72 | 66.4 % "  # 11.720448 / 17.64 = 0.6644
        "| 8 bits: no less (also the output layer: stored once) |\n"
        "| encoder.0.ffn.up.weight | uint8 blocks of 4 bits | 1536 x 12 x 16 | 0.59 | 3.3 % | 4 bits: no less |\n"
        "| 84 smaller tensors |  |  | 5.00 | 28.3 % |  |\n"
        "| the graph |  |  | 0.33 | 1.9 % | nodes and constants |\n\n"
        "Not counted: tokenizer.json and 8 smaller files, 0.47 MB.\n\n"
    )
    text = " ".join(Elements(html).text.split())
    assert (
        "Where the bytes are After quantize: tensors over 1 % of 17.64 MB (all files in onnx/), then the rest." in text
    )
    assert "embeddings.tokens.weight int8 30522 x 384 11.72 66.4 % 8 bits: no less also the output layer" in text
    assert "the graph 0.33 1.9 % nodes and constants Not counted: tokenizer.json and 8 smaller files, 0.47 MB." in text
    assert '<td class="word">8 bits: no less<small>' in html
    assert '<th scope="col" class="word">Format</th>' in html
    assert '<th scope="col">MB</th>' in html


def test_where_the_bytes_of_the_last_stage_are() -> None:
    report = accounted()
    report["stages"][1]["accounting"] = {**accounting(), "tensors": []}
    assert "After quantize: tensors over" in render(report)[0]
    report["stages"].pop()
    markdown = render(report)[0]
    assert "After prune: tensors over" in markdown
    assert "embeddings.tokens.weight" not in markdown


def test_a_run_from_before_bytes_were_listed() -> None:
    """Its pages are what they would be if nothing could be listed: without the section."""
    old, new = render(finished()), render(accounted())
    for before, after in zip(old, new, strict=True):
        assert "Where the bytes are" not in before
        assert "Where the bytes are" in after
    markdown = new[0]
    start, end = markdown.index("## Where the bytes are"), markdown.index("## Parity")
    assert old[0] == markdown[:start] + markdown[end:]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"smaller": {"tensors": 1, "bytes": 40_000}}, "| 1 smaller tensor |  |  | 0.04 | - |  |"),
        ({"graphs": {"files": 4, "bytes": 40_000}}, "| 4 graphs |  |  | 0.04 | - | nodes and constants |"),
        ({"beside": {"files": 1, "bytes": 40_000, "largest": "a.json"}}, "Not counted: a.json, 0.04 MB."),
        (
            {"beside": {"files": 2, "bytes": 40_000, "largest": "a.json"}},
            "Not counted: a.json and a smaller file, 0.04 MB.",
        ),
        ({"over": 0.005}, "tensors over 0.5 % of"),
        ({"tensors": [{}]}, "| - | - | - | - | - |  |"),
        ({"tensors": [{"name": "w", "bytes": float("nan"), "shape": []}]}, "| w | - | - | - | - |  |"),
        (dict.fromkeys(accounting()), "tensors over - of - MB (-), then the rest"),
    ],
)
def test_what_is_left_of_the_bytes(changes: dict[str, Any], said: str) -> None:
    markdown, html = render(accounted(**changes))
    assert said in markdown
    assert "Where the bytes are" in html
    assert ">None<" not in html


def test_what_is_not_there_has_no_line() -> None:
    nothing = {"tensors": 0, "files": 0, "bytes": 0, "share": 0.0}
    markdown, html = render(accounted(smaller=nothing, graphs=nothing, beside=nothing))
    for text in (markdown, html):
        section = text[text.index("Where the bytes are") : text.index("Parity")]
        assert "encoder.0.ffn.up.weight" in section
        assert not any(word in section for word in ("smaller tensor", "graph", "Not counted"))


def test_importing_it_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, slimformer.export.report; sys.exit(bool({'torch', 'matplotlib', 'onnx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_same_report_gives_the_same_bytes() -> None:
    assert render(finished()) == render(copy.deepcopy(finished()))


def test_an_interrupted_run_has_dashes_and_a_banner() -> None:
    markdown, html = render(interrupted())
    assert "**Run not finished.**" in markdown
    assert "Run not finished." in Elements(html).text
    for unreached in ("prune", "quantize"):
        assert set(row(markdown, "## Stages", unreached)[1:]) == {"-"}
    assert "No step has been measured." in markdown
    assert "<svg" not in html


@pytest.mark.parametrize("key", ["", *finished()])
@pytest.mark.parametrize("value", [None, "absent"])
def test_no_missing_key_stops_the_page(key: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "draw", lambda *_: "<svg></svg>")
    report: dict[str, Any] = {"format": 1} if not key else finished()
    if value == "absent":
        report.pop(key, None)
    elif key:
        report[key] = None
    report["format"] = 1
    markdown, html = render(report)
    assert "nan" not in markdown.lower()
    assert ">None<" not in html


def test_not_a_number_is_a_dash_everywhere(tmp_path: Path) -> None:
    report = finished()
    last = report["stages"][-1]
    last["latency"]["mixed"]["ratio"] = float("nan")
    last["accuracy"]["test"]["metrics"]["nDCG@10"] = float("inf")
    last["details"] = {"loss": float("nan")}
    write_report(report, tmp_path)
    for name in ("report.json", "report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert not any(word in text for word in ("NaN", " nan", ">nan", "Infinity", " inf ", ">inf"))
    assert row((tmp_path / "report.md").read_text(), "## Stages", "quantize")[-1] == "- [9.00, 9.30]"


def test_hostile_names_stay_text() -> None:
    report = finished()
    report["model"]["source"] = HOSTILE
    report["command"] = f"slimformer {HOSTILE}\n\n# heading"
    report["workloads"] = {HOSTILE: HOSTILE}
    report["deciding"] = HOSTILE
    for entry in report["stages"]:
        entry["name"] = HOSTILE
        entry["latency"] = {HOSTILE: entry["latency"]["mixed"]}
        entry["accuracy"]["test"]["difference"][HOSTILE] = {"difference": -1.0, "low": -2.0, "high": 0.0}
        entry["details"] = {HOSTILE: [{HOSTILE: HOSTILE}], "more": {HOSTILE: HOSTILE}}
    report["skipped"] = [{"what": HOSTILE, "why": "[click](javascript:alert)"}]
    tensor = {"name": HOSTILE, "format": HOSTILE, "shape": [HOSTILE], "why": f"{HOSTILE}; {HOSTILE}"}
    beside = {"files": 2, "largest": HOSTILE}
    report["stages"][-1]["accounting"] = {**accounting(), "of": HOSTILE, "tensors": [tensor], "beside": beside}
    markdown, html = render(report)
    shown = Elements(html)
    assert {"script", "img", "iframe"}.isdisjoint(shown.tags)
    assert "svg" in shown.tags
    assert not any(name.startswith("on") for name, _ in shown.attributes)
    assert shown.text.count("<script>alert(1)</script>") > 10
    outside_code = [line for line in markdown.splitlines() if not line.startswith("    ")]
    assert not any("<script" in line or "](javascript" in line for line in outside_code)
    assert "\n# heading" not in markdown
    tables = [block for block in markdown.split("\n\n") if block.startswith("| ")]
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_the_page_fetches_nothing() -> None:
    _, html = render(finished())
    shown = Elements(html)
    assert {"link", "script", "img", "iframe", "object"}.isdisjoint(shown.tags)
    assert "url(http" not in html
    assert "://" not in html
    targets = [value for name, value in shown.attributes if name in ("href", "src", "action")]
    assert all(value is not None and value.startswith("#") for value in targets)
    ids = [value for name, value in shown.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in targets if value} <= set(ids)


def test_what_was_left_out_is_named_once() -> None:
    report = finished()
    report["model"]["left_out"] = ["pooler.weight", "search"]
    markdown, _ = render(report)
    section = markdown[markdown.index("## Skipped") : markdown.index("## Clean hands")]
    assert section.count("pooler.weight") == section.count("search") == 1


def test_figures_need_both_axes() -> None:
    report = finished()
    assert render(report)[1].count("<svg") == 1
    report["stages"][1]["latency"]["single"] = {"ratio": 2.0}
    assert render(report)[1].count("<svg") == 2
    for entry in report["stages"]:
        del entry["accuracy"]
    assert render(report)[1].count("<svg") == 0


def test_texts_shared_with_test_are_a_warning_at_the_top() -> None:
    report = finished()
    assert "Warning" not in render(report)[0]
    report["data"]["overlaps"]["texts~test"] = 12
    markdown, html = render(report)
    warning = "12 texts of test are also in texts"
    assert warning in markdown[: markdown.index("## Stages")]
    assert html.index(warning) < html.index('class="verdict')


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "met"),
        ({"budgets": [{"met": True}, {"met": None}]}, "not proven"),
        ({"budgets": [{"met": False, "state": "not proven"}]}, "not proven"),
        ({"budgets": [{"met": None}, {"met": False}]}, "missed"),
        ({"budgets": []}, "no budget"),
        ({"budgets": [], "met": False}, "failed"),
    ],
)
def test_the_verdict_in_a_word(change: dict[str, Any], state: str) -> None:
    report = finished()
    report["verdict"] |= change
    assert verdict_state(report) == state
    report["stages"].pop()
    assert verdict_state(report) == "unfinished"


def test_details_become_lines_and_tables() -> None:
    report = finished()
    report["stages"][1]["details"] |= {
        "kept_layers": [0, 5],
        "neurons": [1536, 1504],
        "calibration": {"fisher": {"texts": 512, "tokens": 21034}},
        "output_error": [{"layer": 0, "part": "mixer", "before": 0.25}, {"layer": 5, "after": 0.125}],
        "skipped": {},
        "decoder": {"kept_layers": [1], "heads": [4], "cross_heads": [2], "neurons": [96]},
    }
    markdown, _ = render(report)
    section = markdown[markdown.index("### prune") : markdown.index("### quantize")]
    assert "- options: cost 0.5\n- time: 12.3 s\n" in section
    assert "- calibration: fisher: tokens: 21,034\n" in section
    assert "- skipped: none\n" in section
    assert "| Layer | layers | heads |\n| --- | ---: | ---: |\n| 0 | 0 | 3 (0-2) |\n| 1 | 5 | 1 (7) |\n" in section
    assert "| 1 | 5 | 1504 |" in section
    assert "| Layer | kept layers | heads | cross heads | neurons |" in section
    assert "| 0 | 1 | 4 | 2 | 96 |" in section
    assert "| layer | part | before | after |" in section
    assert "| 5 | - | - | 0.125 |" in section


def test_forms_of_the_graph_are_listed_with_their_times() -> None:
    report = finished()
    speed = {"ratio": 0.9, "low": 0.8, "high": float("nan")}
    timed = {"choice": "norm", "value": "skip", "taken": False, "why": "not proven to be faster"}
    report["stages"][1]["forms"] = {
        "forms": {"layout": "packed", "norm": "separate"},
        "decisions": [
            {**timed, "speed": speed, "against": "separate", "rounds": 7},
            {"choice": "gelu", "value": "erf", "taken": False, "why": "not offered: there is no GELU"},
        ],
        "workloads": ["sorted: 6 batches"],
        "notes": ["from the cache, measured on a day"],
    }
    markdown, html = render(report)
    section = markdown[markdown.index("### prune") : markdown.index("### quantize")]
    assert "- graph forms: layout packed, norm separate\n" in section
    assert "- graph forms, how: from the cache, measured on a day, sorted: 6 batches\n" in section
    told = "0.900x [0.800, -] as fast as separate, 7 rounds: not proven to be faster"
    assert f"- graph forms, norm skip: {told}\n" in section
    assert "- graph forms, gelu erf: not offered: there is no GELU\n" in section
    assert told in html
    assert "graph forms" not in markdown.replace(section, "")


def test_numbers_are_written_as_promised() -> None:
    assert [decimals(value, 2) for value in (1234.567, -0.001, None, float("nan"), True, "5")] == [
        *("1,234.57", "0.00", "-", "-", "-", "-")
    ]
    assert decimals(0.0, 2, sign="+") == "0.00"
    assert decimals(0.456, 2, "x", "+") == "+0.46x"
    assert ranges([0, 1, 2, 5, 7, 8]) == ["0-2", "5", "7", "8"]
    assert [plain(value) for value in (True, 9999, 10000, 0.00025, 1234.5, [], ["a", 2])] == [
        *("yes", "9999", "10,000", "0.00025", "1,234", "-", "a, 2")
    ]
    long = plain([2 * i for i in range(500)])
    assert long.startswith("0, 2, 4, ")
    assert long.endswith(", … (500 in all)")
    assert len(long) < 130


def test_written_and_loaded_again(tmp_path: Path) -> None:
    report = finished()
    write_report(report, tmp_path)
    assert load_report(tmp_path) == report == load_report(tmp_path / "report.json")
    markdown, html = render(report)
    assert (tmp_path / "report.md").read_text() == markdown
    assert (tmp_path / "report.html").read_text() == html


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"format": 2}', "format is 2"),
        ('{"stages": []}', "format is None"),
        ('{"format": 1, "stages": {}}', "stages is not a list"),
        ('{"format": 1, "stages": [1]}', "stages is not a list of objects"),
        ('{"format": 1, "model": "m"}', "model is not an object"),
    ],
)
def test_what_is_no_report_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError, match=said) as caught:
        load_report(tmp_path)
    assert str(tmp_path / "report.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"report\.json: No space left"):
        write_report(finished(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_runs_beside_each_other() -> None:
    other = finished()
    other["stages"][-1]["bytes"] = 30_300_000
    other["threads"] = 4
    table = compare_reports({"runs/a": finished(), "b|c": other, "unfinished": interrupted()})
    assert table.startswith("|  | runs/a | b\\|c | unfinished |\n| --- | ---: | ---: | ---: |\n")
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in table.splitlines() if "|" in line}
    assert cells["Verdict"] == ["Budget met", "Budget met", "Run not finished |"]
    assert cells["Size"][:2] == ["17.6 MB (5.15x smaller than 90.9 MB)", "30.3 MB (3.00x smaller than 90.9 MB)"]
    assert cells["Speed-up, mixed"][0] == "9.10x (95 % interval [9.00, 9.30])"
    assert "compare ratios, not times" in table
    assert "different baselines" not in table
    assert "compare ratios" not in compare_reports({"a": finished(), "b": finished()})


def test_only_reports_are_compared() -> None:
    with pytest.raises(InputError, match=r"^b: not a slimformer report"):
        compare_reports({"a": finished(), "b": json.loads("{}")})
