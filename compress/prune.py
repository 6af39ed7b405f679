"""Prune: whole layers, attention heads and FFN neurons go, in one shot and without training.

After Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers": Fisher information on unlabelled
texts says what matters (`importance`), a budget of multiply-adds says how much may stay (`selection`), the smaller
dense model is cut out (`surgery`) and its output projections are fitted to the unpruned model (`refit`).
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import TransformerConfig
from ..transformer.data import SearchData
from ..transformer.errors import InputError
from ..transformer.tokenizer import length_batches, pad
from .importance import Batch, MaskGradients, Scores, block, magnitude_scores, mask_gradients
from .refit import SublayerFit, refit
from .selection import rearrange, select_layers, select_units
from .step import StepContext, StepResult
from .surgery import Kept, check_float, head_count, neuron_count, remove_from

FISHER, MAGNITUDE = "fisher", "magnitude"
BATCH = 32


@dataclass(frozen=True)
class Prune:
    """Options of the step.

    Attributes:
        cost: share of the layers' multiply-adds that stays, at most.
        layers: how many whole layers stay, chosen before heads and neurons; None: all.
        keep_layers: the numbers of the layers that stay, instead of a choice.
        importance: "fisher", or "magnitude" (the norm of a unit's weights, which needs no data).
        samples: texts for the Fisher information.
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
        if self.layers is not None and self.layers < 1:
            problems.append(f"layers is {self.layers}, at least 1 must stay")
        if self.layers is not None and self.keep_layers:
            problems.append("layers and keep_layers are both given, which are two ways to say the same: give one")
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
                texts to calibrate on.
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
        count = len(config.encoder)
        if self.layers is not None and self.layers > count:
            raise InputError(f"prune: layers is {self.layers}, the model has {count}; ask for fewer")
        if any(not 0 <= layer < count for layer in self.keep_layers) or list(self.keep_layers) != sorted(
            set(self.keep_layers)
        ):
            raise InputError(f"prune: keep_layers {list(self.keep_layers)} are not ascending numbers below {count}")

    def _scores(
        self, checkpoint: Checkpoint, context: StepContext, texts: "Calibration"
    ) -> tuple[Scores, MaskGradients | None]:
        if self.importance == MAGNITUDE:
            return magnitude_scores(checkpoint.config, checkpoint.state), None
        batches = texts.batches(self.samples, context.device)
        context.progress.start("Fisher information", texts.counts(self.samples)["texts"], "texts")
        model = checkpoint.to_torch().to(context.device)
        gradients = mask_gradients(model, batches, context.seed, progress=context.progress)
        context.progress.done()
        return gradients.scores(), gradients

    def _kept(self, config: TransformerConfig, scores: Scores, gradients: MaskGradients | None) -> Kept:
        """The units that stay: layers first, then heads and neurons of those within the budget."""
        layers = self.keep_layers or tuple(range(len(config.encoder)))
        if self.layers is not None:
            layers = select_layers(scores.layers, self.layers)
        whole = Kept.everything(config, layers)
        budget = int(self.cost * config.multiply_adds())
        smaller = config.with_layers(tuple(config.encoder[i] for i in layers))
        if smaller.multiply_adds() <= budget:
            return whole
        mixers = [config.encoder[i].attention for i in layers]
        chosen = select_units(
            [scores.heads[i] for i in layers],
            [scores.neurons[i] for i in layers],
            [0 if mixer is None else 4 * config.d_model * mixer.head_width for mixer in mixers],
            2 * config.d_model,
            budget,
            self.multiple,
        )
        if not any(chosen.heads) and not any(chosen.neurons):
            raise InputError(f"prune: cost {self.cost} leaves no head and no {self.multiple} neurons; ask for more")
        if gradients is None:
            return Kept(layers, chosen.heads, chosen.neurons)
        heads = [rearrange(block(gradients.heads[i]), units) for i, units in zip(layers, chosen.heads, strict=True)]
        neurons = [
            rearrange(block(gradients.neurons[i]), units) for i, units in zip(layers, chosen.neurons, strict=True)
        ]
        return Kept(layers, tuple(heads), tuple(neurons))

    def _refit(
        self, checkpoint: Checkpoint, pruned: Checkpoint, kept: Kept, context: StepContext, texts: "Calibration"
    ) -> tuple[Checkpoint, list[SublayerFit]]:
        context.progress.start("Re-fitting", 2 * len(kept.layers), "sub-layers")
        state, fits = refit(
            checkpoint.to_torch().to(context.device),
            pruned.to_torch().to(context.device),
            kept.layers,
            texts.batches(self.refit_samples, context.device),
            damping=self.damping,
            progress=context.progress,
        )
        context.progress.done()
        return replace(pruned, state=state), fits

    def _details(
        self,
        before: TransformerConfig,
        after: TransformerConfig,
        kept: Kept,
        fits: Sequence[SublayerFit],
        texts: "Calibration",
    ) -> dict[str, Any]:
        skipped = {}
        if before == after:
            skipped["removal"] = f"the whole model is within cost {self.cost}"
        if not self.refit:
            skipped["refit"] = "the option refit is false"
        scored, fitted = (texts.counts(count) for count in self._wanted())
        return {
            "importance": self.importance,
            "kept_layers": list(kept.layers),
            "heads": [head_count(layer) for layer in after.encoder],
            "neurons": [neuron_count(layer) for layer in after.encoder],
            "multiply_adds_kept": round(after.multiply_adds() / max(before.multiply_adds(), 1), 4),
            "calibration": {"fisher": scored, "refit": fitted},
            "output_error": [
                {"layer": fit.layer, "part": fit.part, "before": round(fit.before, 4), "after": round(fit.after, 4)}
                for fit in fits
            ],
            "skipped": skipped,
        }


@dataclass(frozen=True)
class Calibration:
    """Token ids of calibration texts, in random order; who needs fewer takes the first ones."""

    ids: tuple[list[int], ...]
    pad_id: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, context: StepContext, count: int, share: float) -> "Calibration":
        """At most `count` texts, drawn with the context's seed, a share of them pages.

        The model's default prompt stands before each.
        """
        if not count:
            return cls((), 0)
        texts, drawing = context.training_texts(), random.Random(context.seed)
        pages = [page.text for page in context.data.pages] if isinstance(context.data, SearchData) else []
        whole = min(int(share * count), len(pages))
        chosen = drawing.sample(texts, min(count - whole, len(texts)))
        if whole:
            chosen += drawing.sample(pages, whole)
            drawing.shuffle(chosen)
        settings = checkpoint.config.text
        ids = checkpoint.text_encoder().encode([settings.prompt() + text for text in chosen])
        return cls(tuple(row for row in ids if row), settings.pad_id)

    def batches(self, count: int, device: str) -> list[Batch]:
        """The first `count` texts in batches of like length: input_ids and attention_mask (B, T) on the device."""
        rows = self.ids[:count]
        result = []
        for places in length_batches([len(row) for row in rows], BATCH):
            ids, mask = pad([rows[place] for place in places], self.pad_id)
            result.append((torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)))
        return result

    def counts(self, count: int) -> dict[str, int]:
        """How many texts and tokens the first `count` texts really are."""
        return {"texts": len(self.ids[:count]), "tokens": sum(map(len, self.ids[:count]))}
