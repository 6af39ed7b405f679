"""The float model with some of its linears in other formats, judged by the last layer's tokens on a few examples."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..transformer.model import Transformer
from .calibration import Batch


class Simulation:
    """Runs examples with linears put in the place of others."""

    def __init__(self, model: Transformer, examples: Sequence[Batch]) -> None:
        """Run them once as the model is."""
        self.model, self.examples = model, examples
        self.expected = self._run()

    def error(self, linears: Mapping[str, nn.Module]) -> float:
        """`hidden_error` with linears by their names; afterwards the model is what it was."""
        kept = {name: self.model.get_submodule(name) for name in linears}
        try:
            self._put(linears)
            return hidden_error(self._run(), self.expected)
        finally:
            self._put(kept)

    @torch.inference_mode()
    def _run(self) -> list[Tensor]:
        return [example.run(self.model).hidden for example in self.examples]

    def _put(self, linears: Mapping[str, nn.Module]) -> None:
        for name, linear in linears.items():
            parent, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(parent), own, linear)


def hidden_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Mean over all tokens of |found - expected| / |expected|, of vectors (N, D)."""
    shares = [
        (one - other).norm(dim=1) / other.norm(dim=1).clamp(min=1e-30)
        for one, other in zip(found, expected, strict=True)
    ]
    return float(torch.cat(shares).mean())
