"""A model's tensors by name, for those who build graphs of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


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

    def __getitem__(self, name: str) -> Array:
        return self.state[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.state
