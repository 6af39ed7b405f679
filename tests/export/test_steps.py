"""The graphs that write a token at a time, driven from numpy, against eager decoding and the graph of the whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import MIXERS, POSITIONS, VOCAB_SIZE, WIDTH, decoder_config, grouped, random_state
from stepping import Driver, axes, step_graphs
from writing import END, START, run, session, texts, writer

from slimformer.export.names import DECODER_FILE, DECODER_WITH_PAST_FILE, ENCODER_FILE, MODEL_FILE
from slimformer.export.steps import build_steps
from slimformer.transformer.batching import tensors
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import AttentionConfig, EmbeddingConfig, LanguageHead, LayerConfig, TransformerConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import pad

UNTIED = LanguageHead(START, END, tied=False, bias=True)
UNTOLD = EmbeddingConfig(VOCAB_SIZE, POSITIONS, position_kind="none", norm=False)
KINDS = ("attention", "other heads", "grouped", "lstm", "gru", "ssru", "absent")
SHAPES: dict[str, TransformerConfig] = {
    **{f"{name} beside": decoder_config(1, 2, MIXERS[name], head=UNTIED) for name in KINDS},
    **{f"{name} alone": decoder_config(0, 2, MIXERS[name], head=UNTIED) for name in KINDS},
    "grouped cross beside": grouped(decoder_config(1, 2, head=UNTIED)),
    "pre-norm beside": decoder_config(2, 2, norm_place="pre", final_norm=True, head=UNTIED),
    "pre-norm alone": decoder_config(0, 2, norm_place="pre", final_norm=True, head=UNTIED),
    "tied beside": decoder_config(1, 1, head=LanguageHead(START, END)),
    "another table beside": decoder_config(
        1, 1, head=UNTIED, target=EmbeddingConfig(30, POSITIONS, position_kind="learned", scaled=True)
    ),
    "no positions beside": replace(decoder_config(1, 1, MIXERS["gru"], head=UNTIED), target=UNTOLD),
    "no positions alone": replace(decoder_config(0, 1, MIXERS["ssru"], head=UNTIED), embedding=UNTOLD),
    "mixed beside": replace(
        decoder_config(1, 1, head=UNTIED),
        decoder=(
            LayerConfig(MIXERS["lstm"], None, AttentionConfig(2, 8)),
            LayerConfig(None, None, None),
            LayerConfig(MIXERS["attention"], None, AttentionConfig(3, 4)),
        ),
    ),
    "mixed alone": replace(
        decoder_config(0, 1, head=UNTIED),
        decoder=tuple(LayerConfig(MIXERS[name], None) for name in ("absent", "lstm", "attention", "ssru")),
    ),
}
BESIDE = [name for name in SHAPES if name.endswith("beside")]
ALONE = [name for name in SHAPES if name.endswith("alone")]
SOURCES = [[5, 9, 3], [7], list(range(5, 22)), [20, 21, 22, 23, 3]]
PROMPTS = [[9], [5, 9, 11], list(range(5, 20)), []]
STEPS = 6


def model(name: str, ending: float = 1.0) -> Checkpoint:
    return writer(SHAPES[name], 5, ending)


def left(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, padded on the left as those who generate do it."""
    ids, mask = pad([row[::-1] for row in rows])
    return ids[:, ::-1].copy(), mask[:, ::-1].copy()


def written(driver: Driver, logits: np.ndarray, steps: int) -> list[list[int]]:
    """The best tokens of `steps` rounds, up to the end token."""
    tokens = [logits[:, -1].argmax(1)]
    for _ in range(steps - 1):
        tokens.append(driver.feed(tokens[-1][:, None])[:, -1].argmax(1))
    return [row[0] for row in texts(np.stack(tokens, 1)[:, None])]


@pytest.mark.parametrize("name", BESIDE)
def test_logits_of_each_token_are_those_of_eager_decoding(name: str) -> None:
    """Sources of 1 to 17 tokens; rows that have ended go on like the others."""
    checkpoint = model(name)
    driver, net = Driver(checkpoint), checkpoint.to_torch()
    states = driver.read(*pad(SOURCES))
    with torch.inference_mode():
        source = net.encode(*tensors(SOURCES, 0))
        np.testing.assert_allclose(states, source.packing.padded(source.tokens).numpy(), atol=1e-5, rtol=1e-5)
        begun = torch.full((len(SOURCES), 1), START)
        logits, cache = net.start(begun, torch.ones_like(begun), source)
        found = driver.feed(begun)
        np.testing.assert_allclose(found[:, 0], logits.numpy(), atol=1e-5, rtol=1e-5)
        for _ in range(STEPS):
            tokens = logits.argmax(1)
            logits, cache = net.step(tokens, cache)
            found = driver.feed(tokens[:, None])
            np.testing.assert_allclose(found[:, 0], logits.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_alone_reads_prompts_and_goes_on(side: str, name: str) -> None:
    checkpoint = model(name)
    driver, net = Driver(checkpoint), checkpoint.to_torch()
    begun = [[START, *prompt] for prompt in PROMPTS]
    ids, mask = pad(begun) if side == "right" else left(begun)
    found = driver.feed(ids, mask)
    with torch.inference_mode():
        every = net(torch.from_numpy(ids), torch.from_numpy(mask)).result.numpy()
        np.testing.assert_allclose(found[mask.astype(bool)], every, atol=1e-5, rtol=1e-5)
        logits, cache = net.start(*tensors(begun, 0))
        for _ in range(STEPS):
            tokens = logits.argmax(1)
            logits, cache = net.step(tokens, cache)
            found = driver.feed(tokens[:, None])
            np.testing.assert_allclose(found[:, 0], logits.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["attention beside", "lstm beside", "ssru beside", "pre-norm beside"])
def test_tokens_are_those_of_the_whole_decode(name: str, format: str) -> None:
    checkpoint = model(name) if format == "fp32" else quantized(model(name), bits=7)
    driver = Driver(checkpoint)
    driver.read(*pad(SOURCES))
    found = written(driver, driver.feed(np.full((len(SOURCES), 1), START)), 10)
    expected = texts(run(session(checkpoint), SOURCES, Decoding(max_new_tokens=10))[0])
    assert found == [rows[0] for rows in expected]
    assert len(set(map(tuple, found))) > 1


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["attention alone", "lstm alone", "ssru alone", "mixed alone"])
def test_tokens_after_unequal_prompts_are_those_of_the_whole_decode(name: str, format: str) -> None:
    checkpoint = model(name) if format == "fp32" else quantized(model(name), bits=7)
    driver = Driver(checkpoint)
    found = written(driver, driver.feed(*left([[START, *prompt] for prompt in PROMPTS])), 7)
    expected = texts(run(session(checkpoint), PROMPTS, Decoding(max_new_tokens=7))[0])
    assert found == [rows[0] for rows in expected]
    assert len(set(map(tuple, found))) > 1


def test_int8_logits_after_a_prompt_have_a_range_of_their_own() -> None:
    """Those of the tokens before them, which the whole decode does not work out, would move the range."""
    checkpoint = quantized(model("absent alone"), bits=7)
    driver, net = Driver(checkpoint), checkpoint.to_torch()
    begun = [[START, *prompt] for prompt in PROMPTS]
    ids, mask = left(begun)
    found = driver.feed(ids, mask)
    with torch.inference_mode():
        last, _ = net.start(*tensors(begun, 0))
        every = net(torch.from_numpy(ids), torch.from_numpy(mask)).result.numpy()
    np.testing.assert_allclose(found[:, -1], last.numpy(), atol=1e-5)
    np.testing.assert_allclose(found[mask.astype(bool)], every, atol=0.1)  # measured 0.06: another int8 range


def test_names_and_axes_of_an_encoder_decoder_are_those_of_optimum() -> None:
    graphs = step_graphs(model("attention beside"))
    assert list(graphs) == [ENCODER_FILE, DECODER_FILE, DECODER_WITH_PAST_FILE]
    encoder, first, later = (graph.graph for graph in graphs.values())
    own = {f"{i}.decoder.{part}": 8 for i in range(2) for part in ("key", "value")}
    sources = {f"{i}.encoder.{part}": 12 for i in range(2) for part in ("key", "value")}
    mask = {"encoder_attention_mask": ["batch", "encoder_sequence"]}
    assert axes(encoder.input) == {name: ["batch", "sequence"] for name in ("input_ids", "attention_mask")}
    assert axes(encoder.output) == {"last_hidden_state": ["batch", "sequence", WIDTH]}
    states = {"encoder_hidden_states": ["batch", "encoder_sequence", WIDTH]}
    assert axes(first.input) == {"input_ids": ["batch", "sequence"], **states, **mask}
    assert axes(first.output) == {
        "logits": ["batch", "sequence", VOCAB_SIZE],
        **{f"present.{name}": ["batch", 4, "sequence", width] for name, width in own.items()},
        **{f"present.{name}": ["batch", 2, "encoder_sequence", width] for name, width in sources.items()},
    }
    assert axes(later.input) == {
        "input_ids": ["batch", 1],
        **mask,
        **{f"past_key_values.{name}": ["batch", 4, "past_sequence", width] for name, width in own.items()},
        **{f"past_key_values.{name}": ["batch", 2, "encoder_sequence", width] for name, width in sources.items()},
    }
    assert axes(later.output) == {
        "logits": ["batch", "sequence", VOCAB_SIZE],
        **{f"present.{name}": ["batch", 4, "total_sequence", width] for name, width in own.items()},
    }


def test_the_past_comes_layer_by_layer() -> None:
    """Optimum gives it by place: keys and values of the decoder, then of the encoder, then the next layer's."""
    later = step_graphs(model("attention beside"))[DECODER_WITH_PAST_FILE].graph
    assert [one.name.removeprefix("past_key_values.") for one in later.input][2:] == [
        f"{i}.{stack}.{part}" for i in range(2) for stack in ("decoder", "encoder") for part in ("key", "value")
    ]


def test_names_and_axes_of_a_decoder_alone_are_those_of_optimum() -> None:
    graphs = step_graphs(model("attention alone"))
    assert list(graphs) == [MODEL_FILE]
    parts = [f"{i}.{part}" for i in range(2) for part in ("key", "value")]
    assert axes(graphs[MODEL_FILE].graph.input) == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total_sequence"],
        **{f"past_key_values.{part}": ["batch", 4, "past_sequence", 8] for part in parts},
    }
    assert axes(graphs[MODEL_FILE].graph.output) == {
        "logits": ["batch", "sequence", VOCAB_SIZE],
        **{f"present.{part}": ["batch", 4, "total_sequence", 8] for part in parts},
    }


def test_keys_that_heads_share_are_kept_once() -> None:
    graphs = step_graphs(model("grouped cross beside"))  # 4 heads of 8, and 2 of 12 to the encoder: half as many keys
    later = axes(graphs[DECODER_WITH_PAST_FILE].graph.input)
    assert later["past_key_values.1.decoder.key"] == ["batch", 2, "past_sequence", 8]
    assert later["past_key_values.1.encoder.value"] == ["batch", 1, "encoder_sequence", 12]


def test_cells_have_states_and_absent_mixers_nothing() -> None:
    graphs = step_graphs(model("mixed beside"))
    later = graphs[DECODER_WITH_PAST_FILE].graph
    assert [name for name in axes(later.input) if name.startswith("past")] == [
        *(f"past_key_values.0.{part}" for part in ("decoder.state", "decoder.cell", "encoder.key", "encoder.value")),
        *(f"past_key_values.2.{part}" for part in ("decoder.key", "decoder.value", "encoder.key", "encoder.value")),
    ]
    assert axes(later.input)["past_key_values.0.decoder.state"] == ["batch", 20]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("lstm beside", True), ("absent beside", True), ("mixed beside", False), ("no positions beside", False)],
)
def test_the_position_is_asked_for_where_nothing_else_tells_it(name: str, asked: bool) -> None:
    assert ("cache_position" in axes(step_graphs(model(name))[DECODER_WITH_PAST_FILE].graph.input)) is asked


def test_a_prefix_of_several_tokens_at_first() -> None:
    """All texts begin with the same number of tokens, as with a language's tag."""
    checkpoint = model("mixed beside")
    driver, net = Driver(checkpoint), checkpoint.to_torch()
    driver.read(*pad(SOURCES))
    begun = np.array([[START, 8, 9], [START, 5, 5], [START, 30, 6], [START, 7, 12]])
    found = driver.feed(begun)
    with torch.inference_mode():
        ids = torch.from_numpy(begun)
        expected = net(*tensors(SOURCES, 0), target_ids=ids, target_mask=torch.ones_like(ids)).result.numpy()
        logits, _ = net.step(*_after(net, ids))
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(driver.feed(np.full((4, 1), 6))[:, 0], logits.numpy(), atol=1e-5, rtol=1e-5)


def _after(net: torch.nn.Module, ids: torch.Tensor) -> tuple:
    _, cache = net.start(ids, torch.ones_like(ids), net.encode(*tensors(SOURCES, 0)))
    return torch.full((len(ids),), 6), cache


def test_what_no_such_graph_is_made_of() -> None:
    config = decoder_config(1, 1, head=None)
    state = {name: value.numpy() for name, value in random_state(config).items()}
    with pytest.raises(InputError, match="made of a decoder with a language head"):
        next(build_steps(config, state))
