"""Names inside a bundle that its writer and its readers share."""

BUNDLE_VERSION = 1
MODEL_FILE = "onnx/model.onnx"
GENERATE_FILE = "onnx/generate.onnx"  # of models that write
OWN_FILE = "slimformer.json"
