"""Plain parallel files: line i of the source file becomes line i of the target file.

The form that parallel corpora come in (OPUS, WMT). Lines end in a line feed, also with a carriage return before it;
other line separators of Unicode are text. Files are UTF-8 and may be gzipped (`.gz`).
"""

from pathlib import Path

from .errors import InputError
from .splits import Pair
from .tables import read_text, shown, some

__all__ = ["read_parallel"]


def read_parallel(source_path: str | Path, target_path: str | Path) -> tuple[Pair, ...]:
    """Read the pairs of two files; a pair's group is the number of its line, from 1.

    Raises InputError for a file that cannot be read or has no line, for unequal numbers of lines, with the first line
    that has no partner, and for empty lines, naming up to five of both files.
    """
    paths = Path(source_path), Path(target_path)
    sources, targets = (_lines(path) for path in paths)
    if len(sources) != len(targets):
        raise InputError(_unequal(paths, sources, targets))
    rows = list(enumerate(zip(sources, targets, strict=True), start=1))
    empty = [f"{path}, row {i}" for i, row in rows for path, line in zip(paths, row, strict=True) if not line.strip()]
    if empty:
        verb = "is" if len(empty) == 1 else "are"
        raise InputError(f"{some(empty, '; ')} {verb} empty: fill the line or remove it from both files")
    return tuple(Pair(source, target, str(number)) for number, (source, target) in rows)


def _lines(path: Path) -> list[str]:
    text = read_text(path)
    if not text:
        raise InputError(f"{path} has no lines: it is empty")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _unequal(paths: tuple[Path, Path], sources: list[str], targets: list[str]) -> str:
    """Both numbers of lines, and the first line of the longer file that the shorter one has no partner for."""
    shorter = min(len(sources), len(targets))
    longer, lines = (paths[0], sources) if len(sources) > shorter else (paths[1], targets)
    counts = f"{paths[0]} has {len(sources)} lines and {paths[1]} has {len(targets)}"
    return f"{counts}: row {shorter + 1} of {longer}, {shown(lines[shorter])}, has no partner"
