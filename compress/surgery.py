"""Taking units out of a model: config and state in, a smaller config and state out.

A head is its K rows of each of queries, keys and values and its K columns of the output; a neuron is its row of `up`
and its column of `down`. Removing them equals multiplying their output by 0. What loses all its units becomes an
absent sub-layer, which keeps the output's bias; a removed layer is the identity.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import FLOAT32, AttentionConfig, LayerConfig, TransformerConfig
from ..transformer.errors import InputError

Indices = tuple[int, ...]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Kept:
    """The units that stay, each list ascending.

    Attributes:
        layers: numbers of the kept layers.
        heads: for each kept layer, the numbers of its kept heads; empty: the mixer goes, or is not there.
        neurons: for each kept layer, the numbers of its kept FFN neurons.
    """

    layers: Indices
    heads: tuple[Indices, ...]
    neurons: tuple[Indices, ...]

    @classmethod
    def everything(cls, config: TransformerConfig, layers: Indices | None = None) -> "Kept":
        """All units of the layers named, by default of all."""
        chosen = tuple(range(len(config.encoder))) if layers is None else layers
        return cls(
            layers=chosen,
            heads=tuple(tuple(range(head_count(config.encoder[i]))) for i in chosen),
            neurons=tuple(tuple(range(neuron_count(config.encoder[i]))) for i in chosen),
        )

    def within(self, earlier: "Kept") -> "Kept":
        """The same units numbered as in the model from which an earlier removal kept `earlier`."""
        return Kept(
            layers=tuple(earlier.layers[i] for i in self.layers),
            heads=tuple(_renumber(earlier.heads[i], mine) for i, mine in zip(self.layers, self.heads, strict=True)),
            neurons=tuple(
                _renumber(earlier.neurons[i], mine) for i, mine in zip(self.layers, self.neurons, strict=True)
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, which `from_dict` reads back."""
        return {
            "layers": list(self.layers),
            "heads": [list(units) for units in self.heads],
            "neurons": [list(units) for units in self.neurons],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Kept":
        """Read `to_dict`'s form."""
        heads, neurons = (tuple(tuple(units) for units in data[kind]) for kind in ("heads", "neurons"))
        return cls(tuple(data["layers"]), heads, neurons)


def _renumber(earlier: Indices, mine: Indices) -> Indices:
    return tuple(earlier[unit] for unit in mine)


def head_count(layer: LayerConfig) -> int:
    """Heads of a layer, 0 without a mixer."""
    return 0 if layer.attention is None else layer.attention.heads


def neuron_count(layer: LayerConfig) -> int:
    """FFN neurons of a layer, 0 without an FFN."""
    return 0 if layer.ffn is None else layer.ffn.width


def check_float(config: TransformerConfig) -> None:
    """Raise InputError where the model is no encoder of attention, or a linear of its layers is not float32."""
    config.check_attention_encoder("prune")
    for i, layer in enumerate(config.encoder):
        for name, sub in (("mixer", layer.mixer), ("ffn", layer.ffn)):
            if sub is not None and (sub.input_format, sub.output_format) != (FLOAT32, FLOAT32):
                raise InputError(f"prune: the {name} of layer {i} is in int8; prune first, quantize afterwards")


def remove_units(config: TransformerConfig, state: State, kept: Kept) -> tuple[TransformerConfig, State]:
    """The model of the kept units alone, with its own copies of what was cut.

    Raises:
        InputError: a linear is not float32, or `kept` names units that are not there.
    """
    check_float(config)
    _check_kept(config, kept)
    result = {name: value for name, value in state.items() if not name.startswith("encoder.")}
    layers = []
    for new, (old, heads, neurons) in enumerate(zip(kept.layers, kept.heads, kept.neurons, strict=True)):
        layer = config.encoder[old]
        tensors = _under(state, f"encoder.{old}.")
        layers.append(_cut_layer(layer, heads, neurons))
        tensors = _cut_mixer(tensors, layer.attention, heads)
        tensors = _cut_ffn(tensors, neurons)
        result |= {f"encoder.{new}.{name}": value for name, value in tensors.items()}
    return config.with_layers(tuple(layers)), result


def remove_from(checkpoint: Checkpoint, kept: Kept) -> Checkpoint:
    """`remove_units` on a checkpoint; its provenance names, as `kept`, every kept unit by its first model's number."""
    config, state = remove_units(checkpoint.config, checkpoint.state, kept)
    earlier = checkpoint.provenance.get("kept")
    origin = kept if earlier is None else kept.within(Kept.from_dict(earlier))
    return replace(checkpoint, config=config, state=state).with_provenance(kept=origin.to_dict())


def _check_kept(config: TransformerConfig, kept: Kept) -> None:
    def check(what: str, units: Indices, count: int) -> None:
        if list(units) != sorted(set(units)) or any(not 0 <= unit < count for unit in units):
            raise InputError(f"prune: the {what} to keep, {list(units)}, are not ascending numbers below {count}")

    check("layers", kept.layers, len(config.encoder))
    for old, heads, neurons in zip(kept.layers, kept.heads, kept.neurons, strict=True):
        check(f"heads of layer {old}", heads, head_count(config.encoder[old]))
        check(f"neurons of layer {old}", neurons, neuron_count(config.encoder[old]))


def _cut_layer(layer: LayerConfig, heads: Indices, neurons: Indices) -> LayerConfig:
    return LayerConfig(
        mixer=replace(layer.attention, heads=len(heads)) if layer.attention is not None and heads else None,
        ffn=replace(layer.ffn, width=len(neurons)) if layer.ffn is not None and neurons else None,
    )


def _under(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _cut_mixer(tensors: State, config: AttentionConfig | None, heads: Indices) -> State:
    """A layer's tensors, the mixer cut to `heads`."""
    if config is None:
        return tensors
    if not heads:
        return _absent(tensors, "mixer", tensors["mixer.out.bias"])
    width = config.head_width
    columns = (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()
    rows = torch.cat([columns + part * config.width for part in range(3)])
    return {
        **tensors,
        "mixer.qkv.weight": tensors["mixer.qkv.weight"][rows],
        "mixer.qkv.bias": tensors["mixer.qkv.bias"][rows],
        "mixer.out.weight": tensors["mixer.out.weight"][:, columns].contiguous(),
    }


def _cut_ffn(tensors: State, neurons: Indices) -> State:
    """A layer's tensors, the FFN cut to `neurons`."""
    if "ffn.down.weight" not in tensors:
        return tensors
    if not neurons:
        return _absent(tensors, "ffn", tensors["ffn.down.bias"])
    units = torch.tensor(neurons)
    return {
        **tensors,
        "ffn.up.weight": tensors["ffn.up.weight"][units],
        "ffn.up.bias": tensors["ffn.up.bias"][units],
        "ffn.down.weight": tensors["ffn.down.weight"][:, units].contiguous(),
    }


def _absent(tensors: State, part: str, bias: Tensor) -> State:
    rest = {name: value for name, value in tensors.items() if not name.startswith(f"{part}.")}
    return {**rest, f"{part}.bias": bias.clone()}
