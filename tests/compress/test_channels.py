"""Removing channels against the full model with these channels at 0 and norms over the others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from masking import masked, narrow
from models import (
    ABSENT,
    DENSE,
    EMBEDDING,
    LABELS,
    POSITIONS,
    PRE,
    SENTENCES,
    TOKENIZER,
    VOCAB_SIZE,
    WHOLE,
    WIDTH,
    WRITERS,
    decoder_config,
    ragged,
    random_state,
    tiny_config,
)
from torch import Tensor

from slimformer.compress.calibration import Batch
from slimformer.compress.channels import channel_axes, remove_channels, select_channels
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.compress.surgery import remove_from, remove_units
from slimformer.compress.units import Kept, sublayers
from slimformer.export import export
from slimformer.export.decoding_parity import check_decoding
from slimformer.export.runtime import load_bundle
from slimformer.export.validation import check_parity
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import (
    INT8_ROWS,
    AttentionConfig,
    ClassificationHead,
    EmbeddingConfig,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    RecurrentConfig,
    TransformerConfig,
)
from slimformer.transformer.data import SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.model import sinusoids

CHANNELS = (0, 1, 3, 4, 5, 7, 8, 9, 12, 13, 17, 18, 20, 21, 22, 26, 27, 29, 31)  # 19 of 32
SCALED = EmbeddingConfig(VOCAB_SIZE, POSITIONS, position_kind="sinusoidal", scaled=True, norm=False)
LEARNED = EmbeddingConfig(VOCAB_SIZE, POSITIONS)
TIED, OWN = LanguageHead(2, 3, bias=True), LanguageHead(2, 3, tied=False, bias=True)
RECURRENT = (LayerConfig(RecurrentConfig("gru", 20), FeedForwardConfig(24)), *WHOLE)


def changed(config: TransformerConfig, **fields: Any) -> TransformerConfig:
    return replace(config, **fields)


ENCODERS = {
    "embedding": tiny_config(),
    "embedding with Dense": tiny_config(DENSE, (*WHOLE, *ABSENT)),
    "no head": tiny_config(None),
    "classifier": tiny_config(LABELS, (*WHOLE, *ABSENT)),
    "classifier without pooler": tiny_config(ClassificationHead(("a", "b"), pooler=False, pooling="mean")),
    "encoder, pre": changed(tiny_config(EMBEDDING, (*WHOLE, *ABSENT)), **PRE),
    "scaled": changed(tiny_config(), embedding=SCALED),
    "cell": tiny_config(ClassificationHead(("a", "b"), pooling="last"), RECURRENT),
}
ABSENT_CROSS = (*decoder_config().decoder, LayerConfig(AttentionConfig(4, 8), None), LayerConfig(None, None))
MODELS = {
    **ENCODERS,
    **{kind: WRITERS[kind] for kind in ("post", "pre", "own table", "lstm", "alone", "alone, pre")},
    "absent": decoder_config(decoder=4, head=OWN).with_layers(decoder_config().encoder, ABSENT_CROSS),
    "absent, pre": decoder_config(decoder=4, **PRE).with_layers(decoder_config().encoder, ABSENT_CROSS),
    "pre without norm": decoder_config(norm_place="pre"),
    "post with final norm": decoder_config(final_norm=True),
    "untied": decoder_config(head=OWN),
    "no language head": decoder_config(head=None),
    "learned": changed(decoder_config(), embedding=LEARNED),
    "scaled target": changed(decoder_config(target=SCALED), embedding=LEARNED),
    "scaled source": decoder_config(target=LEARNED, head=OWN),
    **{f"projected {kind}": decoder_config(1, 1, RecurrentConfig(kind, 20)) for kind in ("rnn", "gru", "ssru")},
    "no mixer": decoder_config(0, 2, None),
}
SOURCES, TARGETS = ragged((9, 3, 6), seed=1), ragged((4, 7, 2), seed=2, side="between", columns=9)


def checkpoint(config: TransformerConfig, seed: int = 0) -> Checkpoint:
    return Checkpoint(config, random_state(config, seed), TOKENIZER, {"source": "tiny"})


def batch(config: TransformerConfig) -> Batch:
    return Batch(*SOURCES, *TARGETS) if config.encoder and config.decoder else Batch(*SOURCES)


def narrowed(whole: Checkpoint, masks: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The tokens and the result that the masked full model gives."""
    model = narrow(whole.to_torch(), CHANNELS)
    with torch.no_grad(), masked(model, masks or {}):
        output = batch(whole.config).run(model)
    return output.hidden[:, CHANNELS], output.hidden if output.result is None else output.result


def only(config: TransformerConfig, channels: tuple[int, ...] = CHANNELS) -> Kept:
    return replace(Kept.everything(config), channels=channels)


@pytest.mark.parametrize("kind", MODELS)
def test_removing_equals_masking(kind: str) -> None:
    whole = checkpoint(MODELS[kind])
    small = remove_from(whole, only(whole.config)).check("small")
    hidden, result = narrowed(whole)
    result = result[:, CHANNELS] if result.shape[1] == WIDTH else result
    with torch.no_grad():
        output = batch(whole.config).run(small.to_torch())
        full = batch(whole.config).run(whole.to_torch())
    found = output.hidden if output.result is None else output.result
    torch.testing.assert_close(found, result, atol=1e-5, rtol=1e-5)
    assert small.config.d_model == len(CHANNELS)
    tied_table = small.config.decoder_embedding
    if not (isinstance(small.config.head, LanguageHead) and small.config.head.tied and tied_table.scaled):
        torch.testing.assert_close(output.hidden, hidden, atol=1e-5, rtol=1e-5)
    assert float((full.hidden[:, CHANNELS] - hidden).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["embedding with Dense", "post", "absent, pre", "lstm"])
def test_units_layers_and_channels_go_in_one_call(kind: str) -> None:
    whole = checkpoint(MODELS[kind])
    everything = Kept.everything(whole.config)
    stays = {stack: own[:-1] for stack, own in everything.layers.items()}
    units = {
        sub.name: tuple(range(0, sub.count, 2)) for sub in sublayers(whole.config) if sub.layer in stays[sub.stack]
    }
    masks = {f"{stack}.{own[-1]}": torch.tensor(0.0) for stack, own in everything.layers.items()}
    for sub in sublayers(whole.config):
        masks[sub.name] = (torch.arange(sub.count) % 2 == 0).float()
    small = remove_from(whole, Kept(stays, units, CHANNELS))
    with torch.no_grad():
        found = batch(whole.config).run(small.to_torch()).result
    torch.testing.assert_close(found, narrowed(whole, masks)[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["embedding", "classifier", "post", "own table", "alone, pre"])
def test_all_channels_leave_the_model_as_it_is(kind: str) -> None:
    whole = checkpoint(MODELS[kind])
    config, state = remove_units(whole.config, whole.state, only(whole.config, tuple(range(WIDTH))))
    assert config == whole.config
    assert state.keys() == whole.state.keys()
    assert all(torch.equal(state[name], value) for name, value in whole.state.items())


def test_input_is_untouched_and_not_shared() -> None:
    whole = checkpoint(MODELS["post"])
    before = {name: value.clone() for name, value in whole.state.items()}
    _, state = remove_channels(whole.config, whole.state, CHANNELS)
    for name, value in state.items():
        if channel_axes(name):
            value.zero_()
    assert all(torch.equal(whole.state[name], value) for name, value in before.items())


def test_sinusoids_become_a_table_of_the_kept_columns() -> None:
    """Column 17 is the cosine of p / 10000^(16 / 32), column 20 the sine of p / 10000^(20 / 32)."""
    small = remove_from(checkpoint(MODELS["post"]), only(MODELS["post"]))
    assert small.config.embedding.position_kind == "learned"
    table = small.state["embeddings.positions.weight"]
    places = np.arange(POSITIONS)
    np.testing.assert_allclose(table[:, CHANNELS.index(17)], np.cos(places / 10000**0.5), atol=1e-6)
    np.testing.assert_allclose(table[:, CHANNELS.index(20)], np.sin(places / 10000**0.625), atol=1e-6)
    assert torch.equal(table, sinusoids(torch.arange(POSITIONS), WIDTH)[:, CHANNELS])


@pytest.mark.parametrize(
    ("kind", "norm"), [("post", "decoder.2.ffn_norm"), ("pre", None), ("alone, pre", "decoder_norm")]
)
def test_a_scaled_table_takes_up_the_factor_and_the_last_norm_gives_it_back(kind: str, norm: str | None) -> None:
    """sqrt(32 / 8) = 2."""
    whole = checkpoint(MODELS[kind])
    channels = tuple(range(1, 9))
    small = remove_from(whole, only(whole.config, channels))
    kept = list(channels)
    assert torch.equal(small.state["embeddings.tokens.weight"], 2 * whole.state["embeddings.tokens.weight"][:, kept])
    for name in ("decoder.2.ffn_norm", "decoder_norm"):
        for part in ("weight", "bias"):
            if (old := whole.state.get(f"{name}.{part}")) is not None:
                assert torch.equal(small.state[f"{name}.{part}"], old[kept] / (2 if name == norm else 1))
    if whole.config.head is not None and not whole.config.head.tied:
        assert torch.equal(small.state["head.tokens.weight"], whole.state["head.tokens.weight"][:, kept])
    assert small.config.head == whole.config.head


def test_a_tied_head_without_a_norm_before_it_gets_its_own_table() -> None:
    whole = checkpoint(MODELS["pre without norm"])
    small = remove_from(whole, only(whole.config))
    assert small.config.head == replace(TIED, tied=False)
    assert torch.equal(small.state["head.tokens.weight"], whole.state["embeddings.tokens.weight"][:, CHANNELS])


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("embeddings.positions.weight", (1,)),
        ("target.tokens.weight", (1,)),
        ("decoder.3.cross.kv.weight", (1,)),
        ("decoder.3.cross.kv.bias", ()),
        ("decoder.3.mixer.inputs.weight", (1,)),
        ("decoder.3.mixer.recur.weight", ()),
        ("decoder.3.mixer.out.weight", (0,)),
        ("decoder.3.ffn.down.bias", (0,)),
        ("decoder.3.ffn.bias", (0,)),
        ("encoder_norm.bias", (0,)),
        ("head.bias", ()),
        ("head.pooler.weight", (0, 1)),
        ("head.pooler.bias", (0,)),
        ("head.classifier.bias", ()),
        ("head.dense.0.linear.weight", (1,)),
        ("head.dense.1.linear.weight", ()),
    ],
)
def test_axes_of_channels(name: str, axes: tuple[int, ...]) -> None:
    assert channel_axes(name) == axes


def test_the_best_channels_stay_in_their_order() -> None:
    scores = np.array([3.0, 1.0, 5.0, 1.0, 4.0, 1.0])
    assert select_channels(scores, 3) == (0, 2, 4)
    assert select_channels(scores, 5) == (0, 1, 2, 3, 4)
    assert select_channels(scores, 6) == (0, 1, 2, 3, 4, 5)
    assert select_channels(np.tile([0.0, 1.0], 50), 20) == tuple(range(1, 40, 2))
    for count in (0, 7):
        with pytest.raises(InputError, match=rf"{count} channels are to stay of 6; ask for 1 to 6"):
            select_channels(scores, count)


@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ((), "none of the 32 channels would stay"),
        ((2, 1), r"channels to keep, \[2, 1\], are not ascending numbers below 32"),
        ((1, 1), r"channels to keep, \[1, 1\]"),
        ((-1, 3), r"channels to keep, \[-1, 3\]"),
        ((0, 32), r"channels to keep, \[0, 32\]"),
    ],
)
def test_channels_that_are_not_there_are_refused(channels: tuple[int, ...], message: str) -> None:
    whole = checkpoint(MODELS["embedding"])
    with pytest.raises(InputError, match=message):
        remove_from(whole, only(whole.config, channels))


def test_a_cell_without_projection_is_refused_unless_its_layer_goes() -> None:
    whole = checkpoint(changed(WRITERS["ssru"], decoder=(*WRITERS["ssru"].decoder, LayerConfig(None, WHOLE[0].ffn))))
    with pytest.raises(InputError, match=r"the ssru of decoder layer 0 has no projection and .* channels, 32; keep"):
        remove_from(whole, only(whole.config))
    remove_from(whole, only(whole.config, tuple(range(WIDTH))))
    without = replace(Kept.everything(whole.config, {"decoder": (3,)}), channels=CHANNELS)
    assert remove_from(whole, without).check("small").config.d_model == 19


def test_a_quantized_table_is_refused() -> None:
    config = tiny_config()
    coded = replace(config, embedding=replace(config.embedding, tokens_format=INT8_ROWS))
    with pytest.raises(InputError, match=r"parts of the model are in int8_rows; prune channels first"):
        remove_channels(coded, {}, CHANNELS)


# --- what comes after ---


@pytest.mark.parametrize("kind", ["embedding", "embedding with Dense", "classifier", "post"])
def test_result_saves_loads_exports_and_quantizes(kind: str, tmp_path: Path) -> None:
    small = remove_from(checkpoint(MODELS[kind]), only(MODELS[kind]))
    again = load_own(small.save(tmp_path / "small"))
    assert again.config == small.config
    assert again.provenance["kept"]["channels"] == list(CHANNELS)
    assert all(torch.equal(again.state[name], value) for name, value in small.state.items())
    coded = Quantize(format="int8_dynamic")(small, StepContext(SearchData((), (), (), SENTENCES))).checkpoint
    for name, model in {"float": small, "int8": coded}.items():
        bundle = export(model, tmp_path / name)
        if isinstance(model.config.head, LanguageHead):
            assert check_decoding(model, bundle, SENTENCES[:3], threads=1).passed
        else:
            assert check_parity(model, bundle, texts=SENTENCES, threads=1).passed
    if kind == "embedding":
        assert load_bundle(tmp_path / "float", threads=1).embed(list(SENTENCES)).shape == (5, 19)


def test_provenance_names_original_channels_through_two_removals() -> None:
    whole = checkpoint(MODELS["post"])
    once = remove_from(whole, only(whole.config))
    twice = remove_from(once, only(once.config, (0, 2, 5, 18)))
    assert once.provenance["kept"]["channels"] == list(CHANNELS)
    assert twice.provenance["kept"]["channels"] == [0, 3, 7, 31]
    direct = remove_from(whole, only(whole.config, (0, 3, 7, 31)))
    with torch.no_grad():
        found, expected = (batch(whole.config).run(one.to_torch()).result for one in (twice, direct))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
