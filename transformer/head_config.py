"""What stands on the last layer, as data: a vector for each text, logits of labels, or logits of the next token."""

from dataclasses import dataclass

from .layer_config import ACTIVATIONS, EMBEDDING_FORMATS, FLOAT32, check, count, one_of, positive, truth

POOLINGS = ("mean", "cls", "max")
CLASSIFIER_POOLINGS = ("cls", "last", "mean")
LANGUAGE, SUMMARIZATION = WRITING = ("language", "summarization")


@dataclass(frozen=True)
class DenseConfig:
    """A linear map after pooling (the Dense module of sentence encoders), always float."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: str | None = "tanh"

    def __post_init__(self) -> None:
        problems = [] if self.activation is None else one_of("Dense activation", self.activation, ACTIVATIONS)
        check(
            positive("Dense inputs", self.inputs)
            + positive("Dense outputs", self.outputs)
            + truth("Dense bias", self.bias)
            + problems
        )


@dataclass(frozen=True)
class EmbeddingHead:
    """Tokens -> one vector a text: pooling, Dense maps, unit length."""

    pooling: str = "mean"
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = True
    kind: str = "embedding"

    def __post_init__(self) -> None:
        check(
            one_of("pooling", self.pooling, POOLINGS)
            + truth("normalize", self.normalize)
            + one_of("head kind", self.kind, ("embedding",))
        )


@dataclass(frozen=True)
class ClassificationHead:
    """Tokens -> logits of `labels`, through BERT's pooler where `pooler` is true.

    They are made of one vector a text: that of the first token ("cls"), of the last one ("last", which is all that a
    recurrent encoder has read), or the mean.
    """

    labels: tuple[str, ...]
    pooler: bool = True
    pooling: str = "cls"
    kind: str = "classification"

    def __post_init__(self) -> None:
        problems = [] if len(self.labels) > 1 else [f"{len(self.labels)} label(s), at least 2 are needed"]
        if not all(isinstance(label, str) for label in self.labels):
            problems.append("a label is not text")
        elif len(set(self.labels)) < len(self.labels):
            problems.append("a label occurs twice")
        problems += one_of("pooling", self.pooling, CLASSIFIER_POOLINGS)
        check(problems + truth("pooler", self.pooler) + one_of("head kind", self.kind, ("classification",)))


@dataclass(frozen=True)
class LanguageHead:
    """A decoder's tokens -> logits (V) of the next one.

    Attributes:
        start_id: the token that a decoder begins with.
        end_id: the token that ends a text.
        tied: the weight is the table of the decoder's tokens; otherwise one of its own (V, D), in `format`.
        bias: whether there is one (V,).
        kind: "language" goes on from a text or translates it, which needs all of it; "summarization" writes a summary,
            for which a source that is too long is cut.
    """

    start_id: int
    end_id: int
    tied: bool = True
    bias: bool = False
    format: str = FLOAT32
    kind: str = LANGUAGE

    def __post_init__(self) -> None:
        tied = ["a tied head has the format of its table"] if self.tied and self.format != FLOAT32 else []
        check(
            count("start_id", self.start_id)
            + count("end_id", self.end_id)
            + truth("tied", self.tied)
            + truth("bias", self.bias)
            + one_of("head format", self.format, EMBEDDING_FORMATS)
            + one_of("head kind", self.kind, WRITING)
            + tied
        )

    @property
    def summarizes(self) -> bool:
        """Whether it is to write summaries."""
        return self.kind == SUMMARIZATION


Head = EmbeddingHead | ClassificationHead | LanguageHead
