"""CTranslate2 on our weights, timed on demand; runs in an environment of its own and imports nothing of slimformer.

usage: python ctranslate2_worker.py convert WEIGHTS.npz SHAPE.json MODEL_DIR
       python ctranslate2_worker.py serve MODEL_DIR

`serve` answers each JSON line on stdin with one on stdout:
    {"do": "open", "compute_type": "int8", "inter": 1, "intra": 2}      -> {}
    {"do": "run", "sources": [["▁a", …], …], "tokens": 24, "beams": 1}  -> {"seconds": 0.1, "outputs": [[…], …]}
"""

import json
import sys
import time
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec


def convert(weights: Path, shape: Path, target: Path) -> None:
    """Write the CTranslate2 model of a pre-norm ReLU encoder-decoder with one table for all."""
    state, said = np.load(weights), json.loads(shape.read_text(encoding="utf-8"))
    spec = transformer_spec.TransformerSpec.from_config(
        tuple(said["layers"]), said["heads"], pre_norm=True, activation=common_spec.Activation.RELU
    )

    def linear(part: object, name: str, rows: slice = slice(None)) -> None:
        part.weight, part.bias = state[f"{name}.weight"][rows], state[f"{name}.bias"][rows]

    def norm(part: object, name: str) -> None:
        part.gamma, part.beta = state[f"{name}.weight"], state[f"{name}.bias"]

    table = state["embeddings.tokens.weight"]
    for side, tables in ((spec.encoder, spec.encoder.embeddings), (spec.decoder, [spec.decoder.embeddings])):
        tables[0].weight = table
        side.scale_embeddings = True
        side.position_encodings.encodings = state["positions"]
    norm(spec.encoder.layer_norm, "encoder_norm")
    norm(spec.decoder.layer_norm, "decoder_norm")
    spec.decoder.projection.weight = table
    for stack in ("encoder", "decoder"):
        for i, layer in enumerate(getattr(spec, stack).layer):
            at = f"{stack}.{i}"
            linear(layer.self_attention.linear[0], f"{at}.mixer.qkv")
            linear(layer.self_attention.linear[1], f"{at}.mixer.out")
            norm(layer.self_attention.layer_norm, f"{at}.mixer_norm")
            linear(layer.ffn.linear_0, f"{at}.ffn.up")
            linear(layer.ffn.linear_1, f"{at}.ffn.down")
            norm(layer.ffn.layer_norm, f"{at}.ffn_norm")
            if stack == "decoder":
                linear(layer.attention.linear[0], f"{at}.cross.q")
                linear(layer.attention.linear[1], f"{at}.cross.kv")
                linear(layer.attention.linear[2], f"{at}.cross.out")
                norm(layer.attention.layer_norm, f"{at}.cross_norm")
    tokens = said["tokens"]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token = spec.config.decoder_start_token = said["start"]
    spec.config.eos_token, spec.config.unk_token = said["end"], said["pad"]
    spec.validate()
    target.mkdir(parents=True, exist_ok=True)
    spec.save(str(target))


def serve(model: str) -> None:
    """Answer until stdin ends."""
    translator = None
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "open":
            translator = ctranslate2.Translator(
                model, compute_type=asked["compute_type"], inter_threads=asked["inter"], intra_threads=asked["intra"]
            )
            print("{}", flush=True)
            continue
        rows, parts = asked["sources"], asked["parts"]
        begin = time.perf_counter()
        found = translator.translate_batch(
            rows,
            beam_size=asked["beams"],
            min_decoding_length=asked["tokens"],
            max_decoding_length=asked["tokens"],
            max_input_length=0,
            max_batch_size=-(-len(rows) // parts),
            return_end_token=False,
        )
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "outputs": [one.hypotheses[0] for one in found]}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*map(Path, sys.argv[2:5]))
    else:
        serve(sys.argv[2])
