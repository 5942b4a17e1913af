"""Where two texts part: the place, the gap, and how far rounding moves logits there."""

from __future__ import annotations

import math

import pytest
import torch
from calls import PROMPT, plain
from models import tiny_model
from transformers import PreTrainedModel

from talon_hf.tools.ties import Parting, find_parting, shared

INPUTS = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def text(model: PreTrainedModel) -> list[int]:
    return plain(model, PROMPT, max_new_tokens=8)[0, PROMPT.shape[1] :].tolist()


@torch.no_grad()
@pytest.mark.parametrize("at", [0, 3, 7])
def test_the_gap_is_plain_decodings_own_at_the_place(at: int, model: PreTrainedModel, text: list[int]) -> None:
    other = [*text[:at], (text[at] + 1) % 50, *text[at + 1 :]]
    parting = find_parting(model, INPUTS, text, other)
    logits = model(input_ids=torch.tensor([PROMPT[0].tolist() + text[:at]])).logits[0, -1].float()
    assert parting is not None
    assert parting.at == at
    assert parting.gap == pytest.approx(float(logits[text[at]] - logits[other[at]]))
    # In float64 nothing but the last bits of float32 moves.
    assert parting.moved < 1e-5
    assert not parting.is_tie


def test_equal_texts_do_not_part(model: PreTrainedModel, text: list[int]) -> None:
    assert find_parting(model, INPUTS, text, list(text)) is None


def test_a_text_that_ends_early_is_no_tie(model: PreTrainedModel, text: list[int]) -> None:
    parting = find_parting(model, INPUTS, text, text[:5])
    assert parting == Parting(5, math.inf, 0.0)
    assert not parting.is_tie


def test_a_tie_is_a_gap_that_rounding_spans() -> None:
    assert Parting(0, 0.25, 0.125).is_tie
    assert not Parting(0, 0.26, 0.125).is_tie


def test_shared_counts_the_first_tokens() -> None:
    assert [shared(*pair) for pair in (([], [1]), ([1, 2], [1, 2]), ([1, 2, 3], [1, 4, 3]))] == [0, 2, 1]
