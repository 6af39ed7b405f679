"""Writing whole or not at all: refusals, full disks, and a kill in the middle."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slimformer.transformer import files
from slimformer.transformer.errors import InputError
from slimformer.transformer.files import atomic_directory, replace_directory, write_file


def tree(path: Path) -> dict[str, str]:
    """Every file below a folder and its text; hidden ones too."""
    return {str(file.relative_to(path)): file.read_text() for file in sorted(path.rglob("*")) if file.is_file()}


def write(path: Path, text: Any, *, force: bool = False) -> None:
    with atomic_directory(path, force=force) as partial:
        write_file(partial / "a.txt", str(text))
        (partial / "folder").mkdir()
        (partial / "folder" / "b.txt").write_text(text * 2)


def test_a_new_directory_and_its_parents(tmp_path: Path) -> None:
    write(tmp_path / "x" / "y" / "out", "new")
    assert tree(tmp_path) == {"x/y/out/a.txt": "new", "x/y/out/folder/b.txt": "newnew"}


def test_nothing_stands_there_before_the_end(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "out") as partial:
        assert partial.parent == tmp_path
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_what_exists_is_refused_and_untouched(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "directory":
        write(out, "old")
    elif kind == "file":
        out.write_text("old")
    else:
        out.symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path)
    with pytest.raises(InputError, match=r"out exists; choose another output or add --force"), atomic_directory(out):
        raise AssertionError("the block must not run")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_force_replaces_all_of_it(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "directory":
        write(out, "old")
        (out / "more.txt").write_text("old")
    elif kind == "file":
        out.write_text("old")
    else:
        write(tmp_path / "elsewhere", "kept")
        out.symlink_to(tmp_path / "elsewhere")
    write(out, "new", force=True)
    assert {name: text for name, text in tree(tmp_path).items() if not name.startswith("elsewhere")} == {
        "out/a.txt": "new",
        "out/folder/b.txt": "newnew",
    }
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "out"][kind != "link" :]
    assert kind != "link" or (tmp_path / "elsewhere" / "a.txt").read_text() == "kept"


def test_an_error_in_the_block_leaves_the_old_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "old")
    with pytest.raises(TypeError, match="data must be str"):
        write(out, 3, force=True)  # fails at the second file
    assert tree(tmp_path) == {"out/a.txt": "old", "out/folder/b.txt": "oldold"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_injected_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write(out, "old")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"cannot write .*a.txt: No space left on device"):
        write(out, "new", force=True)
    with pytest.raises(InputError, match=r"cannot write .*a.txt: No space left on device"):
        write_file(out / "a.txt", "new")
    assert tree(tmp_path) == {"out/a.txt": "old", "out/folder/b.txt": "oldold"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("what", ["directory", "file"])
def test_a_file_size_limit(what: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.bin").write_text("old")
    code = f"""
import resource, sys
from pathlib import Path
from slimformer.transformer.errors import InputError
from slimformer.transformer.files import atomic_directory, write_file
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
out = Path({str(tmp_path / "out")!r})
try:
    if {what!r} == "file":
        write_file(out / "a.bin", b"new" * 4096)
    else:
        with atomic_directory(out, force=True) as partial:
            write_file(partial / "small.bin", b"new")
            write_file(partial / "a.bin", b"new" * 4096)
except InputError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("cannot write ")
    assert run.stdout.endswith(": File too large\n")
    assert tree(tmp_path) == {"out/a.bin": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_kill_in_the_middle_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    code = f"""
import time
from pathlib import Path
from slimformer.transformer.files import atomic_directory, write_file
with atomic_directory(Path({str(tmp_path / "out")!r}), force=True) as partial:
    write_file(partial / "a.txt", "new")
    print("half", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    assert tree(tmp_path / "out") == {"a.txt": "old", "folder/b.txt": "oldold"}
    write(tmp_path / "out", "newer", force=True)
    assert tree(tmp_path / "out")["a.txt"] == "newer"


def test_a_rename_that_fails_brings_the_old_one_back(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(FileNotFoundError):
        replace_directory(tmp_path / "nowhere", tmp_path / "out")
    assert tree(tmp_path) == {"out/a.txt": "old", "out/folder/b.txt": "oldold"}


def test_the_old_one_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "old")
    seen: list[dict[str, str]] = []
    remove = files.shutil.rmtree
    monkeypatch.setattr(
        files.shutil,
        "rmtree",
        lambda path, **options: (
            (seen.append(tree(tmp_path / "out")), remove(path, **options)) if ".old" in path.name else None
        ),
    )
    write(tmp_path / "out", "new", force=True)
    assert [found["a.txt"] for found in seen] == ["new"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="no name of its own"), atomic_directory(Path(path), force=True):
        raise AssertionError("the block must not run")


def test_names_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="File name too long"):
        write(tmp_path / ("x" * 300), "")
    with pytest.raises(InputError, match=r"cannot write .*file/out"):
        write(tmp_path / "file" / "out", "")
    with pytest.raises(InputError, match=r"cannot write .*missing/a.txt: No such file"):
        write_file(tmp_path / "missing" / "a.txt", "")


def test_write_file_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_file(path, "é")
    assert path.read_bytes() == "é".encode()
    write_file(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_write_file_never_shows_half(tmp_path: Path) -> None:
    """A reader sees the old or the new content, at any time."""
    path, sizes = tmp_path / "a", set()
    write_file(path, b"x" * 10)
    code = f"""
from pathlib import Path
from slimformer.transformer.files import write_file
for i in range(300):
    write_file(Path({str(path)!r}), b"x" * (10 + i % 2 * 100_000))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            sizes.add(len(path.read_bytes()))
    assert process.returncode == 0
    assert sizes == {10, 100_010}
