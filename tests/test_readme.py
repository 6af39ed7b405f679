import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from tiny import search_data, tiny

from slimformer.compress import latencies
from slimformer.compress.distill import Distill
from slimformer.compress.step import StepResult
from slimformer.export import form_times

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def write_search_data(folder: Path) -> None:
    folder.mkdir()
    data = search_data()
    tables = {"pages": data.pages, "queries-valid": data.valid, "queries-test": data.test}
    rows = {name: [asdict(row) for row in table] for name, table in tables.items()}
    rows["texts"] = [{"text": text} for text in data.texts]
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_python_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both snippets as they stand, on a tiny model; training and long timing are cut short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Distill, "__call__", lambda self, checkpoint, context: StepResult(checkpoint))
    monkeypatch.setattr(form_times, "SECONDS", 0.0)
    monkeypatch.setattr(latencies, "compare", partial(latencies.compare, rounds=1, processes=1, minimum=0.0))
    tiny().save("my-encoder")
    write_search_data(tmp_path / "my-data")
    compress_snippet, deploy_snippet = SNIPPETS
    exec(compress_snippet, {})
    assert "Interval(difference=" in capsys.readouterr().out
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/bundle").symlink_to(tmp_path / "out/bundle")
    exec(deploy_snippet, {})
    assert capsys.readouterr().out == "(2, 16)\n"


def test_commands_of_the_readme_exist() -> None:
    from slimformer.cli import main

    blocks = "".join(re.findall(r"```\n(.*?)```", README, flags=re.S))
    named = set(re.findall(r"^slimformer (\w+)", blocks, flags=re.M))
    assert named
    assert named <= set(main.commands)
