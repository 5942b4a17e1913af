"""The bench on a tiny pair: it compares what it times, and its last line is the JSON of its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import random_head, tiny_model

from talon_hf.bench import SYSTEMS, logit_gap, measure, read_prompts, report, systems

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
        assert row["gaps"] == []
        # Prefill's token is of no round.
        assert row["stats"]["emitted"] == (0 if name in ("plain", "lookup") else 2 * (NEW - 1))


def test_the_gap_is_taken_where_two_texts_part() -> None:
    model = tiny_model("llama", eos_token_id=None)
    text = torch.tensor([[7, 11, 3, 42, 5]])
    other = text.clone()
    other[0, 3] = 8
    best = model(input_ids=text[:, :3]).logits[0, -1].float().topk(2).values
    assert logit_gap(model, text, other) == pytest.approx(float(best[0] - best[1]))
    assert logit_gap(model, text, text) is None


def test_a_folder_without_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl file"):
        read_prompts(tmp_path, 1, None)
