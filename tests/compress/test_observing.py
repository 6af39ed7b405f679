"""What linears are given, against the layers written out once more, and against numpy over all rows at once."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from models import PRE, SENTENCES, TOKENIZER, WRITERS, pair_data, ragged, random_state, tiny_config
from torch import Tensor, nn

from slimformer.compress.calibration import Batch, Calibration
from slimformer.compress.observing import Channels, Moments, Observer, Scaled, observe, portions
from slimformer.compress.step import StepContext
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.model import Transformer
from slimformer.transformer.packing import Packing
from slimformer.transformer.quantization import linear_names

CPU = torch.device("cpu")
CONFIGS = {"encoder": tiny_config(), "encoder, pre": replace(tiny_config(), **PRE), **WRITERS}


class Keeper:
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.calls: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        self.calls.append(x.clone())


class Counter:
    """A listener that counts."""

    def __init__(self) -> None:
        self.advanced = 0

    def start(self, title: str, total: int | None, unit: str) -> None: ...

    def advance(self, n: int = 1, note: str = "") -> None:
        self.advanced += n

    def done(self, note: str = "") -> None: ...


def model_of(kind: str) -> Checkpoint:
    return Checkpoint(CONFIGS[kind], random_state(CONFIGS[kind]), TOKENIZER)


def examples_of(checkpoint: Checkpoint, count: int = 12) -> list[Batch]:
    data = pair_data() if checkpoint.config.decoder else SearchData((), (), (), SENTENCES)
    return Calibration.of(checkpoint, StepContext(data), count, 0.5).batches(count, "cpu", size=1)


def told(checkpoint: Checkpoint, examples: list[Batch]) -> dict[str, list[Tensor]]:
    keepers = {name: Keeper() for name in linear_names(checkpoint.config)}
    observe(checkpoint.to_torch(), examples, keepers)
    return {name: keeper.calls for name, keeper in keepers.items()}


class Written:
    """The model's layers written out, which note what each linear is given."""

    def __init__(self, model: Transformer, example: Batch) -> None:
        self.pre, self.given = model.config.norm_place == "pre", dict[str, Tensor]()
        packing = Packing.from_mask(example.mask)
        x = model.embeddings(packing.pack(example.ids), packing.positions, None)
        source = None
        if model.config.encoder:
            for i, layer in enumerate(model.encoder):
                x = self.layer(f"encoder.{i}", layer, x, packing)
            x = x if model.encoder_norm is None else model.encoder_norm(x)
            source = (x, packing)
        if model.config.encoder and model.config.decoder:
            packing = Packing.from_mask(example.target_mask)
            table = model.embeddings if model.target is None else model.target
            x = table(packing.pack(example.target_ids), packing.positions, None)
        for i, layer in enumerate(model.decoder):
            x = self.layer(f"decoder.{i}", layer, x, packing, source)

    def layer(
        self, name: str, layer: nn.Module, x: Tensor, packing: Packing, source: tuple[Tensor, Packing] | None = None
    ) -> Tensor:
        x = self.around(x, layer.mixer_norm, lambda y: self.mixer(f"{name}.mixer", layer.mixer, y, packing))
        if layer.cross is not None:
            x = self.around(x, layer.cross_norm, lambda y: self.cross(f"{name}.cross", layer.cross, y, packing, source))
        return self.around(x, layer.ffn_norm, lambda y: self.ffn(f"{name}.ffn", layer.ffn, y))

    def around(self, x: Tensor, norm: nn.Module, change: Callable[[Tensor], Tensor]) -> Tensor:
        return x + change(norm(x)) if self.pre else norm(x + change(x))

    def mixer(self, name: str, mixer: nn.Module, x: Tensor, packing: Packing) -> Tensor:
        self.given[f"{name}.qkv" if hasattr(mixer, "qkv") else f"{name}.inputs"] = x
        mixed = mixer.mix(x, packing)
        if mixer.out is None:
            return mixed
        self.given[f"{name}.out"] = mixed
        return mixer.out(mixed)

    def cross(self, name: str, cross: nn.Module, x: Tensor, packing: Packing, source: tuple[Tensor, Packing]) -> Tensor:
        self.given[f"{name}.q"], self.given[f"{name}.kv"] = x, source[0]
        mixed = cross.mix(x, packing, cross.memory(*source), source[1].mask)
        self.given[f"{name}.out"] = mixed
        return cross.out(mixed)

    def ffn(self, name: str, ffn: nn.Module, x: Tensor) -> Tensor:
        self.given[f"{name}.up"] = x
        self.given[f"{name}.down"] = ffn.activation(ffn.up(x))
        return ffn.down(self.given[f"{name}.down"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_linears_observer_is_told_its_inputs(kind: str) -> None:
    checkpoint = model_of(kind)
    examples = examples_of(checkpoint)
    assert len(examples) == (12 if checkpoint.config.decoder else len(SENTENCES))
    found, model = told(checkpoint, examples), checkpoint.to_torch()
    for place, example in enumerate(examples):
        with torch.no_grad():
            expected = Written(model, example).given
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name][place], value, atol=1e-6, rtol=1e-6)
    assert {len(calls) for calls in found.values()} == {len(examples)}


@pytest.mark.parametrize("kind", ["encoder", "post", "lstm"])
def test_a_call_has_the_tokens_of_one_text(kind: str) -> None:
    """The source's for an encoder and for the keys and values that a decoder takes of it, else the target's."""
    checkpoint = model_of(kind)
    encoder = checkpoint.text_encoder()
    if checkpoint.config.decoder:
        lengths = [
            (len(encoder.encode([pair.source])[0]), len(encoder.encode([pair.target])[0])) for pair in pair_data().train
        ]
    else:
        lengths = [(len(ids), 0) for ids in encoder.encode(SENTENCES)]
    for name, calls in told(checkpoint, examples_of(checkpoint, 40)).items():
        side = 0 if name.startswith("encoder") or name.endswith("cross.kv") else 1
        assert sorted(map(len, calls)) == sorted(length[side] for length in lengths), name
        assert all(call.shape[1] == checkpoint.state[f"{name}.weight"].shape[1] for call in calls)


@pytest.mark.parametrize("side", ["left", "right", "between"])
@pytest.mark.parametrize("kind", ["encoder", "post", "lstm"])
def test_padding_reaches_no_observer(kind: str, side: str) -> None:
    """Of texts in one batch each linear sees what it sees of them one at a time."""
    checkpoint = model_of(kind)
    sources, targets = ragged((7, 2, 11), seed=1, side=side), ragged((3, 9, 5), seed=2, side=side)
    sides = (sources, targets) if checkpoint.config.encoder and checkpoint.config.decoder else (sources,)
    alone = [
        Batch(*(part[row][mask[row] > 0][None] for ids, mask in sides for part in (ids, mask))) for row in range(3)
    ]
    together = told(checkpoint, [Batch(*(part for one in sides for part in one))])
    for name, calls in told(checkpoint, alone).items():
        torch.testing.assert_close(together[name][0], torch.cat(calls), atol=1e-5, rtol=1e-5)


def test_linears_without_an_observer_are_left_alone() -> None:
    checkpoint = model_of("encoder")
    keeper, counter, model = Keeper(), Counter(), checkpoint.to_torch()
    examples = examples_of(checkpoint)
    before = [example.run(model).hidden for example in examples]
    observe(model, examples, {"encoder.1.ffn.down": keeper}, counter)
    assert len(keeper.calls) == counter.advanced == len(examples)
    assert {call.shape[1] for call in keeper.calls} == {40}
    observe(model, [], {"encoder.1.ffn.down": keeper})
    assert len(keeper.calls) == len(examples)
    assert all(torch.equal(example.run(model).hidden, one) for example, one in zip(examples, before, strict=True))


class Refusing(Keeper):
    """Takes one text and no more."""

    def add(self, x: Tensor) -> None:
        super().add(x)
        if len(self.calls) > 1:
            raise InputError("enough")


def test_nothing_is_told_afterwards_not_even_after_an_error() -> None:
    checkpoint = model_of("encoder")
    examples, model = examples_of(checkpoint), checkpoint.to_torch()
    first, last = Keeper(), Refusing()
    with pytest.raises(InputError, match="enough"):
        observe(model, examples, {"encoder.0.mixer.qkv": first, "encoder.1.ffn.up": last})
    assert (len(first.calls), len(last.calls)) == (2, 2)
    again = Keeper()
    observe(model, examples, {"encoder.0.mixer.qkv": again})
    examples[0].run(model)
    assert (len(first.calls), len(last.calls), len(again.calls)) == (2, 2, len(examples))


def chunks(x: np.ndarray, seed: int = 0) -> list[Tensor]:
    """Rows in runs of any length, one of them without rows."""
    places = np.sort(np.random.default_rng(seed).integers(0, len(x), 5))
    return [torch.from_numpy(part) for part in np.split(x, [0, *places])]


def fed(observer: Observer, x: np.ndarray) -> None:
    for rows in chunks(x):
        observer.add(rows)


@pytest.mark.parametrize("shift", [0.0, 9.0, -9.0])
def test_channels_are_numpys(shift: float) -> None:
    """Of values on both sides of 0, all above and all below; 0 is always one of them."""
    x = (np.random.default_rng(1).normal(size=(50, 6)) + shift).astype(np.float32)
    x[:, 2] = 0.0
    channels = Channels(inputs=6, device=CPU)
    fed(channels, x)
    with_zero = np.vstack([x, np.zeros((1, 6), np.float32)])
    np.testing.assert_array_equal(channels.low.numpy(), with_zero.min(0))
    np.testing.assert_array_equal(channels.high.numpy(), with_zero.max(0))
    np.testing.assert_array_equal(channels.greatest.numpy(), np.abs(x).max(0))
    factor = np.array([0.1, 3.0, 50.0, 1.0, 2.0, 0.7], np.float32)
    ends = (with_zero * factor).min(), (with_zero * factor).max()
    assert channels.ends(torch.from_numpy(factor)) == ends
    assert ends != (with_zero.min(), with_zero.max())


def test_channels_by_hand() -> None:
    channels = Channels(inputs=3, device=CPU)
    assert channels.ends(torch.ones(3)) == (0.0, 0.0)
    channels.add(torch.tensor([[1.0, -8.0, 2.0], [-4.0, -2.0, 3.0]]))
    assert (channels.low.tolist(), channels.high.tolist()) == ([-4.0, -8.0, 0.0], [1.0, 0.0, 3.0])
    assert channels.greatest.tolist() == [4.0, 8.0, 3.0]
    assert channels.ends(torch.tensor([3.0, 0.5, 2.0])) == (-12.0, 6.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_channels_refuse_what_is_not_finite(value: float) -> None:
    channels = Channels(inputs=2, device=CPU)
    channels.add(torch.tensor([[1.0, -1.0]]))
    with pytest.raises(InputError, match="not finite") as caught:
        channels.add(torch.tensor([[2.0, 0.0], [0.0, value]]))
    assert "\n" not in str(caught.value)
    assert channels.greatest.tolist() == [1.0, 1.0]


def test_scaled_multiplies_channels_for_each_of_its_observers() -> None:
    x, factor = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([2.0, 0.5])
    keepers = Keeper(), Keeper()
    Scaled(factor, keepers).add(x)
    assert [keeper.calls[0].tolist() for keeper in keepers] == [[[2.0, -1.0], [6.0, 2.0]]] * 2
    assert x.tolist() == [[1.0, -2.0], [3.0, 4.0]]


def to_quarters(x: Tensor) -> Tensor:
    return (x * 4).round() / 4


def test_moments_are_numpys() -> None:
    x = np.random.default_rng(2).normal(size=(70, 5)) + 1
    rounded = np.rint(x * 4) / 4
    moments = Moments(to_quarters, 5, CPU)
    fed(moments, x)
    np.testing.assert_allclose(moments.gram.matrix.numpy(), rounded.T @ rounded, rtol=1e-12)
    given, taken = (mean.numpy() for mean in moments.means)
    np.testing.assert_allclose(given, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(taken, rounded.mean(0), rtol=1e-12)
    assert moments.gram.rows == 70
    assert np.abs(given - taken).min() > 1e-4


def test_moments_sum_float32_in_float64() -> None:
    """Ones beside 2^24, within a text and from text to text."""
    moments = Moments(lambda x: 3 * x, 1, CPU)
    moments.add(torch.tensor([[2.0**24], [1.0]]))
    moments.add(torch.tensor([[1.0]]))
    moments.add(torch.tensor([[1.0]]))
    given, taken = moments.means
    assert (given * 4).tolist() == [2.0**24 + 3]
    assert (taken * 4).tolist() == [3 * 2.0**24 + 9]
    assert given.dtype == taken.dtype == torch.float64


def test_moments_of_nothing_are_zeros() -> None:
    moments = Moments(to_quarters, 2, CPU)
    moments.add(torch.zeros(0, 2))
    assert [mean.tolist() for mean in moments.means] == [[0.0, 0.0], [0.0, 0.0]]


# columns, limit in bytes of 8 a column squared, portions
PORTIONS = {
    "none": ({}, 100, []),
    "one": ({"a": 10}, 800, [["a"]]),
    "as many as fit": ({"a": 10, "b": 10, "c": 10}, 1600, [["a", "b"], ["c"]]),
    "a byte short": ({"a": 10, "b": 10, "c": 10}, 1599, [["a"], ["b"], ["c"]]),
    "all": ({"a": 10, "b": 10, "c": 10}, 2400, [["a", "b", "c"]]),
    "one over the limit first": ({"a": 100, "b": 10}, 1000, [["a"], ["b"]]),
    "one over the limit in between": ({"a": 5, "b": 100, "c": 5, "d": 5}, 1000, [["a"], ["b"], ["c", "d"]]),
    "in their order": ({"a": 10, "b": 20, "c": 10}, 1600, [["a"], ["b"], ["c"]]),
    "no limit to speak of": ({"a": 1, "b": 1}, 0, [["a"], ["b"]]),
}


@pytest.mark.parametrize("name", PORTIONS)
def test_portions_by_hand(name: str) -> None:
    columns, limit, expected = PORTIONS[name]
    assert list(portions(columns, limit)) == expected


def test_portions_are_full() -> None:
    random = np.random.default_rng(3)
    for _ in range(100):
        columns = {str(i): int(size) for i, size in enumerate(random.integers(1, 30, 12))}
        limit = int(random.integers(1, 20000))
        found = list(portions(columns, limit))
        bytes_of = [[8 * columns[name] ** 2 for name in portion] for portion in found]
        assert [name for portion in found for name in portion] == list(columns)
        assert all(len(sizes) == 1 or sum(sizes) <= limit for sizes in bytes_of)
        assert all(sum(sizes) + after[0] > limit for sizes, after in pairwise(bytes_of))
