"""The greatest of many columns in two rounds, against numpy's stable sort, ties and minus infinity included."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest

from slimformer.export.best import best_column, best_sums, block_starts, block_width
from slimformer.export.graph import Graph

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def run(build: Callable[[Graph], dict[str, str]], **feeds: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> list:  # type: ignore[type-arg]
    g = Graph()
    outputs = build(g)
    for name, value in outputs.items():
        g.name_output(value, name)
    kinds = {name: INT64 if feed.dtype == np.int64 else FLOAT for name, feed in feeds.items()}
    axes = {name: [None] * feed.ndim for name, feed in feeds.items()}
    model = g.model(
        axes,
        {name: [None, None] for name in outputs},
        contrib=False,
        types={**kinds, "places": INT64},  # type: ignore[arg-type]
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.mark.parametrize(("columns", "width"), [(8000, 100), (64, 8), (500, 25), (97, None), (8006, None), (1, None)])
def test_block_width_by_hand(columns: int, width: int | None) -> None:
    assert block_width(columns) == width


@pytest.mark.parametrize("columns", [64, 500, 97, 1024])
def test_best_column_is_the_first_of_the_greatest(columns: int) -> None:
    random = np.random.default_rng(columns)
    values = random.integers(0, 40, (50, columns)).astype(np.float32)  # full of ties
    values[0] = -np.inf
    values[1, -1] = 100

    def build(g: Graph) -> dict[str, str]:
        rows = g.add("Shape", "values", start=0, end=1)
        return {"places": best_column(g, "values", columns, block_starts(g, rows, columns))}

    (found,) = run(build, values=values)
    assert (found[:, 0] == values.argmax(1)).all()


@pytest.mark.parametrize("columns", [64, 500, 97])
@pytest.mark.parametrize(("beams", "count"), [(1, 2), (4, 8), (5, 10), (3, 60)])
def test_best_sums_are_those_of_a_stable_sort(columns: int, beams: int, count: int) -> None:
    random = np.random.default_rng(columns + beams)
    values = random.integers(0, 30, (7 * beams, columns)).astype(np.float32)
    scores = random.integers(0, 3, (7, beams)).astype(np.float32)
    scores[0, 1:] = -np.inf  # as before the first round
    sums, places = run(
        lambda g: dict(zip(("sums", "places"), best_sums(g, "scores", "values", columns, "count"), strict=True)),
        scores=scores,
        values=values,
        count=np.array([count]),
    )
    every = (values.reshape(7, beams, columns) + scores[:, :, None]).reshape(7, -1)
    order = np.argsort(-every, axis=1, kind="stable")[:, :count]
    assert (places == order).all()
    assert (sums == np.take_along_axis(every, order, 1)).all()
