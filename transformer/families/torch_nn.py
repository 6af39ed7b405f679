"""PyTorch's own `nn.Transformer`, `nn.TransformerEncoder` and `nn.TransformerDecoder`, both ways.

They are layers alone: what the embeddings, the vocabulary and the head are, and how many heads a layer has, their
state dicts do not say. The config says it, and the tensors of embeddings and head come beside.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint
from ..config import TransformerConfig
from ..errors import InputError
from ..model import Transformer

# theirs -> ours, which stand one after the other on theirs' first axis
SELF: dict[str, tuple[str, ...]] = {
    "self_attn.in_proj_": ("mixer.qkv.",),
    "self_attn.out_proj.": ("mixer.out.",),
    "norm1.": ("mixer_norm.",),
    "linear1.": ("ffn.up.",),
    "linear2.": ("ffn.down.",),
}
ALONE = {**SELF, "norm2.": ("ffn_norm.",)}
CROSSED = {
    **SELF,
    "multihead_attn.in_proj_": ("cross.q.", "cross.kv."),
    "multihead_attn.out_proj.": ("cross.out.",),
    "norm2.": ("cross_norm.",),
    "norm3.": ("ffn_norm.",),
}


def from_torch(
    layers: nn.Module | Mapping[str, Tensor],
    config: TransformerConfig,
    tokenizer: str,
    others: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """A checkpoint of PyTorch's layers.

    Args:
        layers: an `nn.Transformer`, `nn.TransformerEncoder`, `nn.TransformerDecoder`, or the state dict of one. A
            `TransformerEncoder` may also be a decoder without an encoder: the config has its layers there.
        config: the whole model; every layer with the widths of theirs.
        tokenizer: the text of a tokenizer.json.
        others: the tensors of embeddings and head under our names (`embeddings.tokens.weight` (V, D), …).

    Raises:
        InputError: a tensor is missing, left over, of another shape than the config says, or not finite.
    """
    theirs = dict(layers.state_dict() if isinstance(layers, nn.Module) else layers)
    table = names(config, both=any(name.startswith(("encoder.", "decoder.")) for name in theirs))
    missing, unknown = sorted(set(table) - set(theirs)), sorted(set(theirs) - set(table))
    if missing or unknown:
        said = [f"{name} is missing" for name in missing[:3]] + [f"{name} is unexpected" for name in unknown[:3]]
        raise InputError(f"the layers do not fit the config: {'; '.join(said)}")
    with torch.device("meta"):
        rows = {name: len(value) for name, value in Transformer(config).state_dict().items() if value.ndim}
    state = {name: value.detach().float() for name, value in (others or {}).items()}
    for name, ours in table.items():
        sizes = [rows[one] for one in ours]
        if sum(sizes) != len(theirs[name]):
            raise InputError(f"{name} has {len(theirs[name])} rows, the config says {sum(sizes)}")
        state.update(zip(ours, theirs[name].detach().float().split(sizes), strict=True))
    state = {name: value.clone() for name, value in state.items()}
    return Checkpoint(config, state, tokenizer, {"source": "torch.nn"}).check("the layers")


def to_torch_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The layers' tensors under PyTorch's names: the inverse of `from_torch`, without embeddings and head."""
    config = checkpoint.config
    table = names(config, both=bool(config.encoder and config.decoder))
    return {name: torch.cat([checkpoint.state[one] for one in ours]) for name, ours in table.items()}


def names(config: TransformerConfig, *, both: bool) -> dict[str, tuple[str, ...]]:
    """Their name -> our names; `both`: they stand in an `nn.Transformer`."""
    table: dict[str, tuple[str, ...]] = {}
    crossed = bool(config.encoder and config.decoder)
    for stack, layers, parts in (
        ("encoder", config.encoder, ALONE),
        ("decoder", config.decoder, CROSSED if crossed else ALONE),
    ):
        before = f"{stack}." if both else ""
        kinds = ("weight", "bias")
        for i in range(len(layers)):
            for theirs, ours in parts.items():
                for kind in kinds:
                    table[f"{before}layers.{i}.{theirs}{kind}"] = tuple(f"{stack}.{i}.{one}{kind}" for one in ours)
        if layers and config.final_norm:
            table.update({f"{before}norm.{kind}": (f"{stack}_norm.{kind}",) for kind in kinds})
    return table
