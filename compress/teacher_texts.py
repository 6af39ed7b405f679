"""What a teacher writes for the training sources, to be learnt in the place of the references.

Sequence-level distillation (Kim & Rush 2016, section 3.2): the best of the teacher's beams stands for all that it might
write; or that one of its beams which is nearest to the reference (sequence-level interpolation, section 3.3). The
teacher decodes in onnxruntime, batch by batch; every batch is a line of the file that keeps them, so that a run which
was broken off goes on after the last whole line.
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..export.bundle import export
from ..export.runtime import load_bundle
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import LanguageHead
from ..transformer.files import writing
from ..transformer.progress import Progress
from ..transformer.text_metrics import sentence_bleu
from ..transformer.tokenizer import TextEncoder, length_batches
from .teacher import digest

BATCH = 32


@dataclass(frozen=True)
class References:
    """What is to be written for each source (None: not known), and how ids are read.

    Of beams that end, the one with the greatest BLEU of the sentence, smoothed as sacrebleu does, is taken; of equal
    ones the one that the teacher holds likelier, which is also taken where there is no reference.
    """

    texts: Sequence[str | None]
    encoder: TextEncoder

    def best(self, source: int, beams: Sequence[list[int]], end: int) -> list[int]:
        """Of the beams of a source, best first."""
        ended, reference = [ids for ids in beams if ids[-1:] == [end]], self.texts[source]
        if reference is None or not ended:
            return beams[0]
        scores = sentence_bleu(self.encoder.decode_batch(ended), reference)
        return ended[scores.index(max(scores))]

    def digest(self) -> str:
        """Of the texts."""
        return hashlib.sha256(repr(list(self.texts)).encode()).hexdigest()[:16]


def teacher_texts(
    teacher: Checkpoint,
    sources: Sequence[list[int]],
    *,
    beams: int,
    references: References | None = None,
    folder: Path | None,
    progress: Progress,
) -> list[list[int]]:
    """The best of the teacher's beams for each source, as token ids up to the end token.

    A text has at most twice its batch's longest source and 10 tokens; one that was cut there has no end token.

    Args:
        teacher: a translator or summarizer.
        sources: token ids.
        beams: of the search; 1 is greedy.
        references: by which one of the beams is chosen; None: the best is taken.
        folder: where to keep what is written; None: in memory.
        progress: told of the texts done.
    """
    wish = f"{beams}" if references is None else f"{beams}-{references.digest()}"
    place = None if folder is None else folder / f"texts-{digest(teacher, sources)}-{wish}.jsonl"
    done = [] if place is None else _read(place)
    batches = length_batches([len(one) for one in sources], BATCH)
    most, head = teacher.config.decoder_embedding.positions, teacher.config.head
    assert isinstance(head, LanguageHead)
    end = head.end_id
    with tempfile.TemporaryDirectory(prefix="slimformer-") as temporary:
        bundle = load_bundle(export(teacher, Path(temporary) / "teacher"))
        progress.start(f"the teacher writes, {beams} beams", len(sources), "texts")
        progress.advance(sum(map(len, done)))
        for batch in batches[len(done) :]:
            chosen = [sources[i] for i in batch]
            found = bundle.write_all(chosen, min(most, 2 * len(chosen[-1]) + 10), beams=beams)
            written = [of_source[0] for of_source in found]
            if references is not None:
                written = [references.best(i, of_source, end) for i, of_source in zip(batch, found, strict=True)]
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
