"""Position-wise layers, and the layer around them, a mixer and cross-attention."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Attention, CrossAttention
from .blocks import BlockLinear
from .cache import KeyValues, LayerCache, State
from .dropout import Dropout
from .half import HalfLinear
from .int8 import Int8Embedding, Int8Linear, PerTokenLinear, StaticLinear
from .kernels import Kernels
from .layer_config import (
    BLOCK_BITS,
    FLOAT32,
    GATES,
    HALVES,
    INT8_DYNAMIC,
    INT8_PER_TOKEN,
    INT8_STATIC,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
    RecurrentConfig,
)
from .packing import Packing
from .recurrent import Recurrent


def linear(*, inputs: int, outputs: int, form: str) -> nn.Module:
    """A linear layer of the form a config names."""
    if form == FLOAT32:
        return nn.Linear(inputs, outputs)
    if form in BLOCK_BITS:
        return BlockLinear(inputs=inputs, outputs=outputs, bits=BLOCK_BITS[form])
    if form in HALVES:
        return HalfLinear(inputs=inputs, outputs=outputs, form=form)
    made = {INT8_DYNAMIC: Int8Linear, INT8_STATIC: StaticLinear, INT8_PER_TOKEN: PerTokenLinear}[form]
    return made(inputs=inputs, outputs=outputs)


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


Mixer = Attention | Recurrent


class Layer(nn.Module):
    """Sub-layers with their norms: x = norm(x + f(x)) (post) or x = x + f(norm(x)) (pre), dropout on every f.

    They are the mixer, then cross-attention where a decoder stands beside an encoder, then the FFN (Vaswani et al.
    2017, sections 3.1 and 5.4).

    Attributes:
        recompute: whether the backward pass computes again what happens inside, in the place of having kept it (Chen et
            al. 2016, "Training deep nets with sublinear memory cost"); dropout falls on the same places.
    """

    def __init__(
        self,
        *,
        mixer: Mixer | AbsentSublayer,
        mixer_norm: nn.Module,
        ffn: FeedForward | AbsentSublayer,
        ffn_norm: nn.Module,
        cross: CrossAttention | AbsentSublayer | None = None,
        cross_norm: nn.Module | None = None,
        pre: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.mixer_norm = mixer_norm
        self.cross = cross
        self.cross_norm = cross_norm
        self.ffn = ffn
        self.ffn_norm = ffn_norm
        self.pre = pre
        self.dropout = Dropout(dropout)
        self.recompute = False

    def forward(
        self, x: Tensor, packing: Packing, source: KeyValues | None = None, source_seen: Tensor | None = None
    ) -> Tensor:
        """(N, D), and for cross-attention the source's keys and values and which are meant (B, S) -> (N, D)."""
        if self.recompute and torch.is_grad_enabled():
            again: Tensor = checkpoint(self._forward, x, packing, source, source_seen, use_reentrant=False)
            return again
        return self._forward(x, packing, source, source_seen)

    def _forward(self, x: Tensor, packing: Packing, source: KeyValues | None, source_seen: Tensor | None) -> Tensor:
        return self._run(x, lambda mixer, y: mixer(y, packing), lambda cross, y: cross(y, packing, source, source_seen))

    def memory(self, tokens: Tensor, packing: Packing) -> KeyValues | None:
        """The source's tokens (N', D) -> what `forward` takes of them; None where there is nothing to attend with."""
        return self.cross.memory(tokens, packing) if isinstance(self.cross, CrossAttention) else None

    def start(
        self, x: Tensor, packing: Packing, source: KeyValues | None, source_seen: Tensor | None
    ) -> tuple[Tensor, LayerCache]:
        """`forward`, and the cache for the steps that follow."""
        state: State = ()

        def mix(mixer: Mixer, y: Tensor) -> Tensor:
            nonlocal state
            mixed, state = mixer.start(y, packing)
            return mixed

        x = self._run(x, mix, lambda cross, y: cross(y, packing, source, source_seen))
        return x, LayerCache(state, source)

    def step(self, x: Tensor, cache: LayerCache, seen: Tensor, source_seen: Tensor | None) -> tuple[Tensor, LayerCache]:
        """One token a row (R, D); `seen` (R, S + 1): columns that hold a token, the new one included."""
        state: State = ()

        def mix(mixer: Mixer, y: Tensor) -> Tensor:
            nonlocal state
            mixed, state = mixer.step(y, cache.state, seen)
            return mixed

        def attend(cross: CrossAttention, y: Tensor) -> Tensor:
            assert cache.cross is not None
            assert source_seen is not None
            return cross.step(y, cache.cross, source_seen)

        x = self._run(x, mix, attend)
        return x, LayerCache(state, cache.cross)

    def _run(
        self, x: Tensor, mix: Callable[[Mixer, Tensor], Tensor], attend: Callable[[CrossAttention, Tensor], Tensor]
    ) -> Tensor:
        mixer, cross, ffn = self.mixer, self.cross, self.ffn
        x = self._add(x, self.mixer_norm, mixer if isinstance(mixer, AbsentSublayer) else lambda y: mix(mixer, y))
        if cross is not None and self.cross_norm is not None:
            x = self._add(
                x, self.cross_norm, cross if isinstance(cross, AbsentSublayer) else lambda y: attend(cross, y)
            )
        return self._add(x, self.ffn_norm, ffn)

    def _add(self, x: Tensor, norm: nn.Module, change: AbsentSublayer | Callable[[Tensor], Tensor]) -> Tensor:
        """One sub-layer with its norm, after the sum or before the change."""
        inner = norm(x) if self.pre else x
        changed = change.bias if isinstance(change, AbsentSublayer) else self.dropout(change(inner))
        result: Tensor = x + changed if self.pre else norm(x + changed)
        return result


def build_layer(
    config: LayerConfig,
    *,
    width: int,
    eps: float,
    kernels: Kernels,
    pre: bool = False,
    causal: bool = False,
    crossed: bool = False,
    dropout: float = 0.0,
) -> Layer:
    """The layer that a config describes; `crossed`: it belongs to a decoder beside an encoder."""
    norms = [kernels.norm(width, eps=eps) for _ in range(3)]
    return Layer(
        mixer=_mixer(config.mixer, width=width, causal=causal, kernels=kernels),
        mixer_norm=norms[0],
        cross=_cross(config.cross, width=width, kernels=kernels) if crossed else None,
        cross_norm=norms[1] if crossed else None,
        ffn=_feed_forward(config.ffn, width=width, kernels=kernels),
        ffn_norm=norms[2],
        pre=pre,
        dropout=dropout,
    )


def _mixer(config: MixerConfig | None, *, width: int, causal: bool, kernels: Kernels) -> Mixer | AbsentSublayer:
    if config is None:
        return AbsentSublayer(width=width)
    if isinstance(config, RecurrentConfig):
        columns = GATES[config.kind] * config.units
        return Recurrent(
            inputs=linear(inputs=width, outputs=columns, form=config.input_format),
            recur=None if config.kind == "ssru" else nn.Linear(config.units, columns),
            out=linear(inputs=config.units, outputs=width, form=config.output_format) if config.project else None,
            kind=config.kind,
            units=config.units,
        )
    return Attention(
        qkv=linear(inputs=width, outputs=config.width + 2 * config.key_width, form=config.input_format),
        out=linear(inputs=config.width, outputs=width, form=config.output_format),
        heads=config.heads,
        groups=config.groups,
        causal=causal,
        attend=kernels.attend,
    )


def _cross(config: AttentionConfig | None, *, width: int, kernels: Kernels) -> CrossAttention | AbsentSublayer:
    if config is None:
        return AbsentSublayer(width=width)
    return CrossAttention(
        q=linear(inputs=width, outputs=config.width, form=config.input_format),
        kv=linear(inputs=width, outputs=2 * config.key_width, form=config.input_format),
        out=linear(inputs=config.width, outputs=width, form=config.output_format),
        heads=config.heads,
        groups=config.groups,
        attend=kernels.attend,
    )


def _feed_forward(config: FeedForwardConfig | None, *, width: int, kernels: Kernels) -> FeedForward | AbsentSublayer:
    if config is None:
        return AbsentSublayer(width=width)
    return FeedForward(
        up=linear(inputs=width, outputs=config.width, form=config.input_format),
        down=linear(inputs=config.width, outputs=width, form=config.output_format),
        activation=kernels.activation[config.activation],
    )
