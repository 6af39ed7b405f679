"""Decoders by themselves go on from prompts: the graph against eager decoding, for every mixer and every padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import MIXERS, POSITIONS, VOCAB_SIZE, decoder_config, ragged
from writing import END, START, run, run_padded, session, texts, writer

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import EmbeddingConfig, LanguageHead, LayerConfig, TransformerConfig
from slimformer.transformer.generation import Decoding, generate
from slimformer.transformer.quantization import quantized

UNTIED = LanguageHead(START, END, tied=False, bias=True)
LEARNED = EmbeddingConfig(VOCAB_SIZE, POSITIONS, position_kind="learned")
UNTOLD = EmbeddingConfig(VOCAB_SIZE, POSITIONS, position_kind="none", norm=False)
CONFIGS: dict[str, TransformerConfig] = {
    **{name: decoder_config(0, 2, mixer, head=UNTIED) for name, mixer in MIXERS.items()},
    "pre-norm": decoder_config(0, 2, norm_place="pre", final_norm=True, head=UNTIED),
    "tied": decoder_config(0, 1, head=LanguageHead(START, END)),
    "learned": replace(decoder_config(0, 1, head=UNTIED), embedding=LEARNED),
    "no positions": replace(decoder_config(0, 1, MIXERS["gru"], head=UNTIED), embedding=UNTOLD),
    "of three kinds": replace(
        decoder_config(0, 1, head=UNTIED),
        decoder=tuple(LayerConfig(MIXERS[name], None) for name in ("attention", "lstm", "absent", "ssru")),
    ),
}
PROMPTS = [[9], [5, 9, 11], list(range(5, 22)), []]


def model(name: str, ending: float = 1.0) -> Checkpoint:
    return writer(CONFIGS[name], 6, ending)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_scores_are_those_of_eager_decoding(name: str) -> None:
    checkpoint = model(name)
    opened, net = session(checkpoint), checkpoint.to_torch()
    seen = set()
    for beams, longest, penalty in ((1, 7, 1.0), (4, 7, 0.6), (1, 1, 1.0), (4, 1, 1.0), (1, 0, 1.0), (4, 0, 1.0)):
        options = Decoding(max_new_tokens=longest, beams=beams, n_best=beams, length_penalty=penalty)
        sequences, scores = run(opened, PROMPTS, options)
        expected = generate(net, None, options, prefixes=PROMPTS)
        assert texts(sequences) == texts(expected.sequences)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)
        seen |= {tuple(one) for rows in texts(sequences) for one in rows}
    assert len(seen) > 4


@pytest.mark.parametrize("name", ["attention", "lstm", "of three kinds"])
@pytest.mark.parametrize("side", ["right", "left", "between"])
def test_padding_may_stand_anywhere(side: str, name: str) -> None:
    """Nine prompts of such lengths are read in groups of rows."""
    checkpoint = model(name)
    opened, net = session(checkpoint), checkpoint.to_torch()
    ids, mask = ragged([1, 3, 14, 0, 2, 1, 2, 14, 5], side=side, columns=15)
    prompts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
    for beams in (1, 3):
        options = Decoding(max_new_tokens=6, beams=beams, n_best=beams)
        sequences, scores = run_padded(opened, ids, mask, options)
        expected = generate(net, None, options, prefixes=prompts)
        assert texts(sequences) == texts(expected.sequences)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_rows_of_one_length_and_a_prompt_alone(name: str) -> None:
    """Neither has any padding."""
    checkpoint = model(name)
    opened, net = session(checkpoint), checkpoint.to_torch()
    for prompts in ([[5, 6, 7], [8, 9, 10], [11, 12, 13]], [[5, 6, 7]], [[]]):
        options = Decoding(max_new_tokens=8)
        expected = texts(generate(net, None, options, prefixes=prompts).sequences)
        assert texts(run(opened, prompts, options)[0]) == expected


def test_it_stops_at_the_last_position_and_where_all_have_ended() -> None:
    opened = session(model("attention", ending=-50.0))
    for beams in (1, 2):
        for length, most in ((17, POSITIONS - 17), (POSITIONS - 1, 1)):
            sequences, _ = run(opened, [[5] * length, [7]], Decoding(max_new_tokens=1000, beams=beams))
            assert sequences.shape == (2, beams, most)
    sequences, _ = run(session(model("no positions", ending=-50.0)), [[7]], Decoding(max_new_tokens=40))
    assert sequences.shape == (1, 1, 40)
    sequences, _ = run(session(model("lstm", ending=50.0)), PROMPTS, Decoding(max_new_tokens=20))
    assert sequences.tolist() == [[[END]]] * 4


@pytest.mark.parametrize("name", [*MIXERS, "pre-norm", "tied"])
def test_int8_writes_what_eager_int8_writes(name: str) -> None:
    """A flipped rounding may move a choice between tokens that are nearly equal, and all that follows it."""
    checkpoint = quantized(model(name), bits=7)
    opened, net = session(checkpoint), checkpoint.to_torch()
    same = []
    for beams in (1, 4):
        options = Decoding(max_new_tokens=7, beams=beams)
        expected = texts(generate(net, None, options, prefixes=PROMPTS).sequences)
        found = texts(run(opened, PROMPTS, options)[0])
        same += [rows[0] == wanted[0] for rows, wanted in zip(found, expected, strict=True)]
    assert np.mean(same) >= 0.75


def test_scores_are_log_probabilities_of_what_is_written() -> None:
    """A pass over prompt and text at once, without caches, gives the same sum."""
    checkpoint = model("of three kinds")
    prompt = [5, 9, 11]
    sequences, scores = run(session(checkpoint), [prompt], Decoding(max_new_tokens=6, length_penalty=0.0))
    written = texts(sequences)[0][0]
    ids = torch.tensor([[START, *prompt, *written[:-1]]])
    logits = checkpoint.to_torch()(ids, torch.ones_like(ids)).result[len(prompt) :]
    expected = logits.log_softmax(1)[range(len(written)), written].sum()
    np.testing.assert_allclose(scores[0, 0], expected.item(), atol=1e-4)
