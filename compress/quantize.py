"""Quantize: int8 linears whose activations are quantized at run time, and int8 tables."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..export.machine import int8_weight_bits
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import TransformerConfig
from ..transformer.errors import InputError
from ..transformer.quantization import linear_names, quantized, table_names
from .step import StepContext, StepResult


def bits_problem(bits: int) -> str | None:
    """What is wrong with a number of weight bits, if anything."""
    return None if bits in (0, 7, 8) else f"bits is {bits}, not 8, 7 or 0 (what this machine needs)"


@dataclass(frozen=True)
class Quantize:
    """Options of the step.

    Attributes:
        bits: 8, or 7 for processors whose u8 x s8 products saturate; 0 takes what this machine needs.
        tables: whether the token and position tables become int8 too.
    """

    bits: int = 0
    tables: bool = True

    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        if problem := bits_problem(self.bits):
            raise InputError(f"quantize: {problem}")

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: every model can take it."""

    def __call__(self, checkpoint: Checkpoint, context: StepContext | None = None) -> StepResult:
        """Quantize every float linear of the layers and, with `tables`, the tables; needs no data."""
        bits = self.bits or int8_weight_bits()
        left = {"norms, biases, token types": "under 1 % of the file", "head": "runs once a text"}
        if not self.tables:
            left["tables"] = "the option tables is false"
        details: dict[str, Any] = {
            "weight_bits": bits,
            "linears": len(linear_names(checkpoint.config)),
            "tables": len(table_names(checkpoint.config)) if self.tables else 0,
            "left_in_float": left,
        }
        return StepResult(quantized(checkpoint, bits=bits, tables=self.tables), details)
