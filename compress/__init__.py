"""The steps that make a model smaller, and the pipeline that runs and measures them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distill import Distill
    from .gradual import Gradual
    from .movement import Movement
    from .pipeline import Result, compress
    from .prune import Prune
    from .quantize import Quantize
    from .recipe import Recipe, read_recipe
    from .reshape import Reshape
    from .sparsify import Sparsify
    from .step import StepContext, StepResult
    from .trim import Trim

__all__ = [
    "Distill",
    "Gradual",
    "Movement",
    "Prune",
    "Quantize",
    "Recipe",
    "Reshape",
    "Result",
    "Sparsify",
    "StepContext",
    "StepResult",
    "Trim",
    "compress",
    "read_recipe",
]

_HOMES = {
    "Distill": ".distill",
    "Prune": ".prune",
    "Reshape": ".reshape",
    "Trim": ".trim",
    "Sparsify": ".sparsify",
    "Gradual": ".gradual",
    "Movement": ".movement",
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
