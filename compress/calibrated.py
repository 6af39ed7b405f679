"""A model's linears on their way into formats that are calibrated.

Examples run through the float model: once for the ends of the inputs' channels, once more for the methods that count
values, and once for the sums by which weights are rounded (several times where these do not fit at once).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..transformer.checkpoint import Checkpoint
from ..transformer.errors import InputError
from ..transformer.layer_config import INT8_DYNAMIC, INT8_STATIC
from ..transformer.model import Transformer
from ..transformer.quantization import FormattedLinear
from .calibration import Batch, Calibration
from .linears import Input, SimulatedLinear, Weights, in_format, input_rounding
from .observing import Channels, Moments, Observer, Scaled, observe, portions
from .ranges import Extremes, Histogram, find_range
from .smoothing import factors, fold
from .step import StepContext

STRENGTHS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)
JUDGED = 32  # calibration examples by which a strength is chosen
GRAM_BYTES = 2**28  # of the sums that are kept at once


@dataclass(frozen=True)
class Calibrating:
    """How to calibrate; each option is described with the step (`quantize.Quantize`)."""

    bits: int
    range: str
    percentile: float
    smoothing: float | None
    compensate: bool
    correct_bias: bool
    samples: int
    pages: float


@dataclass(frozen=True)
class Calibrated:
    """What calibration comes to.

    Attributes:
        linears: each linear in its format.
        state: the float model's tensors, with the factors that went into them.
        details: what the report says, JSON-ready.
    """

    linears: dict[str, FormattedLinear]
    state: dict[str, Tensor]
    details: dict[str, Any]

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, forms: Mapping[str, str], how: Calibrating, context: StepContext
    ) -> "Calibrated":
        """Bring the linears of `forms` into their formats.

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
        work = _Work(checkpoint, forms, how, context, checkpoint.to_torch().to(context.device), examples)
        inputs, strengths = work.inputs()
        linears = work.rounded(inputs)
        state, folded = fold(checkpoint.config, checkpoint.state, linears)
        if inputs:
            kept = [name for name in inputs if bool((folded[name].tensors["factor"] != 1).any())]
            details |= {"range": how.range, "smoothing": {**strengths, "linears_that_multiply": len(kept)}}
        return cls(folded, state, details)


@dataclass(frozen=True)
class _Work:
    """The float model, and the examples that run through it."""

    checkpoint: Checkpoint
    forms: Mapping[str, str]
    how: Calibrating
    context: StepContext
    model: Transformer
    examples: Sequence[Batch]

    def inputs(self) -> tuple[dict[str, Input], dict[str, Any]]:
        """How static linears round what they are given, and what is said of the strength of smoothing."""
        static = [name for name, form in self.forms.items() if form == INT8_STATIC]
        if not static:
            return {}, {}
        channels = {name: Channels(inputs=self._columns(name), device=self._device) for name in static}
        self._observe("ranges of activations", channels)
        strength, errors = self._strength(channels)
        inputs = self._smoothed(channels, strength)
        if self.how.range != "minmax":
            inputs = self._ranges(inputs)
        return inputs, {"strength": strength, **({"hidden_error": errors} if errors else {})}

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

    def _columns(self, name: str) -> int:
        return self._linear(name)[0].shape[1]

    def _smoothed(self, channels: Mapping[str, Channels], strength: float) -> dict[str, Input]:
        """Each static linear's factors, with the whole range of its inputs times them."""
        found = {}
        for name, seen in channels.items():
            weight = self._linear(name)[0]
            factor = factors(seen.greatest.cpu(), weight, strength) if strength else torch.ones(weight.shape[1])
            found[name] = Input(factor, *seen.ends(factor.to(self._device)))
        return found

    def _strength(self, channels: Mapping[str, Channels]) -> tuple[float, dict[str, float]]:
        """The strength asked for; or the one with the least error of the last layer's tokens, and the error of each."""
        if self.how.smoothing is not None:
            return self.how.smoothing, {}
        progress = self.context.progress
        examples = self.examples[:: max(1, len(self.examples) // JUDGED)]
        errors = {}
        progress.start("strength of smoothing", len(STRENGTHS), "strengths")
        with torch.inference_mode():
            expected = [example.run(self.model).hidden for example in examples]
            for strength in STRENGTHS:
                rounded = self.checkpoint.to_torch().to(self._device)
                for name, given in self._smoothed(channels, strength).items():
                    parent, _, own = name.rpartition(".")
                    simulated = SimulatedLinear(*self._linear(name), self.how.bits, given)
                    setattr(rounded.get_submodule(parent), own, simulated.to(self._device))
                errors[strength] = hidden_error([example.run(rounded).hidden for example in examples], expected)
                progress.advance(note=f"{strength:g}: {errors[strength]:.4f}")
        best = min(errors, key=errors.__getitem__)
        progress.done(f"{best:g}")
        return best, {f"{strength:g}": round(error, 5) for strength, error in errors.items()}

    def _ranges(self, inputs: Mapping[str, Input]) -> dict[str, Input]:
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

    def rounded(self, inputs: Mapping[str, Input]) -> dict[str, FormattedLinear]:
        """Every linear in its format."""
        weights = Weights(self.how.bits, self.how.compensate, self.how.correct_bias)
        done = {}
        for name, form in self.forms.items():
            if form == INT8_DYNAMIC:
                done[name] = in_format(*self._linear(name), form, weights)
        columns = {name: self._columns(name) for name in self.forms if name not in done}
        for names in portions(columns, GRAM_BYTES):
            moments = {
                name: Moments(input_rounding(self.forms[name], inputs.get(name)), columns[name], self._device)
                for name in names
            }
            self._observe(
                "sums over activations", {name: self._scaled(inputs.get(name), moments[name]) for name in names}
            )
            self.context.progress.start("rounding of weights", len(names), "linears")
            for name in names:
                done[name] = in_format(*self._linear(name), self.forms[name], weights, inputs.get(name), moments[name])
                self.context.progress.advance()
            self.context.progress.done()
        return {name: done[name] for name in self.forms}

    def _scaled(self, given: Input | None, moments: Moments) -> Observer:
        return moments if given is None else Scaled(given.factor.to(self._device), [moments])


def hidden_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Mean over all tokens of |found - expected| / |expected|, of vectors (N, D)."""
    shares = [
        (one - other).norm(dim=1) / other.norm(dim=1).clamp(min=1e-30)
        for one, other in zip(found, expected, strict=True)
    ]
    return float(torch.cat(shares).mean())
