"""The picture of kept units, cell by cell, and what it makes of damaged notes."""

from typing import Any

import pytest

from slimformer.export.inspection import _columns
from slimformer.export.kept_picture import LEGEND, kept_table

KEPT = {
    "layers": [1, 3],
    "heads": [[0, 2], []],
    "neurons": [[0, 1, 2, 3, 7], [1, 2, 5, 6]],
    "channels": [0, 1, 3, 4, 5, 6],
}
OF = {"layers": 5, "heads": [4, 3, 0, 2, 2], "neurons": [64, 8, 8, 64, 0], "channels": 8}
DECODER = {"layers": [0, 2], "heads": [[0], []], "cross_heads": [[1], [0]], "neurons": [[], [0, 1, 3]]}
DECODER_OF = {"layers": 3, "heads": [2, 2, 0], "cross_heads": [2, 2, 2], "neurons": [4, 4, 4]}


def drawn(kept: Any, kept_of: Any) -> list[str]:
    table = kept_table(kept, kept_of)
    assert table is not None
    return _columns(*table).splitlines()


def test_an_encoder_is_drawn_layer_by_layer() -> None:
    """Layer 3 had 64 neurons, two a cell; 1 and 2 are in cells 0 and 1, 5 and 6 in cells 2 and 3."""
    assert drawn(KEPT, OF) == [
        "layer     heads    neurons",
        "0         removed",
        "1         ■□■ 2/3  ████   █ 5/8",
        "2         removed",
        "3         □□ 0/2   ▄▄▄▄                             4/64",
        "4         removed",
        "channels           ██ ████  6/8",
    ]


def test_an_encoder_decoder_has_cross_heads_and_both_stacks() -> None:
    kept, of = {"layers": [0], "heads": [[1]], "neurons": [[0, 1]]}, {"layers": 1, "heads": [2], "neurons": [2]}
    assert drawn({**kept, "decoder": DECODER}, {**of, "decoder": DECODER_OF}) == [
        "layer      heads    cross heads  neurons",
        "0          □■ 1/2   -            ██ 2/2",
        "decoder 0  ■□ 1/2   □■ 1/2            0/4",
        "decoder 1  removed",
        "decoder 2  -        ■□ 1/2       ██ █ 3/4",
    ]


def test_a_decoder_by_itself() -> None:
    kept = {"layers": [], "heads": [], "neurons": [], "decoder": {**DECODER, "cross_heads": [[], []]}}
    of = {"layers": 0, "heads": [], "neurons": [], "decoder": {**DECODER_OF, "cross_heads": [0, 0, 0]}}
    assert drawn(kept, of) == [
        "layer      heads    neurons",
        "decoder 0  ■□ 1/2        0/4",
        "decoder 1  removed",
        "decoder 2  -        ██ █ 3/4",
    ]


@pytest.mark.parametrize(
    ("stayed", "cell"), [(0, " "), (1, "▁"), (2, "▁"), (3, "▂"), (7, "▄"), (8, "▄"), (13, "▆"), (15, "▇"), (16, "█")]
)
def test_a_cell_is_full_and_empty_only_where_its_stretch_is(stayed: int, cell: str) -> None:
    """Sixteen units a cell, one level for each 16 / 7 of them."""
    own = [*range(16), *range(32, 32 + stayed)]
    rows = drawn({"layers": [0], "neurons": [own]}, {"layers": 1, "neurons": [512]})
    assert rows[1] == f"{'0':>5}  █ {cell}{' ' * 29} {16 + stayed}/512"


def test_stretches_that_do_not_come_out_even_are_one_apart() -> None:
    """40 neurons in 32 cells: 1, 1, 1, 2, again and again."""
    rows = drawn({"layers": [0], "neurons": [[0, 3, 4, 8, 39]]}, {"layers": 1, "neurons": [40]})
    assert rows[1] == "    0  █  █   ▄" + " " * 23 + "▄ 5/40"


def test_many_heads_are_a_bar_and_lines_stay_within_110_columns() -> None:
    heads, neurons = list(range(0, 128, 2)), list(range(16384))
    one = {"layers": [0], "heads": [heads], "neurons": [neurons]}
    of = {"layers": 1, "heads": [128], "neurons": [16384]}
    assert drawn(one, of)[1] == f"    0  {'▄' * 32} 64/128  {'█' * 32} 16384/16384"
    assert "■" * 32 in drawn({**one, "heads": [list(range(32))]}, {**of, "heads": [32]})[1]
    decoder = {
        **{key: value * 11 for key, value in one.items()},
        "cross_heads": [heads] * 11,
        "layers": list(range(11)),
    }
    counts = {**{key: [value[0]] * 11 for key, value in of.items() if key != "layers"}, "cross_heads": [128] * 11}
    rows = drawn({**one, "decoder": decoder}, {**of, "decoder": {**counts, "layers": 11}})
    assert rows[-1] == f"decoder 10  {'▄' * 16} 64/128  {'▄' * 16} 64/128  {'█' * 32} 16384/16384"
    assert max(map(len, [*rows, LEGEND])) <= 110


@pytest.mark.parametrize("channels", [[1, 0], [8], "all", [True], None])
def test_channels_that_make_no_sense_are_left_out(channels: Any) -> None:
    assert len(drawn({**KEPT, "channels": channels}, OF)) == 6
    assert len(drawn(KEPT, {**OF, "channels": channels})) == 6


@pytest.mark.parametrize("kept", [None, [], "kept", {}, {"layers": [1, 3]}, {**KEPT, "layers": [3, 1]}])
def test_nothing_is_drawn_without_sound_notes(kept: Any) -> None:
    assert kept_table(kept, OF) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", [1, 5]),
        ("layers", [1]),
        ("layers", ["1", "3"]),
        ("layers", [1, 3.0]),
        ("heads", [[0, 2]]),
        ("heads", [[0, 3], []]),
        ("heads", [[2, 0], []]),
        ("heads", [[0, 0], []]),
        ("heads", [[-1, 0], []]),
        ("heads", [3, None]),
        ("neurons", {"1": [0]}),
        ("neurons", [[None], []]),
    ],
)
def test_damaged_lists_are_not_drawn(field: str, value: Any) -> None:
    assert kept_table({**KEPT, field: value}, OF) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", None),
        ("layers", -1),
        ("layers", 10**12),
        ("layers", 5.0),
        ("heads", [4, 3, 0, 2]),
        ("heads", [4, "3", 0, 2, 2]),
        ("heads", [4, 3, 0, -1, 2]),
        ("heads", 3),
        ("neurons", [[8]] * 5),
    ],
)
def test_damaged_counts_are_not_drawn(field: str, value: Any) -> None:
    assert kept_table(KEPT, {**OF, field: value}) is None


def test_a_damaged_decoder_is_not_drawn() -> None:
    both = {**KEPT, "decoder": DECODER}, {**OF, "decoder": DECODER_OF}
    assert kept_table(*both) is not None
    assert kept_table(KEPT, both[1]) is None
    assert kept_table(both[0], {**OF, "decoder": 3}) is None
    assert kept_table({**KEPT, "decoder": []}, both[1]) is None
    assert kept_table({**KEPT, "decoder": {**DECODER, "cross_heads": [[2], [0]]}}, both[1]) is None


def test_counts_beyond_all_memory_do_no_harm() -> None:
    neurons = {**OF, "neurons": [64, 8, 8, 10**15, 0]}
    assert drawn(KEPT, neurons)[4].endswith(f" 4/{10**15}")
    assert kept_table({"layers": [], "heads": []}, {"layers": 10**15, "heads": []}) is None
