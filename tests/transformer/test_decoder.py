"""Decoders, alone and beside an encoder: what they see, that steps are the whole row, and that padding changes nothing.

That their numbers are right is shown against PyTorch's layers, in families/test_torch_nn.py.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import MIXERS, POSITIONS, TOKENIZER, VOCAB_SIZE, WIDTH, decoder_config, ragged, random_state
from torch import Tensor

from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import (
    AttentionConfig,
    EmbeddingConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    RecurrentConfig,
    TransformerConfig,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.int8 import Int8Linear
from slimformer.transformer.model import Transformer, sinusoids
from slimformer.transformer.quantization import quantized

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LENGTHS = (3, 9, 1, 6)


def model(config: TransformerConfig, seed: int = 0) -> Transformer:
    return Checkpoint(config, random_state(config, seed), TOKENIZER).to_torch()


# --- positions ---


def test_sinusoids_by_hand() -> None:
    """Vaswani et al. 2017, section 3.5: wavelengths from 2 pi to 10000 times 2 pi."""
    table = sinusoids(torch.arange(50), 8)
    assert table.shape == (50, 8)
    for position in (0, 1, 7, 49):
        for i in range(4):
            angle = position / 10000 ** (2 * i / 8)
            assert float(table[position, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-7)
            assert float(table[position, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-7)


@pytest.mark.parametrize("shift", [1, 5, 100])
def test_a_shift_is_one_linear_map_of_all_positions(shift: int) -> None:
    """The reason the paper gives for them: PE(p + k) is PE(p) turned by the same angles, whatever p is."""
    turned = np.zeros((8, 8))
    for i in range(4):
        angle = shift / 10000 ** (2 * i / 8)
        turned[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [
            [math.cos(angle), -math.sin(angle)],
            [math.sin(angle), math.cos(angle)],
        ]
    table, shifted = (sinusoids(torch.arange(64) + start, 8).double().numpy() for start in (0, shift))
    np.testing.assert_allclose(table @ turned, shifted, atol=1e-6)


# --- what a token sees ---


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("encoder", [0, 2])
@torch.inference_mode()
def test_no_token_sees_those_after_it(encoder: int, mixer: str) -> None:
    net = model(decoder_config(encoder, mixer=MIXERS[mixer]))
    ids, mask = ragged((7,))
    source = ragged((5,), seed=2)
    first = run(net, ids, mask, source)
    changed = ids.clone()
    changed[0, 4] = (ids[0, 4] + 1) % VOCAB_SIZE
    second = run(net, changed, mask, source)
    torch.testing.assert_close(first[:4], second[:4], atol=0, rtol=0)
    assert float((first[4] - second[4]).abs().max()) > 1e-3
    if MIXERS[mixer] is not None:
        assert float((first[5:] - second[5:]).abs().max()) > 1e-5


@torch.inference_mode()
def test_a_target_sees_all_of_its_source() -> None:
    net = model(decoder_config())
    ids, mask = ragged((4,))
    source, source_mask = ragged((6,), seed=2)
    before = run(net, ids, mask, (source, source_mask))
    for place in (0, 5):
        other = source.clone()
        other[0, place] = (source[0, place] + 1) % VOCAB_SIZE
        assert float((run(net, ids, mask, (other, source_mask)) - before)[0].abs().max()) > 1e-4


def run(net: Transformer, ids: Tensor, mask: Tensor, source: tuple[Tensor, Tensor]) -> Tensor:
    """(N, V), with or without the source."""
    if not net.config.encoder:
        return net(ids, mask).result
    return net(*source, target_ids=ids, target_mask=mask).result


# --- padding ---


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("encoder", [0, 2])
@pytest.mark.parametrize("place", ["post", "pre"])
@torch.inference_mode()
def test_rows_and_padding_change_nothing(place: str, encoder: int, mixer: str) -> None:
    net = model(decoder_config(encoder, mixer=MIXERS[mixer], norm_place=place, final_norm=place == "pre"))
    right, left, between = (ragged(LENGTHS, side=side, columns=11) for side in ("right", "left", "between"))
    sources = [ragged((8, 2, 5, 1), seed=4, side=side, columns=9) for side in ("right", "between", "left")]
    expected = run(net, *right, sources[0])
    for other, source in zip((left, between), sources[1:], strict=True):
        torch.testing.assert_close(run(net, *other, source), expected, **CLOSE)
    alone = [
        run(net, right[0][i : i + 1, :n], right[1][i : i + 1, :n], tuple(one[i : i + 1] for one in sources[0]))
        for i, n in enumerate(LENGTHS)
    ]
    torch.testing.assert_close(torch.cat(alone), expected, **CLOSE)


@pytest.mark.parametrize("encoder", [0, 2])
def test_padding_sends_no_nan_back(encoder: int) -> None:
    net = model(decoder_config(encoder)).train()
    ids, mask = ragged(LENGTHS, side="left", columns=11)
    run(net, ids, mask, ragged((8, 2, 5, 1), seed=4, side="left")).square().mean().backward()
    for name, value in net.named_parameters():
        assert value.grad is not None, name
        assert bool(value.grad.isfinite().all()), name


# --- steps ---


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("encoder", [0, 2])
@pytest.mark.parametrize("place", ["post", "pre"])
@torch.inference_mode()
def test_steps_are_the_whole_row(place: str, encoder: int, mixer: str) -> None:
    """Prefixes of unequal lengths, padded on the left, in between and on the right; then token by token."""
    net = model(decoder_config(encoder, mixer=MIXERS[mixer], norm_place=place, final_norm=True))
    sources = ragged((8, 2, 5), seed=4)
    lengths = (3, 1, 5)
    whole, _ = ragged(tuple(n + 4 for n in lengths), seed=6)
    for side in ("left", "between", "right"):
        ids, mask = ragged(lengths, seed=9, side=side, columns=6)
        for row, length in enumerate(lengths):
            ids[row, mask[row].bool()] = whole[row, :length]
        source = net.encode(*sources) if encoder else None
        logits, cache = net.start(ids, mask, source)
        for step in range(5):
            expected = [
                run(net, whole[i : i + 1, : n + step], torch.ones(1, n + step), tuple(s[i : i + 1] for s in sources))[
                    -1
                ]
                for i, n in enumerate(lengths)
            ]
            torch.testing.assert_close(logits, torch.stack(expected), **CLOSE)
            if step < 4:
                assert cache.positions.tolist() == [n + step for n in lengths]
                tokens = torch.stack([whole[i, n + step] for i, n in enumerate(lengths)])
                logits, cache = net.step(tokens, cache)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.inference_mode()
def test_rows_of_a_cache_can_be_taken_in_any_order(mixer: str) -> None:
    net = model(decoder_config(mixer=MIXERS[mixer]))
    ids, mask = ragged((3, 5))
    _, cache = net.start(ids, mask, net.encode(*ragged((4, 6), seed=1)))
    tokens = torch.tensor([5, 6])
    logits, _ = net.step(tokens, cache)
    order = torch.tensor([1, 1, 0])
    again, _ = net.step(tokens[order], cache.take(order))
    torch.testing.assert_close(again, logits[order], **CLOSE)
    assert float((again[0] - again[2]).abs().max()) > 1e-2


# --- tables and int8 ---


def test_one_table_for_source_target_and_head() -> None:
    shared = Transformer(decoder_config()).state_dict()
    assert [name for name, value in shared.items() if value.shape == (VOCAB_SIZE, WIDTH)] == [
        "embeddings.tokens.weight"
    ]
    assert not any("positions" in name for name in shared)
    two = decoder_config(
        target=EmbeddingConfig(17, POSITIONS, position_kind="learned"), head=LanguageHead(2, 3, tied=False)
    )
    shapes = {name: tuple(value.shape) for name, value in Transformer(two).state_dict().items()}
    assert shapes["target.tokens.weight"] == shapes["head.tokens.weight"] == (17, WIDTH)
    assert shapes["target.positions.weight"] == (POSITIONS, WIDTH)
    assert shapes["target.norm.bias"] == (WIDTH,)


@torch.inference_mode()
def test_the_scale_of_embeddings() -> None:
    config = decoder_config()
    scaled, plain = model(config), model(replace(config, embedding=replace(config.embedding, scaled=False)))
    ids = torch.tensor([7, 8])
    at = torch.tensor([0, 3])
    found = scaled.embeddings(ids, at) - sinusoids(at, WIDTH)
    torch.testing.assert_close(found, math.sqrt(WIDTH) * (plain.embeddings(ids, at) - sinusoids(at, WIDTH)), **CLOSE)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.inference_mode()
def test_int8_is_near_and_its_tied_table_is_an_int8_linear(mixer: str) -> None:
    config = decoder_config(mixer=MIXERS[mixer])
    plain = Checkpoint(config, random_state(config), TOKENIZER)
    small = quantized(plain, bits=8)
    kinds = {name: value.dtype for name, value in small.state.items() if name.endswith("weight") and value.ndim == 2}
    left = {name for name, dtype in kinds.items() if dtype != torch.int8}
    assert left == {name for name in kinds if ".recur." in name}
    ids, mask = ragged(LENGTHS)
    source = ragged((8, 2, 5, 1), seed=4)
    expected, found = (run(one.to_torch(), ids, mask, source) for one in (plain, small))
    assert 0.002 < float((found - expected).norm() / expected.norm()) < 0.1
    net = small.to_torch()
    hidden = torch.randn(5, WIDTH)
    linear = Int8Linear(inputs=WIDTH, outputs=VOCAB_SIZE)
    linear.weight, linear.scale = net.embeddings.tokens.weight, net.embeddings.tokens.scale
    torch.testing.assert_close(net.embeddings.tokens.logits(hidden), linear(hidden), atol=0, rtol=0)


def test_dropout_acts_in_training_alone() -> None:
    config = decoder_config()
    net = Transformer(config, dropout=0.5)
    net.load_state_dict(random_state(config))
    ids, mask = ragged((6,))
    source = ragged((5,), seed=2)
    first, second = run(net.train(), ids, mask, source), run(net, ids, mask, source)
    assert not torch.equal(first, second)
    still = run(net.eval(), ids, mask, source)
    torch.testing.assert_close(still, run(model(config), ids, mask, source), atol=0, rtol=0)


# --- configs ---


@pytest.mark.parametrize("mixer", MIXERS)
def test_saved_and_loaded(mixer: str, tmp_path: object) -> None:
    config = decoder_config(mixer=MIXERS[mixer], norm_place="pre", final_norm=True)
    saved = Checkpoint(config, random_state(config), TOKENIZER).save(f"{tmp_path}/m")
    assert load_own(saved).config == config


def test_multiply_adds_by_hand() -> None:
    """Per layer of the encoder 4 D H K + 2 D F; of the decoder its mixer, and the cross-attention's four linears."""
    encoder = 4 * 32 * 32 + 2 * 32 * 48
    cross = 4 * 32 * 24
    counts = {"attention": 4 * 32 * 32, "gru": 3 * 32 * 64, "ssru": 2 * 32 * 32, "lstm": 4 * 20 * 52 + 20 * 32}
    for name, mixer in counts.items():
        total = 2 * encoder + 2 * (mixer + cross + 2 * 32 * 48)
        config = decoder_config(mixer=MIXERS[name])
        assert config.multiply_adds() == total
        assert config.multiply_adds(encoder_only=False) == total + VOCAB_SIZE * 32


LAYER = LayerConfig(AttentionConfig(4, 8), FeedForwardConfig(8))
CROSSED = replace(LAYER, cross=AttentionConfig(1, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": EmbeddingHead()}, "the head embedding does not stand on a decoder"),
        ({"head": LanguageHead(start_id=VOCAB_SIZE, end_id=3)}, "start_id 47 is not below vocab_size 47"),
        ({"decoder": ()}, "a language head stands on a decoder, there is none"),
        ({"encoder": (CROSSED,)}, "a layer of the encoder has cross-attention"),
        ({"encoder": (), "decoder": (CROSSED,)}, "a layer of the decoder has cross-attention"),
        ({"encoder": (), "decoder": (LAYER,), "target": EmbeddingConfig(9, 9)}, "target is the table of a decoder"),
        (
            {"decoder": (replace(LAYER, mixer=RecurrentConfig("gru", 8, project=False)),)},
            "as many units as d_model, 32",
        ),
        ({"norm_place": "middle"}, "norm_place is 'middle', not one of post, pre"),
        ({"final_norm": 1}, "final_norm is 1, not true or false"),
    ],
)
def test_a_config_that_is_no_model(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(decoder_config(), **changes)


def test_refusals_of_parts() -> None:
    with pytest.raises(InputError, match="an even d_model, it is 5"):
        replace(decoder_config(), d_model=5)
    with pytest.raises(InputError, match="mixer kind is 'fnet', not one of rnn, lstm, gru, ssru"):
        RecurrentConfig("fnet", 8)
    with pytest.raises(InputError, match="a tied head has the format of its table"):
        LanguageHead(2, 3, format="int8_rows")
    with pytest.raises(InputError, match="position_kind is 'rotary'"):
        EmbeddingConfig(8, 8, position_kind="rotary")
