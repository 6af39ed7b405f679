from dataclasses import replace

import numpy as np
import pytest
import torch
from models import PRE, TOKENIZER, WRITERS, ragged, random_state, tiny_config, writer
from tiny import of_encoder

from slimformer.compress.calibration import Batch
from slimformer.compress.refit import refit
from slimformer.compress.surgery import remove_from
from slimformer.compress.units import Kept
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import TransformerConfig
from slimformer.transformer.packing import Packing

LENGTHS = torch.arange(40) % 6 + 3
MASK = (torch.arange(8) < LENGTHS[:, None]).long()
IDS = torch.randint(4, 24, MASK.shape, generator=torch.Generator().manual_seed(0)) * MASK
BATCHES = [Batch(IDS[:15], MASK[:15]), Batch(IDS[15:], MASK[15:])]


def test_first_two_sublayers_are_numpys_on_the_concatenated_tokens(uneven: Checkpoint) -> None:
    """Written out once more with numpy: targets are the unpruned sums x + f(x) less the pruned model's tokens."""
    kept = of_encoder((0, 1, 2), ((0, 2), (1,), (0, 3)), ((1, 2, 3), (0, 7), (3,)))
    small = remove_from(uneven, kept)
    full, pruned = uneven.to_torch(), small.to_torch()
    state, fits = refit(uneven.to_torch(), small.to_torch(), kept, BATCHES, damping=0.0)
    packing = Packing.from_mask(MASK)
    with torch.no_grad():
        x = full.embeddings(packing.pack(IDS), packing.positions, None)
        wanted = x + full.encoder[0].mixer(x, packing)
        a = pruned.encoder[0].mixer.mix(x, packing)
        solution, *_ = np.linalg.lstsq(with_ones(a), (wanted - x).double().numpy(), rcond=None)
        fitted = torch.from_numpy(with_ones(a) @ solution).float()
        below, y = full.encoder[0].mixer_norm(wanted), pruned.encoder[0].mixer_norm(x + fitted)
        wanted = below + full.encoder[0].ffn(below)
        b = pruned.encoder[0].ffn.activation(pruned.encoder[0].ffn.up(y))
        target = (wanted - y).double().numpy()
        second, *_ = np.linalg.lstsq(with_ones(b), target, rcond=None)
    mine = state["encoder.0.mixer.out.weight"] @ a.T + state["encoder.0.mixer.out.bias"][:, None]
    np.testing.assert_allclose(mine.T.numpy(), fitted.numpy(), atol=1e-4)
    np.testing.assert_allclose(state["encoder.0.ffn.down.weight"].numpy(), second[:-1].T, atol=1e-3)
    np.testing.assert_allclose(state["encoder.0.ffn.down.bias"].numpy(), second[-1], atol=1e-3)
    error = np.linalg.norm(with_ones(b) @ second - target) / np.linalg.norm(target)
    assert fits[1].after == pytest.approx(error, abs=1e-3)
    assert all(fit.after <= fit.before + 1e-6 for fit in fits)
    assert [(fit.layer, fit.part) for fit in fits[:3]] == [(0, "mixer"), (0, "ffn"), (1, "mixer")]


def with_ones(a: torch.Tensor) -> np.ndarray:
    return np.hstack([a.double().numpy(), np.ones((len(a), 1))])


def test_absent_sublayer_gets_the_mean_of_its_target(uneven: Checkpoint) -> None:
    kept = of_encoder((0, 1, 2), ((), (0, 1), (0, 1, 2, 3)), (tuple(range(10)), tuple(range(8)), tuple(range(6))))
    small = remove_from(uneven, kept)
    state, _ = refit(uneven.to_torch(), small.to_torch(), kept, BATCHES)
    packing, full = Packing.from_mask(MASK), uneven.to_torch()
    with torch.no_grad():
        x = full.embeddings(packing.pack(IDS), packing.positions, None)
        expected = full.encoder[0].mixer(x, packing).mean(0)
    torch.testing.assert_close(state["encoder.0.mixer.bias"], expected, atol=1e-5, rtol=1e-5)


def test_nothing_removed_stays_as_it_is(uneven: Checkpoint) -> None:
    state, fits = refit(uneven.to_torch(), uneven.to_torch(), Kept.everything(uneven.config), BATCHES)
    assert max(fit.before for fit in fits) < 1e-6
    again = replace(uneven, state=state).to_torch()(IDS, MASK)
    torch.testing.assert_close(again.hidden, uneven.to_torch()(IDS, MASK).hidden, atol=1e-5, rtol=1e-5)


def test_skipped_layers_are_passed_by_the_unpruned_model(uneven: Checkpoint) -> None:
    """The only layer left, number 2, aims at the unpruned tokens after layer 2's mixer."""
    kept = Kept.everything(uneven.config, {"encoder": (2,)})
    small = remove_from(uneven, kept)
    _, fits = refit(uneven.to_torch(), small.to_torch(), kept, BATCHES, damping=1e-3)
    packing, full = Packing.from_mask(MASK), uneven.to_torch()
    with torch.no_grad():
        x = full.embeddings(packing.pack(IDS), packing.positions, None)
        deep = full.encoder[1](full.encoder[0](x, packing), packing)
        target = deep + full.encoder[2].mixer(deep, packing) - x
        error = (target - full.encoder[2].mixer(x, packing)).norm() / target.norm()
    assert fits[0].before == pytest.approx(float(error), rel=1e-4)
    assert fits[0].after < fits[0].before


# --- models that write, and pre-norm encoders ---

SOURCES = ragged([3 + i % 7 for i in range(40)], seed=1)
TARGETS = ragged([2 + i % 9 for i in range(40)], seed=2, side="left")


def written(config: TransformerConfig) -> list[Batch]:
    """Two batches; an encoder or a decoder by itself is given the sources."""
    sides = (SOURCES, TARGETS) if config.encoder and config.decoder else (SOURCES,)
    return [Batch(*(part[rows] for side in sides for part in side)) for rows in (slice(0, 15), slice(15, 40))]


OUTPUT = {"mixer": "out", "cross": "out", "ffn": "down"}


class Watch:
    """What is at one sub-layer of a model, batch by batch: what enters its last linear, tokens before and after."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        model, part = checkpoint.to_torch(), name.split(".")[-1]
        absent = f"{name}.bias" in checkpoint.state
        seen: dict[str, list[torch.Tensor]] = {"given": [], "change": [], "norm": []}
        if not absent:
            last = model.get_submodule(f"{name}.{OUTPUT[part]}")
            last.register_forward_pre_hook(lambda m, inputs: seen["given"].append(inputs[0]))
            last.register_forward_hook(lambda m, inputs, result: seen["change"].append(result))
        norm = model.get_submodule(f"{name}_norm")
        norm.register_forward_pre_hook(lambda m, inputs: seen["norm"].append(inputs[0]))
        with torch.no_grad():
            for batch in written(checkpoint.config):
                batch.run(model)
        normed = torch.cat(seen["norm"])
        change = model.get_submodule(name).bias.detach() if absent else torch.cat(seen["change"])
        pre = checkpoint.config.norm_place == "pre"
        self.before = normed if pre else normed - change
        self.after = normed + change if pre else normed
        self.given = normed.new_zeros(len(normed), 0) if absent else torch.cat(seen["given"])


def half(checkpoint: Checkpoint, layers: dict[str, tuple[int, ...]] | None = None) -> Kept:
    """Every second head and neuron of some layers, by default of all; the last FFN of all goes."""
    kept = Kept.everything(checkpoint.config, layers)
    units = {name: own[::2] for name, own in kept.units.items()}
    return Kept(kept.layers, {**units, [name for name in units if name.endswith("ffn")][-1]: ()})


ENCODERS = {"encoder": tiny_config(), "encoder, pre": replace(tiny_config(), **PRE)}
FEWER: dict[str, dict[str, tuple[int, ...]]] = {
    "post": {"encoder": (0, 2), "decoder": (0, 2)},
    "pre": {"encoder": (1,), "decoder": (1, 2)},
}
CASES = [(kind, None) for kind in ("post", "pre", "own table", "lstm", "alone", "alone, pre", *ENCODERS)]


@pytest.mark.parametrize(("kind", "layers"), [*CASES, *FEWER.items()])
def test_every_sublayer_is_numpys_best(kind: str, layers: dict[str, tuple[int, ...]] | None) -> None:
    """Seen through hooks in the fitted model: given the fits before it, no other linear comes closer to the target."""
    config = ENCODERS[kind] if kind in ENCODERS else WRITERS[kind]
    whole = Checkpoint(config, random_state(config), TOKENIZER)
    kept = half(whole, layers)
    small = remove_from(whole, kept)
    state, fits = refit(whole.to_torch(), small.to_torch(), kept, written(whole.config), damping=0.0)
    fitted = replace(small, state=state)
    parts = {stack: 3 if stack == "decoder" and whole.config.encoder else 2 for stack in kept.layers}
    assert len(fits) == sum(parts[stack] * len(own) for stack, own in kept.layers.items())
    for fit in fits:
        mine = Watch(fitted, f"{fit.stack}.{fit.layer}.{fit.part}")
        old = kept.layers[fit.stack][fit.layer]
        target = (Watch(whole, f"{fit.stack}.{old}.{fit.part}").after - mine.before).double().numpy()
        rows = with_ones(mine.given)
        best, *_ = np.linalg.lstsq(rows, target, rcond=None)
        least = np.linalg.norm(rows @ best - target) / np.linalg.norm(target)
        reached = np.linalg.norm((mine.after - mine.before).double().numpy() - target) / np.linalg.norm(target)
        assert reached == pytest.approx(least, rel=1e-3, abs=1e-4)
        assert fit.after == pytest.approx(reached, rel=1e-3, abs=1e-3)
        assert fit.after <= fit.before + 1e-6
    assert max(fit.before - fit.after for fit in fits) > 0.1


def test_a_cell_without_projection_stays_and_what_follows_corrects_it() -> None:
    whole = writer("ssru")
    kept = half(whole)
    small = remove_from(whole, kept)
    state, fits = refit(whole.to_torch(), small.to_torch(), kept, written(whole.config))
    cells = [fit for fit in fits if (fit.stack, fit.part) == ("decoder", "mixer")]
    assert [fit.layer for fit in cells] == [0, 1, 2]
    assert all(fit.before == fit.after for fit in cells)
    assert cells[1].before > 0.01
    assert all(torch.equal(state[name], value) for name, value in small.state.items() if "decoder.1.mixer." in name)
    assert all(fit.after < fit.before for fit in fits if fit.part == "cross")


@pytest.mark.parametrize("kind", WRITERS)
def test_nothing_removed_stays_in_models_that_write(kind: str) -> None:
    whole = writer(kind)
    batches = written(whole.config)
    state, fits = refit(whole.to_torch(), whole.to_torch(), Kept.everything(whole.config), batches)
    assert max(fit.before for fit in fits) < 1e-5
    with torch.no_grad():
        again, before = (one.to_torch() for one in (replace(whole, state=state), whole))
        torch.testing.assert_close(batches[0].run(again).hidden, batches[0].run(before).hidden, atol=1e-4, rtol=1e-4)


# --- fewer channels ---

CHANNELS = (0, 2, 3, 5, 6, 8, 9, 12, 13, 14, 15, 18, 19, 21, 22, 24, 26, 27, 29, 30, 31)
NARROWED = ("encoder", "encoder, pre", "post", "pre", "own table", "lstm", "alone, pre")


@pytest.mark.parametrize("kind", NARROWED)
def test_every_sublayer_of_a_narrower_model_is_numpys_best(kind: str) -> None:
    """The targets are the kept channels of the unpruned model's tokens after each sub-layer."""
    config = ENCODERS[kind] if kind in ENCODERS else WRITERS[kind]
    whole = Checkpoint(config, random_state(config), TOKENIZER)
    kept = replace(Kept.everything(config, FEWER.get(kind)), channels=CHANNELS)
    small = remove_from(whole, kept)
    state, fits = refit(whole.to_torch(), small.to_torch(), kept, written(config), damping=0.0)
    fitted = replace(small, state=state)
    for fit in fits:
        mine = Watch(fitted, f"{fit.stack}.{fit.layer}.{fit.part}")
        old = kept.layers[fit.stack][fit.layer]
        wanted = Watch(whole, f"{fit.stack}.{old}.{fit.part}").after[:, CHANNELS]
        target = (wanted - mine.before).double().numpy()
        rows = with_ones(mine.given)
        best, *_ = np.linalg.lstsq(rows, target, rcond=None)
        least = np.linalg.norm(rows @ best - target) / np.linalg.norm(target)
        reached = np.linalg.norm((mine.after - mine.before).double().numpy() - target) / np.linalg.norm(target)
        assert reached == pytest.approx(least, rel=1e-3, abs=1e-4)
        assert fit.after == pytest.approx(reached, rel=1e-3, abs=1e-3)
        assert fit.after <= fit.before + 1e-6
    assert max(fit.before - fit.after for fit in fits) > 0.05


def test_a_refitted_narrower_model_is_nearer_to_the_unpruned_one() -> None:
    config = tiny_config()
    whole = Checkpoint(config, random_state(config), TOKENIZER)
    kept = replace(Kept.everything(config), channels=CHANNELS)
    small = remove_from(whole, kept)
    state, _ = refit(whole.to_torch(), small.to_torch(), kept, written(config))
    ids, mask = ragged([3 + i % 9 for i in range(60)], seed=9)
    with torch.no_grad():
        wanted = whole.to_torch()(ids, mask).hidden[:, CHANNELS]
        before, after = (
            float((one.to_torch()(ids, mask).hidden - wanted).norm()) for one in (small, replace(small, state=state))
        )
    assert after < 0.9 * before
