"""What linears are given when calibration examples run through the float model, one at a time.

So no result depends on how examples could be put into batches, and there is no padding to be left out. Observers take
what they need as it comes: their memory does not grow with the examples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..transformer.errors import InputError
from ..transformer.model import Transformer
from ..transformer.progress import SILENT, Progress
from .calibration import Batch
from .gptq import Gram

Rounding = Callable[[Tensor], Tensor]  # inputs (N, I) -> the values that a quantized linear takes in their place


class Observer(Protocol):
    """Sees the inputs of one linear."""

    def add(self, x: Tensor) -> None:
        """The inputs (N, I) of one example."""


def observe(
    model: Transformer, examples: Sequence[Batch], observers: Mapping[str, Observer], progress: Progress = SILENT
) -> None:
    """Run the examples and give each observer the inputs of the linear by whose name it goes."""
    handles = []
    try:
        for name, observer in observers.items():
            handles.append(model.get_submodule(name).register_forward_pre_hook(_teller(observer)))
        with torch.inference_mode():
            for example in examples:
                example.run(model)
                progress.advance()
    finally:
        for handle in handles:
            handle.remove()


def _teller(observer: Observer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def tell(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        observer.add(inputs[0].flatten(0, -2))

    return tell


class Channels:
    """Each input channel's least and greatest value.

    Attributes:
        low, high: (I,), 0 where none is negative, or none positive.
    """

    def __init__(self, *, inputs: int, device: torch.device) -> None:
        self.low, self.high = torch.zeros(inputs, device=device), torch.zeros(inputs, device=device)

    def add(self, x: Tensor) -> None:
        """See `Observer.add`.

        Raises:
            InputError: a value is NaN or infinite.
        """
        _check_finite(x)
        if len(x):
            self.low = torch.minimum(self.low, x.amin(0))
            self.high = torch.maximum(self.high, x.amax(0))

    @property
    def greatest(self) -> Tensor:
        """(I,) magnitudes."""
        return torch.maximum(self.high, -self.low)

    def ends(self, factor: Tensor) -> tuple[float, float]:
        """The least and greatest value of all channels, each multiplied by its factor (I,) above 0."""
        return float((self.low * factor).min()), float((self.high * factor).max())


def _check_finite(x: Tensor) -> None:
    if not bool(x.isfinite().all()):
        raise InputError("calibration gives values that are not finite: check the model's weights and its texts")


class Scaled:
    """Observers of inputs whose channels are multiplied by factors first."""

    def __init__(self, factor: Tensor, observers: Sequence[Observer]) -> None:
        self.factor, self.observers = factor, observers

    def add(self, x: Tensor) -> None:
        """See `Observer.add`."""
        scaled = x * self.factor
        for observer in self.observers:
            observer.add(scaled)


class Moments:
    """What rounding weights and correcting the bias need of the inputs and of what they are rounded to.

    Attributes:
        gram: of the rounded inputs.
    """

    def __init__(self, rounding: Rounding, inputs: int, device: torch.device) -> None:
        self.rounding = rounding
        self.gram = Gram(inputs=inputs, device=device)
        self._given = torch.zeros(inputs, dtype=torch.float64, device=device)
        self._rounded = torch.zeros_like(self._given)

    def add(self, x: Tensor) -> None:
        """See `Observer.add`.

        Raises:
            InputError: a value is NaN or infinite.
        """
        _check_finite(x)
        rounded = self.rounding(x)
        self.gram.add(rounded)
        self._given += x.sum(0, dtype=torch.float64)
        self._rounded += rounded.sum(0, dtype=torch.float64)

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """(I,) float64 of the inputs, and of what they are rounded to."""
        rows = max(self.gram.rows, 1)
        return self._given / rows, self._rounded / rows


def portions(columns: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Linears by their columns, in runs whose sums take no more than `limit` bytes together, or of one linear."""
    portion: list[str] = []
    size = 0
    for name, inputs in columns.items():
        need = 8 * inputs**2
        if portion and size + need > limit:
            yield portion
            portion, size = [], 0
        portion.append(name)
        size += need
    if portion:
        yield portion
