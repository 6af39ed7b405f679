"""Quantize: linears in int8, in blocks of 8 or 4 bits or in half precision, and int8 tables.

`int8_dynamic` takes the range of activations at run time, and half precision none: they need no data. The other formats
are calibrated on training texts: the range of their inputs and how it is evened out (`ranges`, `smoothing`), and
weights that make up for each other's rounding (`linears`, `gptq`).

`int8` is the choice between the two ways: calibrated wherever that loses no more, dynamic otherwise.
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
from ..transformer.layer_config import (
    BLOCK,
    BLOCK_BITS,
    HALVES,
    INT8_BLOCKS,
    INT8_PER_TOKEN,
    INT8_STATIC,
    LINEAR_FORMATS,
    RANGED,
    one_of,
    positive,
)
from ..transformer.quantization import (
    dynamic_linear,
    formatted,
    half_linear,
    linear_names,
    output_table,
    table_names,
    with_formats,
    with_tables,
)
from .calibrated import AUTO, Calibrated, Calibrating
from .ranges import RANGE_METHODS
from .step import StepContext, StepResult

INT8 = "int8"
SERVED = (INT8, *LINEAR_FORMATS)  # formats that are known before anything is measured
DEPENDS = {
    True: "a text's result depends a little on those beside it, whose range it shares",
    False: "a text's result is the same alone and beside others",
}


def bits_problem(bits: int) -> str | None:
    """What is wrong with a number of weight bits, if anything."""
    return None if bits in (0, 7, 8) else f"bits is {bits}, not 8, 7 or 0 (what the target needs)"


@dataclass(frozen=True)
class Quantize:
    """Options of the step.

    Attributes:
        format: of the linears: "int8" ("int8_static", with "int8_per_token" for what an encoder's activations are given
            to; but "int8_dynamic" where calibration is impossible or its model is further from the float one),
            "int8_dynamic" (activations by their range at run time), "int8_static" (by a range found in calibration: a
            text's result does not depend on those beside it), "int8_per_token" (by each token's greatest value, for
            what does not go far below 0: it loses less there, costs more and does not depend on other texts either),
            "int8_blocks" or "int4_blocks" (weights in blocks of 32, for decoding one token at a time), "float16" or
            "bfloat16" (for CUDA), or "auto"
            (each linear's own, by time and error).
        formats: exceptions, as "NAME=FORMAT", NAME being a linear's name with * for any run of letters:
            "*.ffn.down=float32". The last one that fits counts.
        bits: of int8 weights with one scale a row: 8, or 7 for processors whose u8 x s8 products saturate; 0 takes what
            the target of the context needs.
        tables: whether the token and position tables become int8 too.
        range: how static ranges are found: "minmax", "average", "percentile", "mse" or "entropy" (`ranges`).
        percentile: of that method.
        smoothing: strength from 0 to 1 by which inputs of static linears are evened out; None: the best of several.
        compensate: whether rounded weights make up for each other (static and blocks).
        correct_bias: whether biases take up what is left over on the mean (static and blocks).
        samples: texts for calibration; of an encoder-decoder pairs.
        pages: share of these that are whole pages, where the data has pages.
        candidates: formats among which "auto" chooses.
        max_error: greatest error of the last layer's tokens that "auto" takes, relative to their length, as simulated
            on some of the samples with weights rounded to nearest.
        tokens: how many a linear is given at once where "auto" times it.
    """

    format: str = INT8
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
    candidates: tuple[str, ...] = (*RANGED, INT8_DYNAMIC, INT8_BLOCKS, FLOAT32)
    max_error: float = 0.1
    tokens: int = 1024

    name: ClassVar[str] = "quantize"
    trains: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = one_of("format", self.format, (INT8, *LINEAR_FORMATS, AUTO))
        problems += one_of("range", self.range, RANGE_METHODS)
        for text in self.formats:
            pattern, equals, form = text.partition("=")
            if not (pattern and equals):
                problems.append(f"formats has {text!r}, which is not NAME=FORMAT")
            else:
                problems += one_of(f"the format of {pattern}", form, (*LINEAR_FORMATS, AUTO))
        for form in self.candidates:
            problems += one_of("a candidate", form, tuple(one for one in LINEAR_FORMATS if one not in HALVES))
        if FLOAT32 not in self.candidates:
            problems.append(f"candidates lack {FLOAT32}, without which max_error may be out of reach")
        if not 0 < self.max_error < float("inf"):
            problems.append(f"max_error is {self.max_error}, not a number above 0")
        problems += positive("samples", self.samples) + positive("tokens", self.tokens)
        if problem := bits_problem(self.bits):
            problems.append(problem)
        if not 0 < self.percentile <= 100:
            problems.append(f"percentile is {self.percentile}, not above 0 and at most 100")
        if self.smoothing is not None and not 0 <= self.smoothing <= 1:
            problems.append(f"smoothing is {self.smoothing}, not from 0 to 1")
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
        if self.format == INT8:
            return self._calibrated_or_dynamic(checkpoint, context)
        started = time.monotonic()
        target = None if context is None else context.target
        config, bits = checkpoint.config, self.bits or int8_weight_bits(target)
        forms, left, changed = self._forms(checkpoint)
        halves = {name: forms.pop(name) for name, form in list(forms.items()) if form in HALVES}
        calibrated: dict[str, Any] = {}
        if set(forms.values()) <= {INT8_DYNAMIC}:
            linears = {name: dynamic_linear(checkpoint.state[f"{name}.weight"], bits) for name in forms}
        else:
            if context is None:
                named = ", ".join(sorted(set(forms.values()) - {INT8_DYNAMIC}))
                raise InputError(f"quantize: {named} is calibrated on texts: give a context with data")
            found = Calibrated.of(checkpoint, forms, self._calibrating(bits), context)
            checkpoint, linears = replace(checkpoint, state=found.state), found.linears
            calibrated = {**found.details, "seconds": round(time.monotonic() - started, 1)}
            left |= dict.fromkeys(forms.keys() - linears.keys(), f"{AUTO}: max_error needs it")
        linears |= {name: half_linear(checkpoint.state, name, form) for name, form in halves.items()}
        result = formatted(checkpoint, linears, bits=bits, tables=self.tables)
        used = Counter(linear.form for linear in linears.values())
        details: dict[str, Any] = {
            "weight_bits": bits,
            "linears": len(linears),
            "formats": dict(used),
            "tables": len(table_names(config)) if self.tables else 0,
            "left_in_float": left,
            "beside_other_texts": DEPENDS[result.config.depends_on_batch],
            **({"other_format": changed} if changed else {}),
            **calibrated,
        }
        multiplies = set(used) - {*BLOCK_BITS, *HALVES} or (self.tables and output_table(config) in table_names(config))
        return StepResult(result.with_provenance(**({"int8_weight_bits": bits} if multiplies else {})), details)

    def _calibrated_or_dynamic(self, checkpoint: Checkpoint, context: StepContext | None) -> StepResult:
        """`int8`: which of the two, and why, is said under `choice`."""
        dynamic = replace(self, format=INT8_DYNAMIC)
        if context is None:
            return _because(dynamic(checkpoint), f"{INT8_DYNAMIC}: there are no texts to calibrate on")
        try:
            result = self._calibrated(checkpoint.config)(checkpoint, context)
        except InputError as problem:
            return _because(dynamic(checkpoint, context), f"{INT8_DYNAMIC}: {problem}")
        if "hidden_error" not in result.details:
            return _because(result, "no linear is left to calibrate")
        error, other = (result.details["hidden_error"][key] for key in ("quantized", INT8_DYNAMIC))
        said = f"tokens of the last layer are off by {error:.4f} of their length, with {INT8_DYNAMIC} by {other:.4f}"
        if error <= other:
            return _because(result, f"calibrated: {said}")
        return _because(dynamic(checkpoint, context), f"{INT8_DYNAMIC}: calibrated, {said}")

    def _calibrated(self, config: TransformerConfig) -> "Quantize":
        """What `int8` stands for where calibration is possible."""
        behind = tuple(f"{name}={INT8_PER_TOKEN}" for name in linear_names(config) if _activated(name))
        return replace(self, format=INT8_STATIC, formats=(*behind, *self.formats))

    def planned(self, config: TransformerConfig) -> TransformerConfig:
        """The config that the step is to give, `int8` being calibrated; the format "auto" is not known before."""
        step = self._calibrated(config) if self.format == INT8 else self
        planned = with_formats(config, step._chosen(config))
        return with_tables(planned) if self.tables else planned

    def _calibrating(self, bits: int) -> Calibrating:
        options = {field.name: getattr(self, field.name) for field in fields(Calibrating) if field.name != "bits"}
        return Calibrating(bits=bits, **options)

    def _forms(self, checkpoint: Checkpoint) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        """The new format of each float linear, why others stay float, and why some have another one than asked for."""
        left = {"norms, biases, token types": "under 1 % of the file", "head": "runs once a text"}
        left |= {} if self.tables else {"tables": "the option tables is false"}
        chosen = self._chosen(checkpoint.config)
        left |= {name: "asked for" for name, form in chosen.items() if form == FLOAT32}
        forms = {name: form for name, form in chosen.items() if form != FLOAT32}
        changed = {}
        for name, form in forms.items():
            columns = checkpoint.state[f"{name}.weight"].shape[1]
            if form in BLOCK_BITS and columns % BLOCK:
                forms[name] = INT8_DYNAMIC
                changed[name] = f"{INT8_DYNAMIC}: its {columns} columns are not whole blocks of {BLOCK}"
        return forms, left, changed

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


def _activated(name: str) -> bool:
    """Whether an encoder's linear takes what an activation gives, a few values of which are large."""
    return name.startswith("encoder.") and name.endswith(".ffn.down")


def _because(result: StepResult, reason: str) -> StepResult:
    return replace(result, details={"choice": reason, **result.details})
