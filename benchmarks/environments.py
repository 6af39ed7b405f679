"""Environments of other tools, each made once below .cache/, with the versions that are compared."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def environment(folder: Path, versions: Mapping[str, str]) -> Path:
    """An environment's Python, made with these packages where it is not there."""
    python = folder / "bin/python"
    if not (folder / ".installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pinned = [f"{name}=={version}" for name, version in versions.items()]
        subprocess.run([python, "-m", "pip", "install", "-q", *pinned], check=True)
        (folder / ".installed").touch()
    return python


def check_versions(python: Path, versions: Mapping[str, str]) -> None:
    """Exit where an environment has other versions than those compared."""
    code = (
        "import json, sys; from importlib.metadata import version as v; print(json.dumps([v(n) for n in sys.argv[1:]]))"
    )
    done = subprocess.run([python, "-c", code, *versions], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python}: {done.stderr.strip().splitlines()[-1]}")
    for (name, wanted), found in zip(versions.items(), json.loads(done.stdout), strict=True):
        if found.partition("+")[0] != wanted:
            sys.exit(f"{python} has {name} {found}; compared is {wanted}")
