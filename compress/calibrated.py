"""A model's linears on their way into formats that are calibrated, or searched (`search`).

Examples run through the float model: once for the ends of the inputs' channels, once more for the methods that count
values, and once for the sums by which weights are rounded (several times where these do not fit at once). A few of them
judge strengths of smoothing, formats of single linears, and at last what came out, beside `int8_dynamic`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..export.linear_times import Kind, linear_times
from ..transformer.checkpoint import Checkpoint
from ..transformer.errors import InputError
from ..transformer.layer_config import BLOCK, BLOCK_BITS, FLOAT32, INT8_DYNAMIC, INT8_PER_TOKEN, INT8_STATIC, RANGED
from ..transformer.layers import linear
from ..transformer.model import Transformer
from ..transformer.quantization import FormattedLinear
from .calibration import Batch, Calibration
from .linears import Input, SimulatedLinear, StaticInput, TokenInput, WeightRounding, in_format, input_rounding
from .observing import Channels, Moments, Observer, Scaled, observe, portions
from .ranges import Extremes, Histogram, find_range
from .search import Candidate, Forms, choose
from .simulating import Simulation
from .smoothing import factors, fold
from .step import StepContext

AUTO = "auto"  # in the place of a format: the one that is searched
STRENGTHS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)
JUDGED = 32  # examples by which strengths and formats are chosen
GRAM_BYTES = 2**28  # of the sums that are kept at once

Inputs = Mapping[tuple[str, str], Input]  # by linear and format


@dataclass(frozen=True)
class Calibrating:
    """How to calibrate and search; each option is described with the step (`quantize.Quantize`)."""

    bits: int
    range: str
    percentile: float
    smoothing: float | None
    compensate: bool
    correct_bias: bool
    samples: int
    pages: float
    candidates: tuple[str, ...]
    max_error: float
    tokens: int


@dataclass(frozen=True)
class Calibrated:
    """What calibration comes to.

    Attributes:
        linears: each linear in its format, but for those that the search left in float.
        state: the float model's tensors, with the factors that went into them.
        details: what the report says, JSON-ready; `hidden_error` is that of the last layer's tokens
            (`simulating.hidden_error`) on a few of the examples, with these linears and with the same in int8_dynamic.
    """

    linears: dict[str, FormattedLinear]
    state: dict[str, Tensor]
    details: dict[str, Any]

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, forms: Mapping[str, str], how: Calibrating, context: StepContext
    ) -> "Calibrated":
        """Bring the linears of `forms` into their formats, those of AUTO into the one that is found.

        Raises:
            InputError: there are no texts to calibrate on, or the model gives values that are not finite.
        """
        texts = Calibration.of(checkpoint, context, how.samples, how.pages)
        examples = texts.batches(how.samples, context.device, size=1)
        if not examples:
            raise InputError("quantize: the texts have no tokens to calibrate on")
        details: dict[str, Any] = {"calibration": texts.counts(how.samples)}
        if texts.left_out:
            details["calibration"]["left_out"] = texts.left_out
        work = _Work(checkpoint, how, context, checkpoint.to_torch().to(context.device), examples)
        inputs, smoothing = work.inputs(forms)
        if AUTO in forms.values():
            forms, details["search"] = work.searched(forms, inputs)
        linears = work.rounded({name: form for name, form in forms.items() if form != FLOAT32}, inputs)
        state, folded = fold(checkpoint.config, checkpoint.state, linears)
        if smoothing:
            kept = (one.tensors["factor"] for one in folded.values() if one.form == INT8_STATIC)
            smoothing["linears_that_multiply"] = sum(bool((factor != 1).any()) for factor in kept)
            details |= {"smoothing": smoothing, "range": how.range}
        details["hidden_error"] = work.errors(linears)
        return cls(folded, state, details)


@dataclass(frozen=True)
class _Work:
    """The float model, and the examples that run through it."""

    checkpoint: Checkpoint
    how: Calibrating
    context: StepContext
    model: Transformer
    examples: Sequence[Batch]

    @cached_property
    def simulation(self) -> Simulation:
        """The model on a few examples, spread over their lengths; which ones does not depend on their order."""
        examples = sorted(self.examples, key=lambda one: (one.ids.shape[1], one.ids.tolist()))
        return Simulation(self.model, examples[:: max(1, len(examples) // JUDGED)])

    @property
    def _device(self) -> torch.device:
        return torch.device(self.context.device)

    def _observe(self, title: str, observers: Mapping[str, Observer]) -> None:
        self.context.progress.start(title, len(self.examples), "examples")
        observe(self.model, self.examples, observers, self.context.progress)
        self.context.progress.done()

    def _linear(self, name: str) -> tuple[Tensor, Tensor]:
        state = self.checkpoint.state
        return state[f"{name}.weight"], state[f"{name}.bias"]

    def _kind(self, name: str, form: str) -> Kind:
        outputs, inputs = self._linear(name)[0].shape
        return inputs, outputs, form

    def _columns(self, name: str) -> int:
        return self._linear(name)[0].shape[1]

    def _error(self, forms: Mapping[str, str], inputs: Inputs) -> float:
        """Of the last layer's tokens, with linears simulated in these formats."""
        linears = {}
        for name, form in forms.items():
            if form != FLOAT32:
                given = inputs.get((name, form))
                linears[name] = SimulatedLinear(*self._linear(name), form, self.how.bits, given).to(self._device)
        return self.simulation.error(linears)

    def errors(self, linears: Mapping[str, FormattedLinear]) -> dict[str, float]:
        """Of the last layer's tokens, with the linears as they have become, and with the same ones in int8_dynamic."""
        self.context.progress.start("error of the last layer", 2, "models")
        error = self.simulation.error({name: self._module(name, one) for name, one in linears.items()})
        self.context.progress.advance(note=f"{error:.4f}")
        dynamic = self._error(dict.fromkeys(linears, INT8_DYNAMIC), {})
        self.context.progress.advance()
        self.context.progress.done(f"{error:.4f}, {INT8_DYNAMIC} {dynamic:.4f}")
        return {"quantized": round(error, 5), INT8_DYNAMIC: round(dynamic, 5)}

    def _module(self, name: str, formatted: FormattedLinear) -> nn.Module:
        """The linear as the quantized model will have it."""
        weight, bias = self._linear(name)
        module = linear(inputs=weight.shape[1], outputs=len(weight), form=formatted.form)
        module.load_state_dict({"bias": bias, **formatted.tensors})
        return module.to(self._device)

    # --- inputs of static and per-token linears

    def inputs(self, forms: Mapping[str, str]) -> tuple[Inputs, dict[str, Any]]:
        """How linears round their inputs in each such format that they have or may get; and what smoothing came to."""
        wanted: dict[str, list[str]] = {}
        for ranged in RANGED:
            maybe = {ranged, AUTO} if ranged in self.how.candidates else {ranged}
            wanted[ranged] = [name for name, form in forms.items() if form in maybe]
        channels = {
            name: Channels(inputs=self._columns(name), device=self._device)
            for name in forms
            if any(name in names for names in wanted.values())
        }
        if channels:
            self._observe("ranges of activations", channels)
        found: dict[tuple[str, str], Input] = {}
        for name in wanted[INT8_PER_TOKEN]:
            found[name, INT8_PER_TOKEN] = TokenInput(abs(float(channels[name].low.min())))
        if not wanted[INT8_STATIC]:
            return found, {}
        own = {name: channels[name] for name in wanted[INT8_STATIC]}
        strength, errors = self._strength(own)
        static = self._smoothed(own, strength)
        if self.how.range != "minmax":
            static = self._ranges(static)
        found |= _keyed(static)
        return found, {"strength": strength, **({"hidden_error": errors} if errors else {})}

    def _smoothed(self, channels: Mapping[str, Channels], strength: float) -> dict[str, StaticInput]:
        """Each linear's factors, with the whole range of its inputs times them."""
        found = {}
        for name, seen in channels.items():
            weight = self._linear(name)[0]
            factor = factors(seen.greatest.cpu(), weight, strength) if strength else torch.ones(weight.shape[1])
            found[name] = StaticInput(factor, *seen.ends(factor.to(self._device)))
        return found

    def _strength(self, channels: Mapping[str, Channels]) -> tuple[float, dict[str, float]]:
        """The strength asked for; or the one with the least error of the last layer's tokens, and the error of each.

        The errors are those of all linears that may be static, in that format.
        """
        if self.how.smoothing is not None:
            return self.how.smoothing, {}
        progress, errors = self.context.progress, {}
        progress.start("strength of smoothing", len(STRENGTHS), "strengths")
        for strength in STRENGTHS:
            inputs = _keyed(self._smoothed(channels, strength))
            errors[strength] = self._error(dict.fromkeys(channels, INT8_STATIC), inputs)
            progress.advance(note=f"{strength:g}: {errors[strength]:.4f}")
        best = min(errors, key=errors.__getitem__)
        progress.done(f"{best:g}")
        return best, {f"{strength:g}": round(error, 5) for strength, error in errors.items()}

    def _ranges(self, inputs: Mapping[str, StaticInput]) -> dict[str, StaticInput]:
        """The inputs with ranges of the method that was chosen."""
        how, found = self.how, {}
        seen = {name: (Extremes(), Histogram(given.low, given.high)) for name, given in inputs.items()}
        self._observe(
            f"ranges of activations, {how.range}",
            {name: Scaled(given.factor.to(self._device), seen[name]) for name, given in inputs.items()},
        )
        for name, given in inputs.items():
            low, high = find_range(how.range, *seen[name], percentile=how.percentile)
            found[name] = replace(given, low=low, high=high)
        return found

    # --- formats

    def searched(self, forms: Mapping[str, str], inputs: Inputs) -> tuple[Forms, dict[str, Any]]:
        """The formats with AUTO replaced, and what the report says of the search."""
        units = _units([name for name, form in forms.items() if form == AUTO])
        fixed = {name: form for name, form in forms.items() if form != AUTO}

        def error(chosen: Mapping[str, str], others: Mapping[str, str]) -> float:
            spread = {name: form for unit, form in chosen.items() for name in units[unit]}
            return self._error({**others, **spread}, inputs)

        candidates = self._candidates(units, lambda unit, form: error({unit: form}, {}))
        choice = choose(candidates, self.how.max_error, lambda chosen: error(chosen, fixed))
        found = {**forms, **{name: form for unit, form in choice.forms.items() for name in units[unit]}}
        said: list[dict[str, Any]] = []
        for unit, own in candidates.items():
            line: dict[str, Any] = {"linear": unit, "format": choice.forms[unit]}
            for form, candidate in own.items():
                line |= {f"{form} error": round(candidate.error, 5), f"{form} ms": round(1e3 * candidate.seconds, 4)}
            said.append(line)
        limits = {"max_error": self.how.max_error, "error": round(choice.error, 5), "met": choice.met}
        return found, {**limits, "tokens": self.how.tokens, "linears": said}

    def _candidates(
        self, units: Mapping[str, Sequence[str]], error: Callable[[str, str], float]
    ) -> dict[str, dict[str, Candidate]]:
        """Each unit's error and time in each format that it can have."""
        kinds = {
            (name, form): self._kind(name, form)
            for names in units.values()
            for name in names
            for form in self.how.candidates
            if form not in BLOCK_BITS or self._columns(name) % BLOCK == 0
        }
        seconds = linear_times(kinds.values(), tokens=self.how.tokens)
        progress = self.context.progress
        progress.start("formats one by one", len(units), "linears")
        found: dict[str, dict[str, Candidate]] = {}
        for unit, names in units.items():
            for form in self.how.candidates:
                if all((name, form) in kinds for name in names):
                    time = sum(seconds[kinds[name, form]] for name in names)
                    alone = 0.0 if form == FLOAT32 else error(unit, form)
                    found.setdefault(unit, {})[form] = Candidate(alone, time)
            progress.advance()
        progress.done()
        return found

    def rounded(self, forms: Mapping[str, str], inputs: Inputs) -> dict[str, FormattedLinear]:
        """Every linear in its format."""
        weights = WeightRounding(self.how.bits, self.how.compensate, self.how.correct_bias)
        given = {name: inputs[name, form] for name, form in forms.items() if form in RANGED}
        nearest = not (weights.compensate or weights.correct_bias)
        done = {
            name: in_format(*self._linear(name), form, weights, given.get(name))
            for name, form in forms.items()
            if nearest or form == INT8_DYNAMIC
        }
        columns = {name: self._columns(name) for name in forms if name not in done}
        for names in portions(columns, GRAM_BYTES):
            moments = {
                name: Moments(input_rounding(forms[name], given.get(name)), columns[name], self._device)
                for name in names
            }
            scaled = {name: self._scaled(given.get(name), moments[name]) for name in names}
            self._observe("sums over activations", scaled)
            self.context.progress.start("rounding of weights", len(names), "linears")
            for name in names:
                done[name] = in_format(*self._linear(name), forms[name], weights, given.get(name), moments[name])
                self.context.progress.advance()
            self.context.progress.done()
        return {name: done[name] for name in forms}

    def _scaled(self, given: Input | None, moments: Moments) -> Observer:
        return moments if given is None else Scaled(given.factor.to(self._device), [moments])


def _keyed(inputs: Mapping[str, StaticInput]) -> Inputs:
    """Inputs of static linears by linear and format."""
    return {(name, INT8_STATIC): given for name, given in inputs.items()}


def _units(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Linears that share a format together: q and kv of cross-attention, every other one alone."""
    units: dict[str, tuple[str, ...]] = {}
    for name in names:
        unit = name.removesuffix(".kv") + ".q" if name.endswith("cross.kv") else name
        units[unit] = (*units.get(unit, ()), name)
    return units
