"""Tiny models for the tests of the steps."""

import pytest
import torch

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    ClassificationHead,
    EmbeddingConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LayerConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.model import Transformer
from slimformer.transformer.tokenizer import wordpiece_from_vocab

VOCAB = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(20))])


def _uneven(task: str) -> Checkpoint:
    widths = ((3, 4, 10), (2, 4, 8), (4, 2, 6))
    config = TransformerConfig(
        d_model=8,
        embedding=EmbeddingConfig(vocab_size=24, positions=16, token_types=2),
        encoder=tuple(LayerConfig(AttentionConfig(h, k), FeedForwardConfig(f)) for h, k, f in widths),
        text=TextConfig(max_length=12),
        head=EmbeddingHead() if task == "embedding" else ClassificationHead(("a", "b", "c")),
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in Transformer(config).state_dict().items()}
    state = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    return Checkpoint(config, state, wordpiece_from_vocab(VOCAB))


@pytest.fixture
def uneven() -> Checkpoint:
    """A sentence encoder of three layers (heads, head width, neurons): 3, 4, 10; 2, 4, 8; 4, 2, 6. All random."""
    return _uneven("embedding")


@pytest.fixture
def uneven_classifier() -> Checkpoint:
    """The same with a classifier of three labels."""
    return _uneven("classification")
