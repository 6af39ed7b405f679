"""A bundle at work: text in, vectors, labels or text out. Needs numpy, onnxruntime and tokenizers, never torch."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..transformer.config import ClassificationHead, EmbeddingHead, LanguageHead
from ..transformer.decoding import Decoding
from ..transformer.errors import InputError
from ..transformer.layer_config import FLOAT32
from ..transformer.progress import SILENT, Progress
from ..transformer.sources import SourceReader, summarizes
from ..transformer.text_metrics import Reading
from ..transformer.tokenizer import length_batches, pad, windows
from ..transformer.vectors import Kept, VectorForm, keep
from .contents import graph_file, read_config, read_own, read_tokenizer
from .machine import available_threads, require_provider
from .names import OWN_FILE
from .streaming import Stepper, pieces, require_graph

Floats = NDArray[np.float32]
BATCH = 32
SCORED = 8  # windows a run: each of their tokens has logits of the whole vocabulary


class Search(TypedDict, total=False):
    """How a text is looked for: fields of `transformer.decoding.Decoding`, with its defaults."""

    beams: int
    length_penalty: float
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int


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
        self.config = read_config(self.own, self.path / OWN_FILE)
        spare = isinstance(self.config.head, LanguageHead)  # where a text is cut, its translation would lack its end
        self.tokens = read_tokenizer(self.path / "tokenizer.json", self.config.text.max_length + spare)
        reads = spare and self.config.encoder
        self.sources = SourceReader(self.config, self.tokens.tokenizer_json) if reads else None
        self._provider = require_provider(provider)
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = available_threads(threads)
        self._options.log_severity_level = 3
        self.session = self._open(graph_file(self.config))

    def _open(self, file: str) -> onnxruntime.InferenceSession:
        """A session of one of the bundle's graphs; from its path, so that weights beside it are mapped into memory."""
        path = self.path / file
        try:
            return onnxruntime.InferenceSession(str(path), self._options, providers=[self._provider])
        except Exception as error:  # onnxruntime's own exceptions share no other base
            reason = " ".join(str(error).split())
            raise InputError(f"{path}: onnxruntime does not open it ({reason})") from error

    def run(self, input_ids: NDArray[np.int64], attention_mask: NDArray[np.int64]) -> dict[str, Floats]:
        """Ids and mask (B, T) -> every output by name."""
        names = [output.name for output in self.session.get_outputs()]
        values = self.session.run(names, {"input_ids": input_ids, "attention_mask": attention_mask})
        return dict(zip(names, values, strict=True))

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        dimensions: int = 0,
        precision: str = FLOAT32,
        ranges: Floats | None = None,
        batch: int = BATCH,
        progress: Progress = SILENT,
    ) -> Kept:
        """Texts -> vectors (n, E), or a form of them that costs less to keep: see `transformer.vectors`.

        Args:
            texts: any number of texts.
            prompt: the name of the prompt to put before each text; None: the model's default.
            dimensions: how many first columns, scaled to length 1; 0: all, as the model gives them.
            precision: "float32", "int8", or "binary" (uint8, eight columns to a byte).
            ranges: of int8: `find_ranges(pages, dimensions)` of the pages' float vectors.
            batch: texts a run; they are sorted by length first.
            progress: told of each batch.

        Raises:
            InputError: the model is not an embedder, has no such prompt or form, or int8 has no ranges that fit.
        """
        if not isinstance(self.config.head, EmbeddingHead):
            raise InputError(f"{self.path} does not embed; it has the head {self._kind()}")
        form = VectorForm(dimensions, precision)
        form.check(self.config.output_width, ranges)
        before = self.config.text.prompt(prompt)
        vectors = self._run([before + text for text in texts], "sentence_embedding", batch, progress)
        return keep(vectors, form, ranges)

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
        max_new_tokens: int | None = None,
        batch: int = BATCH,
        progress: Progress = SILENT,
        **search: Unpack[Search],
    ) -> list[str]:
        """Texts -> the best translation of each; blank ones stay empty.

        Args:
            texts: any number of texts.
            max_new_tokens: greatest number of tokens written; None: what the positions hold.
            batch: texts a run; they are sorted by length first.
            progress: told of each batch.
            search: see `Search`.

        Raises:
            InputError: the model does not translate, or a text is over its length.
        """
        return self._from_sources("translate", texts, max_new_tokens, batch, progress, search)

    def summarize(
        self,
        texts: Sequence[str],
        *,
        max_new_tokens: int | None = None,
        batch: int = BATCH,
        progress: Progress = SILENT,
        **search: Unpack[Search],
    ) -> list[str]:
        """Texts -> the best summary of each, of those over the model's length that of their beginning.

        Arguments as of `translate`; `sources.cut` says of how many texts it is the beginning.
        """
        return self._from_sources("summarize", texts, max_new_tokens, batch, progress, search)

    def _from_sources(
        self,
        title: str,
        texts: Sequence[str],
        max_new_tokens: int | None,
        batch: int,
        progress: Progress,
        search: Search,
    ) -> list[str]:
        """What is written for each text, nothing for blank ones."""
        self._check_does(title)
        given = [i for i, text in enumerate(texts) if text.strip()]
        rows = self._written(title, self._sources(texts, given), max_new_tokens, batch, progress, search)
        written = [""] * len(texts)
        for i, text in zip(given, self.tokens.decode_batch(rows), strict=True):
            written[i] = text
        return written

    def _sources(self, texts: Sequence[str], given: Sequence[int]) -> list[list[int]]:
        """Token ids of the texts at some places, cut for a summarizer."""
        if not summarizes(self.config):
            return self._encoded(texts, given, "cut it in sentences")
        assert self.sources is not None
        return [ids for ids in self.sources.read([texts[i] for i in given]).ids if ids is not None]

    def generate(
        self,
        texts: Sequence[str],
        *,
        max_new_tokens: int | None = None,
        batch: int = BATCH,
        progress: Progress = SILENT,
        **search: Unpack[Search],
    ) -> list[str]:
        """Texts -> what a decoder by itself writes after each, an empty one included; see `translate`.

        Where `max_new_tokens` is None, all texts get as many tokens as the longest leaves positions for.
        """
        prompts = self.prompts(texts)
        rows = self._written("generate", prompts, max_new_tokens, batch, progress, search)
        return [self._after(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]

    def _after(self, prompt: Sequence[int], written: Sequence[int]) -> str:
        """The text of tokens that follow others."""
        before, whole = self.tokens.decode_batch([prompt, [*prompt, *written]])
        if whole.startswith(before):
            return whole.removeprefix(before)
        return self.tokens.decode(written)  # without the space before it, where the tokenizer joins words with one

    def stream(self, text: str, *, max_new_tokens: int | None = None, **search: Unpack[Search]) -> Iterator[str]:
        """A text -> what `translate`, `summarize` or `generate` writes for it, in pieces, each as soon as it is final.

        In float32 the tokens are the same; in int8 a rounding that float noise flips may choose another one.

        Args:
            text: a source, or what a decoder by itself goes on from.
            max_new_tokens: greatest number of tokens written; None: what the positions hold.
            search: see `Search`; beams give no token before the last one, so there is one beam.

        Raises:
            InputError: beams are asked for, the model does not write, the bundle has no step graphs, or the text is
                over its length.
        """
        self._language_head()
        if self.config.encoder and not text.strip():
            return iter(())
        alone = self.config.continues
        (read,) = self.prompts([text]) if alone else self._sources([text], [0])
        show = partial(self._after, read) if alone else self.tokens.decode
        return pieces(self.write_one(read, max_new_tokens, **search), show, self.tokens.settled)

    def read(self, texts: Sequence[str], *, batch: int = SCORED, progress: Progress = SILENT) -> list[Reading]:
        """Texts -> how likely a decoder by itself finds each token, given those before it, and which one most.

        Longer texts are read in windows of as many tokens as there are positions, each of which begins anew.

        Args:
            texts: any number of texts.
            batch: windows a run; they are sorted by length first.
            progress: told of each batch.

        Raises:
            InputError: the model has an encoder or does not write, or the bundle has no step graph.
        """
        self._check_does("generate")
        found = windows(texts, self.tokens.tokenizer_json, self.config.embedding.positions)
        readings: dict[int, Reading] = {}
        progress.start("read", len(found), "windows")
        for chosen in length_batches([len(window) for _, window in found], batch):
            read = self._stepper.read([found[i][1] for i in chosen], self.config.text.pad_id)
            readings |= {i: Reading(found[i][0], *one) for i, one in zip(chosen, read, strict=True)}
            progress.advance(len(chosen))
        progress.done()
        return [readings[i] for i in range(len(found))]

    def write_one(
        self, read: Sequence[int], max_new_tokens: int | None = None, **search: Unpack[Search]
    ) -> Iterator[int]:
        """Token ids of a text or prompt -> those that `write` gives with one beam, one by one; see `stream`."""
        self._language_head()
        options = self._decoding([read], max_new_tokens, search)
        if options.beams > 1:
            raise InputError(f"{options.beams} beams know no token before the last one: stream with one beam")
        return self._stepper.tokens(read, options)

    @cached_property
    def _stepper(self) -> Stepper:
        def open_step(file: str) -> onnxruntime.InferenceSession:
            require_graph(self.path / file)
            return self._open(file)

        return Stepper(self.config, open_step)

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> the token ids to go on from, without the end token that stands behind a whole text."""
        self._check_does("generate")
        whole = self._encoded(texts, range(len(texts)), "shorten it")
        return [self.without_end(ids) for ids in whole]

    def write(
        self, read: Sequence[Sequence[int]], max_new_tokens: int | None = None, **search: Unpack[Search]
    ) -> list[list[int]]:
        """Token ids of some texts or prompts -> those of the best text for each, up to its end token."""
        return [beams[0] for beams in self.write_all(read, max_new_tokens, **search)]

    def write_all(
        self, read: Sequence[Sequence[int]], max_new_tokens: int | None = None, **search: Unpack[Search]
    ) -> list[list[list[int]]]:
        """The same of all beams of each, best first."""
        self._language_head()
        options = self._decoding(read, max_new_tokens, search)
        input_ids, attention_mask = pad(read, self.config.text.pad_id)
        feed: dict[str, NDArray[Any]] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "max_new_tokens": np.array(options.max_new_tokens),
            "num_beams": np.array(options.beams),
            "length_penalty": np.array(options.length_penalty, np.float32),
        }
        if options.sample:
            feed |= {
                "seed": np.array(options.seed),
                "temperature": np.array(options.temperature, np.float32),
                "top_k": np.array(options.top_k),
                "top_p": np.array(options.top_p, np.float32),
            }
        sequences = self.session.run(["sequences"], feed)[0]
        return [[self.cut(ids) for ids in beams] for beams in sequences.tolist()]

    def _decoding(self, read: Sequence[Sequence[int]], max_new_tokens: int | None, search: Search) -> Decoding:
        if strange := search.keys() - Search.__annotations__.keys():
            raise TypeError(f"a graph does not know {', '.join(sorted(strange))}")
        return Decoding(max_new_tokens=self._most(read, max_new_tokens), **search)

    def without_end(self, ids: list[int]) -> list[int]:
        """Token ids without the end token behind them."""
        return ids[:-1] if ids[-1:] == [self._language_head().end_id] else ids

    def cut(self, ids: list[int]) -> list[int]:
        """Token ids up to the end token, that included."""
        end = self._language_head().end_id
        return ids[: ids.index(end) + 1] if end in ids else ids

    def _language_head(self) -> LanguageHead:
        """The head, or an InputError where the model does not write."""
        if not isinstance(self.config.head, LanguageHead):
            raise InputError(f"{self.path} does not write; it has the head {self._kind()}")
        return self.config.head

    def _check_does(self, wanted: str) -> None:
        """Raise InputError unless the model was made to translate, summarize or generate."""
        self._language_head()
        does = ("summarize" if summarizes(self.config) else "translate") if self.config.encoder else "generate"
        if does != wanted:
            raise InputError(f"{self.path} was made to {does}, not to {wanted}: {does} with it")

    def _encoded(self, texts: Sequence[str], given: Sequence[int], advice: str) -> list[list[int]]:
        """Token ids of the texts at some places, or an InputError where one is too long."""
        ids, most = self.tokens.encode([texts[i] for i in given]), self.config.text.max_length
        if long := [i for i, one in zip(given, ids, strict=True) if len(one) > most]:
            more = f", and {len(long) - 1} more" if long[1:] else ""
            raise InputError(f"text {long[0] + 1}{more} is over the model's {most} tokens: {advice}")
        return ids

    def _most(self, read: Sequence[Sequence[int]], asked: int | None) -> int:
        """The number of tokens asked for, None: all for which there are positions after the longest of these."""
        embedding = self.config.decoder_embedding
        told = self.config.continues and embedding.position_kind != "none"
        longest = max(map(len, read), default=0) if told else 0
        most = embedding.positions - longest
        if (wanted := asked or 1) > most:
            after = f" after a prompt of {longest} tokens" if longest else ""
            advice = "ask for fewer, or shorten it" if longest else "ask for fewer"
            limit = f"over the model's {embedding.positions} positions"
            raise InputError(f"max_new_tokens {wanted}{after} is {limit}: {advice}")
        return most if asked is None else asked

    def _written(
        self,
        title: str,
        read: Sequence[Sequence[int]],
        max_new_tokens: int | None,
        batch: int,
        progress: Progress,
        search: Search,
    ) -> list[list[int]]:
        """`write`, batch by batch."""
        most = self._most(read, max_new_tokens)
        rows: list[list[int]] = [[] for _ in read]
        progress.start(title, len(read), "texts")
        for chosen in length_batches([len(one) for one in read], batch):
            for i, row in zip(chosen, self.write([read[i] for i in chosen], most, **search), strict=True):
                rows[i] = row
            progress.advance(len(chosen))
        progress.done()
        return rows

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
