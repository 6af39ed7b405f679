"""Distill: train the (pruned) student to give what the untouched model, its teacher, gives.

Embedders learn the teacher's vectors (cosine), the similarities between the texts of a batch (where the teacher's index
is kept, between each text by the student and all by the teacher), where `hidden` is set, the last states of all tokens
(through a learned linear map, or by centered kernel alignment), and where `relations` is, how alike the queries, keys
and values of a text's tokens are among themselves: there widths and heads may differ. Classifiers learn the teacher's
logits and the labels of the training rows. The teacher runs once; its outputs are read from disk after that.
Translators learn what their teacher writes, language models texts (`distill_writers`); what is said of translators
holds for summarizers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..export.machine import int8_weight_bits
from ..transformer.batching import tensors
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import ClassificationHead, EmbeddingHead, LanguageHead, TransformerConfig
from ..transformer.data import LabelledData, SearchData
from ..transformer.errors import InputError
from ..transformer.evaluation import PAGE_PROMPTS, QUERY_PROMPTS, prompt_for
from ..transformer.layer_config import GATES, INT8_DYNAMIC, one_of
from ..transformer.model import Output, Transformer
from ..transformer.training import FLOAT32, TrainingOptions
from ..transformer.zeros import keep_zeros, sparse_linears
from .awareness import AWARE_FORMATS, make_aware
from .distill_writers import distill_writer
from .fragments import fragments
from .losses import (
    cka_loss,
    cosine_loss,
    hidden_loss,
    index_loss,
    label_loss,
    logits_loss,
    nested_loss,
    similarity_loss,
)
from .quantize import bits_problem
from .relations import Relations, last_attention, layer_of
from .step import StepContext, StepResult
from .student import Shaper, train_student
from .teacher import Targets, teach

BY_MAP, BY_CKA = "map", "cka"


@dataclass(frozen=True)
class Distill:
    """Options of the step.

    Attributes:
        minutes: how long to train (the teacher's pass not counted); or
        steps: how many optimizer steps.
        lr: peak learning rate.
        batch_tokens: greatest number of tokens in a batch.
        accumulate: batches averaged into one step.
        warmup, weight_decay, clip, precision: as in `TrainingOptions`.
        cosine, similarity, hidden, relations: weights of the losses of embedders; the last two also apply to
            classifiers.
        nested: numbers of first columns by which the student's vectors are to be good alone, so that they can be cut
            there (embedders; `losses.nested_loss`, of `similarity`'s weight).
        hidden_by: how the last states of all tokens are compared: "map", by squared error behind a linear map to the
            teacher's width that is learnt too, or "cka", by centered kernel alignment, which needs none.
        relation_heads: into how many heads queries, keys and values are cut for `relations`; 0: as many as the
            teacher's layer has heads of keys.
        relation_layer: the teacher's layer whose relations are learnt, from 0; None: its last with attention.
        logits, labels: weights of the losses of classifiers, and of models that write: there labels are the tokens.
        temperature: of the logits.
        dropout: of the student's embeddings and sub-layers.
        beams: translators: their targets are the teacher's best of so many beams; 0: the references.
        smoothing: models that write: share of the labels' loss that lies on all tokens evenly.
        mixer: models that write: a cell, "rnn", "lstm", "gru" or "ssru", that takes the place of self-attention in the
            student's decoder before it learns; empty: none.
        quantization_aware: whether the student's linears compute as they will in int8 (`awareness`): for recipes in
            which a quantize step follows.
        aware_of: the format that they compute in then: "int8_dynamic", or "int8_static" (each linear's range of
            activations moves with the batches). Quantize, whose `format` is to be the same, finds ranges of its own.
        bits: of weights there, as of Quantize.
        fragments: fragments to draw for each text, imitating queries (embedders; 0: none).
        fragment_words: fewest and most words of a fragment.
        texts: greatest number of the data's texts to learn from, drawn by seed (0: all; fragments come from all).
        pages: greatest number of whole pages among the texts, where the data has pages.
    """

    minutes: float | None = None
    steps: int | None = None
    lr: float = 3e-4
    batch_tokens: int = 1536
    accumulate: int = 1
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: str = FLOAT32
    cosine: float = 1.0
    similarity: float = 1.0
    hidden: float = 0.0
    hidden_by: str = BY_MAP
    relations: float = 0.0
    nested: tuple[int, ...] = ()
    relation_heads: int = 0
    relation_layer: int | None = None
    logits: float = 1.0
    labels: float = 0.5
    temperature: float = 2.0
    dropout: float = 0.0
    beams: int = 4
    smoothing: float = 0.0
    mixer: str = ""
    quantization_aware: bool = False
    aware_of: str = INT8_DYNAMIC
    bits: int = 0
    fragments: float = 0.25
    fragment_words: tuple[int, int] = (2, 4)
    texts: int = 0
    pages: int = 1200

    name: ClassVar[str] = "distill"

    def __post_init__(self) -> None:
        for name in ("fragment_words", "nested"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a recipe gives a list
        if self.minutes is None and self.steps is None:
            object.__setattr__(self, "minutes", 10.0)
        low, high = self.fragment_words
        problems = [] if 1 <= low <= high else [f"fragment_words {low} to {high} is not a range from 1 up"]
        weights = ("cosine", "similarity", "hidden", "relations", "logits", "labels")
        counts = ("relation_heads", "fragments", "texts", "pages", "beams")
        problems += [f"{n} is {getattr(self, n)}, below 0" for n in (*weights, *counts) if getattr(self, n) < 0]
        problems += one_of("hidden_by", self.hidden_by, (BY_MAP, BY_CKA))
        if self.hidden_by != BY_MAP and not self.hidden:
            problems.append(f"hidden_by is {self.hidden_by!r}, of hidden, whose weight is 0: set it")
        if not self.relations and (self.relation_heads or self.relation_layer is not None):
            problems.append("relation_heads and relation_layer are of relations, whose weight is 0: set it")
        if list(self.nested) != sorted({m for m in self.nested if m > 0}):
            problems.append(f"nested is {list(self.nested)}, not rising whole numbers from 1 up, such as [64, 128]")
        if self.nested and not self.similarity:
            problems.append("nested has the weight of similarity, which is 0: set it")
        if self.temperature <= 0:
            problems.append(f"temperature is {self.temperature}, not above 0")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, not from 0 to below 1")
        if self.mixer:
            problems += one_of("mixer", self.mixer, tuple(GATES))
        problems += one_of("aware_of", self.aware_of, AWARE_FORMATS)
        if self.aware_of != INT8_DYNAMIC and not self.quantization_aware:
            problems.append(f"aware_of is {self.aware_of!r} and quantization_aware is false: set it to true")
        if problem := bits_problem(self.bits):
            problems.append(problem)
        if self.batch_tokens < 1:
            problems.append(f"batch_tokens is {self.batch_tokens}, not at least 1")
        if problems:
            raise InputError("distill: " + "; ".join(problems))
        self.training(0)

    def training(self, seed: int) -> TrainingOptions:
        """The loop's options."""
        names = ("lr", "minutes", "steps", "warmup", "weight_decay", "clip", "accumulate", "precision")
        return TrainingOptions(**{name: getattr(self, name) for name in names}, seed=seed)

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: the model is float and has a head to learn with."""
        if not config.is_float:
            raise InputError("distill: the model is int8 already; put distill before quantize")
        if self.nested and not isinstance(config.head, EmbeddingHead):
            raise InputError("distill: nested is for vectors, and the model gives none: leave it out")
        if self.nested and self.nested[-1] >= config.output_width:
            width = config.output_width
            raise InputError(f"distill: nested has {self.nested[-1]}, and the vectors have {width} columns: give fewer")
        if isinstance(config.head, LanguageHead):
            self._check_writer(config)
        else:
            self._check_encoder(config)

    def _check_encoder(self, config: TransformerConfig) -> None:
        config.check_encoder("distill")
        if self.mixer:
            raise InputError(f"distill: mixer is {self.mixer!r}, which is for decoders, and the model has none")
        if config.head is None:
            raise InputError("distill: the model has no head (neither embedding nor classifier) to learn with")
        if self.relations:
            last_attention(config)

    def _check_writer(self, config: TransformerConfig) -> None:
        for name in ("hidden", "relations"):
            if getattr(self, name):
                raise InputError(f"distill: {name} is for encoders; a model that writes learns by labels and logits")
        if not self.labels and not self.logits:
            raise InputError("distill: labels and logits are both 0: nothing is left to learn")

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """Return the trained student.

        Raises:
            InputError: the student is int8, has no head, or its head does not fit the teacher's.
        """
        return self.shaped(checkpoint, context)

    def shaped(self, checkpoint: Checkpoint, context: StepContext, shaper: Shaper | None = None) -> StepResult:
        """The same while `shaper` changes what the student computes; the weights are those of the whole student."""
        teacher = context.teacher or checkpoint
        self.check(checkpoint.config)
        if isinstance(checkpoint.config.head, LanguageHead):
            return distill_writer(self, checkpoint, context, shaper)
        _check_heads(checkpoint, teacher)
        if checkpoint.tokenizer != teacher.tokenizer:
            raise InputError("distill: the student has not the teacher's vocabulary: put trim after distill")
        if context.keep_index:
            check_index(checkpoint, teacher)
            if self.nested:
                raise InputError(
                    "distill: nested is for vectors that are cut, and --keep-index keeps the pages' vectors of a model "
                    "that was not taught to be: leave one out"
                )
        skipped = self._skipped(checkpoint, teacher)
        examples = gather_examples(self, checkpoint, context)
        targets = teach(
            teacher,
            examples.ids,
            hidden=self.hidden > 0,
            relations=layer_of(teacher.config, self.relation_layer) if self.relations else None,
            folder=context.workdir,
            device=context.device,
            progress=context.progress,
        )
        options = replace(self, bits=self.bits or int8_weight_bits(context.target))
        lesson = _Lesson(options, checkpoint, teacher, examples, targets, context)
        state, log = train_student(self, lesson, examples.lengths, context, shaper)
        details: dict[str, Any] = {
            "texts": len(examples.ids),
            "fragments": examples.fragments,
            "pages": examples.pages,
            "tokens": int(sum(examples.lengths)),
            "teacher_reused": targets.reused,
            "skipped": skipped,
        }
        details |= {"texts_seen" if key == "texts" else key: value for key, value in log.to_dict().items()}
        return StepResult(replace(checkpoint, state=state), details)

    def _skipped(self, student: Checkpoint, teacher: Checkpoint) -> dict[str, str]:
        """Losses that were asked for and cannot be had, with the reason; nothing left to learn is an InputError."""
        widths = [one.config.output_width for one in (student, teacher)]
        if isinstance(student.config.head, ClassificationHead) or widths[0] == widths[1] or not self.cosine:
            return {}
        if not self.similarity and not self.hidden and not self.relations:
            raise InputError(f"distill: vectors of {widths[0]} cannot learn those of {widths[1]} by cosine alone")
        return {"cosine": f"the student's vectors have {widths[0]} columns, the teacher's {widths[1]}"}


@dataclass(frozen=True)
class Examples:
    """Token ids, their lengths, label indices (-1: none), and how many are fragments and pages."""

    ids: list[list[int]]
    labels: list[int]
    fragments: int
    pages: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(one) for one in self.ids]


def gather_examples(options: Distill, checkpoint: Checkpoint, context: StepContext) -> Examples:
    """The texts to learn from: the data's own, fragments of them, whole pages; never a query, never valid or test."""
    texts = list(context.training_texts())
    encoder, data = checkpoint.text_encoder(), context.data
    if isinstance(data, LabelledData) and isinstance(checkpoint.config.head, ClassificationHead):
        places = {label: i for i, label in enumerate(checkpoint.config.head.labels)}
        known = {row.text: places.get(row.label, -1) for row in data.train}
        return Examples(encoder.encode(texts), [known.get(text, -1) for text in texts], 0, 0)
    parts = fragments(texts, share=options.fragments, words=options.fragment_words, seed=context.seed)
    chosen = draw(texts, options.texts or len(texts), context.seed)
    pages = draw([one.text for one in data.pages], options.pages, context.seed) if isinstance(data, SearchData) else []
    config = checkpoint.config
    page, query = (config.text.prompt(prompt_for(config, names)) for names in (PAGE_PROMPTS, QUERY_PROMPTS))
    prompted = [page + text for text in chosen] + [query + part for part in parts] + [page + text for text in pages]
    return Examples(encoder.encode(prompted), [-1] * len(prompted), len(parts), len(pages))


def draw(texts: Sequence[str], most: int, seed: int) -> list[str]:
    """At most `most` of the texts, by seed."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [texts[i] for i in order[:most]]


def check_index(student: Checkpoint, teacher: Checkpoint) -> None:
    """Raise InputError where a student cannot search what its teacher made of the pages."""
    mine, other = student.config, teacher.config
    if not isinstance(mine.head, EmbeddingHead):
        raise InputError("an index is of vectors, and the model gives none: leave out --keep-index")
    if mine.output_width != other.output_width:
        raise InputError(
            f"the student's vectors have {mine.output_width} numbers, the index has {other.output_width}: "
            "leave out --keep-index, or `width` of prune"
        )


def _check_heads(student: Checkpoint, teacher: Checkpoint) -> None:
    mine, other = student.config.head, teacher.config.head
    assert mine is not None
    if other is None:
        raise InputError("distill: the teacher has no head (neither embedding nor classifier) to learn from")
    if isinstance(mine, ClassificationHead) and mine != other:
        raise InputError("distill: the student's labels are not the teacher's")
    if isinstance(mine, EmbeddingHead) != isinstance(other, EmbeddingHead):
        raise InputError(f"distill: the student's head is {mine.kind}, the teacher's {other.kind}")


class _Lesson(nn.Module):
    """The student, the ranges that its linears round in and, for the hidden states, the map to the teacher's width."""

    def __init__(
        self,
        options: Distill,
        checkpoint: Checkpoint,
        teacher: Checkpoint,
        examples: Examples,
        targets: Targets,
        context: StepContext,
    ) -> None:
        super().__init__()
        self.device = device = context.device
        self.alike = index_loss if context.keep_index else similarity_loss
        self.student: Transformer = checkpoint.to_torch(dropout=options.dropout).to(device)
        keep_zeros(self.student, sparse_linears(checkpoint))
        self.options, self.examples, self.targets = options, examples, targets
        self.pad_id = checkpoint.config.text.pad_id
        self.map: nn.Module | None = None
        self.relations: Relations | None = None
        if options.quantization_aware:
            self.ranges = make_aware(self.student, options.bits, options.aware_of)
        if options.relations:  # behind `make_aware`, which puts other linears in their place
            layer = layer_of(teacher.config, options.relation_layer)
            self.relations = Relations(self.student, teacher.config, layer, options.relation_heads)
        if options.hidden and options.hidden_by == BY_MAP:
            width, other = checkpoint.config.d_model, teacher.config.d_model
            self.map = nn.Linear(width, other, device=device)
            nn.init.eye_(self.map.weight)
            nn.init.zeros_(self.map.bias)

    def loss(self, batch: Sequence[int]) -> Tensor:
        """The weighted losses of some examples."""
        ids = [self.examples.ids[i] for i in batch]
        output: Output = self.student(*tensors(ids, self.pad_id, self.device))
        assert output.result is not None
        target = self.targets.results_of(batch).to(self.device)
        total = self._of_results(output.result, target, batch)
        if self.options.hidden:
            states = self.targets.hidden_of(batch, self.examples.lengths).to(self.device)
            own = output.hidden
            apart = cka_loss(own, states) if self.map is None else hidden_loss(self.map(own), states)
            total = total + self.options.hidden * apart
        if self.relations is not None:
            theirs = self.targets.relations_of(batch, self.examples.lengths).to(self.device)
            total = total + self.options.relations * self.relations.loss(theirs, output.packing)
        return total

    def _of_results(self, result: Tensor, target: Tensor, batch: Sequence[int]) -> Tensor:
        options = self.options
        if isinstance(self.student.config.head, ClassificationHead):
            labels = torch.tensor([self.examples.labels[i] for i in batch], device=self.device)
            soft = options.logits * logits_loss(result, target, options.temperature)
            return soft + options.labels * label_loss(result, labels)
        total = options.similarity * self.alike(result, target)
        if options.nested:
            total = total + options.similarity * nested_loss(result, target, options.nested)
        if result.shape == target.shape:
            total = total + options.cosine * cosine_loss(result, target)
        return total
