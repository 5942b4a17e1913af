"""The structure that docs/architecture.md draws: who may import whom, and how large a room may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "talon_hf"
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}
SHIPPED = set(MODULES) - {"__init__", "bench", "cli", "hub", "pair", "ties"}

# Every module and all that it may import of the package: trees and masks know no model, policies no hidden state,
# drafters no target, acceptance no drafter; only candidates joins drafter and policy, only decoding all sides.
MAY_IMPORT: dict[str, set[str]] = {
    "tree": set(),
    "config": set(),
    "stats": set(),
    "compat": set(),
    "cache": {"compat"},
    "pace": {"compat"},
    "transcript": {"compat", "pace"},
    "settings": set(),
    "drafter": set(),
    "head_files": set(),
    "head_config": {"compat"},
    "checkpoints": {"head_config", "head_files"},
    "sampling": {"compat", "pace"},
    "positions": set(),
    "masks": {"tree"},
    "policies": {"tree"},
    "features": {"drafter"},
    "acceptance": {"sampling", "transcript", "tree"},
    "eagle_layer": {"cache", "compat", "head_config"},
    "eagle": {"cache", "checkpoints", "drafter", "eagle_layer", "head_config"},
    "assistants": {"checkpoints", "drafter", "eagle", "head_files"},
    "turns": {"cache", "drafter"},
    "output": {"compat", "stats"},
    "prompt": {"masks"},
    "inputs": {"compat", "prompt"},
    "checks": {"compat", "masks"},
    "target": {"cache", "compat", "drafter", "features", "inputs", "masks", "prompt", "tree"},
    "candidates": {"compat", "config", "drafter", "features", "policies", "tree"},
    "decoding": {
        "acceptance", "candidates", "compat", "config", "drafter", "output", "pace", "positions", "probe", "prompt",
        "sampling", "stats", "target", "transcript", "tree", "turns",
    },
    "probe": {"cache", "checks", "compat", "drafter", "features", "inputs", "prompt", "target", "tree"},
    "pair": {"compat", "eagle"},
    "hub": {"pair"},
    "ties": set(),
    "bench": {"eagle", "generate", "pair", "stats", "ties"},
}  # fmt: skip


def imports(tree: ast.Module) -> set[str]:
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level and node.module}


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_module_knows_only_what_it_may(module: str) -> None:
    assert imports(MODULES[module]) <= MAY_IMPORT[module]


def test_every_module_but_the_entries_has_its_place_in_the_table() -> None:
    assert set(MODULES) - set(MAY_IMPORT) == {"__init__", "cli", "generate"}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_holds_one_idea_and_a_function_fits_a_screen(module: str) -> None:
    assert len((PACKAGE / f"{module}.py").read_text().splitlines()) <= 320
    functions = [n for n in ast.walk(MODULES[module]) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert {f.name: f.end_lineno - f.lineno + 1 for f in functions if (f.end_lineno or 0) - f.lineno > 58} == {}


@pytest.mark.parametrize("module", sorted(SHIPPED))
def test_shipped_code_prints_nothing_and_names_no_device(module: str) -> None:
    tree = MODULES[module]
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "print" not in calls
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not strings & {"cuda", "cuda:0", "mps"}
    assert not any(isinstance(node, ast.ExceptHandler) and node.type is None for node in ast.walk(tree))


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"__init__"}))
def test_every_public_name_says_what_it_is(module: str) -> None:
    kinds = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in MODULES[module].body if isinstance(node, kinds) and not node.name.startswith("_")]
    methods = [node for owner in top if isinstance(owner, ast.ClassDef) for node in owner.body]
    public = [*top, *(node for node in methods if isinstance(node, kinds) and not node.name.startswith("_"))]
    silent = [node.name for node in public if ast.get_docstring(node) is None]
    assert silent == []


def test_the_architecture_page_has_a_room_for_every_file() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    assert [name for name in MODULES if name != "__init__" and f"`{name}.py`" not in page] == []
