"""Which tensors of a checkpoint become int8, under which names, and what it costs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import (
    ABSENT,
    DENSE,
    EMBEDDING,
    LABELS,
    TOKENIZER,
    WHOLE,
    decoder_config,
    ragged,
    random_state,
    tiny,
)

from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import Head, LanguageHead, LayerConfig, TransformerConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.int8 import quantize_rows
from slimformer.transformer.layer_config import HALVES
from slimformer.transformer.quantization import (
    halved,
    linear_names,
    output_table,
    quantized,
    table_names,
    with_formats,
)

NAMES = {
    "whole": [f"encoder.{i}.{name}" for i in (0, 1) for name in ("mixer.qkv", "mixer.out", "ffn.up", "ffn.down")],
    "absent": ["encoder.0.ffn.up", "encoder.0.ffn.down", "encoder.1.mixer.qkv", "encoder.1.mixer.out"],
}
LAYERS = {"whole": WHOLE, "absent": ABSENT}
TABLES = ["embeddings.tokens", "embeddings.positions"]


@pytest.mark.parametrize("name", LAYERS)
def test_names(name: str) -> None:
    plain = tiny(layers=LAYERS[name])
    assert linear_names(plain.config) == NAMES[name]
    assert table_names(plain.config) == TABLES
    done = quantized(plain, bits=8).config
    assert (linear_names(done), table_names(done)) == ([], [])
    assert table_names(quantized(plain, bits=8, tables=False).config) == TABLES


@pytest.mark.parametrize(("bits", "limit"), [(8, 127), (7, 64)])
@pytest.mark.parametrize("name", LAYERS)
def test_the_state_by_hand(name: str, bits: int, limit: int) -> None:
    before = tiny(DENSE, LAYERS[name])
    after = quantized(before, bits=bits)
    expected = dict(before.state)
    for prefix in NAMES[name] + TABLES:
        used = 8 if prefix in TABLES else bits
        expected[f"{prefix}.weight"], expected[f"{prefix}.scale"] = quantize_rows(expected[f"{prefix}.weight"], used)
    assert after.state.keys() == expected.keys()
    assert all(torch.equal(after.state[key], value) for key, value in expected.items())
    assert all(value.dtype == expected[key].dtype for key, value in after.state.items())
    assert int(after.state[f"{NAMES[name][0]}.weight"].abs().max()) == limit
    assert int(after.state["embeddings.tokens.weight"].abs().max()) == 127
    assert after.provenance == {"source": "tiny", "int8_weight_bits": bits}
    assert after.check("here") is after


def test_formats() -> None:
    config = quantized(tiny(), bits=8).config
    assert config.formats == {"int8_dynamic", "int8_rows"}
    assert not config.is_float
    assert (config.embedding.tokens_format, config.embedding.positions_format) == ("int8_rows", "int8_rows")
    assert {(layer.mixer.input_format, layer.ffn.output_format) for layer in config.encoder} == {("int8_dynamic",) * 2}
    config = quantized(tiny(), bits=8, tables=False).config
    assert config.formats == {"int8_dynamic", "float32"}
    assert quantized(tiny(layers=ABSENT), bits=8).config.encoder[2] == LayerConfig(None, None)


def test_the_input_is_not_changed() -> None:
    before, twin = tiny(), tiny()
    quantized(before, bits=8)
    assert before.config == twin.config
    assert all(torch.equal(before.state[name], value) for name, value in twin.state.items())
    assert before.provenance == twin.provenance


@pytest.mark.parametrize("bits", [8, 7])
def test_what_is_int8_stays_as_it_is(bits: int) -> None:
    once = quantized(tiny(), bits=8)
    twice = quantized(once, bits=bits)
    assert twice.config == once.config
    assert twice.provenance == once.provenance  # the weights still have the bits of the first time
    assert twice.state.keys() == once.state.keys()
    assert all(torch.equal(twice.state[name], value) for name, value in once.state.items())


def test_a_model_that_is_int8_in_part_is_completed() -> None:
    plain = tiny()
    part = replace(plain.config.encoder[0], mixer=replace(WHOLE[0].mixer, input_format="int8_dynamic"))
    config = replace(plain.config, encoder=(part, plain.config.encoder[1]))
    weight, scale = quantize_rows(plain.state["encoder.0.mixer.qkv.weight"], 7)
    state = {**plain.state, "encoder.0.mixer.qkv.weight": weight, "encoder.0.mixer.qkv.scale": scale}
    assert linear_names(config) == NAMES["whole"][1:]
    done = quantized(replace(plain, config=config, state=state), bits=8).check("here")
    assert torch.equal(done.state["encoder.0.mixer.qkv.weight"], weight)
    assert done.config == quantized(plain, bits=8).config


@pytest.mark.parametrize("head", [EMBEDDING, DENSE, LABELS], ids=["mean", "Dense", "labels"])
@pytest.mark.parametrize("bits", [8, 7])
def test_the_result_is_near_that_of_the_float_model(head: Head, bits: int) -> None:
    before = tiny(head)
    batch = ragged((8, 3, 20, 1))
    with torch.inference_mode():
        expected = before.to_torch()(*batch)
        found = quantized(before, bits=bits).to_torch()(*batch)
        tables = quantized(before, bits=bits, tables=False).to_torch()(*batch)
    for one, other in ((found.hidden, expected.hidden), (found.result, expected.result)):
        error = float((one - other).norm() / other.norm())
        assert 1e-4 < error < 0.04
    assert not torch.equal(found.hidden, tables.hidden)


HEADS = {
    "tied": (decoder_config(0, 1), "embeddings.tokens"),
    "untied": (decoder_config(0, 1, head=LanguageHead(2, 3, tied=False)), "head.tokens"),
    "of the target": (
        decoder_config(1, 1, target=replace(decoder_config().embedding, vocab_size=31)),
        "target.tokens",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_table_that_is_the_output_layer_has_the_bits_of_products(name: str) -> None:
    """It takes part in products, which saturate with 8 bits where linears need 7; other tables are only read."""
    config, output = HEADS[name]
    done = quantized(Checkpoint(config, random_state(config, 0), TOKENIZER, {}), bits=7)
    greatest = {table: int(done.state[f"{table}.weight"].abs().max()) for table in table_names(config)}
    assert output_table(config) == output
    assert greatest == {table: 64 if table == output else 127 for table in table_names(config)}
    assert output_table(tiny().config) is None


def test_formats_by_name() -> None:
    config = decoder_config(1, 1)
    forms = {"encoder.0.mixer.qkv": "int8_static", "decoder.0.ffn.down": "int4_blocks"}
    forms |= dict.fromkeys(("decoder.0.cross.q", "decoder.0.cross.kv"), "int8_dynamic")
    done = with_formats(config, forms)
    encoder, decoder = done.encoder[0], done.decoder[0]
    assert (encoder.mixer.input_format, encoder.mixer.output_format) == ("int8_static", "float32")
    assert (encoder.ffn.input_format, encoder.ffn.output_format) == ("float32", "float32")
    assert (decoder.cross.input_format, decoder.cross.output_format) == ("int8_dynamic", "float32")
    assert (decoder.ffn.input_format, decoder.ffn.output_format) == ("float32", "int4_blocks")
    assert set(linear_names(config)) - set(linear_names(done)) == set(forms)
    with pytest.raises(AssertionError, match="is asked for in"):
        with_formats(config, {"decoder.0.cross.q": "int8_static"})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny().config, False),
        (quantized(tiny(), bits=8).config, True),
        (quantized(tiny(), bits=8, tables=False).config, True),
        (with_formats(tiny().config, dict.fromkeys(NAMES["whole"], "int8_static")), False),
        (with_formats(tiny().config, {NAMES["whole"][0]: "int8_dynamic", NAMES["whole"][1]: "int4_blocks"}), True),
        (decoder_config(0, 1), False),
        (replace(decoder_config(0, 1), embedding=replace(decoder_config().embedding, tokens_format="int8_rows")), True),
        (decoder_config(0, 1, head=LanguageHead(2, 3, tied=False, format="int8_rows")), True),
        (replace(tiny().config, embedding=replace(tiny().config.embedding, tokens_format="int8_rows")), False),
    ],
)
def test_what_depends_on_the_texts_beside(config: TransformerConfig, expected: bool) -> None:
    """Ranges at run time are those of all that is multiplied at once; tables that are only read have none."""
    assert config.depends_on_batch is expected


@pytest.mark.parametrize("form", HALVES)
def test_linears_in_half_precision(form: str, tmp_path: Path) -> None:
    """The layers' linears alone are rounded; saved and loaded they are the same, and no other model's."""
    before = tiny(DENSE)
    after = halved(before, form)
    rounded = {f"{name}.{part}" for name in NAMES["whole"] for part in ("weight", "bias")}
    for name, value in before.state.items():
        kind = getattr(torch, form) if name in rounded else torch.float32
        assert torch.equal(after.state[name], value.to(kind)), name
        assert after.state[name].dtype == kind
    assert (linear_names(after.config), table_names(after.config)) == ([], TABLES)
    assert after.config.formats == {form, "float32"}
    assert (after.config.is_float, after.config.depends_on_batch) == (False, False)
    again = load_own(after.save(tmp_path / "model"))
    assert again.config == after.config
    assert all(torch.equal(again.state[name], value) for name, value in after.state.items())
    assert again.fingerprint() == after.fingerprint() != before.fingerprint()


def test_a_weight_beyond_half_precision_is_named() -> None:
    loud = tiny()
    state = {**loud.state, "encoder.1.ffn.up.bias": loud.state["encoder.1.ffn.up.bias"] + 1e5}
    with pytest.raises(InputError, match=r"encoder\.1\.ffn\.up\.bias has 1e\+05, and float16 ends at"):
        halved(replace(loud, state=state), "float16")
