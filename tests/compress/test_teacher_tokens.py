"""The teacher's distributions of tokens: each pair's own, kept, and computed again where anything of it changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import translator

from slimformer.compress import teacher_tokens as module
from slimformer.compress.teacher_tokens import TokenTargets, teach_tokens
from slimformer.transformer.progress import SILENT
from slimformer.transformer.translation import TokenPair

TEACHER = translator()
ROWS = TEACHER.config.output_width
PAIRS: list[TokenPair] = [([5, 6, 3], [8, 9, 10, 3]), ([7, 3], [11, 3]), ([5] * 9 + [3], [3]), ([8, 3], [6, 7, 3])]


def taught(folder: Path | None = None, **changed: Any) -> TokenTargets:
    given = {"teacher": TEACHER, "pairs": PAIRS, "rows": ROWS, "temperature": 2.0, "precision": "float32", **changed}
    teacher, pairs = given.pop("teacher"), given.pop("pairs")
    return teach_tokens(teacher, pairs, folder=folder, device="cpu", progress=SILENT, **given)


def alone(pair: TokenPair, temperature: float) -> torch.Tensor:
    """(T, V) log probabilities of one pair, without padding."""
    source, target = (torch.tensor([one]) for one in (pair[0], [2, *pair[1][:-1]]))
    with torch.inference_mode():
        logits = TEACHER.to_torch()(
            source, torch.ones_like(source), target_ids=target, target_mask=torch.ones_like(target)
        ).result
    return (logits / temperature).log_softmax(1)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("tokens", [1, 12, 4096])
def test_each_pairs_distributions_are_its_own_whatever_the_batches(
    tokens: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PASS_TOKENS", tokens)
    monkeypatch.setattr(module, "LIKELIEST", 7)
    targets = taught(tmp_path if kept else None)
    assert targets.places.shape == targets.chances.shape == (sum(len(target) for _, target in PAIRS), 7)
    chosen = [3, 0, 2, 3]
    places, chances = targets.of(chosen)
    expected = torch.cat([alone(PAIRS[i], 2.0) for i in chosen])
    torch.testing.assert_close(chances, expected.sort(1, descending=True).values[:, :7], atol=1e-5, rtol=0)
    torch.testing.assert_close(expected.gather(1, places), chances, atol=1e-5, rtol=0)


def test_of_a_small_vocabulary_all_tokens_are_kept() -> None:
    chances = taught(temperature=1.0).of([0])[1]
    assert chances.shape == (4, min(module.LIKELIEST, TEACHER.config.output_width))
    assert (TEACHER.config.output_width <= module.LIKELIEST) == bool(chances.exp().sum(1).allclose(torch.ones(4)))


def test_of_the_first_rows_chances_are_those_of_a_choice_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut and made to sum to 1 again."""
    monkeypatch.setattr(module, "LIKELIEST", 10_000)
    places, chances = taught(rows=12, temperature=2.0).of([0])
    assert places.shape == (4, 12)
    whole = alone(PAIRS[0], 2.0)[:, :12].exp()
    expected = (whole / whole.sum(1, keepdim=True)).log().gather(1, places)
    torch.testing.assert_close(chances, expected, atol=1e-5, rtol=0)


CHANGES: dict[str, dict[str, Any]] = {
    "the teacher": {"teacher": translator(seed=5)},
    "the rows": {"rows": ROWS - 1},
    "the temperature": {"temperature": 1.0},
    "the precision": {"precision": "bfloat16"},
    "a target": {"pairs": [*PAIRS[:3], ([8, 3], [6, 8, 3])]},
    "where a source ends": {"pairs": [*PAIRS[:3], ([8, 3, 6], [7, 3])]},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_depends_on_something_else_is_kept_elsewhere(name: str, tmp_path: Path) -> None:
    taught(tmp_path)
    assert not taught(tmp_path, **CHANGES[name]).reused
    again = taught(tmp_path)
    assert again.reused
    assert isinstance(again.chances, np.memmap)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cut_file_is_computed_again(tmp_path: Path) -> None:
    first = np.array(taught(tmp_path).chances)
    (place,) = tmp_path.iterdir()
    (place / module.CHANCES).write_bytes((place / module.CHANCES).read_bytes()[:-2])
    again = taught(tmp_path)
    assert not again.reused
    np.testing.assert_array_equal(again.chances, first)
