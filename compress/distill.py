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
from ..transformer.errors import InputError
from ..transformer.layer_config import GATES, INT8_DYNAMIC, INT8_STATIC, one_of
from ..transformer.loading import load
from ..transformer.model import Output, Transformer
from ..transformer.parts import Part
from ..transformer.training_options import FLOAT32, TrainingOptions
from ..transformer.zeros import keep_zeros, sparse_linears
from .awareness import AWARE_FORMATS, make_aware
from .distill_writers import distill_writer
from .ensembles import check_teachers, joined
from .examples import Examples, gather_examples
from .inner import BY_CKA, BY_MAP, Compared, Inner, compared
from .layer_maps import LAST, RULES, SEARCH, LayerMap, check_map, map_by_rule, searched_map
from .losses import cosine_loss, index_loss, label_loss, logits_loss, nested_loss, similarity_loss
from .quantize import bits_problem
from .relations import last_attention
from .step import StepContext, StepResult
from .student import Shaper, train_student
from .teacher import RUNTIMES, TORCH, Targets, teach
from .vocabularies import shared_rows

OF_ENCODERS = ("hidden", "attention", "relations", "teachers", "masked")


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
        attention: weight of the loss of attention maps (`attention_maps`), of encoders whose layers have as many heads.
        layers: which layers of the teacher those of the student learn from, by `hidden` and `attention`: "last", the
            last ones alone; "even", "top" or "search" (`layer_maps`); or for each of the student's layers the
            teacher's, from 0 (-1: none).
        relation_heads: into how many heads queries, keys and values are cut for `relations`; 0: as many as the
            teacher's layer has heads of keys.
        relation_layer: the teacher's layer whose relations are learnt, from 0; None: its last with attention.
        logits, labels: weights of the losses of classifiers, and of models that write: there labels are the tokens.
        temperature: of the logits.
        dropout: of the student's embeddings and sub-layers.
        beams: translators: their targets are the teacher's best of so many beams; 0: the references.
        rerank: translators: whether, of the teacher's beams, the one nearest to the reference is learnt, by BLEU of the
            sentence (Kim & Rush 2016, section 3.3); needs sacrebleu.
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
        masked: share of the texts of encoders that are learnt from a second time, some tokens of theirs being masked.
        teachers: directories of further teachers of encoders, with the same vocabulary (`ensembles`).
        teacher_runtime: what an encoder's teacher runs in: "torch", or "onnxruntime", which is faster on CPU; it gives
            no states of layers, attention or relations.
        gradient_checkpointing: whether layers are computed again in the backward pass, in the place of being kept: less
            memory for about a third more time.
        checks: how often the student is judged on valid while it learns, at even distances, to keep the best; 0: never.
        patience: checks without a better one after which training ends; 0: it goes on.
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
    attention: float = 0.0
    layers: str | tuple[int, ...] = LAST
    nested: tuple[int, ...] = ()
    relation_heads: int = 0
    relation_layer: int | None = None
    logits: float = 1.0
    labels: float = 0.5
    temperature: float = 2.0
    dropout: float = 0.0
    beams: int = 4
    rerank: bool = False
    smoothing: float = 0.0
    mixer: str = ""
    quantization_aware: bool = False
    aware_of: str = INT8_DYNAMIC
    bits: int = 0
    fragments: float = 0.25
    fragment_words: tuple[int, int] = (2, 4)
    texts: int = 0
    pages: int = 1200
    masked: float = 0.0
    teachers: tuple[str, ...] = ()
    teacher_runtime: str = TORCH
    gradient_checkpointing: bool = False
    checks: int = 0
    patience: int = 0

    name: ClassVar[str] = "distill"
    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("fragment_words", "nested"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a recipe gives a list
        if self.minutes is None and self.steps is None:
            object.__setattr__(self, "minutes", 10.0)
        low, high = self.fragment_words
        problems = [] if 1 <= low <= high else [f"fragment_words {low} to {high} is not a range from 1 up"]
        weights = ("cosine", "similarity", "hidden", "attention", "relations", "logits", "labels")
        counts = ("relation_heads", "fragments", "texts", "pages", "beams", "checks", "patience")
        problems += [f"{n} is {getattr(self, n)}, below 0" for n in (*weights, *counts) if getattr(self, n) < 0]
        problems += one_of("hidden_by", self.hidden_by, (BY_MAP, BY_CKA))
        if self.hidden_by != BY_MAP and not self.hidden:
            problems.append(f"hidden_by is {self.hidden_by!r}, of hidden, whose weight is 0: set it")
        problems += one_of("teacher_runtime", self.teacher_runtime, RUNTIMES)
        inside = [n for n in ("attention", "relations") if getattr(self, n)] + ["layers"] * (self.layers != LAST)
        if self.teacher_runtime != TORCH and inside:
            problems.append(f"teacher_runtime is {self.teacher_runtime!r}, which does not give {', '.join(inside)}")
        if isinstance(self.layers, str):
            problems += one_of("layers", self.layers, RULES)
        if self.layers != LAST and not self.hidden and not self.attention:
            problems.append("layers is of hidden and attention, whose weights are 0: set one of them")
        if not self.relations and (self.relation_heads or self.relation_layer is not None):
            problems.append("relation_heads and relation_layer are of relations, whose weight is 0: set it")
        if self.gradient_checkpointing and self.aware_of == INT8_STATIC:
            problems.append(
                "gradient_checkpointing runs layers twice, which moves the ranges of aware_of int8_static twice"
            )
        if self.patience and not self.checks:
            problems.append(f"patience is {self.patience}, of checks, of which there are none: set checks")
        if list(self.nested) != sorted({m for m in self.nested if m > 0}):
            problems.append(f"nested is {list(self.nested)}, not rising whole numbers from 1 up, such as [64, 128]")
        if self.nested and not self.similarity:
            problems.append("nested has the weight of similarity, which is 0: set it")
        if self.temperature <= 0:
            problems.append(f"temperature is {self.temperature}, not above 0")
        if not 0 <= self.masked <= 1:
            problems.append(f"masked is {self.masked}, not a share from 0 to 1")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, not from 0 to below 1")
        if self.rerank and self.beams < 2:
            problems.append(f"rerank chooses among beams, and beams is {self.beams}: ask for 2 at least")
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
        if self.rerank:
            raise InputError("distill: rerank is for models that write")
        if config.head is None:
            raise InputError("distill: the model has no head (neither embedding nor classifier) to learn with")
        if self.relations or self.attention:
            last_attention(config)

    def _check_writer(self, config: TransformerConfig) -> None:
        if self.rerank and config.continues:
            raise InputError(
                "distill: rerank chooses among a teacher's texts, and a language model learns from given ones"
            )
        asked = [name for name in OF_ENCODERS if getattr(self, name)]
        if asked or self.teacher_runtime != TORCH:
            name = (asked or ["teacher_runtime"])[0]
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
        shared_rows(checkpoint, teacher)
        if context.keep_index:
            self._check_index(checkpoint, teacher)
        others = [load(name) for name in self.teachers]
        check_teachers([teacher, *others])
        skipped = self._skipped(checkpoint, teacher)
        examples = gather_examples(self, checkpoint, context)
        layers = self._layer_map(checkpoint, teacher, examples.ids)
        what = compared(self, checkpoint.config, teacher.config, layers)
        ways: dict[str, Any] = {"runtime": self.teacher_runtime, "threads": context.threads, "folder": context.workdir}
        ways |= {"device": context.device, "progress": context.progress}
        with context.processes.main_first():
            found = [teach(teacher, examples.ids, tokens=what.theirs, **ways)]
            found += [teach(other, examples.ids, **ways) for other in others]
        targets = joined(found, classifies=isinstance(checkpoint.config.head, ClassificationHead))
        bits, cosine = self.bits or int8_weight_bits(context.target), 0.0 if "cosine" in skipped else self.cosine
        options = replace(self, bits=bits, cosine=cosine)
        lesson = _Lesson(options, checkpoint, teacher, examples, what, targets, context)
        trained = train_student(self, checkpoint, lesson, examples.lengths, context, shaper)
        details: dict[str, Any] = {
            "texts": len(examples.ids),
            "fragments": examples.fragments,
            "pages": examples.pages,
            **({"masked": examples.masked} if self.masked else {}),
            "tokens": int(sum(examples.lengths)),
            "teacher_reused": targets.reused,
            "skipped": skipped,
            **({} if layers is None else {"layers": list(layers)}),
        }
        details |= {"texts_seen" if key == "texts" else key: value for key, value in trained.details.items()}
        return StepResult(replace(checkpoint, state=trained.state), details)

    def _check_index(self, student: Checkpoint, teacher: Checkpoint) -> None:
        """Raise InputError where the student cannot learn to search what its teacher made of the pages."""
        check_index(student, teacher)
        if self.teachers:
            raise InputError("distill: an index is of one teacher: leave out teachers, or --keep-index")
        if self.nested:
            raise InputError(
                "distill: nested is for vectors that are cut, and --keep-index keeps the pages' vectors of a model "
                "that was not taught to be: leave one out"
            )

    def _layer_map(self, student: Checkpoint, teacher: Checkpoint, ids: Sequence[list[int]]) -> LayerMap | None:
        """The teacher's layer of each of the student's; None: the last ones alone are compared."""
        counts = len(student.config.encoder), len(teacher.config.encoder)
        if not isinstance(self.layers, str):
            return check_map(self.layers, *counts)
        if self.layers == SEARCH:
            return searched_map(student, teacher, ids)
        return None if self.layers == LAST else map_by_rule(self.layers, *counts)

    def _skipped(self, student: Checkpoint, teacher: Checkpoint) -> dict[str, str]:
        """Losses that were asked for and cannot be had, with the reason; nothing left to learn is an InputError."""
        widths = [one.config.output_width for one in (student, teacher)]
        alike = widths[0] == widths[1] and not self.teachers
        if isinstance(student.config.head, ClassificationHead) or alike or not self.cosine:
            return {}
        if not any((self.similarity, self.hidden, self.attention, self.relations)):
            raise InputError(f"distill: vectors of {widths[0]} cannot learn those of {widths[1]} by cosine alone")
        if self.teachers:
            return {"cosine": f"{len(self.teachers) + 1} teachers have no vectors in common"}
        return {"cosine": f"the student's vectors have {widths[0]} columns, the teacher's {widths[1]}"}


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
        what: Compared,
        targets: Targets,
        context: StepContext,
    ) -> None:
        super().__init__()
        self.device = device = context.device
        self.keep_index = context.keep_index
        self.student: Transformer = checkpoint.to_torch(dropout=options.dropout).to(device)
        keep_zeros(self.student, sparse_linears(checkpoint))
        self.options, self.examples, self.targets = options, examples, targets
        self.labelled = [label >= 0 for label in examples.labels]
        self.pad_id = checkpoint.config.text.pad_id
        self.classifies = isinstance(checkpoint.config.head, ClassificationHead)
        self.inner: Inner | None = None
        if options.quantization_aware:
            self.ranges = make_aware(self.student, options.bits, options.aware_of)
        if what.pairs:  # behind `make_aware`, which puts other linears in their place
            self.inner = Inner(options, what, self.student, teacher.config, targets, examples.lengths, device)

    @property
    def coupled(self) -> bool:
        """Whether a loss sets texts, or tokens of several texts, beside each other."""
        options = self.options
        alike = not self.classifies and not self.keep_index and options.similarity > 0
        return alike or (self.inner is not None and self.inner.coupled)

    def loss(self, part: Part) -> Tensor:
        """The part's share of the weighted losses of a step's examples."""
        ids = [self.examples.ids[i] for i in part]
        with_states = self.inner is not None and self.inner.inside.with_states
        output: Output = self.student(*tensors(ids, self.pad_id, self.device), with_states=with_states)
        assert output.result is not None
        total = (self._of_logits if self.classifies else self._of_vectors)(output.result, part)
        return total if self.inner is None else total + self.inner.loss(output, part)

    def _of_logits(self, logits: Tensor, part: Part) -> Tensor:
        """Means over texts, and over those that have a label."""
        labels = torch.tensor([self.examples.labels[i] for i in part], device=self.device)
        soft = logits_loss(logits, self._results(part), self.options.temperature)
        hard = part.share_of(self.labelled) * label_loss(logits, labels)
        return part.share * self.options.logits * soft + self.options.labels * hard

    def _of_vectors(self, vectors: Tensor, part: Part) -> Tensor:
        """Means over texts and over pairs of texts."""
        own, options = self._results(part), self.options
        total = vectors.new_zeros(())
        if self.keep_index:
            total = total + part.share * options.similarity * index_loss(vectors, own, self._results(part.whole))
        elif options.similarity:
            every, theirs = part.joined(vectors), self._results(part.whole)
            alike = similarity_loss(every, theirs)
            if options.nested:
                alike = alike + nested_loss(every, theirs, options.nested)
            total = total + part.coupled(options.similarity * alike)
        if options.cosine:
            total = total + part.share * options.cosine * cosine_loss(vectors, own)
        return total

    def _results(self, examples: Sequence[int]) -> Tensor:
        return self.targets.results_of(examples).to(self.device)
