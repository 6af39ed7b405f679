"""Quantize: linears in int8 or in blocks of 8 or 4 bits, and int8 tables.

`int8_dynamic` takes the range of activations at run time and needs no data. The other formats are calibrated on
training texts: the range of their inputs and how it is evened out (`ranges`, `smoothing`), and weights that make up for
each other's rounding (`linears`, `gptq`).
"""

import time
from collections import Counter
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from ..export.machine import int8_weight_bits
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import FLOAT32, INT8_DYNAMIC, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.layer_config import BLOCK, BLOCK_BITS, LINEAR_FORMATS, one_of
from ..transformer.quantization import dynamic_linear, formatted, linear_names, output_table, table_names
from .calibrated import Calibrated, Calibrating
from .ranges import RANGE_METHODS
from .step import StepContext, StepResult

DEPENDS = {
    True: "a text's result depends a little on those beside it, whose range it shares",
    False: "a text's result is the same alone and beside others",
}


def bits_problem(bits: int) -> str | None:
    """What is wrong with a number of weight bits, if anything."""
    return None if bits in (0, 7, 8) else f"bits is {bits}, not 8, 7 or 0 (what this machine needs)"


@dataclass(frozen=True)
class Quantize:
    """Options of the step.

    Attributes:
        format: of the linears: "int8_dynamic" (activations by their range at run time), "int8_static" (by a range found
            in calibration: a text's result does not depend on those beside it), "int8_blocks" or "int4_blocks" (weights
            in blocks of 32, for decoding one token at a time).
        formats: exceptions, as "NAME=FORMAT", NAME being a linear's name with * for any run of letters:
            "*.ffn.down=float32". The last one that fits counts.
        bits: of int8 weights with one scale a row: 8, or 7 for processors whose u8 x s8 products saturate; 0 takes what
            this machine needs.
        tables: whether the token and position tables become int8 too.
        range: how static ranges are found: "minmax", "average", "percentile", "mse" or "entropy" (`ranges`).
        percentile: of that method.
        smoothing: strength from 0 to 1 by which static inputs are evened out; None: the best of several.
        compensate: whether rounded weights make up for each other (static and blocks).
        correct_bias: whether biases take up what is left over on the mean (static and blocks).
        samples: texts for calibration; of an encoder-decoder pairs.
        pages: share of these that are whole pages, where the data has pages.
    """

    format: str = INT8_DYNAMIC
    formats: tuple[str, ...] = ()
    bits: int = 0
    tables: bool = True
    range: str = "minmax"
    percentile: float = 99.99
    smoothing: float | None = None
    compensate: bool = True
    correct_bias: bool = True
    samples: int = 400
    pages: float = 0.5

    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        problems = one_of("format", self.format, LINEAR_FORMATS) + one_of("range", self.range, RANGE_METHODS)
        for text in self.formats:
            pattern, equals, form = text.partition("=")
            if not (pattern and equals):
                problems.append(f"formats has {text!r}, which is not NAME=FORMAT")
            else:
                problems += one_of(f"the format of {pattern}", form, LINEAR_FORMATS)
        if problem := bits_problem(self.bits):
            problems.append(problem)
        if not 0 < self.percentile <= 100:
            problems.append(f"percentile is {self.percentile}, not above 0 and at most 100")
        if self.smoothing is not None and not 0 <= self.smoothing <= 1:
            problems.append(f"smoothing is {self.smoothing}, not from 0 to 1")
        if self.samples < 1:
            problems.append(f"samples is {self.samples}, not at least 1")
        if not 0 <= self.pages <= 1:
            problems.append(f"pages is {self.pages}, not a share from 0 to 1")
        if problems:
            raise InputError("quantize: " + "; ".join(problems))

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the exceptions name linears that there are."""
        self._chosen(config)

    def __call__(self, checkpoint: Checkpoint, context: StepContext | None = None) -> StepResult:
        """Quantize every float linear of the layers and, with `tables`, the tables.

        Raises:
            InputError: an exception names no linear, or a format that is calibrated is given no texts.
        """
        started = time.monotonic()
        bits = self.bits or int8_weight_bits()
        forms, kept, changed = self._forms(checkpoint)
        details: dict[str, Any] = {
            "weight_bits": bits,
            "linears": len(forms),
            "formats": dict(Counter(forms.values())),
            "tables": len(table_names(checkpoint.config)) if self.tables else 0,
            "left_in_float": self._left(kept),
        }
        if changed:
            details["other_format"] = changed
        if set(forms.values()) <= {INT8_DYNAMIC}:
            linears = {name: dynamic_linear(checkpoint.state[f"{name}.weight"], bits) for name in forms}
        else:
            if context is None:
                raise InputError(f"quantize: {self.format} is calibrated on texts: give a context with data")
            calibrated = Calibrated.of(checkpoint, forms, self._calibrating(bits), context)
            checkpoint, linears = replace(checkpoint, state=calibrated.state), calibrated.linears
            details |= {**calibrated.details, "seconds": round(time.monotonic() - started, 1)}
        result = formatted(checkpoint, linears, bits=bits, tables=self.tables)
        whole = set(forms.values()) - set(BLOCK_BITS) or (self.tables and output_table(checkpoint.config))
        notes = {"int8_weight_bits": bits} if whole else {}
        details["beside_other_texts"] = DEPENDS[result.config.depends_on_batch]
        return StepResult(result.with_provenance(**notes), details)

    def _calibrating(self, bits: int) -> Calibrating:
        options = {field.name: getattr(self, field.name) for field in fields(Calibrating) if field.name != "bits"}
        return Calibrating(bits=bits, **options)

    def _left(self, kept: list[str]) -> dict[str, str]:
        left = {"norms, biases, token types": "under 1 % of the file", "head": "runs once a text"}
        left |= dict.fromkeys(kept, "asked for")
        return left if self.tables else {**left, "tables": "the option tables is false"}

    def _forms(self, checkpoint: Checkpoint) -> tuple[dict[str, str], list[str], dict[str, str]]:
        """The new format of each float linear, those that stay float, and why some have another one than asked for."""
        chosen = self._chosen(checkpoint.config)
        kept = [name for name, form in chosen.items() if form == FLOAT32]
        forms = {name: form for name, form in chosen.items() if form != FLOAT32}
        changed = {}
        for name, form in forms.items():
            columns = checkpoint.state[f"{name}.weight"].shape[1]
            if form in BLOCK_BITS and columns % BLOCK:
                forms[name] = INT8_DYNAMIC
                changed[name] = f"{INT8_DYNAMIC}: its {columns} columns are not whole blocks of {BLOCK}"
        return forms, kept, changed

    def _chosen(self, config: TransformerConfig) -> dict[str, str]:
        """The format asked for of each float linear."""
        names = linear_names(config)
        chosen = dict.fromkeys(names, self.format)
        for text in self.formats:
            pattern, _, form = text.partition("=")
            fitting = [name for name in names if fnmatchcase(name, pattern)]
            if not fitting:
                raise InputError(f"quantize: no float linear is named {pattern}; they are {', '.join(names) or 'none'}")
            chosen |= dict.fromkeys(fitting, form)
        for name in names:
            beside = name.removesuffix("kv") + "q"
            if name.endswith("cross.kv") and chosen[beside] != chosen[name]:
                raise InputError(f"quantize: {name} and {beside} have one format: ask for {name[:-2]}* instead")
        return chosen
