"""Texts longer than a block of rounds against eager decoding, for every mixer, from nothing and from prompts."""

import numpy as np
import pytest
from models import MIXERS, decoder_config, ragged
from writing import END, START, run, run_padded, session, texts, writer

from slimformer.export import single
from slimformer.transformer.config import LanguageHead
from slimformer.transformer.generation import Decoding, generate

UNTIED = LanguageHead(START, END, tied=False, bias=True)
SOURCES = [[5, 9, 3], [7], list(range(5, 17))]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "BLOCK", 3)


@pytest.mark.parametrize("longest", [0, 1, 3, 4, 11])
@pytest.mark.parametrize("name", MIXERS)
def test_translations_over_several_blocks(name: str, longest: int) -> None:
    """Texts end within a block, at its end, and not at all."""
    checkpoint = writer(decoder_config(1, 2, MIXERS[name], head=UNTIED), 5, 2.0)
    opened, net = session(checkpoint), checkpoint.to_torch()
    for options in (Decoding(max_new_tokens=longest), Decoding(max_new_tokens=longest, sample=True, seed=3)):
        sequences, scores = run(opened, SOURCES, options)
        expected = generate(net, SOURCES, options)
        assert texts(sequences) == texts(expected.sequences)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["right", "left", "between"])
@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_prompts_over_several_blocks(name: str, side: str) -> None:
    """The padding of the prompts stays hidden in every block."""
    checkpoint = writer(decoder_config(0, 2, MIXERS[name], head=UNTIED), 6, -3.0)
    ids, mask = ragged([1, 3, 6, 0], side=side, columns=7)
    prompts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
    options = Decoding(max_new_tokens=10)
    sequences, scores = run_padded(session(checkpoint), ids, mask, options)
    expected = generate(checkpoint.to_torch(), None, options, prefixes=prompts)
    assert texts(sequences) == texts(expected.sequences)
    assert max(map(len, (row[0] for row in texts(sequences)))) > 6
    np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)


def test_a_loop_ends_with_its_last_text() -> None:
    """No block is begun after the one in which all have ended."""
    checkpoint = writer(decoder_config(1, 1, head=UNTIED), 5, 50.0)  # ends at once
    sequences, _ = run(session(checkpoint), SOURCES, Decoding(max_new_tokens=12))
    assert np.asarray(sequences).shape == (3, 1, 1)
