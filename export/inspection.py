"""What is in a model: where its bytes and its multiply-adds are, in which forms, and what that means on this machine.

Reads a slimformer checkpoint, an outside model directory or hub id, or a bundle; the last needs no torch.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from ..transformer.config import (
    FLOAT32,
    INT8_DYNAMIC,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RecurrentConfig,
    TransformerConfig,
)
from ..transformer.errors import InputError
from ..transformer.layer_config import BLOCK, FLOAT16, RANGED
from .accounting import Stored, account, account_bundle, form_of, read_graph
from .contents import graph_file, is_bundle, read_own, stored_bytes
from .external import is_weight
from .kept_picture import LEGEND, kept_table
from .machine import HALF_ON_CPU, advice, has_int8_dot, int8_weight_bits
from .names import OWN_FILE
from .numbers import MISSING, at, count, decimals, listed, megabytes, plain
from .tables import bytes_beside, bytes_lead, bytes_table

TOKENS, POSITIONS, SMALL, HEAD, GRAPH = "token table", "position table", "norms, biases, token types", "head", "graph"
TABLES = {
    "embeddings.tokens": TOKENS,
    "embeddings.positions": POSITIONS,
    "target.tokens": f"target's {TOKENS}",
    "target.positions": f"target's {POSITIONS}",
}
SUBLAYERS = {"mixer": "heads", "cross": "cross_heads", "ffn": "neurons"}  # and their units
BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}  # else 4
FORMATS = tuple(f"{part}_format" for part in SUBLAYERS)
NOTHING = LayerConfig(None, None)
# names of what quantizing adds to a linear
ADDED = (".scale", ".factor", ".input_scale", ".input_zero", ".input_bound")
LARGE_TABLE = 0.3  # share of the bytes from which a float table is worth a line
NARROW = 128  # width up to which an int8 kernel's call costs as much as its arithmetic


Sublayer = AttentionConfig | RecurrentConfig | FeedForwardConfig


@dataclass(frozen=True)
class _Weight:
    """A stored tensor, named as in the state dict."""

    name: str
    form: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * BYTES.get(self.form, 4)

    @property
    def parameters(self) -> int:
        """Elements, what quantizing adds not counted: it leaves a model's parameters as many."""
        if self.name.endswith(ADDED):
            return 0
        in_blocks = self.form == "uint8" and len(self.shape) == 3
        return math.prod(self.shape[:2]) * BLOCK if in_blocks else self.elements


def inspect_model(path: str | Path) -> dict[str, Any]:
    """Sizes in bytes, widths, forms, multiply-adds a token, and advice; JSON-ready.

    Raises:
        InputError: there is no model at `path`, or it is broken.
    """
    if is_bundle(Path(path)):
        return _inspect_bundle(Path(path))
    from ..transformer.loading import load

    checkpoint = load(path)
    weights = [
        _Weight(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in checkpoint.state.items()
    ]
    info = {"kind": "model", "path": str(path), **_describe(checkpoint.config, weights, checkpoint.provenance)}
    tensors = [Stored(item.name, item.form, item.shape, item.bytes) for item in weights]
    info["accounting"] = account(checkpoint.config, tensors, info["bytes"])
    return {**info, "advice": list(_advice(checkpoint.config, info))}


def _inspect_bundle(directory: Path) -> dict[str, Any]:
    own = read_own(directory)
    try:
        config = TransformerConfig.from_dict(own.get("config") or {})
    except (InputError, TypeError) as error:
        raise InputError(f"{directory / OWN_FILE}: {error}") from error
    path = directory / graph_file(config)
    graph = read_graph(path)
    weights = [item for item in _initializers(graph) if is_weight(item.name)]
    info: dict[str, Any] = {"kind": "bundle", "path": str(directory)}
    info |= _describe(config, weights, own.get("provenance") or {}, stored_bytes(directory))
    info |= {key: own.get(key) for key in ("layout", "format", "measured")}
    info["accounting"] = account_bundle(directory, config)
    info["onnx"] = {"operators": _operators(graph), "initializers": _forms(_initializers(graph))}
    return {**info, "advice": list(_advice(config, info))}


def _initializers(graph: onnx.GraphProto) -> list[_Weight]:
    return [_Weight(item.name, form_of(item), tuple(item.dims)) for item in graph.initializer]


def _operators(graph: onnx.GraphProto) -> dict[str, int]:
    """Nodes of each kind, those in branches too, the commonest first."""
    counts: Counter[str] = Counter()
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            counts[node.op_type] += 1
            waiting += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _forms(weights: Sequence[_Weight]) -> dict[str, dict[str, int]]:
    """Tensors and bytes of each number format, the largest first."""
    forms: dict[str, dict[str, int]] = {}
    for weight in weights:
        entry = forms.setdefault(weight.form, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += weight.bytes
    return dict(sorted(forms.items(), key=lambda item: -item[1]["bytes"]))


def _group(name: str, names: Mapping[str, str]) -> str:
    """The part of a model that a tensor of the state dict belongs to."""
    owner, _, kind = name.rpartition(".")
    if owner in TABLES:
        return TABLES[owner]
    if owner.split(".")[0] == "head":
        return HEAD
    sublayer = owner.rpartition(".")[0]
    return names[sublayer] if sublayer in names and kind in ("weight", "scale") else SMALL


def _stacks(config: TransformerConfig) -> dict[str, tuple[LayerConfig, ...]]:
    return {"encoder": config.encoder, "decoder": config.decoder}


def _names(config: TransformerConfig) -> dict[str, str]:
    """What sub-layers are called, by their prefix in the state dict."""
    return {
        f"{stack}.{i}.{part}": _name(stack, i, part, layer)
        for stack, layers in _stacks(config).items()
        for i, layer in enumerate(layers)
        for part in SUBLAYERS
    }


def _name(stack: str, number: int, part: str, layer: LayerConfig) -> str:
    mixer = "attention" if layer.mixer is None else layer.mixer.kind
    return f"{_layer_name(stack, number)} {({'mixer': mixer, 'cross': 'cross-attention', 'ffn': 'FFN'})[part]}"


def _layer_name(stack: str, number: int) -> str:
    return f"layer {number}" if stack == "encoder" else f"{stack} layer {number}"


def _describe(
    config: TransformerConfig, weights: Sequence[_Weight], notes: Mapping[str, Any], stored: int | None = None
) -> dict[str, Any]:
    """What models and bundles have in common; `stored`: bytes of the bundle's files."""
    members: dict[str, list[_Weight]] = {}
    names = _names(config)
    for weight in weights:
        members.setdefault(_group(weight.name, names), []).append(weight)
    sizes = {name: sum(w.bytes for w in group) for name, group in members.items()}
    if stored is not None:
        sizes[GRAPH] = max(stored - sum(sizes.values()), 0)
    total = max(sum(sizes.values()), 1)
    groups = [
        {
            "name": name,
            "bytes": size,
            "share": size / total,
            "parameters": sum(w.parameters for w in members.get(name, [])),
            "formats": sorted({w.form for w in members.get(name, []) if not w.name.endswith((".scale", ".bias"))}),
        }
        for name, size in sizes.items()
    ]
    return {
        "source": notes.get("source"),
        "family": notes.get("family"),
        "int8_weight_bits": notes.get("int8_weight_bits"),
        "d_model": config.d_model,
        "max_length": config.text.max_length,
        "head": config.head.kind if config.head is not None else None,
        "parameters": sum(w.parameters for w in weights),
        "bytes": sum(sizes.values()),
        "multiply_adds": config.multiply_adds(),
        "groups": groups,
        "layers": [
            entry
            for stack, layers in _stacks(config).items()
            for entry in _layers(config.d_model, stack, layers, sizes, _kept(notes.get("kept"), stack))
        ],
        "formats": _forms(weights),
        "kept": notes.get("kept"),
        "kept_of": notes.get("kept_of"),
    }


def _kept(notes: Any, stack: str) -> dict[str, list[Any]]:
    """What `prune` noted of a stack: the original's layers, and units of each, those of encoders at the top."""
    found = at(notes, "decoder") if stack == "decoder" else notes
    return {key: listed(at(found, key)) for key in ("layers", *SUBLAYERS.values())}


def _layers(
    width: int, stack: str, layers: Sequence[LayerConfig], sizes: Mapping[str, int], kept: Mapping[str, list[Any]]
) -> Iterator[dict[str, Any]]:
    """Each layer's widths, forms, bytes and cost, and which of the original's units it has where `kept` says so."""

    def original(key: str, i: int) -> Any:
        return kept[key][i] if len(kept[key]) == len(layers) else None

    for i, layer in enumerate(layers):
        mixer = layer.mixer
        entry: dict[str, Any] = {"stack": stack, "layer": i, "original_layer": original("layers", i)}
        entry["mixer"] = None if mixer is None else mixer.kind
        entry["head_width"] = mixer.head_width if isinstance(mixer, AttentionConfig) else None
        entry["group"] = mixer.group if isinstance(mixer, AttentionConfig) else None
        for part, units in SUBLAYERS.items():
            sub = getattr(layer, part)
            entry |= {
                units: _units(sub),
                f"original_{units}": original(units, i),
                f"{part}_bytes": sizes.get(_name(stack, i, part, layer), 0),
                f"{part}_format": None if sub is None else _format(sub),
                f"{part}_multiply_adds": replace(NOTHING, **{part: sub}).multiply_adds(width),
            }
        yield entry


def _units(sub: Sublayer | None) -> int:
    """Heads or neurons; of a cell, which has neither, 0."""
    if isinstance(sub, AttentionConfig):
        return sub.heads
    return sub.width if isinstance(sub, FeedForwardConfig) else 0


def _format(sub: Sublayer) -> str:
    return " and ".join(dict.fromkeys((sub.input_format, sub.output_format)))


def _advice(config: TransformerConfig, info: Mapping[str, Any]) -> Iterator[str]:
    """This machine's lines, then what this model could gain on it."""
    yield from advice()
    share = next((group["share"] for group in info["groups"] if group["name"] == TOKENS), 0.0)
    if config.embedding.tokens_format == FLOAT32 and share >= LARGE_TABLE:
        yield f"the token table is {100 * share:.0f} % of the file and float32: quantize makes it a quarter"
    formats = {layer[key] for layer in info["layers"] for key in FORMATS} - {None}
    if FLOAT32 in formats and config.d_model <= NARROW:
        yield f"d_model is {config.d_model}: int8 gains little, because calls cost as much as arithmetic; prune first"
    elif FLOAT32 in formats and has_int8_dot():
        yield "the layers are float32 and this CPU multiplies int8 directly: quantize makes them smaller and faster"
    if {INT8_DYNAMIC, *RANGED} & formats and (info["int8_weight_bits"] or 0) > int8_weight_bits():
        yield "the weights have 8 bits and sums of their products saturate on this CPU: quantize here, with 7 bits"
    if FLOAT16 in config.formats:
        yield HALF_ON_CPU
    if config.depends_on_batch:
        yield "a text's result depends a little on those beside it, whose range it shares; that of int8_static does not"
    if info.get("layout") == "padded":
        yield "the layout is padded: on a CPU, batches of mixed lengths run faster when exported with --layout packed"


def render_inspection(info: Mapping[str, Any]) -> str:
    """`inspect_model`'s result as plain text of at most some 110 columns, without a newline at the end."""
    origin = f" of {info['source']}" if info["source"] not in (None, Path(info["path"]).name) else ""
    form = " ".join(str(info[key]) for key in ("format", "layout") if info.get(key))
    blocks = [
        f"{info['path']}: {info['kind']}{origin}{', ' + form if form else ''}\n"
        f"{count(info['parameters'])} parameters, {megabytes(info['bytes'])} MB, {len(info['layers'])} layers, "
        f"d {info['d_model']}, head {plain(info['head'])}, up to {info['max_length']} tokens, "
        f"{count(info['multiply_adds'])} multiply-adds a token",
        _columns(["part", "MB", "share", "parameters", "format"], [_group_row(group) for group in info["groups"]]),
    ]
    if info["layers"]:
        crossed = any(layer["cross_format"] for layer in info["layers"])
        heads = ["layer", "original", "heads", "which", *["cross heads"] * crossed, "neurons", "MB", "multiply-adds"]
        heads += ["mixer", *["cross"] * crossed, "FFN"]
        blocks.append(_columns(heads, [_layer_row(layer, crossed=crossed) for layer in info["layers"]]))
    if picture := kept_table(info["kept"], info["kept_of"]):
        blocks.append(f"{LEGEND}\n{_columns(*picture)}")
    blocks.append(_bytes(info["accounting"]))
    if graph := info.get("onnx"):
        forms = [[f, str(e["tensors"]), megabytes(e["bytes"])] for f, e in graph["initializers"].items()]
        blocks.append(_columns(["initializers", "tensors", "MB"], forms))
        blocks.append(_columns(["operator", "nodes"], [[name, str(n)] for name, n in graph["operators"].items()]))
    blocks += ["\n".join(f"- {line}" for line in info["advice"])] if info["advice"] else []
    return "\n\n".join(blocks)


def _bytes(accounting: Mapping[str, Any]) -> str:
    """Where the bytes are, the second reason of a tensor on a line of its own."""
    rows: list[list[str]] = []
    for row in bytes_table(accounting).rows:
        rows.append([one.text for one in row])
        rows += [[""] * (len(row) - 1) + [row[-1].note]] if row[-1].note else []
    heads = ["tensor", "format", "shape", "MB", "share", "why it is not smaller"]
    lines = [f"where the bytes are: {bytes_lead(accounting)}", _columns(heads, rows)]
    beside = bytes_beside(accounting)
    return "\n".join([*lines, f"not counted: {beside}"] if beside else lines)


def _group_row(group: Mapping[str, Any]) -> list[str]:
    share = decimals(100 * group["share"], 1, " %")
    forms = ", ".join(group["formats"]) or MISSING
    return [group["name"], megabytes(group["bytes"]), share, count(group["parameters"]), forms]


def _layer_row(layer: Mapping[str, Any], *, crossed: bool) -> list[str]:
    parts = [part for part in SUBLAYERS if crossed or part != "cross"]
    size, cost = (sum(layer[f"{part}_{what}"] for part in parts) for what in ("bytes", "multiply_adds"))
    number = str(layer["layer"]) if layer["stack"] == "encoder" else f"{layer['stack']} {layer['layer']}"
    heads = str(layer["heads"]) if layer["mixer"] in (None, "attention") else layer["mixer"]
    if (layer["group"] or 1) > 1:
        heads += f" in groups of {layer['group']}"
    which = [plain(layer["original_layer"]), heads, plain(layer["original_heads"])]
    widths = [*([str(layer["cross_heads"])] if crossed else []), str(layer["neurons"])]
    forms = [layer[f"{part}_format"] or "absent" for part in parts]
    return [number, *which, *widths, megabytes(size), count(cost), *forms]


def _is_number(text: str) -> bool:
    """Whether a cell may stand in a column of numbers; an empty one may."""
    return not text or (text[:1].isdigit() and " and " not in text)


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart; one whose values all begin with a digit is set right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
