"""What a teacher writes for the training sources, to be learnt in the place of the references.

Sequence-level distillation (Kim & Rush 2016, section 3.2): the best of the teacher's beams stands for all that it might
write. The teacher decodes in onnxruntime, batch by batch; every batch is a line of the file that keeps them, so that a
run which was broken off goes on after the last whole line.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..export.bundle import export
from ..export.runtime import load_bundle
from ..transformer.checkpoint import Checkpoint
from ..transformer.files import writing
from ..transformer.progress import Progress
from ..transformer.tokenizer import length_batches
from .teacher import digest

BATCH = 32


def teacher_texts(
    teacher: Checkpoint, sources: Sequence[list[int]], *, beams: int, folder: Path | None, progress: Progress
) -> list[list[int]]:
    """The best of the teacher's beams for each source, as token ids up to the end token.

    A text has at most twice its batch's longest source and 10 tokens; one that was cut there has no end token.

    Args:
        teacher: a translator or summarizer.
        sources: token ids.
        beams: of the search; 1 is greedy.
        folder: where to keep what is written; None: in memory.
        progress: told of the texts done.
    """
    place = None if folder is None else folder / f"texts-{digest(teacher, sources)}-{beams}.jsonl"
    done = [] if place is None else _read(place)
    batches = length_batches([len(one) for one in sources], BATCH)
    most = teacher.config.decoder_embedding.positions
    with tempfile.TemporaryDirectory(prefix="slimformer-") as temporary:
        bundle = load_bundle(export(teacher, Path(temporary) / "teacher"))
        progress.start(f"the teacher writes, {beams} beams", len(sources), "texts")
        progress.advance(sum(map(len, done)))
        for batch in batches[len(done) :]:
            chosen = [sources[i] for i in batch]
            written = bundle.write(chosen, min(most, 2 * len(chosen[-1]) + 10), beams=beams)
            if place is not None:
                _append(place, written)
            done.append(written)
            progress.advance(len(batch))
        progress.done()
    texts: list[list[int]] = [[] for _ in sources]
    for batch, written in zip(batches, done, strict=True):
        for i, text in zip(batch, written, strict=True):
            texts[i] = text
    return texts


def _read(place: Path) -> list[list[list[int]]]:
    """The whole lines of a file; what was cut off behind them is cut off for good."""
    if not place.is_file():
        return []
    whole = place.read_bytes().rpartition(b"\n")[0]
    with writing(place), place.open("r+b") as file:
        file.truncate(len(whole) + bool(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _append(place: Path, written: list[list[int]]) -> None:
    with writing(place), place.open("a", encoding="utf-8") as file:
        file.write(json.dumps(written) + "\n")
