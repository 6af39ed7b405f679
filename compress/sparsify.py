"""Sparsify: weights of exactly 0 in the linears of the layers, in any places or N of every M inputs (`sparsegpt`).

For research, and for size: shapes stay, and zeros pack well. Nothing becomes faster by it, since the kernels of
onnxruntime multiply by zeros as by all else. Who wants time takes `prune`.

Layers are taken in order, encoder before decoder: calibration runs anew for each, so that its linears are judged by
what the sparse layers before them give, as in the code of Frantar & Alistarh 2023 and of Sun et al. 2023. Linears of
one layer see each other whole, unless their sums are over `GRAM_BYTES` together. Once all zeros are chosen, what stays
is fitted to the model as it was (`sparse_refit`), which none of the three methods does by itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import TransformerConfig
from ..transformer.errors import InputError
from ..transformer.layer_config import one_of, positive
from ..transformer.model import Transformer
from ..transformer.progress import Progress
from ..transformer.quantization import linear_names
from ..transformer.zeros import SPARSE
from .calibration import Batch, Calibration
from .gptq import Gram
from .observing import observe, portions
from .refit import SublayerFit
from .sparse_refit import refit_sparse
from .sparsegpt import Choice, Pattern, magnitude, sparsegpt, wanda
from .step import StepContext, StepResult

SPARSEGPT, WANDA, MAGNITUDE = METHODS = ("sparsegpt", "wanda", "magnitude")
DEFAULT_SPARSITY = 0.5
CONSISTENT = 0.005  # how far a sparsity may be from that of the pattern beside it, being rounded
GRAM_BYTES = 2**28  # of the sums that are kept at once
SPEED = "no time is gained: onnxruntime's kernels are dense and multiply by zeros too; what shrinks is the packed file"


@dataclass(frozen=True)
class Sparsify:
    """Options of the step, which comes after prune (whose refit would fill zeros) and before distill.

    Training that begins with the result keeps its zeros (`transformer.zeros`).

    Attributes:
        method: "sparsegpt" (what stays makes up for what goes), "wanda" (least weight times input, row by row) or
            "magnitude" (least weight).
        sparsity: share of zeros in each linear, from 0 to below 1; None: that of the pattern, or else a half.
        pattern: "N:M" such as "2:4": at most N weights that are not 0 in every M consecutive inputs of a row, M being
            a divisor of every linear's inputs; empty: zeros in any places.
        refit: whether the weights that stay, and the biases, are fitted to the model as it was; "magnitude" without it
            needs no texts.
        samples: texts for calibration; of an encoder-decoder pairs.
        pages: share of these that are whole pages, where the data has pages.
        damping: of "sparsegpt" and of the fit: what is added to the diagonal of the inputs' sums, as a share of its
            mean.
    """

    method: str = SPARSEGPT
    sparsity: float | None = None
    pattern: str = ""
    refit: bool = True
    samples: int = 1000
    pages: float = 0.5
    damping: float = 0.01

    name: ClassVar[str] = "sparsify"
    trains: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = one_of("method", self.method, METHODS) + positive("samples", self.samples)
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            problems.append(f"sparsity is {self.sparsity}, not from 0 to below 1")
        problems += self._pattern_problems()
        if not 0 <= self.pages <= 1:
            problems.append(f"pages is {self.pages}, not a share from 0 to 1")
        if not 0 <= self.damping < math.inf:
            problems.append(f"damping is {self.damping}, not a number from 0 up")
        if problems:
            raise InputError("sparsify: " + "; ".join(problems))

    def _pattern_problems(self) -> list[str]:
        if not self.pattern:
            return []
        try:
            share = Pattern.parse(self.pattern).sparsity
        except InputError as problem:
            return [str(problem)]
        if self.sparsity is None or abs(self.sparsity - share) <= CONSISTENT:
            return []
        return [f"sparsity is {self.sparsity} and pattern {self.pattern} has {share:.4g}: leave one of them out"]

    @property
    def choice(self) -> Choice:
        """The pattern, or the share of zeros."""
        if self.pattern:
            return Pattern.parse(self.pattern)
        return DEFAULT_SPARSITY if self.sparsity is None else self.sparsity

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the model is float, and its linears have whole groups of inputs."""
        if not config.is_float:
            raise InputError("sparsify: the model is quantized already; put sparsify before quantize")
        choice = self.choice
        if isinstance(choice, Pattern):
            with torch.device("meta"):
                model = Transformer(config)
            for name in linear_names(config):
                choice.check(_weight(model, name).shape[1], f"sparsify: {name}")

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """Return the model with zeros in every linear of its layers; tables and heads stay as they are.

        Raises:
            InputError: the model is quantized, the pattern does not fit it, or there is nothing to calibrate with.
        """
        self.check(checkpoint.config)
        choice, names = self.choice, linear_names(checkpoint.config)
        count = self.samples if self.refit or self.method != MAGNITUDE else 0
        texts = Calibration.of(checkpoint, context, count, self.pages)
        batches = texts.batches(count, context.device)  # packed: a linear is given no padding
        model = checkpoint.to_torch().to(context.device)
        runs = list(_runs(model, names))
        context.progress.start("Sparsifying", len(runs) * len(batches), "batches")
        rows = [row for run in runs for row in self._sparsify(model, run, batches, context.progress)]
        context.progress.done()
        fits = list[SublayerFit]()
        if self.refit:
            full = checkpoint.to_torch().to(context.device)
            fits = refit_sparse(full, model, batches, damping=self.damping, progress=context.progress)
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        share = choice.sparsity if isinstance(choice, Pattern) else choice
        told = {"method": self.method, "pattern": self.pattern, "sparsity": share}
        zeros = sum(int((state[f"{name}.weight"] == 0).sum()) for name in names)
        weights = sum(state[f"{name}.weight"].numel() for name in names)
        details: dict[str, Any] = {
            **told,
            "zeros": round(zeros / max(weights, 1), 6),
            "of_all_weights": round(zeros / sum(value.numel() for value in state.values()), 6),
            "calibration": texts.counts(count),
            "linears": rows,
            "output_error": [fit.to_dict() for fit in fits],
            "speed": SPEED,
        }
        result = replace(checkpoint, state=state).with_provenance(**{SPARSE: {**told, "linears": names}})
        return StepResult(result, details)

    def _sparsify(
        self, model: Transformer, names: Sequence[str], batches: Sequence[Batch], progress: Progress
    ) -> list[dict[str, Any]]:
        """Change some linears of the model in place; what is said of each."""
        weights = {name: _weight(model, name) for name in names}
        grams: dict[str, Gram] = {}
        if self.method != MAGNITUDE:
            grams = {name: Gram(inputs=one.shape[1], device=one.device) for name, one in weights.items()}
            observe(model, batches, grams, progress)
        rows = []
        for name, weight in weights.items():
            gram = grams[name].matrix if grams else None
            sparse = self._sparse(weight, gram)
            rows.append({"name": name, "zeros": round(float((sparse == 0).double().mean()), 6)})
            if gram is not None:
                rows[-1]["output_error"] = round(_output_error(weight, sparse, gram), 4)
            with torch.no_grad():
                weight.copy_(sparse)
        return rows

    def _sparse(self, weight: Tensor, gram: Tensor | None) -> Tensor:
        if gram is None:
            return magnitude(weight, self.choice)
        if self.method == WANDA:
            return wanda(weight, gram, self.choice)
        return sparsegpt(weight, gram, self.choice, damping=self.damping)


def _weight(model: Transformer, name: str) -> Tensor:
    """Of a linear, (O, I)."""
    return model.get_parameter(f"{name}.weight")


def _runs(model: Transformer, names: Sequence[str]) -> Iterator[list[str]]:
    """The linears of each layer, or those of them whose sums are kept at once."""
    for _, layer in groupby(names, key=lambda name: name.split(".")[:2]):
        yield from portions({name: _weight(model, name).shape[1] for name in layer}, GRAM_BYTES)


def _output_error(weight: Tensor, sparse: Tensor, gram: Tensor) -> float:
    """Of the outputs W x: square root of the squared error's sum over that of the squares."""
    whole = weight.detach().double()
    change = whole - sparse.double()
    error, size = ((one @ gram * one).sum().clamp(min=0) for one in (change, whole))
    return math.sqrt(float(error) / max(float(size), 1e-300))
