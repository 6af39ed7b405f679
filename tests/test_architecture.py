"""The import rules, read from the source: which module may reach which, and what a served model never loads."""

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from loaded import FILES, PARTS, ROOT, loaded_twice, sources_loaded

import slimformer

SOURCES = {
    ".".join(("slimformer", *Path(file).relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): (
        Path(file).read_text()
    )
    for file in FILES
}
PACKAGES = {"slimformer", *(name.rpartition(".")[0] for name in SOURCES)}
TORCH_FREE = (
    "config",
    "data",
    "errors",
    "metrics",
    "parallel",
    "progress",
    "sources",
    "statistics",
    "subwords",
    "text_metrics",
    "tokenizer",
    "trimming",
    "vectors",
)

# A name below the first may be imported only in the modules that begin with one of the second; () is nowhere.
HOMES = {
    "click": ("slimformer.cli",),
    "onnx": ("slimformer.export",),
    "onnxruntime": ("slimformer.export",),
    "onnxscript": ("slimformer.export",),
    "rouge_score": ("slimformer.transformer.text_metrics",),
    "sacrebleu": ("slimformer.transformer.text_metrics",),
    "transformers": (),
    "slimformer.compress": ("slimformer.compress", "slimformer.cli"),
    "slimformer.export": ("slimformer.export", "slimformer.compress", "slimformer.cli"),
    "slimformer.cli": (),
}


def within(name: str, package: str) -> bool:
    """Whether `name` is `package` or lies inside it."""
    return name == package or name.startswith(f"{package}.")


def imported(module: str, tree: ast.AST, packages: set[str]) -> set[str]:
    """Full names that the statements of `tree` import, relative ones resolved; literal import_module calls too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            anchor = module if module in packages else module.rpartition(".")[0]
            parts = anchor.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parts, *filter(None, [node.module])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                name, package = str(node.args[0].value), module if module in packages else module.rpartition(".")[0]
                names.add(importlib.util.resolve_name(name, package))
    return names


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements that run when the module is imported: not the bodies of functions, nor TYPE_CHECKING blocks."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def misplaced(sources: Mapping[str, str], packages: set[str]) -> list[str]:
    """Imports, anywhere in a file, that `HOMES` does not allow there."""
    return [
        f"{module} imports {name}"
        for module, source in sources.items()
        for name in sorted(imported(module, ast.parse(source), packages))
        for owned, homes in HOMES.items()
        if within(name, owned) and not any(within(module, home) for home in homes)
    ]


def reached(start: str, sources: Mapping[str, str], packages: set[str]) -> dict[str, str]:
    """Everything that importing `start` imports, each with the module that does so: parents' __init__ files too."""
    found = {start: "the test"}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        parents = {module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)}
        nodes = at_import(ast.parse(sources[module])) if module in sources else ()
        for name in parents.union(*(imported(module, node, packages) for node in nodes)):
            if name not in found:
                found[name] = module
                waiting.append(name)
    return found


def reaches(start: str, forbidden: str, sources: Mapping[str, str], packages: set[str]) -> list[str]:
    """How importing `start` comes to `forbidden`; empty when it does not."""
    return [f"{by} imports {name}" for name, by in reached(start, sources, packages).items() if within(name, forbidden)]


def beyond_docstring_and_version(source: str) -> list[str]:
    """Statements of the root __init__ that are neither its docstring nor __version__."""
    head, *rest = ast.parse(source).body
    extra = [] if isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant) else [ast.unparse(head)]
    return extra + [ast.unparse(node) for node in rest if not ast.unparse(node).startswith("__version__ = ")]


def test_the_sources_are_found() -> None:
    assert {"slimformer", *(f"slimformer.{part}" for part in PARTS)} <= set(SOURCES)


def test_every_import_is_where_it_belongs() -> None:
    assert misplaced(SOURCES, PACKAGES) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("slimformer.transformer.model", "from ..export.graph import build"),
        ("slimformer.transformer.model", "def f():\n    from ..compress import prune"),
        ("slimformer.transformer", "from .. import export"),
        ("slimformer.transformer.families.bert", "from ...export import bundle"),
        ("slimformer.export.report", "import slimformer.compress.prune"),
        ("slimformer.export.report", "from importlib import import_module\nimport_module('..compress', __package__)"),
        ("slimformer.compress.prune", "import click"),
        ("slimformer.compress.prune", "from onnx import helper"),
        ("slimformer.transformer.int8", "import onnxruntime as ort"),
        ("slimformer.transformer.families.bert", "from transformers import BertModel"),
        ("slimformer.cli", "import transformers"),
        ("slimformer.export.bundle", "from ..cli import main"),
    ],
)
def test_a_misplaced_import_is_seen(module: str, source: str) -> None:
    assert len(misplaced({module: source}, PACKAGES | {"slimformer.transformer.families"})) >= 1


def test_an_allowed_import_is_not_refused() -> None:
    allowed = {
        "slimformer.cli": "import click\nfrom .compress import compress\nfrom .export import export",
        "slimformer.export.graph": "import onnx\nfrom ..transformer.config import TransformerConfig",
        "slimformer.compress.pipeline": "from ..export.latency import measure\nfrom .. import transformer",
        "slimformer.transformer.model": "from .packing import Packing\nimport onnxish",
    }
    assert misplaced(allowed, PACKAGES) == []


@pytest.mark.parametrize(
    "start",
    ["slimformer.export", "slimformer.export.runtime", *(f"slimformer.transformer.{name}" for name in TORCH_FREE)],
)
def test_no_torch_is_reached(start: str) -> None:
    assert start in SOURCES
    assert reaches(start, "torch", SOURCES, PACKAGES) == []


def test_the_runtime_mentions_no_torch_even_in_functions() -> None:
    names = imported("slimformer.export.runtime", ast.parse(SOURCES["slimformer.export.runtime"]), PACKAGES)
    assert [name for name in names if within(name, "torch")] == []


@pytest.mark.parametrize(
    "sample",
    [
        {"slimformer.export.runtime": "import torch.nn"},
        {"slimformer.export.runtime": "from . import a", "slimformer.export.a": "if True:\n    import torch"},
        {"slimformer.export.runtime": "from ..transformer.b import B", "slimformer.transformer": "import torch"},
        {"slimformer.export.runtime": "import numpy", "slimformer.export": "from .graph import g\nimport torch"},
    ],
)
def test_a_way_to_torch_is_seen(sample: dict[str, str]) -> None:
    packages = {"slimformer", "slimformer.export", "slimformer.transformer"}
    assert reaches("slimformer.export.runtime", "torch", sample, packages) != []


def test_a_lazy_import_is_no_way_to_torch() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"
    assert reaches("slimformer.export", "torch", {"slimformer.export": source}, {"slimformer.export"}) == []


def test_the_runtime_imports_where_there_is_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import slimformer.export.runtime"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr


def test_text_metrics_import_without_the_packages_that_score() -> None:
    code = (
        "import sys; sys.modules |= {'sacrebleu': None, 'rouge_score': None}; "
        "import slimformer.transformer.text_metrics"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr


def test_the_root_holds_docstring_and_version_only() -> None:
    assert beyond_docstring_and_version(SOURCES["slimformer"]) == []


@pytest.mark.parametrize("source", ["import os", '"""Doc."""\nfrom .compress import compress', "__version__ = '1'"])
def test_more_in_the_root_is_seen(source: str) -> None:
    assert beyond_docstring_and_version(source) != []


def test_no_file_is_loaded_under_two_names() -> None:
    for found in pkgutil.walk_packages(slimformer.__path__, "slimformer."):
        if found.name in SOURCES and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    ours = sources_loaded()
    assert {name for name in SOURCES if not name.endswith("__main__")} <= set(ours)
    assert loaded_twice(ours) == {}


def test_a_second_name_is_seen() -> None:
    modules = {"slimformer.cli": "/r/cli.py", "cli": "/r/cli.py", "a": "/r/a.py", "builtins": None}
    assert loaded_twice(modules, set()) == {"/r/cli.py": ["cli", "slimformer.cli"]}
    assert loaded_twice(modules, {"/r/cli.py"}) == {}
