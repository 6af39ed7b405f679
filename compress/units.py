"""What can be taken out of a model, and what stays: whole layers, heads of attention, neurons of FFNs, channels.

A unit is its rows of the linears that lead into its sub-layer and its columns of the one that leads out: of a head, K
of queries, of keys and of values; of a neuron, one. Heads that share keys and values go together: where there are
groups of them, a unit is a group, and what is said of heads is said of groups. A recurrent mixer has no units: it stays
while its layer does. A channel is one of the D columns of the residual stream, which all layers read from and add to.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..transformer.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig

Indices = tuple[int, ...]

STACKS = ("encoder", "decoder")
KINDS = {"mixer": "heads", "cross": "cross_heads", "ffn": "neurons"}  # the units of a layer's parts, in their order
OUTPUT = {"mixer": "out", "cross": "out", "ffn": "down"}


@dataclass(frozen=True)
class Sublayer:
    """An attention or FFN of a model: `count` units, each of them `width` columns of the linear that leads out.

    `group` heads of a unit share keys and values.
    """

    stack: str
    layer: int
    part: str
    count: int
    width: int
    group: int = 1

    @property
    def name(self) -> str:
        """As in the state dict."""
        return f"{self.stack}.{self.layer}.{self.part}"

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The linears that lead in, each with how many rows of its stretches, one after another, are a unit's."""
        shared = self.width // self.group
        if self.part == "mixer":
            return {"qkv": (self.width, shared, shared)}
        return {"q": (self.width,), "kv": (shared, shared)} if self.part == "cross" else {"up": (self.width,)}

    def unit_cost(self, d_model: int) -> int:
        """Multiply-adds of one unit per token."""
        return (sum(map(sum, self.inputs.values())) + self.width) * d_model


def stacks(config: TransformerConfig) -> dict[str, tuple[LayerConfig, ...]]:
    """The layers of the encoder and of the decoder, where there are any."""
    return {name: layers for name in STACKS if (layers := getattr(config, name))}


def sublayers(config: TransformerConfig) -> list[Sublayer]:
    """Those that have units, from the encoder's first to the decoder's last."""
    found = []
    for stack, layers in stacks(config).items():
        for i, layer in enumerate(layers):
            for part in KINDS:
                sub = getattr(layer, part)
                if isinstance(sub, AttentionConfig):
                    found.append(Sublayer(stack, i, part, sub.groups, sub.group * sub.head_width, sub.group))
                elif isinstance(sub, FeedForwardConfig):
                    found.append(Sublayer(stack, i, part, sub.width, 1))
    return found


def layer_name(stack: str, layer: int) -> str:
    """A layer, in words."""
    return f"layer {layer}" if stack == "encoder" else f"{stack} layer {layer}"


@dataclass(frozen=True)
class Kept:
    """The layers and units that stay, each list ascending.

    Attributes:
        layers: for each stack that the model has, the numbers of its kept layers.
        units: for sub-layers of kept layers, by name, the numbers of the kept heads or neurons. A sub-layer that is
            not among them has none, or goes.
        channels: the numbers of the kept channels of the residual stream; None: all.
    """

    layers: Mapping[str, Indices]
    units: Mapping[str, Indices]
    channels: Indices | None = None

    @classmethod
    def everything(cls, config: TransformerConfig, layers: Mapping[str, Indices] | None = None) -> "Kept":
        """All units of the layers named; of a stack that is not named, of all."""
        chosen = {name: tuple(range(len(all_of))) for name, all_of in stacks(config).items()} | dict(layers or {})
        units = {sub.name: tuple(range(sub.count)) for sub in sublayers(config) if sub.layer in chosen[sub.stack]}
        return cls(chosen, units)

    def within(self, earlier: "Kept") -> "Kept":
        """The same units numbered as in the model from which an earlier removal kept `earlier`."""
        layers = {stack: tuple(earlier.layers[stack][i] for i in own) for stack, own in self.layers.items()}
        units = {}
        for name, own in self.units.items():
            stack, layer, part = name.split(".")
            first = f"{stack}.{earlier.layers[stack][int(layer)]}.{part}"
            units[first] = tuple(earlier.units[first][unit] for unit in own)
        channels = self.channels
        if channels is None or earlier.channels is None:
            return Kept(layers, units, earlier.channels if channels is None else channels)
        return Kept(layers, units, tuple(earlier.channels[channel] for channel in channels))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, which `from_dict` reads back: lists with an entry a layer, the decoder's within."""
        decoder = {"decoder": self._lists("decoder", KINDS)} if "decoder" in self.layers else {}
        channels = {} if self.channels is None else {"channels": list(self.channels)}
        return {**self._lists("encoder", ("mixer", "ffn")), **decoder, **channels}

    def _lists(self, stack: str, parts: Iterable[str]) -> dict[str, Any]:
        layers = self.layers.get(stack, ())
        units = {KINDS[p]: [list(self.units.get(f"{stack}.{i}.{p}", ())) for i in layers] for p in parts}
        return {"layers": list(layers), **units}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Kept":
        """Read `to_dict`'s form."""
        layers, units = {}, {}
        for stack, lists in (("encoder", data), ("decoder", data.get("decoder"))):
            if not lists or not lists["layers"]:
                continue
            layers[stack] = tuple(lists["layers"])
            for part, kind in KINDS.items():
                for i, own in zip(lists["layers"], lists[kind], strict=True) if kind in lists else ():
                    if own:
                        units[f"{stack}.{i}.{part}"] = tuple(own)
        return cls(layers, units, tuple(data["channels"]) if "channels" in data else None)


def unit_counts(config: TransformerConfig) -> dict[str, Any]:
    """How many of all that `Kept.to_dict` lists a model has, in the same form: a number for each list; JSON-ready."""
    counts = {sub.name: sub.count for sub in sublayers(config)}

    def of(stack: str, parts: Iterable[str]) -> dict[str, Any]:
        layers = len(getattr(config, stack))
        units = {KINDS[p]: [counts.get(f"{stack}.{i}.{p}", 0) for i in range(layers)] for p in parts}
        return {"layers": layers, **units}

    decoder = {"decoder": of("decoder", KINDS)} if config.decoder else {}
    return {**of("encoder", ("mixer", "ffn")), **decoder, "channels": config.d_model}


def left_of(config: TransformerConfig, kept: Kept) -> dict[str, Any]:
    """Which layers stayed, and how many units of each, for the report; the decoder's within."""
    counts = {sub.name: sub.count for sub in sublayers(config)}
    told = {}
    for stack in stacks(config):
        layers = kept.layers[stack]
        parts = [part for part in KINDS if part != "cross" or (stack == "decoder" and config.encoder)]
        units = {KINDS[p]: [counts.get(f"{stack}.{i}.{p}", 0) for i in range(len(layers))] for p in parts}
        told[stack] = {"kept_layers": list(layers), **units}
    return {**told.pop("encoder", {}), **told}
