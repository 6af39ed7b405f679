import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from masking import masked
from models import WRITERS, ragged, random_state, writer
from tiny import of_encoder
from torch import Tensor

from slimformer.compress.calibration import Batch
from slimformer.compress.importance import block, magnitude_scores, mask_gradients
from slimformer.compress.surgery import remove_from
from slimformer.compress.units import Kept, stacks, sublayers
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import EmbeddingHead
from slimformer.transformer.model import Transformer
from slimformer.transformer.packing import Packing

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0], [2, 11, 12, 3, 0]])
MASK = (IDS != 0).long()
BATCHES = [Batch(IDS[:2], MASK[:2]), Batch(IDS[2:], MASK[2:])]


def masked_output(checkpoint: Checkpoint, ids: Tensor, masks: dict[str, Tensor]) -> Tensor:
    """The head's output for one text without padding, every mask written out."""
    model = checkpoint.to_torch()
    packing = Packing.from_mask(torch.ones_like(ids))
    x = model.embeddings(packing.pack(ids), packing.positions, None)
    for i, (layer, sizes) in enumerate(zip(model.encoder, checkpoint.config.encoder, strict=True)):
        entered = x
        if sizes.mixer is None:
            x = layer.mixer_norm(x + layer.mixer.bias)
        else:
            heads = masks[f"heads.{i}"].repeat_interleave(sizes.mixer.head_width)
            x = layer.mixer_norm(x + layer.mixer.out(layer.mixer.mix(x, packing) * heads))
        if sizes.ffn is None:
            x = layer.ffn_norm(x + layer.ffn.bias)
        else:
            fed = layer.ffn.activation(layer.ffn.up(x)) * masks[f"neurons.{i}"]
            x = layer.ffn_norm(x + layer.ffn.down(fed))
        x = entered + masks["layers"][i] * (x - entered)
    assert model.head is not None
    result: Tensor = model.head(x, packing)
    return result


def drawn(checkpoint: Checkpoint, output: Tensor, generator: torch.Generator) -> Tensor:
    """v (N, C) of every row of an output: standard normal, of logits times B with B B^T = diag(p) - p p^T."""
    noise = torch.randn(output.shape, generator=generator)
    if isinstance(checkpoint.config.head, EmbeddingHead | None):
        return noise
    p = output.softmax(1)
    roots = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    torch.testing.assert_close(
        roots @ roots.transpose(1, 2), torch.diag_embed(p) - p[:, :, None] * p[:, None, :], atol=1e-6, rtol=1e-4
    )
    return torch.einsum("ncd,nd->nc", roots, noise)


def naive(checkpoint: Checkpoint, seed: int) -> list[dict[str, Tensor]]:
    """Per-text gradients by one autograd call a text, drawn batch by batch as the module says."""
    generator = torch.Generator().manual_seed(seed)
    config = checkpoint.config
    result = []
    for batch in BATCHES:
        ids, mask = batch.ids, batch.mask
        whole = checkpoint.to_torch()(ids, mask).result.detach()
        for row, v in enumerate(drawn(checkpoint, whole, generator)):
            masks = {"layers": torch.ones(len(config.encoder), requires_grad=True)}
            for i, layer in enumerate(config.encoder):
                if layer.mixer is not None:
                    masks[f"heads.{i}"] = torch.ones(layer.mixer.heads, requires_grad=True)
                if layer.ffn is not None:
                    masks[f"neurons.{i}"] = torch.ones(layer.ffn.width, requires_grad=True)
            output = masked_output(checkpoint, ids[row, : int(mask[row].sum())][None], masks)[0]
            grads = torch.autograd.grad(output @ v, list(masks.values()))
            result.append(dict(zip(masks, grads, strict=True)))
    return result


def of_mask(name: str) -> str:
    """The sub-layer of a mask "heads.i" or "neurons.i"."""
    kind, i = name.split(".")
    return f"encoder.{i}.{'mixer' if kind == 'heads' else 'ffn'}"


def check_against_naive(checkpoint: Checkpoint) -> None:
    model = checkpoint.to_torch()
    found = mask_gradients(model, BATCHES, seed=5)
    assert len(found.layers["encoder"]) == 3
    for row, expected in enumerate(naive(checkpoint, seed=5)):
        torch.testing.assert_close(found.layers["encoder"][row], expected.pop("layers"), atol=1e-6, rtol=1e-4)
        assert len(found.units) == len(expected)
        for name, gradients in expected.items():
            torch.testing.assert_close(found.units[of_mask(name)][row], gradients, atol=1e-6, rtol=1e-4)
    assert float(found.units["encoder.0.ffn"].abs().max()) > 1e-4
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not model.embeddings._forward_hooks


def test_gradients_of_an_embedding_are_the_naive_ones(uneven: Checkpoint) -> None:
    check_against_naive(uneven)


def test_gradients_of_a_classifier_are_the_naive_ones(uneven_classifier: Checkpoint) -> None:
    check_against_naive(uneven_classifier)


def test_gradients_without_some_sublayers_are_the_naive_ones(uneven: Checkpoint) -> None:
    check_against_naive(remove_from(uneven, of_encoder((0, 1, 2), ((), (0, 1), (1, 2)), ((1, 2), (), (0, 5)))))


def test_scores_tend_to_the_squared_change_of_the_output(uneven: Checkpoint) -> None:
    """E[g g^T] = J^T J: with many draws, the diagonal is the squared length of each column of the Jacobian."""
    draws = 4000
    found = mask_gradients(uneven.to_torch(), [Batch(IDS[:1], MASK[:1])], seed=0, draws=draws)
    assert found.units["encoder.1.mixer"].shape == (draws, 2)

    def output(heads: Tensor) -> Tensor:
        masks = {"layers": torch.ones(3), "heads.1": heads}
        for i, layer in enumerate(uneven.config.encoder):
            assert layer.mixer is not None
            assert layer.ffn is not None
            masks.setdefault(f"heads.{i}", torch.ones(layer.mixer.heads))
            masks[f"neurons.{i}"] = torch.ones(layer.ffn.width)
        return masked_output(uneven, IDS[:1], masks)[0]

    jacobian = torch.autograd.functional.jacobian(output, torch.ones(2))
    expected = (jacobian.T @ jacobian).numpy()
    # 4,000 draws of a squared normal: standard error sqrt(2 / 4000) = 2.2 %
    np.testing.assert_allclose(
        np.diag(block(found.units["encoder.1.mixer"])), np.diag(expected), rtol=5 * math.sqrt(2 / draws)
    )
    np.testing.assert_allclose(
        found.scores().units["encoder.1.mixer"], np.diag(block(found.units["encoder.1.mixer"])), rtol=1e-6
    )


def test_the_same_seed_gives_the_same_gradients(uneven: Checkpoint) -> None:
    first, again, other = (mask_gradients(uneven.to_torch(), BATCHES, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.units["encoder.2.ffn"], again.units["encoder.2.ffn"])
    assert not torch.allclose(first.units["encoder.2.ffn"], other.units["encoder.2.ffn"])


def test_a_model_without_head_is_scored_on_its_tokens(uneven: Checkpoint) -> None:
    bare = replace(uneven, config=replace(uneven.config, head=None))
    found = mask_gradients(bare.to_torch(), BATCHES[:1], seed=0)
    noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))  # 5 + 3 tokens of width 8
    with torch.no_grad():
        states = BATCHES[0].run(bare.to_torch()).states
    change = noise * (states[3] - states[2])
    expected = torch.stack([change[:5].sum(), change[5:].sum()])
    torch.testing.assert_close(found.layers["encoder"][:, 2], expected, atol=1e-5, rtol=1e-5)


def test_magnitude_by_hand(uneven: Checkpoint) -> None:
    state = {name: torch.zeros_like(value) for name, value in uneven.state.items()}
    state["encoder.1.mixer.qkv.weight"][4:8] = 1.0  # queries of head 1: 4 rows of 8
    state["encoder.1.mixer.qkv.weight"][8 + 3, 0] = 2.0  # one key weight of head 0
    state["encoder.1.mixer.qkv.weight"][16 + 7, 5] = 3.0  # one value weight of head 1
    state["encoder.1.mixer.out.weight"][2, 0] = 5.0  # column 0 is of head 0
    state["encoder.1.ffn.up.weight"][6, 1] = 2.0
    state["encoder.1.ffn.down.weight"][:, 6] = 1.0
    state["encoder.1.ffn.up.bias"][:] = 9.0  # biases do not count
    scores = magnitude_scores(uneven.config, state)
    assert scores.units["encoder.1.mixer"].tolist() == [4 + 25, 32 + 9]
    assert scores.units["encoder.1.ffn"].tolist() == [0, 0, 0, 0, 0, 0, 4 + 8, 0]
    assert scores.units["encoder.0.mixer"].tolist() == [0, 0, 0]
    assert np.diag(scores.layers["encoder"]).tolist() == [0, 29 + 41 + 12, 0]


def test_absent_sublayers_have_no_magnitude(uneven: Checkpoint) -> None:
    small = remove_from(uneven, of_encoder((0, 1), ((), (0,)), ((0, 1), ())))
    scores = magnitude_scores(small.config, small.state)
    assert {name: len(units) for name, units in scores.units.items()} == {"encoder.0.ffn": 2, "encoder.1.mixer": 1}


# --- models that write ---

SOURCES, TARGETS = ragged((5, 2, 7), seed=1, side="between", columns=8), ragged((4, 6, 1), seed=2)


def writing(checkpoint: Checkpoint) -> list[Batch]:
    """Two batches of 2 and 1 rows; a decoder alone is given the targets."""
    both = (SOURCES, TARGETS) if checkpoint.config.encoder else (TARGETS,)
    return [Batch(*(part[rows] for side in both for part in side)) for rows in (slice(0, 2), slice(2, 3))]


def without_padding(batch: Batch) -> list[Batch]:
    """Each row by itself."""
    sides = [(batch.ids, batch.mask)]
    if batch.target_ids is not None:
        sides.append((batch.target_ids, batch.target_mask))
    rows = []
    for i in range(len(batch.ids)):
        own = [ids[i][mask[i] > 0][None] for ids, mask in sides]
        rows.append(Batch(*(part for ids in own for part in (ids, torch.ones_like(ids)))))
    return rows


def ones(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """A mask for every layer and every sub-layer with units."""
    layers = {f"{stack}.{i}": () for stack, own in stacks(checkpoint.config).items() for i in range(len(own))}
    shapes = {**layers, **{sub.name: (sub.count,) for sub in sublayers(checkpoint.config)}}
    return {name: torch.ones(shape, requires_grad=True) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", WRITERS)
def test_gradients_of_a_language_head_are_those_of_each_row_alone(kind: str) -> None:
    """Tokens are drawn batch by batch, then every row goes through the masked model by itself."""
    checkpoint, batches = writer(kind), writing(writer(kind))
    model, generator = checkpoint.to_torch(), torch.Generator().manual_seed(5)
    found = mask_gradients(model, batches, seed=5)
    at = 0
    for batch in batches:
        with torch.no_grad():
            v = drawn(checkpoint, batch.run(model).result, generator)
        for row in without_padding(batch):
            masks = ones(checkpoint)
            with masked(model, masks):
                logits = row.run(model).result
            own, v = v[: len(logits)], v[len(logits) :]
            expected = dict(zip(masks, torch.autograd.grad((logits * own).sum(), list(masks.values())), strict=True))
            for name, gradient in expected.items():
                stack, _, rest = name.partition(".")
                mine = found.units[name][at] if "." in rest else found.layers[stack][at, int(rest)]
                torch.testing.assert_close(mine, gradient, atol=2e-5, rtol=1e-3)
            at += 1
    assert at == len(found.layers["decoder"]) == 3
    assert all(float(gradients.abs().max()) > 1e-3 for gradients in found.units.values())


MASKED = ("embedding", "classifier", "post", "own table", "alone, pre", "lstm")


@pytest.mark.parametrize("kind", MASKED)
def test_gradients_of_channels_are_those_of_one_mask_on_all_states(
    kind: str, uneven: Checkpoint, uneven_classifier: Checkpoint
) -> None:
    """Row by row, the mask written into the model: it multiplies what embeddings and layers give."""
    encoders = {"embedding": uneven, "classifier": uneven_classifier}
    checkpoint = encoders[kind] if kind in encoders else writer(kind)
    batches = BATCHES if kind in encoders else writing(checkpoint)
    model, generator = checkpoint.to_torch(), torch.Generator().manual_seed(5)
    found = mask_gradients(model, batches, seed=5)
    at, width = 0, checkpoint.config.d_model
    for batch in batches:
        with torch.no_grad():
            v = drawn(checkpoint, batch.run(model).result, generator)
        for row in without_padding(batch):
            mask = torch.ones(width, requires_grad=True)
            with multiplied(model, mask):
                output = row.run(model).result
            own, v = v[: len(output)], v[len(output) :]
            (expected,) = torch.autograd.grad((output * own).sum(), mask)
            torch.testing.assert_close(found.channels[at], expected, atol=1e-4, rtol=1e-3)
            at += 1
    assert at == len(found.channels) == 3
    assert float(found.channels.abs().max()) > 1e-2
    np.testing.assert_allclose(found.scores().channels, found.channels.double().square().mean(0).numpy(), rtol=1e-12)


@contextmanager
def multiplied(model: Transformer, mask: Tensor) -> Iterator[None]:
    """One mask (D,) times the tokens after the embeddings and after every layer."""
    tables = [table for table in (model.embeddings, model.target) if table is not None]
    states = [*tables, *model.encoder, *model.decoder]
    handles = [state.register_forward_hook(lambda m, inputs, x: x * mask) for state in states]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("part", ["encoder.1.mixer", "decoder.0.cross"])
def test_language_scores_tend_to_the_fisher_information(part: str) -> None:
    """E[g g^T] is the sum over tokens of J^T (diag(p) - p p^T) J, tokens being drawn independently."""
    checkpoint, draws = writer("post"), 1000
    model, batch = checkpoint.to_torch(), without_padding(writing(checkpoint)[0])[0]
    found = mask_gradients(model, [batch], seed=0, draws=draws)

    def logits(mask: Tensor) -> Tensor:
        with masked(model, {part: mask}):
            return batch.run(model).result

    count = found.units[part].shape[1]
    jacobian = torch.autograd.functional.jacobian(logits, torch.ones(count))  # (N, V, H)
    p = logits(torch.ones(count)).detach().softmax(1)
    covariance = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nvh,nvw,nwk->hk", jacobian, covariance, jacobian).numpy()
    # the standard error is sqrt(2 / 1000) = 4.5 %
    np.testing.assert_allclose(np.diag(block(found.units[part])), np.diag(expected), rtol=5 * math.sqrt(2 / draws))


def test_an_encoder_that_nothing_attends_to_matters_nothing() -> None:
    whole = writer("post")
    kept = Kept.everything(whole.config)
    gone = {f"decoder.{i}.cross": () for i in range(3)}
    deaf = remove_from(whole, Kept(kept.layers, {**kept.units, **gone}))
    found = mask_gradients(deaf.to_torch(), writing(deaf), seed=0)
    assert float(found.layers["encoder"].abs().max()) == 0
    assert float(found.units["encoder.0.ffn"].abs().max()) == 0
    assert float(found.units["decoder.0.ffn"].abs().max()) > 1e-3
    assert "decoder.0.cross" not in found.units
    assert float(found.channels.abs().max()) > 1e-3


def test_hooks_are_gone_and_parameters_as_before() -> None:
    model = writer("own table").to_torch()
    mask_gradients(model, writing(writer("own table")), seed=0)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_magnitude_of_a_cross_head_by_hand() -> None:
    config = WRITERS["lstm"]
    state = {name: torch.zeros_like(value) for name, value in random_state(config).items()}
    state["decoder.1.cross.q.weight"][12 + 3, 1] = 2.0  # head 1 has the rows from 12 on
    state["decoder.1.cross.kv.weight"][5, 7] = 3.0  # a key of head 0
    state["decoder.1.cross.kv.weight"][24 + 12, 7] = 1.0  # a value of head 1
    state["decoder.1.cross.out.weight"][4, 11] = 4.0  # the last column of head 0
    state["decoder.1.mixer.out.weight"][:] = 9.0  # a cell has no units
    scores = magnitude_scores(config, state)
    assert scores.units["decoder.1.cross"].tolist() == [9 + 16, 4 + 1]
    assert "decoder.1.mixer" not in scores.units
    assert np.diag(scores.layers["decoder"]).tolist() == [0, 30, 0]
    assert np.diag(scores.layers["encoder"]).tolist() == [0, 0]


def test_magnitude_of_a_group_by_hand() -> None:
    config = WRITERS["grouped"]  # 6 heads of 5, two to a key
    state = {name: torch.zeros_like(value) for name, value in random_state(config).items()}
    state["decoder.1.mixer.qkv.weight"][19, 1] = 2.0  # the last query of group 1
    state["decoder.1.mixer.qkv.weight"][30 + 10, 7] = 3.0  # the first key of group 2
    state["decoder.1.mixer.qkv.weight"][45 + 4, 7] = 1.0  # the last value of group 0
    state["decoder.1.mixer.out.weight"][4, 20] = 4.0  # the first column of group 2
    assert magnitude_scores(config, state).units["decoder.1.mixer"].tolist() == [1, 4, 9 + 16]


def test_magnitude_of_channels_by_hand(uneven_classifier: Checkpoint) -> None:
    state = {name: torch.zeros_like(value) for name, value in uneven_classifier.state.items()}
    state["embeddings.tokens.weight"][3, 0] = 2.0
    state["embeddings.positions.weight"][:, 1] = 1.0  # 16 of them
    state["encoder.0.mixer.qkv.weight"][5, 2] = 3.0
    state["encoder.1.mixer.out.weight"][3, 4] = 4.0  # channel 3 is a row of what leads out
    state["encoder.2.ffn.down.weight"][3, 0] = 1.0
    state["encoder.2.ffn.up.weight"][0, 4] = 5.0
    state["head.pooler.weight"][5, 6] = 2.0  # its rows are channels too
    state["head.classifier.weight"][1, 7] = 6.0
    state["encoder.0.mixer_norm.weight"][:] = 9.0  # norms and biases do not count
    state["encoder.0.ffn.down.bias"][:] = 9.0
    scores = magnitude_scores(uneven_classifier.config, state)
    assert scores.channels.tolist() == [4, 16, 9, 17, 25, 4, 4, 36]
