"""Students whose vocabulary is the first part of their teacher's: as far as it goes, ids mean the same to both."""

from tokenizers import Tokenizer

from ..transformer.checkpoint import Checkpoint
from ..transformer.errors import InputError


def shared_rows(student: Checkpoint, teacher: Checkpoint) -> int:
    """How many entries both have under the same numbers, from 0: those of the student.

    Raises:
        InputError: an entry of the student has another number in the teacher's vocabulary, or none.
    """
    rows = student.config.decoder_embedding.vocab_size
    if student.tokenizer == teacher.tokenizer:
        return min(rows, teacher.config.decoder_embedding.vocab_size)
    own, other = (Tokenizer.from_str(one.tokenizer).get_vocab() for one in (student, teacher))
    strange = sorted(token for token, number in own.items() if other.get(token) != number)
    if strange:
        raise InputError(
            f"distill: {len(strange)} of the student's {len(own)} vocabulary entries are not under the same numbers in "
            f"the teacher's, such as {strange[0]!r}: take a teacher of the same vocabulary, and put trim after distill"
        )
    return rows
