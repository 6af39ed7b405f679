"""How the command line shows how far long work is, on stderr.

On a terminal there is a bar with rate, remaining time and a note; elsewhere a line when work begins, one about every
ten seconds, and one when it ends. Work that ends within two seconds leaves no trace.
"""

import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from .transformer.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

QUIET_SECONDS = 2.0
LINE_SECONDS = 10.0


class Reporter(Progress):
    """A `Progress` that must be closed, whatever ends the work."""

    def close(self) -> None:
        """Forget the work in progress; the terminal is as it was."""


def reporter(stream: TextIO | None = None) -> Reporter:
    """Bars on a terminal, lines elsewhere; on stderr unless another stream is given."""
    stream = sys.stderr if stream is None else stream
    return Bar(stream) if stream.isatty() else Lines(stream)


class Lines(Reporter):
    """Plain lines; the first one appears when the work has taken two seconds, whether it has advanced or not."""

    def __init__(self, stream: TextIO, *, quiet: float = QUIET_SECONDS, every: float = LINE_SECONDS) -> None:
        self.stream, self.quiet, self.every = stream, quiet, every
        self.lock = threading.Lock()
        self.timer: threading.Timer | None = None
        self.title, self.unit, self.total, self.count = "", "", None, 0  # type: str, str, int | None, int
        self.begun = self.told = 0.0

    def start(self, title: str, total: int | None, unit: str) -> None:
        """See `Progress.start`."""
        self.close()
        self.title, self.total, self.unit, self.count = title, total, unit, 0
        self.begun, self.told = time.monotonic(), 0.0
        self.timer = threading.Timer(self.quiet, self._announce)
        self.timer.daemon = True
        self.timer.start()

    def _announce(self) -> None:
        with self.lock:
            if self.timer is not None and not self.told:
                self._tell(f"{self.title} …")

    def advance(self, n: int = 1, note: str = "") -> None:
        """See `Progress.advance`."""
        with self.lock:
            self.count += n
            if self.told and time.monotonic() - self.told >= self.every:
                self._tell(f"{self.title}: {state(self.count, self.total, self.unit, self._seconds(), note)}")

    def done(self, note: str = "") -> None:
        """See `Progress.done`."""
        with self.lock:
            if self.timer is not None and self._seconds() >= self.quiet:
                self._tell(finished(self.title, self.count, self.unit, self._seconds(), note))
        self.close()

    def close(self) -> None:
        """See `Reporter.close`."""
        with self.lock:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = None

    def _seconds(self) -> float:
        return time.monotonic() - self.begun

    def _tell(self, line: str) -> None:
        self.told = time.monotonic()
        self.stream.write(f"{line}\n")
        self.stream.flush()


class Bar(Reporter):
    """A bar that vanishes when the work is done; work of more than two seconds leaves one line."""

    def __init__(self, stream: TextIO, *, quiet: float = QUIET_SECONDS) -> None:
        self.stream, self.quiet = stream, quiet
        self.bars: Bars | None = None
        self.task: TaskID | None = None
        self.title, self.unit, self.count, self.begun, self.note = "", "", 0, 0.0, ""

    def start(self, title: str, total: int | None, unit: str) -> None:
        """See `Progress.start`."""
        self.close()
        self.title, self.unit, self.count, self.begun, self.note = title, unit, 0, time.monotonic(), ""
        self.bars = bars(self.stream)
        self.task = self.bars.add_task(title, total=total, unit=unit, note="")
        self.bars.start()

    def advance(self, n: int = 1, note: str = "") -> None:
        """See `Progress.advance`."""
        self.count, self.note = self.count + n, note or self.note
        if self.bars is not None and self.task is not None:
            self.bars.update(self.task, advance=n, note=self.note)

    def done(self, note: str = "") -> None:
        """See `Progress.done`."""
        shown, seconds = self.bars is not None, time.monotonic() - self.begun
        self.close()
        if shown and seconds >= self.quiet:
            self.stream.write(finished(self.title, self.count, self.unit, seconds, note or self.note) + "\n")
            self.stream.flush()

    def close(self) -> None:
        """See `Reporter.close`."""
        if self.bars is not None:
            self.bars.stop()
        self.bars = self.task = None


def bars(stream: TextIO) -> "Bars":
    """rich's progress display: title, bar, count, rate, time left, note."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{rate(speed)} {task.fields['unit']}/s")

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
        console=Console(file=stream),
        transient=True,
    )


def state(count: int, total: int | None, unit: str, seconds: float, note: str) -> str:
    """How far work is: `120 of 900 steps (13 %), 2.4 steps/s, 5:25 left, loss 0.0812`."""
    speed = count / max(seconds, 1e-9)
    parts = [f"{count:,} {unit}" if total is None else f"{count:,} of {total:,} {unit}"]
    if total:
        parts[0] += f" ({100 * count // total} %)"
    if count:
        parts.append(f"{rate(speed)} {unit}/s")
    if count and total and total > count:
        left = round((total - count) / speed)
        parts.append(f"{left // 60}:{left % 60:02d} left")
    return ", ".join([*parts, note] if note else parts)


def finished(title: str, count: int, unit: str, seconds: float, note: str) -> str:
    """The line that work leaves: `distill: 900 steps in 375.2 s, loss 0.0312`."""
    what = f"{count:,} {unit} in " if count else ""
    return f"{title}: {what}{seconds:.1f} s" + (f", {note}" if note else "")


def rate(value: float) -> str:
    """Units a second with two or three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
