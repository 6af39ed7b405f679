"""The curve of a training: written, read, and shown by TensorBoard."""

import json
import sys
from pathlib import Path

import pytest

from slimformer.transformer.curves import CURVE, Board, CurvePoint, read_curve, write_curve
from slimformer.transformer.errors import InputError

POINTS = (CurvePoint(5, 2.5, 1e-3, {"encoder.0": 0.5, "head": 0.25}), CurvePoint(9, 1.5, 5e-4, {"encoder.0": 0.75}))
EPOCHS = ({"epoch": 1, "step": 5, "BLEU": 1.25}, {"epoch": 2, "step": 9, "BLEU": 3.5})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_curve(tmp_path, POINTS, EPOCHS, "BLEU")
    assert read_curve(tmp_path) == {"deciding": "BLEU", "points": list(POINTS), "epochs": list(EPOCHS)}


@pytest.mark.parametrize(
    "content", ["", "[]", '{"points": []}', '{"deciding": 1, "points": [{"step": 1}], "epochs": []}']
)
def test_what_is_no_curve_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name a directory that slimformer train wrote"):
        read_curve(tmp_path)
    (tmp_path / CURVE).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="not the curve of a training"):
        read_curve(tmp_path)


def test_tensorboard_reads_what_the_board_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(tmp_path / "board")
    for point, epoch in zip(POINTS, EPOCHS, strict=True):
        board.point(point)
        board.metrics(int(epoch["step"]), {"BLEU": float(epoch["BLEU"])})
    board.close()
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    read = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert read == {
        "train/loss": [(5, 2.5), (9, 1.5)],
        "train/learning rate": [(5, pytest.approx(1e-3)), (9, pytest.approx(5e-4))],
        "train/gradient/encoder.0": [(5, 0.5), (9, 0.75)],
        "train/gradient/head": [(5, 0.25)],
        "valid/BLEU": [(5, 1.25), (9, 3.5)],
    }


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install slimformer\[tensorboard\]"):
        Board(tmp_path)


def test_the_file_is_json(tmp_path: Path) -> None:
    write_curve(tmp_path, POINTS[:1], EPOCHS[:1], "BLEU")
    content = json.loads((tmp_path / CURVE).read_text(encoding="utf-8"))
    assert content["points"] == [{"step": 5, "loss": 2.5, "lr": 1e-3, "gradients": {"encoder.0": 0.5, "head": 0.25}}]
