"""The state of torch's random numbers, on CPU and, where it is in use, on this process's CUDA device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def random_states() -> list[Tensor]:
    """Of now."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]  # type: ignore[no-untyped-call]


def restore_random(states: Sequence[Tensor]) -> None:
    """Go on from what `random_states` gave."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
