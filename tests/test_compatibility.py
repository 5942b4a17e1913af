"""docs/compatibility.md: every row names tests that exist; and the rows that no other test file shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import NEW, PROMPT, plain, sequences, talon
from models import random_head, tiny_model
from transformers import DynamicCache, StaticCache

from talon_hf import EagleDraft
from talon_hf.compat import cache_keyword, cache_output_field

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "compatibility.md"
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "return_dict_in_generate": True}

# The page ------------------------------------------------------------------------------------------------------------


def tables() -> list[list[list[str]]]:
    """The page's tables, each a list of rows, each a list of cells; the header is the first row."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


ROWS = [(number, row) for number, table in enumerate(tables()) for row in table[2:]]


def functions_of(file: str) -> set[str]:
    """The test functions of a test file, which is parsed, not imported."""
    path = HERE / f"{file}.py"
    if not path.exists():
        return set()
    parsed = ast.parse(path.read_text(encoding="utf-8"))
    return {part.name for part in parsed.body if isinstance(part, ast.FunctionDef) and part.name.startswith("test_")}


def test_every_table_ends_in_a_column_of_tests() -> None:
    assert len(tables()) == 6
    for header, line, *rows in tables():
        assert header[-1] == "test"
        assert set("".join(line)) == {"-"}
        assert rows
        assert {len(row) for row in rows} == {len(header)}


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{number}-{row[0]}") for number, row in ROWS])
def test_a_row_names_tests_that_exist(row: list[str]) -> None:
    assert re.fullmatch(r"`test_\w+::test_\w+`(, `test_\w+::test_\w+`)*", row[-1]), f"no test: {row[0]}"
    for file, name in re.findall(r"(\w+)::(\w+)", row[-1]):
        assert name in functions_of(file), f"{file}.py has no {name}"


def test_a_test_that_the_text_names_exists() -> None:
    outside = "".join(line for line in PAGE.read_text(encoding="utf-8").splitlines(True) if line[0] != "|")
    for file, name in re.findall(r"`(test_\w{2,})::(\w+)`", outside):
        assert name in functions_of(file), f"{file}.py has no {name}"


# Rows that no other file shows ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


@pytest.mark.conformance
def test_a_batch_returns_no_cache(model: Any, head: EagleDraft) -> None:
    ids = torch.cat([PROMPT, PROMPT + 1])
    out = talon(model, ids, head, **OPTIONS)
    assert sequences(out) == sequences(plain(model, ids, max_new_tokens=NEW))
    assert out.get(cache_output_field()) is None
    assert talon(model, PROMPT, head, **OPTIONS).get(cache_output_field()) is not None


@pytest.mark.conformance
@pytest.mark.parametrize("filled", [0, 4])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_another_kind_is_neither_read_nor_filled(
    model: Any, head: EagleDraft, kind: str, filled: int
) -> None:
    """A filled one holds another text than the prompt's, so reading it would change what is said."""
    length = PROMPT.shape[1] + NEW
    cache: Any = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=length)
    if filled:
        with torch.no_grad():
            model(input_ids=PROMPT[:, :filled] + 3, **{cache_keyword(model): cache})
    out = talon(model, PROMPT, head, **OPTIONS, **{cache_keyword(model): cache})
    assert sequences(out) == sequences(plain(model, PROMPT, max_new_tokens=NEW))
    assert int(cache.get_seq_length()) == filled
    assert out[cache_output_field()] is not cache
    assert out[cache_output_field()].get_seq_length() == length - 1


@pytest.mark.conformance
@pytest.mark.parametrize("where", ["argument", "config"])
@pytest.mark.parametrize("name", ["hybrid", "hybrid_chunked", "sliding_window"])
def test_names_of_other_caches_that_keep_everything_are_taken(
    model: Any, head: EagleDraft, name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = plain(model, PROMPT, max_new_tokens=NEW)
    if where == "config":
        monkeypatch.setattr(model.generation_config, "cache_implementation", name)
    options = {"cache_implementation": name} if where == "argument" else {}
    assert sequences(talon(model, PROMPT, head, **OPTIONS, **options)) == want.tolist()


def test_a_quantised_cache_is_refused(model: Any, head: EagleDraft) -> None:
    class QuantizedStandIn(DynamicCache):
        """In the place of `QuantizedCache`, which needs a backend to be made."""

    with pytest.raises(ValueError, match="QuantizedStandIn that is offloaded or quantised"):
        talon(model, PROMPT, head, **OPTIONS, **{cache_keyword(model): QuantizedStandIn()})
