"""New models: the shape of an encoder-decoder, a decoder or a classifier in a few numbers, and its first weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .checkpoint import NEW, Checkpoint
from .config import (
    AttentionConfig,
    ClassificationHead,
    EmbeddingConfig,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    RecurrentConfig,
    TextConfig,
    TransformerConfig,
)
from .errors import InputError
from .layer_config import MixerConfig
from .model import Transformer
from .subwords import special_ids
from .tokenizer import TextEncoder

ATTENTION = "attention"


@dataclass(frozen=True)
class Architecture:
    """All layers alike, one table for source, target and head, sinusoidal positions, scaled embeddings.

    Attributes:
        encoder, decoder: layers; an encoder of 0 leaves a decoder by itself, a decoder of 0 a classifier.
        width: D.
        heads: of every attention; they share D evenly.
        neurons: F.
        mixer: the decoder's, or a classifier's: "attention", or a cell, "rnn", "lstm", "gru" or "ssru", of D units.
        activation: of the FFN.
        norm_place: "post" as in the original, or "pre", which learns without care; with a norm at the end.
        positions: greatest number of tokens of a source and of a target.
        group: heads that share keys and values.
    """

    encoder: int = 6
    decoder: int = 6
    width: int = 256
    heads: int = 4
    neurons: int = 1024
    mixer: str = ATTENTION
    activation: str = "relu"
    norm_place: str = "pre"
    positions: int = 256
    group: int = 1

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width % self.heads:
            raise InputError(f"width {self.width} is no multiple of the {self.heads} heads")
        if min(self.encoder, self.decoder) < 0 or self.encoder + self.decoder < 1:
            raise InputError(f"{self.encoder} layers of the encoder and {self.decoder} of the decoder are no model")

    def config(self, tokenizer: str) -> TransformerConfig:
        """The config of such a model that writes, with the vocabulary of a tokenizer.json of `subwords`."""
        if not self.decoder:
            raise InputError("0 layers of the decoder: a model that writes needs at least 1")
        ids = special_ids(tokenizer)
        attention = self._attention()
        decoder = LayerConfig(self._mixer(), self._ffn(), attention if self.encoder else None)
        return replace(
            self._encoder(tokenizer, attention),
            decoder=(decoder,) * self.decoder,
            head=LanguageHead(start_id=ids["<s>"], end_id=ids["</s>"]),
        )

    def classifier_config(self, tokenizer: str, labels: Sequence[str]) -> TransformerConfig:
        """The config of such an encoder that classifies: by the last token of a cell, by the mean of attention's."""
        if self.decoder:
            raise InputError(f"{self.decoder} layers of the decoder: a classifier has none")
        pooling = "mean" if self.mixer == ATTENTION else "last"
        head = ClassificationHead(tuple(labels), pooler=False, pooling=pooling)
        return replace(self._encoder(tokenizer, self._mixer()), head=head)

    def _attention(self) -> AttentionConfig:
        return AttentionConfig(self.heads, self.width // self.heads, group=self.group)

    def _mixer(self) -> MixerConfig:
        return self._attention() if self.mixer == ATTENTION else RecurrentConfig(self.mixer, self.width, project=False)

    def _ffn(self) -> FeedForwardConfig:
        return FeedForwardConfig(self.neurons, self.activation)

    def _encoder(self, tokenizer: str, mixer: MixerConfig) -> TransformerConfig:
        """What all have in common: the table, and an encoder of such mixers. Cells alone need no positions."""
        attends = self.mixer == ATTENTION or (self.encoder and self.decoder)
        rows = TextEncoder(tokenizer, self.positions).vocab_size
        kind = "sinusoidal" if attends else "none"
        return TransformerConfig(
            d_model=self.width,
            embedding=EmbeddingConfig(rows, self.positions, position_kind=kind, scaled=True, norm=False),
            encoder=(LayerConfig(mixer, self._ffn()),) * self.encoder,
            text=TextConfig(self.positions, pad_id=special_ids(tokenizer)["<pad>"]),
            norm_eps=1e-5,
            norm_place=self.norm_place,
            final_norm=self.norm_place == "pre",
        )


def new_model(architecture: Architecture, tokenizer: str, seed: int) -> Checkpoint:
    """A model that writes, before its first step.

    Matrices are drawn evenly within sqrt(6 / (inputs + outputs)) (Glorot & Bengio 2010, equation 16), tables normally
    with deviation 1 / sqrt(D), so that scaled embeddings and tied logits have deviation 1; biases are 0, norms 1.
    """
    return _drawn(architecture.config(tokenizer), tokenizer, seed)


def new_classifier(architecture: Architecture, tokenizer: str, labels: Sequence[str], seed: int) -> Checkpoint:
    """An encoder with a classifier of `labels`, its weights drawn as those of `new_model`."""
    return _drawn(architecture.classifier_config(tokenizer, labels), tokenizer, seed)


def _drawn(config: TransformerConfig, tokenizer: str, seed: int) -> Checkpoint:
    model = Transformer(config)
    draw(model, config.d_model, torch.Generator().manual_seed(seed))
    state: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
    return Checkpoint(config, state, tokenizer, {"source": NEW, "seed": seed}).check("the new model")


@torch.no_grad()
def draw(part: nn.Module, width: int, generator: torch.Generator) -> None:
    """Give a part of a float model of width D its first weights, as `new_model` says."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            bound = math.sqrt(6 / sum(module.weight.shape))
            module.weight.uniform_(-bound, bound, generator=generator)
            module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, width**-0.5, generator=generator)
