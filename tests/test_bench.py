"""The bench on a tiny pair: it compares what it times, and its last line is the JSON of its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, random_head, tiny_model

from talon_hf.tools.bench import SYSTEMS, measure, read_prompts, report, systems

NEW = 8


def test_every_system_is_run_compared_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", eos_token_id=None)
    options = {"talon_node_budget": 7, "talon_top_k": 3}
    runs = systems(model, random_head(model, seed=3), NEW, list(SYSTEMS), options)
    prompts = [torch.tensor([[7, 11, 3, 42]]), torch.tensor([[5, 9, 23]])]
    report(measure(runs, model, prompts, repeats=2), {"dtype": "float64"})
    printed = capsys.readouterr().out.splitlines()
    told = json.loads(printed[-1])
    assert list(told["systems"]) == list(SYSTEMS)
    for name, row in told["systems"].items():
        assert row["same_text"] == told["prompts"] == len(row["speedups"]) == 2
        assert row["partings"] == []
        # Prefill's token is of no round.
        assert row["stats"]["emitted"] == (0 if name in ("plain", "lookup") else 2 * (NEW - 1))


def test_kept_measurements_are_of_this_form_and_are_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(__file__).parent.parent / "docs"
    model = tiny_model("llama", eos_token_id=None)
    prompts = [torch.tensor([[7, 11, 3, 42]])]
    report(measure(systems(model, random_head(model), NEW, ["plain"], {}), model, prompts, repeats=1), {})
    form = json.loads(capsys.readouterr().out.splitlines()[-1])
    tables = [line.split() for line in (docs / "performance.md").read_text(encoding="utf-8").splitlines()]
    kept = sorted((docs / "benchmarks").iterdir())
    assert kept
    for path in kept:
        told = json.loads(path.read_text(encoding="utf-8"))
        assert told.keys() == form.keys(), path.name
        for name, row in told["systems"].items():
            assert row.keys() == form["systems"]["plain"].keys(), path.name
            assert row["stats"].keys() <= form["systems"]["plain"]["stats"].keys(), path.name
            pace = (row["tokens_per_second"], ".1f"), (row["speedup_mean"], ".2f"), (min(row["speedups"]), ".2f")
            assert [name, *(format(*figure) for figure in pace)] in [line[:4] for line in tables], path.name


def test_a_text_that_parts_is_counted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", eos_token_id=None)
    runs = systems(model, random_head(model, seed=3), NEW, ["plain", "talon"], {})

    def wrong(ids: torch.Tensor) -> Any:
        sequences, stats = runs["talon"](ids)
        sequences[0, -1] = (sequences[0, -1] + 1) % VOCABULARY
        return sequences, stats

    report(measure({**runs, "talon": wrong}, model, [torch.tensor([[7, 11, 3, 42]])], repeats=1), {})
    printed = capsys.readouterr().out.splitlines()
    assert next(line for line in printed if line.startswith("talon ")).endswith("0 of 1")
    assert any(line.startswith("talon: 1 texts part from plain's, 0 of them at a rounding tie") for line in printed)
    (parting,) = json.loads(printed[-1])["systems"]["talon"]["partings"]
    assert parting["at"] == NEW - 1
    assert parting["gap"] > 2 * parting["moved"]


def test_a_folder_without_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl file"):
        read_prompts(tmp_path, 1, None)
