"""How to decode, as data, and the numbers of the draws.

It needs no torch, so that what serves refuses what training refuses, in the same words, and draws the same tokens.
"""

from dataclasses import dataclass

from .errors import InputError

MASK32 = 0xFFFFFFFF  # the seeds there are, and the numbers of the draws
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: numbers in a row become unlike each other
FACTORS = (0x85EBCA6B, 0xC2B2AE35)  # of MurmurHash3's finalizer


@dataclass(frozen=True)
class Decoding:
    """How to decode.

    Attributes:
        max_new_tokens: greatest number of tokens written, the end token included.
        beams: K; 1 is greedy search.
        length_penalty: exponent of the length that a finished text's score is divided by; above 0 favours long ones.
        early_stopping: whether K finished texts are enough.
        n_best: texts returned, at most K.
        sample: draw tokens instead of taking the best (with one beam).
        temperature, top_k, top_p: logits are divided by the first; then the `top_k` most probable tokens are kept (0:
            all), and of these the fewest that together have the probability `top_p`.
        seed: of the draws.
        repetition_penalty: logits of tokens that occurred before are divided by it where positive, else multiplied
            (Keskar et al. 2019, section 4.1).
    """

    max_new_tokens: int = 128
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    n_best: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if self.max_new_tokens < 0:
            problems.append(f"max_new_tokens is {self.max_new_tokens}, not at least 0")
        if self.beams < 1 or not 1 <= self.n_best <= self.beams:
            problems.append(f"n_best {self.n_best} of {self.beams} beams: both at least 1, n_best at most beams")
        if self.sample and self.beams > 1:
            problems.append(f"sample draws one text, beams is {self.beams}: give one of the two")
        if not self.temperature > 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            problems.append("temperature must be above 0, top_p above 0 and at most 1, top_k not below 0")
        if not self.repetition_penalty > 0:
            problems.append(f"repetition_penalty is {self.repetition_penalty}, not above 0")
        if not 0 <= self.seed <= MASK32:
            problems.append(f"seed is {self.seed}, not between 0 and {MASK32}")
        if problems:
            raise InputError("decoding: " + "; ".join(problems))


def uniform(seed: int, step: int) -> float:
    """A number from 0 to below 1 for a step: 24 bits of hash(hash(seed) + step)."""
    return (_mixed(_mixed(seed) + step) >> 8) / 2**24


def _mixed(x: int) -> int:
    """MurmurHash3's finalizer of 32 bits, the golden ratio added first so that 0 does not stay 0."""
    x = (x + GOLDEN) & MASK32
    x ^= x >> 16
    x = (x * FACTORS[0]) & MASK32
    x ^= x >> 13
    x = (x * FACTORS[1]) & MASK32
    return x ^ (x >> 16)
