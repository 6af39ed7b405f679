"""The files of the package, and the names under which the tests have loaded them."""

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("transformer", "export", "compress")
FILES = {
    str(file) for file in (*ROOT.glob("*.py"), *(found for part in PARTS for found in (ROOT / part).rglob("*.py")))
}
# pytest itself loads the root __init__ under the folder's name; it holds nothing that could differ.
IGNORED = {str(ROOT / "__init__.py")}


def sources_loaded() -> dict[str, str]:
    """Names and files of the modules that were loaded from the package's files."""
    found = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: file for name, file in found.items() if file in FILES}


def loaded_twice(modules: Mapping[str, str | None], ignored: set[str] = IGNORED) -> dict[str, list[str]]:
    """Files that `modules` (name -> file) hold under two names or more."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, file in modules.items():
        if file is not None and file not in ignored:
            names[file].append(name)
    return {file: sorted(group) for file, group in names.items() if len(group) > 1}
