"""A model's tensors by name, for those who build graphs of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BY_OUTPUT = ("weight", "bias", "scale")  # tensors of a linear that have a row for each output


@dataclass(frozen=True)
class Weights:
    """Tensors by name, and the part of the model they are read for."""

    state: Mapping[str, Array]
    prefix: str = ""

    def at(self, name: str) -> "Weights":
        """The weights below a dotted name."""
        return Weights(self.state, f"{self.prefix}{name}.")

    def full(self, name: str) -> str:
        """The whole dotted name."""
        return self.prefix + name

    def cut(self, name: str, sizes: Mapping[str, int]) -> "list[Weights]":
        """The linear below `name` in parts of so many outputs, with names of their own beside it."""
        whole = self.full(f"{name}.")
        tensors = {key.removeprefix(whole): value for key, value in self.state.items() if key.startswith(whole)}
        ends = list(accumulate(sizes.values()))[:-1]
        cut = {kind: np.split(tensors[kind], ends) for kind in BY_OUTPUT if kind in tensors}
        parts = [{**tensors, **{kind: rows[i] for kind, rows in cut.items()}} for i in range(len(sizes))]
        places = [self.full(f"{part}.") for part in sizes]
        return [
            Weights({place + kind: value for kind, value in part.items()}, place)
            for place, part in zip(places, parts, strict=True)
        ]

    def __getitem__(self, name: str) -> Array:
        return self.state[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.state
