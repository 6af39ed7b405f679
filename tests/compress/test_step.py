import pytest

from slimformer.compress.step import StepContext
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
