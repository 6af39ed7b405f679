import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimformer.compress.importance import block, magnitude_scores, mask_gradients
from slimformer.compress.surgery import Kept, remove_from
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.packing import Packing

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0], [2, 11, 12, 3, 0]])
MASK = (IDS != 0).long()
BATCHES = [(IDS[:2], MASK[:2]), (IDS[2:], MASK[2:])]


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


def naive(checkpoint: Checkpoint, seed: int) -> list[dict[str, Tensor]]:
    """Per-text gradients by one autograd call a text, labels drawn batch by batch as the module says."""
    generator = torch.Generator().manual_seed(seed)
    config = checkpoint.config
    result = []
    for ids, mask in BATCHES:
        whole = checkpoint.to_torch()(ids, mask).result.detach()
        if config.head is not None and config.head.kind == "classification":
            labels = torch.multinomial(whole.softmax(1), 1, generator=generator)
        else:
            labels = torch.randn(whole.shape, generator=generator)
        for row, label in enumerate(labels):
            masks = {"layers": torch.ones(len(config.encoder), requires_grad=True)}
            for i, layer in enumerate(config.encoder):
                if layer.mixer is not None:
                    masks[f"heads.{i}"] = torch.ones(layer.mixer.heads, requires_grad=True)
                if layer.ffn is not None:
                    masks[f"neurons.{i}"] = torch.ones(layer.ffn.width, requires_grad=True)
            output = masked_output(checkpoint, ids[row, : int(mask[row].sum())][None], masks)[0]
            drawn = config.head is not None and config.head.kind == "classification"
            score = F.log_softmax(output, 0)[int(label)] if drawn else output @ label
            grads = torch.autograd.grad(score, list(masks.values()))
            result.append(dict(zip(masks, grads, strict=True)))
    return result


def check_against_naive(checkpoint: Checkpoint) -> None:
    model = checkpoint.to_torch()
    found = mask_gradients(model, BATCHES, seed=5)
    assert len(found.layers) == 3
    for row, expected in enumerate(naive(checkpoint, seed=5)):
        torch.testing.assert_close(found.layers[row], expected["layers"], atol=1e-6, rtol=1e-4)
        for i, (heads, neurons) in enumerate(zip(found.heads, found.neurons, strict=True)):
            nothing = torch.zeros(0)
            torch.testing.assert_close(heads[row], expected.get(f"heads.{i}", nothing), atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(neurons[row], expected.get(f"neurons.{i}", nothing), atol=1e-6, rtol=1e-4)
    assert float(found.neurons[0].abs().max()) > 1e-4
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not model.embeddings._forward_hooks


def test_gradients_of_an_embedding_are_the_naive_ones(uneven: Checkpoint) -> None:
    check_against_naive(uneven)


def test_gradients_of_a_classifier_are_the_naive_ones(uneven_classifier: Checkpoint) -> None:
    check_against_naive(uneven_classifier)


def test_gradients_without_some_sublayers_are_the_naive_ones(uneven: Checkpoint) -> None:
    check_against_naive(remove_from(uneven, Kept((0, 1, 2), ((), (0, 1), (1, 2)), ((1, 2), (), (0, 5)))))


def test_scores_tend_to_the_squared_change_of_the_output(uneven: Checkpoint) -> None:
    """E[g g^T] = J^T J: with many draws, the diagonal is the squared length of each column of the Jacobian."""
    draws = 4000
    found = mask_gradients(uneven.to_torch(), [(IDS[:1], MASK[:1])], seed=0, draws=draws)
    assert found.heads[1].shape == (draws, 2)

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
    np.testing.assert_allclose(np.diag(block(found.heads[1])), np.diag(expected), rtol=5 * math.sqrt(2 / draws))
    np.testing.assert_allclose(found.scores().heads[1], np.diag(block(found.heads[1])), rtol=1e-6)


def test_the_same_seed_gives_the_same_gradients(uneven: Checkpoint) -> None:
    first, again, other = (mask_gradients(uneven.to_torch(), BATCHES, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.neurons[2], again.neurons[2])
    assert not torch.allclose(first.neurons[2], other.neurons[2])


def test_a_model_without_head_is_scored_on_its_tokens(uneven: Checkpoint) -> None:
    bare = replace(uneven, config=replace(uneven.config, head=None))
    found = mask_gradients(bare.to_torch(), BATCHES[:1], seed=0)
    noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))  # 5 + 3 tokens of width 8
    with torch.no_grad():
        states = bare.to_torch()(*BATCHES[0], with_states=True).states
    change = noise * (states[3] - states[2])
    expected = torch.stack([change[:5].sum(), change[5:].sum()])
    torch.testing.assert_close(found.layers[:, 2], expected, atol=1e-5, rtol=1e-5)


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
    assert scores.heads[1].tolist() == [4 + 25, 32 + 9]
    assert scores.neurons[1].tolist() == [0, 0, 0, 0, 0, 0, 4 + 8, 0]
    assert scores.heads[0].tolist() == [0, 0, 0]
    assert np.diag(scores.layers).tolist() == [0, 29 + 41 + 12, 0]


def test_magnitude_of_absent_sublayers_is_empty(uneven: Checkpoint) -> None:
    small = remove_from(uneven, Kept((0, 1), ((), (0,)), ((0, 1), ())))
    scores = magnitude_scores(small.config, small.state)
    assert [len(units) for units in scores.heads] == [0, 1]
    assert [len(units) for units in scores.neurons] == [2, 0]
