"""Heads that share keys and values give what heads with equal keys and values of their own give."""

import pytest
import torch
from models import MIXERS, TOKENIZER, WRITERS, ragged, random_state, tiny_config
from torch import Tensor

from slimformer.compress.calibration import Batch
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import AttentionConfig, LayerConfig, TransformerConfig


def apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same function without groups: each head has copies of the keys and values that it shared."""
    state = dict(checkpoint.state)

    def own(sub: AttentionConfig | None, name: str, queries: int) -> AttentionConfig | None:
        if not isinstance(sub, AttentionConfig):
            return sub
        for kind in ("weight", "bias"):
            rows = list(state[f"{name}.{kind}"])
            first, heads = rows[:queries], range(sub.heads)
            for start in (queries, queries + sub.heads // sub.group * sub.head_width):
                for head in heads:
                    at = start + head // sub.group * sub.head_width
                    first += rows[at : at + sub.head_width]
            state[f"{name}.{kind}"] = torch.stack(first)
        return AttentionConfig(sub.heads, sub.head_width)

    def layers(stack: str, given: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
        return tuple(
            LayerConfig(
                own(layer.mixer, f"{stack}.{i}.mixer.qkv", getattr(layer.mixer, "width", 0)),
                layer.ffn,
                own(layer.cross, f"{stack}.{i}.cross.kv", 0),
            )
            for i, layer in enumerate(given)
        )

    config = checkpoint.config
    whole = config.with_layers(layers("encoder", config.encoder), layers("decoder", config.decoder))
    return Checkpoint(whole, state, TOKENIZER).check("apart")


def drawn(config: TransformerConfig) -> Checkpoint:
    return Checkpoint(config, random_state(config), TOKENIZER)


@pytest.mark.parametrize("kind", ["grouped", "alone, grouped"])
def test_sharing_is_having_the_same(kind: str) -> None:
    sources, targets = ragged((9, 3, 6), seed=1), ragged((4, 7, 2), seed=2, side="between", columns=9)
    batch = Batch(*sources, *targets) if WRITERS[kind].encoder else Batch(*targets)
    checkpoint = drawn(WRITERS[kind])

    def run(one: Checkpoint) -> Tensor:
        with torch.inference_mode():
            return batch.run(one.to_torch()).hidden

    torch.testing.assert_close(run(checkpoint), run(apart(checkpoint)), atol=1e-5, rtol=1e-5)
    assert sum(one.numel() for one in checkpoint.state.values()) < sum(
        one.numel() for one in apart(checkpoint).state.values()
    )


def test_one_head_of_keys_for_all_heads_of_queries_by_a_loop() -> None:
    """Multi-query attention (Shazeer 2019): 3 heads of width 5."""
    checkpoint = drawn(tiny_config(None, [LayerConfig(AttentionConfig(3, 5, group=3), None)]))
    model, s = checkpoint.to_torch(), checkpoint.state
    output = model(*ragged((4,)), with_states=True)
    x, mixer = output.states[0].detach(), "encoder.0.mixer"
    q, k, v = (x @ s[f"{mixer}.qkv.weight"].T + s[f"{mixer}.qkv.bias"]).split([15, 5, 5], dim=1)
    heads = []
    for i in range(3):
        scores = (q[:, 5 * i : 5 * i + 5] @ k.T / 5**0.5).exp()
        heads.append(scores / scores.sum(1, keepdim=True) @ v)
    expected = torch.cat(heads, 1) @ s[f"{mixer}.out.weight"].T + s[f"{mixer}.out.bias"]
    torch.testing.assert_close(model.encoder[0].mixer(x, output.packing), expected, atol=1e-5, rtol=1e-5)


def test_the_cache_holds_shared_keys_once() -> None:
    mixer = MIXERS["grouped"]
    assert isinstance(mixer, AttentionConfig)
    model = drawn(tiny_config(None, [LayerConfig(mixer, None)])).to_torch()
    output = model(*ragged((4, 2)), with_states=True)
    _, (keys, values) = model.encoder[0].mixer.start(output.states[0], output.packing)
    assert keys.shape == values.shape == (2, 2, 4, 5)
