"""Distill a model that writes: the student learns what its teacher writes, and how sure it is of every token.

Sequence-level (Kim & Rush 2016, section 3.2): the targets are the best of the teacher's beams (`teacher_texts`).
Word-level (section 3.1): at each token, given those before it, the student learns the teacher's distribution over the
vocabulary (`teacher_tokens`).

A language model learns the second kind alone, on texts as they are, in the windows that it reads them in.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..export.machine import int8_weight_bits
from ..transformer.architecture import draw
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import AttentionConfig, LanguageHead, LayerConfig, RecurrentConfig
from ..transformer.data import PairData
from ..transformer.errors import InputError
from ..transformer.model import Transformer
from ..transformer.parts import Part
from ..transformer.sources import SourceReader, summarizes
from ..transformer.tokenizer import windows
from ..transformer.translation import TokenPair, forced_logits, read_pairs
from ..transformer.zeros import keep_zeros, sparse_linears
from .awareness import make_aware
from .losses import likeliest_loss
from .step import StepContext, StepResult
from .student import Shaper, train_student
from .teacher_texts import References, teacher_texts
from .teacher_tokens import TokenTargets, teach_tokens
from .vocabularies import shared_rows

if TYPE_CHECKING:
    from .distill import Distill


def distill_writer(
    options: "Distill", checkpoint: Checkpoint, context: StepContext, shaper: Shaper | None = None
) -> StepResult:
    """Return the trained student, see `Distill.shaped`; a summarizer's sources are cut as those it is given later are.

    Raises:
        InputError: the data does not fit the model, or student and teacher have other vocabularies.
    """
    teacher = context.teacher or checkpoint
    start = with_mixer(checkpoint, options.mixer, context.seed) if options.mixer else checkpoint
    rows = shared_rows(start, teacher)
    with context.processes.main_first():
        pairs, counts = _targets(options, start, teacher, rows, context)
        targets = _distributions(options, teacher, rows, pairs, context) if options.logits else None
    rounding = replace(options, bits=options.bits or int8_weight_bits(context.target))
    lesson = _Lesson(rounding, start, pairs, targets, context.device)
    lengths = [len(source) + len(target) for source, target in pairs]
    trained = train_student(options, start, lesson, lengths, context, shaper)
    details: dict[str, Any] = {**counts, "tokens": sum(lengths)}
    details |= {"teacher_reused": targets.reused} if targets is not None else {}
    seen = "windows_seen" if checkpoint.config.continues else "pairs_seen"
    details |= {seen if key == "texts" else key: value for key, value in trained.details.items()}
    return StepResult(replace(start, state=trained.state), details)


def with_mixer(checkpoint: Checkpoint, kind: str, seed: int) -> Checkpoint:
    """The model with a new cell of D units in the place of self-attention in all layers of its decoder.

    Its weights are drawn as those of a new model are.
    """
    config = checkpoint.config
    cell = RecurrentConfig(kind, config.d_model, project=False)

    def swapped(layer: LayerConfig) -> LayerConfig:
        return replace(layer, mixer=cell) if isinstance(layer.mixer, AttentionConfig) else layer

    layers = tuple(swapped(layer) for layer in config.decoder)
    changed = [i for i, layer in enumerate(layers) if layer is not config.decoder[i]]
    if not changed:
        raise InputError(f"distill: mixer is {kind!r}, and no layer of the decoder has attention to put it in place of")
    config = replace(config, decoder=layers)
    fresh, generator = Transformer(config), torch.Generator().manual_seed(seed)
    for i in changed:
        draw(fresh.decoder[i].get_submodule("mixer"), config.d_model, generator)
    new = tuple(f"decoder.{i}.mixer." for i in changed)
    state = {name: value for name, value in checkpoint.state.items() if not name.startswith(new)}
    state |= {name: value.clone() for name, value in fresh.state_dict().items() if name.startswith(new)}
    return replace(checkpoint, config=config, state=state).with_provenance(mixer=kind)


def _targets(
    options: "Distill", student: Checkpoint, teacher: Checkpoint, rows: int, context: StepContext
) -> tuple[list[TokenPair], dict[str, Any]]:
    """Pairs of token ids to learn, sources empty for a language model, and what was counted on the way."""
    data, head = context.data, teacher.config.head
    if not isinstance(head, LanguageHead) or teacher.config.continues != student.config.continues:
        raise InputError("distill: the teacher does not write what the student writes")
    if student.config.continues:
        positions = min(one.config.embedding.positions for one in (student, teacher))
        found = windows(context.training_texts(), student.tokenizer, positions)
        return [([], window) for _, window in found], {"windows": len(found)}
    if not isinstance(data, PairData):
        raise InputError(
            "distill: a translator or summarizer learns from pairs: give data of source and target, or text and summary"
        )
    if not options.beams:
        known = read_pairs(student, data.train)
        return known.ids, {"pairs": len(known.ids), **known.counts("over_positions")}
    read = SourceReader(student.config, student.tokenizer).read(context.training_texts())
    sources = [ids for ids in read.ids if ids is not None]
    references = None
    if options.rerank:
        targets = {pair.source: pair.target for pair in data.train}
        texts = zip(context.training_texts(), read.ids, strict=True)
        references = References([targets.get(text) for text, ids in texts if ids is not None], teacher.text_encoder())
    ways: dict[str, Any] = {"folder": context.workdir, "progress": context.progress}
    written = teacher_texts(teacher, sources, beams=options.beams, references=references, **ways)
    ended = [pair for pair in zip(sources, written, strict=True) if pair[1][-1:] == [head.end_id]]
    pairs = [pair for pair in ended if max(pair[1]) < rows]
    if not pairs:
        raise InputError(
            f"distill: the teacher ends none of its {len(written)} texts: it has learnt too little to teach by them; "
            "train it longer, or take the references (beams = 0)"
        )
    counts = {"pairs": len(pairs), "over_positions": len(read.ids) - len(sources)}
    counts |= {"sources_cut": sum(read.cut)} if summarizes(student.config) else {}
    counts |= {"outside_vocabulary": len(ended) - len(pairs)} if len(ended) > len(pairs) else {}
    return pairs, counts | {"unfinished": len(written) - len(ended)}


def _distributions(
    options: "Distill", teacher: Checkpoint, rows: int, pairs: Sequence[TokenPair], context: StepContext
) -> TokenTargets:
    return teach_tokens(
        teacher,
        pairs,
        rows=rows,
        temperature=options.temperature,
        precision=options.precision,
        folder=context.workdir,
        device=context.device,
        progress=context.progress,
    )


class _Lesson(nn.Module):
    """The student with the ranges that its linears round in, and what it learns."""

    coupled: Final = False

    def __init__(
        self,
        options: "Distill",
        checkpoint: Checkpoint,
        pairs: Sequence[TokenPair],
        targets: TokenTargets | None,
        device: str,
    ) -> None:
        super().__init__()
        self.student = checkpoint.to_torch(dropout=options.dropout).to(device)
        keep_zeros(self.student, sparse_linears(checkpoint))
        self.options, self.pairs, self.targets, self.device = options, pairs, targets, device
        self.written = [len(target) for _, target in pairs]
        if options.quantization_aware:
            self.ranges = make_aware(self.student, options.bits, options.aware_of)

    def loss(self, part: Part) -> Tensor:
        """The part's share of the weighted losses of a step's pairs, means over tokens."""
        options = self.options
        logits, wanted = forced_logits(self.student, [self.pairs[i] for i in part], self.device)
        total = options.labels * F.cross_entropy(logits, wanted, label_smoothing=options.smoothing)
        if self.targets is not None:
            places, chances = (one.to(self.device) for one in self.targets.of(part))
            total = total + options.logits * likeliest_loss(logits, places, chances, options.temperature)
        return part.share_of(self.written) * total
