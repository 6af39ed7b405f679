"""What one layer is, as data: its mixer, its cross-attention, its FFN, and the form of their weights.

Widths: D model width, H heads, G heads of keys and values, K head width, F FFN width, U units of a recurrent cell.
"""

from dataclasses import dataclass

from .errors import InputError

FLOAT32 = "float32"
INT8_DYNAMIC = "int8_dynamic"  # weights in int8, activations by their range at run time
INT8_STATIC = "int8_static"  # weights in int8, activations by a range found in calibration
INT8_PER_TOKEN = "int8_per_token"  # weights in int8, activations by each token's greatest value at run time
INT8_BLOCKS = "int8_blocks"  # weights in blocks of 8 bits, each with a scale
INT4_BLOCKS = "int4_blocks"  # the same of 4 bits
INT8_ROWS = "int8_rows"
FLOAT16 = "float16"  # weights, activations and products of 16 bits
BFLOAT16 = "bfloat16"  # the same with float32's range
RANGED = (INT8_STATIC, INT8_PER_TOKEN)  # what their inputs reach is found in calibration
BLOCK = 32  # columns that share a scale
BLOCK_BITS = {INT8_BLOCKS: 8, INT4_BLOCKS: 4}
HALVES = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}  # and the greatest relative error of rounding to them
LINEAR_FORMATS = (FLOAT32, INT8_DYNAMIC, *RANGED, *BLOCK_BITS, *HALVES)
EMBEDDING_FORMATS = (FLOAT32, INT8_ROWS)
ACTIVATIONS = ("gelu", "relu", "gelu_tanh", "silu", "tanh")
GATES = {"rnn": 1, "lstm": 4, "gru": 3, "ssru": 2}  # columns of a cell's input linear, in units


def check(problems: list[str]) -> None:
    """Raise InputError where there are problems."""
    if problems:
        raise InputError("; ".join(problems))


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    """The problem of a value that is not one of those allowed."""
    return [] if value in allowed else [f"{name} is {value!r}, not one of {', '.join(allowed)}"]


def positive(name: str, value: int) -> list[str]:
    """The problem of what is no whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return [f"{name} is {value!r}, not a whole number of at least 1"]
    return []


def count(name: str, value: int) -> list[str]:
    """The problem of what is no whole number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return [f"{name} is {value!r}, not a whole number of at least 0"]
    return []


def truth(name: str, value: bool) -> list[str]:
    """The problem of what is neither true nor false."""
    return [] if isinstance(value, bool) else [f"{name} is {value!r}, not true or false"]


@dataclass(frozen=True)
class AttentionConfig:
    """Full attention: `heads` heads of `head_width`, of any product; formats of the linears before and after them.

    `group` heads beside each other share their keys and values (grouped-query attention, Ainslie et al. 2023): 1 in the
    original, all of them in multi-query attention.
    """

    heads: int
    head_width: int
    input_format: str = FLOAT32
    output_format: str = FLOAT32
    kind: str = "attention"
    group: int = 1

    def __post_init__(self) -> None:
        problems = positive("heads", self.heads) + positive("group", self.group)
        if not problems and self.heads % self.group:
            problems = [f"{self.heads} heads do not go into groups of {self.group}"]
        check(
            problems
            + positive("head_width", self.head_width)
            + one_of("input_format", self.input_format, LINEAR_FORMATS)
            + one_of("output_format", self.output_format, LINEAR_FORMATS)
            + one_of("mixer kind", self.kind, ("attention",))
        )

    @property
    def width(self) -> int:
        """Columns of the concatenated heads, H * K."""
        return self.heads * self.head_width

    @property
    def groups(self) -> int:
        """Heads of keys and of values, G."""
        return self.heads // self.group

    @property
    def key_width(self) -> int:
        """Columns of the keys, and of the values, G * K."""
        return self.groups * self.head_width


@dataclass(frozen=True)
class RecurrentConfig:
    """A recurrent cell of `units`, read from left to right: `kind` rnn, lstm, gru or ssru.

    `project` puts a linear (U -> D) behind the cell; without it U must be D.
    """

    kind: str
    units: int
    project: bool = True
    input_format: str = FLOAT32
    output_format: str = FLOAT32

    def __post_init__(self) -> None:
        check(
            one_of("mixer kind", self.kind, tuple(GATES))
            + positive("units", self.units)
            + truth("project", self.project)
            + one_of("input_format", self.input_format, LINEAR_FORMATS)
            + one_of("output_format", self.output_format, LINEAR_FORMATS)
        )

    def multiply_adds(self, width: int) -> int:
        """Of its linears per token, for a model of width D; SSRU has none from unit to unit."""
        between = 0 if self.kind == "ssru" else self.units
        return GATES[self.kind] * self.units * (width + between) + self.project * self.units * width


MixerConfig = AttentionConfig | RecurrentConfig


@dataclass(frozen=True)
class FeedForwardConfig:
    """A position-wise FFN of `width` neurons."""

    width: int
    activation: str = "gelu"
    input_format: str = FLOAT32
    output_format: str = FLOAT32

    def __post_init__(self) -> None:
        check(
            positive("FFN width", self.width)
            + one_of("activation", self.activation, ACTIVATIONS)
            + one_of("input_format", self.input_format, LINEAR_FORMATS)
            + one_of("output_format", self.output_format, LINEAR_FORMATS)
        )


@dataclass(frozen=True)
class LayerConfig:
    """One layer. An absent sub-layer (None) keeps its norm and a bias (D,) in place of its output.

    `cross` is attention to the encoder's tokens: a sub-layer that the layers of a decoder beside an encoder have.
    """

    mixer: MixerConfig | None
    ffn: FeedForwardConfig | None
    cross: AttentionConfig | None = None

    @property
    def attention(self) -> AttentionConfig | None:
        """The mixer, for what works on attention alone; InputError where it is a recurrent cell."""
        if isinstance(self.mixer, RecurrentConfig):
            raise InputError(f"this works on attention, not on a mixer of the kind {self.mixer.kind}")
        return self.mixer

    def multiply_adds(self, width: int) -> int:
        """Of its linears per token, for a model of width D."""
        total = 0 if self.ffn is None else 2 * width * self.ffn.width
        for attention in (self.mixer, self.cross):
            if isinstance(attention, AttentionConfig):
                total += 2 * width * (attention.width + attention.key_width)
        if isinstance(self.mixer, RecurrentConfig):
            total += self.mixer.multiply_adds(width)
        return total
