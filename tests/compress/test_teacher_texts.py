"""What a teacher writes: the best beam of PyTorch's own search, kept batch by batch and taken up after the last one."""

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from models import translator

from slimformer.compress import teacher_texts as module
from slimformer.compress.teacher_texts import References, teacher_texts
from slimformer.export.bundle import export
from slimformer.export.runtime import Bundle, load_bundle
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, generate
from slimformer.transformer.progress import SILENT

SOURCES = [[5, 6, 7, 3], [8, 3], [9, 10, 11, 12, 13, 3], [14, 15, 3], [6, 3]]


def written(folder: Path | None, beams: int = 3, references: References | None = None) -> list[list[int]]:
    ways: dict[str, Any] = {"folder": folder, "progress": SILENT}
    return teacher_texts(translator(), SOURCES, beams=beams, references=references, **ways)


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
    write = Bundle.write_all

    def counted(self: Bundle, sources: list[list[int]], *rest: int, **how: int) -> list[list[list[int]]]:
        calls.append(sources)
        return write(self, sources, *rest, **how)

    monkeypatch.setattr(Bundle, "write_all", counted)
    assert written(tmp_path, 3) == whole
    assert [len(sources) for sources in calls] == [2, 1]
    assert kept.read_bytes() == b"".join(lines)
    calls.clear()
    assert written(tmp_path, 3) == whole
    assert calls == []


def test_of_the_beams_the_one_nearest_to_the_reference_is_taken(tmp_path: Path) -> None:
    """Scored here by sacrebleu on all beams; without a reference, or where no beam ends, the best one stays."""
    encoder, bundle = translator().text_encoder(), load_bundle(export(translator(), tmp_path / "bundle"))
    found = [beams[0] for beams in (bundle.write_all([source], 22, beams=3) for source in SOURCES)]
    places = {i: [k for k, ids in enumerate(beams) if ids[-1:] == [3]] for i, beams in enumerate(found)}
    some = {i: ended for i, ended in places.items() if len(ended) > 1}
    assert some
    for i, ended in some.items():
        beams = found[i]
        references = References([encoder.decode(beams[ended[-1]]) if j == i else None for j in range(5)], encoder)
        scores = [sacrebleu.sentence_bleu(encoder.decode(beams[k]), [references.texts[i]]).score for k in ended]
        assert references.best(i, beams, 3) == beams[ended[scores.index(max(scores))]]
        assert max(scores) > scores[0]
        assert references.best((i + 1) % 5, beams, 3) == beams[0]
        assert references.best(i, [[5], [6]], 3) == [5]
    whole, chosen = written(tmp_path, 3), written(tmp_path, 3, references)
    assert [j for j in range(5) if whole[j] != chosen[j]] == [i]
    assert written(tmp_path, 3, References([None] * 5, encoder)) == whole
    assert len(list(tmp_path.glob("texts-*.jsonl"))) == 3


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        written(tmp_path / "missing")
