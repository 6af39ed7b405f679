"""Reshape: a new encoder of another shape takes the model's place, to learn from it in the steps that follow.

Its linears are drawn as BERT's are. Its tables may begin as the model's own, on the directions in which these reach
furthest: with T = U S V^T the table of tokens (V', D), those of tokens, positions and types become T V_d, of the first
d columns of V, the nearest there is in d columns to what they were among each other (Eckart & Young 1936).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import (
    AttentionConfig,
    DenseConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LayerConfig,
    TransformerConfig,
)
from ..transformer.errors import InputError
from ..transformer.model import Transformer, initialize
from .step import StepContext, StepResult

TABLES = ("tokens", "positions", "token_types")
OF_OTHER_UNITS = ("kept", "kept_of")  # in a provenance: what was kept of which units


@dataclass(frozen=True)
class Reshape:
    """Options of the step.

    Attributes:
        layers: of the new encoder.
        width: d, its channels.
        heads: of every layer; they share d evenly.
        group: heads that share keys and values.
        neurons: of every FFN.
        tables: whether its tables begin as the model's own.
    """

    layers: int = 4
    width: int = 192
    heads: int = 6
    group: int = 1
    neurons: int = 768
    tables: bool = True

    name: ClassVar[str] = "reshape"
    trains: ClassVar[bool] = False

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in asdict(self).items() if name != "tables"}
        problems = [f"{name} is {value}, not at least 1" for name, value in numbers.items() if value < 1]
        if not problems and self.width % self.heads:
            problems = [f"width {self.width} is no multiple of the {self.heads} heads"]
        if not problems and self.heads % self.group:
            problems = [f"{self.heads} heads do not go into groups of {self.group}"]
        if problems:
            raise InputError("reshape: " + "; ".join(problems))

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the model is a float encoder, and as wide as its tables are to be at least."""
        config.check_encoder("reshape")
        if not config.is_float:
            raise InputError("reshape: the model is in int8; put reshape before quantize")
        if self.tables and self.width > config.d_model:
            raise InputError(
                f"reshape: width is {self.width}, the model's tables have {config.d_model} columns: "
                "ask for fewer, or for new tables (tables = false)"
            )

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """The new encoder, with the tokenizer and the head of the model.

        A sentence encoder of another width gets a linear map behind its pooling, so that its vectors have as many
        numbers as the model's.

        Raises:
            InputError: see `check`.
        """
        self.check(checkpoint.config)
        config = self.config(checkpoint.config)
        model = Transformer(config)
        initialize(model, context.seed)
        state: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
        if self.tables:
            state |= _projected(checkpoint.state, self.width)
        provenance = {name: value for name, value in checkpoint.provenance.items() if name not in OF_OTHER_UNITS}
        made = replace(checkpoint, config=config, state=state, provenance={**provenance, "reshaped": asdict(self)})
        details = {"multiply_adds_kept": round(config.multiply_adds() / max(checkpoint.config.multiply_adds(), 1), 4)}
        return StepResult(made.check("the new encoder"), details)

    def config(self, config: TransformerConfig) -> TransformerConfig:
        """The new encoder's."""
        attention = AttentionConfig(self.heads, self.width // self.heads, group=self.group)
        activations = [layer.ffn.activation for layer in config.encoder if layer.ffn is not None]
        ffn = FeedForwardConfig(self.neurons, *activations[:1])
        head: Any = config.head
        if isinstance(head, EmbeddingHead):
            maps = (DenseConfig(self.width, config.output_width, activation=None),)
            head = replace(head, dense=maps if config.output_width != self.width else ())
        return replace(config, d_model=self.width, encoder=(LayerConfig(attention, ffn),) * self.layers, head=head)


def _projected(state: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """The tables in `width` columns."""
    tables = {name: state[name] for table in TABLES if (name := f"embeddings.{table}.weight") in state}
    tokens = tables["embeddings.tokens.weight"].double()
    _, directions = torch.linalg.eigh(tokens.T @ tokens)  # ascending
    first = directions.flip(1)[:, :width]
    return {name: (value.double() @ first).float().contiguous() for name, value in tables.items()}
