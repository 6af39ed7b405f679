"""Tiny models and data that the tests of export and compress share: seeded, and small enough to train in seconds."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slimformer.compress.units import Indices, Kept
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    EmbeddingConfig,
    EmbeddingHead,
    FeedForwardConfig,
    Head,
    LayerConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.data import LabelledData, LabelledRow, Page, Query, SearchData
from slimformer.transformer.model import Transformer
from slimformer.transformer.tokenizer import wordpiece_from_vocab

VOCABULARY = (
    "open close print save table cell row column text page chart font image style list file help menu line view "
    "sort find copy paste format insert delete number formula sheet slide draw math base macro filter border color"
)
WORDS = VOCABULARY.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENIZER = wordpiece_from_vocab("\n".join(SPECIAL + WORDS))
VOCAB = len(SPECIAL) + len(WORDS)
POSITIONS = 48


def layer(
    heads: int = 2, head_width: int = 8, neurons: int = 32, activation: str = "gelu", group: int = 1
) -> LayerConfig:
    """A layer; 0 heads or neurons leave the sub-layer out."""
    mixer = AttentionConfig(heads, head_width, group=group) if heads else None
    return LayerConfig(mixer, FeedForwardConfig(neurons, activation) if neurons else None)


def tiny_config(
    layers: tuple[LayerConfig, ...] = (layer(), layer()),
    head: Head | None = EmbeddingHead(),  # noqa: B008
    *,
    d_model: int = 16,
    token_types: int = 2,
    **text: Any,
) -> TransformerConfig:
    """A config over the tests' vocabulary."""
    embedding = EmbeddingConfig(VOCAB, POSITIONS, token_types)
    return TransformerConfig(d_model, embedding, layers, TextConfig(**{"max_length": 24, **text}), head)


def tiny(config: TransformerConfig | None = None, seed: int = 0) -> Checkpoint:
    """A checkpoint of random weights, large enough that every part shows in the output."""
    config = config or tiny_config()
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in Transformer(config).state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight"):
            state[name] = 1 + 0.2 * noise
        elif value.ndim == 1:
            state[name] = 0.3 * noise
        else:
            state[name] = noise * (0.7 if name.startswith("embeddings") else 1.2 * value.shape[1] ** -0.5)
    return Checkpoint(config, state, TOKENIZER, {"source": "tiny"}).check("tiny")


def with_head(head: Head, **options: Any) -> Checkpoint:
    """A checkpoint with another head."""
    return tiny(tiny_config(head=head, **options))


def sentences(count: int, seed: int, low: int = 3, high: int = 14) -> list[str]:
    """Distinct seeded runs of the vocabulary's words."""
    random = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(random.choice(WORDS, int(random.integers(low, high + 1))))] = None
    return list(found)


def search_data(queries: int = 12) -> SearchData:
    """Pages, queries made of words of a page, and texts."""
    pages = [Page(f"p{i}", f"title {i}", text) for i, text in enumerate(sentences(16, seed=1, low=8))]
    random = np.random.default_rng(2)

    def ask(count: int) -> tuple[Query, ...]:
        made = []
        for _ in range(count):
            page = pages[int(random.integers(len(pages)))]
            words = page.text.split()
            start = int(random.integers(len(words) - 3))
            made.append(Query(" ".join(words[start : start + 3]), (page.id,), page.id))
        return tuple(made)

    return SearchData(tuple(pages), ask(queries), ask(queries), tuple(sentences(80, seed=3)))


LABELS = ("early", "late")


def labelled_data() -> LabelledData:
    """Texts whose label says in which half of the vocabulary most of their words are."""

    def rows(count: int, seed: int) -> tuple[LabelledRow, ...]:
        made = []
        for i, text in enumerate(sentences(count, seed)):
            late = np.mean([WORDS.index(word) >= len(WORDS) / 2 for word in text.split()]) >= 0.5
            made.append(LabelledRow(text, LABELS[int(late)], str(i)))
        return tuple(made)

    return LabelledData(rows(60, 11), rows(20, 12), rows(20, 13), tuple(sentences(20, seed=14)))


def of_encoder(layers: Indices, heads: tuple[Indices, ...], neurons: tuple[Indices, ...]) -> Kept:
    """Units of an encoder: for each of the kept layers its heads and its neurons."""
    parts = {"mixer": heads, "ffn": neurons}
    units = {f"encoder.{i}.{p}": own for p, lists in parts.items() for i, own in zip(layers, lists, strict=True)}
    return Kept({"encoder": layers}, units)


def widened(config: TransformerConfig, **changes: Any) -> TransformerConfig:
    """The config with some fields changed."""
    return replace(config, **changes)
