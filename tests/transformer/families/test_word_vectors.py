"""Word vectors: whose row they take, their size, and files that are none."""

import gzip
import math
from pathlib import Path

import pytest
import torch

from slimformer.transformer.architecture import Architecture, new_model
from slimformer.transformer.errors import InputError
from slimformer.transformer.families.word_vectors import with_vectors
from slimformer.transformer.subwords import train_subwords
from slimformer.transformer.tokenizer import TextEncoder

TOKENIZER = train_subwords(["freeze the first row of the sheet", "the row the sheet Sheet"] * 3, vocab_size=320)
SHAPE = Architecture(encoder=1, decoder=1, width=4, heads=1, neurons=8, positions=16)
MODEL = new_model(SHAPE, TOKENIZER, 0)
LINES = "the 1 0 0 0\nsheet 0 2 0 0\nrow 0 0 -3 0\nabsent 9 9 9 9\nthe 5 5 5 5\n"
TABLE = "embeddings.tokens.weight"


def ids_of(word: str) -> list[int]:
    encoder = TextEncoder(TOKENIZER, 16)
    return [i for i in range(encoder.vocab_size) if encoder.decode([i]).strip() == word]


@pytest.mark.parametrize("name", ["v.txt", "v.txt.gz"])
@pytest.mark.parametrize("header", ["", "5 4\n"])
def test_tokens_take_the_vectors_of_their_words(name: str, header: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress((header + LINES).encode()) if name.endswith("gz") else (header + LINES).encode())
    made = with_vectors(MODEL, path).check("made")
    before, after = MODEL.state[TABLE], made.state[TABLE]
    rows_of = {"the": [1, 0, 0, 0], "sheet": [0, 2, 0, 0], "row": [0, 0, -3, 0]}
    wanted = {i: row for word, row in rows_of.items() for i in ids_of(word)}
    assert len(wanted) >= 3
    rows = torch.tensor([wanted[i] for i in sorted(wanted)], dtype=torch.float32)
    size = math.sqrt(float(before[sorted(wanted)].square().mean())) / math.sqrt(float(rows.square().mean()))
    torch.testing.assert_close(after[sorted(wanted)], rows * size)
    others = [i for i in range(len(before)) if i not in wanted]
    assert torch.equal(before[others], after[others])
    assert all(value is MODEL.state[key] for key, value in made.state.items() if key != TABLE)
    assert made.provenance["vectors"]["tokens"] == len(wanted)
    assert torch.equal(
        MODEL.state[TABLE], new_model(Architecture(1, 1, 4, 1, 8, positions=16), TOKENIZER, 0).state[TABLE]
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"the 1 2 3\n", "line 1: 3 numbers a word, the model has d_model 4"),
        (b"10 300\nthe 1\n", "line 1: 300 numbers a word"),
        (b"x 1 2 3 4\nthe 1 2 three 4\n", "line 2: not a word and its numbers"),
        (b"the 1 2 nan 4\n", "line 1: a number is not finite"),
        (b"zebra 1 2 3 4\n", "none of its words is a token"),
        (b"", "none of its words is a token"),
        (b"\xff\xfe 1 2 3 4\n", "cannot read"),
    ],
)
def test_files_that_are_none(content: bytes, line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        with_vectors(MODEL, tmp_path / "absent.txt")
    (tmp_path / "v.txt").write_bytes(content)
    with pytest.raises(InputError, match=line):
        with_vectors(MODEL, tmp_path / "v.txt")
