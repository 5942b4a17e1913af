"""README and docs: their Python runs, their commands exist, their lists are complete."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from talon_hf.checks import REFUSED
from talon_hf.config import TalonConfig
from talon_hf.pair import INSTALL, find_gguf
from talon_hf.tools.cli import _parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Its blocks name a repository on the Hub; tests/test_hub.py runs what they show against a Hub of its own.
NEEDS_A_HUB = "hub.md"
# Options of other programs that the pages name.
FOREIGN = {"--no-deps"}
needs_pair = pytest.mark.skipif(find_gguf() is None, reason=f"needs the real target: {INSTALL}")


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    actions = _parser()._actions
    return next(dict(action.choices) for action in actions if isinstance(action, argparse._SubParsersAction))


RUN = [page for page in PAGES if page.name != NEEDS_A_HUB and blocks(page, "python")]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow, *[needs_pair] * (page.name == "README.md")])
        for page in RUN
    ],
)
def test_python_of_a_page_runs_from_a_clone(page: Path, tmp_path: Path) -> None:
    code = "\n".join(blocks(page, "python"))
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    if page.name == "README.md":
        *text, figure = done.stdout.splitlines()  # rounding decides on each machine how the text goes on
        assert text[0].startswith("The three primary colours are")
        assert float(re.fullmatch(r"\[(\d\.\d\d) tokens a forward\]", figure)[1]) > 1


def test_python_that_needs_a_hub_is_valid() -> None:
    found = blocks(ROOT / "docs" / NEEDS_A_HUB, "python")
    for code in found:
        compile(code, NEEDS_A_HUB, "exec")
    assert found


def test_first_screen_is_forty_lines() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("## How it works") <= 40
    snippet = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in snippet.splitlines() if line]) <= 8


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [line for line in blocks(ROOT / "README.md", "bash")[0].splitlines() if not line.startswith("#")]
    main_job, tests = commands
    assert 'talon-hf generate "Why is the sky blue?" --compare' in main_job
    assert tests.endswith("/bin/pytest")
    assert f'\nbash -c "{tests}"\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def talon_commands() -> list[tuple[str, list[str]]]:
    """Page and arguments of every `talon-hf ...` in a bash block or a code span."""
    found = []
    for page in PAGES:
        spans = re.findall(r"`(talon-hf [^`]+)`", page.read_text(encoding="utf-8"))
        for line in [*spans, *"".join(blocks(page, "bash")).splitlines()]:
            found += [(page.name, shlex.split(words)) for words in re.findall(r"talon-hf ([^#&]+)", line)]
    return found


def test_every_command_on_the_pages_is_one_that_the_parser_takes() -> None:
    commands = talon_commands()
    assert {arguments[0] for _, arguments in commands} == set(subparsers())
    for page, arguments in commands:
        if len(arguments) == 1:
            continue  # the command's name in a sentence
        try:
            _parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{page}: the parser does not take talon-hf {shlex.join(arguments)}")


def test_every_option_on_the_pages_exists() -> None:
    known = {option for parser in subparsers().values() for option in parser._option_string_actions}
    for page in PAGES:
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")):
            assert option in known | FOREIGN, f"{page.name} names {option}"


def test_every_option_of_generate_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for option in subparsers()["generate"]._option_string_actions:
        assert option in readme or option in ("-h", "--help"), option


def test_every_knob_and_its_default_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, field in TalonConfig.__dataclass_fields__.items():
        shown = {str: f'`"{field.default}"`', type(None): "none"}.get(type(field.default), str(field.default))
        row = re.search(rf"^\| `talon_{name}` \| (.*?) \|", readme, re.MULTILINE)
        assert row is not None, f"the README has no row for talon_{name}"
        assert shown in row[1], name


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_module_has_its_line(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    listed = set(re.findall(r"^(?:  |\| `)((?:\w+/)*\w+\.py)", text, re.MULTILINE))
    package = ROOT / "talon_hf"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert listed == modules


def test_every_refused_argument_is_on_the_compatibility_page() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = text.split("## Arguments that are refused")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)(?:=False)?`", rows)) >= set(REFUSED)


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`(tests/\w+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
