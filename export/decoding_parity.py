"""Parity of graphs that write: the same tokens as PyTorch writes, greedily and with beams, text by text.

The graphs that write a token at a time are compared too, token by token.

In fp32 every text has to be the same. In int8 the linears compute the same integers, but a rounding that float noise
flips (of half precision, one that devices do in other places: `validation`) may turn the choice between two tokens that
are nearly equal, and with it all that follows; so the tokens that the graph writes are given to PyTorch one by one, and
it has to choose the next one of nearly all as the graph did.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..transformer.batching import tensors
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import LanguageHead
from ..transformer.generation import Decoding, generate
from ..transformer.model import Transformer
from .bundle import format_of
from .runtime import load_bundle

TEXTS, TOKENS, BEAMS = 32, 24, 4
INT8_TOKENS = 0.98


@dataclass(frozen=True)
class DecodingParity:
    """How alike the graph and the eager model write.

    Attributes:
        texts: how many were written from, each one alone.
        greedy_equal, beams_equal: share of them whose tokens were all the same, greedily and the best of four beams.
        tokens: how many tokens the graph wrote greedily.
        tokens_equal: share of them that the eager model chooses too, given those before.
        steps_equal: the same of those that the graphs of single tokens wrote.
        limit: least share that was allowed, of the quantities `measured`: greedy_equal, beams_equal and steps_equal in
            fp32, tokens_equal and steps_equal in quantized models.
        measured: their names.
        passed: whether it was reached.
    """

    texts: int
    greedy_equal: float
    beams_equal: float
    tokens: int
    tokens_equal: float
    steps_equal: float
    limit: float
    measured: str
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def check_decoding(
    checkpoint: Checkpoint,
    bundle: Path,
    texts: Sequence[str],
    *,
    provider: str = "cpu",
    threads: int | None = None,
) -> DecodingParity:
    """Compare a bundle that writes with the checkpoint it was made from, on the first 32 of some texts.

    A decoder by itself takes them as prompts, cut to half of its positions.
    """
    opened, model = load_bundle(bundle, threads=threads, provider=provider), checkpoint.to_torch()
    alone, positions = checkpoint.config.continues, checkpoint.config.decoder_embedding.positions
    read = [ids for ids in checkpoint.text_encoder().encode(list(texts)[:TEXTS]) if ids]
    if alone:
        read = [opened.without_end(ids)[: positions // 2] for ids in read]
    most = min(TOKENS, positions - positions // 2 if alone else positions)
    shares = []
    alike = {"graph": _Count(), "steps": _Count()}
    for beams in (1, BEAMS):
        options = Decoding(max_new_tokens=most, beams=beams)
        same = 0
        for ids in read:
            eager = generate(model, None if alone else [ids], options, prefixes=[ids] if alone else None)
            wanted = eager.sequences[0, 0].tolist()
            found = opened.write([ids], max_new_tokens=most, beams=beams)[0]
            same += found == opened.cut(wanted)
            if beams == 1:
                alike["graph"].add(model, ids, found)
                alike["steps"].add(model, ids, list(opened.write_one(ids, max_new_tokens=most)))
        shares.append(same / max(1, len(read)))
    equal, stepped = alike["graph"].share, alike["steps"].share
    if format_of(checkpoint.config) == "fp32":
        limit, measured, value = 1.0, "greedy_equal, beams_equal and steps_equal", min(*shares, stepped)
    else:
        limit, measured, value = INT8_TOKENS, "tokens_equal and steps_equal", min(equal, stepped)
    passed = bool(read) and value >= limit
    written = alike["graph"].written
    return DecodingParity(len(read), shares[0], shares[1], written, equal, stepped, limit, measured, passed)


@dataclass
class _Count:
    """Tokens written, and how many of them the eager model chooses too."""

    written: int = 0
    chosen: int = 0

    def add(self, model: Transformer, read: Sequence[int], tokens: Sequence[int]) -> None:
        self.written += len(tokens)
        self.chosen += _chosen(model, read, tokens)

    @property
    def share(self) -> float:
        return self.chosen / max(1, self.written)


@torch.inference_mode()
def _chosen(model: Transformer, read: Sequence[int], written: Sequence[int]) -> int:
    """How many of some tokens are the model's choice, given the source or the prompt, and the tokens before."""
    head, pad_id = model.config.head, model.config.text.pad_id
    assert isinstance(head, LanguageHead)
    source = model.encode(*tensors([read], pad_id)) if model.config.encoder else None
    begun = [head.start_id, *(read if source is None else ())]
    logits, cache = model.start(*tensors([begun], pad_id), source)
    same = 0
    for place, token in enumerate(written):
        same += int(logits.argmax()) == token
        if place + 1 < len(written):
            logits, cache = model.step(torch.tensor([token]), cache)
    return same
