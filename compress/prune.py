"""Prune: whole layers, attention heads and FFN neurons go, in one shot and without training.

After Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers": Fisher information on training texts,
of a translator on pairs (`calibration`), says what matters (`importance`), a budget of multiply-adds says how much may
stay (`selection`), the smaller dense model is cut out (`surgery`) and its output projections are fitted to the unpruned
model (`refit`). Heads of all attentions and neurons of all FFNs, of encoder and decoder, compete for one budget.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import LayerConfig, RecurrentConfig, TransformerConfig
from ..transformer.errors import InputError
from .calibration import Calibration
from .importance import MaskGradients, Scores, block, magnitude_scores, mask_gradients
from .refit import SublayerFit, refit
from .selection import rearrange, select_layers, select_units
from .step import StepContext, StepResult
from .surgery import check_float, remove_from
from .units import KINDS, STACKS, Indices, Kept, stacks, sublayers

FISHER, MAGNITUDE = "fisher", "magnitude"
FIELDS = {"encoder": ("layers", "keep_layers"), "decoder": ("decoder_layers", "keep_decoder_layers")}


@dataclass(frozen=True)
class Prune:
    """Options of the step.

    Attributes:
        cost: share of the layers' multiply-adds that stays, at most.
        layers: how many whole layers of the encoder stay, chosen before heads and neurons; None: all.
        keep_layers: the numbers of the layers that stay, instead of a choice.
        decoder_layers, keep_decoder_layers: the same of the decoder.
        importance: "fisher", or "magnitude" (the norm of a unit's weights, which needs no data).
        samples: texts for the Fisher information; of an encoder-decoder pairs.
        pages: share of these texts, and of those for the fit, that are whole pages, where the data has pages: texts
            may be far shorter than what is served, and attention then looks superfluous.
        refit: whether the output projections are fitted to the unpruned model.
        refit_samples: texts for the fit.
        damping: of the fit, as a share of the mean variance of the activations.
        multiple: FFN widths are cut to multiples of it.
    """

    cost: float = 0.5
    layers: int | None = None
    keep_layers: tuple[int, ...] = ()
    decoder_layers: int | None = None
    keep_decoder_layers: tuple[int, ...] = ()
    importance: str = FISHER
    samples: int = 512
    pages: float = 0.5
    refit: bool = True
    refit_samples: int = 2048
    damping: float = 1e-3
    multiple: int = 32

    name: ClassVar[str] = "prune"

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.cost <= 1:
            problems.append(f"cost is {self.cost}, not a share over 0 and at most 1")
        if self.importance not in (FISHER, MAGNITUDE):
            problems.append(f"importance is {self.importance!r}, not {FISHER} or {MAGNITUDE}")
        for count, named in FIELDS.values():
            wanted = getattr(self, count)
            if wanted is not None and wanted < 1:
                problems.append(f"{count} is {wanted}, at least 1 must stay")
            if wanted is not None and getattr(self, named):
                problems.append(f"{count} and {named} are both given, which are two ways to say the same: give one")
        for field in ("samples", "refit_samples", "multiple"):
            if getattr(self, field) < 1:
                problems.append(f"{field} is {getattr(self, field)}, not at least 1")
        if not 0 <= self.pages <= 1:
            problems.append(f"pages is {self.pages}, not a share from 0 to 1")
        if not 0 <= self.damping < float("inf"):
            problems.append(f"damping is {self.damping}, not a number of at least 0")
        if problems:
            raise InputError("prune: " + "; ".join(problems))

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """A smaller dense model.

        Raises:
            InputError: the model is in int8, has not the layers asked for, `cost` leaves nothing, or there are no
                texts or pairs to calibrate on.
        """
        started = time.monotonic()
        self.check(checkpoint.config)
        texts = Calibration.of(checkpoint, context, max(self._wanted()), self.pages)
        scores, gradients = self._scores(checkpoint, context, texts)
        kept = self._kept(checkpoint.config, scores, gradients)
        pruned, fits = remove_from(checkpoint, kept), list[SublayerFit]()
        if self.refit and pruned.config != checkpoint.config:
            pruned, fits = self._refit(checkpoint, pruned, kept, context, texts)
        details = self._details(checkpoint.config, pruned.config, kept, fits, texts)
        return StepResult(pruned, {**details, "seconds": round(time.monotonic() - started, 1)})

    def _wanted(self) -> tuple[int, int]:
        """Calibration texts for the scores and for the fit."""
        return self.samples if self.importance == FISHER else 0, self.refit_samples if self.refit else 0

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the model is float and has the layers that are named."""
        check_float(config)
        for stack, (field, named) in FIELDS.items():
            count, wanted, kept = len(getattr(config, stack)), getattr(self, field), getattr(self, named)
            if wanted is not None and wanted > count:
                raise InputError(f"prune: {field} is {wanted}, the model has {count} in its {stack}; ask for fewer")
            if any(not 0 <= layer < count for layer in kept) or list(kept) != sorted(set(kept)):
                raise InputError(f"prune: {named} {list(kept)} are not ascending numbers below {count}")

    def _scores(
        self, checkpoint: Checkpoint, context: StepContext, texts: Calibration
    ) -> tuple[Scores, MaskGradients | None]:
        if self.importance == MAGNITUDE:
            return magnitude_scores(checkpoint.config, checkpoint.state), None
        batches = texts.batches(self.samples, context.device)
        context.progress.start("Fisher information", len(texts.ids[: self.samples]), texts.kind)
        model = checkpoint.to_torch().to(context.device)
        gradients = mask_gradients(model, batches, context.seed, progress=context.progress)
        context.progress.done()
        return gradients.scores(), gradients

    def _kept(self, config: TransformerConfig, scores: Scores, gradients: MaskGradients | None) -> Kept:
        """The units that stay: layers first, then heads and neurons of those within the budget."""
        layers = {stack: self._layers(stack, len(own), scores) for stack, own in stacks(config).items()}
        whole = Kept.everything(config, layers)
        encoder, decoder = (tuple(getattr(config, stack)[i] for i in layers.get(stack, ())) for stack in STACKS)
        budget = int(self.cost * config.multiply_adds())
        if config.with_layers(encoder, decoder).multiply_adds() <= budget:
            return whole
        subs = [sub for sub in sublayers(config) if sub.name in whole.units]
        heads, ffns = ([sub for sub in subs if (sub.part == "ffn") is ffn] for ffn in (False, True))
        chosen = select_units(
            [scores.units[sub.name] for sub in heads],
            [scores.units[sub.name] for sub in ffns],
            [sub.unit_cost(config.d_model) for sub in heads],
            2 * config.d_model,
            budget - sum(_cell_cost(layer, config.d_model) for layer in encoder + decoder),
            self.multiple,
        )
        if not any(chosen.heads) and not any(chosen.neurons):
            raise InputError(f"prune: cost {self.cost} leaves no head and no {self.multiple} neurons; ask for more")
        names = [sub.name for sub in (*heads, *ffns)]
        units = dict(zip(names, (*chosen.heads, *chosen.neurons), strict=True))
        if gradients is not None:
            units = {name: rearrange(block(gradients.units[name]), own) for name, own in units.items()}
        return Kept(layers, units)

    def _layers(self, stack: str, count: int, scores: Scores) -> Indices:
        """The layers of a stack that stay."""
        wanted, named = (getattr(self, field) for field in FIELDS[stack])
        if wanted is not None:
            return select_layers(scores.layers[stack], wanted)
        return tuple(named) or tuple(range(count))

    def _refit(
        self, checkpoint: Checkpoint, pruned: Checkpoint, kept: Kept, context: StepContext, texts: Calibration
    ) -> tuple[Checkpoint, list[SublayerFit]]:
        state, fits = refit(
            checkpoint.to_torch().to(context.device),
            pruned.to_torch().to(context.device),
            kept,
            texts.batches(self.refit_samples, context.device),
            damping=self.damping,
            progress=context.progress,
        )
        return replace(pruned, state=state), fits

    def _details(
        self,
        before: TransformerConfig,
        after: TransformerConfig,
        kept: Kept,
        fits: Sequence[SublayerFit],
        texts: Calibration,
    ) -> dict[str, Any]:
        scored, fitted = (texts.counts(count) for count in self._wanted())
        return {
            "importance": self.importance,
            **(_stack_details(after, "encoder", kept) if after.encoder else {}),
            **({"decoder": _stack_details(after, "decoder", kept)} if after.decoder else {}),
            "multiply_adds_kept": round(after.multiply_adds() / max(before.multiply_adds(), 1), 4),
            "calibration": {"fisher": scored, "refit": fitted},
            "output_error": [
                {**asdict(fit), "before": round(fit.before, 4), "after": round(fit.after, 4)} for fit in fits
            ],
            "skipped": self._skipped(before, after, texts),
        }

    def _skipped(self, before: TransformerConfig, after: TransformerConfig, texts: Calibration) -> dict[str, str]:
        """What was not done, with its reason."""
        skipped = {}
        if before == after:
            skipped["removal"] = f"the whole model is within cost {self.cost}"
        if not self.refit:
            skipped["refit"] = "the option refit is false"
        cells = [layer.mixer for layer in after.layers if isinstance(layer.mixer, RecurrentConfig)]
        if kinds := sorted({cell.kind for cell in cells}):
            skipped["cells"] = f"mixers of the kind {', '.join(kinds)} have no units to remove, their layers keep them"
        if self.refit and before != after and any(not cell.project for cell in cells):
            skipped["refit of cells"] = "without a projection there is nothing to fit"
        if texts.left_out:
            skipped["pairs"] = f"{texts.left_out} of those drawn are empty or over the model's positions"
        return skipped


def _stack_details(config: TransformerConfig, stack: str, kept: Kept) -> dict[str, Any]:
    """Which layers of a stack stayed, and how many units of each."""
    layers, counts = kept.layers[stack], {sub.name: sub.count for sub in sublayers(config)}
    parts = [part for part in KINDS if part != "cross" or (stack == "decoder" and config.encoder)]
    units = {KINDS[p]: [counts.get(f"{stack}.{i}.{p}", 0) for i in range(len(layers))] for p in parts}
    return {"kept_layers": list(layers), **units}


def _cell_cost(layer: LayerConfig, d_model: int) -> int:
    """Multiply-adds of what stays whole in a layer."""
    return layer.mixer.multiply_adds(d_model) if isinstance(layer.mixer, RecurrentConfig) else 0
