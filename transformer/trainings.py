"""Which training some data ask for: of a classifier, a translator, a summarizer or a language model, given or new."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from .architecture import Architecture, new_classifier, new_model
from .checkpoint import Checkpoint
from .data import PAIR_FIELDS, load_data, load_pairs, load_texts, task_of
from .errors import InputError
from .families.word_vectors import with_vectors
from .finetuning import FineTuning, finetune
from .language import teach_texts
from .loading import load
from .splits import SUMMARIZATION, LabelledData
from .subwords import train_subwords
from .teaching import Teaching
from .translation import teach_pairs

NEW_CLASSIFIER = {"lr": 1e-3, "dropout": 0.1}  # where nothing else is asked for


@dataclass(frozen=True)
class NewModel:
    """What a new model is like.

    Attributes:
        layers: of encoder and decoder; None: 6 and 6 for pairs, 0 and 6 for texts; a classifier has to be given them.
        shape: other fields of `Architecture`.
        vocabulary: greatest number of subwords.
        vectors: a file of word vectors to begin with.
    """

    layers: tuple[int, int] | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int = 8000
    vectors: Path | None = None

    def architecture(self, default: tuple[int, int]) -> Architecture:
        """Its shape, with these layers where none are given."""
        encoder, decoder = self.layers or default
        return Architecture(encoder=encoder, decoder=decoder, **self.shape)

    def begun(self, new: Checkpoint) -> Checkpoint:
        """A new model with the word vectors, where there are any."""
        return new if self.vectors is None else with_vectors(new, self.vectors)


def training_for(
    directory: Path, model: str | None, new: NewModel, options: Mapping[str, Any], task: str | None = None
) -> Callable[..., Checkpoint]:
    """The training that the tables of a directory ask for, to be called with `out` and how to run (`lesson.teach`).

    Args:
        directory: the data.
        model: what `load` takes; None: a new model.
        new: what it is like.
        options: fields of `FineTuning` or `Teaching` that are given.
        task: what the data is for; None: its tables say.

    Raises:
        InputError: data, model or options cannot be used, or do not fit each other.
    """
    wanted = task_of(directory) if task is None else task
    if wanted in (*PAIR_FIELDS, "language"):
        return _writing(directory, model, new, options, wanted)
    return _classification(directory, model, new, options)


def _classification(
    directory: Path, model: str | None, new: NewModel, options: Mapping[str, Any]
) -> Callable[..., Checkpoint]:
    if model is None and new.layers is None:
        raise InputError("name the MODEL to fine-tune, or the --layers of a new encoder, such as 2-0")
    how = FineTuning(**{**({} if model else NEW_CLASSIFIER), **options})
    rows = load_data(directory, "classification")
    assert isinstance(rows, LabelledData)
    if model is not None:
        return partial(finetune, load(model), rows, options=how)
    tokenizer = train_subwords([row.text for row in rows.train], vocab_size=new.vocabulary)
    start = new_classifier(new.architecture((2, 0)), tokenizer, rows.labels, how.seed)
    return partial(finetune, new.begun(start), rows, options=how)


def _writing(
    directory: Path, model: str | None, new: NewModel, options: Mapping[str, Any], task: str
) -> Callable[..., Checkpoint]:
    given = dict(options)
    cut = given.pop("max_length", None)
    if cut is not None and task != SUMMARIZATION:
        raise InputError(
            "--max-length is for classifiers and summaries: longer pairs are left out, longer texts read in windows"
        )
    how, paired = Teaching(**given), task in PAIR_FIELDS
    teach: Callable[..., Checkpoint] = teach_pairs if paired else teach_texts
    tables: Any = load_pairs(directory) if paired else load_texts(directory)
    if model is not None:
        return partial(teach, _cut_at(cut, load(model)), tables, options=how)
    texts = [text for row in tables.train for text in ((row.source, row.target) if paired else (row.text,))]
    tokenizer = train_subwords(texts, vocab_size=new.vocabulary)
    start = new_model(new.architecture((6 if paired else 0, 6)), tokenizer, how.seed)
    return partial(teach, _cut_at(cut, new.begun(start)), tables, options=how)


def _cut_at(length: int | None, checkpoint: Checkpoint) -> Checkpoint:
    """The model that reads so many tokens of a text at most; None: what it did."""
    if length is None:
        return checkpoint
    config = checkpoint.config
    return replace(checkpoint, config=replace(config, text=replace(config.text, max_length=length)))
