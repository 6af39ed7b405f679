"""Where the bytes of a model are: every tensor over 1 % of them, and why it is not smaller; the rest in a line or two.

Of a bundle the whole is what `stored_bytes` counts, all files in onnx/. A tensor there counts once, however many graphs
name it and however many places of the model use it. What is in no tensor is the graphs': nodes, constants, and the gaps
that align tensors. So the tensors, the smaller ones together and the graphs add up to the whole.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ..transformer.config import EmbeddingConfig, LanguageHead, RecurrentConfig, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.layer_config import (
    BLOCK,
    FLOAT32,
    HALVES,
    INT4_BLOCKS,
    INT8_BLOCKS,
    INT8_DYNAMIC,
    INT8_ROWS,
    RANGED,
)
from .contents import stored_bytes
from .external import is_weight
from .names import MODEL_FILE

OVER = 0.01  # share of the whole above which a tensor is listed
INPUTS = ("qkv", "q", "k", "v", "kv", "inputs", "up")  # linears before a sub-layer's middle
OUTPUTS = ("out", "down")  # and after it


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored; `graph`: the file of the graph whose constant it is, empty for the model's own."""

    name: str
    form: str
    shape: tuple[int, ...]
    bytes: int
    graph: str = ""


@dataclass(frozen=True)
class Words:
    """What is said of a format: why its weights are not smaller, what its scales are, how numbers are packed."""

    weight: str
    scale: str = "one for each row of the weight"
    packed: str = ""


EIGHT_BITS = "8 bits: 4-bit blocks would take 5/8, and lose more"  # 16 bytes and a float scale where there were 32
UNEVEN = "8 bits: its {} columns are not whole blocks of 32, as 4 bits need"
OF_BLOCKS = "one for each block of the weight"
FORMATS = {
    FLOAT32: Words("not quantized: quantize makes it a quarter"),
    INT8_DYNAMIC: Words(EIGHT_BITS),
    **dict.fromkeys(RANGED, Words(EIGHT_BITS)),
    INT8_BLOCKS: Words("8 bits: 4-bit blocks would halve it, and lose more", OF_BLOCKS, "blocks of 8 bits"),
    INT4_BLOCKS: Words("4 bits: no format has fewer", OF_BLOCKS, "blocks of 4 bits"),
    INT8_ROWS: Words("8 bits: no format of tables has fewer"),
    **dict.fromkeys(HALVES, Words("16 bits: int8 would halve it, and lose more")),
}


def account(
    config: TransformerConfig,
    tensors: Iterable[Stored],
    whole: int,
    *,
    of: str = "all tensors",
    graphs: int = 0,
    beside: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """What is listed of `tensors`, the largest first, and the rest, in bytes and shares of `whole`; JSON-ready.

    Args:
        config: the model's.
        tensors: those of the model, and the graphs' constants, each given once.
        whole: bytes of which shares are told.
        of: what these are bytes of.
        graphs: how many files of graphs are in the whole.
        beside: bytes of the files that are not in it.
    """
    others, reasons = dict(beside or {}), _Reasons(config)
    found = sorted(tensors, key=lambda item: (-item.bytes, _in_order(item.name)))
    large = [item for item in found if _share(item.bytes, whole) > OVER]
    small = [item for item in found if _share(item.bytes, whole) <= OVER and not item.graph]
    listed, rest = (sum(item.bytes for item in items) for items in (large, small))
    return {
        "of": of,
        "bytes": whole,
        "over": OVER,
        "tensors": [
            {
                "name": f"{item.name} ({item.graph})" if item.graph else item.name,
                "format": reasons.form(item),
                "shape": list(item.shape),
                **_part(item.bytes, whole),
                "why": reasons.why(item),
            }
            for item in large
        ],
        "smaller": {"tensors": len(small), **_part(rest, whole)},
        "graphs": {"files": graphs, **_part(max(whole - listed - rest, 0), whole)},
        "beside": {
            "files": len(others),
            "bytes": sum(others.values()),
            "largest": max(others, key=lambda name: others[name], default=None),
        },
    }


def _in_order(name: str) -> str:
    """The name with its numbers so that layer 10 comes after layer 9."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _part(size: int, whole: int) -> dict[str, Any]:
    return {"bytes": size, "share": _share(size, whole)}


def _share(size: int, whole: int) -> float:
    return size / max(whole, 1)


def account_bundle(directory: Path, config: TransformerConfig) -> dict[str, Any]:
    """`account` of a bundle's tensors.

    Raises:
        InputError: a graph cannot be read.
    """
    folder = (directory / MODEL_FILE).parent
    graphs = sorted(folder.glob("*.onnx"))
    others = [file for file in sorted(directory.rglob("*")) if file.is_file() and file.parent != folder]
    return account(
        config,
        _stored(graphs),
        stored_bytes(directory),
        of=f"all files in {folder.name}/",
        graphs=len(graphs),
        beside={file.relative_to(directory).as_posix(): file.stat().st_size for file in others},
    )


def read_graph(path: Path) -> onnx.GraphProto:
    """The graph of an ONNX file, without the tensors that lie beside it, or an InputError."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # protobuf's DecodeError, a class of its C extension
        raise InputError(f"{path}: not an ONNX model ({error}); export the bundle again") from error
    return model.graph


def form_of(item: onnx.TensorProto) -> str:
    """The name of its elements' type."""
    return str(onnx.helper.tensor_dtype_to_np_dtype(item.data_type))


def _stored(graphs: Iterable[Path]) -> list[Stored]:
    """The tensors of all graphs; what several read from one place of a file is there once."""
    found: dict[tuple[str, ...], Stored] = {}
    for path in graphs:
        for item in read_graph(path).initializer:
            outside = {entry.key: entry.value for entry in item.external_data}
            place = tuple(outside.get(key, "") for key in ("location", "offset", "length"))
            size = int(outside.get("length") or len(item.raw_data) or _unpacked_bytes(item))
            graph = "" if is_weight(item.name) else path.name
            tensor = Stored(item.name, form_of(item), tuple(item.dims), size, graph)
            found.setdefault(place if outside else (path.name, item.name), tensor)
    return list(found.values())


def _unpacked_bytes(item: onnx.TensorProto) -> int:
    """Those of a tensor whose numbers are stored one by one."""
    size: int = math.prod(item.dims) * onnx.helper.tensor_dtype_to_np_dtype(item.data_type).itemsize
    return size


class _Reasons:
    """What a model's config says of its tensors."""

    def __init__(self, config: TransformerConfig) -> None:
        matrices = list(_matrices(config))
        self.formats = {owner: form for owner, form, _ in matrices}
        self.columns = {owner: columns for owner, _, columns in matrices}
        self.shared = _shared(config)

    def form(self, item: Stored) -> str:
        """The elements' type, and what they are packed to where an element is no number of the weight."""
        owner, _, kind = item.name.rpartition(".")
        return f"{item.form} {self._words(owner).packed}".strip() if kind == "weight" else item.form

    def why(self, item: Stored) -> str:
        """Why it is not smaller, in a few words; "; " parts them from those on a table's other uses."""
        owner, _, kind = item.name.rpartition(".")
        if item.graph:
            return "a constant of the graph"
        if owner not in self.formats or (kind == "bias" and self.formats[owner] not in HALVES):
            return f"stays {item.form}: {_left(owner, kind)}"
        words = self._words(owner)
        if kind == "weight":
            uneven = words.weight == EIGHT_BITS and self.columns[owner] % BLOCK
            reason = UNEVEN.format(self.columns[owner]) if uneven else words.weight
            return "; ".join([reason, *self.shared.get(owner, [])])
        return f"{item.form}: {words.scale if kind == 'scale' else f'part of {self.formats[owner]}'}"

    def _words(self, owner: str) -> Words:
        """Those on the format of a linear or table, on what has none as on float32."""
        form = self.formats.get(owner, FLOAT32)
        return FORMATS.get(form) or Words(f"stored as {form}", f"part of {form}", f"({form})")


def _left(owner: str, kind: str) -> str:
    """Why quantize leaves a tensor as it is; see `transformer.quantization`."""
    if kind == "sinusoids":
        return "positions by formula, which quantize leaves"
    if owner.endswith(".recur") and kind == "weight":
        return "it runs at every token, and its errors add up"
    if owner.startswith("head.") and kind == "weight":
        return "quantize leaves heads, which run once a text"
    return "quantize leaves norms, biases and token types"


def _matrices(config: TransformerConfig) -> Iterable[tuple[str, str, int]]:
    """The prefix in the state dict of every linear and table that has a format, the format, and its columns."""
    width = config.d_model
    for prefix, table in _tables(config).items():
        yield f"{prefix}.tokens", table.tokens_format, width
        if table.position_kind == "learned":
            yield f"{prefix}.positions", table.positions_format, width
    if isinstance(config.head, LanguageHead):
        yield "head.tokens", config.head.format, width
    for stack, layers in (("encoder", config.encoder), ("decoder", config.decoder)):
        for i, layer in enumerate(layers):
            for part in ("mixer", "cross", "ffn"):
                if (sub := getattr(layer, part)) is not None:
                    middle = sub.units if isinstance(sub, RecurrentConfig) else sub.width
                    yield from ((f"{stack}.{i}.{part}.{name}", sub.input_format, width) for name in INPUTS)
                    yield from ((f"{stack}.{i}.{part}.{name}", sub.output_format, middle) for name in OUTPUTS)


def _tables(config: TransformerConfig) -> dict[str, EmbeddingConfig]:
    return {"embeddings": config.embedding, **({} if config.target is None else {"target": config.target})}


def _shared(config: TransformerConfig) -> dict[str, list[str]]:
    """What is said of the table of a decoder's tokens where the encoder or the output layer has the same."""
    uses = ["the decoder's table"] if config.target is None and config.encoder and config.decoder else []
    uses += ["the output layer"] if isinstance(config.head, LanguageHead) and config.head.tied else []
    table = "embeddings.tokens" if config.target is None else "target.tokens"
    return {table: [f"also {' and '.join(uses)}: stored once"]} if uses else {}
