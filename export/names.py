"""Names inside a bundle that its writer and its readers share."""

BUNDLE_VERSION = 1
MODEL_FILE = "onnx/model.onnx"
GENERATE_FILE = "onnx/generate.onnx"  # of models that write
OWN_FILE = "slimformer.json"
ENCODER_FILE = "onnx/encoder_model.onnx"  # these of models that write, a token at a time, as Optimum names them
DECODER_FILE = "onnx/decoder_model.onnx"
DECODER_WITH_PAST_FILE = "onnx/decoder_with_past_model.onnx"
WEIGHTS_FILE = "onnx/weights.data"  # the tensors of all graphs of a model that writes
PAST, PRESENT = "past_key_values", "present"
