"""A returned cache, passed back with the longer prompt: the text is plain `generate`'s, and less is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import random_head, tiny_model

from talon_hf import EagleDraft, generate
from talon_hf.compat import cache_keyword, cache_output_field

pytestmark = pytest.mark.conformance

PROMPT = torch.tensor([[7, 11, 3, 42, 5, 9, 23]])
FOLLOW_UP = torch.tensor([[14, 31, 6]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("mistral", eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


def talon(model: Any, head: EagleDraft, ids: torch.Tensor, new: int = 12, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, **options}
    return generate(ids, model=model, assistant_model=head, return_dict_in_generate=True, **options)


def plain(model: Any, ids: torch.Tensor, new: int = 12) -> list[int]:
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0].tolist()


def widths_of_forwards(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    widths: list[int] = []
    forward = model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    spy.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", spy)
    return widths


@pytest.mark.parametrize("new", [1, 2, 12])
def test_three_turns_equal_plain_generate_on_the_whole_text(model: Any, head: EagleDraft, new: int) -> None:
    ids, cache = PROMPT, {}
    for _ in range(3):
        out = talon(model, head, ids, new, **cache)
        assert out.sequences[0].tolist() == plain(model, ids, new)
        ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
        cache = {cache_output_field(): out[cache_output_field()]}


def test_a_turn_reads_only_what_is_new(model: Any, head: EagleDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    first = talon(model, head, PROMPT)
    ids = torch.cat([first.sequences, FOLLOW_UP], dim=1)
    widths = widths_of_forwards(model, monkeypatch)
    talon(model, head, ids, **{cache_output_field(): first[cache_output_field()]})
    # The last emitted token was never cached.
    assert widths[0] == FOLLOW_UP.shape[1] + 1


def test_the_drafter_of_a_second_turn_drafts_as_if_it_had_read_the_whole_text(model: Any, head: EagleDraft) -> None:
    first = talon(model, head, PROMPT)
    ids = torch.cat([first.sequences, FOLLOW_UP], dim=1)
    again = talon(model, head, ids, **{cache_output_field(): first[cache_output_field()]})
    anew = talon(model, head, ids)
    for name in ("rounds", "nodes", "draft_steps", "accepted_by_depth"):
        assert getattr(again.talon_stats, name) == getattr(anew.talon_stats, name)


@pytest.mark.parametrize("change", ["another text", "another drafter", "used twice"])
def test_a_turn_that_does_not_fit_is_read_anew(
    model: Any, head: EagleDraft, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = talon(model, head, PROMPT)
    cache = {cache_output_field(): first[cache_output_field()]}
    ids = torch.cat([first.sequences, FOLLOW_UP], dim=1)
    drafter = head
    if change == "another text":
        ids[0, 2] += 1
    elif change == "another drafter":
        drafter = random_head(model, seed=9)
    else:
        talon(model, head, ids, **cache)
        ids[0, 3] += 1
    want = plain(model, ids)
    widths = widths_of_forwards(model, monkeypatch)
    assert talon(model, drafter, ids, **cache).sequences[0].tolist() == want
    assert widths[0] == ids.shape[1]


def test_a_call_that_breaks_off_leaves_a_cache_that_gives_the_right_text(model: Any, head: EagleDraft) -> None:
    first = talon(model, head, PROMPT)
    cache = {cache_output_field(): first[cache_output_field()]}
    ids = torch.cat([first.sequences, FOLLOW_UP], dim=1)

    def stop(*_: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talon(model, head, ids, stopping_criteria=[stop], **cache)
    assert talon(model, head, ids, **cache).sequences[0].tolist() == plain(model, ids)


@pytest.mark.parametrize("meddle", ["crop", "reset", "another forward", "crop and another forward"])
def test_a_cache_that_was_changed_in_between_is_read_anew(model: Any, head: EagleDraft, meddle: str) -> None:
    first = talon(model, head, PROMPT)
    cache = first[cache_output_field()]
    if "crop" in meddle:
        cache.crop(-1)
    if meddle == "reset":
        cache.reset()
    if "forward" in meddle:
        model(input_ids=torch.tensor([[5]]), **{cache_keyword(model): cache})
    ids = torch.cat([first.sequences, FOLLOW_UP], dim=1)
    assert talon(model, head, ids, **{cache_output_field(): cache}).sequences[0].tolist() == plain(model, ids)


@pytest.mark.parametrize("masks", [("0011111", "0011111"), ("1101111", "1101111"), ("0011111", "1111111")])
def test_a_masked_prompt_is_read_anew(model: Any, head: EagleDraft, masks: tuple[str, str]) -> None:
    """The cache holds no masked column, so its text and the prompt do not lie side by side."""
    first, second = (torch.tensor([[int(bit) for bit in mask]]) for mask in masks)
    out = talon(model, head, PROMPT, attention_mask=first)
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    mask = torch.cat([second, torch.ones(1, ids.shape[1] - second.shape[1], dtype=torch.long)], dim=1)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0].tolist()
    got = talon(model, head, ids, attention_mask=mask, **{cache_output_field(): out[cache_output_field()]})
    assert got.sequences[0].tolist() == want


def test_a_prompt_that_is_masked_only_the_second_time_is_read_anew(model: Any, head: EagleDraft) -> None:
    first = talon(model, head, PROMPT)
    ids = torch.cat([first.sequences, FOLLOW_UP], dim=1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0].tolist()
    got = talon(model, head, ids, attention_mask=mask, **{cache_output_field(): first[cache_output_field()]})
    assert got.sequences[0].tolist() == want
