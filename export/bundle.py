"""A bundle: the ONNX graph and the files by which the tools people use find their way in.

    onnx/model.onnx  config.json  tokenizer.json  tokenizer_config.json  special_tokens_map.json  slimformer.json
    modules.json  sentence_bert_config.json  config_sentence_transformers.json  1_Pooling/  2_Dense/…  N_Normalize/

The lower line is written for sentence encoders. Models that write have in onnx/ the whole decode, generate.onnx, and
the graphs that write a token at a time (`steps`), all with their weights in weights.data. They and encoders with
recurrent cells have no config.json, since other tools have no name for such models. What is ours is in slimformer.json.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from safetensors.numpy import save

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import ClassificationHead, EmbeddingHead, LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.families.sentence_transformers import DENSE_ACTIVATION
from ..transformer.files import atomic_directory, write_file
from ..transformer.layer_config import BFLOAT16, FLOAT16, FLOAT32, INT4_BLOCKS, LINEAR_FORMATS
from ..transformer.quantization import halved, quantized
from ..transformer.weights import to_numpy
from .encoder import LAYOUTS, build_encoder
from .external import SharedWeights
from .forms import Forms, only_packed
from .generator import build_generator
from .machine import int8_weight_bits, require_provider, require_target
from .names import BUNDLE_VERSION, GENERATE_FILE, MODEL_FILE, OWN_FILE, WEIGHTS_FILE
from .steps import build_steps

FORMATS = ("fp32", "fp16", "bf16", "int8")
HALF_NAMES = {"fp16": FLOAT16, "bf16": BFLOAT16}
PROVIDER_LAYOUT = {"cpu": "packed", "cuda": "padded"}


def export(
    checkpoint: Checkpoint,
    bundle: str | Path,
    *,
    format: str | None = None,
    layout: str | None = None,
    forms: Forms | None = None,
    provider: str = "cpu",
    target: str | None = None,
    measured: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Write a bundle directory, whole or not at all, and return its path.

    Args:
        checkpoint: the model.
        bundle: the directory to make.
        format: "int8" quantizes a float model (activations at run time: no data needed), "fp16" and "bf16" round its
            linears to half precision, "fp32" leaves it; None takes the checkpoint as it is.
        layout: "packed" or "padded" (`encoder.py`); None takes what is best on the provider.
        forms: of the graph of an encoder, with its layout (`form_times.measured` finds the fastest); None takes the
            layout's default.
        provider: "cpu" or "cuda", which must be available.
        target: the kind of CPU that serves (`machine.TARGETS`), for the bits of int8 weights; None: this one.
        measured: JSON-ready numbers to keep beside the model.
        force: replace what stands at `bundle`.

    Raises:
        InputError: an option is not one of these, the model is quantized and the format is another one, the provider
            has no kernels for the format (`check_served`), int8 weights for the target cannot be proven here
            (`machine.require_target`), `bundle` exists, or the disk does not take it.
    """
    require_provider(provider)
    if forms is not None and layout not in (None, forms.layout):
        raise InputError(f"layout {layout} and forms of the layout {forms.layout} are both given: give one")
    layout = forms.layout if forms is not None else layout or served_layout(checkpoint.config, provider)
    _check_options(format, layout)
    forms = forms or Forms.of_layout(layout)
    if not isinstance(checkpoint.config.head, LanguageHead):
        checkpoint.config.check_encoder("export")
    elif layout != "packed":
        raise InputError(f"models that write have no layout {layout}: take packed")
    elif forms != Forms():
        raise InputError("models that write have no forms to choose from: leave them out")
    _check_head(checkpoint.config)
    model = in_format(checkpoint, format, target)
    check_served(model.config.formats, provider)
    path = Path(bundle)
    with atomic_directory(path, force=force) as partial:
        _write(model, partial, forms, measured or {})
    return path


def served_layout(config: TransformerConfig, provider: str) -> str:
    """The layout that serves best."""
    return "packed" if only_packed(config) else PROVIDER_LAYOUT[provider]


def in_format(checkpoint: Checkpoint, format: str | None, target: str | None = None) -> Checkpoint:
    """The checkpoint in the format asked for, with the target in its provenance.

    int8 weights take the bits that the target (None: this CPU) multiplies exactly.
    """
    there = checkpoint.provenance.get("int8_weight_bits")
    require_target(target, [*([there] if there else []), *([0] if format == "int8" else [])])
    if target is not None:
        checkpoint = checkpoint.with_provenance(target=target)
    if format is not None and format_of(checkpoint.config) not in ("fp32", format):
        raise InputError(
            f"the model is quantized already; export the checkpoint from before quantize for --format {format}"
        )
    if format == "int8":
        return quantized(checkpoint, bits=int8_weight_bits(target))
    return halved(checkpoint, HALF_NAMES[format]) if format in HALF_NAMES else checkpoint


def format_of(config: TransformerConfig) -> str:
    """fp32 where nothing is quantized, fp16, bf16 or int4 where all linears that are have that format, else int8."""
    linears = config.formats & set(LINEAR_FORMATS) - {FLOAT32}
    names = {**{form: name for name, form in HALF_NAMES.items()}, INT4_BLOCKS: "int4"}
    alone = names.get(next(iter(linears))) if len(linears) == 1 else None
    return "fp32" if config.is_float else alone or "int8"


def check_served(formats: Iterable[str], provider: str) -> None:
    """Raise InputError where a provider has no kernels for one of the formats of linears."""
    if BFLOAT16 in formats and provider == "cpu":
        raise InputError("onnxruntime has no bfloat16 products on a CPU: take float16 (fp16), or --provider cuda")


def _check_options(format: str | None, layout: str) -> None:
    if format is not None and format not in FORMATS:
        raise InputError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if layout not in LAYOUTS:
        raise InputError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")


def _check_head(config: TransformerConfig) -> None:
    """Refuse what the files of sentence encoders have no word for."""
    if isinstance(config.head, EmbeddingHead):
        named = DENSE_ACTIVATION.values()
        strange = [dense.activation for dense in config.head.dense if dense.activation not in named]
        if strange:
            known = ", ".join(str(name) for name in named)
            raise InputError(f"the Dense activation {strange[0]!r} has no name in sentence-transformers; {known} have")


def _write(checkpoint: Checkpoint, directory: Path, forms: Forms, measured: Mapping[str, Any]) -> None:
    config = checkpoint.config
    state = {name: to_numpy(value) for name, value in checkpoint.state.items()}
    writes = isinstance(config.head, LanguageHead)
    (directory / MODEL_FILE).parent.mkdir(parents=True)
    if writes:
        weights = _write_writer(config, state, directory)
    else:
        _write_graph(build_encoder(config, state, forms), directory / MODEL_FILE)
    own = {
        "format_version": BUNDLE_VERSION,
        "layout": forms.layout,
        **({} if writes else {"forms": forms.to_dict()}),
        "format": format_of(config),
        "depends_on_batch": config.depends_on_batch,
        "config": config.to_dict(),
        **({"weights": weights} if writes else {}),
        "provenance": checkpoint.provenance,
        "measured": dict(measured),
    }
    write_file(directory / "tokenizer.json", checkpoint.tokenizer)
    for name, content in {
        OWN_FILE: own,
        **({} if writes or config.encoder_cells else {"config.json": _ecosystem_config(config)}),
        **_tokenizer_files(checkpoint),
    }.items():
        _write_json(directory / name, content)
    if isinstance(config.head, EmbeddingHead):
        _write_sentence_files(config, config.head, state, directory)


def _write_writer(config: TransformerConfig, state: Mapping[str, Any], directory: Path) -> dict[str, int]:
    """The graphs of a model that writes, and their weights: the file of these and its bytes."""
    shared = SharedWeights(Path(WEIGHTS_FILE).name)
    for file, graph in chain([(GENERATE_FILE, build_generator(config, state))], build_steps(config, state)):
        shared.take(graph)
        _write_graph(graph, directory / file)
    write_file(directory / WEIGHTS_FILE, bytes(shared.content))
    return {WEIGHTS_FILE: len(shared.content)}


def _write_graph(graph: onnx.ModelProto, path: Path) -> None:
    write_file(path, graph.SerializeToString(deterministic=True))


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _ecosystem_config(config: TransformerConfig) -> dict[str, Any]:
    mixers = [layer.attention for layer in config.encoder if layer.attention is not None]
    feeds = [layer.ffn for layer in config.encoder if layer.ffn is not None]
    data: dict[str, Any] = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": config.d_model,
        "num_hidden_layers": len(config.encoder),
        "num_attention_heads": max((mixer.heads for mixer in mixers), default=1),
        "intermediate_size": max((feed.width for feed in feeds), default=1),
        "vocab_size": config.embedding.vocab_size,
        "max_position_embeddings": config.embedding.positions,
        "type_vocab_size": max(config.embedding.token_types, 1),
        "layer_norm_eps": config.norm_eps,
        "pad_token_id": config.text.pad_id,
    }
    if isinstance(config.head, ClassificationHead):
        data["architectures"] = ["BertForSequenceClassification"]
        data["id2label"] = {str(i): label for i, label in enumerate(config.head.labels)}
        data["label2id"] = {label: i for i, label in enumerate(config.head.labels)}
    return data


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    tokens = {token["content"] for token in json.loads(checkpoint.tokenizer).get("added_tokens", [])}
    roles = {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }
    special = {role: token for role, token in roles.items() if token in tokens}
    return {
        "special_tokens_map.json": special,
        "tokenizer_config.json": {
            **special,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": checkpoint.config.text.max_length,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    }


def _write_sentence_files(
    config: TransformerConfig, head: EmbeddingHead, state: Mapping[str, Any], directory: Path
) -> None:
    kinds = ["Transformer", "Pooling"] + ["Dense"] * len(head.dense) + ["Normalize"] * head.normalize
    paths = [""] + [f"{i}_{kind}" for i, kind in enumerate(kinds) if i]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    pooling = {f"pooling_mode_{name}": mode == head.pooling for mode, name in modes.items()}
    text = config.text
    files: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": text.max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": dict(text.prompts),
            "default_prompt_name": text.default_prompt,
        },
        "1_Pooling/config.json": {"word_embedding_dimension": config.d_model, **pooling},
    }
    for name, content in files.items():
        _write_json(directory / name, content)
    for path in paths[2:]:
        (directory / path).mkdir()
    classes = {ours: theirs for theirs, ours in reversed(DENSE_ACTIVATION.items())}
    for i, dense in enumerate(head.dense):
        folder = directory / paths[2 + i]
        name = classes[dense.activation]
        module = "torch.nn.modules.linear" if name == "Identity" else "torch.nn.modules.activation"
        said = {"in_features": dense.inputs, "out_features": dense.outputs, "bias": dense.bias}
        _write_json(folder / "config.json", {**said, "activation_function": f"{module}.{name}"})
        prefix = f"head.dense.{i}."
        tensors = {k.removeprefix(prefix): np.ascontiguousarray(v) for k, v in state.items() if k.startswith(prefix)}
        write_file(folder / "model.safetensors", save(tensors))
