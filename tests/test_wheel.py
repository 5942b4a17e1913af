"""The wheel, as installed in a folder of its own: all modules and the demo head are in it, and the command runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from talon_hf.tools.hub import bundle

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "talon_hf"
# Build with what is installed and install nothing else, so that no index is asked.
ALONE = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")

pytestmark = pytest.mark.slow


def run(*words: str | Path, folder: Path, path: Path | None = None) -> str:
    """What a command prints that is run in `folder`, with `path` before all other packages."""
    env = {**os.environ, "PYTHONPATH": str(path or ""), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, words)], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")  # a copy, since a build leaves its own files beside its sources
    shutil.copytree(PACKAGE, source / "talon_hf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", *ALONE, "--no-build-isolation", "-w", folder, source, folder=folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", *ALONE, "--target", folder, wheel, folder=folder)
    return folder


def test_it_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {f"talon_hf/{name}": content for name, content in files_of(PACKAGE).items()}


IMPORTS = """
import pkgutil, sys
import talon_hf
for found in pkgutil.walk_packages(talon_hf.__path__, "talon_hf."):
    __import__(found.name)
from talon_hf.pair import DRAFT, load_draft
assert load_draft().__class__ is talon_hf.EagleDraft
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "talon_hf"]
print(DRAFT, *(module.__file__ for module in ours), sep="\\n")
"""


def test_every_module_and_the_demo_head_load_from_it(installed: Path, tmp_path: Path) -> None:
    head, *files = run(sys.executable, "-c", IMPORTS, folder=tmp_path, path=installed).splitlines()
    assert Path(head).is_relative_to(installed)
    assert {Path(file) for file in files} == {installed / file.relative_to(ROOT) for file in PACKAGE.rglob("*.py")}


def test_its_command_writes_the_same_hub_repository_as_the_checkout(installed: Path, tmp_path: Path) -> None:
    run(installed / "bin" / "talon-hf", "bundle", "theirs", folder=tmp_path, path=installed)
    bundle(tmp_path / "ours")
    assert files_of(tmp_path / "theirs") == files_of(tmp_path / "ours")
