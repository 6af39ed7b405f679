"""Other tools' own artefacts of one encoder; runs in an environment of its own and imports nothing of slimformer.

usage: python make_rivals.py random MODEL_DIR TARGET_DIR              bert-base's shape with random weights
       python make_rivals.py make MODEL_DIR CACHE_DIR TEXTS.json all|few

MODEL_DIR is a Hugging Face directory of a BertModel, TEXTS.json a list of token ids per text, for calibration. `make`
writes CACHE_DIR/artefacts.json, [{"rival": …, "name": …, "file": …, "engine": …, "options": {…}}, …]; what CACHE_DIR
holds already is not made again, and files of equal contents are one artefact. What a tool fails to make is told on
stderr. "few" is each tool's documented default and what its documentation advises for CPUs without VNNI.
"""

import functools
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Artefact = dict[str, Any]
Form = Callable[[Any, list[list[int]]], Any]  # (OpenVINO model, token ids for calibration) -> another
LEVELS = ("as exported", "O1", "O2", "O3")  # Optimum's optimizer before its quantizer
# Optimum's configurations: activations u8, weights s8 or (avx2) u8; reduce_range: 7 bits, against saturation.
CONFIGS = {
    "avx512_vnni": [{"per_channel": True}, {"per_channel": False}],
    "avx512": [{"per_channel": c, "reduce_range": r} for c in (True, False) for r in (True, False)],
    "avx2": [{"per_channel": c, "reduce_range": r} for c in (True, False) for r in (True, False)],
}
SOURCES = ("torch", "onnx")  # what OpenVINO converts
SAMPLES = 300  # NNCF's default


def random_model(model: Path, target: Path) -> None:
    """bert-base with random weights and the tokenizer of another model."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("model.safetensors", "README.md"))
    BertModel(BertConfig()).save_pretrained(target)
    pooling = target / "1_Pooling/config.json"
    said = json.loads(pooling.read_text(encoding="utf-8"))
    said["word_embedding_dimension"] = BertConfig().hidden_size
    pooling.write_text(json.dumps(said), encoding="utf-8")


def complain(rival: str, name: str, error: Exception) -> None:
    """Say on one line what was not made, and why."""
    print(f"{rival}, {name}: not made ({type(error).__name__}: {' '.join(str(error).split())[:300]})", file=sys.stderr)


def optimum(model: Path, cache: Path, few: bool) -> Iterator[Artefact]:
    """Dynamic int8 by every configuration on every level of optimization."""
    for level in LEVELS[:1] if few else LEVELS:
        for config, choices in CONFIGS.items():
            for choice in choices[:1] if few else choices:
                name = ", ".join([config, *(key for key, on in choice.items() if on), level])
                folder = cache / name.replace(", ", "-").replace(" ", "-")
                try:
                    if not any(folder.glob("*.onnx")):
                        quantize_graph(optimum_graph(model, cache, level), folder, config, choice)
                except Exception as error:  # whatever the tool raises, the others are still to be made
                    complain("Optimum", name, error)
                    continue
                yield onnx_artefact("Optimum int8", name, next(folder.glob("*.onnx")))


def quantize_graph(graph: Path, folder: Path, config: str, choice: dict[str, bool]) -> None:
    """Write a graph in dynamic int8 into `folder`.

    Optimum's quantizer stops where the type of a tensor is unknown, as it is after the fused operators of O2 and O3;
    onnxruntime's, which it calls, takes a type for these, so that one is called directly with Optimum's choices.
    """
    import onnx
    from onnxruntime.quantization import quantize_dynamic
    from optimum.onnxruntime import AutoQuantizationConfig, ORTQuantizer

    chosen = getattr(AutoQuantizationConfig, config)(is_static=False, **choice)
    try:
        ORTQuantizer.from_pretrained(graph.parent, file_name=graph.name).quantize(chosen, folder)
    except RuntimeError as error:
        if "Unable to find data type" not in str(error):
            raise
        quantize_dynamic(
            graph,
            folder / graph.name,
            per_channel=chosen.per_channel,
            reduce_range=chosen.reduce_range,
            weight_type=chosen.weights_dtype,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )


def optimum_graph(model: Path, cache: Path, level: str) -> Path:
    """Optimum's float32 graph after its optimizer."""
    from optimum.onnxruntime import AutoOptimizationConfig, ORTModelForFeatureExtraction, ORTOptimizer

    exported = cache / "fp32"
    if not (exported / "model.onnx").is_file():
        ORTModelForFeatureExtraction.from_pretrained(model, export=True, local_files_only=True).save_pretrained(
            exported
        )
    if level == "as exported":
        return exported / "model.onnx"
    folder = cache / f"fp32-{level}"
    if not (folder / "model_optimized.onnx").is_file():
        config = getattr(AutoOptimizationConfig, level)()
        ORTOptimizer.from_pretrained(exported).optimize(save_dir=folder, optimization_config=config)
    return folder / "model_optimized.onnx"


def onnx_artefact(rival: str, name: str, file: Path) -> Artefact:
    """A graph for onnxruntime."""
    return {"rival": rival, "name": name, "file": str(file), "engine": "onnxruntime", "options": {}}


def openvino(model: Path, graph: Path, cache: Path, rows: list[list[int]], few: bool) -> Iterator[Artefact]:
    """float32, weights alone in int8, and int8 throughout, all by NNCF."""
    example = inputs(rows[0])
    for source in SOURCES[:1] if few else SOURCES:
        original = functools.cache(functools.partial(openvino_model, source, model, graph, example))
        for form, make in (FORMS_FEW if few else FORMS).items():
            name = f"{form}, from {source}"
            file = cache / f"{name.replace(', ', '-').replace(' ', '-')}.xml"
            try:
                if not file.is_file():
                    save(make(original().clone(), rows), file)
            except Exception as error:
                complain("OpenVINO", name, error)
                continue
            yield {"rival": "OpenVINO", "name": name, "file": str(file), "engine": "openvino", "options": {}}


def inputs(row: list[int]) -> dict[str, np.ndarray]:
    """One text as a batch (1, T)."""
    ids = np.array([row])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def save(model: Any, file: Path) -> None:
    """Write an OpenVINO model."""
    import openvino

    file.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, file, compress_to_fp16=False)


def openvino_model(source: str, model: Path, graph: Path, example: dict[str, np.ndarray]) -> Any:
    """OpenVINO's float32 model, of Optimum's graph or of the PyTorch module."""
    import openvino

    return openvino.Core().read_model(graph) if source == "onnx" else from_torch(model, example)


def weights_alone(model: Any, _: list[list[int]]) -> Any:
    """int8 weights; the engine rounds activations at run time where it finds that faster."""
    import nncf

    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)


def quantized(model: Any, rows: list[list[int]], *, preset: str, alpha: float | None, narrow: bool) -> Any:
    """Static int8, calibrated on `rows`: SmoothQuant's alpha (None: the default), 7-bit weights where `narrow`."""
    import nncf

    advanced = nncf.AdvancedQuantizationParameters()
    if alpha is not None:
        advanced.smooth_quant_alphas = nncf.AdvancedSmoothQuantParameters(matmul=alpha)
    if narrow:
        advanced.overflow_fix = nncf.OverflowFix.ENABLE
    return nncf.quantize(
        model,
        nncf.Dataset([inputs(row) for row in rows[:SAMPLES]]),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset[preset],
        target_device=nncf.TargetDevice.CPU,
        subset_size=min(SAMPLES, len(rows)),
        advanced_parameters=advanced,
    )


def static_forms(presets: tuple[str, ...], smoothing: tuple[float | None, ...]) -> dict[str, Form]:
    """Ways of `quantized` by name: presets with strengths of SmoothQuant, and 7-bit weights against saturation."""
    forms: dict[str, Form] = {}
    for preset in presets:
        for alpha, narrow in [*((alpha, False) for alpha in smoothing), (None, True)]:
            strength = "default" if alpha is None else "off" if alpha < 0 else str(alpha)
            name = f"{preset}, alpha {strength}" + (", overflow_fix" if narrow else "")
            forms[name] = functools.partial(quantized, preset=preset, alpha=alpha, narrow=narrow)
    return forms


FLOATS: dict[str, Form] = {"float32": lambda model, _: model, "weights alone": weights_alone}
FORMS = {**FLOATS, **static_forms(("MIXED", "PERFORMANCE"), (None, 0.5, -1.0))}  # alpha -1 is none
FORMS_FEW = {**FLOATS, **static_forms(("MIXED",), (None,))}


def from_torch(model: Path, feed: dict[str, np.ndarray]) -> Any:
    """OpenVINO's model of the PyTorch module, whose attention stays one operator; it gives the last layer alone."""
    import openvino
    import torch
    from transformers import AutoModel

    net = AutoModel.from_pretrained(model, attn_implementation="sdpa", add_pooling_layer=False, local_files_only=True)
    example = {name: torch.from_numpy(array) for name, array in feed.items()}
    converted = openvino.convert_model(net.eval(), example_input=example)
    converted.outputs[0].get_tensor().set_names({"last_hidden_state"})
    return converted


def ctranslate2(model: Path, cache: Path) -> Iterator[Artefact]:
    """float32 and int8 files, in each type of computation."""
    from ctranslate2.converters import TransformersConverter

    for stored, computed in (("int8", "int8"), ("int8", "int8_float32"), ("float32", "float32")):
        folder = cache / stored
        try:
            if not (folder / "model.bin").is_file():
                converter = TransformersConverter(str(model), copy_files=["tokenizer.json"])
                converter.convert(str(folder), quantization=stored, force=True)
        except Exception as error:
            complain("CTranslate2", computed, error)
            continue
        yield {
            "rival": "CTranslate2",
            "name": computed,
            "file": str(folder / "model.bin"),
            "engine": "ctranslate2",
            "options": {"compute_type": computed},
        }


def without_twins(artefacts: Iterator[Artefact]) -> Iterator[Artefact]:
    """Artefacts whose graphs differ; the names of those that are alike go into one."""
    found: dict[str, Artefact] = {}
    for artefact in artefacts:
        digest = hashlib.sha256(Path(artefact["file"]).read_bytes()).hexdigest()
        if digest in found:
            found[digest]["name"] += f" = {artefact['name']}"
        else:
            found[digest] = artefact
    yield from found.values()


def make(model: Path, cache: Path, texts: Path, few: bool) -> None:
    """Make what is missing and list all."""
    rows = json.loads(texts.read_text(encoding="utf-8"))
    graph = optimum_graph(model, cache / "optimum", "as exported")
    artefacts = [
        onnx_artefact("Optimum fp32", "as exported", graph),
        *without_twins(optimum(model, cache / "optimum", few)),
        *openvino(model, graph, cache / "openvino", rows, few),
        *ctranslate2(model, cache / "ctranslate2"),
    ]
    (cache / "artefacts.json").write_text(json.dumps(artefacts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "random":
        random_model(*map(Path, sys.argv[2:4]))
    else:
        model_dir, cache_dir, texts_file = map(Path, sys.argv[2:5])
        make(model_dir, cache_dir, texts_file, few=sys.argv[5] == "few")
