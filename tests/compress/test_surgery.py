from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from masking import masked as masking
from models import WRITERS, ragged, writer
from tiny import of_encoder
from torch import Tensor

from slimformer.compress.calibration import Batch
from slimformer.compress.surgery import check_float, remove_from, remove_units
from slimformer.compress.units import Kept, stacks, sublayers
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import INT8_DYNAMIC, INT8_ROWS, LanguageHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.packing import Packing

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0], [2, 11, 12, 3, 0]])
MASK = (IDS != 0).long()


def masked(checkpoint: Checkpoint, kept: Kept) -> Tensor:
    """Hidden states of the whole model with the units that go multiplied by 0, written out layer by layer."""
    whole = checkpoint.to_torch()
    packing = Packing.from_mask(MASK)
    with torch.no_grad():
        x = whole.embeddings(packing.pack(IDS), packing.positions, None)
        for old in kept.layers["encoder"]:
            heads, neurons = (kept.units[f"encoder.{old}.{part}"] for part in ("mixer", "ffn"))
            layer, sizes = whole.encoder[old], checkpoint.config.encoder[old]
            assert sizes.mixer is not None
            assert sizes.ffn is not None
            head_mask = torch.tensor([float(h in heads) for h in range(sizes.mixer.heads)])
            neuron_mask = torch.tensor([float(n in neurons) for n in range(sizes.ffn.width)])
            mixed = layer.mixer.mix(x, packing) * head_mask.repeat_interleave(sizes.mixer.head_width)
            x = layer.mixer_norm(x + layer.mixer.out(mixed))
            fed = layer.ffn.activation(layer.ffn.up(x)) * neuron_mask
            x = layer.ffn_norm(x + layer.ffn.down(fed))
    return x


def hidden(checkpoint: Checkpoint) -> Tensor:
    with torch.no_grad():
        result: Tensor = checkpoint.to_torch()(IDS, MASK).hidden
    return result


KEPT = [
    of_encoder((0, 1, 2), ((0, 2), (1,), (0, 1, 2, 3)), ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (0, 7), (3,))),
    of_encoder((0, 1, 2), ((), (0, 1), (1, 2)), ((1, 2), (), (0, 5))),
    of_encoder((0, 2), ((1,), (0, 3)), ((0, 4, 9), (2, 3))),
    of_encoder((1,), ((),), ((),)),
]


@pytest.mark.parametrize("kept", KEPT, ids=["heads and neurons", "whole sub-layers", "whole layers", "nothing left"])
def test_removing_equals_masking(uneven: Checkpoint, kept: Kept) -> None:
    small = remove_from(uneven, kept)
    torch.testing.assert_close(hidden(small), masked(uneven, kept), atol=1e-5, rtol=1e-5)
    assert sum(value.numel() for value in small.state.values()) < sum(value.numel() for value in uneven.state.values())


@pytest.mark.parametrize("kept", KEPT)
def test_result_saves_and_loads_strictly(uneven: Checkpoint, kept: Kept, tmp_path: Path) -> None:
    small = remove_from(uneven, kept)
    small.save(tmp_path / "small")
    again = load_own(tmp_path / "small")
    assert again.config == small.config
    assert again.provenance == small.provenance
    torch.testing.assert_close(hidden(again), hidden(small), atol=0, rtol=0)


def test_input_is_untouched_and_not_shared(uneven: Checkpoint) -> None:
    before = {name: value.clone() for name, value in uneven.state.items()}
    small = remove_from(uneven, KEPT[1])
    for name, value in small.state.items():
        if name.startswith("encoder.") and value.shape != before.get(name, value).shape:
            value.zero_()
    small.state["encoder.0.mixer.bias"].zero_()
    assert all(torch.equal(uneven.state[name], value) for name, value in before.items())


def test_keeping_everything_changes_nothing(uneven: Checkpoint) -> None:
    config, state = remove_units(uneven.config, uneven.state, Kept.everything(uneven.config))
    assert config == uneven.config
    assert all(torch.equal(state[name], value) for name, value in uneven.state.items())
    assert state.keys() == uneven.state.keys()


def test_absent_sublayers_stay_absent_when_pruned_again(uneven: Checkpoint) -> None:
    once = remove_from(uneven, KEPT[1])
    twice = remove_from(once, of_encoder((0, 1), ((), (1,)), ((1,), ())))
    assert twice.config.encoder[0].mixer is None
    assert twice.config.encoder[1].ffn is None
    assert torch.equal(twice.state["encoder.0.mixer.bias"], uneven.state["encoder.0.mixer.out.bias"])


def test_provenance_names_original_units_through_two_removals(uneven: Checkpoint) -> None:
    once = remove_from(uneven, of_encoder((0, 2), ((0, 2), (1, 3)), ((1, 4, 9), (0, 5))))
    twice = remove_from(once, of_encoder((1,), ((1,),), ((0, 1),)))
    assert once.provenance["kept"] == {"layers": [0, 2], "heads": [[0, 2], [1, 3]], "neurons": [[1, 4, 9], [0, 5]]}
    assert twice.provenance["kept"] == {"layers": [2], "heads": [[3]], "neurons": [[0, 5]]}
    counts = {"layers": 3, "heads": [3, 2, 4], "neurons": [10, 8, 6], "channels": 8}
    assert once.provenance["kept_of"] == twice.provenance["kept_of"] == counts
    direct = remove_from(uneven, of_encoder((2,), ((3,),), ((0, 5),)))
    torch.testing.assert_close(hidden(twice), hidden(direct), atol=0, rtol=0)


def test_counts_of_a_model_that_was_pruned_without_a_note_of_them_are_unknown(uneven: Checkpoint) -> None:
    once = remove_from(uneven, KEPT[2])
    older = replace(once, provenance={"kept": once.provenance["kept"]})
    assert "kept_of" not in remove_from(older, Kept.everything(once.config)).provenance


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (of_encoder((0, 3), ((0,), (0,)), ((0,), (0,))), r"layers to keep, \[0, 3\].*below 3"),
        (of_encoder((0,), ((1, 0),), ((0,),)), r"heads of layer 0.*\[1, 0\].*below 3"),
        (of_encoder((1,), ((0,),), ((8,),)), r"neurons of layer 1.*\[8\].*below 8"),
    ],
)
def test_units_that_are_not_there_are_refused(uneven: Checkpoint, kept: Kept, message: str) -> None:
    with pytest.raises(InputError, match=message):
        remove_units(uneven.config, uneven.state, kept)


def test_int8_is_refused(uneven: Checkpoint) -> None:
    layer = uneven.config.encoder[1]
    assert layer.ffn is not None
    coded = replace(layer, ffn=replace(layer.ffn, output_format=INT8_DYNAMIC))
    config = uneven.config.with_layers((uneven.config.encoder[0], coded))
    with pytest.raises(InputError, match=r"the ffn of layer 1 is in int8; prune first"):
        remove_units(config, {}, Kept.everything(config))


# --- models that write ---

WRITING = Batch(*ragged((9, 3, 6), seed=1), *ragged((4, 7, 2), seed=2, side="between", columns=9))


def random_kept(checkpoint: Checkpoint, seed: int) -> Kept:
    """Some layers of each stack, one at least, and some units of every sub-layer, maybe none."""
    random = np.random.default_rng(seed)

    def some(count: int, least: int) -> tuple[int, ...]:
        return tuple(sorted(map(int, random.choice(count, random.integers(least, count + 1), replace=False))))

    config = checkpoint.config
    layers = {stack: some(len(own), 1) for stack, own in stacks(config).items()}
    return Kept(layers, {sub.name: some(sub.count, 0) for sub in sublayers(config) if sub.layer in layers[sub.stack]})


def run(checkpoint: Checkpoint, masks: dict[str, Tensor] | None = None) -> Tensor:
    """The decoder's tokens, of a decoder alone those of the targets."""
    model = checkpoint.to_torch()
    batch = WRITING if checkpoint.config.encoder else Batch(WRITING.target_ids, WRITING.target_mask)
    with torch.no_grad(), masking(model, masks or {}):
        return batch.run(model).hidden


def masks_of(checkpoint: Checkpoint, kept: Kept) -> dict[str, Tensor]:
    """0 for every unit and layer that goes."""
    masks = {}
    for stack, layers in stacks(checkpoint.config).items():
        gone = set(range(len(layers))) - set(kept.layers[stack])
        masks |= {f"{stack}.{i}": torch.tensor(0.0) for i in gone}
    for sub in sublayers(checkpoint.config):
        masks[sub.name] = torch.zeros(sub.count)
        masks[sub.name][list(kept.units.get(sub.name, ()))] = 1
    return masks


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", WRITERS)
def test_removing_equals_masking_in_models_that_write(kind: str, seed: int) -> None:
    whole = writer(kind)
    kept = random_kept(whole, seed)
    small = remove_from(whole, kept).check("small")
    torch.testing.assert_close(run(small), run(whole, masks_of(whole, kept)), atol=1e-5, rtol=1e-5)
    assert float((run(small) - run(whole)).abs().max()) > 0.01


@pytest.mark.parametrize("kind", WRITERS)
def test_a_pruned_model_that_writes_loads_strictly(kind: str, tmp_path: Path) -> None:
    small = remove_from(writer(kind), random_kept(writer(kind), 0))
    again = load_own(small.save(tmp_path / "small"))
    assert again.config == small.config
    assert Kept.from_dict(again.provenance["kept"]).layers == random_kept(writer(kind), 0).layers
    torch.testing.assert_close(run(again), run(small), atol=0, rtol=0)


def test_a_cross_head_is_its_rows_and_columns() -> None:
    whole = writer("post")
    kept = Kept.everything(whole.config)
    small = remove_from(whole, Kept(kept.layers, {**kept.units, "decoder.1.cross": (1,)}))
    for name, rows in {"q": [slice(12, 24)], "kv": [slice(12, 24), slice(36, 48)]}.items():
        for kind in ("weight", "bias"):
            old = whole.state[f"decoder.1.cross.{name}.{kind}"]
            assert torch.equal(small.state[f"decoder.1.cross.{name}.{kind}"], torch.cat([old[one] for one in rows]))
    old = whole.state["decoder.1.cross.out.weight"]
    assert torch.equal(small.state["decoder.1.cross.out.weight"], old[:, 12:24])
    assert small.config.decoder[1].cross == replace(whole.config.decoder[1].cross, heads=1)
    assert small.config.decoder[0] == whole.config.decoder[0]


def test_a_group_is_its_queries_with_their_keys_and_values() -> None:
    whole = writer("grouped")  # 6 heads of 5, two to a key: 30 rows of queries, 15 of keys, 15 of values
    kept = Kept.everything(whole.config)
    small = remove_from(whole, Kept(kept.layers, {**kept.units, "decoder.0.mixer": (0, 2)}))
    rows = [slice(10), slice(20, 30), slice(30, 35), slice(40, 45), slice(45, 50), slice(55, 60)]
    for kind in ("weight", "bias"):
        old = whole.state[f"decoder.0.mixer.qkv.{kind}"]
        assert torch.equal(small.state[f"decoder.0.mixer.qkv.{kind}"], torch.cat([old[one] for one in rows]))
    old = whole.state["decoder.0.mixer.out.weight"]
    assert torch.equal(small.state["decoder.0.mixer.out.weight"], torch.cat([old[:, :10], old[:, 20:]], 1))
    assert small.config.decoder[0].mixer == replace(whole.config.decoder[0].mixer, heads=4)


def test_cross_attention_without_heads_keeps_its_bias() -> None:
    whole = writer("post")
    kept = Kept.everything(whole.config)
    small = remove_from(whole, Kept(kept.layers, {**kept.units, "decoder.2.cross": ()}))
    assert small.config.decoder[2].cross is None
    assert torch.equal(small.state["decoder.2.cross.bias"], whole.state["decoder.2.cross.out.bias"])
    assert "decoder.2.cross_norm.weight" in small.state


def test_a_cell_stays_whole() -> None:
    whole = writer("lstm")
    small = remove_from(whole, Kept({"encoder": (0,), "decoder": (2,)}, {}))
    assert small.config.decoder[0].mixer == whole.config.decoder[2].mixer
    names = [name for name in whole.state if name.startswith("decoder.2.mixer.")]
    assert len(names) == 6
    assert all(torch.equal(small.state[name.replace(".2.", ".0.")], whole.state[name]) for name in names)


def test_both_stacks_keep_their_first_models_numbers() -> None:
    once = remove_from(writer("post"), random_kept(writer("post"), 5))
    everything = Kept.everything(once.config)
    last = {stack: (len(own) - 1,) for stack, own in everything.layers.items()}
    twice = remove_from(once, Kept.everything(once.config, last))
    found = Kept.from_dict(twice.provenance["kept"])
    assert found.layers == {stack: own[-1:] for stack, own in random_kept(writer("post"), 5).layers.items()}
    direct = remove_from(writer("post"), found)
    torch.testing.assert_close(run(twice), run(direct), atol=0, rtol=0)


ONE = {"encoder": (0,), "decoder": (0,)}


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (Kept({"encoder": (0,), "decoder": (3,)}, {}), r"decoder layers to keep, \[3\].*below 3"),
        (Kept({"encoder": (0,), "decoder": ()}, {}), r"no layer of the decoder would stay"),
        (Kept({"decoder": (0,)}, {}), r"no layer of the encoder would stay"),
        (Kept(ONE, {"decoder.0.cross": (0, 2)}), r"cross heads of decoder layer 0 to keep, \[0, 2\].*below 2"),
        (Kept(ONE, {"encoder.0.cross": (0,)}), r"encoder.0.cross is no attention or FFN of a layer that stays"),
        (Kept(ONE, {"decoder.1.ffn": (0,)}), r"decoder.1.ffn is no attention or FFN of a layer that stays"),
    ],
)
def test_what_a_decoder_has_not_is_refused(kept: Kept, message: str) -> None:
    with pytest.raises(InputError, match=message):
        remove_from(writer("post"), kept)


def test_int8_in_a_model_that_writes_is_refused() -> None:
    config = WRITERS["post"]
    cross = replace(config.decoder[0].cross, input_format=INT8_DYNAMIC)
    layers = (replace(config.decoder[0], cross=cross), *config.decoder[1:])
    with pytest.raises(InputError, match=r"the cross of decoder layer 0 is in int8; prune first"):
        check_float(config.with_layers(config.encoder, layers))
    table = replace(config, head=LanguageHead(2, 3, tied=False, format=INT8_ROWS))
    with pytest.raises(InputError, match=r"a table of the model is in int8; prune first"):
        check_float(table)
    check_float(config)
