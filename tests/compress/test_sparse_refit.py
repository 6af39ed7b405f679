from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import MIXERS, PRE, TOKENIZER, decoder_config, ragged, random_state, tiny, writer
from torch import Tensor, nn

from slimformer.compress.calibration import Batch
from slimformer.compress.sparse_refit import refit_sparse
from slimformer.compress.sparsegpt import magnitude
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.layer_config import FeedForwardConfig, LayerConfig
from slimformer.transformer.model import Transformer
from slimformer.transformer.quantization import linear_names

DAMPING = 0.02
LAST = ("out", "down")
ABSENT = ("mixer.bias", "ffn.bias")  # the naive way has no such sub-layers


def model_of(kind: str) -> Checkpoint:
    if kind == "encoder":
        return tiny()
    if kind == "absent mixer":
        return tiny(layers=[LayerConfig(None, FeedForwardConfig(40, "gelu")), LayerConfig(MIXERS["attention"], None)])
    if kind == "gru":
        config = decoder_config(1, 2, MIXERS["gru"], **PRE)
        return Checkpoint(config, random_state(config), TOKENIZER)
    return writer(kind)


def batches_of(checkpoint: Checkpoint) -> list[Batch]:
    sides = {
        "encoder": ragged([7, 5, 8, 6, 3, 8], seed=1, side="between", columns=9),
        "decoder": ragged([8, 6, 5, 7, 8, 4], seed=2),
    }
    both = [side for stack, side in sides.items() if getattr(checkpoint.config, stack)]
    return [Batch(*(part[rows] for side in both for part in side)) for rows in (slice(0, 4), slice(4, 6))]


def sparse_of(checkpoint: Checkpoint) -> Checkpoint:
    names = [f"{name}.weight" for name in linear_names(checkpoint.config)]
    return replace(
        checkpoint, state=checkpoint.state | {name: magnitude(checkpoint.state[name], 0.5) for name in names}
    )


@contextmanager
def hearing(module: nn.Module, heard: list[Tensor]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _, given: heard.append(given[0].flatten(0, -2).double()))
    yield
    handle.remove()


def seen(model: Transformer, name: str, batches: list[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """What a linear is given, and the tokens that its sub-layer is added to."""
    part = name.rpartition(".")[0]
    layer, _, kind = part.rpartition(".")
    given, tokens = list[Tensor](), list[Tensor]()
    entered = model.get_submodule(f"{layer}.{kind}_norm" if model.get_submodule(layer).pre else part)
    with torch.no_grad(), hearing(model.get_submodule(name), given), hearing(entered, tokens):
        for batch in batches:
            batch.run(model)
    return torch.cat(given).numpy(), torch.cat(tokens).numpy()


def naive(full: Transformer, sparse: Transformer, batches: list[Batch]) -> None:
    """Whole models run for every linear; each row is solved for by itself."""
    for name in linear_names(full.config):
        whole, linear = full.get_submodule(name), sparse.get_submodule(name)
        (x, stream), (given, other) = (seen(model, name, batches) for model in (full, sparse))
        wanted = x @ whole.weight.detach().double().numpy().T + whole.bias.detach().double().numpy()
        if name.endswith(LAST):
            wanted += stream - other
        weight = linear.weight.detach().double().numpy()
        mean, centred = given.mean(0), given - given.mean(0)
        strength = np.sqrt(DAMPING * (centred**2).sum(0).mean())
        left = wanted - given @ weight.T
        for row, columns in enumerate(weight != 0):
            count = int(columns.sum())
            rows = np.vstack([centred[:, columns], strength * np.eye(count)])
            target = np.append(left[:, row] - left[:, row].mean(), np.zeros(count))
            change = np.linalg.lstsq(rows, target, rcond=None)[0]
            linear.weight.data[row, torch.from_numpy(columns)] += torch.from_numpy(change).float()
            linear.bias.data[row] = float(left[:, row].mean() - mean[columns] @ change)


@pytest.mark.parametrize("kind", ["encoder", "absent mixer", "post", "pre", "own table", "alone, pre", "lstm", "gru"])
def test_linears_are_fitted_one_after_the_other(kind: str) -> None:
    checkpoint = model_of(kind)
    batches, thin = batches_of(checkpoint), sparse_of(checkpoint)
    found, expected = thin.to_torch(), thin.to_torch()
    fits = refit_sparse(checkpoint.to_torch(), found, batches, damping=DAMPING)
    naive(checkpoint.to_torch(), expected, batches)
    names = linear_names(checkpoint.config)
    moved = 0.0
    for name, value in found.state_dict().items():
        if name.endswith(ABSENT):
            continue
        torch.testing.assert_close(value, expected.state_dict()[name], atol=2e-3, rtol=2e-3)
        if name.rpartition(".")[0] not in names:
            assert torch.equal(value, thin.state[name])
        elif name.endswith(".weight"):
            assert torch.equal(value == 0, thin.state[name] == 0)
            moved = max(moved, float((value - thin.state[name]).abs().max()))
    assert moved > 0.05
    assert all(fit.after <= fit.before for fit in fits)
    assert {f"{fit.stack}.{fit.layer}" for fit in fits} == {".".join(name.split(".")[:2]) for name in names}


@pytest.mark.parametrize("kind", ["encoder", "pre", "alone"])
def test_the_fitted_model_is_nearer_to_what_it_was(kind: str) -> None:
    checkpoint = model_of(kind)
    batches, thin = batches_of(checkpoint), sparse_of(checkpoint)
    fitted = thin.to_torch()
    refit_sparse(checkpoint.to_torch(), fitted, batches, damping=DAMPING)
    with torch.no_grad():
        wanted, before, after = (batches[0].run(one).hidden for one in (checkpoint.to_torch(), thin.to_torch(), fitted))
    assert float((after - wanted).norm()) < 0.7 * float((before - wanted).norm())


def test_without_zeros_all_stays_as_it_is() -> None:
    checkpoint = writer("post")
    model = checkpoint.to_torch()
    fits = refit_sparse(checkpoint.to_torch(), model, batches_of(checkpoint), damping=DAMPING)
    assert max(fit.before for fit in fits) < 1e-5
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, checkpoint.state[name], atol=1e-4, rtol=1e-4)
