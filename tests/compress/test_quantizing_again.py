"""Quantizing after, beside and in spite of other things: mixed formats, earlier steps, loops, orders of texts."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import writing
from models import SENTENCES, TOKENIZER, WORDS, decoder_config, pair_data, random_state, tiny
from tiny import sentences as words

from slimformer.compress.observing import Channels, observe
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import FeedForwardConfig, LanguageHead
from slimformer.transformer.data import SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, generate

MODEL, CONTEXT = tiny(), StepContext(SearchData((), (), (), SENTENCES))
STATIC = {"format": "int8_static", "bits": 8, "smoothing": 0.5}


def hidden(checkpoint: Checkpoint) -> torch.Tensor:
    model = checkpoint.to_torch()
    with torch.inference_mode():
        rows = checkpoint.text_encoder().encode(SENTENCES)
        return torch.cat(
            [model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64)).hidden for row in rows]
        )


@pytest.mark.parametrize("dynamic", ["*.qkv", "encoder.1.ffn.up"])
def test_a_static_linear_behind_one_that_is_int8_dynamic(dynamic: str) -> None:
    """Whose bias, which takes the factors too, is that of the float model."""
    result = Quantize(formats=(f"{dynamic}=int8_dynamic",), **STATIC)(MODEL, CONTEXT)
    found, expected = hidden(result.checkpoint.check("x")), hidden(MODEL)
    assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("form", ["int8_dynamic", "int8_static", "int8_blocks"])
def test_a_static_linear_behind_one_that_an_earlier_step_quantized(form: str) -> None:
    """Factors go into its scale and bias, never into its integers."""
    once = Quantize(format="float32", formats=(f"encoder.0.mixer.qkv={form}",), bits=8)(MODEL, CONTEXT).checkpoint
    twice = Quantize(**STATIC)(once, CONTEXT).checkpoint
    assert not twice.state["encoder.0.mixer.qkv.weight"].is_floating_point()
    twice.check("x")


def test_the_bits_of_an_output_layer_that_was_quantized_before_stay() -> None:
    config = decoder_config(0, 1)
    once = Quantize(bits=7)(Checkpoint(config, random_state(config), TOKENIZER, {})).checkpoint
    again = Quantize(bits=8)(once).checkpoint
    assert all(torch.equal(again.state[name], value) for name, value in once.state.items())
    assert again.provenance["int8_weight_bits"] == 7


def test_values_that_are_not_finite_are_refused_without_compensation_too() -> None:
    """Or biases would become NaN."""
    broken = {**MODEL.state, "encoder.0.ffn.down.weight": MODEL.state["encoder.0.ffn.down.weight"] * 1e38}
    step = Quantize(format="float32", formats=("encoder.1.ffn.up=int8_blocks",), compensate=False)
    with pytest.raises(InputError, match="not finite"):
        step(replace(MODEL, state=broken), CONTEXT)


def test_the_format_that_is_calibrated_is_named() -> None:
    with pytest.raises(InputError) as caught:
        Quantize(formats=("*.up=int8_static",))(MODEL)
    assert "int8_dynamic is calibrated" not in str(caught.value)


def test_the_order_of_many_texts_does_not_count() -> None:
    """From 64 examples on only some judge strengths: which ones is not decided by the order of the draw."""
    texts = tuple(" ".join(WORDS.split()[i : i + 4]) for i in range(30))
    texts += tuple(" ".join(WORDS.split()[i : i + 6][::-1]) for i in range(25)) + tuple(words(40, seed=3))
    options = {**STATIC, "smoothing": None}
    said = [
        Quantize(**options)(MODEL, StepContext(SearchData((), (), (), order), seed=seed)).details["smoothing"]
        for seed, order in enumerate((texts, texts[::-1]))
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("form", ["int8_blocks", "int4_blocks"])
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_blocks_in_the_loop_of_the_whole_decode_are_those_of_pytorch(form: str, seed: int) -> None:
    """From the second token on too: weights from outside a loop's body are not packed, and inputs then not rounded."""
    config = decoder_config(0, 1, head=LanguageHead(2, 3, tied=False, bias=True))
    layers = tuple(replace(one, ffn=FeedForwardConfig(64, "relu")) for one in config.decoder)
    config = replace(config, decoder=layers)
    state = random_state(config, seed)
    state["head.tokens.weight"] *= 2
    model = Checkpoint(config, state, TOKENIZER)
    small = Quantize(format=form, bits=7, samples=12, tables=False)(model, StepContext(pair_data())).checkpoint
    session, options = writing.session(small), Decoding(max_new_tokens=8)
    for text in (SENTENCES[0], SENTENCES[2], SENTENCES[3]):
        prompt = [2, *small.text_encoder().encode([text])[0][1:-1]]
        wanted = generate(small.to_torch(), None, options, prefixes=[prompt]).scores[0, 0]
        _, scores = writing.run(session, [prompt], options)
        np.testing.assert_allclose(scores[0, 0], wanted, atol=1e-4)


def test_a_name_that_is_none_leaves_no_hooks_behind() -> None:
    model, channels = MODEL.to_torch(), Channels(inputs=32, device=torch.device("cpu"))
    with pytest.raises(AttributeError):
        observe(model, [], {"encoder.0.mixer.qkv": channels, "encoder.9.mixer.qkv": channels})
    assert not model.get_submodule("encoder.0.mixer.qkv")._forward_pre_hooks


def test_nothing_is_summed_that_nothing_needs() -> None:
    """Without compensation and corrected biases no pass for sums is needed."""

    class Listener:
        titles: ClassVar[list[str]] = []

        def start(self, title: str, total: int | None, unit: str) -> None:
            self.titles.append(title)

        def advance(self, n: int = 1, note: str = "") -> None: ...
        def done(self, note: str = "") -> None: ...

    context = replace(CONTEXT, progress=Listener())
    Quantize(**STATIC, compensate=False, correct_bias=False)(MODEL, context)
    assert "sums over activations" not in Listener.titles
