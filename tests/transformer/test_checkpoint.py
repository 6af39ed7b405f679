"""A checkpoint directory: whole, strict, and never half replaced."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ABSENT, DENSE, EMBEDDING, LABELS, SENTENCES, TOKENIZER, VOCAB_SIZE, WHOLE, ragged, tiny
from safetensors.torch import load_file, save_file

from slimformer.transformer.checkpoint import Checkpoint, load_own, read_json, read_text
from slimformer.transformer.config import Head, LayerConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.loading import load
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import wordpiece_from_vocab


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("layers", [WHOLE, ABSENT], ids=["whole", "absent"])
@pytest.mark.parametrize("head", [EMBEDDING, DENSE, LABELS, None], ids=["mean", "Dense", "labels", "none"])
@pytest.mark.parametrize("form", ["float", "int8"])
def test_round_trip(head: Head | None, layers: tuple[LayerConfig, ...], form: str, tmp_path: Path) -> None:
    checkpoint = tiny(head, layers, prompts=(("query", "é: "),))
    checkpoint = quantized(checkpoint, bits=8) if form == "int8" else checkpoint
    assert checkpoint.save(tmp_path / "model") == tmp_path / "model"
    assert sorted(content(tmp_path / "model")) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
        "tokenizer.json",
    ]
    again = load(tmp_path / "model")
    assert (again.config, again.tokenizer, again.provenance) == (
        checkpoint.config,
        checkpoint.tokenizer,
        checkpoint.provenance,
    )
    assert again.state.keys() == checkpoint.state.keys()
    for name, value in checkpoint.state.items():
        assert again.state[name].dtype == value.dtype
        assert torch.equal(again.state[name], value)
    with torch.inference_mode():
        first, second = (one.to_torch()(*ragged((3, 5))) for one in (checkpoint, again))
    assert torch.equal(first.hidden, second.hidden)


def test_to_torch_is_strict_trainable_and_a_copy() -> None:
    checkpoint = tiny()
    model = checkpoint.to_torch()
    assert not model.training
    assert all(value.requires_grad for value in model.parameters())
    with torch.no_grad():
        model.embeddings.tokens.weight.zero_()
    assert bool(checkpoint.state["embeddings.tokens.weight"].any())
    for state in ({**checkpoint.state, "x": torch.ones(1)}, dict(list(checkpoint.state.items())[1:])):
        with pytest.raises(RuntimeError, match="key"):
            replace(checkpoint, state=state).to_torch()


def test_tensors_of_any_layout_are_saved(tmp_path: Path) -> None:
    checkpoint = tiny()
    state = {name: value.T.contiguous().T if value.ndim == 2 else value for name, value in checkpoint.state.items()}
    state["embeddings.norm.bias"] = torch.zeros(1).expand(32).requires_grad_()
    again = load(replace(checkpoint, state=state).save(tmp_path / "model"))
    assert all(torch.equal(again.state[name], value) for name, value in state.items())


def test_the_encoder_of_texts_cuts_at_max_length() -> None:
    ids = tiny(max_length=6).text_encoder().encode(SENTENCES)
    assert [len(one) for one in ids] == [6, 5, 6, 3, 6]


def test_provenance_is_added_not_changed() -> None:
    checkpoint = tiny()
    more = checkpoint.with_provenance(kept=[0, 2])
    assert (more.provenance, checkpoint.provenance) == ({"source": "tiny", "kept": [0, 2]}, {"source": "tiny"})


def damaged(path: Path, how: str) -> None:
    """Save a model and damage it."""
    tiny(LABELS).save(path)
    weights, config = path / "model.safetensors", path / "config.json"
    state, data = load_file(weights), json.loads(config.read_text())
    name = "encoder.1.ffn.up.weight"
    if how == "missing":
        del state[name]
    elif how == "unexpected":
        state["encoder.2.ffn.up.weight"] = torch.ones(1)
    elif how == "shape":
        data["encoder"][1]["ffn"]["width"] = 41
    elif how == "dtype":
        state[name] = state[name].half()
    elif how == "nan":
        state[name][3, 4] = float("nan")
    elif how == "unknown field":
        data["surprise"] = 1
    elif how == "vocabulary":
        (path / "tokenizer.json").write_text(
            wordpiece_from_vocab("[PAD]\n[UNK]\n[CLS]\n[SEP]\n" + "\n".join(map(str, range(200))))
        )
    elif how == "no tokenizer":
        (path / "tokenizer.json").unlink()
    elif how == "broken tokenizer":
        (path / "tokenizer.json").write_text("{}")
    elif how == "no room":
        data["text"]["max_length"] = 2
    elif how == "provenance":
        (path / "provenance.json").write_text("[]")
    config.write_text(json.dumps(data))
    save_file({name: value.clone() for name, value in state.items()}, weights)
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif how == "no weights":
        weights.unlink()
    elif how == "config is no text":
        config.write_bytes(b"\xff\xfe")
    elif how == "config is no JSON":
        config.write_text("{")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"model: encoder.1.ffn.up.weight is missing$"),
        ("unexpected", r"model: encoder.2.ffn.up.weight is unexpected$"),
        ("shape", r"encoder.1.ffn.up.weight is \[40, 32\], the config says \[41, 32\]"),
        ("dtype", r"encoder.1.ffn.up.weight is torch.float16, the config says torch.float32"),
        ("nan", r"model: NaN or infinity in encoder.1.ffn.up.weight$"),
        ("unknown field", r"config.json: config has the unknown field 'surprise'"),
        ("vocabulary", rf"model: the tokenizer has 204 entries, the embedding table {VOCAB_SIZE} rows"),
        ("no tokenizer", r"cannot read .*tokenizer.json: No such file"),
        ("broken tokenizer", r"model: the tokenizer.json is not a tokenizer"),
        ("no room", r"model: max_length 2 leaves no room"),
        ("provenance", r"provenance.json: not an object"),
        ("truncated", r"model.safetensors: not a whole safetensors file"),
        ("no weights", r"model: no model.safetensors"),
        ("config is no text", r"cannot read .*config.json"),
        ("config is no JSON", r"config.json: not JSON"),
    ],
)
def test_damage_is_named_on_one_line(how: str, message: str, tmp_path: Path) -> None:
    damaged(tmp_path / "model", how)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_provenance_may_be_missing(tmp_path: Path) -> None:
    tiny().save(tmp_path / "model")
    (tmp_path / "model" / "provenance.json").unlink()
    assert load_own(tmp_path / "model").provenance == {}


def test_an_existing_output_is_refused_and_untouched(tmp_path: Path) -> None:
    tiny(seed=1).save(tmp_path / "model")
    before = content(tmp_path)
    with pytest.raises(InputError, match=r"model exists; choose another output or add --force"):
        tiny(seed=2).save(tmp_path / "model")
    assert content(tmp_path) == before
    tiny(seed=2).save(tmp_path / "model", force=True)
    assert torch.equal(
        load(tmp_path / "model").state["embeddings.norm.bias"], tiny(seed=2).state["embeddings.norm.bias"]
    )


def test_an_injected_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(seed=1).save(tmp_path / "model")
    before = content(tmp_path)
    real, written = Path.write_bytes, []

    def fills(self: Path, data: Any) -> int:
        written.append(self.name)
        if "safetensors" in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", fills)
    with pytest.raises(InputError, match="No space left on device"):
        tiny(seed=2).save(tmp_path / "model", force=True)
    assert len(written) == 2  # the config was on the disk already
    assert content(tmp_path) == before


def test_a_file_size_limit_loses_nothing(tmp_path: Path) -> None:
    tiny(seed=1).save(tmp_path / "model")
    before = content(tmp_path)
    code = f"""
import resource
from slimformer.transformer.errors import InputError
from slimformer.transformer.loading import load
model = load({str(tmp_path / "model")!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    model.save({str(tmp_path / "model")!r}, force=True)
except InputError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.endswith("model.safetensors: File too large\n")
    assert content(tmp_path) == before


def test_reading_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none.json: No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        read_text(tmp_path)


def test_a_checkpoint_made_by_hand_is_checked() -> None:
    checkpoint = tiny()
    assert checkpoint.check("here") is checkpoint
    with pytest.raises(InputError, match=r"^here: embeddings.norm.bias is missing"):
        Checkpoint(checkpoint.config, {}, TOKENIZER).check("here")
