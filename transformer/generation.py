"""Decoding: what a decoder writes, token by token, greedily, by beam search or by sampling.

Beam search keeps K running texts; of the 2 K best continuations by summed log-probability those that do not end run
on, and the ends among the best K are finished texts, scored sum / length^length_penalty, the K best of which are kept
(Graves 2012; the length penalty as the `transformers` library has it). A text is done once its K finished ones cannot
be beaten by the best running one at its present length, or, with early stopping, once there are K. When the greatest
length is reached every text ends there.

Sampling takes one number for each step from a counter-based generator in integer arithmetic (the finalizer of
MurmurHash3), the same one for all rows, so that a seed gives the same text in any batch and any runtime; other texts of
one prompt take other seeds.

Every row is decoded by itself: other texts of the batch, their lengths and their ends change nothing but, in int8, the
common range of activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .batching import tensors
from .cache import Cache
from .config import LanguageHead
from .decoding import Decoding, uniform
from .errors import InputError
from .model import Transformer

__all__ = ["Decoding", "Generated", "generate", "uniform"]


@dataclass(frozen=True)
class Generated:
    """What was written.

    Attributes:
        sequences: (B, n_best, T) ids with the end token, without start token and prefix, then padding; best first.
        scores: (B, n_best) sum of log-probabilities / length^length_penalty; -inf where fewer texts were found.
    """

    sequences: Tensor
    scores: Tensor


@torch.inference_mode()
def generate(
    model: Transformer,
    sources: Sequence[Sequence[int]] | None,
    options: Decoding,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    device: str = "cpu",
) -> Generated:
    """Decode a batch.

    Args:
        model: a decoder with a language head; beside an encoder it needs `sources`.
        sources: token ids of the encoder's texts; None for a decoder alone.
        options: how.
        prefixes: token ids that each text goes on from, after the start token; None: from nothing.
        device: where the model is.

    Raises:
        InputError: the model does not decode, or a text is longer than its positions.
    """
    head = model.config.head
    if not isinstance(head, LanguageHead):
        raise InputError("the model does not generate: it has no language head")
    if (sources is None) == bool(model.config.encoder):
        raise InputError("give sources to a decoder beside an encoder, and prefixes alone to a decoder by itself")
    count = len(sources if sources is not None else prefixes or ())
    begun = [[head.start_id, *ids] for ids in (prefixes if prefixes is not None else [[]] * count)]
    if len(begun) != count:
        raise InputError(f"{count} sources and {len(begun)} prefixes: give as many of both")
    _check_lengths(model, sources, begun, options)
    pad_id = model.config.text.pad_id
    if not count or not options.max_new_tokens:
        empty = torch.zeros(count, options.n_best, 0, dtype=torch.int64, device=device)
        return Generated(empty, torch.zeros(count, options.n_best, device=device))
    source = None if sources is None else model.encode(*tensors(sources, pad_id, device))
    ids, mask = tensors(begun, pad_id, device)
    logits, cache = model.start(ids, mask, source)
    occurred = torch.zeros_like(logits, dtype=torch.int64).scatter_add_(1, ids, mask) > 0
    decoder = _Beams if options.beams > 1 else _Single
    return decoder(model, options, head.end_id, pad_id).run(logits, cache, occurred)


def _check_lengths(
    model: Transformer, sources: Sequence[Sequence[int]] | None, begun: Sequence[Sequence[int]], options: Decoding
) -> None:
    limit = model.config.embedding.positions
    longest = max((len(ids) for ids in sources or ()), default=0)
    if longest > limit:
        raise InputError(f"a source has {longest} tokens, the model {limit} positions: cut it")
    limit = model.config.decoder_embedding.positions
    needed = max((len(ids) for ids in begun), default=0) + options.max_new_tokens - 1
    if needed > limit and model.config.decoder_embedding.position_kind != "none":
        raise InputError(
            f"prefix and max_new_tokens {options.max_new_tokens} come to {needed} tokens, the model has {limit} "
            "positions: ask for fewer"
        )


@dataclass
class _Decoder:
    """What both ways share."""

    model: Transformer
    options: Decoding
    end_id: int
    pad_id: int

    def penalized(self, logits: Tensor, occurred: Tensor) -> Tensor:
        """Logits (R, V) with the repetition penalty."""
        if self.options.repetition_penalty == 1.0:
            return logits
        penalty = self.options.repetition_penalty
        return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class _Single(_Decoder):
    """One text a row: greedy search or sampling."""

    def run(self, logits: Tensor, cache: Cache, occurred: Tensor) -> Generated:
        """Go on until each row has ended."""
        rows = len(logits)
        ended = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        score = torch.zeros(rows, device=logits.device)
        written: list[Tensor] = []
        for step in range(self.options.max_new_tokens):
            logits = self.penalized(logits, occurred)
            tokens = self._drawn(logits, step) if self.options.sample else logits.argmax(1)
            chance = logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]
            score = torch.where(ended, score, score + chance)
            written.append(torch.where(ended, self.pad_id, tokens))
            ended = ended | (tokens == self.end_id)
            if bool(ended.all()) or step + 1 == self.options.max_new_tokens:
                break
            occurred = occurred.scatter(1, tokens[:, None], True)
            logits, cache = self.model.step(tokens, cache)
        sequences = torch.stack(written, 1)
        length = _lengths(sequences, self.end_id)
        return Generated(sequences[:, None], (score / length**self.options.length_penalty)[:, None])

    def _drawn(self, logits: Tensor, step: int) -> Tensor:
        """(R, V) -> (R,): the token at which the summed probabilities, greatest first, pass a uniform number."""
        options = self.options
        ordered, order = (logits / options.temperature).sort(stable=True, dim=1, descending=True)
        if options.top_k:
            ordered = ordered[:, : options.top_k]
        chances = ordered.softmax(1)
        kept = chances.cumsum(1) - chances < options.top_p
        sums = torch.where(kept, chances, 0.0).cumsum(1)
        wanted = uniform(options.seed, step) * sums[:, -1]
        place = (sums <= wanted[:, None]).sum(1).clamp(max=sums.shape[1] - 1)
        return order.gather(1, place[:, None])[:, 0]


@dataclass
class _State:
    """B texts with K beams: running ones, finished ones (score -inf where there is none), and who can still gain."""

    running: Tensor  # (B, K, T)
    scores: Tensor  # (B, K)
    finished: Tensor  # (B, K, T)
    best: Tensor  # (B, K)
    open: Tensor  # (B,) bool


class _Beams(_Decoder):
    """K texts a row."""

    def run(self, logits: Tensor, cache: Cache, occurred: Tensor) -> Generated:
        """Go on until no text can gain."""
        options, count, beams = self.options, len(logits), self.options.beams
        every = torch.arange(count, device=logits.device).repeat_interleave(beams)
        logits, cache, occurred = logits[every], cache.take(every), occurred[every]
        nothing = torch.full((count, beams), -torch.inf, device=logits.device)
        texts = torch.full((count, beams, options.max_new_tokens), self.pad_id, device=logits.device)
        state = _State(texts, nothing.clone(), texts.clone(), nothing, nothing[:, 0] < 0)
        state.scores[:, 0] = 0.0
        for step in range(options.max_new_tokens):
            chances = self.penalized(logits, occurred).log_softmax(1)
            state, rows = self._advance(state, chances.view(count, beams, -1), step)
            if step + 1 == options.max_new_tokens or not bool(state.open.any()):
                break
            tokens = state.running[:, :, step].flatten()
            occurred = occurred[rows].scatter(1, tokens[:, None], True)
            logits, cache = self.model.step(tokens, cache.take(rows))
        sequences, scores = state.finished[:, : options.n_best], state.best[:, : options.n_best]
        lengths = torch.where(scores > -torch.inf, _lengths(sequences, self.end_id), 0)
        return Generated(sequences[:, :, : int(lengths.max())], scores)

    def _advance(self, state: _State, chances: Tensor, step: int) -> tuple[_State, Tensor]:
        """Log-probabilities (B, K, V) of the next token -> the state after it, and which row each text came from."""
        count, beams, vocabulary = chances.shape
        options = self.options
        total = (state.scores[:, :, None] + chances).flatten(1)
        scores, places = total.topk(min(2 * beams, total.shape[1]), dim=1)
        origin, tokens = places // vocabulary, places % vocabulary
        texts = state.running.gather(1, origin[:, :, None].expand(-1, -1, state.running.shape[2])).clone()
        texts[:, :, step] = tokens
        last = step + 1 == options.max_new_tokens
        ends = (tokens == self.end_id) | last
        among_best = torch.arange(scores.shape[1], device=scores.device) < beams
        allowed = ends & among_best & state.open[:, None]
        fresh = torch.where(allowed, scores / (step + 1) ** options.length_penalty, -torch.inf)
        finished, best = _best(torch.cat([state.finished, texts], 1), torch.cat([state.best, fresh], 1), beams)
        running_scores, kept = torch.where(ends, -torch.inf, scores).topk(beams, dim=1)
        running = texts.gather(1, kept[:, :, None].expand(-1, -1, texts.shape[2]))
        reachable = running_scores[:, 0] / (step + 1) ** options.length_penalty
        full = best[:, -1] > -torch.inf
        done = full if options.early_stopping else full & (reachable <= best[:, -1])
        first = torch.arange(count, device=scores.device)[:, None] * beams
        rows = (origin.gather(1, kept) + first).flatten()
        return _State(running, running_scores, finished, best, state.open & ~done), rows


def _best(texts: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` texts (B, M, T) of the highest scores (B, M), best first."""
    scores, places = scores.topk(count, dim=1)
    return texts.gather(1, places[:, :, None].expand(-1, -1, texts.shape[2])), scores


def _lengths(sequences: Tensor, end_id: int) -> Tensor:
    """(…, T) -> (…): tokens up to the first end token, that included; without one all of them."""
    ends = sequences == end_id
    first = ends.int().argmax(-1) + 1
    return torch.where(ends.any(-1), first, sequences.shape[-1])
