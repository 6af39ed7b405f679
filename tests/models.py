"""Tiny models of every shape for the tests: seeded, with no weight left at a value that would hide a mistake."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    ClassificationHead,
    DenseConfig,
    EmbeddingConfig,
    EmbeddingHead,
    FeedForwardConfig,
    Head,
    LanguageHead,
    LayerConfig,
    RecurrentConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.data import Pair, PairData
from slimformer.transformer.layer_config import MixerConfig
from slimformer.transformer.model import Transformer
from slimformer.transformer.tokenizer import wordpiece_from_vocab

WIDTH = 32
POSITIONS = 24
WORDS = (
    "the first row of a sheet can be frozen how do i freeze insert chart page number into table cell print only "
    "one column sort by date save as text file open change font colour ##s ##ing ##ed . , ? !"
)
VOCAB = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]) + "\n"
VOCAB_SIZE = VOCAB.count("\n")
TOKENIZER = wordpiece_from_vocab(VOCAB)
SENTENCES = (
    "How do I freeze the first row?",
    "page numbers",
    "Sort a table by date, insert one column into the sheet.",
    "print",
    "the first cell of the first row of the first table can be changed into text . . .",
)

WHOLE = (
    LayerConfig(AttentionConfig(heads=4, head_width=8), FeedForwardConfig(width=64)),
    LayerConfig(AttentionConfig(heads=2, head_width=12), FeedForwardConfig(width=40, activation="relu")),
)
ABSENT = (
    LayerConfig(None, FeedForwardConfig(width=48)),
    LayerConfig(AttentionConfig(heads=1, head_width=8), None),
    LayerConfig(None, None),
)
EMBEDDING = EmbeddingHead()
DENSE = EmbeddingHead(pooling="cls", dense=(DenseConfig(WIDTH, 20), DenseConfig(20, 6, bias=False, activation=None)))
LABELS = ClassificationHead(labels=("chart", "file", "table"))


def tiny_config(head: Head | None = EMBEDDING, layers: Sequence[LayerConfig] = WHOLE, **text: Any) -> TransformerConfig:
    """d_model 32; by default two layers of different head and FFN widths; `text` holds fields of TextConfig."""
    return TransformerConfig(
        d_model=WIDTH,
        embedding=EmbeddingConfig(vocab_size=VOCAB_SIZE, positions=POSITIONS, token_types=2),
        encoder=tuple(layers),
        text=TextConfig(**{"max_length": POSITIONS, **text}),
        head=head,
    )


ATTENTION = AttentionConfig(4, 8)
MIXERS: dict[str, MixerConfig | None] = {
    "attention": ATTENTION,
    "other heads": AttentionConfig(3, 5),
    "grouped": AttentionConfig(6, 5, group=3),
    "rnn": RecurrentConfig("rnn", 20),
    "lstm": RecurrentConfig("lstm", 20),
    "gru": RecurrentConfig("gru", WIDTH, project=False),
    "ssru": RecurrentConfig("ssru", WIDTH, project=False),
    "absent": None,
}


def decoder_config(
    encoder: int = 2, decoder: int = 2, mixer: MixerConfig | None = ATTENTION, **changes: Any
) -> TransformerConfig:
    """A decoder of such mixers, beside an encoder of attention unless that has 0 layers; one table for all."""
    cross, ffn = AttentionConfig(2, 12), FeedForwardConfig(48, "relu")
    return TransformerConfig(
        d_model=WIDTH,
        embedding=EmbeddingConfig(VOCAB_SIZE, POSITIONS, position_kind="sinusoidal", scaled=True, norm=False),
        encoder=(LayerConfig(AttentionConfig(4, 8), ffn),) * encoder,
        decoder=(LayerConfig(mixer, ffn, cross if encoder else None),) * decoder,
        **{
            "text": TextConfig(POSITIONS),
            "head": LanguageHead(start_id=2, end_id=3, bias=True),
            "norm_eps": 1e-5,
            **changes,
        },
    )


def grouped(config: TransformerConfig) -> TransformerConfig:
    """The same with two heads to each head of keys and values in every attention."""

    def shared(sub: Any) -> Any:
        return replace(sub, group=2) if isinstance(sub, AttentionConfig) else sub

    def of(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
        return tuple(replace(layer, mixer=shared(layer.mixer), cross=shared(layer.cross)) for layer in layers)

    return config.with_layers(of(config.encoder), of(config.decoder))


def translator(encoder: int = 1, decoder: int = 2, seed: int = 4) -> Checkpoint:
    """A random encoder-decoder that ends its texts."""
    config = decoder_config(encoder, decoder, head=LanguageHead(2, 3, tied=False, bias=True))
    state = random_state(config, seed)
    state["head.tokens.weight"] *= 2
    state["head.bias"][3] = 2.0
    return Checkpoint(config, state, TOKENIZER, {"source": "tiny"})


def pair_data() -> PairData:
    """Some words, and the same words backwards; ten sources more without a target."""

    def rows(count: int, seed: int) -> tuple[Pair, ...]:
        random, words = np.random.default_rng(seed), [word for word in WORDS.split() if word.isalpha()]
        texts = [list(random.choice(words, int(random.integers(1, 6)))) for _ in range(count)]
        return tuple(Pair(" ".join(text), " ".join(text[::-1]), str(i)) for i, text in enumerate(texts))

    return PairData(rows(30, 1), rows(6, 2), rows(6, 3), tuple(row.source for row in rows(10, 4)))


def random_state(config: TransformerConfig, seed: int = 0) -> dict[str, Tensor]:
    """Float weights of a config: norms near 1, biases not 0, matrices of a size that keeps every layer at work."""
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in Transformer(config).state_dict().items():
        noise = torch.randn(value.shape, generator=random)
        if name.endswith("norm.weight"):
            state[name] = 1 + 0.2 * noise
        elif value.ndim == 1:
            state[name] = 0.1 * noise
        else:
            state[name] = noise * (0.5 if name.startswith("embeddings.") else value.shape[1] ** -0.5)
    return state


PRE: dict[str, Any] = {"norm_place": "pre", "final_norm": True}
WRITERS: dict[str, TransformerConfig] = {
    "post": decoder_config(3, 3),
    "pre": decoder_config(3, 3, **PRE, head=LanguageHead(2, 3, tied=False)),
    "own table": decoder_config(3, 3, target=EmbeddingConfig(VOCAB_SIZE, POSITIONS), head=LanguageHead(2, 3)),
    "lstm": decoder_config(2, 3, MIXERS["lstm"], **PRE),
    "ssru": decoder_config(2, 3, MIXERS["ssru"]),
    "grouped": grouped(decoder_config(2, 3, AttentionConfig(6, 5))),
    "alone": decoder_config(0, 3),
    "alone, pre": decoder_config(0, 3, **PRE),
    "alone, grouped": grouped(decoder_config(0, 3)),
}


def writer(kind: str, seed: int = 0) -> Checkpoint:
    """A random model that writes: an encoder-decoder, or a decoder alone."""
    return Checkpoint(WRITERS[kind], random_state(WRITERS[kind], seed), TOKENIZER, {"source": kind})


def tiny(
    head: Head | None = EMBEDDING, layers: Sequence[LayerConfig] = WHOLE, seed: int = 0, **text: Any
) -> Checkpoint:
    """A random checkpoint with a WordPiece tokenizer; arguments of `tiny_config`."""
    config = tiny_config(head, layers, **text)
    return Checkpoint(config, random_state(config, seed), TOKENIZER, {"source": "tiny"})


def ragged(
    lengths: Sequence[int], *, seed: int = 0, side: str = "right", columns: int | None = None
) -> tuple[Any, Any]:
    """Random ids and their mask (B, T), int64, padded on the right, on the left, or in between the tokens."""
    random = np.random.default_rng(seed)
    width = columns or max(lengths)
    ids, mask = np.zeros((len(lengths), width), np.int64), np.zeros((len(lengths), width), np.int64)
    for row, length in enumerate(lengths):
        tokens = random.integers(5, VOCAB_SIZE, length)
        if side == "between":
            places = np.sort(np.random.default_rng([seed, row]).choice(width, length, replace=False))
        else:
            places = np.arange(length) + (width - length if side == "left" else 0)
        ids[row, places], mask[row, places] = tokens, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def bert_directory(path: Path, *, labels: Sequence[str] = (), seed: int = 0, **changes: Any) -> Any:
    """Save a tiny random BERT as `transformers` does, with our tokenizer; return its model, in evaluation mode."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(seed)
    widths = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS}
    names = {"id2label": dict(enumerate(labels)), "num_labels": len(labels)} if labels else {}
    config = BertConfig(**{**widths, **sizes, **names, "initializer_range": 0.2, **changes})
    config._attn_implementation = "eager"
    model = (BertForSequenceClassification if labels else BertModel)(config).eval()
    with torch.no_grad():  # the library starts biases at 0 and norms at 1, where a swapped one would not show
        for value in model.parameters():
            if value.ndim == 1:
                value.add_(0.1 * torch.randn_like(value))
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(TOKENIZER, encoding="utf-8")
    return model
