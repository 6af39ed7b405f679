"""A bundle at work: text in, vectors or labels out. Needs numpy, onnxruntime and tokenizers, never torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..transformer.config import ClassificationHead, EmbeddingHead, LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.progress import SILENT, Progress
from ..transformer.tokenizer import TextEncoder, length_batches, pad
from .machine import available_threads, require_provider
from .names import BUNDLE_VERSION, GENERATE_FILE, MODEL_FILE, OWN_FILE

Floats = NDArray[np.float32]
BATCH = 32


class Bundle:
    """An opened bundle."""

    def __init__(self, path: str | Path, *, threads: int | None = None, provider: str = "cpu") -> None:
        """Open a bundle directory.

        Args:
            path: the directory.
            threads: onnxruntime's threads; None: the cores that this process may use.
            provider: "cpu" or "cuda".

        Raises:
            InputError: it is not a bundle, is damaged, or the provider is not there.
        """
        self.path = Path(path)
        self.own = read_own(self.path)
        self.config = _config(self.own, self.path / OWN_FILE)
        spare = isinstance(self.config.head, LanguageHead)  # where a text is cut, its translation would lack its end
        self.tokens = _text_encoder(self.path / "tokenizer.json", self.config.text.max_length + spare)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = available_threads(threads)
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(
                str(self.path / graph_file(self.config)), options, providers=[require_provider(provider)]
            )
        except InputError:
            raise
        except Exception as error:  # onnxruntime's own exceptions share no other base
            reason = " ".join(str(error).split())
            file = self.path / graph_file(self.config)
            raise InputError(f"{file}: onnxruntime does not open it ({reason})") from error

    def run(self, input_ids: NDArray[np.int64], attention_mask: NDArray[np.int64]) -> dict[str, Floats]:
        """Ids and mask (B, T) -> every output by name."""
        names = [output.name for output in self.session.get_outputs()]
        values = self.session.run(names, {"input_ids": input_ids, "attention_mask": attention_mask})
        return dict(zip(names, values, strict=True))

    def embed(
        self, texts: Sequence[str], *, prompt: str | None = None, batch: int = BATCH, progress: Progress = SILENT
    ) -> Floats:
        """Texts -> vectors (n, E).

        Args:
            texts: any number of texts.
            prompt: the name of the prompt to put before each text; None: the model's default.
            batch: texts a run; they are sorted by length first.
            progress: told of each batch.

        Raises:
            InputError: the model is not an embedder or has no such prompt.
        """
        if not isinstance(self.config.head, EmbeddingHead):
            raise InputError(f"{self.path} does not embed; it has the head {self._kind()}")
        before = self.config.text.prompt(prompt)
        return self._run([before + text for text in texts], "sentence_embedding", batch, progress)

    def logits(self, texts: Sequence[str], *, batch: int = BATCH, progress: Progress = SILENT) -> Floats:
        """Texts -> logits (n, C) in the order of the config's labels."""
        if not isinstance(self.config.head, ClassificationHead):
            raise InputError(f"{self.path} does not classify; it has the head {self._kind()}")
        return self._run(texts, "logits", batch, progress)

    def classify(
        self, texts: Sequence[str], *, batch: int = BATCH, progress: Progress = SILENT
    ) -> list[tuple[str, float]]:
        """Texts -> the most probable label of each and its probability."""
        logits = self.logits(texts, batch=batch, progress=progress).astype(np.float64)
        assert isinstance(self.config.head, ClassificationHead)
        labels = self.config.head.labels
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        return [(labels[int(row.argmax())], float(row.max())) for row in probabilities]

    def translate(
        self,
        texts: Sequence[str],
        *,
        beams: int = 1,
        max_new_tokens: int | None = None,
        length_penalty: float = 1.0,
        batch: int = BATCH,
        progress: Progress = SILENT,
    ) -> list[str]:
        """Texts -> the best text for each; blank ones stay empty.

        Args:
            texts: any number of texts.
            beams: of the search; 1 is greedy.
            max_new_tokens: greatest number of tokens written; None: what the positions hold.
            length_penalty: exponent of the length that a text's score is divided by.
            batch: texts a run; they are sorted by length first.
            progress: told of each batch.

        Raises:
            InputError: the model does not write, or a text is over its length.
        """
        given = [i for i, text in enumerate(texts) if text.strip()]
        ids = self.tokens.encode([texts[i] for i in given])
        most = self.config.text.max_length
        if long := [i for i, one in zip(given, ids, strict=True) if len(one) > most]:
            more = f", and {len(long) - 1} more" if long[1:] else ""
            raise InputError(f"text {long[0] + 1}{more} is over the model's {most} tokens: cut it in sentences")
        written = [""] * len(texts)
        progress.start("translate", len(ids), "texts")
        for chosen in length_batches([len(one) for one in ids], batch):
            rows = self.write([ids[i] for i in chosen], max_new_tokens, beams=beams, length_penalty=length_penalty)
            for i, text in zip(chosen, self.tokens.decode_batch(rows), strict=True):
                written[given[i]] = text
            progress.advance(len(chosen))
        progress.done()
        return written

    def write(
        self,
        sources: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        *,
        beams: int = 1,
        length_penalty: float = 1.0,
    ) -> list[list[int]]:
        """Token ids of some texts -> those of the best text for each, up to its end token; see `translate`."""
        head = self.config.head
        if not isinstance(head, LanguageHead):
            raise InputError(f"{self.path} does not write; it has the head {self._kind()}")
        most = self.config.decoder_embedding.positions
        if max_new_tokens is not None and max_new_tokens > most:
            raise InputError(f"max_new_tokens {max_new_tokens} is over the model's {most} positions: ask for fewer")
        input_ids, attention_mask = pad(sources, self.config.text.pad_id)
        feed = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "max_new_tokens": np.array(most if max_new_tokens is None else max_new_tokens),
            "num_beams": np.array(beams),
            "length_penalty": np.array(length_penalty, np.float32),
        }
        sequences = self.session.run(["sequences"], feed)[0]
        return [self.cut(ids) for ids in sequences[:, 0].tolist()]

    def cut(self, ids: list[int]) -> list[int]:
        """Token ids up to the end token, that included."""
        assert isinstance(self.config.head, LanguageHead)
        end = self.config.head.end_id
        return ids[: ids.index(end) + 1] if end in ids else ids

    def _kind(self) -> str:
        return "none" if self.config.head is None else self.config.head.kind

    def _run(self, texts: Sequence[str], output: str, batch: int, progress: Progress) -> Floats:
        ids = self.tokens.encode(texts)
        width = next(o.shape[1] for o in self.session.get_outputs() if o.name == output)
        result = np.zeros((len(ids), width), np.float32)
        progress.start("embed" if output == "sentence_embedding" else "classify", len(ids), "texts")
        for chosen in length_batches([len(one) for one in ids], batch):
            feed = pad([ids[i] for i in chosen], self.config.text.pad_id)
            result[chosen] = self.session.run([output], dict(zip(("input_ids", "attention_mask"), feed, strict=True)))[
                0
            ]
            progress.advance(len(chosen))
        progress.done()
        return result


def load_bundle(path: str | Path, *, threads: int | None = None, provider: str = "cpu") -> Bundle:
    """Open a bundle directory; see `Bundle`."""
    return Bundle(path, threads=threads, provider=provider)


def graph_file(config: TransformerConfig) -> str:
    """The graph's place in a bundle."""
    return GENERATE_FILE if isinstance(config.head, LanguageHead) else MODEL_FILE


def is_bundle(path: Path) -> bool:
    """Whether a directory looks like a bundle of ours."""
    return (path / OWN_FILE).is_file()


def read_own(path: Path) -> dict[str, Any]:
    """The content of a bundle's slimformer.json, or an InputError."""
    if not is_bundle(path):
        raise InputError(f"{path} is not a bundle: it has no {OWN_FILE}; make one with slimformer export")
    try:
        own = json.loads(_read(path / OWN_FILE))
        version = own["format_version"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path / OWN_FILE}: damaged ({error}); export the bundle again") from error
    if version != BUNDLE_VERSION:
        raise InputError(f"{path / OWN_FILE}: format_version {version}, this slimformer reads {BUNDLE_VERSION}")
    return dict(own)


def _config(own: dict[str, Any], path: Path) -> TransformerConfig:
    if "config" not in own:
        raise InputError(f"{path}: damaged (it has no 'config'); export the bundle again")
    try:
        return TransformerConfig.from_dict(own["config"])
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error


def _text_encoder(path: Path, max_length: int) -> TextEncoder:
    text = _read(path)
    try:
        return TextEncoder(text, max_length)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
