"""Layer maps: rules by hand, the search against all maps, what is refused."""

from itertools import combinations

import numpy as np
import pytest
from tiny import layer, sentences, tiny, tiny_config

from slimformer.compress.distill import Distill
from slimformer.compress.layer_maps import best_rising, check_map, map_by_rule, searched_map
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.errors import InputError

TEACHER = tiny(tiny_config((layer(), layer(4, 4), layer(2, 6), layer(1, 8, 12))), seed=5)
IDS = TEACHER.text_encoder().encode(sentences(300, seed=4))


@pytest.mark.parametrize(
    ("rule", "layers", "others", "expected"),
    [
        ("even", 3, 6, (1, 3, 5)),
        ("even", 4, 6, (0, 2, 3, 5)),
        ("even", 1, 6, (5,)),
        ("even", 6, 6, (0, 1, 2, 3, 4, 5)),
        ("top", 3, 6, (3, 4, 5)),
        ("top", 2, 2, (0, 1)),
    ],
)
def test_rules_by_hand(rule: str, layers: int, others: int, expected: tuple[int, ...]) -> None:
    assert map_by_rule(rule, layers, others) == expected


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 3), (3, 6), (4, 7)])
def test_the_search_finds_the_best_of_all_maps(shape: tuple[int, int]) -> None:
    for seed in range(20):
        costs = np.random.default_rng(seed).random(shape).tolist()
        every = combinations(range(shape[1]), shape[0])
        expected = min(every, key=lambda found: sum(row[j] for row, j in zip(costs, found, strict=True)))
        assert best_rising(costs) == expected


def keeping(*layers: int) -> Checkpoint:
    """The teacher's first layers, the others being left out."""
    config = TEACHER.config.with_layers(tuple(TEACHER.config.encoder[i] for i in layers))
    state = {name: value for name, value in TEACHER.state.items() if not name.startswith("encoder.")}
    for place, i in enumerate(layers):
        own = {name: value for name, value in TEACHER.state.items() if name.startswith(f"encoder.{i}.")}
        state |= {name.replace(f"encoder.{i}.", f"encoder.{place}.", 1): value for name, value in own.items()}
    return Checkpoint(config, state, TEACHER.tokenizer).check("student")


@pytest.mark.parametrize("first", [1, 2, 4])
def test_layers_that_are_the_teachers_first_are_found(first: int) -> None:
    assert searched_map(keeping(*range(first)), TEACHER, IDS) == tuple(range(first))


def test_what_does_not_fit_is_refused() -> None:
    assert check_map((3, -1, 0), 3, 4) == (3, -1, 0)
    with pytest.raises(InputError, match="layers names 2 layers, one for each of the student's 3 is needed"):
        check_map((0, 1), 3, 4)
    for strange in (4, -2):
        with pytest.raises(InputError, match=rf"layers names {strange}, the teacher has 0 to 3 \(-1: none\)"):
            check_map((0, strange), 2, 4)
    for refused in (lambda: map_by_rule("top", 5, 4), lambda: searched_map(TEACHER, keeping(0), IDS)):
        with pytest.raises(InputError, match=r"the student has . layers, the teacher .: give the layers to learn from"):
            refused()
    with pytest.raises(InputError, match="layers is 'first', not one of last, even, top, search"):
        Distill(hidden=1.0, layers="first")
    with pytest.raises(InputError, match="layers is of hidden and attention, whose weights are 0"):
        Distill(layers="even")
