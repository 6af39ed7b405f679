from dataclasses import replace

import pytest
from models import MIXERS, WRITERS, decoder_config, tiny_config

from slimformer.compress.units import Kept, stacks, sublayers, unit_counts
from slimformer.transformer.config import RecurrentConfig


@pytest.mark.parametrize("kind", WRITERS)
def test_units_and_cells_cost_what_the_model_costs(kind: str) -> None:
    config = WRITERS[kind]
    units = sum(sub.count * sub.unit_cost(config.d_model) for sub in sublayers(config))
    cells = [layer.mixer for layer in config.layers if isinstance(layer.mixer, RecurrentConfig)]
    assert units + sum(cell.multiply_adds(config.d_model) for cell in cells) == config.multiply_adds()


def test_sublayers_are_those_of_both_stacks_that_have_units() -> None:
    config = decoder_config(1, 2, MIXERS["ssru"])
    second = replace(config.decoder[1], mixer=None, cross=None)
    found = sublayers(config.with_layers(config.encoder, (config.decoder[0], second)))
    assert [(sub.name, sub.count, sub.width) for sub in found] == [
        ("encoder.0.mixer", 4, 8),
        ("encoder.0.ffn", 48, 1),
        ("decoder.0.cross", 2, 12),
        ("decoder.0.ffn", 48, 1),
        ("decoder.1.ffn", 48, 1),
    ]
    assert list(stacks(decoder_config(0, 1))) == ["decoder"]


def test_heads_that_share_keys_are_one_unit() -> None:
    found = {sub.name: sub for sub in sublayers(WRITERS["grouped"])}
    mixer, cross = found["decoder.0.mixer"], found["decoder.0.cross"]
    assert (mixer.count, mixer.width, mixer.inputs) == (3, 10, {"qkv": (10, 5, 5)})
    assert (cross.count, cross.width, cross.inputs) == (1, 24, {"q": (24,), "kv": (12, 12)})
    assert mixer.unit_cost(32) == 32 * (10 + 5 + 5 + 10)


KEPT = Kept(
    {"encoder": (0, 2), "decoder": (1,)},
    {"encoder.0.mixer": (0, 2), "encoder.0.ffn": (1, 4), "encoder.2.ffn": (3,), "decoder.1.cross": (1,)},
)
WRITTEN = {
    "layers": [0, 2],
    "heads": [[0, 2], []],
    "neurons": [[1, 4], [3]],
    "decoder": {"layers": [1], "heads": [[]], "cross_heads": [[1]], "neurons": [[]]},
}


def test_what_is_written_is_read_back() -> None:
    assert KEPT.to_dict() == WRITTEN
    assert Kept.from_dict(WRITTEN) == KEPT
    alone = Kept({"decoder": (0,)}, {"decoder.0.mixer": (1, 3)})
    assert Kept.from_dict(alone.to_dict()) == alone


def test_an_encoders_form_has_no_decoder() -> None:
    written = {"layers": [1], "heads": [[0]], "neurons": [[2, 3]]}
    kept = Kept({"encoder": (1,)}, {"encoder.1.mixer": (0,), "encoder.1.ffn": (2, 3)})
    assert Kept.from_dict(written) == kept
    assert kept.to_dict() == written


def test_channels_are_written_where_some_go() -> None:
    kept = replace(KEPT, channels=(0, 3))
    assert kept.to_dict() == {**WRITTEN, "channels": [0, 3]}
    assert Kept.from_dict(kept.to_dict()) == kept
    assert Kept.from_dict(WRITTEN).channels is None


def test_channels_of_a_second_removal_are_those_of_the_first_model() -> None:
    everything = Kept({"encoder": (0, 1), "decoder": (0,)}, {})
    some, of_these = replace(KEPT, channels=(2, 3, 5, 8)), replace(everything, channels=(1, 3))
    assert of_these.within(some).channels == (3, 8)
    assert of_these.within(KEPT).channels == (1, 3)
    assert everything.within(some).channels == (2, 3, 5, 8)
    assert everything.within(KEPT).channels is None


def test_counts_are_of_every_list() -> None:
    config = decoder_config(1, 2, MIXERS["ssru"])
    second = replace(config.decoder[1], mixer=MIXERS["other heads"], cross=None)
    assert unit_counts(config.with_layers(config.encoder, (config.decoder[0], second))) == {
        "layers": 1,
        "heads": [4],
        "neurons": [48],
        "decoder": {"layers": 2, "heads": [0, 3], "cross_heads": [2, 0], "neurons": [48, 48]},
        "channels": 32,
    }
    alone = unit_counts(tiny_config())
    assert alone == {"layers": 2, "heads": [4, 2], "neurons": [64, 40], "channels": 32}


def test_everything_of_some_layers() -> None:
    kept = Kept.everything(decoder_config(2, 2), {"decoder": (1,)})
    assert kept.layers == {"encoder": (0, 1), "decoder": (1,)}
    assert kept.units["decoder.1.cross"] == (0, 1)
    assert len(kept.units) == 2 * 2 + 3


def test_numbers_of_a_second_removal_are_those_of_the_first_model() -> None:
    second = Kept(
        {"encoder": (1,), "decoder": (0,)}, {"encoder.1.ffn": (0,), "encoder.1.mixer": (), "decoder.0.cross": (0,)}
    )
    first = second.within(KEPT)
    assert first.layers == {"encoder": (2,), "decoder": (1,)}
    assert first.units == {"encoder.2.ffn": (3,), "encoder.2.mixer": (), "decoder.1.cross": (1,)}
