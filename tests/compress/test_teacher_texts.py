"""What a teacher writes: the best beam of PyTorch's own search, kept batch by batch and taken up after the last one."""

import json
from pathlib import Path

import pytest
from models import translator

from slimformer.compress import teacher_texts as module
from slimformer.compress.teacher_texts import teacher_texts
from slimformer.export.runtime import Bundle
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, generate
from slimformer.transformer.progress import SILENT

SOURCES = [[5, 6, 7, 3], [8, 3], [9, 10, 11, 12, 13, 3], [14, 15, 3], [6, 3]]


def written(folder: Path | None, beams: int = 3) -> list[list[int]]:
    return teacher_texts(translator(), SOURCES, beams=beams, folder=folder, progress=SILENT)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 2)


def test_it_is_what_pytorch_writes() -> None:
    model = translator().to_torch()
    batches = ((1, 4), (3, 0), (2,))  # in order of length, two at a time
    wanted = {}
    for beams in (1, 3):
        for batch in batches:
            longest = max(len(SOURCES[i]) for i in batch)
            options = Decoding(max_new_tokens=min(24, 2 * longest + 10), beams=beams)
            for i in batch:
                ids = generate(model, [SOURCES[i]], options).sequences[0, 0].tolist()
                wanted[i] = ids[: ids.index(3) + 1] if 3 in ids else ids
        assert written(None, beams) == [wanted[i] for i in range(len(SOURCES))]
    assert len({tuple(ids) for ids in wanted.values()}) > 2


def test_broken_off_it_goes_on_after_the_last_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(tmp_path, 3)
    kept = next(tmp_path.glob("texts-*-3.jsonl"))
    lines = kept.read_bytes().splitlines(keepends=True)
    assert [len(json.loads(line)) for line in lines] == [2, 2, 1]
    kept.write_bytes(lines[0] + lines[1][:4])
    calls = []
    write = Bundle.write

    def counted(self: Bundle, sources: list[list[int]], *rest: int, **how: int) -> list[list[int]]:
        calls.append(sources)
        return write(self, sources, *rest, **how)

    monkeypatch.setattr(Bundle, "write", counted)
    assert written(tmp_path, 3) == whole
    assert [len(sources) for sources in calls] == [2, 1]
    assert kept.read_bytes() == b"".join(lines)
    calls.clear()
    assert written(tmp_path, 3) == whole
    assert calls == []


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        written(tmp_path / "missing")
