"""Several teachers: means by hand, a student that learns them, refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import LABELS, labelled_data, search_data, sentences, tiny, tiny_config, with_head

from slimformer.compress.distill import Distill
from slimformer.compress.ensembles import check_teachers, joined
from slimformer.compress.step import StepContext
from slimformer.compress.teacher import Targets, teach
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.progress import SILENT

FIRST, SECOND = tiny(), tiny(tiny_config(d_model=8), seed=2)
STARTS = np.zeros(2, np.int64)


def targets(rows: list[list[float]], reused: bool = False) -> Targets:
    return Targets(np.array(rows, np.float32), {}, STARTS, reused)


def test_chances_are_averaged_by_hand() -> None:
    """Softmax of [0, ln 3] is (1/4, 3/4), of [0, 0] (1/2, 1/2): the mean is (3/8, 5/8)."""
    found = joined([targets([[0.0, np.log(3)]]), targets([[5.0, 5.0]])], classifies=True)
    np.testing.assert_allclose(np.exp(found.results), [[3 / 8, 5 / 8]], rtol=1e-6)


def test_cosines_are_the_mean_of_the_teachers() -> None:
    ids = FIRST.text_encoder().encode(sentences(6, seed=1))
    each = [teach(one, ids, folder=None, device="cpu", progress=SILENT) for one in (FIRST, SECOND)]
    found = joined(each, classifies=False).results
    assert found.shape == (6, 24)
    unit = [one.results / np.linalg.norm(one.results, axis=1, keepdims=True) for one in each]
    np.testing.assert_allclose(found @ found.T, sum(one @ one.T for one in unit) / 2, atol=1e-6)
    assert joined(each[:1], classifies=False) is each[0]
    for reused in (True, False):
        assert joined([targets([[1.0]], True), targets([[1.0]], reused)], classifies=False).reused is reused


def saved(model: Checkpoint, place: Path) -> str:
    model.save(place)
    return str(place)


def test_a_student_learns_from_both(tmp_path: Path) -> None:
    context = StepContext(search_data(), teacher=FIRST, workdir=tmp_path)
    step = Distill(
        steps=60, lr=3e-3, batch_tokens=200, warmup=1, pages=0, teachers=(saved(SECOND, tmp_path / "second"),)
    )
    result = step(tiny(seed=7), context)
    assert result.details["losses"][-1] < 0.7 * result.details["losses"][0]
    assert result.details["skipped"] == {"cosine": "2 teachers have no vectors in common"}
    assert len(list(tmp_path.glob("teacher-*"))) == 2
    labels = with_head(ClassificationHead(LABELS))
    other = replace(labels, state={name: 1.1 * value for name, value in labels.state.items()})
    plain = Distill(steps=1, labels=0.0)
    both = replace(plain, teachers=(saved(other, tmp_path / "other"),))
    context = StepContext(labelled_data(), teacher=labels)
    assert plain(labels, context).details["losses"][0] == pytest.approx(0, abs=1e-6)
    assert both(labels, context).details["losses"][0] > 1e-6
    assert both(labels, context).details["skipped"] == {}


def test_teachers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    check_teachers([FIRST, SECOND])
    other = replace(FIRST, tokenizer=FIRST.tokenizer.replace('"border"', '"frame"'))
    with pytest.raises(InputError, match="teacher 1 has not the first one's vocabulary"):
        check_teachers([FIRST, other])
    labels, turned = with_head(ClassificationHead(LABELS)), with_head(ClassificationHead(LABELS[::-1]))
    for pair in ([FIRST, labels], [labels, FIRST], [labels, turned]):
        with pytest.raises(InputError, match="teacher 1 gives something else than the first"):
            check_teachers(pair)
    step = Distill(steps=1, teachers=(saved(SECOND, tmp_path / "second"),))
    with pytest.raises(InputError, match="an index is of one teacher"):
        step(FIRST, StepContext(search_data(), teacher=FIRST, keep_index=True))
