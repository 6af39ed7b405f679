"""Recipes: every step and option from TOML, and one clear line for everything that is none."""

import dataclasses
import json
from pathlib import Path

import pytest

from slimformer.compress.distill import Distill
from slimformer.compress.gradual import Gradual
from slimformer.compress.movement import Movement
from slimformer.compress.prune import Prune
from slimformer.compress.quantize import Quantize
from slimformer.compress.recipe import STEPS, Recipe, make_step, read_options, read_recipe, steps_named
from slimformer.compress.reshape import Reshape
from slimformer.compress.sparsify import Sparsify
from slimformer.compress.trim import Trim
from slimformer.transformer.errors import InputError

EVERYTHING = """
max_length = 96

[[step]]
name = "prune"
cost = 1          # a whole number where a float is wanted
layers = 3
importance = "magnitude"
samples = 8
refit = false

[[step]]
name = "distill"
steps = 20
lr = 1e-4
hidden = 0.5
fragment_words = [1, 3]
pages = 0

[[step]]
name = "int8"
bits = 8
tables = false
"""
STEPS_READ = (
    Prune(cost=1, layers=3, importance="magnitude", samples=8, refit=False),
    Distill(steps=20, lr=1e-4, hidden=0.5, fragment_words=(1, 3), pages=0),
    Quantize(bits=8, tables=False),
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_recipe_of_every_step(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, EVERYTHING)) == Recipe(STEPS_READ, max_length=96)


def test_max_length_may_be_missing(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, '[[step]]\nname = "quantize"')) == Recipe((Quantize(),))


def test_every_option_is_in_the_list_and_reads_back() -> None:
    recipe = Recipe(STEPS_READ, max_length=96)
    listed = json.loads(json.dumps(recipe.to_list()))
    for step, entry in zip(recipe.steps, listed, strict=True):
        assert entry.keys() == {"name"} | {field.name for field in dataclasses.fields(step)}  # type: ignore[arg-type]
    assert tuple(make_step(entry) for entry in listed) == STEPS_READ


def test_defaults_read_back_too() -> None:
    recipe = steps_named(tuple(STEPS))
    aware = {"quantization_aware": True, "aware_of": "int8_static"}
    taught = (Distill(**aware), Gradual(**aware), Movement(**aware))
    assert recipe.steps == (Reshape(), Prune(), Sparsify(), *taught, Trim(), Quantize())
    assert tuple(map(make_step, json.loads(json.dumps(recipe.to_list())))) == recipe.steps


def test_steps_by_name_with_options() -> None:
    recipe = steps_named(["prune", "int8"], {"quantize": {"bits": 7}})
    assert recipe.steps == (Prune(), Quantize(bits=7))
    assert recipe.to_list()[1] == {"name": "quantize", **dataclasses.asdict(Quantize()), "bits": 7}


def test_distill_trains_for_int8_where_it_follows() -> None:
    minutes = {"distill": {"minutes": 2.0}}
    aware = Distill(minutes=2.0, quantization_aware=True, aware_of="int8_static")
    assert steps_named(["distill", "int8"], minutes).steps[0] == aware
    other = {"distill": {"aware_of": "int8_dynamic"}}
    assert steps_named(["distill", "int8"], other).steps[0] == Distill(quantization_aware=True)
    assert steps_named(["prune", "distill"], minutes).steps[1] == Distill(minutes=2.0)
    against = {"distill": {"quantization_aware": False}}
    assert steps_named(["distill", "quantize"], against).steps[0] == Distill()


def test_the_format_that_distill_trains_for(tmp_path: Path) -> None:
    """true alone goes on meaning int8_dynamic; another format is named beside it."""
    table = '[[step]]\nname = "distill"\nquantization_aware = true\n'
    assert read_recipe(write(tmp_path, table)).steps == (Distill(quantization_aware=True, aware_of="int8_dynamic"),)
    found = read_recipe(write(tmp_path, f'{table}aware_of = "int8_static"')).steps
    assert found == (Distill(quantization_aware=True, aware_of="int8_static"),)
    steps = steps_named(["distill", "quantize"], {"distill": {"aware_of": "int8_static"}}).steps
    assert steps[0] == found[0]


REFUSALS = {
    "not TOML": ("[[step]", "not TOML"),
    "empty": ("", r"no \[\[step\]\] table"),
    "one table": ('[step]\nname = "prune"', r"no \[\[step\]\] table"),
    "a list of words": ('step = ["prune"]', "a step without a name"),
    "no name": ("[[step]]\nlayers = 2", "a step without a name"),
    "unknown key": ('speed = 2\n[[step]]\nname = "prune"', "unknown key 'speed'"),
    "unknown step": (
        '[[step]]\nname = "squeeze"',
        "no step is named 'squeeze'; there are reshape, prune, sparsify, distill, gradual, movement, trim, quantize",
    ),
    "number as name": ("[[step]]\nname = 3", "no step is named 3"),
    "unknown option": (
        '[[step]]\nname = "quantize"\nbit = 8',
        "quantize has no option 'bit'; it has format, formats, bits, tables",
    ),
    "the class variable": ('[[step]]\nname = "quantize"\nSTEPS = 8', "no option"),
    "text for a number": ('[[step]]\nname = "prune"\ncost = "half"', "cost is 'half', which is not float"),
    "float for a whole number": ('[[step]]\nname = "prune"\nlayers = 2.5', "layers is 2.5, which is not int | None"),
    "bool for a number": ('[[step]]\nname = "quantize"\nbits = true', "bits is True, which is not int"),
    "number for a bool": ('[[step]]\nname = "quantize"\ntables = 1', "tables is 1, which is not bool"),
    "number for a text": ('[[step]]\nname = "prune"\nimportance = 3', "importance is 3, which is not str"),
    "number for a pair": ('[[step]]\nname = "distill"\nfragment_words = 3', "fragment_words is 3, which is not tuple"),
    "three for a pair": ('[[step]]\nname = "distill"\nfragment_words = [1, 2, 3]', "which is not tuple"),
    "words for a pair": ('[[step]]\nname = "distill"\nfragment_words = ["a", "b"]', "which is not tuple"),
    "number for numbers": ('[[step]]\nname = "prune"\nkeep_layers = 2', "keep_layers is 2, which is not tuple"),
    "words for numbers": ('[[step]]\nname = "prune"\nkeep_layers = ["a"]', "which is not tuple"),
    "NaN": ('[[step]]\nname = "distill"\nhidden = nan', "hidden is nan"),
    "infinity": ('[[step]]\nname = "distill"\nhidden = inf', "hidden is inf"),
    "a value out of range": ('[[step]]\nname = "quantize"\nbits = 6', "bits is 6"),
    "a format that training does not know": (
        '[[step]]\nname = "distill"\nquantization_aware = true\naware_of = "int4_blocks"',
        "aware_of is 'int4_blocks', not one of int8_dynamic, int8_static",
    ),
    "a format without its use": (
        '[[step]]\nname = "distill"\naware_of = "int8_static"',
        "aware_of is 'int8_static' and quantization_aware is false: set it to true",
    ),
    "negative": ('[[step]]\nname = "distill"\ncosine = -1', "cosine is -1, below 0"),
    "two budgets": ('[[step]]\nname = "distill"\nsteps = 3\nminutes = 1', "either minutes or steps"),
    "short max_length": ('max_length = 2\n[[step]]\nname = "prune"', "max_length is 2"),
    "max_length no number": ('max_length = "128"\n[[step]]\nname = "prune"', "max_length is '128'"),
    "max_length a bool": ('max_length = true\n[[step]]\nname = "prune"', "max_length is True"),
    "float work after int8": (
        '[[step]]\nname = "int8"\n[[step]]\nname = "distill"',
        "distill comes after quantize and needs a float model",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line_with_the_file(name: str, tmp_path: Path) -> None:
    text, message = REFUSALS[name]
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_recipe(path)
    shown = str(caught.value)
    assert shown.startswith(f"{path}: ")
    assert "\n" not in shown
    assert message.replace("\\", "") in shown.replace("\\", "")


def test_a_missing_file_and_no_steps(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(InputError, match="a recipe needs a step"):
        steps_named([])
    with pytest.raises(InputError, match="no step is named 'fold'"):
        steps_named(["prune", "fold"])


def test_options_are_read_as_toml_or_as_plain_words() -> None:
    texts = ("speedup=2", "cost = 0.5", "keep_layers=[0, 2]", "refit=false", "format=int8", "importance='fisher'")
    assert read_options(texts) == {
        "speedup": 2,
        "cost": 0.5,
        "keep_layers": [0, 2],
        "refit": False,
        "format": "int8",
        "importance": "fisher",
    }
    assert read_options(("cost=0.5", "cost=0.7")) == {"cost": 0.7}
    for text in ("speedup", "=2", "speedup="):
        with pytest.raises(InputError, match="is not NAME=VALUE, such as speedup=2"):
            read_options([text])


def test_times_decide_where_a_speed_is_asked_for() -> None:
    assert steps_named(["prune"], {"prune": {"speedup": 2}}).times_decide
    assert not steps_named(["prune", "int8"]).times_decide


@pytest.mark.parametrize("name", ["distill", "gradual", "movement"])
def test_what_teaches_the_model_comes_before_trim_and_quantize(name: str) -> None:
    steps_named(("prune", name, "trim", "quantize"))
    for before, reason in (("trim", "needs the teacher's vocabulary"), ("quantize", "needs a float model")):
        with pytest.raises(InputError, match=f"{name} comes after {before} and {reason}"):
            steps_named(("prune", before, name))
