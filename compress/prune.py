"""Prune: whole layers, attention heads, FFN neurons and channels go, in one shot and without training.

Training texts, or a translator's pairs (`calibration`), say in which order units go and what is lost with them
(`criteria`); multiply-adds or measured seconds say what they cost (`costs`); dynamic programming finds how many of
each sub-layer stay within the budget (`selection`). The smaller dense model is cut out (`surgery`), and its output
projections are fitted to the unpruned model (`refit`). Heads of all attentions and neurons of all FFNs, of encoder and
decoder, compete for one budget.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import RecurrentConfig, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.layer_config import FLOAT32, one_of
from .calibration import BATCH, Batch, Calibration
from .channels import select_channels
from .costs import Attempt, MultiplyAdds, Serving, reach
from .criteria import CRITERIA, FISHER, LAYER_CRITERIA, MAGNITUDE, SURGEON, Examination, channel_scores
from .decision import Decision
from .quantize import SERVED
from .refit import SublayerFit, refit
from .selection import select_layers
from .step import StepContext, StepResult
from .surgery import check_float, remove_from
from .units import Indices, Kept, left_of, stacks

FIELDS = {"encoder": ("layers", "keep_layers"), "decoder": ("decoder_layers", "keep_decoder_layers")}
DEFAULT_COST = 0.5
MOST = 4  # times the samples that are taken at most
FAR = 0.1  # share of the speed-up from which a miss is told


@dataclass(frozen=True)
class Prune:
    """Options of the step.

    Attributes:
        cost: share of the layers' multiply-adds that stays, at most; None: half of them, unless `speedup` is given.
        speedup: how many times as fast as the unpruned model the pruned one is to be, both in one format and form of
            the graph, on the workload of the context; measured on this machine.
        format: in which the model will be served, one of `Quantize`: of the times that `speedup` is about.
        layers: how many whole layers of the encoder stay, chosen before heads and neurons; None: all.
        keep_layers: the numbers of the layers that stay, instead of a choice.
        decoder_layers, keep_decoder_layers: the same of the decoder.
        width: how many channels of the model width D stay, chosen before heads and neurons; None: all. An embedding
            without further maps has as many numbers.
        importance: what decides which heads and neurons stay: "surgeon", "fisher", "diagonal", "taylor", or "magnitude"
            (`criteria`), which needs no data.
        layer_importance: what decides which layers do: "fisher", "influence" or "magnitude"; None: "magnitude" where
            `importance` is, else "fisher".
        samples: texts for the decision; of an encoder-decoder pairs.
        agreement: share of the kept heads and neurons on which two decisions by as many other texts have to agree;
            where they do not, four times the samples are taken, or it is refused. 0 asks for nothing.
        pages: share of these texts, and of those for the fit, that are whole pages, where the data has pages: texts
            may be far shorter than what is served, and attention then looks superfluous.
        refit: whether the output projections are fitted to the unpruned model.
        refit_samples: texts for the fit.
        damping: of the fit and of the surgeon, as a share of the mean variance of the activations.
        multiple: FFN widths are cut to multiples of it.
    """

    cost: float | None = None
    speedup: float | None = None
    format: str = FLOAT32
    layers: int | None = None
    keep_layers: tuple[int, ...] = ()
    decoder_layers: int | None = None
    keep_decoder_layers: tuple[int, ...] = ()
    width: int | None = None
    importance: str = SURGEON
    layer_importance: str | None = None
    samples: int = 512
    agreement: float = 0.9
    pages: float = 0.5
    refit: bool = True
    refit_samples: int = 2048
    damping: float = 1e-3
    multiple: int = 32

    name: ClassVar[str] = "prune"
    trains: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = one_of("importance", self.importance, tuple(CRITERIA))
        if self.layer_importance is not None:
            problems += one_of("layer_importance", self.layer_importance, tuple(LAYER_CRITERIA))
        problems += one_of("format", self.format, SERVED)
        if self.cost is not None and not 0 < self.cost <= 1:
            problems.append(f"cost is {self.cost}, not a share over 0 and at most 1")
        if self.speedup is not None and not 1 <= self.speedup < float("inf"):
            problems.append(f"speedup is {self.speedup}, not a number of at least 1")
        if self.cost is not None and self.speedup is not None:
            problems.append("cost and speedup are both given, which are two budgets: give one")
        if self.speedup is None and self.format != FLOAT32:
            problems.append(f"format is {self.format}, which is about speedup: give that, too")
        for count, named in FIELDS.values():
            wanted = getattr(self, count)
            if wanted is not None and wanted < 1:
                problems.append(f"{count} is {wanted}, at least 1 must stay")
            if wanted is not None and getattr(self, named):
                problems.append(f"{count} and {named} are both given, which are two ways to say the same: give one")
        if self.width is not None and self.width < 1:
            problems.append(f"width is {self.width}, at least 1 channel must stay")
        for field in ("samples", "refit_samples", "multiple"):
            if getattr(self, field) < 1:
                problems.append(f"{field} is {getattr(self, field)}, not at least 1")
        if not 0 <= self.pages <= 1:
            problems.append(f"pages is {self.pages}, not a share from 0 to 1")
        if not 0 <= self.agreement < 1:
            problems.append(f"agreement is {self.agreement}, not a share from 0 to less than 1")
        if not 0 <= self.damping < float("inf"):
            problems.append(f"damping is {self.damping}, not a number of at least 0")
        if problems:
            raise InputError("prune: " + "; ".join(problems))

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """A smaller dense model.

        Raises:
            InputError: the model is in int8, has not the layers asked for, nothing is left within the budget or it is
                out of reach, there are no texts or pairs to calibrate on, or they are too few to decide by.
        """
        started = time.monotonic()
        self.check(checkpoint.config)
        texts = Calibration.of(checkpoint, context, max(self._wanted()), self.pages)
        kept, told = self._decided(checkpoint, context, texts)
        pruned, fits = remove_from(checkpoint, kept), list[SublayerFit]()
        if self.refit and pruned.config != checkpoint.config:
            pruned, fits = self._refit(checkpoint, pruned, kept, context, texts)
        details = self._details(checkpoint.config, pruned.config, kept, fits, texts) | told
        return StepResult(pruned, {**details, "seconds": round(time.monotonic() - started, 1)})

    def _wanted(self) -> tuple[int, int]:
        """Calibration texts for the decision, at most, and for the fit."""
        layered = any(getattr(self, count) is not None for count, _ in FIELDS.values())
        by = {self.importance, *([self.layers_by] if layered else [])}
        most = MOST * self.samples if self.agreement else self.samples
        return 0 if by == {MAGNITUDE} else most, self.refit_samples if self.refit else 0

    @property
    def layers_by(self) -> str:
        """What decides which layers stay."""
        return self.layer_importance or (MAGNITUDE if self.importance == MAGNITUDE else FISHER)

    @property
    def _share(self) -> float:
        """Of the multiply-adds that stays, at a speed-up roughly."""
        if self.speedup is not None:
            return 1 / self.speedup
        return DEFAULT_COST if self.cost is None else self.cost

    @property
    def budget(self) -> str:
        """In words."""
        return f"cost {self._share}" if self.speedup is None else "the speedup"

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the model is float and has the layers that are named and the channels."""
        check_float(config)
        if self.speedup is not None:
            Serving.check(config)
        if self.width is not None and self.width > config.d_model:
            raise InputError(f"prune: width is {self.width}, the model has {config.d_model} channels; ask for fewer")
        for stack, (field, named) in FIELDS.items():
            count, wanted, kept = len(getattr(config, stack)), getattr(self, field), getattr(self, named)
            if wanted is not None and wanted > count:
                raise InputError(f"prune: {field} is {wanted}, the model has {count} in its {stack}; ask for fewer")
            if any(not 0 <= layer < count for layer in kept) or list(kept) != sorted(set(kept)):
                raise InputError(f"prune: {named} {list(kept)} are not ascending numbers below {count}")

    def _decided(self, checkpoint: Checkpoint, context: StepContext, texts: Calibration) -> tuple[Kept, dict[str, Any]]:
        """What stays, and what the report says of it; by more examples than `samples` where these do not agree."""
        most = min(self._wanted()[0], len(texts.ids))
        rows = min(self.samples, most)
        seen = Examination.in_halves(checkpoint, _halves(texts, 0, rows, context), context, self.damping)
        decision = self._decision(seen)
        if rows < most - 1 and self._in_doubt(decision):
            rows, before = most, rows
            decision = self._decision(seen.with_more(_halves(texts, before, rows, context)))
        kept, told = self._within_cost(decision) if self.speedup is None else self._at_speed(decision, context)
        agreement = decision.agreement(kept) if self.agreement else None
        told |= {"calibration": {"decision": texts.counts(rows), "refit": texts.counts(self._wanted()[1])}}
        if agreement is not None:
            agreement.refuse(self.agreement)
            told["agreement"] = agreement.to_dict(self.agreement)
        return kept, told

    def _in_doubt(self, decision: Decision) -> bool:
        """Whether decisions by other texts would not agree, as far as estimated losses and multiply-adds tell."""
        whole = decision.config.multiply_adds()
        kept = decision.within(MultiplyAdds(decision.narrow), self._share * whole, estimate=True)
        agreement = None if kept is None else decision.agreement(kept)
        return agreement is not None and agreement.share < self.agreement

    def _decision(self, seen: Examination) -> Decision:
        config = seen.checkpoint.config
        layers = {stack: self._layers(stack, len(own), seen) for stack, own in stacks(config).items()}
        channels = None
        if self.width is not None and self.width < config.d_model:
            channels = select_channels(channel_scores(seen, self.importance), self.width)
        return Decision(seen, layers, channels, self.importance, self.multiple)

    def _layers(self, stack: str, count: int, seen: Examination) -> Indices:
        """The layers of a stack that stay."""
        wanted, named = (getattr(self, field) for field in FIELDS[stack])
        if wanted is not None:
            return select_layers(LAYER_CRITERIA[self.layers_by](seen)[stack], wanted)
        return tuple(named) or tuple(range(count))

    def _within_cost(self, decision: Decision) -> tuple[Kept, dict[str, Any]]:
        """The units that stay within the share of multiply-adds."""
        costs, share, whole = MultiplyAdds(decision.narrow), self._share, decision.config.multiply_adds()
        kept = decision.within(costs, share * whole)
        if kept is None or (decision.whole.units and not any(kept.units.values())):
            least = math.ceil(1e4 * decision.least(costs) / whole) / 1e4
            raise InputError(f"prune: cost {share} leaves no head and no {self.multiple} neurons; ask for {least}")
        return kept, {}

    def _at_speed(self, decision: Decision, context: StepContext) -> tuple[Kept, dict[str, Any]]:
        """The units that stay where the model is as many times as fast as it is to be."""
        assert self.speedup is not None
        serving = Serving.of(decision.seen.checkpoint, self.format, context)
        costs = serving.costs(decision.narrow)
        first = costs if decision.channels is None else serving.costs(decision.config)
        seconds = first.times.total(first.config)

        def attempt(asked: float) -> tuple[Kept, Attempt] | None:
            kept = decision.within(costs, seconds / asked)
            if kept is None or not any(kept.units.values()):
                return None
            config = remove_from(decision.seen.checkpoint, kept).config
            predicted = seconds / costs.times.total(serving.config(config))
            return kept, Attempt(asked, predicted, serving.speed(decision.config, config))

        reached = reach(self.speedup, attempt)
        if reached is None:
            most = math.floor(1e2 * seconds / decision.least(costs)) / 1e2
            raise InputError(
                f"prune: speedup {self.speedup} is out of reach: with the least that can stay the model would be "
                f"{most} times as fast; ask for less, or for fewer layers or a smaller width"
            )
        told = {"wanted": self.speedup, "format": self.format, "workload": context.workload}
        ratio = reached.taken.measured.ratio
        if abs(ratio / self.speedup - 1) > FAR:
            told["missed"] = f"{ratio:.2f} is the nearest found: units are too coarse, or times too uneven"
        times = {"times": costs.times.measured, "sublayers": costs.times.rows()}
        return reached.choice, {"speed": {**told, **reached.to_dict(), **times}}

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
        return {
            "importance": self.importance,
            **left_of(after, kept),
            **({} if kept.channels is None else {"channels": after.d_model}),
            "multiply_adds_kept": round(after.multiply_adds() / max(before.multiply_adds(), 1), 4),
            "output_error": [fit.to_dict() for fit in fits],
            "skipped": self._skipped(before, after, texts),
        }

    def _skipped(self, before: TransformerConfig, after: TransformerConfig, texts: Calibration) -> dict[str, str]:
        """What was not done, with its reason."""
        skipped = {}
        if before == after:
            skipped["removal"] = f"the whole model is within {self.budget}"
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


def _halves(texts: Calibration, first: int, count: int, context: StepContext) -> list[Batch]:
    """Examples from `first` to `count` in at least two batches, if there are as many."""
    return texts.batches(count, context.device, first=first, size=min(BATCH, max(1, (count - first) // 2)))
