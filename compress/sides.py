"""Two models side by side at one depth: what fits of one to the other walk along.

Both are given the same batches. From layer to layer each has its own tokens; a decoder attends in either model to what
that model's encoder gives. Memory grows with the tokens of one depth alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..transformer.attention import Attention, CrossAttention
from ..transformer.layers import AbsentSublayer, FeedForward, Layer
from ..transformer.model import Source, Transformer
from ..transformer.packing import Packing
from ..transformer.recurrent import Recurrent
from .calibration import Batch
from .units import KINDS, stacks


@dataclass
class Side:
    """One model's tokens (N, D) of a batch at one depth, and what its decoder attends to."""

    packing: Packing
    tokens: Tensor
    source: Source | None = None


Sides = list[tuple[Side, Side]]  # of either model, batch by batch


def depths(first: Transformer, second: Transformer, batches: Sequence[Batch]) -> Iterator[tuple[str, int, Sides]]:
    """Stack, number and sides before each layer of the first model; who takes them moves their tokens past it."""
    sides: Sides = [(_embedded(first, batch), _embedded(second, batch)) for batch in batches]
    for stack, layers in stacks(first.config).items():
        if stack == "decoder" and first.encoder:
            sides = [
                (_embedded(first, batch, _source(first, one)), _embedded(second, batch, _source(second, two)))
                for batch, (one, two) in zip(batches, sides, strict=True)
            ]
        for number in range(len(layers)):
            yield stack, number, sides


def parts(layer: Layer) -> list[str]:
    """Those that the layer has, be they absent sub-layers."""
    return [part for part in KINDS if getattr(layer, part) is not None]


def _embedded(model: Transformer, batch: Batch, source: Source | None = None) -> Side:
    """What the first stack begins with, or with a source the decoder beside it."""
    ids, mask, table = batch.ids, batch.mask, model.embeddings
    if source is not None:
        assert batch.target_ids is not None
        assert batch.target_mask is not None
        ids, mask, table = batch.target_ids, batch.target_mask, model.target or model.embeddings
    packing = Packing.from_mask(mask)
    return Side(packing, table(packing.pack(ids), packing.positions), source)


def _source(model: Transformer, side: Side) -> Source:
    """What the encoder gives, once its layers are passed."""
    tokens = side.tokens if model.encoder_norm is None else model.encoder_norm(side.tokens)
    return Source(tokens, side.packing)


def passed(layer: Layer, side: Side) -> Tensor:
    """The tokens after a layer."""
    source = side.source
    memory = () if source is None else (layer.memory(source.tokens, source.packing), source.packing.mask)
    result: Tensor = layer(side.tokens, side.packing, *memory)
    return result


def inner(layer: Layer, part: str, side: Side) -> Tensor:
    """What a sub-layer is given, (N, D)."""
    given: Tensor = getattr(layer, f"{part}_norm")(side.tokens) if layer.pre else side.tokens
    return given


def outer(layer: Layer, part: str, total: Tensor) -> Tensor:
    """The tokens after a sub-layer, from their sum with its output."""
    after: Tensor = total if layer.pre else getattr(layer, f"{part}_norm")(total)
    return after


def projection(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight (D, U) and bias (D,) of a sub-layer's last linear.

    An absent one has (D, 0) and its bias, a cell without projection copies of the identity and of 0.
    """
    if isinstance(module, AbsentSublayer):
        return module.bias.new_zeros(len(module.bias), 0), module.bias
    assert isinstance(module, Attention | CrossAttention | Recurrent | FeedForward)
    last = module.down if isinstance(module, FeedForward) else module.out
    if last is None:
        assert isinstance(module, Recurrent)
        like = next(module.parameters())
        return torch.eye(module.units, dtype=like.dtype, device=like.device), like.new_zeros(module.units)
    assert isinstance(last, nn.Linear)
    return last.weight, last.bias


def activations(module: nn.Module, x: Tensor, side: Side) -> Tensor:
    """What the last linear is given, (N, U), where the sub-layer is given x (N, D)."""
    if isinstance(module, CrossAttention):
        assert side.source is not None
        memory = module.memory(side.source.tokens, side.source.packing)
        return module.mix(x, side.packing, memory, side.source.packing.mask)
    if isinstance(module, Attention | Recurrent):
        return module.mix(x, side.packing)
    return module.activation(module.up(x)) if isinstance(module, FeedForward) else x.new_zeros(len(x), 0)


def output(module: nn.Module, x: Tensor, side: Side) -> Tensor:
    """What a sub-layer that is given x (N, D) adds, (N, D)."""
    weight, bias = projection(module)
    return activations(module, x, side) @ weight.T + bias
