"""Vocabularies of which one is the first part of the other: what both share, what is learnt, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import TOKENIZER, VOCAB, VOCAB_SIZE, pair_data, tiny, translator
from torch import Tensor

from slimformer.compress import teacher_tokens
from slimformer.compress.distill import Distill
from slimformer.compress.step import StepContext
from slimformer.compress.vocabularies import shared_rows
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import TextData, TextRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.tokenizer import wordpiece_from_vocab


def widened(model: Checkpoint, words: str = "zebra\n") -> Checkpoint:
    """The model with more entries behind its own, whose rows are large."""
    more, config = words.count("\n"), model.config
    config = replace(config, embedding=replace(config.embedding, vocab_size=VOCAB_SIZE + more))
    if config.target is not None:
        config = replace(config, target=replace(config.target, vocab_size=VOCAB_SIZE + more))

    def grown(value: Tensor) -> Tensor:
        rows = torch.full((more, *value.shape[1:]), 3.0)
        return torch.cat([value, rows]) if value.shape[:1] == (VOCAB_SIZE,) else value

    state = {name: grown(value) for name, value in model.state.items()}
    return replace(model, config=config, state=state, tokenizer=wordpiece_from_vocab(VOCAB + words)).check("widened")


@pytest.mark.parametrize("model", [tiny(), translator(), translator(encoder=0)], ids=["encoder", "both", "decoder"])
def test_a_first_part_is_shared(model: Checkpoint) -> None:
    assert shared_rows(model, model) == VOCAB_SIZE
    assert shared_rows(model, widened(model)) == VOCAB_SIZE
    with pytest.raises(InputError, match=r"1 of the student's \d+ vocabulary entries are not .* such as 'zebra'"):
        shared_rows(widened(model), model)
    other = replace(model, tokenizer=TOKENIZER.replace('"sheet"', '"sheep"'))
    with pytest.raises(InputError, match="such as 'sheet'"):
        shared_rows(model, other)


@pytest.mark.parametrize("encoder", [0, 1])
def test_a_student_learns_what_the_shared_part_says(encoder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A student that is its teacher but for the entries behind its own has nothing left to learn."""
    monkeypatch.setattr(teacher_tokens, "LIKELIEST", 10_000)
    model = translator() if encoder else translator(encoder=0)
    data: Any = pair_data()
    if not encoder:
        rows = tuple(TextRow(pair.source, pair.group) for pair in data.train)
        data = TextData(rows, rows, rows, ())
    step = Distill(steps=1, labels=0.0, beams=0, batch_tokens=400)
    assert step(model, StepContext(data, teacher=widened(model))).details["losses"][0] == pytest.approx(0, abs=1e-5)


def test_what_a_teacher_writes_beside_the_shared_part_is_left_out() -> None:
    model = translator()
    teacher = widened(model)
    details = Distill(steps=1, beams=2)(model, StepContext(pair_data(), teacher=teacher)).details
    texts = StepContext(pair_data()).training_texts()
    assert details["outside_vocabulary"] > 0
    assert details["pairs"] + details["unfinished"] + details["outside_vocabulary"] == len(texts)
