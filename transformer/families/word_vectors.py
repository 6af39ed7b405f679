"""Pretrained word vectors as the first embeddings of a new model.

The text format of word2vec, GloVe and fastText: a word and its D numbers a line, with spaces between; the first line
may hold the number of words and D. A token takes the vector of the word that it spells, where there is one.
"""

import gzip
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import Checkpoint
from ..errors import InputError
from ..tokenizer import TextEncoder

TABLES = ("embeddings.tokens.weight", "target.tokens.weight")


def with_vectors(checkpoint: Checkpoint, path: str | Path) -> Checkpoint:
    """The float model with the vectors of words in its tables of tokens.

    They are scaled together to the root mean square of the rows that they replace, so that the first steps meet
    activations of the usual size. The provenance `vectors` counts the tokens that got one.

    Args:
        checkpoint: a new model; every table of tokens in it is filled.
        path: the file, also with `.gz`.

    Raises:
        InputError: the file cannot be read, a line has another width than the model, or no token is a word of it.
    """
    width = checkpoint.config.d_model
    tokens = _tokens(checkpoint)
    found: dict[int, Tensor] = {}
    for word, vector in _rows(Path(path), width, tokens):
        for token in tokens[word]:
            found.setdefault(token, vector)
    if not found:
        raise InputError(f"{path}: none of its words is a token of the vocabulary: is it of the same language?")
    places = torch.tensor(sorted(found))
    vectors = torch.stack([found[int(place)] for place in places])
    state = dict(checkpoint.state)
    for name in TABLES:
        if name in state:
            table = state[name].clone()
            table[places] = vectors * (_size(table[places]) / max(_size(vectors), 1e-30))
            state[name] = table
    notes = {"file": Path(path).name, "tokens": len(found), "of": sum(map(len, tokens.values()))}
    return replace(checkpoint, state=state).with_provenance(vectors=notes)


def _size(rows: Tensor) -> float:
    return math.sqrt(float(rows.double().square().mean()))


def _tokens(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Ids of the tokens by the word that they spell, without the space before it."""
    encoder = TextEncoder(checkpoint.tokenizer, checkpoint.config.text.max_length)
    spelled: dict[str, list[int]] = {}
    for number, text in enumerate(encoder.decode_batch([[i] for i in range(encoder.vocab_size)])):
        if word := text.strip():
            spelled.setdefault(word, []).append(number)
    return spelled


def _rows(path: Path, width: int, wanted: dict[str, list[int]]) -> Iterator[tuple[str, Tensor]]:
    """Words that are wanted, and their vectors (D,)."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                word, *values = line.rstrip().split(" ")
                if number == 1 and len(values) == 1 and word.isdecimal():
                    _check_width(path, number, int(values[0]), width)
                    continue
                _check_width(path, number, len(values), width)
                if word in wanted:
                    yield word, _vector(path, number, values)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _check_width(path: Path, number: int, found: int, width: int) -> None:
    if found != width:
        raise InputError(f"{path}, line {number}: {found} numbers a word, the model has d_model {width}")


def _vector(path: Path, number: int, values: list[str]) -> Tensor:
    try:
        vector = torch.tensor([float(value) for value in values])
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not a word and its numbers ({error})") from error
    if not bool(torch.isfinite(vector).all()):
        raise InputError(f"{path}, line {number}: a number is not finite")
    return vector
