"""Masked copies of texts: which tokens are masked, how many, without a label; tokenizers that cannot."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import LABELS, labelled_data, search_data, tiny, with_head

from slimformer.compress.distill import Distill
from slimformer.compress.examples import Examples, gather_examples, masked_copy
from slimformer.compress.step import StepContext
from slimformer.transformer.config import ClassificationHead
from slimformer.transformer.errors import InputError

MODEL, DATA = tiny(), search_data()
ENCODER = MODEL.text_encoder()
MASK = ENCODER.mask_id


def gathered(masked: float, seed: int = 0, **options: Any) -> Examples:
    return gather_examples(Distill(masked=masked, **options), MODEL, StepContext(DATA, seed=seed))


def test_a_copy_masks_its_share_of_the_tokens_between_start_and_end() -> None:
    row = [2, *range(10, 1010), 3]
    copy = masked_copy(row, {2, 3}, MASK, np.random.default_rng(0))
    hidden = [place for place, (one, other) in enumerate(zip(row, copy, strict=True)) if one != other]
    assert {copy[place] for place in hidden} == {MASK}
    assert 120 < len(hidden) < 180
    assert masked_copy([2, 3] * 500, {2, 3}, MASK, np.random.default_rng(0)) == [2, 3] * 500


def test_all_or_some_texts_get_a_copy_beside_themselves() -> None:
    plain, some, every = gathered(0.0), gathered(0.5), gathered(1.0)
    for found in (some, every):
        assert found.ids[: len(plain.ids)] == plain.ids
        assert len(found.ids) == len(found.labels) == len(plain.ids) + found.masked
        assert (found.fragments, found.pages) == (plain.fragments, plain.pages)
    assert plain.masked == 0 < some.masked < every.masked <= len(DATA.texts)
    originals = {tuple(one) for one in ENCODER.encode(DATA.texts)}
    for copy in every.ids[len(plain.ids) :]:
        assert MASK in copy
        assert any(
            len(one) == len(copy) and all(b in (a, MASK) for a, b in zip(one, copy, strict=True)) for one in originals
        )
    assert gathered(1.0).ids == every.ids != gathered(1.0, seed=1).ids


def test_copies_of_labelled_rows_have_no_label() -> None:
    data, model = labelled_data(), with_head(ClassificationHead(LABELS))
    found = gather_examples(Distill(masked=1.0), model, StepContext(data))
    assert found.masked > 0
    assert set(found.labels[-found.masked :]) == {-1}
    details = Distill(steps=2, masked=1.0)(model, StepContext(data, teacher=model)).details
    assert details["masked"] == found.masked
    assert "masked" not in Distill(steps=2)(model, StepContext(data, teacher=model)).details


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    other = replace(MODEL, tokenizer=MODEL.tokenizer.replace("[MASK]", "[HIDE]"))
    assert other.text_encoder().mask_id is None
    with pytest.raises(
        InputError, match=r"masked needs a mask token \(\[MASK\] or <mask>\), and the tokenizer has none"
    ):
        gather_examples(Distill(masked=0.5), other, StepContext(DATA))
    with pytest.raises(InputError, match=r"masked is 1.5, not a share from 0 to 1"):
        Distill(masked=1.5)
