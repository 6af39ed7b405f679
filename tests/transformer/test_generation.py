"""Decoding against the `transformers` library, against every text there is, and against itself in other batches."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import POSITIONS, TOKENIZER, VOCAB_SIZE, WIDTH, decoder_config, random_state
from torch import Tensor

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import AttentionConfig, EmbeddingConfig, LanguageHead, RecurrentConfig, TextConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, Generated, generate, uniform
from slimformer.transformer.model import Transformer

START, END = 2, 3
SOURCES = [[5, 9, 3], [7], [11, 12, 13, 14, 15, 16, 3], [20, 21, 22, 23]]


def model(encoder: int = 1, seed: int = 0, ending: float = 2.0, **changes: Any) -> Transformer:
    """A random decoder whose head has a table of its own, lest it repeat itself; `ending` lets its texts end."""
    config = decoder_config(encoder, 1, **{"head": LanguageHead(START, END, tied=False, bias=True), **changes})
    state = random_state(config, seed)
    state["head.tokens.weight"] *= 2
    state["head.bias"][END] = ending
    return Checkpoint(config, state, TOKENIZER).to_torch()


def texts(found: Generated) -> list[list[list[int]]]:
    """Ids of every text without what follows its end token."""
    return [[cut(ids) for ids in rows] for rows in found.sequences.tolist()]


def cut(ids: list[int]) -> list[int]:
    return ids[: ids.index(END) + 1] if END in ids else ids


# --- against the transformers library ---


@pytest.fixture(scope="module")
def marian() -> Any:
    """A tiny random Marian model and ours with its weights."""
    from transformers import MarianConfig, MarianMTModel

    theirs = MarianMTModel(
        MarianConfig(
            vocab_size=VOCAB_SIZE,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            activation_function="relu",
            max_position_embeddings=POSITIONS,
            scale_embedding=True,
            pad_token_id=0,
            eos_token_id=END,
            forced_eos_token_id=None,
            decoder_start_token_id=START,
            init_std=0.6,
            tie_word_embeddings=False,
        )
    ).eval()
    theirs.model.encoder.embed_tokens = theirs.model.decoder.embed_tokens = theirs.model.shared
    random = torch.Generator().manual_seed(26)
    with torch.no_grad():  # the library's own first weights are others in other versions of it
        for name, value in theirs.named_parameters():
            if "embed_positions" not in name:
                noise = torch.randn(value.shape, generator=random)
                value.copy_(0.6 * noise if value.ndim > 1 else 0.1 * noise + name.endswith("norm.weight"))
        theirs.model.shared.weight.mul_(0.5)
        theirs.final_logits_bias[0, END] = 12.0
        theirs.final_logits_bias[0, START] = -100.0
    return theirs, ours_of(theirs)


def ours_of(theirs: Any) -> Transformer:
    """Marian's sinusoids stand in two halves where ours alternate: its model columns in another order."""
    order = torch.arange(WIDTH).view(2, -1).T.flatten()
    given = theirs.state_dict()
    state: dict[str, Tensor] = {}

    def put(ours: str, parts: Sequence[str], *, rows: bool = False, columns: bool = False) -> None:
        weight = torch.cat([given[f"{part}.weight"] for part in parts])
        bias = torch.cat([given[f"{part}.bias"] for part in parts])
        weight = weight[order] if rows else weight
        state[f"{ours}.weight"] = weight[:, order] if columns else weight
        state[f"{ours}.bias"] = bias[order] if rows else bias

    for stack in ("encoder", "decoder"):
        for i in range(2):
            ours, layer = f"{stack}.{i}", f"model.{stack}.layers.{i}"
            put(f"{ours}.mixer.qkv", [f"{layer}.self_attn.{one}_proj" for one in "qkv"], columns=True)
            put(f"{ours}.mixer.out", [f"{layer}.self_attn.out_proj"], rows=True)
            put(f"{ours}.mixer_norm", [f"{layer}.self_attn_layer_norm"], rows=True)
            put(f"{ours}.ffn.up", [f"{layer}.fc1"], columns=True)
            put(f"{ours}.ffn.down", [f"{layer}.fc2"], rows=True)
            put(f"{ours}.ffn_norm", [f"{layer}.final_layer_norm"], rows=True)
            if stack == "decoder":
                put(f"{ours}.cross.q", [f"{layer}.encoder_attn.q_proj"], columns=True)
                put(f"{ours}.cross.kv", [f"{layer}.encoder_attn.{one}_proj" for one in "kv"], columns=True)
                put(f"{ours}.cross.out", [f"{layer}.encoder_attn.out_proj"], rows=True)
                put(f"{ours}.cross_norm", [f"{layer}.encoder_attn_layer_norm"], rows=True)
    state["embeddings.tokens.weight"] = given["model.shared.weight"][:, order]
    state["head.tokens.weight"] = given["lm_head.weight"][:, order]
    state["head.bias"] = given["final_logits_bias"][0]
    config = decoder_config(2, 2)
    layer = config.encoder[0]
    config = replace(
        config, decoder=(replace(layer, cross=layer.mixer),) * 2, head=LanguageHead(START, END, tied=False, bias=True)
    )
    return Checkpoint(config, {name: value.clone() for name, value in state.items()}, TOKENIZER).to_torch()


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


@torch.inference_mode()
def test_logits_are_those_of_marian(marian: Any) -> None:
    theirs, ours = marian
    ids, mask = padded(SOURCES)
    target, seen = padded([[START, 8, 9], [START], [START, 30], [START, 4, 5]])
    expected = theirs(ids, mask, decoder_input_ids=target, decoder_attention_mask=seen).logits[seen.bool()]
    found = ours(ids, mask, target_ids=target, target_mask=seen).result
    torch.testing.assert_close(
        found, expected, atol=2e-3, rtol=1e-4
    )  # logits of up to 40, from weights of deviation 0.6


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beams", [1, 2, 4])
def test_beam_search_is_that_of_transformers(beams: int, penalty: float, early: bool, marian: Any) -> None:
    theirs, ours = marian
    ids, mask = padded(SOURCES)
    expected = theirs.generate(
        input_ids=ids,
        attention_mask=mask,
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=penalty,
        early_stopping=early,
        do_sample=False,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = generate(
        ours,
        SOURCES,
        Decoding(max_new_tokens=12, beams=beams, n_best=beams, length_penalty=penalty, early_stopping=early),
    )
    sequences = expected.sequences.view(len(SOURCES), beams, -1)[:, :, 1:]
    assert texts(found) == [[cut(one) for one in rows] for rows in sequences.tolist()]
    if beams > 1:
        scores = expected.sequences_scores.view(len(SOURCES), beams)
        torch.testing.assert_close(found.scores, scores, atol=1e-4, rtol=1e-4)


def test_the_marian_texts_are_worth_comparing(marian: Any) -> None:
    """They end at different steps, one not at all, and beams find other texts than greedy search."""
    _, ours = marian
    greedy = [rows[0] for rows in texts(generate(ours, SOURCES, Decoding(max_new_tokens=12)))]
    best = [rows[0] for rows in texts(generate(ours, SOURCES, Decoding(max_new_tokens=12, beams=4)))]
    assert len({len(one) for one in greedy + best}) > 2
    assert greedy != best


def test_the_repetition_penalty_is_that_of_transformers(marian: Any) -> None:
    theirs, ours = marian
    ids, mask = padded(SOURCES)
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": 12, "repetition_penalty": 1.7}
    expected = theirs.generate(input_ids=ids, attention_mask=mask, **options)[:, 1:]
    found = generate(ours, SOURCES, Decoding(max_new_tokens=12, repetition_penalty=1.7))
    assert [rows[0] for rows in texts(found)] == [cut(one) for one in expected.tolist()]
    assert texts(found) != texts(generate(ours, SOURCES, Decoding(max_new_tokens=12)))


# --- against every text ---


def small(seed: int) -> Transformer:
    """Five tokens: padding, one, start, end, another."""
    table = EmbeddingConfig(5, 8, position_kind="sinusoidal", norm=False)
    config = replace(decoder_config(1, 1), embedding=table, text=TextConfig(8))
    return Checkpoint(config, random_state(config, seed), TOKENIZER).to_torch()


def every_text(length: int) -> Iterator[tuple[int, ...]]:
    """All texts of five tokens that end, or are as long as allowed."""
    for n in range(1, length + 1):
        for one in itertools.product(range(5), repeat=n):
            if END not in one[:-1] and (one[-1] == END or n == length):
                yield one


@torch.inference_mode()
def log_probability(net: Transformer, source: list[int], text: Sequence[int]) -> float:
    """Teacher-forced, in one pass."""
    target = torch.tensor([[START, *text[:-1]]])
    logits = net(
        torch.tensor([source]), torch.ones(1, len(source)), target_ids=target, target_mask=torch.ones_like(target)
    ).result
    return float(logits.double().log_softmax(1)[range(len(text)), list(text)].sum())


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_with_beams_for_all_texts_the_best_one_is_found(seed: int, penalty: float) -> None:
    """4^3 = 64 texts run on after three tokens, so that 125 beams lose none; which are best, with their scores."""
    net, source = small(seed), [1, 4, 3]
    scored = {text: log_probability(net, source, text) / len(text) ** penalty for text in every_text(4)}
    ranked = sorted(scored, key=lambda text: -scored[text])[:10]
    found = generate(net, [source], Decoding(max_new_tokens=4, beams=125, n_best=10, length_penalty=penalty))
    assert [tuple(one) for one in texts(found)[0]] == ranked
    torch.testing.assert_close(found.scores[0], torch.tensor([scored[text] for text in ranked]), atol=1e-4, rtol=1e-4)


# --- batches, edges, sampling ---


WAYS = {
    "greedy": Decoding(max_new_tokens=10),
    "beams": Decoding(max_new_tokens=10, beams=3, n_best=3, length_penalty=0.7),
    "beams, early": Decoding(max_new_tokens=10, beams=3, early_stopping=True),
    "sampling": Decoding(max_new_tokens=10, sample=True, seed=5, temperature=1.3, top_k=20, top_p=0.9),
    "penalized beams": Decoding(max_new_tokens=10, beams=2, repetition_penalty=1.5),
}
ATTENTION = AttentionConfig(4, 8)
# mixers, and what makes random models write texts that differ and end at different steps
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"mixer": ATTENTION, "seed": 4, "ending": 1.0},
    "ssru": {"mixer": RecurrentConfig("ssru", WIDTH, project=False), "seed": 5, "ending": 4.0},
    "lstm": {"mixer": RecurrentConfig("lstm", 20), "seed": 5, "ending": 4.0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_batch_gives_what_each_text_gives_alone(mixer: str, way: str) -> None:
    net = model(**MIXERS[mixer])
    together = generate(net, SOURCES, WAYS[way])
    for row, source in enumerate(SOURCES):
        alone = generate(net, [source], WAYS[way])
        assert texts(alone)[0] == texts(together)[row]
        torch.testing.assert_close(alone.scores[0], together.scores[row], atol=1e-4, rtol=1e-4)
    assert len({tuple(rows[0]) for rows in texts(together)}) > 1


@pytest.mark.parametrize("way", WAYS)
def test_prefixes_of_unequal_lengths(way: str) -> None:
    net = model(encoder=0, seed=4)
    prefixes = [[5, 6, 7], [], [8], [9, 10, 11, 12, 13]]
    together = generate(net, None, WAYS[way], prefixes=prefixes)
    for row, prefix in enumerate(prefixes):
        assert texts(generate(net, None, WAYS[way], prefixes=[prefix]))[0] == texts(together)[row]
    assert len({tuple(rows[0]) for rows in texts(together)}) > 1


@torch.inference_mode()
def test_greedy_is_the_best_token_each_time_and_its_score_their_sum() -> None:
    net = model(seed=3)
    found = generate(net, SOURCES, Decoding(max_new_tokens=6, length_penalty=0.5))
    for row, source in enumerate(SOURCES):
        written = texts(found)[row][0]
        total = 0.0
        for place, token in enumerate(written):
            target = torch.tensor([[START, *written[:place]]])
            logits = net(
                torch.tensor([source]), torch.ones(1, len(source)), target_ids=target, target_mask=target
            ).result[-1]
            assert int(logits.argmax()) == token
            total += float(logits.log_softmax(0)[token])
        assert float(found.scores[row, 0]) == pytest.approx(total / math.sqrt(len(written)), abs=1e-4)


def test_what_follows_an_end_is_padding() -> None:
    found = generate(model(**MIXERS["attention"]), SOURCES, Decoding(max_new_tokens=10))
    rows = found.sequences[:, 0].tolist()
    short = [row for row in rows if END in row[:-1]]
    assert short
    assert all(set(row[row.index(END) + 1 :]) == {0} for row in short)
    assert found.sequences.shape[2] == max(len(cut(row)) for row in rows)


@pytest.mark.parametrize("beams", [1, 4])
def test_no_token_and_one_token(beams: int) -> None:
    net = model()
    nothing = generate(net, SOURCES, Decoding(max_new_tokens=0, beams=beams))
    assert nothing.sequences.shape == (4, 1, 0)
    one = generate(net, SOURCES, Decoding(max_new_tokens=1, beams=beams))
    assert one.sequences.shape == (4, 1, 1)
    assert torch.equal(one.sequences, generate(net, SOURCES, Decoding(max_new_tokens=1)).sequences)
    assert generate(net, [], Decoding(beams=beams, max_new_tokens=4)).sequences.shape == (0, 1, 0)


def test_sampling_follows_the_probabilities() -> None:
    """One step under 1,000 seeds: frequencies within four standard deviations of the model's probabilities."""
    net, source = model(seed=3), [5, 9, 3]
    target = torch.tensor([[START]])
    with torch.inference_mode():
        logits = net(torch.tensor([source]), torch.ones(1, 3), target_ids=target, target_mask=target).result[0]
    draws = 1000
    for changes, chances in (
        ({}, logits.softmax(0)),
        ({"temperature": 0.5}, (logits / 0.5).softmax(0)),
        ({"top_k": 3}, top(logits.softmax(0), count=3)),
        ({"top_p": 0.5}, top(logits.softmax(0), mass=0.5)),
    ):
        counts = torch.zeros(VOCAB_SIZE)
        for seed in range(draws):
            found = generate(net, [source], Decoding(max_new_tokens=1, sample=True, seed=seed, **changes))
            counts[found.sequences[0, 0, 0]] += 1
        deviation = (chances * (1 - chances) * draws).sqrt()
        assert bool(((counts - draws * chances).abs() <= 4 * deviation + 1e-3).all()), changes


def top(chances: Tensor, count: int | None = None, mass: float = 1.0) -> Tensor:
    """Probabilities cut to the greatest ones, and made to sum to 1."""
    kept, total = torch.zeros_like(chances), 0.0
    for place in chances.argsort(descending=True).tolist()[:count]:
        if total >= mass:
            break
        kept[place] = chances[place]
        total += float(chances[place])
    return kept / kept.sum()


def test_the_generator_is_murmurs_finalizer() -> None:
    """Values of the 32-bit finalizer by a reference of its own; and the numbers are spread evenly."""

    def finalizer(h: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            h = ((h ^ (h >> shift)) * factor) % 2**32
        return h

    for seed, step in ((0, 0), (1, 0), (0, 1), (2**32 - 1, 77)):
        inner = finalizer((seed + 0x9E3779B9) % 2**32)
        assert uniform(seed, step) == (finalizer((inner + step + 0x9E3779B9) % 2**32) >> 8) / 2**24
    numbers = torch.tensor([uniform(seed, step) for seed in range(100) for step in range(100)])
    assert 0 <= float(numbers.min()) < float(numbers.max()) < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8  # chi-square of 19 degrees, one in a thousand


def test_refusals() -> None:
    net = model()
    for options, message in (
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"beams": 2, "n_best": 3}, "n_best 3 of 2 beams"),
        ({"beams": 0}, "n_best 1 of 0 beams"),
        ({"beams": 2, "sample": True}, "sample draws one text, beams is 2"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"top_p": 0.0}, "top_p above 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": 2**32}, "seed is 4294967296"),
    ):
        with pytest.raises(InputError, match=message):
            Decoding(**options)
    with pytest.raises(InputError, match="a source has 25 tokens, the model 24 positions"):
        generate(net, [[5] * 25], Decoding(max_new_tokens=4))
    with pytest.raises(InputError, match="max_new_tokens 25 come to 25 tokens, the model has 24"):
        generate(net, [[5]], Decoding(max_new_tokens=25))
    with pytest.raises(InputError, match="give sources to a decoder beside an encoder"):
        generate(net, None, Decoding(), prefixes=[[1]])
    with pytest.raises(InputError, match="2 sources and 1 prefixes"):
        generate(net, [[5], [6]], Decoding(max_new_tokens=3), prefixes=[[1]])
    headless = Transformer(decoder_config(head=None))
    with pytest.raises(InputError, match="has no language head"):
        generate(headless, [[5]], Decoding())
