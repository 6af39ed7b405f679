from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import search_data, tiny

from slimformer.compress.movement import Movement
from slimformer.compress.step import StepContext, run_digest
from slimformer.transformer.data import (
    Data,
    LabelledData,
    LabelledRow,
    Page,
    Pair,
    PairData,
    Query,
    SearchData,
    TextData,
    TextRow,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.progress import Silent

OTHER = (Pair("not", "never", "9"),)


@pytest.mark.parametrize(
    "data",
    [
        LabelledData(
            (LabelledRow("a", "x", "0"), LabelledRow("b", "y", "1")), (LabelledRow("c", "x", "2"),), (), ("b",)
        ),
        PairData((Pair("a", "z", "0"), Pair("b", "z", "1"), Pair("a", "y", "2")), OTHER, OTHER, ("b",)),
        TextData((TextRow("a", "0"), TextRow("a", "1")), (TextRow("c", "2"),), (TextRow("d", "3"),), ("b",)),
        SearchData((Page("p", "", "c"),), (Query("d", ("p",), "p"),), (), ("a", "b", "a")),
    ],
    ids=["labelled", "pairs", "texts", "search"],
)
def test_training_texts_are_those_of_train_and_texts_each_once(data: Data) -> None:
    assert StepContext(data).training_texts() == ("a", "b")


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(InputError, match="no texts to learn from"):
        StepContext(PairData((), OTHER, OTHER, ())).training_texts()


STEP, MODEL = Movement(steps=10), tiny()
CONTEXT = StepContext(search_data())


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"device": "cuda"},
        {"target": "vnni"},
        {"workload": "single"},
        {"provider": "cuda"},
        {"threads": 1},
        {"keep_index": True},
        {"teacher": tiny(seed=1)},
        {"data": replace(CONTEXT.data, texts=CONTEXT.data.texts[:-1])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_kept_of_a_run_is_not_of_another(changes: dict[str, Any]) -> None:
    assert run_digest(STEP, MODEL, CONTEXT) != run_digest(STEP, MODEL, replace(CONTEXT, **changes))


def test_a_run_is_that_of_a_step_and_a_model() -> None:
    first = run_digest(STEP, MODEL, CONTEXT)
    assert first != run_digest(replace(STEP, cost=0.4), MODEL, CONTEXT)
    assert first != run_digest(STEP, tiny(seed=1), CONTEXT)
    same = replace(CONTEXT, teacher=tiny(), progress=Silent(), workdir=Path("elsewhere"))
    assert first == run_digest(Movement(steps=10), tiny(), same)
