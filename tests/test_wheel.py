"""The built wheel, installed in an environment of its own outside the checkout."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("transformer", "export", "compress")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command, insist that it succeeds, and return what it printed."""
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source distribution, so that both are complete."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that holds the wheel and borrows the dependencies of this one.

    The plain path in the .pth file puts the other environment's packages after the wheel and leaves its own .pth
    files, and so its editable slimformer, unread.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    site = site_packages(folder)
    run(sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", wheel, cwd=folder)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def site_packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {file for part in PARTS for file in (ROOT / part).rglob("*.py")} | set(ROOT.glob("*.py"))
    templates = {file for pattern in ("*.j2", "*.css") for file in (ROOT / "export" / "templates").rglob(pattern)}
    wanted = {f"slimformer/{file.relative_to(ROOT).as_posix()}" for file in modules | templates}
    packaged = {name for name in names if not name.startswith("slimformer-")}
    assert packaged == wanted | {"slimformer/py.typed"}


def test_nothing_generic_lands_in_site_packages(environment: Path) -> None:
    names = {file.name for file in site_packages(environment).iterdir()}
    assert {name for name in names if not name.startswith("slimformer-")} == {"slimformer", "borrowed.pth"}


def test_the_command_runs(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "slimformer"
    assert "0.1.0" in run(command, "--version", cwd=tmp_path)
    assert "compress" in run(command, "--help", cwd=tmp_path)


def test_a_script_outside_the_checkout_imports_it(environment: Path, tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(
        "import sys\n"
        "import slimformer.export.runtime\n"
        "assert 'torch' not in sys.modules\n"
        "import slimformer.cli, slimformer.compress, slimformer.transformer\n"
        "print(slimformer.__version__, slimformer.__file__)\n"
    )
    version, file = run(environment / "bin" / "python", script, cwd=tmp_path).split()
    assert version == "0.1.0"
    assert Path(file) == site_packages(environment) / "slimformer" / "__init__.py"
