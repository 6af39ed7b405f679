"""SmoothQuant: channels of unlike size are evened out before they are rounded with one scale.

A linear's input channel j is multiplied by f_j and its weights are divided by it, which changes nothing but what
rounding loses (Xiao et al. 2022, equations 3 and 4, with f = 1 / s):

    f_j = max |W_j|^(1 - strength) / max |X_j|^strength.

Where the channels come from a norm that gives them to this linear alone, from the linear of values
that each have one head, or through a ReLU, the factors are put into what makes them; elsewhere (behind a norm whose
tokens also go around the sub-layer, behind GELU) the linear keeps them, and multiplies.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..transformer.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from ..transformer.quantization import FormattedLinear

LEAST = 1e-5  # share of the greatest channel that every channel counts as having


def factors(greatest: Tensor, weight: Tensor, strength: float) -> Tensor:
    """(I,) factors of the input channels, finite and above 0, 1 in the middle (geometric mean).

    Args:
        greatest: (I,) the channels' greatest magnitudes in calibration.
        weight: (O, I).
        strength: 0 to 1, how much of the unevenness moves into the weights.
    """
    inputs, weights = _at_least(greatest.double()), _at_least(weight.double().abs().amax(0))
    logarithms = (1 - strength) * weights.log() - strength * inputs.log()
    return (logarithms - logarithms.mean()).exp().float()


def _at_least(sizes: Tensor) -> Tensor:
    most = sizes.max()
    return sizes.clamp(min=LEAST * most) if bool(most > 0) else torch.ones_like(sizes)


def fold(
    config: TransformerConfig, state: Mapping[str, Tensor], linears: Mapping[str, FormattedLinear]
) -> tuple[dict[str, Tensor], dict[str, FormattedLinear]]:
    """Put factors into what makes the channels where that gives the same model.

    Args:
        config: the float model's.
        state: its tensors.
        linears: in their new formats; those with a `factor` are looked at.

    Returns:
        The tensors and the linears, both with the factors that could be moved gone to 1.
    """
    new, done = dict(state), dict(linears)
    for name, linear in linears.items():
        factor = linear.tensors.get("factor")
        maker = None if factor is None else _maker(config, name)
        if factor is None or maker is None:
            continue
        owner, behind = maker
        made = done.get(owner, FormattedLinear("", {}))
        quantized = owner in done or f"{owner}.scale" in new
        for part in ("scale" if quantized else "weight", "bias"):
            if part in made.tensors:
                made = replace(made, tensors={**made.tensors, part: _rows_times(made.tensors[part], factor, behind)})
            else:
                new[f"{owner}.{part}"] = _rows_times(new[f"{owner}.{part}"], factor, behind)
        if owner in done:
            done[owner] = made
        linear = done[name]
        done[name] = FormattedLinear(linear.form, {**linear.tensors, "factor": torch.ones_like(factor)})
    return new, done


def _maker(config: TransformerConfig, name: str) -> tuple[str, int] | None:
    """The tensor pair, a linear's or a norm's, whose last rows are a linear's input channels, and rows before them."""
    stack, number, part, own = name.split(".")
    layer: LayerConfig = getattr(config, stack)[int(number)]
    prefix, sub = f"{stack}.{number}", getattr(layer, part)
    if own == "out" and isinstance(sub, AttentionConfig) and sub.group == 1:
        return (f"{prefix}.{part}.kv", sub.width) if part == "cross" else (f"{prefix}.{part}.qkv", 2 * sub.width)
    if own == "down" and isinstance(sub, FeedForwardConfig):
        return (f"{prefix}.ffn.up", 0) if sub.activation == "relu" else None
    if own in ("qkv", "q", "inputs", "up") and config.norm_place == "pre":
        return f"{prefix}.{part}_norm", 0
    return None


def _rows_times(tensor: Tensor, factor: Tensor, behind: int) -> Tensor:
    """The rows behind the first ones, each times its factor."""
    shape = (-1, *[1] * (tensor.dim() - 1))
    return torch.cat([tensor[:behind], tensor[behind:] * factor.view(shape)])
