"""The teacher's answers: right for every text, kept, and computed again when anything they depend on changes."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import LABELS, sentences, tiny, tiny_config, with_head

from slimformer.compress import teacher as module
from slimformer.compress.teacher import Targets, digest, teach
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead, EmbeddingHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.progress import SILENT
from slimformer.transformer.quantization import halved

MODEL = tiny()
IDS = MODEL.text_encoder().encode(sentences(30, seed=4, low=1, high=20))


def taught(folder: Path | None = None, model: Checkpoint = MODEL, ids: Any = IDS, tokens: Any = ("hidden",)) -> Targets:
    return teach(model, ids, tokens=tokens, folder=folder, device="cpu", progress=SILENT)


def one_by_one(model: Checkpoint, ids: list[list[int]]) -> tuple[np.ndarray, list[np.ndarray]]:
    net, results, states = model.to_torch(), [], []
    for row in ids:
        with torch.inference_mode():
            output = net(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64))
        results.append(output.result.numpy()[0])
        states.append(output.hidden.numpy())
    return np.stack(results), states


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_each_texts_answers_are_its_own_whatever_the_batches(
    tokens: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PASS_TOKENS", tokens)
    targets = taught(tmp_path if kept else None)
    results, states = one_by_one(MODEL, IDS)
    np.testing.assert_allclose(targets.results, results, atol=1e-5)
    assert targets.tokens["hidden"].dtype == np.float16
    assert targets.tokens["hidden"].shape == (sum(map(len, IDS)), 16)
    lengths = [len(row) for row in IDS]
    chosen = [7, 0, 29, 7]
    expected = np.concatenate([states[i] for i in chosen])
    found = targets.tokens_of("hidden", chosen, lengths)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=4e-3)  # float16 has 11 bits
    np.testing.assert_allclose(targets.results_of(chosen).numpy(), results[chosen], atol=1e-5)


def test_logits_are_answers_too() -> None:
    model = with_head(ClassificationHead(LABELS))
    targets = taught(model=model, tokens=())
    np.testing.assert_allclose(targets.results, one_by_one(model, IDS)[0], atol=1e-5)
    assert not targets.tokens


@pytest.mark.parametrize("head", ["embedding", "classifier"])
def test_in_onnxruntime_it_gives_the_same(head: str, tmp_path: Path) -> None:
    """What the exported teacher gives, which is kept apart from what it gives in torch."""
    model = MODEL if head == "embedding" else with_head(ClassificationHead(LABELS))
    tokens = ["hidden"] if head == "embedding" else []
    ways: dict[str, Any] = {"tokens": tokens, "device": "cpu", "progress": SILENT, "folder": tmp_path, "threads": 1}
    plain, other = (teach(model, IDS, runtime=runtime, **ways) for runtime in ("torch", "onnxruntime"))
    np.testing.assert_allclose(other.results, plain.results, atol=1e-5)
    for name in tokens:
        np.testing.assert_allclose(np.asarray(other.tokens[name]), np.asarray(plain.tokens[name]), atol=4e-3)
    assert not other.reused
    assert teach(model, IDS, runtime="onnxruntime", **ways).reused
    assert len(list(tmp_path.iterdir())) == 2


def test_a_second_call_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = taught(tmp_path)
    assert not first.reused
    monkeypatch.setattr(module, "_compute", lambda *_: pytest.fail("the teacher ran again"))
    second = taught(tmp_path)
    assert second.reused
    np.testing.assert_array_equal(first.results, second.results)
    np.testing.assert_array_equal(*(np.asarray(one.tokens["hidden"]) for one in (first, second)))
    assert isinstance(second.results, np.memmap)


def changed_weight() -> Checkpoint:
    state = dict(MODEL.state)
    state["encoder.1.ffn_norm.bias"] = state["encoder.1.ffn_norm.bias"] + 1e-3
    return replace(MODEL, state=state)


CHANGES: dict[str, dict[str, Any]] = {
    "a weight": {"model": changed_weight()},
    "the pooling": {"model": replace(MODEL, config=tiny_config(head=EmbeddingHead("max")))},
    "a text": {"ids": [[*IDS[0], 5], *IDS[1:]]},
    "the order": {"ids": IDS[::-1]},
    "where texts end": {"ids": [IDS[0] + IDS[1], *IDS[2:]]},
    "one text fewer": {"ids": IDS[:-1]},
    "no states": {"tokens": ()},
    "states of a layer": {"tokens": ("states.0",)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_depends_on_something_else_is_kept_elsewhere(name: str, tmp_path: Path) -> None:
    taught(tmp_path)
    assert not taught(tmp_path, **CHANGES[name]).reused
    assert len(list(tmp_path.iterdir())) == 2
    assert taught(tmp_path).reused


def test_the_digest_does_not_depend_on_the_order_of_the_state() -> None:
    turned = replace(MODEL, state=dict(reversed(MODEL.state.items())))
    assert digest(turned, IDS, ["hidden"]) == digest(MODEL, IDS, ["hidden"])
    assert len(digest(MODEL, IDS, ["hidden"])) == 16


def test_the_digest_is_of_every_number_in_half_precision_too() -> None:
    one, other = (halved(model, "bfloat16") for model in (MODEL, replace(MODEL, state={**MODEL.state})))
    assert digest(one, IDS, ["hidden"]) == digest(other, IDS, ["hidden"])
    other.state["encoder.0.ffn.up.weight"][0, 0] += 1
    assert digest(one, IDS, ["hidden"]) != digest(other, IDS, ["hidden"])


@pytest.mark.parametrize("name", ["results.npy", "hidden.npy"])
@pytest.mark.parametrize("size", [0, 60, -2])
def test_a_cut_file_is_computed_again(name: str, size: int, tmp_path: Path) -> None:
    first = np.array(taught(tmp_path).results)
    (place,) = tmp_path.iterdir()
    data = (place / name).read_bytes()
    (place / name).write_bytes(data[:size])
    again = taught(tmp_path)
    assert not again.reused
    np.testing.assert_array_equal(again.results, first)
    assert (place / name).stat().st_size == len(data)
    assert taught(tmp_path).reused


def test_a_teacher_that_is_interrupted_leaves_no_cache(tmp_path: Path) -> None:
    class Impatient:
        def start(self, title: str, total: int | None, unit: str) -> None: ...

        def advance(self, n: int = 1, note: str = "") -> None:
            raise KeyboardInterrupt

        def done(self, note: str = "") -> None: ...

    with pytest.raises(KeyboardInterrupt):
        teach(MODEL, IDS, tokens=["hidden"], folder=tmp_path, device="cpu", progress=Impatient())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"cannot write .*teacher-.*No space left on device"):
        taught(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_teacher_without_a_head_is_refused(runtime: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no head"):
        teach(tiny(tiny_config(head=None)), IDS, runtime=runtime, folder=tmp_path, device="cpu", progress=SILENT)
    assert not list(tmp_path.iterdir())
