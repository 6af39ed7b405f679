"""Zeros that stay: weights that are exactly 0 have no gradient, so that training leaves them where they are.

AdamW moves a weight by its mean gradient over the root of its mean square, and by a share of itself. Both are 0 for a
weight of 0 whose gradients are all 0; clipping scales gradients, and none becomes other than 0 by it.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from .checkpoint import Checkpoint

SPARSE = "sparse"  # the note, in a checkpoint's provenance, of what was made sparse and how


def sparse_linears(checkpoint: Checkpoint) -> tuple[str, ...]:
    """State-dict prefixes of the linears that were made sparse, of which a later step may have removed some."""
    return tuple(checkpoint.provenance.get(SPARSE, {}).get("linears", ()))


def keep_zeros(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Give the zeros in weights of these linears no gradient from now on; of those that the model has, the names.

    Args:
        model: on its device, changed in place.
        names: of linears; those that the model does not have are passed over.
    """
    kept = []
    parameters = dict(model.named_parameters())
    for name in names:
        weight = parameters.get(f"{name}.weight")
        if weight is not None and bool((weight == 0).any()):
            weight.register_hook(_without(weight.detach() == 0))  # type: ignore[no-untyped-call]
            kept.append(name)
    return kept


def _without(zeros: Tensor) -> Callable[[Tensor], Tensor]:
    def masked(gradient: Tensor) -> Tensor:
        return gradient.masked_fill(zeros, 0.0)

    return masked
