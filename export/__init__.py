"""Checkpoint -> ONNX bundle; parity, latency, runtime and reports. Importing this package needs no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundle import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    """Load `export`, which needs torch and onnx, when it is first asked for."""
    if name == "export":
        from .bundle import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
