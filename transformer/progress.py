"""How long work reports that it goes on; the command line draws it, the library never prints."""

from typing import Protocol


class Progress(Protocol):
    """A listener to one piece of work at a time."""

    def start(self, title: str, total: int | None, unit: str) -> None:
        """Begin work of `total` units (None: unknown)."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count `n` more units; `note` is a short state such as the loss."""

    def done(self, note: str = "") -> None:
        """End the work begun last."""


class Silent:
    """A listener that shows nothing."""

    def start(self, title: str, total: int | None, unit: str) -> None:
        """See `Progress.start`."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """See `Progress.advance`."""

    def done(self, note: str = "") -> None:
        """See `Progress.done`."""


SILENT: Progress = Silent()
