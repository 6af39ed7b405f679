"""A text written a token at a time with the step graphs, its pieces given out as soon as they are final. No torch.

Tokens are chosen as `transformer.generation` and the graph of the whole decode choose them. A piece is final when no
further token can change it: a character of several bytes may come in several tokens. The same graphs read whole texts
and say how likely they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.decoding import Decoding, uniform
from ..transformer.errors import InputError
from ..transformer.tokenizer import pad
from .names import DECODER_FILE, DECODER_WITH_PAST_FILE, ENCODER_FILE, MODEL_FILE, PAST, PRESENT

Floats = NDArray[np.float32]
BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet


class Stepper:
    """The step graphs of a bundle."""

    def __init__(self, config: TransformerConfig, open_graph: Callable[[str], onnxruntime.InferenceSession]) -> None:
        """`open_graph` opens the graph at a place in the bundle."""
        assert isinstance(config.head, LanguageHead)
        self.head = config.head
        self.encoder: _Graph | None = None
        if config.encoder:
            self.encoder = _Graph(open_graph(ENCODER_FILE))
            self.first, self.next = _Graph(open_graph(DECODER_FILE)), _Graph(open_graph(DECODER_WITH_PAST_FILE))
        else:
            self.first = self.next = _Graph(open_graph(MODEL_FILE))

    def tokens(self, read: Sequence[int], options: Decoding) -> Iterator[int]:
        """What is written after a source or a prompt, with one beam, as far as the end token."""
        begun, source = [self.head.start_id, *read], dict[str, Any]()
        if self.encoder is not None:
            begun, mask = begun[:1], _value(np.ones((1, len(read)), np.int64))
            states = self.encoder.run({"input_ids": _ids(read), "attention_mask": mask})["last_hidden_state"]
            source = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        logits, past = self._run(self.first, begun, 0, {**source, **self.first.empty_past()})
        for step in range(options.max_new_tokens):
            token = choose(logits, options, step)
            yield token
            if token == self.head.end_id or step + 1 == options.max_new_tokens:
                return
            logits, new = self._run(self.next, [token], len(begun) + step, {**source, **past})
            past |= new

    def read(self, rows: Sequence[Sequence[int]], pad_id: int) -> list[tuple[Floats, NDArray[np.int64]]]:
        """Token ids of some texts -> each one's losses and likeliest tokens, as in `text_metrics.Reading`.

        The graph is that of a decoder by itself.
        """
        begun, mask = pad([[self.head.start_id, *row[:-1]] for row in rows], pad_id)
        given = {"input_ids": _value(begun), "attention_mask": _value(mask), **self.first.empty_past(len(rows))}
        logits = self.first.run(given)["logits"].numpy()
        return [
            (_losses(each[: len(row)], row), each[: len(row)].argmax(axis=1))
            for each, row in zip(logits, rows, strict=True)
        ]

    @staticmethod
    def _run(
        graph: "_Graph", ids: Sequence[int], before: int, given: Mapping[str, Any]
    ) -> tuple[Floats, dict[str, Any]]:
        """Tokens after `before` others -> logits (V,) of what follows them, and the past with them."""
        mask = np.ones((1, before + len(ids)), np.int64)
        own = {"input_ids": _ids(ids), "attention_mask": _value(mask), "cache_position": _value(np.array([before]))}
        found = graph.run({**own, **given})
        logits: Floats = found.pop("logits").numpy()[0, -1]
        return logits, {PAST + name.removeprefix(PRESENT): value for name, value in found.items()}


class _Graph:
    """A session whose tensors stay with onnxruntime from run to run."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session = session
        self.inputs = {one.name: one.shape for one in session.get_inputs()}
        self.outputs = [one.name for one in session.get_outputs()]

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every output by name; of what is given, the graph's inputs are taken."""
        feed = {name: given[name] for name in self.inputs}
        return dict(zip(self.outputs, self.session.run_with_ort_values(self.outputs, feed), strict=True))

    def empty_past(self, rows: int = 1) -> dict[str, Any]:
        """The past before the first token: no columns, states of zeros."""
        shapes = {name: [rows, *shape[1:]] for name, shape in self.inputs.items() if name.startswith(PAST)}
        return {
            name: _value(np.zeros([0 if isinstance(axis, str) else axis for axis in shape], np.float32))
            for name, shape in shapes.items()
        }


def _value(array: NDArray[Any]) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _ids(ids: Sequence[int]) -> Any:
    return _value(np.array([ids], np.int64))


def _losses(logits: Floats, tokens: Sequence[int]) -> Floats:
    """Logits (T, V) and T tokens -> the negative log likelihood of each."""
    high = logits.max(axis=1)
    sums = np.exp(logits - high[:, None]).sum(axis=1)
    found: Floats = high + np.log(sums) - logits[np.arange(len(tokens)), list(tokens)]
    return found


def choose(logits: Floats, options: Decoding, step: int) -> int:
    """Logits (V,) -> the best token, or a drawn one; see `transformer.generation._Single`."""
    if not options.sample:
        return int(logits.argmax())
    scaled = logits / np.float32(options.temperature)
    order = np.argsort(-scaled, kind="stable")[: options.top_k or None]
    weights = np.exp(scaled[order] - scaled[order[0]])
    chances = weights / weights.sum()
    kept = np.where(_sums(chances) - chances < np.float32(options.top_p), chances, np.float32(0))
    sums = _sums(kept)
    place = int((sums <= np.float32(uniform(options.seed, step)) * sums[-1]).sum())
    return int(order[min(place, len(order) - 1)])


def _sums(x: Floats) -> Floats:
    """Sums from the left, in double precision."""
    return x.cumsum(dtype=np.float64).astype(np.float32)


def pieces(
    tokens: Iterable[int], text: Callable[[Sequence[int]], str], settled: Callable[[Sequence[int]], int]
) -> Iterator[str]:
    """The text of tokens in pieces, none of them empty, each as soon as it is final.

    Args:
        tokens: as they come.
        text: of the first of them.
        settled: how many of them no further token can change.

    Raises:
        InputError: at the end, where the tokenizer has changed what was final.
    """
    written: list[int] = []
    given = ""
    for token in tokens:
        written.append(token)
        final = text(written[: settled(written)]).rstrip(BROKEN)
        if len(final) > len(given) and final.startswith(given):
            yield final[len(given) :]
            given = final
    whole = text(written)
    if not whole.startswith(given):
        raise InputError(f"the tokenizer made {whole!r} of {given!r}: this model writes whole texts only")
    if whole != given:
        yield whole[len(given) :]


def require_graph(path: Path) -> None:
    """Raise InputError where a bundle has no such step graph."""
    if not path.is_file():
        raise InputError(f"{path} is missing: without it nothing is written token by token; export the bundle again")
