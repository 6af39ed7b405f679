import pytest
import torch
from models import ragged, writer

from slimformer.compress.calibration import Batch
from slimformer.compress.importance import states_of
from slimformer.compress.sides import depths, inner, outer, output, parts, passed
from slimformer.compress.surgery import remove_from
from slimformer.compress.units import Kept, stacks
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.model import Transformer


def smaller(checkpoint: Checkpoint) -> Checkpoint:
    """Every sub-layer that has units without its first one."""
    whole = Kept.everything(checkpoint.config)
    return remove_from(checkpoint, Kept(whole.layers, {name: units[1:] for name, units in whole.units.items()}))


def pairs(kind: str) -> tuple[Transformer, Transformer, list[Batch]]:
    checkpoint, second = writer(kind), smaller(writer(kind))
    sides = (ragged([5, 3, 4], seed=1), ragged([4, 6, 2], seed=2))
    both = sides if checkpoint.config.encoder else sides[1:]
    batches = [Batch(*(part[rows] for side in both for part in side)) for rows in (slice(0, 2), slice(2, 3))]
    return checkpoint.to_torch(), second.to_torch(), batches


@pytest.mark.parametrize("kind", ["post", "pre", "own table", "alone, pre", "lstm"])
@pytest.mark.parametrize("by_parts", [True, False])
def test_tokens_at_every_depth_are_those_of_the_models(kind: str, by_parts: bool) -> None:
    """Each model run as a whole gives its states; walked layer by layer, or part by part, they are the same."""
    first, second, batches = pairs(kind)
    with torch.no_grad():
        wanted = [[states_of(model.config, batch.run(model)) for model in (first, second)] for batch in batches]
        seen = []
        for stack, number, sides in depths(first, second, batches):
            seen.append((stack, number))
            for expected, both in zip(wanted, sides, strict=True):
                for states, side, model in zip(expected, both, (first, second), strict=True):
                    torch.testing.assert_close(side.tokens, states[stack][number], atol=1e-5, rtol=1e-5)
                    layer = getattr(model, stack)[number]
                    for part in parts(layer) if by_parts else ():
                        total = side.tokens + output(getattr(layer, part), inner(layer, part, side), side)
                        side.tokens = outer(layer, part, total)
                    if not by_parts:
                        side.tokens = passed(layer, side)
                    torch.testing.assert_close(side.tokens, states[stack][number + 1], atol=1e-5, rtol=1e-5)
    assert seen == [(stack, i) for stack, layers in stacks(first.config).items() for i in range(len(layers))]
