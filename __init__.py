"""slimformer: prune, distil and quantize a trained Transformer, export it to ONNX, prove its accuracy and latency."""

__version__ = "0.1.0"
