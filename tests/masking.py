"""Masks on units and layers of a model by hooks: what removing them has to equal."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

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
