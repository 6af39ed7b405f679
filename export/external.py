"""One file of weights beside the graphs of a bundle: each tensor once, mapped into memory by onnxruntime.

ONNX calls it external data: an initializer says the file, the offset and the length. Constants stay in the graphs,
because onnxruntime reads shapes from them while it opens a graph.
"""

import onnx

ALIGNMENT = 64  # of a tensor's first byte: a cache line; onnxruntime maps any offset


class SharedWeights:
    """The content of the file, as graph after graph gives its weights away."""

    def __init__(self, location: str) -> None:
        """`location`: the file's name, beside the graphs."""
        self.location = location
        self.content = bytearray()
        self._spans: dict[str, tuple[int, int]] = {}

    def take(self, model: onnx.ModelProto) -> None:
        """Move the model's weights over, in place; those of a name that is there already have to be equal."""
        for tensor in model.graph.initializer:
            if is_weight(tensor.name):
                self._move(tensor)

    def _move(self, tensor: onnx.TensorProto) -> None:
        data = tensor.raw_data
        if tensor.name not in self._spans:
            self.content += bytes(-len(self.content) % ALIGNMENT)
            self._spans[tensor.name] = (len(self.content), len(data))
            self.content += data
        offset, length = self._spans[tensor.name]
        assert memoryview(self.content)[offset : offset + length] == data, tensor.name
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self.location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))


def is_weight(name: str) -> bool:
    """Whether an initializer is a tensor of the model: those have dotted names, constants none."""
    return "." in name
