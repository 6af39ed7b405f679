"""What a model's tokens come to inside of it, by name: "hidden", "states.3", "qkv.3" (see `teacher.teach`)."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..transformer.model import Output, Transformer

HIDDEN, STATES, QKV = "hidden", "states", "qkv"


class Inside:
    """Sees what is wanted of each forward pass of a model."""

    def __init__(self, model: Transformer, wanted: Sequence[str]) -> None:
        """`wanted` names, of layers that are there."""
        kinds = {name: name.partition(".")[0] for name in wanted}
        self.with_states = STATES in kinds.values()
        self._watched = {name: _Watched(model, layer_of(name)) for name in wanted if kinds[name] == QKV}

    def of(self, name: str, output: Output) -> Tensor:
        """(N, D) of the pass that gave this output, the model's last one, with its states where `with_states` says."""
        if name in self._watched:
            return self._watched[name].last
        return output.hidden if name == HIDDEN else output.states[layer_of(name) + 1]


class _Watched:
    """What the merged linear of a layer's attention gives: queries, keys and values (N, (H + 2 * G) * K)."""

    def __init__(self, model: Transformer, layer: int) -> None:
        self._last: Tensor | None = None
        model.get_submodule(f"encoder.{layer}.mixer.qkv").register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._last = output

    @property
    def last(self) -> Tensor:
        """Of the last forward pass."""
        assert self._last is not None
        return self._last


def layer_of(name: str) -> int:
    """The number of the layer that a name is of."""
    return int(name.partition(".")[2])
