"""Torch-Pruning on a BERT directory; runs in an environment of its own, without slimformer.

usage: torch_pruning_worker.py DIRECTORY ROWS.json

ROWS are token ids of calibration texts. Reads a JSON object a line and answers with one: a setting and its ratio ->
the widths that are left, or what went wrong. Where `file` is given, the tensors are written there, and with them, as
`rows`, `mask` and `expected`, what the pruned model makes of some of the texts, to check a conversion by.

The way is that of Torch-Pruning's examples/transformers/prune_hf_bert.py: whole heads go by `head_pruning_ratio`, or
numbers within every head by `pruning_ratio`; `ignored_layers` keep the width of the residual stream, as the option
`bottleneck` of prune_hf_vit.py does. The traced output is the tokens: of a sum of them 1.6.1 cannot cut the width.
Gradients are those of the loss <noise, embedding> of the pooled and normalised
embedding, text by text: up to a constant the squared distance of the embedding from itself with that noise. Their sum
is for `GroupTaylorImportance`. Of `GroupHessianImportance` 1.6.1 `accumulate_grad` keeps the last text's squares alone,
so that their mean is put where it reads them.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch_pruning as tp
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention

SHOWN = 8  # texts to check a conversion by
Gradients = dict[str, Tensor]

IMPORTANCES: dict[str, Callable[[], tp.importance.Importance]] = {
    "L1": lambda: tp.importance.GroupMagnitudeImportance(p=1),
    "L2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
    "L2, not normalised": lambda: tp.importance.GroupMagnitudeImportance(p=2, normalizer=None),
    "LAMP": lambda: tp.importance.LAMPImportance(p=2),
    "Taylor": lambda: tp.importance.GroupTaylorImportance(),
    "Taylor, not normalised": lambda: tp.importance.GroupTaylorImportance(normalizer=None),
    "Hessian": lambda: tp.importance.GroupHessianImportance(),
    "Hessian, not normalised": lambda: tp.importance.GroupHessianImportance(normalizer=None),
    "random": lambda: tp.importance.RandomImportance(),
}


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, T)."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def embed(model: BertModel, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, T) -> pooled and normalised (B, D)."""
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, D)
    pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    return nn.functional.normalize(pooled, dim=1)


class Gradient:
    """Sums and mean squares of the texts' gradients, by parameter; made when first asked for."""

    def __init__(self, model: BertModel, rows: list[list[int]]) -> None:
        self.model, self.rows = model, rows
        self.sums, self.squares = Gradients(), Gradients()

    def of(self, importance: str) -> Gradients:
        """What an importance reads as the parameters' gradients."""
        if not importance.startswith(("Taylor", "Hessian")):
            return {}
        if not self.sums:
            self._accumulate()
        return self.sums if importance.startswith("Taylor") else self.squares

    def _accumulate(self) -> None:
        generator = torch.Generator().manual_seed(0)
        parameters = dict(self.model.named_parameters())
        self.sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.squares = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for row in self.rows:
            found = embed(self.model, *padded([row]))
            loss = (torch.randn(found.shape, generator=generator) * found).sum()
            for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
                self.sums[name] += gradient
                self.squares[name] += gradient.square() / len(self.rows)


def blocked(model: BertModel) -> list[nn.Module]:
    """The layers that keep the residual stream's width."""
    parts = [model.embeddings]
    for layer in model.encoder.layer:
        parts += [layer.attention.output.dense, layer.output.dense]
    return parts


def pruned(original: BertModel, gradients: Gradients, asked: dict) -> BertModel:
    """A pruned copy."""
    torch.manual_seed(0)
    model = copy.deepcopy(original)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone() if gradients else None
    attentions = [module for module in model.modules() if isinstance(module, BertSelfAttention)]
    heads = {linear: m.num_attention_heads for m in attentions for linear in (m.query, m.key, m.value)}
    whole = asked["heads"] == "whole"
    example = torch.ones(1, 16, dtype=torch.long)
    pruner = tp.pruner.BasePruner(
        model,
        {"input_ids": example, "attention_mask": example},
        importance=IMPORTANCES[asked["importance"]](),
        global_pruning=asked["scope"] != "local",
        isomorphic=asked["scope"] == "isomorphic",
        pruning_ratio=asked["ratio"],
        head_pruning_ratio=asked["head_ratio"],
        prune_num_heads=whole,
        prune_head_dims=not whole,
        num_heads=heads,
        round_to=asked["round_to"],
        ignored_layers=[] if asked["width"] else blocked(model),
        output_transform=lambda out: out.last_hidden_state,
    )
    for group in pruner.step(interactive=True):
        group.prune()
    for m in attentions:  # the pruner's own count is wrong where it kept a layer that would have lost all its heads
        m.all_head_size = m.query.out_features
        if whole:
            m.num_attention_heads = m.all_head_size // m.attention_head_size
        else:
            m.attention_head_size = m.all_head_size // m.num_attention_heads
    return model.requires_grad_(False)


def described(model: BertModel) -> dict:
    """The widths."""
    layers = [
        {
            "heads": layer.attention.self.num_attention_heads,
            "head_width": layer.attention.self.attention_head_size,
            "neurons": layer.intermediate.dense.out_features,
        }
        for layer in model.encoder.layer
    ]
    return {"d_model": model.embeddings.word_embeddings.embedding_dim, "layers": layers}


def answers(folder: str, rows: list[list[int]]) -> Iterator[dict]:
    """One for each line of input."""
    original = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager").eval()
    gradient = Gradient(original, rows)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            model = pruned(original, gradient.of(asked["importance"]), asked)
            ids, mask = padded(rows[:SHOWN])
            expected = embed(model, ids, mask)
        except (RuntimeError, ValueError, IndexError, AttributeError) as error:  # of one setting
            yield {"error": f"{type(error).__name__}: {error}"}
            continue
        if asked["file"]:
            tensors = {**model.state_dict(), "rows": ids, "mask": mask, "expected": expected}
            save_file({name: value.clone().contiguous() for name, value in tensors.items()}, asked["file"])
        yield described(model)


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    rows = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    output, sys.stdout = sys.stdout, sys.stderr  # what the libraries print is no answer
    for answer in answers(sys.argv[1], rows):
        print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    main()
