"""Teaching pairs: the loss by hand, tasks that are learnt to the end, resuming, and what cannot be taught."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slimformer.transformer.translation as translation
from slimformer.transformer.architecture import Architecture, new_classifier, new_model
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import AttentionConfig, RecurrentConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding
from slimformer.transformer.lesson import NOTES
from slimformer.transformer.parts import Part
from slimformer.transformer.quantization import quantized
from slimformer.transformer.splits import Pair, PairData
from slimformer.transformer.subwords import special_ids, train_subwords
from slimformer.transformer.teaching import Teaching
from slimformer.transformer.tokenizer import TextEncoder
from slimformer.transformer.translation import teach_pairs, translate, with_task

LETTERS = "abcdefghijkl"
TOKENIZER = train_subwords([" ".join(LETTERS)], vocab_size=300)
SMALL = Architecture(encoder=2, decoder=1, width=64, heads=4, neurons=128, positions=24)
TINY = Architecture(encoder=1, decoder=1, width=16, heads=2, neurons=32, positions=24)
QUICK = Teaching(steps=30, batch_tokens=200, warmup=10, valid_texts=5)


def pairs(count: int, seed: int, task: str = "copy") -> list[Pair]:
    """Different rows of letters, and the same rows again, or sorted."""
    draw, seen = random.Random(seed), dict[str, str]()
    while len(seen) < count:
        row = [draw.choice(LETTERS) for _ in range(draw.randint(2, 8))]
        seen[" ".join(row)] = " ".join(sorted(row) if task == "sort" else row)
    return [Pair(source, target, str(i)) for i, (source, target) in enumerate(seen.items())]


def data(train: int = 60, other: int = 12, task: str = "copy") -> PairData:
    every = pairs(train + 2 * other, 0, task)
    return PairData(tuple(every[:train]), tuple(every[train:-other]), tuple(every[-other:]), ())


def lesson(checkpoint: Checkpoint, options: Teaching = QUICK, rows: PairData | None = None) -> Any:
    return translation._Lesson(checkpoint, rows or data(), options, "cpu")


# --- the model before its first step ---


def test_a_new_model_by_its_numbers() -> None:
    made = new_model(SMALL, TOKENIZER, 3)
    config, ids = made.config, special_ids(TOKENIZER)
    assert (len(config.encoder), len(config.decoder), config.d_model) == (2, 1, 64)
    assert (config.head.start_id, config.head.end_id, config.text.pad_id) == (ids["<s>"], ids["</s>"], ids["<pad>"])
    for name, value in made.state.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif name.endswith("norm.weight"):
            assert bool((value == 1).all()), name
        elif name == "embeddings.tokens.weight":
            assert float(value.std()) == pytest.approx(1 / 8, rel=0.05)
        else:
            bound = (6 / sum(value.shape)) ** 0.5
            assert 0.95 * bound < float(value.abs().max()) <= bound, name
            assert float(value.std()) == pytest.approx(bound / 3**0.5, rel=0.05), name
    again, other = new_model(SMALL, TOKENIZER, 3), new_model(SMALL, TOKENIZER, 4)
    assert made.fingerprint() == again.fingerprint() != other.fingerprint()


def test_heads_of_a_new_model_may_share_keys() -> None:
    config = new_model(replace(SMALL, group=2), TOKENIZER, 3).config
    shared = AttentionConfig(4, 16, group=2)
    assert {layer.mixer for layer in config.layers} == {layer.cross for layer in config.decoder} == {shared}
    with pytest.raises(InputError, match="4 heads do not go into groups of 3"):
        new_model(replace(SMALL, group=3), TOKENIZER, 3)


def test_shapes_that_are_none() -> None:
    with pytest.raises(InputError, match="width 10 is no multiple of the 4 heads"):
        Architecture(width=10)
    with pytest.raises(InputError, match="0 layers of the encoder and 0 of the decoder are no model"):
        Architecture(encoder=0, decoder=0)
    with pytest.raises(InputError, match="a model that writes needs at least 1"):
        new_model(replace(SMALL, decoder=0), TOKENIZER, 0)
    with pytest.raises(InputError, match="1 layers of the decoder: a classifier has none"):
        new_classifier(SMALL, TOKENIZER, ("a", "b"), 0)
    cell = new_model(replace(SMALL, mixer="gru"), TOKENIZER, 0).config
    assert cell.decoder[0].mixer == RecurrentConfig("gru", 64, project=False)
    assert new_model(replace(SMALL, encoder=0, mixer="lstm"), TOKENIZER, 0).config.embedding.position_kind == "none"


# --- loss and measures ---


@torch.inference_mode()
def test_the_loss_by_hand() -> None:
    """0.9 of the weight on the token and 0.1 on all evenly, a mean over the tokens of both texts."""
    checkpoint = new_model(TINY, TOKENIZER, 0)
    taught = lesson(checkpoint, replace(QUICK, smoothing=0.1))
    taught.model.eval()
    model, encoder = checkpoint.to_torch(), checkpoint.text_encoder()
    losses = []
    for pair in data().train[:2]:
        source, target = encoder.encode([pair.source, pair.target])
        begun = torch.tensor([[checkpoint.config.head.start_id, *target[:-1]]])
        logits = model(
            torch.tensor([source]), torch.ones(1, len(source)), target_ids=begun, target_mask=torch.ones_like(begun)
        ).result.double()
        chances = logits.log_softmax(1)
        for place, token in enumerate(target):
            losses.append(-0.9 * float(chances[place, token]) - 0.1 * float(chances[place].mean()))
    assert float(taught.loss(Part([0, 1]))) == pytest.approx(np.mean(losses), rel=1e-5)


def test_measures_by_hand() -> None:
    """Token accuracy text by text, and BLEU of what greedy search writes, by sacrebleu."""
    import sacrebleu

    checkpoint = new_model(SMALL, TOKENIZER, 0)
    taught = lesson(checkpoint)
    tuned = teach(checkpoint, taught, 60)
    model, encoder = tuned.to_torch(), tuned.text_encoder()
    rows = data().test
    right = total = 0
    for pair in rows:
        source, target = encoder.encode([pair.source, pair.target])
        begun = torch.tensor([[tuned.config.head.start_id, *target[:-1]]])
        logits = model(
            torch.tensor([source]), torch.ones(1, len(source)), target_ids=begun, target_mask=torch.ones_like(begun)
        ).result
        right += int((logits.argmax(1) == torch.tensor(target)).sum())
        total += len(target)
    found = taught.measure("test")
    assert found["token_accuracy"] == pytest.approx(100 * right / total)
    longest = max(len(ids) for ids in encoder.encode([pair.target for pair in rows]))
    options = Decoding(max_new_tokens=min(24, longest + 10))
    texts = [translate(model, encoder, [pair.source], options)[0] for pair in rows]
    targets = [[pair.target for pair in rows]]
    assert found["BLEU"] == pytest.approx(sacrebleu.corpus_bleu(texts, targets).score)
    assert found["chrF"] == pytest.approx(sacrebleu.corpus_chrf(texts, targets).score)
    assert found["chrF"] > 1


def teach(checkpoint: Checkpoint, taught: Any, steps: int) -> Checkpoint:
    """Some plain steps on the lesson's own model."""
    optimizer = torch.optim.AdamW(taught.model.parameters(), lr=0.003)
    for step in range(steps):
        optimizer.zero_grad()
        taught.loss(Part(taught.batches(0)[step % len(taught.batches(0))])).backward()
        optimizer.step()
    return replace(
        checkpoint, state={name: value.detach().clone() for name, value in taught.model.state_dict().items()}
    )


def test_batches_are_counted_in_tokens_of_both_sides() -> None:
    taught = lesson(new_model(TINY, TOKENIZER, 0))
    encoder = TextEncoder(TOKENIZER, 24)
    for batch in taught.batches(0):
        sides = [encoder.encode([data().train[i].source, data().train[i].target]) for i in batch]
        assert sum(len(one) for side in sides for one in side) <= 200 or len(batch) == 1
    assert sorted(i for batch in taught.batches(0) for i in batch) == list(range(60))


# --- learning ---


def learnt(task: str, architecture: Architecture, steps: int, tmp_path: Path) -> float:
    """Share of test texts that are right from the first to the last token, after so many steps on 2,600 pairs."""
    rows = data(2600, 200, task)
    options = Teaching(steps=steps, lr=3e-3, warmup=100, batch_tokens=1200, dropout=0.0, smoothing=0.0)
    tuned = teach_pairs(new_model(architecture, TOKENIZER, 0), rows, tmp_path / "out", options)
    texts = translate(
        tuned.to_torch(), tuned.text_encoder(), [pair.source for pair in rows.test], Decoding(max_new_tokens=20)
    )
    return float(np.mean([text == pair.target for text, pair in zip(texts, rows.test, strict=True)]))


def test_copying_is_learnt(tmp_path: Path) -> None:
    assert learnt("copy", SMALL, 1200, tmp_path) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["attention", "ssru", "lstm"])
@pytest.mark.parametrize("task", ["copy", "sort"])
def test_tasks_are_learnt(task: str, mixer: str, tmp_path: Path) -> None:
    assert learnt(task, replace(SMALL, mixer=mixer), 1800, tmp_path) >= 0.99


def test_broken_off_and_resumed_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, rows = new_model(TINY, TOKENIZER, 0), data()
    whole = teach_pairs(start, rows, tmp_path / "whole", QUICK)
    assert whole.provenance[NOTES]["log"]["steps"] == 30
    assert set(whole.provenance[NOTES]["test"]) == {"BLEU", "chrF", "token_accuracy"}
    monkeypatch.setattr("slimformer.transformer.training.SAVE_SECONDS", -1.0)  # the state is kept after every step
    real, calls = translation._Lesson.loss, 0

    def loss(self: Any, batch: list[int]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 17:
            raise KeyboardInterrupt
        return real(self, batch)

    monkeypatch.setattr(translation._Lesson, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        teach_pairs(start, rows, tmp_path / "out", QUICK)
    resumed = teach_pairs(start, rows, tmp_path / "out", QUICK, resume=True)
    assert resumed.provenance[NOTES]["epochs"] == whole.provenance[NOTES]["epochs"]
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())
    assert load_own(tmp_path / "out").fingerprint() == whole.fingerprint()


def test_a_batch_is_translated_as_each_text_alone() -> None:
    checkpoint = new_model(TINY, TOKENIZER, 1)
    model, encoder = checkpoint.to_torch(), checkpoint.text_encoder()
    texts = [pair.source for pair in data().test]
    for options in (Decoding(max_new_tokens=8), Decoding(max_new_tokens=8, beams=3)):
        together = translate(model, encoder, texts, options)
        assert together == [translate(model, encoder, [text], options)[0] for text in texts]
        assert len(set(together)) > 1
    assert translate(model, encoder, [], Decoding()) == []


# --- what cannot be taught ---


def test_refusals(tmp_path: Path) -> None:
    start, rows, out = new_model(TINY, TOKENIZER, 0), data(), tmp_path / "out"
    long = Pair("a " * 40, "b", "0")
    with pytest.raises(InputError, match="there are no pairs of valid and test"):
        teach_pairs(start, replace(rows, valid=(), test=()), out, QUICK)
    with pytest.raises(InputError, match="1 pairs of test are over the model's 24 positions"):
        teach_pairs(start, replace(rows, test=(*rows.test, long)), out, QUICK)
    with pytest.raises(InputError, match="no pair of train is within the model's 24 positions"):
        teach_pairs(start, replace(rows, train=(long,)), out, QUICK)
    alone = new_model(replace(TINY, encoder=0), TOKENIZER, 0)
    with pytest.raises(InputError, match="needs an encoder-decoder with a language head, in float"):
        teach_pairs(alone, rows, out, QUICK)
    with pytest.raises(InputError, match="in float"):
        teach_pairs(quantized(start, bits=7), rows, out, QUICK)
    assert not out.exists()
    for changes, message in (
        ({"epochs": 1, "steps": 1}, "epochs and steps are given"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"smoothing": -0.1}, "smoothing is -0.1"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"schedule": "cosine"}, "schedule is 'cosine', not one of linear, inverse_sqrt"),
    ):
        with pytest.raises(InputError, match=message):
            Teaching(**changes)


def test_pairs_that_are_too_long_to_learn_from_are_counted(tmp_path: Path) -> None:
    rows = data()
    longer = replace(rows, train=(*rows.train, Pair("a " * 40, "b", "0"), Pair("b", "a " * 40, "1")))
    tuned = teach_pairs(new_model(TINY, TOKENIZER, 0), longer, tmp_path / "out", replace(QUICK, steps=1))
    assert tuned.provenance["pairs_left_out"] == 2
    assert "sources_cut" not in tuned.provenance


# --- summaries ---


def summaries() -> PairData:
    return replace(data(), task="summarization")


def test_long_texts_to_summarize_are_cut_and_long_summaries_left_out(tmp_path: Path) -> None:
    rows, long = summaries(), Pair("a " * 40, "b", "0")
    longer = replace(rows, train=(*rows.train, long, long, Pair("b", "a " * 40, "1"), Pair("a " * 40, "a " * 40, "2")))
    start = new_model(TINY, TOKENIZER, 0)
    tuned = teach_pairs(start, replace(longer, test=(*rows.test, long)), tmp_path / "out", replace(QUICK, steps=1))
    assert (tuned.provenance["pairs_left_out"], tuned.provenance["sources_cut"]) == (2, 2)
    taught = lesson(with_task(start, "summarization"), rows=longer)
    assert taught.ids[-1][0] == start.text_encoder().encode([long.source])[0]
    assert len(taught.ids[-1][0]) == 24
    with pytest.raises(InputError, match="1 pairs of valid are over"):
        teach_pairs(start, replace(rows, valid=(Pair("b", "a " * 40, "1"),)), tmp_path / "other", QUICK)


def test_what_is_taught_is_what_the_model_does(tmp_path: Path) -> None:
    start, options = new_model(TINY, TOKENIZER, 0), replace(QUICK, steps=2)
    tuned = teach_pairs(start, summaries(), tmp_path / "out", options)
    assert tuned.config.head.kind == load_own(tmp_path / "out").config.head.kind == "summarization"
    assert set(tuned.provenance[NOTES]["test"]) == {"ROUGE-1", "ROUGE-2", "ROUGE-L", "token_accuracy"}
    with pytest.raises(InputError, match="was trained with another model"):
        teach_pairs(start, data(), tmp_path / "out", options, resume=True)
    back = teach_pairs(tuned, data(), tmp_path / "back", options)
    assert back.config == start.config
    assert set(back.provenance[NOTES]["test"]) == {"BLEU", "chrF", "token_accuracy"}
    alone = new_model(replace(TINY, encoder=0), TOKENIZER, 0)
    with pytest.raises(InputError, match="summarization needs an encoder-decoder"):
        teach_pairs(alone, summaries(), tmp_path / "alone", options)


def test_summaries_are_measured_by_rouge_and_the_best_epoch_by_rouge_l() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    rows = summaries()
    checkpoint = with_task(new_model(SMALL, TOKENIZER, 0), "summarization")
    taught = lesson(checkpoint, rows=rows)
    assert taught.deciding == "ROUGE-L"
    tuned = teach(checkpoint, taught, 60)
    longest = max(len(ids) for ids in tuned.text_encoder().encode([pair.target for pair in rows.test]))
    options = Decoding(max_new_tokens=min(24, longest + 10))
    texts = translate(tuned.to_torch(), tuned.text_encoder(), [pair.source for pair in rows.test], options)
    scorer = RougeScorer(["rougeL"])
    scores = [scorer.score(pair.target, text)["rougeL"].fmeasure for pair, text in zip(rows.test, texts, strict=True)]
    found = taught.measure("test")
    assert found["ROUGE-L"] == pytest.approx(100 * np.mean(scores))
    assert found["ROUGE-L"] > 1
    assert found["token_accuracy"] == lesson(tuned, rows=data()).measure("test")["token_accuracy"]


def test_zeros_of_a_sparse_translator_stay(tmp_path: Path) -> None:
    start, name = new_model(TINY, TOKENIZER, 0), "decoder.0.cross.kv"
    state = {key: value.clone() for key, value in start.state.items()}
    state[f"{name}.weight"][:, ::2] = 0.0
    sparse = replace(start, state=state).with_provenance(sparse={"linears": [name]})
    weight = teach_pairs(sparse, data(), tmp_path / "out", QUICK).state[f"{name}.weight"]
    assert torch.equal(weight == 0, state[f"{name}.weight"] == 0)
    assert not torch.equal(weight, state[f"{name}.weight"])
