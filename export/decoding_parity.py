"""Parity of graphs that write: the same tokens as PyTorch writes, greedily and with beams, text by text.

In fp32 every text has to be the same. In int8 the linears compute the same integers, but a rounding that float noise
flips may turn the choice between two tokens that are nearly equal, and with it all that follows.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..transformer.checkpoint import Checkpoint
from ..transformer.generation import Decoding, generate
from .bundle import format_of
from .runtime import load_bundle

TEXTS, TOKENS, BEAMS = 32, 24, 4
INT8_SHARE = 0.9


@dataclass(frozen=True)
class DecodingParity:
    """How alike the graph and the eager model write.

    Attributes:
        texts: how many were written from, each one alone.
        greedy_equal, beams_equal: share of them whose tokens were all the same, greedily and the best of four beams.
        limit: least share that was allowed.
        passed: whether both shares reached it.
    """

    texts: int
    greedy_equal: float
    beams_equal: float
    limit: float
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
    """Compare a bundle that translates with the checkpoint it was made from, on the first 32 of some texts."""
    opened, model = load_bundle(bundle, threads=threads, provider=provider), checkpoint.to_torch()
    encoder = checkpoint.text_encoder()
    sources = [ids for ids in encoder.encode(list(texts)[:TEXTS]) if ids]
    positions = checkpoint.config.decoder_embedding.positions
    shares = []
    for beams in (1, BEAMS):
        options = Decoding(max_new_tokens=min(TOKENS, positions), beams=beams)
        same = 0
        for ids in sources:
            wanted = generate(model, [ids], options).sequences[0, 0].tolist()
            found = opened.write([ids], max_new_tokens=options.max_new_tokens, beams=beams)[0]
            same += found == opened.cut(wanted)
        shares.append(same / max(1, len(sources)))
    limit = 1.0 if format_of(checkpoint.config) == "fp32" else INT8_SHARE
    return DecodingParity(len(sources), shares[0], shares[1], limit, bool(sources) and min(shares) >= limit)
