"""A pruned BertModel as a checkpoint of ours, so that both tools' models run in one form of graph.

Their names are those of every BERT; what differs are widths. BertModel goes on to divide by the root of the unpruned
head's width where a head has become narrower, ours divides by the root of what is left: queries are scaled in between.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from slimformer.transformer.families.bert import name_table, state_from

PARITY = 1e-4


def config_of(original: TransformerConfig, found: Mapping[str, Any]) -> TransformerConfig:
    """The config of the widths that a worker tells."""
    layers = []
    for old, widths in zip(original.encoder, found["layers"], strict=True):
        assert isinstance(old.mixer, AttentionConfig)
        assert isinstance(old.ffn, FeedForwardConfig)
        mixer = replace(old.mixer, heads=widths["heads"], head_width=widths["head_width"])
        layers.append(LayerConfig(mixer, replace(old.ffn, width=widths["neurons"])))
    return replace(original.with_layers(tuple(layers)), d_model=found["d_model"])


def converted(original: Checkpoint, found: Mapping[str, Any], file: Path) -> Checkpoint:
    """The checkpoint of a worker's file; ValueError where its vectors are not those of the pruned BertModel."""
    tensors = load_file(file)
    rows, mask, expected = (tensors.pop(name) for name in ("rows", "mask", "expected"))
    config = config_of(original.config, found)
    state, _ = state_from(tensors, name_table(len(config.encoder), classifier=False))
    for i, (old, new) in enumerate(zip(original.config.encoder, config.encoder, strict=True)):
        assert isinstance(old.mixer, AttentionConfig)
        assert isinstance(new.mixer, AttentionConfig)
        scale = (new.mixer.head_width / old.mixer.head_width) ** 0.5
        for part in ("weight", "bias"):
            state[f"encoder.{i}.mixer.qkv.{part}"][: new.mixer.width] *= scale
    model = replace(original, config=config, state=state).check(str(file))
    with torch.inference_mode():
        error = float((model.to_torch()(rows, mask).result - expected).abs().max())
    if not error <= PARITY:
        raise ValueError(f"{file}: converted vectors differ by {error:.1e}, over {PARITY:.0e}")
    return model
