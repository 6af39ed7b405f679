"""Writing that either happens whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import InputError


@contextmanager
def atomic_directory(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary sibling of `path` to write into; it takes the name `path` when the block ends without an error.

    Raises:
        InputError: `path` exists and `force` is false; or the disk does not take what is written.
    """
    refuse_existing(path, force=force)
    if not path.name:
        raise InputError(f"{path} has no name of its own to write under; give a directory by name")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with writing(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with writing(path):
            yield partial
            replace_directory(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise InputError where `path` exists and may not be replaced."""
    if os.path.lexists(path) and not force:
        raise InputError(f"{path} exists; choose another output or add --force to replace it")


def replace_directory(new: Path, path: Path) -> None:
    """Give the directory `new` the name `path`; what stood there goes last, and comes back where that fails."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    if os.path.lexists(path):
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if os.path.lexists(old):
            old.rename(path)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file under a temporary name, then rename it.

    Raises:
        InputError: the disk does not take it; what stood at `path` is untouched.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal into an InputError that names `path`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
