"""The steps that make a model smaller, and the pipeline that runs and measures them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distill import Distill
    from .pipeline import Result, compress
    from .prune import Prune
    from .quantize import Quantize
    from .recipe import Recipe, read_recipe
    from .step import StepContext, StepResult

__all__ = [
    "Distill",
    "Prune",
    "Quantize",
    "Recipe",
    "Result",
    "StepContext",
    "StepResult",
    "compress",
    "read_recipe",
]

_HOMES = {
    "Distill": ".distill",
    "Prune": ".prune",
    "Quantize": ".quantize",
    "Recipe": ".recipe",
    "Result": ".pipeline",
    "StepContext": ".step",
    "StepResult": ".step",
    "compress": ".pipeline",
    "read_recipe": ".recipe",
}


def __getattr__(name: str) -> Any:
    """Load a public name, and torch with it, when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
