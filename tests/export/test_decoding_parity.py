"""Bundles that write: their parity, and the runtime that translates with them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from models import POSITIONS, SENTENCES, TOKENIZER, VOCAB, decoder_config, random_state
from onnx import numpy_helper

from slimformer.export.bundle import export
from slimformer.export.decoding_parity import INT8_TOKENS, TOKENS, check_decoding
from slimformer.export.runtime import Search, load_bundle
from slimformer.transformer.batching import tensors
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import LanguageHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, generate
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import TextEncoder

TEXTS = (*SENTENCES, "sort", "change the font colour of one cell", "save as text file")


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    config = decoder_config(1, 1, head=LanguageHead(2, 3, tied=False, bias=True))
    state = random_state(config, 4)
    state["head.tokens.weight"] *= 2
    state["head.bias"][3] = 1.0
    return Checkpoint(config, state, TOKENIZER)


@pytest.fixture(scope="module")
def bundle(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(model, tmp_path_factory.mktemp("b") / "b")


def test_a_good_bundle_writes_the_same(model: Checkpoint, bundle: Path) -> None:
    parity = check_decoding(model, bundle, TEXTS, threads=1)
    assert parity.to_dict() == {
        "texts": len(TEXTS),
        "greedy_equal": 1.0,
        "beams_equal": 1.0,
        "tokens": parity.tokens,
        "tokens_equal": 1.0,
        "steps_equal": 1.0,
        "limit": 1.0,
        "measured": "greedy_equal, beams_equal and steps_equal",
        "passed": True,
    }
    written = [load_bundle(bundle, threads=1).write([ids], TOKENS)[0] for ids in model.text_encoder().encode(TEXTS)]
    assert parity.tokens == sum(map(len, written))


def test_another_weight_is_found(model: Checkpoint, tmp_path: Path) -> None:
    path = export(model, tmp_path / "b") / "onnx/generate.onnx"
    graph = onnx.load(path)
    stored = next(one for one in graph.graph.initializer if one.name == "decoder.0.cross.kv.bias")
    stored.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(stored) + 3, stored.name))
    onnx.save(graph, path)
    parity = check_decoding(model, tmp_path / "b", TEXTS, threads=1)
    assert not parity.passed
    assert parity.greedy_equal < 1
    assert parity.tokens_equal < 1


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_another_weight_of_the_graphs_of_single_tokens_is_found(model: Checkpoint, format: str, tmp_path: Path) -> None:
    """The whole decode is as it was; from the second token on the steps are not."""
    made = model if format == "fp32" else quantized(model, bits=7)
    path = export(made, tmp_path / "b") / "onnx/decoder_with_past_model.onnx"
    graph = onnx.load(path)
    stored = next(one for one in graph.graph.initializer if one.name == "decoder.0.ffn.down.bias")
    bias = numpy_helper.to_array(stored)
    stored.CopyFrom(numpy_helper.from_array(bias - 3 * (-1) ** np.arange(bias.size, dtype=np.float32), stored.name))
    onnx.save(graph, path)
    parity = check_decoding(made, tmp_path / "b", TEXTS, threads=1)
    assert parity.tokens_equal >= INT8_TOKENS
    assert parity.steps_equal < 0.9
    assert not parity.passed


def test_tokens_are_compared_given_those_that_the_graph_wrote(model: Checkpoint, tmp_path: Path) -> None:
    """Whole batches by teacher forcing, another way to the logits of every place, count the same tokens."""
    other = replace(model, state={**model.state, "head.bias": model.state["head.bias"].flip(0)})
    parity = check_decoding(model, export(other, tmp_path / "b"), TEXTS, threads=1)
    opened, same, count = load_bundle(tmp_path / "b", threads=1), 0, 0
    for ids in model.text_encoder().encode(TEXTS):
        written = opened.write([ids], TOKENS)[0]
        begun = torch.tensor([[2, *written[:-1]]])
        logits = model.to_torch()(*tensors([ids], 0), target_ids=begun, target_mask=torch.ones_like(begun)).result
        same, count = same + int((logits.argmax(1) == torch.tensor(written)).sum()), count + len(written)
    assert 0 < same < count
    assert parity.tokens_equal == same / count


def test_int8_is_judged_by_its_tokens_and_no_text_is_no_proof(model: Checkpoint, tmp_path: Path) -> None:
    small = quantized(model, bits=7)
    parity = check_decoding(small, export(small, tmp_path / "b"), TEXTS, threads=1)
    assert (parity.limit, parity.measured) == (INT8_TOKENS, "tokens_equal and steps_equal")
    assert parity.passed is (min(parity.tokens_equal, parity.steps_equal) >= INT8_TOKENS)
    assert not check_decoding(small, tmp_path / "b", [], threads=1).passed


def test_translate_keeps_order_and_blank_lines(model: Checkpoint, bundle: Path) -> None:
    opened, encoder = load_bundle(bundle, threads=1), model.text_encoder()
    texts = [TEXTS[4], "", TEXTS[0], "  ", TEXTS[3]]
    for beams in (1, 3):
        found = opened.translate(texts, beams=beams, max_new_tokens=9, length_penalty=0.5, batch=2)
        assert found[1] == found[3] == ""
        for place in (0, 2, 4):
            options = Decoding(max_new_tokens=9, beams=beams, length_penalty=0.5)
            ids = generate(model.to_torch(), encoder.encode([texts[place]]), options).sequences[0, 0].tolist()
            assert found[place] == encoder.decode(opened.cut(ids))
    assert opened.translate([]) == []
    whole = opened.write(encoder.encode([TEXTS[0]]))
    assert 0 < len(whole[0]) <= model.config.embedding.positions


def test_refusals(model: Checkpoint, bundle: Path, tmp_path: Path) -> None:
    opened = load_bundle(bundle, threads=1)
    with pytest.raises(InputError, match="max_new_tokens 25 is over the model's 24 positions"):
        opened.write([[5]], 25)
    with pytest.raises(InputError, match="text 2, and 1 more is over the model's 24 tokens: cut it in sentences"):
        opened.translate(["sort", "print " * 30, "print " * 40])
    with pytest.raises(InputError, match="does not embed; it has the head language"):
        opened.embed(["a"])
    with pytest.raises(InputError, match="have no layout padded"):
        export(model, tmp_path / "b", layout="padded")
    with pytest.raises(InputError, match="was made to translate, not to generate: translate with it"):
        opened.generate(["sort"])
    from tiny import tiny

    embedder = load_bundle(export(tiny(), tmp_path / "e"), threads=1)
    with pytest.raises(InputError, match="does not write; it has the head embedding"):
        embedder.translate(["a"])
    assert not (tmp_path / "b").exists()


# --- summarizers ---


def test_a_summarizer_reads_the_beginning_of_what_is_too_long(model: Checkpoint, bundle: Path, tmp_path: Path) -> None:
    """What it writes is what a translator of the same weights writes for the tokens that are left."""
    head, text = replace(model.config.head, kind="summarization"), replace(model.config.text, max_length=9)
    made = replace(model, config=replace(model.config, head=head, text=text))
    opened = load_bundle(export(made, tmp_path / "b"), threads=1)
    exact = "sort by date and print one page"
    texts = [f"{exact} of a sheet", "", exact, "print", f"{exact} of"]
    assert [len(ids) for ids in TextEncoder(model.tokenizer, 24).encode(texts)] == [12, 2, 9, 3, 10]
    found, translator = opened.summarize(texts, max_new_tokens=8, beams=2), load_bundle(bundle, threads=1)
    assert found == translator.translate([exact, "", exact, "print", exact], max_new_tokens=8, beams=2)
    whole = translator.translate(texts, max_new_tokens=8, beams=2)
    assert [one == other for one, other in zip(found, whole, strict=True)] == [False, True, True, True, False]
    assert (opened.sources.limit, opened.sources.cut(texts), opened.sources.cut([exact])) == (9, 2, 0)
    assert check_decoding(made, tmp_path / "b", TEXTS, threads=1).passed
    assert opened.summarize([]) == []
    with pytest.raises(InputError, match="was made to summarize, not to translate: summarize with it"):
        opened.translate(["sort"])
    with pytest.raises(InputError, match="was made to translate, not to summarize"):
        translator.summarize(["sort"])
    with pytest.raises(InputError, match="does not embed; it has the head summarization"):
        opened.embed(["sort"])


# --- decoders by themselves ---


@pytest.fixture(scope="module")
def language_model() -> Checkpoint:
    config = decoder_config(0, 1, head=LanguageHead(2, 3, tied=False, bias=True))
    state = random_state(config, 4)
    state["head.tokens.weight"] *= 2
    return Checkpoint(config, state, TOKENIZER)


@pytest.fixture(scope="module")
def language_bundle(language_model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(language_model, tmp_path_factory.mktemp("l") / "b")


def test_a_language_model_is_compared_on_prompts(
    language_model: Checkpoint, language_bundle: Path, tmp_path: Path
) -> None:
    long = "print " * 40
    parity = check_decoding(language_model, language_bundle, [*TEXTS, long], threads=1)
    assert (parity.texts, parity.greedy_equal, parity.beams_equal, parity.tokens_equal) == (len(TEXTS) + 1, 1, 1, 1)
    assert parity.passed
    opened = load_bundle(language_bundle, threads=1)
    prompts = [*opened.prompts(TEXTS), [2, *[VOCAB.split("\n").index("print")] * 11]]
    assert parity.tokens == sum(len(opened.write([ids[:12]], 12)[0]) for ids in prompts)
    bias = language_model.state["head.bias"]
    other = replace(language_model, state={**language_model.state, "head.bias": bias.flip(0)})
    assert not check_decoding(other, language_bundle, TEXTS, threads=1).passed


def test_generate_goes_on_from_each_text(language_model: Checkpoint, language_bundle: Path) -> None:
    """What follows begins with the space that stands between the two; the end token of a whole text is left out."""
    opened, encoder, net = (
        load_bundle(language_bundle, threads=1),
        language_model.text_encoder(),
        language_model.to_torch(),
    )
    texts = ["sort by date", "", "print", "how do i freeze the first row of"]
    prompts = [ids[:-1] for ids in encoder.encode(texts)]
    assert opened.prompts(texts) == prompts
    for beams in (1, 3):
        found = opened.generate(texts, beams=beams, max_new_tokens=9, batch=2)
        for text, prompt, after in zip(texts, prompts, found, strict=True):
            options = Decoding(max_new_tokens=9, beams=beams)
            ids = opened.cut(generate(net, None, options, prefixes=[prompt]).sequences[0, 0].tolist())
            assert text + after == encoder.decode([*prompt, *ids])
    assert opened.generate([]) == []
    whole = opened.write(prompts)
    assert max(map(len, whole)) <= POSITIONS - max(map(len, prompts))
    assert opened.generate(texts) == opened.generate(texts, max_new_tokens=POSITIONS - max(map(len, prompts)))


def test_texts_are_drawn_by_a_seed(
    model: Checkpoint, bundle: Path, language_model: Checkpoint, language_bundle: Path
) -> None:
    search: Search = {"sample": True, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": 5}
    options = Decoding(max_new_tokens=6, **search)
    sources = model.text_encoder().encode(TEXTS)
    written = generate(model.to_torch(), sources, options).sequences[:, 0].tolist()
    opened = load_bundle(bundle, threads=1)
    expected = [model.text_encoder().decode(opened.cut(ids)) for ids in written]
    assert opened.translate(TEXTS, max_new_tokens=6, **search) == expected
    assert opened.translate(TEXTS, max_new_tokens=6, **{**search, "seed": 6}) != expected
    writer = load_bundle(language_bundle, threads=1)
    prompts = writer.prompts(TEXTS[1:4])
    drawn = generate(language_model.to_torch(), None, options, prefixes=prompts).sequences[:, 0].tolist()
    assert writer.write(prompts, 6, **search) == [writer.cut(ids) for ids in drawn]
    with pytest.raises(InputError, match="sample draws one text, beams is 2: give one of the two"):
        writer.generate(["sort"], max_new_tokens=6, beams=2, **search)
    with pytest.raises(InputError, match="temperature must be above 0"):
        writer.write([[5]], 3, sample=True, temperature=0.0)
    with pytest.raises(TypeError, match="a graph does not know early_stopping"):
        writer.write([[5]], 3, early_stopping=True)


def test_refusals_of_a_language_model(language_bundle: Path) -> None:
    opened = load_bundle(language_bundle, threads=1)
    with pytest.raises(InputError, match="was made to generate, not to translate: generate with it"):
        opened.translate(["sort"])
    with pytest.raises(
        InputError, match="max_new_tokens 8 after a prompt of 17 tokens is over the model's 24 positions"
    ):
        opened.write([[5] * 17, [5]], 8)
    with pytest.raises(InputError, match="max_new_tokens 1 after a prompt of 24 tokens"):
        opened.write([[5] * 24])
    with pytest.raises(InputError, match="text 2 is over the model's 24 tokens: shorten it"):
        opened.generate(["sort", "print " * 30])


def test_the_bundle_has_its_files_and_no_name_that_other_tools_would_misread(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {
        "onnx",
        "slimformer.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    steps = {"encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"}
    assert {path.name for path in (bundle / "onnx").iterdir()} == {"generate.onnx", "weights.data"} | steps
