"""What stands on the last layer: one vector a text, logits of its class, or logits of each token's next one.

A row without a valid token gives the zero vector, and the logits of a zero vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .head_config import ClassificationHead, EmbeddingHead, Head, LanguageHead
from .int8 import Int8Embedding
from .kernels import ACTIVATION
from .layers import table
from .packing import Packing

NORM_FLOOR = 1e-12


class DenseMap(nn.Module):
    """A linear and an optional activation."""

    def __init__(self, *, inputs: int, outputs: int, bias: bool, activation: str | None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = None if activation is None else ACTIVATION[activation]

    def forward(self, x: Tensor) -> Tensor:
        """(B, I) -> (B, O)."""
        y: Tensor = self.linear(x)
        return y if self.activation is None else self.activation(y)


def pool(tokens: Tensor, packing: Packing, how: str) -> Tensor:
    """(N, D) -> (B, D): mean over the valid tokens, the first or last one, or the greatest value of each column."""
    some = packing.lengths[:, None] > 0
    if how == "cls":
        return torch.where(some, tokens[packing.first], 0.0)
    if how == "last":
        last = (packing.lengths.cumsum(0) - 1).clamp(min=0)
        return torch.where(some, tokens[last], 0.0)
    rows = packing.padded(tokens)
    if how == "mean":
        return rows.sum(1) / packing.lengths.clamp(min=1)[:, None]
    lowest = torch.finfo(tokens.dtype).min
    return torch.where(some, rows.masked_fill(~packing.mask[..., None], lowest).amax(1), 0.0)


class SentenceHead(nn.Module):
    """Pooling, Dense maps, unit length."""

    def __init__(self, *, pooling: str, dense: list[DenseMap], normalize: bool) -> None:
        super().__init__()
        self.pooling = pooling
        self.dense = nn.ModuleList(dense)
        self.normalize = normalize

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> (B, E)."""
        x = pool(tokens, packing, self.pooling)
        for dense in self.dense:
            x = dense(x)
        x = torch.where(packing.lengths[:, None] > 0, x, 0.0)
        return F.normalize(x, dim=1, eps=NORM_FLOOR) if self.normalize else x


class ClassifierHead(nn.Module):
    """classifier(tanh(pooler(vector of the text))), the pooler optional."""

    def __init__(self, *, width: int, labels: int, pooler: bool, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.pooler = nn.Linear(width, width) if pooler else None
        self.classifier = nn.Linear(width, labels)

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> (B, C)."""
        x = pool(tokens, packing, self.pooling)
        if self.pooler is not None:
            x = self.pooler(x).tanh()
        result: Tensor = self.classifier(x)
        return result


class NextToken(nn.Module):
    """Logits of the next token: vectors times a table (V, D), its own or that of the decoder's tokens."""

    def __init__(self, *, width: int, rows: int, tied: bool, bias: bool, form: str) -> None:
        super().__init__()
        self.tokens = None if tied else table(rows=rows, width=width, form=form)
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: Tensor, decoder_table: nn.Module) -> Tensor:
        """(N, D) -> (N, V)."""
        weight = decoder_table if self.tokens is None else self.tokens
        if isinstance(weight, Int8Embedding):
            logits = weight.logits(x)
        else:
            assert isinstance(weight, nn.Embedding)
            logits = F.linear(x, weight.weight)
        return logits if self.bias is None else logits + self.bias


def build_head(config: Head, *, width: int, rows: int = 0) -> nn.Module:
    """The head that a config describes; `rows` is V, the decoder's vocabulary."""
    if isinstance(config, LanguageHead):
        return NextToken(width=width, rows=rows, tied=config.tied, bias=config.bias, form=config.format)
    if isinstance(config, ClassificationHead):
        return ClassifierHead(width=width, labels=len(config.labels), pooler=config.pooler, pooling=config.pooling)
    assert isinstance(config, EmbeddingHead)
    dense = [DenseMap(inputs=d.inputs, outputs=d.outputs, bias=d.bias, activation=d.activation) for d in config.dense]
    return SentenceHead(pooling=config.pooling, dense=dense, normalize=config.normalize)
