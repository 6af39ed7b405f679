"""The model and what it reads: configs, checkpoints, data, training, evaluation. Importing it needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .config import TransformerConfig
    from .data import load_data
    from .loading import load

__all__ = ["Checkpoint", "TransformerConfig", "load", "load_data"]

_HOMES = {"Checkpoint": ".checkpoint", "TransformerConfig": ".config", "load": ".loading", "load_data": ".data"}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
