"""Parity: does the exported graph compute what PyTorch evaluates?

Every export is run on batches of all kinds of shape and padding beside the eager model, and valid tokens are compared.
For int8 the linears compute the same integers, but what float noise is left between PyTorch and onnxruntime
(`transformer.kernels`) may flip a rounding, which then grows from layer to layer, and through the batch's common range
from text to text; so whole models are compared on the user's texts one at a time, by the median relative difference,
beside the distance that quantization itself makes. Linears in blocks leave more float noise, because onnxruntime adds
blocks in an order of its own and takes the zero point away at the end; their roundings flip often enough for graph and
eager model to be two roundings of one float model, which may be as far from each other as from that model.

Linears in half precision round their outputs, by at most u of them (`layer_config.HALVES`), in places that are each
device's own: onnxruntime's CPU computes float16 in float32 and rounds weights alone. Roundings are independent, so that
over n linears they add up to some share of u √n, which is the limit: measured on random models of 1 to 12 layers as
0.13 to 0.35, on all-MiniLM-L6-v2 as 0.29; there a weight that is 5 % off makes 7.3.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import EmbeddingHead, TransformerConfig
from ..transformer.layer_config import BLOCK_BITS, FLOAT32, HALVES
from ..transformer.model import Transformer
from ..transformer.tokenizer import pad
from .bundle import format_of
from .machine import available_threads, require_provider
from .names import MODEL_FILE

Array = NDArray[Any]
FLOAT_LIMIT = 1e-4
INT8_SHARE = 0.2  # of the distance between int8 and fp32
BLOCK_SHARE = 1.0  # the same of models with linears in blocks, or some in half precision
INT8_LIMIT = 0.05  # where that distance is not known
BESIDE_LIMIT = 0.03
TEXTS = 64


@dataclass(frozen=True)
class Parity:
    """How close the graph is to the eager model.

    Attributes:
        max_absolute: greatest difference of a value at a valid token, or in the head's output, over all shapes.
        max_relative: the same of tokens' vectors, relative to their length.
        median_relative: median over the user's texts of the outputs' relative difference; for quantized models without
            texts over rows of random tokens; None for float models without texts.
        quantization_relative: the same between a quantized model and its float original; None for float models.
        alone_vs_beside: greatest 1 - cosine of a text's output alone and beside longer ones; None without texts.
        empty_rows: a row of padding alone gave finite outputs (zero embeddings).
        shapes: batches compared.
        limit: what was allowed, of the quantity `measured`.
        passed: whether all of this held.
    """

    max_absolute: float
    max_relative: float
    median_relative: float | None
    quantization_relative: float | None
    alone_vs_beside: float | None
    empty_rows: bool
    shapes: int
    limit: float
    measured: str
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class _Pair:
    """The eager model and the session on the same batch."""

    def __init__(self, checkpoint: Checkpoint, bundle: Path, provider: str, threads: int | None) -> None:
        self.model = checkpoint.to_torch()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = available_threads(threads)
        options.log_severity_level = 3
        path, providers = str(bundle / MODEL_FILE), [require_provider(provider)]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.names = [output.name for output in self.session.get_outputs()]

    def graph(self, ids: Array, mask: Array) -> dict[str, Array]:
        values = self.session.run(self.names, {"input_ids": ids, "attention_mask": mask})
        return dict(zip(self.names, values, strict=True))

    def eager(self, ids: Array, mask: Array) -> dict[str, Array]:
        return run_eager(self.model, ids, mask)


def run_eager(model: Transformer, ids: Array, mask: Array) -> dict[str, Array]:
    """The eager model's outputs under the graph's names."""
    with torch.inference_mode():
        output = model(torch.from_numpy(ids), torch.from_numpy(mask))
        rows = output.packing.padded(output.hidden).numpy()
    named: dict[str, Array] = {"last_hidden_state": rows}
    if output.result is not None:
        embeds = isinstance(model.config.head, EmbeddingHead)
        named["sentence_embedding" if embeds else "logits"] = output.result.numpy()
    return named


def check_parity(
    checkpoint: Checkpoint,
    bundle: Path,
    *,
    texts: Sequence[str] = (),
    original: Checkpoint | None = None,
    provider: str = "cpu",
    threads: int | None = None,
    seed: int = 0,
) -> Parity:
    """Compare a bundle with the checkpoint it was made from.

    Args:
        checkpoint: what was exported.
        bundle: the bundle's directory.
        texts: the user's texts, of which the first 64 are used.
        original: of a quantized model, the float model before.
        provider: of the session.
        threads: of the session.
        seed: of the random ids.
    """
    pair = _Pair(checkpoint, bundle, provider, threads)
    batches = parity_batches(checkpoint.config, seed)
    absolute, relative, empty = 0.0, 0.0, True
    for ids, mask in batches:
        graph, eager = pair.graph(ids, mask), pair.eager(ids, mask)
        empty = empty and _empty_rows_hold(graph, mask)
        absolute = max([absolute, *(_largest(graph[name] - eager[name]) for name in pair.names)])
        relative = max([relative, *(float(_relative(graph[n], eager[n], mask).max(initial=0)) for n in pair.names)])
    encoded = [ids for ids in checkpoint.text_encoder().encode(list(texts)[:TEXTS]) if ids]
    quantized = format_of(checkpoint.config) != "fp32"
    probes = _valid_rows(batches) if quantized and not encoded else encoded
    median = _median([_output_distance(pair.graph(*one), pair.eager(*one)) for one in _alone(probes)])
    noise = _quantization_noise(pair.model, original, probes) if quantized else None
    beside = _beside(pair, encoded)
    limit, value, measured = FLOAT_LIMIT, absolute, "max_absolute"
    if quantized:
        limit = _quantized_limit(checkpoint.config, noise)
        value, measured = median or 0.0, "median_relative"
    passed = value <= limit and empty and (beside or 0.0) <= BESIDE_LIMIT
    return Parity(absolute, relative, median, noise, beside, empty, len(batches), limit, measured, passed)


def _quantized_limit(config: TransformerConfig, noise: float | None) -> float:
    """What is allowed of `median_relative`; `noise`: the distance to the float original, where that is known."""
    subs = [sub for layer in config.layers for sub in (layer.mixer, layer.ffn) if sub is not None]
    forms = [form for sub in subs for form in (sub.input_format, sub.output_format) if form != FLOAT32]
    if forms and HALVES.keys() >= set(forms):
        return max(HALVES[form] for form in forms) * math.sqrt(len(forms))
    share = BLOCK_SHARE if {*BLOCK_BITS, *HALVES} & set(forms) else INT8_SHARE
    return INT8_LIMIT if noise is None else share * noise


def vocabulary_texts(checkpoint: Checkpoint, count: int = TEXTS, seed: int = 0) -> list[str]:
    """Texts of 2 to 60 random whole words of the tokenizer's vocabulary, for want of the user's own."""
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer)
    ids = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    vocabulary = {text.strip() for text in tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)}
    words = sorted(word for word in vocabulary if len(word) > 1 and word.isalpha()) or sorted(vocabulary)
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(words, size=random.integers(2, 61)).tolist()) for _ in range(count)]


def parity_batches(config: TransformerConfig, seed: int) -> list[tuple[Array, Array]]:
    """Ids and masks of every kind: 1x1, the longest, right, left and interior padding, an empty row, all empty."""
    random = np.random.default_rng(seed)
    longest = config.embedding.positions
    kinds = [(1, 1, "full"), (1, 7, "full"), (1, longest, "full"), (4, 16, "full"), (3, min(40, longest), "right")]
    kinds += [(3, min(40, longest), side) for side in ("left", "interior")]
    kinds += [(32, min(96, longest), "right"), (17, min(64, longest), "interior"), (9, min(33, longest), "empty")]
    kinds += [(2, 5, "empty"), (2, 3, "all empty")]
    batches = []
    for rows, tokens, kind in kinds:
        ids = random.integers(0, config.embedding.vocab_size, (rows, tokens), dtype=np.int64)
        batches.append((ids, _mask(random, rows, tokens, kind)))
    return batches


def _mask(random: np.random.Generator, rows: int, tokens: int, kind: str) -> Array:
    mask = np.ones((rows, tokens), np.int64)
    if kind == "full":
        return mask
    for row, length in enumerate(random.integers(1, tokens + 1, rows)):
        mask[row, length:] = 0
    if kind == "left":
        mask = mask[:, ::-1].copy()
    if kind == "interior":
        mask = random.permuted(mask, axis=1)
    if kind == "empty":
        mask[rows // 2] = 0
    return mask * 0 if kind == "all empty" else mask


def _largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0)) if np.isfinite(values).all() else float("inf")


def _empty_rows_hold(graph: dict[str, Array], mask: Array) -> bool:
    empty = mask.sum(1) == 0
    finite = all(np.isfinite(value).all() for value in graph.values())
    return finite and not np.any(graph.get("sentence_embedding", np.zeros((len(mask), 1)))[empty])


def _relative(graph: Array, eager: Array, mask: Array) -> Array:
    """Length of the difference over length of the eager vector, for each valid token or each row with one."""
    chosen = mask > 0 if eager.ndim == 3 else mask.sum(1) > 0
    lengths = np.maximum(np.linalg.norm(eager[chosen], axis=-1), np.finfo(np.float32).tiny)
    distances: Array = np.linalg.norm(graph[chosen] - eager[chosen], axis=-1) / lengths
    return distances


def _alone(encoded: Sequence[list[int]]) -> list[tuple[Array, Array]]:
    return [pad([ids]) for ids in encoded]


def _valid_rows(batches: Sequence[tuple[Array, Array]]) -> list[list[int]]:
    rows = [row[seen > 0].tolist() for ids, mask in batches for row, seen in zip(ids, mask, strict=True)]
    return [row for row in rows if row][:TEXTS]


def _head_output(outputs: dict[str, Array]) -> Array:
    for name in ("sentence_embedding", "logits"):
        if name in outputs:
            return outputs[name]
    return outputs["last_hidden_state"][:, 0]


def _output_distance(one: dict[str, Array], other: dict[str, Array]) -> float:
    a, b = _head_output(one)[0], _head_output(other)[0]
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _quantization_noise(model: Transformer, original: Checkpoint | None, encoded: Sequence[list[int]]) -> float | None:
    if original is None or not encoded:
        return None
    plain = original.to_torch()
    return _median([_output_distance(run_eager(model, *one), run_eager(plain, *one)) for one in _alone(encoded)])


def _beside(pair: _Pair, encoded: Sequence[list[int]]) -> float | None:
    """Greatest 1 - cosine of outputs of the shorter half alone and in one batch with all."""
    if len(encoded) < 2:
        return None
    together = _head_output(pair.graph(*pad(encoded))).astype(np.float64)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))[: len(encoded) // 2]
    worst = 0.0
    for i in order:
        alone = _head_output(pair.graph(*pad([encoded[i]])))[0].astype(np.float64)
        lengths = float(np.linalg.norm(alone) * np.linalg.norm(together[i]))
        if lengths > 0:
            worst = max(worst, 1 - float(alone @ together[i]) / lengths)
    return worst
