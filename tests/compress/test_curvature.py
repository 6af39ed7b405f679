from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import ragged, random_state, writer
from torch import Tensor

from slimformer.compress.calibration import Batch
from slimformer.compress.curvature import Curvature, curvatures
from slimformer.compress.units import sublayers
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.model import Output, Transformer

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0], [2, 11, 12, 3, 0]])
MASK = (IDS != 0).long()
BATCHES = [Batch(IDS[:2], MASK[:2]), Batch(IDS[2:], MASK[2:])]
LAST = {"mixer": "out", "cross": "out", "ffn": "down"}


class Recorder:
    def __init__(self) -> None:
        self.counted = 0

    def start(self, title: str, total: int | None, unit: str) -> None:
        raise AssertionError("whose work it is says what it is called")

    def advance(self, n: int = 1, note: str = "") -> None:
        self.counted += n

    def done(self, note: str = "") -> None:
        pass


def classes(output: Output, generator: torch.Generator) -> Tensor:
    assert output.result is not None
    p = output.result.detach().softmax(1)
    noise = torch.randn(p.shape, generator=generator)
    drawn = torch.stack([r * e - (r @ e) * r * r for r, e in zip(p.sqrt(), noise, strict=True)])  # r * r is p
    return (drawn * output.result).sum()


def normal(output: Output, generator: torch.Generator) -> Tensor:
    """-|y - f|^2 / 2 of y drawn about f."""
    about = output.hidden if output.result is None else output.result
    drawn = about.detach() + torch.randn(about.shape, generator=generator)
    return -(drawn - about).square().sum() / 2


def naive(
    checkpoint: Checkpoint, batches: list[Batch], seed: int, likelihood: Callable[[Output, torch.Generator], Tensor]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By sub-layer all inputs and all gradients, token by token, with parameters that do take gradients."""
    model, generator = checkpoint.to_torch(), torch.Generator().manual_seed(seed)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for sub in sublayers(checkpoint.config):
        module = model.get_submodule(f"{sub.name}.{LAST[sub.part]}")
        module.register_forward_hook(lambda m, given, out, name=sub.name: seen.update({name: (given[0], out)}))
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for batch in batches:
        score = likelihood(batch.run(model), generator)
        for name, (given, out) in seen.items():
            gradient = torch.autograd.grad(score, out, retain_graph=True)[0]
            found.setdefault(name, []).append((given.detach().double().numpy(), gradient.double().numpy()))
    return {name: tuple(map(np.concatenate, zip(*parts, strict=True))) for name, parts in found.items()}


def check(
    checkpoint: Checkpoint, batches: list[Batch], likelihood: Callable[[Output, torch.Generator], Tensor]
) -> dict[str, Curvature]:
    """The factors are sums over tokens of outer products, one after the other."""
    texts = sum(len(batch.ids) for batch in batches)
    found = curvatures(checkpoint.to_torch(), batches, seed=3)
    expected = naive(checkpoint, batches, 3, likelihood)
    assert list(found) == [sub.name for sub in sublayers(checkpoint.config)]
    for name, (given, gradients) in expected.items():
        own = found[name]
        outputs = sum(np.outer(g, g) for g in gradients) / texts
        assert np.abs(outputs).max() > 1e-8
        np.testing.assert_allclose(own.inputs, np.cov(given.T, bias=True), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(own.mean, given.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(own.outputs, outputs, rtol=1e-3, atol=1e-5 * np.abs(outputs).max())
        assert (own.tokens, own.texts) == (len(given), texts)
        assert {own.inputs.dtype, own.mean.dtype, own.outputs.dtype} == {torch.float64}
    return found


def test_factors_of_an_embedding_are_the_naive_ones(uneven: Checkpoint) -> None:
    found = check(uneven, BATCHES, normal)
    assert found["encoder.0.mixer"].tokens == 12
    assert [len(found[f"encoder.1.{part}"].inputs) for part in ("mixer", "ffn")] == [8, 8]
    assert found["encoder.2.ffn"].outputs.shape == (8, 8)


def test_factors_of_a_classifier_are_the_naive_ones(uneven_classifier: Checkpoint) -> None:
    check(uneven_classifier, BATCHES, classes)


def test_factors_of_a_model_without_head_are_the_naive_ones(uneven: Checkpoint) -> None:
    check(replace(uneven, config=replace(uneven.config, head=None)), BATCHES, normal)


@pytest.mark.parametrize("kind", ["post", "own table", "lstm"])
def test_factors_of_an_encoder_decoder_are_the_naive_ones(kind: str) -> None:
    """Tokens of the source for the encoder, of the target for the decoder."""
    source, target = ragged([5, 3], seed=1), ragged([4, 6], seed=2)
    found = check(writer(kind), [Batch(*source, *target)], classes)
    assert (found["encoder.0.mixer"].tokens, found["decoder.0.cross"].tokens) == (8, 10)
    assert ("decoder.0.mixer" in found) == (kind != "lstm")


def test_factors_of_a_decoder_alone_are_the_naive_ones() -> None:
    check(writer("alone, pre"), [Batch(*ragged([5, 3], seed=1))], classes)


def test_draws_are_those_of_the_seed(uneven_classifier: Checkpoint) -> None:
    model = uneven_classifier.to_torch()
    first, again, other = (curvatures(model, BATCHES, seed)["encoder.1.ffn"] for seed in (1, 1, 2))
    assert torch.equal(first.outputs, again.outputs)
    assert not torch.allclose(first.outputs, other.outputs)
    assert torch.equal(first.inputs, other.inputs)


def test_a_layer_that_nothing_attends_to_has_no_part_in_the_score() -> None:
    model = writer("post")
    cut = replace(model.config, decoder=tuple(replace(layer, cross=None) for layer in model.config.decoder))
    found = curvatures(
        Checkpoint(cut, random_state(cut), model.tokenizer).to_torch(), [Batch(*ragged([4]), *ragged([3]))], seed=0
    )
    assert not found["encoder.0.ffn"].outputs.any()
    assert found["decoder.0.ffn"].outputs.any()


def test_texts_are_counted(uneven: Checkpoint) -> None:
    recorder = Recorder()
    curvatures(uneven.to_torch(), BATCHES, seed=0, progress=recorder)
    assert recorder.counted == 3


def of_rows(given: np.ndarray, gradients: np.ndarray, texts: int) -> Curvature:
    factors = (np.cov(given.T, bias=True), given.mean(0), gradients.T @ gradients / texts)
    return Curvature(*map(torch.from_numpy, factors), len(given), texts)


def test_parts_joined_are_those_of_all_rows() -> None:
    random = np.random.default_rng(0)
    sizes, texts = (7, 20, 4), (2, 5, 3)
    given = [random.normal(size=(size, 3)) + 4 * i for i, size in enumerate(sizes)]
    gradients = [random.normal(size=(size, 2)) for size in sizes]
    parts = [of_rows(*one) for one in zip(given, gradients, texts, strict=True)]
    before = [part.inputs.clone() for part in parts]
    joined = Curvature.joined(parts)
    expected = of_rows(np.concatenate(given), np.concatenate(gradients), 10)
    for name in ("inputs", "mean", "outputs"):
        torch.testing.assert_close(getattr(joined, name), getattr(expected, name), rtol=1e-10, atol=1e-10)
    assert (joined.tokens, joined.texts) == (31, 10)
    assert all(torch.equal(old, part.inputs) for old, part in zip(before, parts, strict=True))


def hooks(model: Transformer) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_model_is_as_before(uneven: Checkpoint) -> None:
    model = uneven.to_torch()
    model.embeddings.tokens.weight.requires_grad_(False)
    curvatures(model, BATCHES, seed=0)
    assert hooks(model) == 0
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    assert frozen == ["embeddings.tokens.weight"]
    assert all(value.grad is None for value in model.parameters())
    assert all(torch.equal(value, uneven.state[name]) for name, value in model.state_dict().items())


def test_the_model_is_as_before_when_it_fails(uneven: Checkpoint) -> None:
    model = uneven.to_torch()
    with pytest.raises(IndexError):
        curvatures(model, [*BATCHES, Batch(IDS + 100, MASK)], seed=0)
    assert hooks(model) == 0
    assert all(value.requires_grad for value in model.parameters())
