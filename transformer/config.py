"""What a model is, as data: every width of every layer, the form of every weight, the head and how text enters.

The config validates and never derives: a resolved config reloads exactly as it was written. It needs no torch.
Widths: D model width, H heads, K head width, F FFN width, V vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .errors import InputError

FORMAT_VERSION = 1
FLOAT32 = "float32"
INT8_DYNAMIC = "int8_dynamic"
INT8_ROWS = "int8_rows"
LINEAR_FORMATS = (FLOAT32, INT8_DYNAMIC)
EMBEDDING_FORMATS = (FLOAT32, INT8_ROWS)
ACTIVATIONS = ("gelu", "relu", "gelu_tanh", "silu", "tanh")
POOLINGS = ("mean", "cls", "max")


def _check(problems: list[str]) -> None:
    if problems:
        raise InputError("; ".join(problems))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    return [] if value in allowed else [f"{name} is {value!r}, not one of {', '.join(allowed)}"]


def _positive(name: str, value: int) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return [f"{name} is {value!r}, not a whole number of at least 1"]
    return []


def _count(name: str, value: int) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return [f"{name} is {value!r}, not a whole number of at least 0"]
    return []


def _truth(name: str, value: bool) -> list[str]:
    return [] if isinstance(value, bool) else [f"{name} is {value!r}, not true or false"]


@dataclass(frozen=True)
class AttentionConfig:
    """Full self-attention: `heads` heads of `head_width`, of any product; formats of its two linears."""

    heads: int
    head_width: int
    input_format: str = FLOAT32
    output_format: str = FLOAT32
    kind: str = "attention"

    def __post_init__(self) -> None:
        _check(
            _positive("heads", self.heads)
            + _positive("head_width", self.head_width)
            + _one_of("input_format", self.input_format, LINEAR_FORMATS)
            + _one_of("output_format", self.output_format, LINEAR_FORMATS)
            + _one_of("mixer kind", self.kind, ("attention",))
        )

    @property
    def width(self) -> int:
        """Columns of the concatenated heads, H * K."""
        return self.heads * self.head_width


@dataclass(frozen=True)
class FeedForwardConfig:
    """A position-wise FFN of `width` neurons."""

    width: int
    activation: str = "gelu"
    input_format: str = FLOAT32
    output_format: str = FLOAT32

    def __post_init__(self) -> None:
        _check(
            _positive("FFN width", self.width)
            + _one_of("activation", self.activation, ACTIVATIONS)
            + _one_of("input_format", self.input_format, LINEAR_FORMATS)
            + _one_of("output_format", self.output_format, LINEAR_FORMATS)
        )


@dataclass(frozen=True)
class LayerConfig:
    """One layer. An absent sub-layer (None) keeps its norm and a bias (D,) in place of its output."""

    mixer: AttentionConfig | None
    ffn: FeedForwardConfig | None


@dataclass(frozen=True)
class EmbeddingConfig:
    """Token, position and token-type tables, summed and normalised. `token_types` 0 means no such table."""

    vocab_size: int
    positions: int
    token_types: int = 0
    tokens_format: str = FLOAT32
    positions_format: str = FLOAT32

    def __post_init__(self) -> None:
        _check(
            _positive("vocab_size", self.vocab_size)
            + _positive("positions", self.positions)
            + _count("token_types", self.token_types)
            + _one_of("tokens_format", self.tokens_format, EMBEDDING_FORMATS)
            + _one_of("positions_format", self.positions_format, EMBEDDING_FORMATS)
        )


@dataclass(frozen=True)
class DenseConfig:
    """A linear map after pooling (the Dense module of sentence encoders), always float."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: str | None = "tanh"

    def __post_init__(self) -> None:
        problems = [] if self.activation is None else _one_of("Dense activation", self.activation, ACTIVATIONS)
        _check(
            _positive("Dense inputs", self.inputs)
            + _positive("Dense outputs", self.outputs)
            + _truth("Dense bias", self.bias)
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
        _check(
            _one_of("pooling", self.pooling, POOLINGS)
            + _truth("normalize", self.normalize)
            + _one_of("head kind", self.kind, ("embedding",))
        )


@dataclass(frozen=True)
class ClassificationHead:
    """Tokens -> logits of `labels`, from the first token, through BERT's pooler where `pooler` is true."""

    labels: tuple[str, ...]
    pooler: bool = True
    kind: str = "classification"

    def __post_init__(self) -> None:
        problems = [] if len(self.labels) > 1 else [f"{len(self.labels)} label(s), at least 2 are needed"]
        if not all(isinstance(label, str) for label in self.labels):
            problems.append("a label is not text")
        elif len(set(self.labels)) < len(self.labels):
            problems.append("a label occurs twice")
        _check(problems + _truth("pooler", self.pooler) + _one_of("head kind", self.kind, ("classification",)))


@dataclass(frozen=True)
class TextConfig:
    """How text becomes tokens: the cut (tokens, special ones included) and the prompts put before a text by name."""

    max_length: int
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    pad_id: int = 0

    def __post_init__(self) -> None:
        problems = _positive("max_length", self.max_length) + _count("pad_id", self.pad_id)
        if self.default_prompt is not None and self.default_prompt not in [name for name, _ in self.prompts]:
            problems.append(f"default_prompt {self.default_prompt!r} is not one of the prompts")
        _check(problems)

    def prompt(self, name: str | None = None) -> str:
        """The text to put before an input: prompt `name`, else the default one, else nothing."""
        chosen = self.default_prompt if name is None else name
        prompts = dict(self.prompts)
        if chosen is not None and chosen not in prompts:
            raise InputError(f"no prompt named {chosen!r}; the model has: {', '.join(prompts) or 'none'}")
        return "" if chosen is None else prompts[chosen]


Head = EmbeddingHead | ClassificationHead


@dataclass(frozen=True)
class TransformerConfig:
    """An encoder: embeddings, layers of any widths, head, text. Post-norm, as in the original and in BERT."""

    d_model: int
    embedding: EmbeddingConfig
    encoder: tuple[LayerConfig, ...]
    text: TextConfig
    head: Head | None = None
    norm_eps: float = 1e-12
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        problems = _positive("d_model", self.d_model)
        if self.format_version != FORMAT_VERSION:
            problems.append(f"format_version is {self.format_version}, this slimformer reads {FORMAT_VERSION}")
        if not isinstance(self.norm_eps, float) or not 0 < self.norm_eps < 1:
            problems.append(f"norm_eps is {self.norm_eps!r}, not between 0 and 1")
        if self.text.max_length > self.embedding.positions:
            problems.append(f"max_length {self.text.max_length} is over the {self.embedding.positions} positions")
        if self.text.pad_id >= self.embedding.vocab_size:
            problems.append(f"pad_id {self.text.pad_id} is not below vocab_size {self.embedding.vocab_size}")
        if isinstance(self.head, EmbeddingHead):
            width = self.d_model
            for dense in self.head.dense:
                if dense.inputs != width:
                    problems.append(f"a Dense map takes {dense.inputs} columns, it is given {width}")
                width = dense.outputs
        _check(problems)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, which `from_dict` reads back to an equal config."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransformerConfig":
        """Read `to_dict`'s form; unknown and missing keys and another format version raise InputError."""
        version = data.get("format_version", FORMAT_VERSION) if isinstance(data, Mapping) else FORMAT_VERSION
        if version != FORMAT_VERSION:  # said before the fields of another version are called unknown
            raise InputError(f"config: format_version is {version}, this slimformer reads {FORMAT_VERSION}")
        known = _known(cls, data, "config")
        known["embedding"] = _read(EmbeddingConfig, known["embedding"], "config.embedding")
        known["text"] = _read_text(known["text"])
        layers = known["encoder"]
        if not isinstance(layers, list | tuple):
            raise InputError("config.encoder is not a list of layers")
        known["encoder"] = tuple(_read_layer(layer, f"config.encoder[{i}]") for i, layer in enumerate(layers))
        known["head"] = None if known.get("head") is None else _read_head(known["head"])
        return cls(**known)

    @classmethod
    def from_json(cls, text: str, source: str) -> "TransformerConfig":
        """Read JSON text; `source` names the file in errors."""
        try:
            return cls.from_dict(json.loads(text))
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
        except json.JSONDecodeError as error:
            raise InputError(f"{source}: not JSON ({error})") from error

    def to_json(self) -> str:
        """Indented JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def with_layers(self, layers: tuple[LayerConfig, ...]) -> "TransformerConfig":
        """The same model with other layers."""
        return replace(self, encoder=layers)

    @property
    def output_width(self) -> int:
        """Columns of the head's output; of the tokens where there is no head."""
        if isinstance(self.head, ClassificationHead):
            return len(self.head.labels)
        dense = self.head.dense if isinstance(self.head, EmbeddingHead) else ()
        return dense[-1].outputs if dense else self.d_model

    @property
    def formats(self) -> frozenset[str]:
        """The formats of all linears of the layers and of the tables."""
        subs = [sub for layer in self.encoder for sub in (layer.mixer, layer.ffn) if sub is not None]
        linears = {form for sub in subs for form in (sub.input_format, sub.output_format)}
        return frozenset(linears | {self.embedding.tokens_format, self.embedding.positions_format})

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantized."""
        return self.formats == {FLOAT32}

    def multiply_adds(self, *, encoder_only: bool = True) -> int:
        """Multiply-adds of the linears per token (attention scores not counted)."""
        total = 0
        for layer in self.encoder:
            if layer.mixer is not None:
                total += 4 * self.d_model * layer.mixer.width
            if layer.ffn is not None:
                total += 2 * self.d_model * layer.ffn.width
        if not encoder_only and isinstance(self.head, EmbeddingHead):
            total += sum(dense.inputs * dense.outputs for dense in self.head.dense)
        return total


def _known(cls: type, data: Any, where: str) -> dict[str, Any]:
    """`data` as keyword arguments of dataclass `cls`, or an InputError naming every unknown and missing key."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is not an object")
    names = {field.name for field in fields(cls)}
    required = {field.name for field in fields(cls) if field.default is field.default_factory}
    problems = [f"{where} has the unknown field {key!r}" for key in data if key not in names]
    problems += [f"{where} lacks the field {key!r}" for key in sorted(required - set(data))]
    _check(problems)
    return dict(data)


def _read(cls: type, data: Any, where: str, **read: Any) -> Any:
    """A `cls` from `data`, the fields of `read` taken from there."""
    known = {**_known(cls, data, where), **read}
    try:
        return cls(**known)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _list(data: Any, key: str, where: str) -> list[Any]:
    """The list under a key of an object, empty where there is none."""
    found = data.get(key, ()) if isinstance(data, Mapping) else ()
    if not isinstance(found, list | tuple):
        raise InputError(f"{where}.{key} is not a list")
    return list(found)


def _read_text(data: Any) -> TextConfig:
    prompts = _list(data, "prompts", "config.text")
    for pair in prompts:
        if not isinstance(pair, list | tuple) or [type(part) for part in pair] != [str, str]:
            raise InputError("config.text.prompts is not a list of pairs of name and text")
    text: TextConfig = _read(TextConfig, data, "config.text", prompts=tuple(tuple(pair) for pair in prompts))
    return text


def _read_layer(data: Any, where: str) -> LayerConfig:
    known = _known(LayerConfig, data, where)
    mixer, ffn = known["mixer"], known["ffn"]
    return LayerConfig(
        mixer=None if mixer is None else _read(AttentionConfig, mixer, f"{where}.mixer"),
        ffn=None if ffn is None else _read(FeedForwardConfig, ffn, f"{where}.ffn"),
    )


def _read_head(data: Any) -> Head:
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if kind == "embedding":
        items = _list(data, "dense", "config.head")
        dense = tuple(_read(DenseConfig, item, f"config.head.dense[{i}]") for i, item in enumerate(items))
        embedding: EmbeddingHead = _read(EmbeddingHead, data, "config.head", dense=dense)
        return embedding
    if kind == "classification":
        labels = {"labels": tuple(_list(data, "labels", "config.head"))} if "labels" in data else {}
        classification: ClassificationHead = _read(ClassificationHead, data, "config.head", **labels)
        return classification
    raise InputError(f"config.head has the kind {kind!r}, not embedding or classification")
