"""What a sub-layer's cut costs by itself, measured: the projection of what stays is re-fitted, and the model runs.

Of the sub-layer's units those stay that a ladder names; with A the Gram matrix of the projection's inputs about their
mean m, damped, the new projection of the columns S is W A_:S (A_SS)^-1, and the bias takes up (W - W') m. The loss is
how far the model's output then is from its own (`distance`), on a few calibration examples. Between the numbers of
units that are tried, the logarithm of the loss is taken to be linear.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..transformer.config import ClassificationHead, LanguageHead, TransformerConfig
from ..transformer.model import Output, Transformer
from ..transformer.progress import SILENT, Progress
from .calibration import Batch
from .curvature import Curvature
from .ladders import Floats, Ladder
from .units import OUTPUT, Indices, Sublayer, sublayers

SHARES = (0.0, 1 / 48, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of a sub-layer's units that are tried
LEAST = 1e-6  # share of the greatest loss below which all are the same


def trial_losses(
    model: Transformer,
    batches: Sequence[Batch],
    ladders: Mapping[str, Ladder],
    curvatures: Mapping[str, Curvature],
    *,
    damping: float,
    progress: Progress = SILENT,
) -> dict[str, Floats]:
    """What is lost with each number of units (U + 1,) of every sub-layer; the model is as before in the end."""
    subs = sublayers(model.config)
    progress.start("try sub-layers cut alone", sum(len(_numbers(sub)) for sub in subs), "cuts")
    with torch.no_grad():
        wanted = [batch.run(model) for batch in batches]
        found = {}
        for sub in subs:
            module = model.get_submodule(f"{sub.name}.{OUTPUT[sub.part]}")
            assert isinstance(module, nn.Linear)
            weight, bias = module.weight.clone(), module.bias.clone()
            points = []
            for number in _numbers(sub):
                kept = ladders[sub.name].kept(number)
                module.weight.copy_(refitted(weight, curvatures[sub.name], kept, sub, damping))
                module.bias.copy_(bias + (weight - module.weight) @ curvatures[sub.name].mean.to(weight))
                points.append(_lost(model, batches, wanted, sub))
                progress.advance()
            module.weight.copy_(weight)
            module.bias.copy_(bias)
            found[sub.name] = _between([*_numbers(sub), sub.count], [*points, 0.0])
    progress.done()
    return found


def refitted(weight: Tensor, curvature: Curvature, kept: Indices, sub: Sublayer, damping: float) -> Tensor:
    """The projection (D, U * K) that does best with the kept units alone: the columns of the others are 0."""
    columns = (torch.tensor(kept, dtype=torch.long)[:, None] * sub.width + torch.arange(sub.width)).flatten()
    result = torch.zeros_like(weight)
    if not len(columns):
        return result
    gram = curvature.damped(damping)
    solution = torch.linalg.solve(gram[columns][:, columns], gram[columns] @ weight.cpu().double().T)
    result[:, columns.to(weight.device)] = solution.T.to(weight)
    return result


def distance(config: TransformerConfig, wanted: Output, output: Output) -> float:
    """How far a batch's output is from what is wanted, summed over its texts.

    That is the Kullback-Leibler divergence of the distributions that `importance` draws labels from: of classes or of
    each next token, and of normal distributions of variance 1 about an embedding, which is half the squared distance.
    """
    p, q = (one.hidden if one.result is None else one.result for one in (wanted, output))
    if isinstance(config.head, ClassificationHead | LanguageHead):
        return float(F.kl_div(q.log_softmax(1), p.log_softmax(1), reduction="sum", log_target=True))
    return float((p - q).double().square().sum() / 2)


def _lost(model: Transformer, batches: Sequence[Batch], wanted: Sequence[Output], sub: Sublayer) -> float:
    """The mean over texts of the distance, `sub` being changed: what comes before it is as it was."""

    def run(batch: Batch, before: Output) -> Output:
        if model.config.decoder:
            return batch.run(model)
        return model.from_layer(sub.layer, before.states[sub.layer], before.packing)

    texts = max(sum(len(batch.ids) for batch in batches), 1)
    pairs = zip(batches, wanted, strict=True)
    return max(sum(distance(model.config, before, run(batch, before)) for batch, before in pairs), 0.0) / texts


def _numbers(sub: Sublayer) -> list[int]:
    """Numbers of units that are tried, ascending, less than all."""
    return sorted({round(share * sub.count) for share in SHARES} - {sub.count})


def _between(numbers: Sequence[int], losses: Sequence[float]) -> Floats:
    """Losses of all numbers from 0 to the last, from those of some."""
    least = LEAST * max(max(losses), 1e-30)
    logs = np.interp(np.arange(numbers[-1] + 1), numbers, np.log(np.maximum(losses, least)))
    result: Floats = np.exp(logs)
    result[-1] = 0.0
    return result
