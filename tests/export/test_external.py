"""The file that the graphs of a bundle share: what is in it, how often, and where the graphs say that it is."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import POSITIONS, VOCAB_SIZE, WIDTH, decoder_config
from writing import END, START, writer

from slimformer.export.bundle import export
from slimformer.export.external import ALIGNMENT, SharedWeights
from slimformer.export.graph import Graph
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import LanguageHead
from slimformer.transformer.quantization import quantized

ATTENTION = 4 * WIDTH * WIDTH  # QKV and output
CROSS = WIDTH * 24 + WIDTH * 48 + 24 * WIDTH  # 2 heads of 12
FFN = 2 * WIDTH * 48
TABLE, SINUSOIDS = VOCAB_SIZE * WIDTH, POSITIONS * WIDTH
BIASES = {"attention": 4 * WIDTH, "cross": 24 + 48 + WIDTH, "FFN": 48 + WIDTH, "norm": 2 * WIDTH, "head": VOCAB_SIZE}


def model(encoder: int) -> Checkpoint:
    """One layer of each stack; the head shares the table of the embeddings."""
    return writer(decoder_config(encoder, 1, head=LanguageHead(START, END, bias=True)), 5, 1.0)


def spans(onnx_folder: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Offset and length of every external tensor, graph by graph; every one says the same file."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for path in sorted(onnx_folder.glob("*.onnx")):
        own = found.setdefault(path.name, {})
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            said = {entry.key: entry.value for entry in tensor.external_data}
            assert (tensor.data_location == onnx.TensorProto.EXTERNAL) is ("." in tensor.name)
            if said:
                assert said["location"] == "weights.data"
                own[tensor.name] = int(said["offset"]), int(said["length"])
    return found


def floats(encoder: int) -> tuple[int, int]:
    """Elements of the matrices of linears and of all else that is stored, worked out by hand."""
    matrices = ATTENTION + FFN + (ATTENTION + FFN + CROSS if encoder else 0)
    small = BIASES["attention"] + BIASES["FFN"] + 2 * BIASES["norm"]
    small += BIASES["attention"] + BIASES["FFN"] + BIASES["cross"] + 3 * BIASES["norm"] if encoder else 0
    return matrices, small + BIASES["head"]


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("encoder", [1, 0])
def test_each_tensor_is_stored_once(encoder: int, format: str, tmp_path: Path) -> None:
    """In int8 matrices and table take a byte an element, and a float for each output and each row of the table."""
    folder = export(model(encoder), tmp_path / "b", format=format) / "onnx"
    matrices, small = floats(encoder)
    scales = 4 * WIDTH + 48 + WIDTH + (4 * WIDTH + 48 + WIDTH + 24 + 48 + WIDTH if encoder else 0) + VOCAB_SIZE
    weights = (matrices + TABLE) * 4 if format == "fp32" else matrices + TABLE + scales * 4
    expected = weights + small * 4 + SINUSOIDS * 4
    by_graph = spans(folder)
    assert len(by_graph) == (4 if encoder else 2)
    every = {name: span for own in by_graph.values() for name, span in own.items()}
    assert all(own[name] == every[name] for own in by_graph.values() for name in own)
    assert sum(length for _, length in every.values()) == expected
    ordered = sorted(every.values())
    gaps = [after - (start + length) for (start, length), (after, _) in pairwise(ordered)]
    assert all(0 <= gap < ALIGNMENT for gap in gaps)
    assert all(start % ALIGNMENT == 0 for start, _ in ordered)
    assert (folder / "weights.data").stat().st_size == sum(ordered[-1]) == expected + sum(gaps)
    assert all((folder / name).stat().st_size < 100_000 for name in by_graph)


@pytest.mark.parametrize("encoder", [1, 0])
def test_the_stored_tensors_are_those_of_the_state_dict(encoder: int, tmp_path: Path) -> None:
    """All as they are but the matrices of the encoder, which lie turned, as the products take them."""
    checkpoint = quantized(model(encoder), bits=7)
    folder = export(checkpoint, tmp_path / "b") / "onnx"
    content = (folder / "weights.data").read_bytes()
    every = {name: span for own in spans(folder).values() for name, span in own.items()}
    assert set(every) == set(checkpoint.state) | {"embeddings.positions.sinusoids"}
    for name, tensor in checkpoint.state.items():
        start, length = every[name]
        linear = name.startswith("encoder.") and tensor.ndim == 2
        value = tensor.numpy().T if linear else tensor.numpy()
        assert content[start : start + length] == np.ascontiguousarray(value).tobytes(), name


def test_a_session_maps_the_file(tmp_path: Path) -> None:
    from slimformer.export.runtime import load_bundle

    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the maps of a process are Linux's")
    bundle = export(model(1), tmp_path / "b")
    opened = load_bundle(bundle, threads=1)
    assert str(bundle / "onnx/weights.data") in maps.read_text()
    assert opened.translate(["sort"], max_new_tokens=2)


def graph(**weights: Any) -> onnx.ModelProto:
    """The sum of some weights and a constant."""
    made = Graph()
    total = made.constant(1, np.float32)
    for name, value in weights.items():
        total = made.add("Add", total, made.weight(f"a.{name}", np.asarray(value, np.float32)))
    made.name_output(total, "out")
    return made.model({}, {"out": ["n"]}, contrib=False)


def test_a_name_with_other_bytes_is_a_fault_of_ours() -> None:
    shared = SharedWeights("w")
    shared.take(graph(x=[1, 2]))
    shared.take(graph(x=[1, 2], y=[3]))
    assert len(shared.content) == ALIGNMENT + 4
    with pytest.raises(AssertionError, match=r"a\.x"):
        shared.take(graph(x=[1, 3]))
