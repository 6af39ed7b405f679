"""What pruning looks at; texts of encoders are tested in test_prune.py."""

from dataclasses import replace

import pytest
import torch
from models import POSITIONS, SENTENCES, VOCAB_SIZE, WORDS, writer

from slimformer.compress.calibration import Calibration
from slimformer.compress.step import StepContext
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import EmbeddingConfig
from slimformer.transformer.data import LabelledData, Pair, PairData, TextData, TextRow
from slimformer.transformer.errors import InputError

START = 2
WORD = WORDS.split()
TRAIN = tuple(Pair(" ".join(WORD[i : i + 3]), " ".join(WORD[i + 5 : i + 6 + i % 3]), str(i)) for i in range(20))
UNSEEN = (Pair("change", "colour", "x"),)
DATA = PairData(TRAIN, UNSEEN, UNSEEN, ("font",))


def ids_of(checkpoint: Checkpoint, text: str) -> list[int]:
    return checkpoint.text_encoder().encode([text])[0]


def test_pairs_are_of_train_and_the_decoder_is_taught() -> None:
    model = writer("post")
    found = Calibration.of(model, StepContext(DATA, seed=1), 100, 0.5)
    wanted = {(tuple(ids_of(model, pair.source)), (START, *ids_of(model, pair.target)[:-1])) for pair in TRAIN}
    assert {(tuple(source), tuple(target)) for source, target in zip(found.ids, found.targets, strict=True)} == wanted
    assert found.counts(100) == {"pairs": 20, "tokens": sum(len(a) + len(b) for a, b in wanted)}
    assert Calibration.of(model, StepContext(DATA, seed=1), 100, 0.5) == found
    assert Calibration.of(model, StepContext(DATA, seed=2), 100, 0.5).ids != found.ids
    assert len(Calibration.of(model, StepContext(DATA), 7, 0.5).ids) == 7
    assert found.left_out == 0


def test_batches_hold_source_and_target_of_a_pair_in_one_row() -> None:
    found = Calibration.of(writer("post"), StepContext(DATA), 100, 0.5)
    seen = set()
    for batch in found.batches(12, "cpu"):
        assert batch.target_ids is not None
        assert batch.target_mask is not None
        assert batch.ids.dtype == batch.target_mask.dtype == torch.int64
        for row in range(len(batch.ids)):
            source, target = batch.ids[row][batch.mask[row] > 0], batch.target_ids[row][batch.target_mask[row] > 0]
            seen.add((tuple(source.tolist()), tuple(target.tolist())))
    assert seen == {(tuple(a), tuple(b)) for a, b in zip(found.ids[:12], found.targets[:12], strict=True)}


def test_pairs_over_the_positions_are_left_out() -> None:
    """A source may have 24 tokens, a target 6, two of which are [CLS] and [SEP]."""
    model = writer("own table")
    short = replace(model, config=replace(model.config, target=EmbeddingConfig(VOCAB_SIZE, 6)))
    pairs = [("print " * 22, "print " * 4), ("print " * 23, "print"), ("sort", "print " * 5)]
    data = PairData(tuple(Pair(a, b, "0") for a, b in pairs), (), (), ())
    found = Calibration.of(short, StepContext(data), 3, 0.5)
    assert [len(row) for row in found.ids] == [POSITIONS]
    assert [len(row) for row in found.targets] == [6]
    assert found.left_out == 2
    with pytest.raises(
        InputError, match="of 2 pairs of train none is within the model's 24 positions of a source and 6"
    ):
        Calibration.of(short, StepContext(PairData(data.train[1:], (), (), ())), 3, 0.5)


def test_a_decoder_alone_reads_windows_of_texts() -> None:
    model = writer("alone")
    long = "print " * 60  # with [CLS] and [SEP] 62 tokens: windows of 24, 24 and 14
    data = TextData((TextRow(long, "0"),), (TextRow("sort", "1"),), (TextRow("table", "2"),), (SENTENCES[1],))
    found = Calibration.of(model, StepContext(data), 50, 0.5)
    assert not found.targets
    assert sorted(map(len, found.ids)) == [5, 14, 24, 24]
    assert all(row[0] == START for row in found.ids)
    assert [START, *ids_of(model, SENTENCES[1])[:-1]] in found.ids
    assert found.counts(50) == {"texts": 4, "tokens": 67}
    assert len(Calibration.of(model, StepContext(data), 2, 0.5).ids) == 2


def test_refusals() -> None:
    with pytest.raises(InputError, match="an encoder-decoder is calibrated on pairs: give DATA a train file"):
        Calibration.of(writer("post"), StepContext(LabelledData((), (), (), ("a",))), 5, 0.5)
    with pytest.raises(InputError, match="calibrated on pairs"):
        Calibration.of(writer("post"), StepContext(PairData((), UNSEEN, UNSEEN, ())), 5, 0.5)
    model = writer("alone")
    bare = replace(model, config=replace(model.config, head=None))
    with pytest.raises(InputError, match="without a language head has no start token"):
        Calibration.of(bare, StepContext(DATA), 5, 0.5)
