"""Parts of a linear's weights."""

import numpy as np

from slimformer.export.tensors import Weights


def test_a_linear_is_cut_by_its_outputs_alone() -> None:
    """What has an entry for each input stays whole, though there are as many inputs as outputs."""
    rows = np.arange(36.0).reshape(6, 6)
    state = {
        "a.qkv.weight": rows,
        "a.qkv.bias": rows[:, 0],
        "a.qkv.scale": rows[:, 1],
        "a.qkv.factor": rows[:, 2],
        "a.qkv.input_scale": np.float32(3),
        "a.other.weight": rows,
    }
    parts = Weights(state).at("a").cut("qkv", {"q": 3, "k": 1, "v": 2})
    assert [part.full("weight") for part in parts] == ["a.q.weight", "a.k.weight", "a.v.weight"]
    for part, own in zip(parts, (slice(3), slice(3, 4), slice(4, 6)), strict=True):
        np.testing.assert_array_equal(part["weight"], rows[own])
        np.testing.assert_array_equal(part["bias"], rows[own, 0])
        np.testing.assert_array_equal(part["scale"], rows[own, 1])
        np.testing.assert_array_equal(part["factor"], rows[:, 2])
        assert part["input_scale"] == 3
        assert set(part.state) == {part.full(name) for name in ("weight", "bias", "scale", "factor", "input_scale")}
