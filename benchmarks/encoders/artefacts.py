"""The artefacts that are compared, made once into .cache/encoder-rivals/: other tools' in an environment of its own."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from help_search.setting import MAX_LENGTH, ROOT, minilm_folder

from slimformer.compress.quantize import Quantize
from slimformer.compress.recipe import read_recipe
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.names import MODEL_FILE
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import SearchData
from slimformer.transformer.loading import load

from .contenders import Artefact

CACHE = ROOT / ".cache/encoder-rivals"
ENVIRONMENT = CACHE / "environment"
MAKER = Path(__file__).parent / "make_rivals.py"
VERSIONS = {
    "torch": "2.13.0",
    "transformers": "4.57.6",
    "optimum": "2.1.0",
    "optimum-onnx": "0.1.0",
    "onnx": "1.23.2",
    "onnxruntime": "1.32.0",
    "onnxscript": "0.7.2",
    "openvino": "2026.4.1",
    "nncf": "3.4.0",
    "ctranslate2": "4.8.5",
    "numpy": "2.4.6",
}
CALIBRATED, CALIBRATED_FEW = 300, 32  # texts, half of them whole pages, as our calibration takes them
OURS = "ours"
FLOAT = "ours fp32, padded"


def random_bert(python: Path) -> Path:
    """A directory of bert-base with random weights, MiniLM's tokenizer and its pooling."""
    folder = CACHE / "bert-base/model"
    if not (folder / "model.safetensors").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, MAKER, "random", minilm_folder(), folder], check=True)
    return folder


def opened(folder: Path) -> Checkpoint:
    """A model directory, its texts cut as those of the other benchmarks."""
    model = load(folder)
    return replace(model, config=replace(model.config, text=replace(model.config.text, max_length=MAX_LENGTH)))


def rivals(python: Path, folder: Path, model: Checkpoint, data: SearchData, name: str, few: bool) -> list[Artefact]:
    """What the other tools make of a model directory; what they fail at is in the log beside it, and printed.

    Where few options are tried, calibration is short too: such artefacts show times, and lie in a folder of their own.
    """
    cache = CACHE / name / ("few" if few else "rivals")
    cache.mkdir(parents=True, exist_ok=True)
    chosen = random.Random(0)
    half = (CALIBRATED_FEW if few else CALIBRATED) // 2
    texts = chosen.sample(data.texts, half) + chosen.sample([page.text for page in data.pages], half)
    rows = cache / "texts.json"
    rows.write_text(json.dumps(model.text_encoder().encode(texts)), encoding="utf-8")
    log = cache / "make.log"
    command = [python, MAKER, "make", folder, cache, rows, "few" if few else "all"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as stderr:
        done = subprocess.run(command, stdout=stderr, stderr=stderr, env=offline, check=False)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        if ": not made (" in line:
            print(line)
    if done.returncode:
        sys.exit(f"{log}: {lines[-1]}")
    listed = json.loads((cache / "artefacts.json").read_text(encoding="utf-8"))
    return [Artefact(**{**one, "file": Path(one["file"])}) for one in listed]


def ours(model: Checkpoint, data: SearchData, name: str, bundles: Sequence[Path]) -> list[Artefact]:
    """Bundles of ours, the one that all others are compared with first, our float32 one last.

    Without `bundles`: the int8 recipe of examples/help-search, and dynamic int8. For bert-base's random weights, whose
    values time does not depend on, the recipe's calibration is cut short.
    """
    recipe = read_recipe(ROOT / "examples/help-search/int8.toml").steps
    short = (Quantize(format="int8_static", samples=32, compensate=False, smoothing=0.5),)
    made = {
        OURS: recipe if name == "minilm" else short,
        "ours, int8_dynamic": (Quantize(format="int8_dynamic"),),
    }
    paths = {}
    for title, steps in {**({} if bundles else made), FLOAT: ()}.items():
        paths[title] = CACHE / name / "ours" / title.replace(", ", "-").replace(" ", "-")
        if not paths[title].is_dir():
            candidate = model
            for step in steps:
                candidate = step(candidate, StepContext(data, teacher=model)).checkpoint
            export(candidate, paths[title], layout="padded" if title == FLOAT else None)
    given = {str(path): path for path in bundles}
    return [Artefact(title, title, path / MODEL_FILE, "onnxruntime") for title, path in {**given, **paths}.items()]
