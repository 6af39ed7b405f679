"""Progress on stderr: lines where there is no terminal, a bar where there is one, nothing for what is short."""

import io
import re
import time

import pytest

from slimformer.terminal import Bar, Lines, finished, reporter, state


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_stream_decides() -> None:
    assert isinstance(reporter(io.StringIO()), Lines)
    assert isinstance(reporter(Terminal()), Bar)


def test_short_work_leaves_nothing() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.start("teacher", 3, "texts")
    lines.advance(3)
    lines.done()
    assert stream.getvalue() == ""


def test_long_work_says_when_it_begins_goes_on_and_ends() -> None:
    stream = io.StringIO()
    lines = Lines(stream, quiet=0.05, every=0.05)
    lines.start("distill", 40, "steps")
    time.sleep(0.12)
    assert stream.getvalue() == "distill …\n"  # though nothing has advanced
    lines.advance(note="loss 0.5")
    lines.advance(9)
    time.sleep(0.06)
    lines.advance(10, note="loss 0.4")
    lines.done("loss 0.3")
    begun, first, second, end = stream.getvalue().splitlines()
    assert begun == "distill …"
    assert re.fullmatch(r"distill: 1 of 40 steps \(2 %\), [\d.]+ steps/s, 0:0\d left, loss 0\.5", first)
    assert second.startswith("distill: 20 of 40 steps (50 %), ")
    assert re.fullmatch(r"distill: 20 steps in 0\.\d s, loss 0\.3", end)


def test_work_that_is_broken_off_says_no_more() -> None:
    stream = io.StringIO()
    lines = Lines(stream, quiet=0.05)
    lines.start("distill", 40, "steps")
    lines.close()
    time.sleep(0.1)
    lines.done()
    assert stream.getvalue() == ""


def test_a_bar_shows_title_count_and_note_and_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    bar = Bar(stream, quiet=0.05)
    bar.start("distill [1]", 40, "steps")
    bar.advance(10, note="loss [0.5]")
    time.sleep(0.15)
    bar.done()
    bar.done()
    shown = stream.getvalue()
    assert "10/40" in shown
    assert "loss [0.5]" in shown
    assert shown.count("distill [1]: 10 steps in 0.") == 1
    assert shown.endswith(", loss [0.5]\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((120, 900, "steps", 50.0, "loss 0.1"), "120 of 900 steps (13 %), 2.4 steps/s, 5:25 left, loss 0.1"),
        ((0, 900, "steps", 3.0, ""), "0 of 900 steps (0 %)"),
        ((5000, None, "texts", 10.0, ""), "5,000 texts, 500 texts/s"),
        ((7, 7, "texts", 70.0, ""), "7 of 7 texts (100 %), 0.10 texts/s"),
    ],
)
def test_states(arguments: tuple[int, int | None, str, float, str], expected: str) -> None:
    assert state(*arguments) == expected


def test_the_last_line() -> None:
    assert finished("train", 1200, "steps", 61.25, "") == "train: 1,200 steps in 61.2 s"
    assert finished("export", 0, "", 3.0, "") == "export: 3.0 s"
