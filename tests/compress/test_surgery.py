from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slimformer.compress.surgery import Kept, remove_from, remove_units
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import INT8_DYNAMIC
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
        for old, heads, neurons in zip(kept.layers, kept.heads, kept.neurons, strict=True):
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
    Kept((0, 1, 2), ((0, 2), (1,), (0, 1, 2, 3)), ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (0, 7), (3,))),
    Kept((0, 1, 2), ((), (0, 1), (1, 2)), ((1, 2), (), (0, 5))),
    Kept((0, 2), ((1,), (0, 3)), ((0, 4, 9), (2, 3))),
    Kept((1,), ((),), ((),)),
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
    twice = remove_from(once, Kept((0, 1), ((), (1,)), ((1,), ())))
    assert twice.config.encoder[0].mixer is None
    assert twice.config.encoder[1].ffn is None
    assert torch.equal(twice.state["encoder.0.mixer.bias"], uneven.state["encoder.0.mixer.out.bias"])


def test_provenance_names_original_units_through_two_removals(uneven: Checkpoint) -> None:
    once = remove_from(uneven, Kept((0, 2), ((0, 2), (1, 3)), ((1, 4, 9), (0, 5))))
    twice = remove_from(once, Kept((1,), ((1,),), ((0, 1),)))
    assert once.provenance["kept"] == {"layers": [0, 2], "heads": [[0, 2], [1, 3]], "neurons": [[1, 4, 9], [0, 5]]}
    assert twice.provenance["kept"] == {"layers": [2], "heads": [[3]], "neurons": [[0, 5]]}
    direct = remove_from(uneven, Kept((2,), ((3,),), ((0, 5),)))
    torch.testing.assert_close(hidden(twice), hidden(direct), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (Kept((0, 3), ((0,), (0,)), ((0,), (0,))), r"layers to keep, \[0, 3\].*below 3"),
        (Kept((0,), ((1, 0),), ((0,),)), r"heads of layer 0.*\[1, 0\].*below 3"),
        (Kept((1,), ((0,),), ((8,),)), r"neurons of layer 1.*\[8\].*below 8"),
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
