"""The page of trainings: what it says of each, and that the curves drawn are those of the files."""

import json
import re
from pathlib import Path

import pytest
from models import decoder_config, tiny_config

from slimformer.export.training_page import figures, is_training, read_training, shape_of, table_of, write_training
from slimformer.transformer.config import RecurrentConfig
from slimformer.transformer.curves import CurvePoint, write_curve
from slimformer.transformer.errors import InputError


def trained(folder: Path, mixer: str, *, bleu: float) -> Path:
    """A directory as `slimformer train` leaves it, without the weights."""
    folder.mkdir()
    config = decoder_config(2, 1)
    if mixer != "attention":
        config = decoder_config(2, 1, RecurrentConfig(mixer, 32, project=False))
    log = {"steps": 40, "texts": 12_345, "seconds": 90.0}
    notes = {"training": {"log": log, "best": 2, "test": {"BLEU": bleu, "chrF": 40.0}}}
    (folder / "config.json").write_text(config.to_json(), encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps(notes), encoding="utf-8")
    points = [CurvePoint(step, 9.0 / step, 1e-3, {"encoder.0": 0.1 * step, "embeddings": 1.0}) for step in (10, 20, 40)]
    write_curve(folder, points, [{"epoch": 1, "step": 20, "BLEU": 1.0}, {"epoch": 2, "step": 40, "BLEU": bleu}], "BLEU")
    return folder


def test_the_page(tmp_path: Path) -> None:
    folders = [trained(tmp_path / name, name, bleu=bleu) for name, bleu in (("attention", 20.0), ("lstm", 15.5))]
    assert is_training(folders[0])
    both = [read_training(folder.name, folder) for folder in folders]
    shown = table_of(both)
    assert shown.heads[-2:] == ("BLEU, test", "chrF, test")
    rows = [[cell.text for cell in row] for row in shown.rows]
    assert rows[0] == ["attention", "2 x attention, then 1 x attention", "1.5", "40", "12,345", "2", "20.00", "40.00"]
    assert rows[1][1] == "2 x attention, then 1 x lstm"
    captions = [caption for caption, _ in figures(both)]
    assert captions[:3] == ["Loss on train, mean since the point before", "BLEU on valid", "Learning rate"]
    assert [caption.split(":")[0] for caption in captions[3:]] == ["attention", "lstm"]
    write_training(both, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    assert "http:" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert page == (write_training(both, tmp_path / "again.html"), (tmp_path / "again.html").read_text("utf-8"))[1]


def test_lines_go_where_the_numbers_are(tmp_path: Path) -> None:
    """The loss falls as 9, 4.5, 2.25 times a tenth: the drawn heights keep these proportions."""
    one = read_training("x", trained(tmp_path / "x", "attention", bleu=3.0))
    (path,) = re.findall(r'<path d="M ([^"]*?)" clip-path', str(figures([one])[0][1]))[:1]
    drawn = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert len(drawn) == 3
    (x0, y0), (x1, y1), (x2, y2) = drawn
    assert (x2 - x1) / (x1 - x0) == pytest.approx(2, rel=1e-3)
    assert (y1 - y0) / (y2 - y1) == pytest.approx((0.9 - 0.45) / (0.45 - 0.225), rel=1e-3)


def test_names_stay_text(tmp_path: Path) -> None:
    one = read_training("<script>$x_1$", trained(tmp_path / "x", "attention", bleu=3.0))
    write_training([one, one], tmp_path / "page.html")
    assert "<script>" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_shapes() -> None:
    assert shape_of(tiny_config()) == "2 x attention"
    assert shape_of(decoder_config(0, 2, None)) == "2 x no mixer"


def test_what_is_no_training_is_refused(tmp_path: Path) -> None:
    folder = trained(tmp_path / "x", "attention", bleu=3.0)
    (folder / "provenance.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="not a trained checkpoint"):
        read_training("x", folder)
    assert not is_training(tmp_path)
