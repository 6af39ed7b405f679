"""PyTorch's own layers, copied both ways: equal outputs, equal state dicts, and what does not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import POSITIONS, TOKENIZER, VOCAB_SIZE, WIDTH, ragged
from torch import Tensor, nn

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.families.torch_nn import from_torch, to_torch_state
from slimformer.transformer.packing import Packing

HEADS, NEURONS = 4, 48
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def config(encoder: int, decoder: int, *, activation: str, place: str, final_norm: bool = True) -> TransformerConfig:
    attention = AttentionConfig(HEADS, WIDTH // HEADS)
    layer = LayerConfig(attention, FeedForwardConfig(NEURONS, activation))
    crossed = replace(layer, cross=attention if encoder else None)
    return TransformerConfig(
        d_model=WIDTH,
        embedding=EmbeddingConfig(VOCAB_SIZE, POSITIONS, position_kind="sinusoidal", scaled=True, norm=False),
        encoder=(layer,) * encoder,
        decoder=(crossed,) * decoder,
        text=TextConfig(POSITIONS),
        head=LanguageHead(start_id=2, end_id=3) if decoder else None,
        norm_eps=1e-5,
        norm_place=place,
        final_norm=final_norm,
    )


def randomize(module: nn.Module) -> nn.Module:
    """No weight at a value that would hide a mistake: theirs start with norms at 1 and biases at 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    return module.eval()


def table() -> dict[str, Tensor]:
    return {"embeddings.tokens.weight": torch.randn(VOCAB_SIZE, WIDTH, generator=torch.Generator().manual_seed(4))}


def embedded(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, T, D) of what enters the first layer."""
    packing = Packing.from_mask(mask)
    return packing.padded(model.embeddings(packing.pack(ids), packing.positions))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.inference_mode()
def test_equals_nn_transformer(activation: str, place: str) -> None:
    pre = place == "pre"
    theirs = nn.Transformer(WIDTH, HEADS, 2, 3, NEURONS, 0.0, activation=activation, batch_first=True, norm_first=pre)
    randomize(theirs)
    ours = from_torch(theirs, config(2, 3, activation=activation, place=place), TOKENIZER, table()).to_torch()
    ids, mask = ragged((5, 9, 2))
    target, target_mask = ragged((7, 1, 4), seed=1)
    hidden = theirs(
        embedded(ours, ids, mask),
        embedded(ours, target, target_mask),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(7).isinf(),
        src_key_padding_mask=mask == 0,
        tgt_key_padding_mask=target_mask == 0,
        memory_key_padding_mask=mask == 0,
    )
    output = ours(ids, mask, target_ids=target, target_mask=target_mask)
    torch.testing.assert_close(output.hidden, hidden[target_mask.bool()], **CLOSE)
    logits = hidden[target_mask.bool()] @ table()["embeddings.tokens.weight"].T
    torch.testing.assert_close(output.result, logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("place", ["post", "pre"])
@torch.inference_mode()
def test_an_encoder_and_a_causal_encoder(place: str) -> None:
    one = nn.TransformerEncoderLayer(WIDTH, HEADS, NEURONS, 0.0, batch_first=True, norm_first=place == "pre")
    theirs = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
    randomize(theirs)
    ids, mask = ragged((5, 9, 2))
    for encoder, decoder in ((2, 0), (0, 2)):
        wanted = config(encoder, decoder, activation="relu", place=place, final_norm=False)
        ours = from_torch(theirs.state_dict(), wanted, TOKENIZER, table()).to_torch()
        causal = nn.Transformer.generate_square_subsequent_mask(9).isinf() if decoder else None
        hidden = theirs(embedded(ours, ids, mask), mask=causal, src_key_padding_mask=mask == 0)
        torch.testing.assert_close(ours(ids, mask).hidden, hidden[mask.bool()], **CLOSE)


def test_back_to_torch() -> None:
    theirs = randomize(nn.Transformer(WIDTH, HEADS, 1, 2, NEURONS, 0.0, batch_first=True))
    checkpoint = from_torch(theirs, config(1, 2, activation="relu", place="post"), TOKENIZER, table())
    back = to_torch_state(checkpoint)
    assert set(back) == set(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(back[name], value)


def test_what_does_not_fit() -> None:
    theirs = randomize(nn.Transformer(WIDTH, HEADS, 1, 2, NEURONS, 0.0, batch_first=True))
    state = theirs.state_dict()
    right = config(1, 2, activation="relu", place="post")
    with pytest.raises(InputError, match=r"encoder\.layers\.1\.linear1\.bias is missing"):
        from_torch(theirs, config(2, 2, activation="relu", place="post"), TOKENIZER, table())
    with pytest.raises(InputError, match=r"decoder\.norm\.bias is unexpected"):
        from_torch(theirs, replace(right, final_norm=False), TOKENIZER, table())
    with pytest.raises(InputError, match=r"embeddings\.tokens\.weight is missing"):
        from_torch(theirs, right, TOKENIZER)
    narrow = replace(right, encoder=(LayerConfig(AttentionConfig(3, 8), FeedForwardConfig(NEURONS, "relu")),))
    with pytest.raises(InputError, match=r"self_attn\.in_proj_weight has 96 rows, the config says 72"):
        from_torch(theirs, narrow, TOKENIZER, table())
    broken = {**state, "encoder.layers.0.norm1.weight": torch.full((WIDTH,), torch.nan)}
    with pytest.raises(InputError, match=r"NaN or infinity in encoder\.0\.mixer_norm\.weight"):
        from_torch(broken, right, TOKENIZER, table())


def test_the_checkpoint_is_of_its_own(tmp_path: Any) -> None:
    theirs = randomize(nn.Transformer(WIDTH, HEADS, 1, 1, NEURONS, 0.0, batch_first=True))
    checkpoint = from_torch(theirs, config(1, 1, activation="relu", place="post"), TOKENIZER, table())
    kept = {name: value.clone() for name, value in checkpoint.state.items()}
    with torch.no_grad():
        for value in theirs.parameters():
            value.zero_()
    assert all(torch.equal(value, checkpoint.state[name]) for name, value in kept.items())
    from slimformer.transformer.checkpoint import load_own

    again: Checkpoint = load_own(checkpoint.save(tmp_path / "m"))
    assert again.config == checkpoint.config
    assert all(torch.equal(value, again.state[name]) for name, value in kept.items())
