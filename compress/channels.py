"""Taking channels out of the residual stream: the model width D becomes D'.

A channel is its columns of the tables and of every linear that reads the stream, its rows and its bias entry of every
linear that writes to it, and its entries of the norms (Ashkboos et al. 2024, "SliceGPT", section 3.3, cut the same
slices, after a rotation; Muralidharan et al. 2024, "Minitron", section 2, call this the embedding axis). The result
equals the full model with the channels that go set to 0 everywhere and with norms whose mean and variance are those of
the channels that stay. Where the embedding is the pooled tokens themselves, it has fewer dimensions too. Any D' is
possible; multiples of 32 are what kernels run best at, and what int8_blocks and int4_blocks need.

What else depends on D:

- `scaled` embeddings multiply token vectors by sqrt(D), then by sqrt(D'): the table is multiplied by sqrt(D / D'). A
  head that is tied to that table would give larger logits; what is divided instead is the last norm before the head,
  which nothing else reads. A model without one (pre-norm without final norm) is untied: its head gets its own table.
- Sinusoidal positions are a formula of D: they become a learned table of the kept columns.
- BERT's pooler is D x D: it loses the rows, and the classifier the columns, of the same numbers.
- A recurrent cell without projection has D units and cannot lose any: refused.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..transformer.config import (
    FLOAT32,
    EmbeddingConfig,
    EmbeddingHead,
    LanguageHead,
    RecurrentConfig,
    TransformerConfig,
)
from ..transformer.errors import InputError
from ..transformer.model import sinusoids
from .units import Indices, layer_name, stacks

# The tensors that have channels, by the last part of their owner's name.
TABLES = ("tokens", "positions", "token_types")
READERS = ("qkv", "q", "kv", "up", "inputs", "classifier")
WRITERS = ("out", "down")
ABSENT = ("mixer", "cross", "ffn")  # of an absent sub-layer, a bias is all that there is


def select_channels(scores: NDArray[np.float64], count: int) -> Indices:
    """The `count` channels of the highest scores (D,), ascending; of equal ones the first.

    Raises:
        InputError: `count` is not from 1 to D.
    """
    if not 1 <= count <= len(scores):
        raise InputError(f"prune: {count} channels are to stay of {len(scores)}; ask for 1 to {len(scores)}")
    return tuple(sorted(map(int, np.argsort(-scores, kind="stable")[:count])))


def channel_axes(name: str) -> tuple[int, ...]:
    """The axes of a tensor of the state dict along which the channels lie; () where it has none."""
    owner, _, kind = name.rpartition(".")
    last = owner.rpartition(".")[2]
    if last == "pooler":
        return (0, 1) if kind == "weight" else (0,)
    if last in (*WRITERS, *ABSENT) or last.endswith("norm"):
        return (0,)
    reads = last in (*TABLES, *READERS) or owner == "head.dense.0.linear"
    return (1,) if reads and kind == "weight" else ()


def check_channels(config: TransformerConfig, channels: Indices) -> None:
    """Raise InputError where `channels` are not ascending numbers below D, or the model cannot lose the others."""
    width = config.d_model
    if not channels:
        raise InputError(f"prune: none of the {width} channels would stay; keep at least 1")
    if list(channels) != sorted(set(channels)) or channels[0] < 0 or channels[-1] >= width:
        raise InputError(f"prune: the channels to keep, {list(channels)}, are not ascending numbers below {width}")
    if not config.is_float:
        forms = ", ".join(sorted(config.formats - {FLOAT32}))
        raise InputError(f"prune: parts of the model are in {forms}; prune channels first, quantize afterwards")
    for stack, layers in stacks(config).items():
        for i, layer in enumerate(layers):
            cell = layer.mixer
            if len(channels) < width and isinstance(cell, RecurrentConfig) and not cell.project:
                raise InputError(
                    f"prune: the {cell.kind} of {layer_name(stack, i)} has no projection and as many units as the "
                    f"model has channels, {width}; keep them all"
                )


def remove_channels(
    config: TransformerConfig, state: Mapping[str, Tensor], channels: Indices
) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """The model of these channels alone, with its own copies of what was cut; all of them leave it as it is.

    Raises:
        InputError: see `check_channels`.
    """
    check_channels(config, channels)
    if len(channels) == config.d_model:
        return config, dict(state)
    kept = torch.tensor(channels)
    result = {}
    for name, value in state.items():
        cut = value
        for axis in channel_axes(name):
            cut = cut.index_select(axis, kept.to(cut.device))
        result[name] = cut
    result |= _position_tables(config, kept)
    changes = {name: _learned(table) for name, table in _tables(config).items()}
    head = config.head
    if isinstance(head, EmbeddingHead) and head.dense:
        head = replace(head, dense=(replace(head.dense[0], inputs=len(channels)), *head.dense[1:]))
    small = replace(
        config, d_model=len(channels), embedding=changes["embeddings"], target=changes.get("target"), head=head
    )
    return _rescaled(small, result, math.sqrt(config.d_model / len(channels)))


def _tables(config: TransformerConfig) -> dict[str, EmbeddingConfig]:
    """The embeddings of a model, by their prefix in the state dict."""
    return {"embeddings": config.embedding, **({} if config.target is None else {"target": config.target})}


def _learned(table: EmbeddingConfig) -> EmbeddingConfig:
    return replace(table, position_kind="learned") if table.position_kind == "sinusoidal" else table


def _position_tables(config: TransformerConfig, kept: Tensor) -> dict[str, Tensor]:
    """Tables (P, D') of what were sinusoids."""
    return {
        f"{name}.positions.weight": sinusoids(torch.arange(table.positions), config.d_model)[:, kept]
        for name, table in _tables(config).items()
        if table.position_kind == "sinusoidal"
    }


def _rescaled(
    config: TransformerConfig, state: dict[str, Tensor], factor: float
) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """The model with scaled token tables multiplied by `factor` and the logits of a head that is tied as before."""
    scaled = [name for name, table in _tables(config).items() if table.scaled]
    larger = {f"{name}.tokens.weight": state[f"{name}.tokens.weight"] * factor for name in scaled}
    head, shared = config.head, "embeddings" if config.target is None else "target"
    if not isinstance(head, LanguageHead) or not head.tied or shared not in scaled:
        return config, {**state, **larger}
    if not config.final_norm and config.norm_place == "pre":
        own = {"head.tokens.weight": state[f"{shared}.tokens.weight"]}
        return replace(config, head=replace(head, tied=False)), {**state, **larger, **own}
    norm = "decoder_norm" if config.final_norm else f"decoder.{len(config.decoder) - 1}.ffn_norm"
    smaller = {f"{norm}.{kind}": state[f"{norm}.{kind}"] / factor for kind in ("weight", "bias")}
    return config, {**state, **larger, **smaller}
