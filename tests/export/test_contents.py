"""What a bundle says of itself and whether it is there, above all the weights beside the graphs."""

import json
from pathlib import Path

import onnx
import pytest
from models import SENTENCES, translator
from tiny import tiny

from slimformer.export.bundle import export
from slimformer.export.contents import read_own, stored_bytes
from slimformer.export.inspection import inspect_model
from slimformer.export.runtime import load_bundle
from slimformer.transformer.errors import InputError

FILE = "onnx/weights.data"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return export(translator(), tmp_path / "bundle")


@pytest.mark.parametrize("reader", [load_bundle, inspect_model, read_own])
def test_weights_that_are_missing_or_cut_are_named(reader: object, bundle: Path) -> None:
    assert callable(reader)
    path = bundle / FILE
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(InputError) as caught:
        reader(bundle)
    assert str(caught.value) == f"{path} has {len(content) - 1} bytes of {len(content)}; export the bundle again"
    path.unlink()
    with pytest.raises(InputError) as caught:
        reader(bundle)
    assert str(caught.value) == f"{path} is missing, the weights are in it; export the bundle again"
    path.write_bytes(content)
    reader(bundle)


def test_the_bytes_of_a_bundle_are_those_of_all_its_graphs_and_weights(bundle: Path, tmp_path: Path) -> None:
    names = ("generate", "encoder_model", "decoder_model", "decoder_with_past_model")
    files = [bundle / FILE, *(bundle / f"onnx/{name}.onnx" for name in names)]
    expected = sum(file.stat().st_size for file in files)
    assert stored_bytes(bundle) == inspect_model(bundle)["bytes"] == expected
    encoder = export(tiny(), tmp_path / "encoder")
    assert stored_bytes(encoder) == (encoder / "onnx/model.onnx").stat().st_size
    assert "weights" not in read_own(encoder)


def test_a_bundle_from_before_the_file_still_writes(bundle: Path) -> None:
    """One graph that holds its weights, and nothing said of a file."""
    written = load_bundle(bundle, threads=1).translate(SENTENCES)
    path = bundle / "onnx/generate.onnx"
    onnx.save(onnx.load(path), path)
    for file in (bundle / "onnx").iterdir():
        if file != path:
            file.unlink()
    own = json.loads((bundle / "slimformer.json").read_text())
    del own["weights"]
    (bundle / "slimformer.json").write_text(json.dumps(own))
    opened = load_bundle(bundle, threads=1)
    assert opened.translate(SENTENCES) == written
    with pytest.raises(InputError, match=r"encoder_model\.onnx is missing: .* export the bundle again"):
        opened.stream("sort")


@pytest.mark.parametrize("said", ["[1]", '"x"', "3"])
def test_what_is_said_of_weights_has_to_make_sense(said: str, bundle: Path) -> None:
    path = bundle / "slimformer.json"
    own = json.loads(path.read_text())
    path.write_text(json.dumps({**own, "weights": json.loads(said)}))
    with pytest.raises(InputError, match="damaged"):
        read_own(bundle)
