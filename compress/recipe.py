"""A recipe: ordered steps with their options, in TOML.

max_length = 128            # optional: the cut of every text, in tokens

[[step]]
name = "prune"              # then the step's own fields
layers = 3
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..transformer.checkpoint import read_text
from ..transformer.errors import InputError
from ..transformer.layer_config import INT8_STATIC
from .distill import Distill
from .gradual import Gradual
from .movement import Movement
from .prune import Prune
from .quantize import Quantize
from .reshape import Reshape
from .sparsify import Sparsify
from .step import Step
from .trim import Trim

STEPS: dict[str, type[Any]] = {
    "reshape": Reshape,
    "prune": Prune,
    "sparsify": Sparsify,
    "distill": Distill,
    "gradual": Gradual,
    "movement": Movement,
    "trim": Trim,
    "quantize": Quantize,
}
ALIASES = {"int8": "quantize"}
TRAINED = ("distill", "gradual", "movement")  # they teach the model


@dataclass(frozen=True)
class Recipe:
    """Steps in their order, and the cut of every text (None: the model's own)."""

    steps: tuple[Step, ...]
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError(f"a recipe needs a step: {', '.join(STEPS)}")
        names = [step.name for step in self.steps]
        first = names.index("quantize") if "quantize" in names else len(names)
        if late := [name for name in names[first:] if name not in ("quantize", "trim")]:
            raise InputError(f"{late[0]} comes after quantize and needs a float model: put quantize last")
        trimmed = names.index("trim") if "trim" in names else len(names)
        if late := [name for name in names[trimmed:] if name in TRAINED]:
            raise InputError(f"{late[0]} comes after trim and needs the teacher's vocabulary: put trim after it")

    @property
    def times_decide(self) -> bool:
        """Whether a step takes times of the workload to decide by."""
        return any(getattr(step, "speedup", None) is not None for step in self.steps)

    def to_list(self) -> list[dict[str, Any]]:
        """Each step's name and every option, JSON-ready."""
        return [describe(step) for step in self.steps]


def describe(step: Step) -> dict[str, Any]:
    """A step's name and options."""
    return {"name": step.name, **asdict(step)}  # type: ignore[call-overload]


def read_recipe(path: Path) -> Recipe:
    """Read a TOML recipe.

    Raises:
        InputError: not TOML, an unknown key, step or option, or a value that a step refuses.
    """
    try:
        data = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    unknown = sorted(set(data) - {"step", "max_length"})
    if unknown:
        raise InputError(f"{path}: unknown key {unknown[0]!r}; a recipe has max_length and [[step]] tables")
    tables = data.get("step", [])
    if not isinstance(tables, list) or not tables:
        raise InputError(f"{path}: no [[step]] table in it")
    try:
        return Recipe(tuple(make_step(table) for table in tables), _length(data.get("max_length")))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def steps_named(names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> Recipe:
    """A recipe of steps by name with their default options, or those given by step name.

    Where quantize is among them, what trains does so for it (`quantization_aware`), as it is by default: calibrated.
    """
    full = [ALIASES.get(name, name) for name in names]
    given: dict[str, dict[str, Any]] = {name: dict(more) for name, more in (options or {}).items()}
    if "quantize" in full:
        for taught in (given.setdefault(name, {}) for name in TRAINED):
            if taught.setdefault("quantization_aware", True):
                taught.setdefault("aware_of", INT8_STATIC)
    return Recipe(tuple(make_step({"name": name, **given.get(name, {})}) for name in full))


def read_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a step from texts such as `speedup=2` and `keep_layers=[0, 2]`, the values in TOML or plain words.

    Raises:
        InputError: a text is no NAME=VALUE.
    """
    found = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(f"{text!r} is not NAME=VALUE, such as speedup=2")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found


def make_step(table: Any) -> Step:
    """One step from a table of `name` and options; unknown names and options raise InputError."""
    if not isinstance(table, Mapping) or "name" not in table:
        raise InputError("a step without a name")
    options = {key: value for key, value in table.items() if key != "name"}
    name = ALIASES.get(str(table["name"]), str(table["name"]))
    if name not in STEPS:
        raise InputError(f"no step is named {table['name']!r}; there are {', '.join(STEPS)}")
    kind = STEPS[name]
    known = {field.name: field for field in fields(kind)}
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{name} has no option {key!r}; it has {', '.join(known)}")
        _check_type(kind, name, key, value)
    step: Step = kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
    return step


def _check_type(kind: type[Any], name: str, key: str, value: Any) -> None:
    hint = get_type_hints(kind)[key]
    if not _fits(hint, value):
        wanted = str(hint).removeprefix("<class ").strip("'>")
        raise InputError(f"{name}: {key} is {value!r}, which is not {wanted}")


def _fits(hint: Any, value: Any) -> bool:
    """Whether a TOML value is of a field's type: a plain type, tuples of one, or a union of them."""
    if get_origin(hint) is UnionType:
        return any(_fits(one, value) for one in get_args(hint))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        sized = parts[-1] is Ellipsis or (isinstance(value, list | tuple) and len(value) == len(parts))
        return isinstance(value, list | tuple) and sized and all(_fits(parts[0], one) for one in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _length(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 3):
        raise InputError(f"max_length is {value!r}, not a whole number of at least 3 tokens")
    return value
