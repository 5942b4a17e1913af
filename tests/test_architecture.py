"""The structure that docs/architecture.md draws: who may import whom, and how large a room may be."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import talon_hf.pair
from talon_hf import tools

PACKAGE = Path(__file__).parent.parent / "talon_hf"
# By name within the package: "tree", "tools" or "tools.hub".
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imports(module: str) -> set[str]:
    """The modules of the package that `module` imports, at its top or in a function."""
    package = ".".join(FILES[module].parent.relative_to(PACKAGE.parent).parts)
    asked: set[str] = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            asked |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            asked |= {alias.name for alias in node.names}
    return {name for name in MODULES if f"talon_hf.{name}" in asked}


def reached_from(module: str) -> set[str]:
    """`module` and all that it imports, directly or not."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        reached.add(name := waiting.pop())
        waiting += imports(name) - reached
    return reached


SHIPPED = reached_from("generate")

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
    "pair": {"tools.pair"},
    "tools.pair": {"compat", "eagle"},
    "tools.hub": {"tools.pair"},
    "tools.ties": set(),
    "tools.bench": {"eagle", "generate", "stats", "tools.pair", "tools.ties"},
}  # fmt: skip


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_module_knows_only_what_it_may(module: str) -> None:
    assert imports(module) <= MAY_IMPORT[module]


def test_every_module_but_the_entries_has_its_place_in_the_table() -> None:
    assert set(MODULES) - set(MAY_IMPORT) == {"__init__", "generate", "tools", "tools.cli"}


def test_what_ships_lies_flat_and_what_never_ships_in_tools() -> None:
    flat = {name for name, path in FILES.items() if path.parent == PACKAGE}
    assert SHIPPED - flat == set()
    assert flat - SHIPPED == {"__init__", "pair"}


def test_users_import_the_demo_pair_without_tools_in_its_name() -> None:
    public = {
        name: value
        for name, value in vars(tools.pair).items()
        if name.isupper() or (getattr(value, "__module__", "") == tools.pair.__name__ and not name.startswith("_"))
    }
    assert {name: getattr(talon_hf.pair, name) for name in talon_hf.pair.__all__} == public
    assert {"load_target", "load_draft", "DRAFT"} <= set(public)


def test_the_entry_names_every_module_that_ships() -> None:
    """transformers before 5.17 copies from a folder only what `generate.py` itself imports."""
    assert imports("generate") | {"generate"} == SHIPPED


def test_no_imports_run_in_a_circle() -> None:
    list(TopologicalSorter({module: imports(module) for module in MODULES}).static_order())


@pytest.mark.parametrize("module", MODULES)
def test_a_file_holds_one_idea_and_a_function_fits_a_screen(module: str) -> None:
    assert len(FILES[module].read_text().splitlines()) <= 320
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


@pytest.mark.parametrize("module", [name for name, path in FILES.items() if path.stem != "__init__"])
def test_every_public_name_says_what_it_is(module: str) -> None:
    kinds = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in MODULES[module].body if isinstance(node, kinds) and not node.name.startswith("_")]
    methods = [node for owner in top if isinstance(owner, ast.ClassDef) for node in owner.body]
    public = [*top, *(node for node in methods if isinstance(node, kinds) and not node.name.startswith("_"))]
    silent = [node.name for node in public if ast.get_docstring(node) is None]
    assert silent == []


def test_the_architecture_page_has_a_room_for_every_file() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rooms = [f"`{path.relative_to(PACKAGE).as_posix()}`" for path in FILES.values() if path.stem != "__init__"]
    assert [room for room in rooms if room not in page] == []
