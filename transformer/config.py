"""What a model is, as data: every width of every layer, the form of every weight, the head and how text enters.

The config validates and never derives: a resolved config reloads exactly as it was written. It needs no torch.
Widths: D model width, H heads, K head width, F FFN width, V vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .errors import InputError
from .head_config import WRITING, ClassificationHead, DenseConfig, EmbeddingHead, Head, LanguageHead
from .layer_config import (
    ACTIVATIONS,
    EMBEDDING_FORMATS,
    FLOAT32,
    GATES,
    INT8_DYNAMIC,
    INT8_ROWS,
    LINEAR_FORMATS,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
    RecurrentConfig,
    check,
    count,
    one_of,
    positive,
    truth,
)

__all__ = [
    "ACTIVATIONS",
    "FLOAT32",
    "INT8_DYNAMIC",
    "INT8_ROWS",
    "AttentionConfig",
    "ClassificationHead",
    "DenseConfig",
    "EmbeddingConfig",
    "EmbeddingHead",
    "FeedForwardConfig",
    "Head",
    "LanguageHead",
    "LayerConfig",
    "RecurrentConfig",
    "TextConfig",
    "TransformerConfig",
]

FORMAT_VERSION = 1
POSITION_KINDS = ("learned", "sinusoidal", "none")
NORM_PLACES = ("post", "pre")


@dataclass(frozen=True)
class EmbeddingConfig:
    """Token, position and token-type tables, summed and normalised.

    Attributes:
        vocab_size: V.
        positions: the greatest number of tokens in a row.
        token_types: rows of that table; 0: there is none.
        position_kind: "learned" (a table), "sinusoidal" (a formula) or "none" (recurrent models count by themselves).
        scaled: whether token vectors are multiplied by sqrt(D) first.
        norm: whether a layer norm follows the sum.
    """

    vocab_size: int
    positions: int
    token_types: int = 0
    tokens_format: str = FLOAT32
    positions_format: str = FLOAT32
    position_kind: str = "learned"
    scaled: bool = False
    norm: bool = True

    def __post_init__(self) -> None:
        check(
            positive("vocab_size", self.vocab_size)
            + positive("positions", self.positions)
            + count("token_types", self.token_types)
            + one_of("tokens_format", self.tokens_format, EMBEDDING_FORMATS)
            + one_of("positions_format", self.positions_format, EMBEDDING_FORMATS)
            + one_of("position_kind", self.position_kind, POSITION_KINDS)
            + truth("scaled", self.scaled)
            + truth("norm", self.norm)
        )


@dataclass(frozen=True)
class TextConfig:
    """How text becomes tokens: the cut (tokens, special ones included) and the prompts put before a text by name."""

    max_length: int
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    pad_id: int = 0

    def __post_init__(self) -> None:
        problems = positive("max_length", self.max_length) + count("pad_id", self.pad_id)
        if self.default_prompt is not None and self.default_prompt not in [name for name, _ in self.prompts]:
            problems.append(f"default_prompt {self.default_prompt!r} is not one of the prompts")
        check(problems)

    def prompt(self, name: str | None = None) -> str:
        """The text to put before an input: prompt `name`, else the default one, else nothing."""
        chosen = self.default_prompt if name is None else name
        prompts = dict(self.prompts)
        if chosen is not None and chosen not in prompts:
            raise InputError(f"no prompt named {chosen!r}; the model has: {', '.join(prompts) or 'none'}")
        return "" if chosen is None else prompts[chosen]


@dataclass(frozen=True)
class TransformerConfig:
    """An encoder, a decoder, or both: embeddings, layers of any widths, head, text.

    Attributes:
        d_model: D.
        embedding: of the encoder's tokens; of a decoder's too, unless `target` is given.
        encoder, decoder: their layers, either of them may be empty.
        text: how text becomes tokens.
        head: what stands on the last layer; decoders have a LanguageHead or none.
        norm_eps: of every norm.
        norm_place: "post" (norm(x + f(x)), as in the original and in BERT) or "pre" (x + f(norm(x))).
        final_norm: whether a norm follows the last layer of the encoder and of the decoder.
        target: of a decoder's tokens beside an encoder that has another table.
    """

    d_model: int
    embedding: EmbeddingConfig
    encoder: tuple[LayerConfig, ...]
    text: TextConfig
    head: Head | None = None
    norm_eps: float = 1e-12
    format_version: int = FORMAT_VERSION
    decoder: tuple[LayerConfig, ...] = ()
    norm_place: str = "post"
    final_norm: bool = False
    target: EmbeddingConfig | None = None

    def __post_init__(self) -> None:
        problems = positive("d_model", self.d_model)
        if self.format_version != FORMAT_VERSION:
            problems.append(f"format_version is {self.format_version}, this slimformer reads {FORMAT_VERSION}")
        if not isinstance(self.norm_eps, float) or not 0 < self.norm_eps < 1:
            problems.append(f"norm_eps is {self.norm_eps!r}, not between 0 and 1")
        problems += one_of("norm_place", self.norm_place, NORM_PLACES) + truth("final_norm", self.final_norm)
        if self.text.max_length > self.embedding.positions:
            problems.append(f"max_length {self.text.max_length} is over the {self.embedding.positions} positions")
        if self.text.pad_id >= self.embedding.vocab_size:
            problems.append(f"pad_id {self.text.pad_id} is not below vocab_size {self.embedding.vocab_size}")
        check(problems)
        check(self._head_problems() + self._layer_problems())

    def _head_problems(self) -> list[str]:
        problems = []
        if isinstance(self.head, EmbeddingHead):
            width = self.d_model
            for dense in self.head.dense:
                if dense.inputs != width:
                    problems.append(f"a Dense map takes {dense.inputs} columns, it is given {width}")
                width = dense.outputs
        if isinstance(self.head, LanguageHead):
            rows = self.decoder_embedding.vocab_size
            ids = {"start_id": self.head.start_id, "end_id": self.head.end_id}
            problems += [f"{name} {i} is not below vocab_size {rows}" for name, i in ids.items() if i >= rows]
            problems += [] if self.decoder else ["a language head stands on a decoder, there is none"]
            if self.head.summarizes and not self.encoder:
                problems.append("a head of summaries needs an encoder to read what is to be summarized, there is none")
        elif self.decoder and self.head is not None:
            problems.append(f"the head {self.head.kind} does not stand on a decoder")
        return problems

    def _layer_problems(self) -> list[str]:
        problems = []
        if self.target is not None and not (self.encoder and self.decoder):
            problems.append("target is the table of a decoder beside an encoder, there are not both")
        without = {"encoder": self.encoder} if self.encoder else {"decoder": self.decoder}
        for name, layers in without.items():
            if any(layer.cross is not None for layer in layers):
                problems.append(f"a layer of the {name} has cross-attention, which has nothing to attend to")
        cells = [layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrentConfig)]
        if any(not cell.project and cell.units != self.d_model for cell in cells):
            problems.append(f"a cell without project has as many units as d_model, {self.d_model}")
        tables = [self.embedding, *([] if self.target is None else [self.target])]
        if self.d_model % 2 and any(table.position_kind == "sinusoidal" for table in tables):
            problems.append(f"sinusoidal positions need an even d_model, it is {self.d_model}")
        return problems

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
        for stack in ("encoder", "decoder"):
            layers = _list(data, stack, "config")
            known[stack] = tuple(_read_layer(layer, f"config.{stack}[{i}]") for i, layer in enumerate(layers))
        target = known.get("target")
        known["target"] = None if target is None else _read(EmbeddingConfig, target, "config.target")
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

    def with_layers(
        self, encoder: tuple[LayerConfig, ...], decoder: tuple[LayerConfig, ...] | None = None
    ) -> "TransformerConfig":
        """The same model with other layers; the decoder's stay where none are given."""
        return replace(self, encoder=encoder, decoder=self.decoder if decoder is None else decoder)

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """Those of the encoder, then those of the decoder."""
        return self.encoder + self.decoder

    @property
    def decoder_embedding(self) -> EmbeddingConfig:
        """The table of the decoder's tokens."""
        return self.embedding if self.target is None else self.target

    @property
    def output_width(self) -> int:
        """Columns of the head's output; of the tokens where there is no head."""
        if isinstance(self.head, ClassificationHead):
            return len(self.head.labels)
        if isinstance(self.head, LanguageHead):
            return self.decoder_embedding.vocab_size
        dense = self.head.dense if isinstance(self.head, EmbeddingHead) else ()
        return dense[-1].outputs if dense else self.d_model

    @property
    def formats(self) -> frozenset[str]:
        """The formats of all linears of the layers and of the tables."""
        subs = [sub for layer in self.layers for sub in (layer.mixer, layer.cross, layer.ffn) if sub is not None]
        linears = {form for sub in subs for form in (sub.input_format, sub.output_format)}
        tables = {self.embedding, self.decoder_embedding}
        forms = {form for table in tables for form in (table.tokens_format, table.positions_format)}
        head = {self.head.format} if isinstance(self.head, LanguageHead) and not self.head.tied else set()
        return frozenset(linears | forms | head)

    @property
    def rounds_activations(self) -> bool:
        """Whether a linear rounds what it is given."""
        return bool(self.formats & set(LINEAR_FORMATS) - {FLOAT32})

    @property
    def depends_on_batch(self) -> bool:
        """Whether a text's result depends a little on those beside it: a range is taken from all of a batch."""
        head, output = self.head, FLOAT32
        if isinstance(head, LanguageHead):
            output = self.decoder_embedding.tokens_format if head.tied else head.format
        return INT8_DYNAMIC in self.formats or output == INT8_ROWS

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantized."""
        return self.formats == {FLOAT32}

    @property
    def continues(self) -> bool:
        """Whether this is a language model: a decoder by itself, which goes on from a text."""
        return isinstance(self.head, LanguageHead) and not self.encoder

    @property
    def encoder_cells(self) -> list[str]:
        """Kinds of the encoder's recurrent cells."""
        return sorted({layer.mixer.kind for layer in self.encoder if isinstance(layer.mixer, RecurrentConfig)})

    def check_encoder(self, work: str) -> None:
        """Raise InputError, naming the work, unless this is an encoder alone."""
        if self.decoder:
            raise InputError(f"{work} takes an encoder, this model has a decoder of {len(self.decoder)} layers")

    def check_attention_encoder(self, work: str) -> None:
        """Raise InputError, naming the work, unless this is an encoder alone whose mixers are attention."""
        self.check_encoder(work)
        if self.encoder_cells:
            raise InputError(f"{work} takes mixers that are attention, this model has {', '.join(self.encoder_cells)}")

    def multiply_adds(self, *, encoder_only: bool = True) -> int:
        """Multiply-adds of the layers' linears per token (attention scores not counted).

        Cross-attention's keys and values count as if source and target had one length. `encoder_only` leaves out what
        stands on the last layer.
        """
        total = sum(layer.multiply_adds(self.d_model) for layer in self.layers)
        if encoder_only or self.head is None:
            return total
        if isinstance(self.head, EmbeddingHead):
            return total + sum(dense.inputs * dense.outputs for dense in self.head.dense)
        return total + (self.d_model * self.output_width if isinstance(self.head, LanguageHead) else 0)


def _known(cls: type, data: Any, where: str) -> dict[str, Any]:
    """`data` as keyword arguments of dataclass `cls`, or an InputError naming every unknown and missing key."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is not an object")
    names = {field.name for field in fields(cls)}
    required = {field.name for field in fields(cls) if field.default is field.default_factory}
    problems = [f"{where} has the unknown field {key!r}" for key in data if key not in names]
    problems += [f"{where} lacks the field {key!r}" for key in sorted(required - set(data))]
    check(problems)
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
    mixer, ffn, cross = known["mixer"], known["ffn"], known.get("cross")
    return LayerConfig(
        mixer=None if mixer is None else _read_mixer(mixer, f"{where}.mixer"),
        ffn=None if ffn is None else _read(FeedForwardConfig, ffn, f"{where}.ffn"),
        cross=None if cross is None else _read(AttentionConfig, cross, f"{where}.cross"),
    )


def _read_mixer(data: Any, where: str) -> MixerConfig:
    kind = data.get("kind", "attention") if isinstance(data, Mapping) else "attention"
    if problems := one_of("mixer kind", kind, ("attention", *GATES)):
        raise InputError(f"{where}: {problems[0]}")
    mixer: MixerConfig = _read(AttentionConfig if kind == "attention" else RecurrentConfig, data, where)
    return mixer


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
    if kind in WRITING:
        language: LanguageHead = _read(LanguageHead, data, "config.head")
        return language
    raise InputError(f"config.head has the kind {kind!r}, not embedding, classification, language or summarization")
