"""Position-wise layers and the post-norm encoder layer around a mixer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import Attention
from .config import FLOAT32, LayerConfig
from .int8 import Int8Embedding, Int8Linear
from .kernels import Kernels
from .packing import Packing


def linear(*, inputs: int, outputs: int, form: str) -> nn.Module:
    """A linear layer of the form a config names."""
    return nn.Linear(inputs, outputs) if form == FLOAT32 else Int8Linear(inputs=inputs, outputs=outputs)


def table(*, rows: int, width: int, form: str) -> nn.Module:
    """An embedding table of the form a config names."""
    return nn.Embedding(rows, width) if form == FLOAT32 else Int8Embedding(rows=rows, width=width)


class FeedForward(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, *, up: nn.Module, down: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        result: Tensor = self.down(self.activation(self.up(x)))
        return result


class AbsentSublayer(nn.Module):
    """What is left of a removed sub-layer: its output's bias (D,)."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))


class EncoderLayer(nn.Module):
    """Post-norm: x = norm(x + mixer(x)), then x = norm(x + ffn(x))."""

    def __init__(self, *, mixer: nn.Module, mixer_norm: nn.Module, ffn: nn.Module, ffn_norm: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.mixer_norm = mixer_norm
        self.ffn = ffn
        self.ffn_norm = ffn_norm

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> (N, D)."""
        mixed = self.mixer.bias if isinstance(self.mixer, AbsentSublayer) else self.mixer(x, packing)
        x = self.mixer_norm(x + mixed)
        fed = self.ffn.bias if isinstance(self.ffn, AbsentSublayer) else self.ffn(x)
        result: Tensor = self.ffn_norm(x + fed)
        return result


def encoder_layer(config: LayerConfig, *, width: int, eps: float, kernels: Kernels) -> EncoderLayer:
    """The layer that a config describes."""
    mixer: nn.Module = AbsentSublayer(width=width)
    ffn: nn.Module = AbsentSublayer(width=width)
    if (m := config.mixer) is not None:
        mixer = Attention(
            qkv=linear(inputs=width, outputs=3 * m.width, form=m.input_format),
            out=linear(inputs=m.width, outputs=width, form=m.output_format),
            heads=m.heads,
            head_width=m.head_width,
            attend=kernels.attend,
        )
    if (f := config.ffn) is not None:
        ffn = FeedForward(
            up=linear(inputs=width, outputs=f.width, form=f.input_format),
            down=linear(inputs=f.width, outputs=width, form=f.output_format),
            activation=kernels.activation[f.activation],
        )
    norms = [kernels.norm(width, eps=eps) for _ in range(2)]
    return EncoderLayer(mixer=mixer, mixer_norm=norms[0], ffn=ffn, ffn_norm=norms[1])
