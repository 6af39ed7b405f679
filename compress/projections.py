"""What enters and leaves a model's output projections, with gradients: what importance is taken from."""

import torch
from torch import Tensor, nn

from ..transformer.model import Transformer
from .units import OUTPUT, sublayers


class Projections:
    """Keeps what every sub-layer's output projection is given and gives, while it is entered.

    The model's parameters get no gradient meanwhile, and its hooks are gone afterwards.

    Attributes:
        inputs: (N, U) of each sub-layer that has units, by name, of the last forward pass.
        outputs: (N, D) of each.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "Projections":
        for parameter in self._trainable:
            parameter.requires_grad_(False)
        for table in (self.model.embeddings, self.model.target):
            if table is not None:
                self._handles.append(table.register_forward_hook(lambda m, i, x: x.requires_grad_()))
        for sub in sublayers(self.model.config):
            self._keep(sub.name, self.model.get_submodule(f"{sub.name}.{OUTPUT[sub.part]}"))
        return self

    def _keep(self, name: str, module: nn.Module) -> None:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs[name], self.outputs[name] = inputs[0], output

        self._handles.append(module.register_forward_hook(keep))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._trainable:
            parameter.requires_grad_(True)

    def clear(self) -> None:
        """Forget the last forward pass."""
        self.inputs.clear()
        self.outputs.clear()
