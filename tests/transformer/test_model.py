"""The eager model against transformers' BERT, and what packing promises: padding changes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import (
    ABSENT,
    DENSE,
    EMBEDDING,
    LABELS,
    SENTENCES,
    WHOLE,
    WIDTH,
    bert_directory,
    ragged,
    random_state,
    tiny,
    tiny_config,
)

from slimformer.transformer.batching import tensors
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import Head, LayerConfig
from slimformer.transformer.loading import load
from slimformer.transformer.model import Transformer, initialize

LENGTHS = (3, 9, 1, 6)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new", "silu"])
def test_equals_bert(activation: str, tmp_path: Path) -> None:
    theirs = bert_directory(tmp_path, hidden_act=activation, layer_norm_eps=1e-5)
    ours = load(tmp_path).to_torch()
    ids, mask = ragged(LENGTHS)
    types = (torch.arange(9) > 3).long().expand(4, 9)
    with torch.inference_mode():
        for kinds in (None, types):
            expected = theirs(ids, mask, kinds).last_hidden_state
            output = ours(ids, mask, kinds)
            torch.testing.assert_close(output.hidden, expected[mask.bool()], **CLOSE)
            assert output.result is None
        assert float((theirs(ids, mask, types).last_hidden_state - theirs(ids, mask)[0]).abs().max()) > 0.1


@pytest.mark.parametrize("labels", [("no", "yes"), ("a", "b", "c", "d", "e")])
def test_equals_berts_classifier(labels: tuple[str, ...], tmp_path: Path) -> None:
    theirs = bert_directory(tmp_path, labels=labels)
    ids, mask = ragged(LENGTHS)
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path).to_torch()(ids, mask).result, theirs(ids, mask).logits, **CLOSE)


def test_equals_minilm_on_real_text(minilm: Path) -> None:
    from transformers import BertModel

    checkpoint = load(minilm)
    texts = [*SENTENCES, "naïve café — 12.5 %", "How can I protect a range of cells in LibreOffice Calc? " * 12]
    ids, mask = tensors(checkpoint.text_encoder().encode(texts), 0)
    theirs = BertModel.from_pretrained(minilm, attn_implementation="eager", add_pooling_layer=False).eval()
    with torch.inference_mode():
        output, expected = checkpoint.to_torch()(ids, mask), theirs(ids, mask).last_hidden_state
    torch.testing.assert_close(output.hidden, expected[mask.bool()], **CLOSE)
    mean = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(output.result, mean / mean.norm(dim=1, keepdim=True), **CLOSE)


@pytest.mark.parametrize("head", [EMBEDDING, DENSE, LABELS], ids=["mean", "cls and Dense", "classifier"])
@pytest.mark.parametrize("layers", [WHOLE, ABSENT], ids=["whole", "absent"])
def test_where_the_padding_stands_changes_nothing(head: Head, layers: tuple[LayerConfig, ...]) -> None:
    model = tiny(head, layers).to_torch()
    with torch.inference_mode():
        expected = model(*ragged(LENGTHS))
        for side, columns in (("right", 15), ("left", 9), ("left", 14), ("between", 14)):
            output = model(*ragged(LENGTHS, side=side, columns=columns))
            torch.testing.assert_close(output.hidden, expected.hidden, **CLOSE)
            torch.testing.assert_close(output.result, expected.result, **CLOSE)


@pytest.mark.parametrize("head", [EMBEDDING, DENSE, LABELS], ids=["mean", "cls and Dense", "classifier"])
def test_a_text_alone_and_beside_others(head: Head) -> None:
    model = tiny(head).to_torch()
    ids, mask = ragged(LENGTHS)
    with torch.inference_mode():
        together = model(ids, mask).result
        for row, length in enumerate(LENGTHS):
            alone = model(ids[row : row + 1, :length], mask[row : row + 1, :length]).result
            torch.testing.assert_close(alone[0], together[row], **CLOSE)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_empty_row(place: int) -> None:
    ids, mask = ragged(LENGTHS)
    fuller = torch.cat([mask[:place], torch.zeros_like(mask[:1]), mask[place:]])
    longer = torch.cat([ids[:place], ids[:1], ids[place:]])
    others = [row for row in range(5) if row != place]
    for head in (EMBEDDING, DENSE, LABELS):
        model = tiny(head).to_torch()
        with torch.inference_mode():
            output, expected = model(longer, fuller), model(ids, mask)
            torch.testing.assert_close(output.result[others], expected.result, **CLOSE)
            torch.testing.assert_close(output.hidden, expected.hidden, **CLOSE)
            if head is LABELS:
                logits = model.head.classifier(model.head.pooler(torch.zeros(WIDTH)).tanh())
                torch.testing.assert_close(output.result[place], logits)
            else:
                assert not output.result[place].any()


@pytest.mark.parametrize("head", [EMBEDDING, DENSE, LABELS], ids=["mean", "cls and Dense", "classifier"])
def test_a_batch_without_any_token(head: Head) -> None:
    model = tiny(head).to_torch()
    output = model(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
    assert bool(output.hidden.isfinite().all())
    assert bool(output.result.isfinite().all())
    if head is not LABELS:
        assert not output.result.any()
    output.result.sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_an_absent_sublayer_is_one_with_zero_weights_and_its_bias() -> None:
    absent = tiny(layers=ABSENT)
    mixer, ffn = WHOLE[0].mixer, WHOLE[0].ffn
    layers = [LayerConfig(layer.mixer or mixer, layer.ffn or ffn) for layer in ABSENT]
    config = tiny_config(layers=layers)
    state = random_state(config, seed=1)
    for name in state:
        if name in absent.state:
            state[name] = absent.state[name]
            continue
        part, output = name.split(".")[2], "out" if ".mixer." in name else "down"
        if f".{output}." in name:
            bias = absent.state.get(f"encoder.{name.split('.')[1]}.{part}.bias")
            state[name] = bias if name.endswith("bias") else torch.zeros_like(state[name])
    ids, mask = ragged(LENGTHS)
    with torch.inference_mode():
        expected = Checkpoint(config, state, absent.tokenizer).to_torch()(ids, mask)
        output = absent.to_torch()(ids, mask)
    torch.testing.assert_close(output.hidden, expected.hidden, **CLOSE)
    torch.testing.assert_close(output.result, expected.result, **CLOSE)


@pytest.mark.parametrize("layers", [WHOLE, ABSENT], ids=["whole", "absent"])
@pytest.mark.parametrize("head", [EMBEDDING, DENSE, LABELS], ids=["mean", "cls and Dense", "classifier"])
def test_gradients_reach_every_parameter(head: Head, layers: tuple[LayerConfig, ...]) -> None:
    model = tiny(head, layers).to_torch().train()
    ids, mask = ragged((5, 2, 7))
    mask[1] = 0  # an empty row must not spoil them
    result = model(ids, mask, (ids % 2).long()).result
    (result * torch.randn_like(result)).sum().backward()
    for name, value in model.named_parameters():
        assert value.grad is not None, name
        assert bool(value.grad.isfinite().all()), name
        assert bool(value.grad.abs().max() > 1e-5), name


def test_states_are_given_when_asked_for() -> None:
    model = tiny().to_torch()
    batch = ragged(LENGTHS)
    with torch.inference_mode():
        assert model(*batch).states == ()
        output = model(*batch, with_states=True)
        assert [state.shape for state in output.states] == [(19, WIDTH)] * 3
        assert torch.equal(output.states[-1], output.hidden)
        first = model.encoder[0](output.states[0], output.packing)
        assert torch.equal(first, output.states[1])


def test_no_layer_and_no_token_types() -> None:
    config = tiny_config(None, ())
    config = replace(config, embedding=replace(config.embedding, token_types=0))
    model = Checkpoint(config, random_state(config), "").to_torch()
    ids, mask = ragged((2, 1))
    table, place = model.embeddings.tokens.weight, model.embeddings.positions.weight
    summed = torch.stack([table[ids[0, 0]] + place[0], table[ids[0, 1]] + place[1], table[ids[1, 0]] + place[0]])
    expected = (summed - summed.mean(1, keepdim=True)) / summed.std(1, correction=0, keepdim=True)
    norm = model.embeddings.norm
    torch.testing.assert_close(model(ids, mask).hidden, expected * norm.weight + norm.bias, **CLOSE)


def test_attention_by_a_loop() -> None:
    """Two heads of width 12 on d 32: no width that is derived from another would pass."""
    checkpoint = tiny(None, WHOLE[1:])
    model, s = checkpoint.to_torch(), checkpoint.state
    ids, mask = ragged((4,))
    output = model(ids, mask, with_states=True)
    x, mixer = output.states[0].detach(), "encoder.0.mixer"
    q, k, v = (x @ s[f"{mixer}.qkv.weight"].T + s[f"{mixer}.qkv.bias"]).split(24, dim=1)
    heads = []
    for i in (0, 1):
        columns = slice(12 * i, 12 * i + 12)
        scores = (q[:, columns] @ k[:, columns].T / 12**0.5).exp()
        heads.append(scores / scores.sum(1, keepdim=True) @ v[:, columns])
    expected = torch.cat(heads, 1) @ s[f"{mixer}.out.weight"].T + s[f"{mixer}.out.bias"]
    torch.testing.assert_close(model.encoder[0].mixer(x, output.packing), expected, **CLOSE)


def test_initialize_is_berts_and_repeats() -> None:
    config = tiny_config(LABELS)
    models = [Transformer(config) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        initialize(model, seed)
    states = [model.state_dict() for model in models]
    name = "embeddings.tokens.weight"
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0][name], states[2][name])
    assert float(states[0][name].std()) == pytest.approx(0.02, rel=0.1)
    assert not states[0]["head.classifier.bias"].any()
    assert bool((states[0]["embeddings.norm.weight"] == 1).all())


@pytest.mark.parametrize("place", ["post", "pre"])
def test_from_a_layer_on_is_what_forward_gives(place: str) -> None:
    config = replace(tiny_config(), norm_place=place, final_norm=place == "pre")
    model = Transformer(config)
    model.load_state_dict(random_state(config))
    ids, mask = ragged([5, 3, 7])
    with torch.no_grad():
        whole = model.eval()(ids, mask, with_states=True)
        for number, tokens in enumerate(whole.states):
            rest = model.from_layer(number, tokens, whole.packing)
            assert torch.equal(rest.hidden, whole.hidden)
            assert torch.equal(rest.result, whole.result)
