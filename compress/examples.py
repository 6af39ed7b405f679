"""What an encoder is distilled on: the data's texts, fragments that imitate queries, whole pages, masked copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import ClassificationHead
from ..transformer.data import LabelledData, SearchData
from ..transformer.errors import InputError
from ..transformer.evaluation import PAGE_PROMPTS, QUERY_PROMPTS, prompt_for
from ..transformer.tokenizer import MASK_TOKENS
from .fragments import fragments
from .step import StepContext

if TYPE_CHECKING:
    from .distill import Distill

MASKED_SHARE = 0.15  # of the tokens of a masked copy


@dataclass(frozen=True)
class Examples:
    """Token ids, label indices (-1: none), and how many are fragments, pages and masked copies."""

    ids: list[list[int]]
    labels: list[int]
    fragments: int = 0
    pages: int = 0
    masked: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(one) for one in self.ids]


def gather_examples(options: "Distill", checkpoint: Checkpoint, context: StepContext) -> Examples:
    """The texts to learn from: never a query, never valid or test.

    Raises:
        InputError: masked copies are asked for, and the tokenizer has no mask token.
    """
    texts = list(context.training_texts())
    encoder, data = checkpoint.text_encoder(), context.data
    if isinstance(data, LabelledData) and isinstance(checkpoint.config.head, ClassificationHead):
        places = {label: i for i, label in enumerate(checkpoint.config.head.labels)}
        known = {row.text: places.get(row.label, -1) for row in data.train}
        found = Examples(encoder.encode(texts), [known.get(text, -1) for text in texts])
        return _with_masked(found, len(texts), options, checkpoint, context.seed)
    parts = fragments(texts, share=options.fragments, words=options.fragment_words, seed=context.seed)
    chosen = draw(texts, options.texts or len(texts), context.seed)
    pages = draw([one.text for one in data.pages], options.pages, context.seed) if isinstance(data, SearchData) else []
    config = checkpoint.config
    page, query = (config.text.prompt(prompt_for(config, names)) for names in (PAGE_PROMPTS, QUERY_PROMPTS))
    prompted = [page + text for text in chosen] + [query + part for part in parts] + [page + text for text in pages]
    found = Examples(encoder.encode(prompted), [-1] * len(prompted), len(parts), len(pages))
    return _with_masked(found, len(chosen), options, checkpoint, context.seed)


def draw(texts: Sequence[str], most: int, seed: int) -> list[str]:
    """At most `most` of the texts, by seed."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [texts[i] for i in order[:most]]


def masked_copy(ids: Sequence[int], kept: set[int], mask: int, random: np.random.Generator) -> list[int]:
    """Token ids of which about `MASKED_SHARE` are the mask token's, those of `kept` (start and end) excepted.

    Tang et al. 2019, "Distilling task-specific knowledge from BERT into simple neural networks", section 3.3.
    """
    hidden = random.random(len(ids)) < MASKED_SHARE
    return [mask if gone and one not in kept else one for one, gone in zip(ids, hidden, strict=True)]


def _with_masked(examples: Examples, texts: int, options: "Distill", checkpoint: Checkpoint, seed: int) -> Examples:
    """A masked copy, without a label, of a share of the first `texts` examples; one that masks nothing is left out."""
    if not options.masked:
        return examples
    encoder = checkpoint.text_encoder()
    if encoder.mask_id is None:
        raise InputError(f"distill: masked needs a mask token ({' or '.join(MASK_TOKENS)}), and the tokenizer has none")
    around = set(encoder.encode([""])[0])
    random = np.random.default_rng([seed, 1])
    drawn = [one for one in examples.ids[:texts] if random.random() < options.masked]
    copies = [(one, masked_copy(one, around, encoder.mask_id, random)) for one in drawn]
    new = [copy for one, copy in copies if copy != one]
    labels = [*examples.labels, *[-1] * len(new)]
    return Examples([*examples.ids, *new], labels, examples.fragments, examples.pages, len(new))
