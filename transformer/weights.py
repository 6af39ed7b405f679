"""Reading and checking named tensors: safetensors, or a pickle of plain tensors that is never executed."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .errors import InputError

SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, else of `pytorch_model.bin` (plain tensors only).

    Raises:
        InputError: neither file is there, or the one that is cannot be read whole.
    """
    for name, read in ((SAFETENSORS, read_safetensors), (PICKLE, _read_pickle)):
        if (directory / name).is_file():
            return read(directory / name)
    if list(directory.glob("*.index.json")):
        raise InputError(f"{directory}: weights in several files are not supported; save the model as {SAFETENSORS}")
    raise InputError(f"{directory}: no {SAFETENSORS} (nor {PICKLE}) in it")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file; a broken file raises InputError."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); copy or download it again") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile pickle raises whatever its bytes lead to
        raise InputError(
            f"{path}: not whole or not plain tensors, so it was not loaded ({type(error).__name__}); "
            f"save the model as {SAFETENSORS}"
        ) from error
    plain = isinstance(state, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items())
    if not plain:
        raise InputError(f"{path}: not a dict of plain tensors; save the model as {SAFETENSORS}")
    return dict(state)


def to_numpy(value: Tensor) -> NDArray[Any]:
    """A tensor's numbers, contiguous; those of bfloat16, which numpy lacks, as their bits in uint16."""
    value = value.detach().cpu().contiguous()
    return value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else value.numpy()


def check_finite(state: dict[str, Tensor], source: str) -> None:
    """Raise InputError naming the parameters that hold NaN or infinity."""
    bad = [name for name, value in state.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InputError(f"{source}: NaN or infinity in {', '.join(bad[:3])}{more}")


def check_shapes(state: dict[str, Tensor], expected: dict[str, Tensor], source: str) -> None:
    """Raise InputError with every missing, unexpected or wrongly shaped tensor, against a model's own state dict."""
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unexpected" for name in state if name not in expected]
    for name in expected.keys() & state.keys():
        mine, theirs = expected[name], state[name]
        if mine.shape != theirs.shape:
            problems.append(f"{name} is {list(theirs.shape)}, the config says {list(mine.shape)}")
        elif mine.dtype != theirs.dtype:
            problems.append(f"{name} is {theirs.dtype}, the config says {mine.dtype}")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(f"{source}: {'; '.join(sorted(problems)[:4])}{more}")
