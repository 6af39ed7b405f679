"""Dropout (Srivastava et al. 2014) with masks of random bytes: eight values of a random word cost what one did.

A byte below the threshold drops its value, so the rate is a multiple of 1/256, the one nearest to what was asked for
(0.1 is 26/256), and what is kept is scaled by that rate exactly.
"""

import torch
from torch import Tensor, nn

STEPS = 256


class Dropout(nn.Module):
    """Zeroes values in training mode and scales the others to the same mean."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.threshold = min(STEPS - 1, max(1, round(rate * STEPS))) if rate else 0

    def forward(self, x: Tensor) -> Tensor:
        """(…) -> (…)."""
        if not (self.training and self.threshold):
            return x
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device)
        words.random_(torch.iinfo(torch.int64).min, None)
        kept = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.threshold
        return x * (kept * (STEPS / (STEPS - self.threshold)))
