"""Taking units out of a model: config and state in, a smaller config and state out.

Removing a unit's rows and columns equals multiplying what it gives to the output by 0. What loses all its units becomes
an absent sub-layer, which keeps the output's bias; a removed layer is the identity. How channels go is in `channels`.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import FLOAT32, LanguageHead, LayerConfig, TransformerConfig
from ..transformer.errors import InputError
from .channels import remove_channels
from .units import KINDS, OUTPUT, STACKS, Indices, Kept, Sublayer, layer_name, stacks, sublayers, unit_counts

State = dict[str, Tensor]


def check_float(config: TransformerConfig) -> None:
    """Raise InputError where a linear of the layers is not float32, or anything of a model that writes."""
    for stack, layers in stacks(config).items():
        for i, layer in enumerate(layers):
            for part in KINDS:
                sub = getattr(layer, part)
                if sub is not None and (sub.input_format, sub.output_format) != (FLOAT32, FLOAT32):
                    raise InputError(
                        f"prune: the {part} of {layer_name(stack, i)} is in int8; prune first, quantize afterwards"
                    )
    if isinstance(config.head, LanguageHead) and not config.is_float:
        raise InputError("prune: a table of the model is in int8; prune first, quantize afterwards")


def remove_units(config: TransformerConfig, state: State, kept: Kept) -> tuple[TransformerConfig, State]:
    """The model of the kept units and channels alone, with its own copies of what was cut.

    Raises:
        InputError: a linear is not float32, or `kept` names units or channels that are not there, or too few layers.
    """
    check_float(config)
    _check_kept(config, kept)
    result = {name: value for name, value in state.items() if name.partition(".")[0] not in STACKS}
    changed = {}
    for stack in STACKS:
        layers = []
        for new, old in enumerate(kept.layers.get(stack, ())):
            layer, tensors = getattr(config, stack)[old], _under(state, f"{stack}.{old}.")
            for sub in sublayers(config):
                if (sub.stack, sub.layer) == (stack, old):
                    layer, tensors = _cut(layer, tensors, sub, kept.units.get(sub.name, ()))
            layers.append(layer)
            result |= {f"{stack}.{new}.{name}": value for name, value in tensors.items()}
        changed[stack] = tuple(layers)
    small = config.with_layers(**changed)
    return (small, result) if kept.channels is None else remove_channels(small, result, kept.channels)


def remove_from(checkpoint: Checkpoint, kept: Kept) -> Checkpoint:
    """`remove_units` on a checkpoint.

    Its provenance names, as `kept`, every kept unit and channel by its first model's number, and says, as `kept_of`,
    how many that model had (`unit_counts`), unless what was pruned before has no such note.
    """
    config, state = remove_units(checkpoint.config, checkpoint.state, kept)
    small, earlier = replace(checkpoint, config=config, state=state), checkpoint.provenance.get("kept")
    if earlier is None:
        return small.with_provenance(kept=kept.to_dict(), kept_of=unit_counts(checkpoint.config))
    return small.with_provenance(kept=kept.within(Kept.from_dict(earlier)).to_dict())


def _check_kept(config: TransformerConfig, kept: Kept) -> None:
    def check(what: str, units: Indices, count: int) -> None:
        if list(units) != sorted(set(units)) or any(not 0 <= unit < count for unit in units):
            raise InputError(f"prune: the {what} to keep, {list(units)}, are not ascending numbers below {count}")

    for stack in STACKS:
        own, count = kept.layers.get(stack, ()), len(getattr(config, stack))
        check("layers" if stack == "encoder" else f"{stack} layers", own, count)
        if config.decoder and count and not own:
            raise InputError(f"prune: no layer of the {stack} would stay; keep at least 1")
    known = {sub.name: sub for sub in sublayers(config) if sub.layer in kept.layers.get(sub.stack, ())}
    for name, units in kept.units.items():
        if not units:
            continue
        if name not in known:
            raise InputError(f"prune: {name} is no attention or FFN of a layer that stays")
        sub = known[name]
        check(f"{KINDS[sub.part].replace('_', ' ')} of {layer_name(sub.stack, sub.layer)}", units, sub.count)


def _under(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _cut(layer: LayerConfig, tensors: State, sub: Sublayer, units: Indices) -> tuple[LayerConfig, State]:
    """A layer and its tensors, one of its sub-layers cut to `units`."""
    out = f"{sub.part}.{OUTPUT[sub.part]}"
    if not units:
        rest = {name: value for name, value in tensors.items() if not name.startswith(f"{sub.part}.")}
        return replace(layer, **{sub.part: None}), {**rest, f"{sub.part}.bias": tensors[f"{out}.bias"].clone()}
    columns = _places(units, sub.width)
    result = {**tensors, f"{out}.weight": tensors[f"{out}.weight"][:, columns].contiguous()}
    for linear, widths in sub.inputs.items():
        starts = accumulate((sub.count * width for width in widths), initial=0)
        rows = torch.cat([start + _places(units, width) for start, width in zip(starts, widths, strict=False)])
        for kind in ("weight", "bias"):
            name = f"{sub.part}.{linear}.{kind}"
            result[name] = tensors[name][rows]
    part: Any = getattr(layer, sub.part)
    count = {"width": len(units)} if sub.part == "ffn" else {"heads": len(units) * sub.group}
    return replace(layer, **{sub.part: replace(part, **count)}), result


def _places(units: Indices, width: int) -> Tensor:
    """Of units of `width` rows or columns."""
    return (torch.tensor(units)[:, None] * width + torch.arange(width)).flatten()
