"""New encoders of other shapes: what they are, what their tables begin as, and that they learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import LABELS, layer, search_data, tiny, tiny_config, with_head

from slimformer.compress.distill import Distill
from slimformer.compress.recipe import make_step
from slimformer.compress.reshape import Reshape
from slimformer.compress.step import StepContext
from slimformer.transformer.config import (
    AttentionConfig,
    ClassificationHead,
    DenseConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LayerConfig,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.quantization import quantized

CONTEXT = StepContext(search_data(), seed=3)
SMALL = Reshape(layers=3, width=6, heads=2, neurons=10)
MODEL = replace(tiny(), provenance={"source": "tiny", "kept": {"layers": [0]}, "kept_of": {"layers": 2}})


def test_the_shape_is_the_one_asked_for() -> None:
    result = SMALL(MODEL, CONTEXT)
    config = result.checkpoint.config
    assert config.d_model == 6
    assert config.encoder == (LayerConfig(AttentionConfig(2, 3), FeedForwardConfig(10, "gelu")),) * 3
    assert config.head == EmbeddingHead(dense=(DenseConfig(6, 16, activation=None),))
    assert config.output_width == MODEL.config.output_width
    assert (config.text, result.checkpoint.tokenizer) == (MODEL.config.text, MODEL.tokenizer)
    assert result.checkpoint.provenance == {
        "source": "tiny",
        "reshaped": {"layers": 3, "width": 6, "heads": 2, "group": 1, "neurons": 10, "tables": True},
    }
    before = 2 * (4 * 16 * 16 + 2 * 16 * 32)
    assert result.details == {"multiply_adds_kept": round(3 * (4 * 6 * 6 + 2 * 6 * 10) / before, 4)}


def test_a_classifier_keeps_its_head_and_others_keep_their_width() -> None:
    labels = with_head(ClassificationHead(LABELS))
    assert SMALL(labels, CONTEXT).checkpoint.config.head == ClassificationHead(LABELS)
    wide = Reshape(layers=1, width=16, heads=4, group=2, neurons=8)
    config = wide(MODEL, CONTEXT).checkpoint.config
    assert config.head == MODEL.config.head
    assert config.encoder[0].mixer == AttentionConfig(4, 4, group=2)
    assert SMALL(tiny(tiny_config(head=None)), CONTEXT).checkpoint.config.head is None


def test_the_activation_is_that_of_the_first_ffn() -> None:
    model = tiny(tiny_config((layer(neurons=0), layer(activation="relu"), layer())))
    assert SMALL(model, CONTEXT).checkpoint.config.encoder[2].ffn == FeedForwardConfig(10, "relu")
    without = tiny(tiny_config((layer(neurons=0),)))
    assert SMALL(without, CONTEXT).checkpoint.config.encoder[2].ffn == FeedForwardConfig(10)


def test_tables_are_the_nearest_in_so_many_columns() -> None:
    """What the table's rows are to each other, by numpy's singular values; positions lie on the same directions."""
    small = SMALL(MODEL, CONTEXT).checkpoint
    tokens, positions = (MODEL.state[f"embeddings.{name}.weight"].double().numpy() for name in ("tokens", "positions"))
    u, s, v = np.linalg.svd(tokens, full_matrices=False)
    nearest = (u[:, :6] * s[:6] ** 2) @ u[:, :6].T
    found = small.state["embeddings.tokens.weight"].double().numpy()
    np.testing.assert_allclose(found @ found.T, nearest, atol=1e-5)
    beside = small.state["embeddings.positions.weight"].double().numpy()
    np.testing.assert_allclose(found @ beside.T, (u[:, :6] * s[:6]) @ v[:6] @ positions.T, atol=1e-5)
    assert small.state["embeddings.token_types.weight"].shape == (2, 6)


def test_new_weights_are_drawn_by_seed() -> None:
    first, again, other = (SMALL(MODEL, replace(CONTEXT, seed=seed)).checkpoint for seed in (3, 3, 4))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert torch.equal(first.state["embeddings.tokens.weight"], other.state["embeddings.tokens.weight"])
    new = replace(SMALL, tables=False)(MODEL, CONTEXT).checkpoint
    assert float(new.state["embeddings.tokens.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert not new.state["encoder.0.ffn.up.bias"].any()


def test_it_learns_from_the_model_whose_place_it_takes() -> None:
    context = replace(CONTEXT, teacher=MODEL)
    student = SMALL(MODEL, context).checkpoint
    result = Distill(steps=80, lr=5e-3, warmup=1, fragments=0.0)(student, context)
    losses = result.details["losses"]
    assert losses[-1] < 0.5 * losses[0]
    assert result.details["skipped"] == {}


def test_shapes_that_cannot_be() -> None:
    assert make_step({"name": "reshape", "layers": 2, "tables": False}) == Reshape(layers=2, tables=False)
    with pytest.raises(InputError, match="reshape: width 10 is no multiple of the 4 heads"):
        Reshape(width=10, heads=4)
    with pytest.raises(InputError, match="reshape: 6 heads do not go into groups of 4"):
        Reshape(group=4)
    with pytest.raises(InputError, match="reshape: layers is 0, not at least 1; neurons is -1, not at least 1"):
        Reshape(layers=0, neurons=-1)
    with pytest.raises(InputError, match=r"width is 20, the model's tables have 16 columns: ask for fewer, or for new"):
        Reshape(width=20, heads=2).check(MODEL.config)
    Reshape(width=20, heads=2, tables=False).check(MODEL.config)
    with pytest.raises(InputError, match="put reshape before quantize"):
        SMALL.check(quantized(MODEL, bits=7).config)
    with pytest.raises(InputError, match="reshape takes an encoder, this model has a decoder"):
        SMALL.check(replace(MODEL.config, head=None, decoder=MODEL.config.encoder))
