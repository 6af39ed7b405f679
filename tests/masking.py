"""Masks on units, layers and channels of a model by hooks: what removing them has to equal."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slimformer.transformer.model import Transformer

OUTPUT = {"mixer": "out", "cross": "out", "ffn": "down"}


@contextmanager
def masked(model: Transformer, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply what enters output projections ("decoder.0.cross": (H,)) and what layers change ("decoder.0": ())."""
    handles = []
    for name, mask in masks.items():
        module, part = model.get_submodule(name), name.split(".")[-1]
        if part in OUTPUT:
            last = module.get_submodule(OUTPUT[part])
            handles.append(last.register_forward_pre_hook(partial(_scale, mask)))
        else:
            handles.append(module.register_forward_hook(partial(_damp, mask)))
    yield
    for handle in handles:
        handle.remove()


def _scale(mask: Tensor, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * mask.repeat_interleave(inputs[0].shape[1] // len(mask)),)


def _damp(mask: Tensor, module: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> Tensor:
    return inputs[0] + mask * (result - inputs[0])


def narrow(model: Transformer, channels: Sequence[int]) -> Transformer:
    """The model, changed: all other channels are 0 wherever channels are written, norms are of these channels alone."""
    mask = torch.zeros(model.config.d_model)
    mask[list(channels)] = 1
    for name, module in model.named_modules():
        last = name.split(".")[-1]
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(partial(_norm_of, mask))
        elif last in ("embeddings", "target", "out", "down", "pooler"):
            module.register_forward_hook(partial(_times, mask))
        elif last in OUTPUT and [name for name, _ in module.named_parameters()] == ["bias"]:  # an absent sub-layer
            module.bias.data *= mask
    return model


def _norm_of(mask: Tensor, module: nn.LayerNorm, inputs: tuple[Tensor], result: Tensor) -> Tensor:
    kept = inputs[0][:, mask > 0]
    mean = kept.mean(1, keepdim=True)
    variance = (kept - mean).square().mean(1, keepdim=True)
    scaled = (inputs[0] - mean) / (variance + module.eps).sqrt()
    return (scaled * module.weight + module.bias) * mask


def _times(mask: Tensor, module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> Tensor:
    return result * mask
