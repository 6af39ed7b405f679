from dataclasses import replace

import pytest
from models import MIXERS, WRITERS, decoder_config

from slimformer.compress.units import Kept, stacks, sublayers
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
