"""A returned cache, passed back with the longer prompt: the text is plain `generate`'s, and less is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import NEW, PROMPT, plain, sequences, shapes_of_forwards, talon
from models import ScriptedDrafter, peaked, random_head, tiny_model

from talon_hf import EagleDraft
from talon_hf.compat import cache_keyword, cache_output_field

pytestmark = pytest.mark.conformance

FOLLOW_UP = torch.tensor([[14, 31, 6]])
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("mistral", eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


def next_turn(out: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """What the turn after an output is called with: the longer prompt, and the cache under its name."""
    return torch.cat([out.sequences, FOLLOW_UP], dim=1), {cache_output_field(): out[cache_output_field()]}


@pytest.mark.parametrize("new", [1, 2, 12])
def test_three_turns_equal_plain_generate_on_the_whole_text(model: Any, head: EagleDraft, new: int) -> None:
    ids, cache = PROMPT, {}
    for _ in range(3):
        out = talon(model, ids, head, max_new_tokens=new, return_dict_in_generate=True, **cache)
        assert sequences(out) == sequences(plain(model, ids, max_new_tokens=new))
        ids, cache = next_turn(out)


def test_a_turn_reads_only_what_is_new(model: Any, head: EagleDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, cache = next_turn(talon(model, PROMPT, head, **OPTIONS))
    shapes = shapes_of_forwards(model, monkeypatch)
    talon(model, ids, head, **OPTIONS, **cache)
    # The last emitted token was never cached.
    assert shapes[0] == (1, FOLLOW_UP.shape[1] + 1)


def test_the_drafter_of_a_second_turn_drafts_as_if_it_had_read_the_whole_text(model: Any, head: EagleDraft) -> None:
    ids, cache = next_turn(talon(model, PROMPT, head, **OPTIONS))
    again = talon(model, ids, head, **OPTIONS, **cache)
    anew = talon(model, ids, head, **OPTIONS)
    for name in ("rounds", "nodes", "draft_steps", "accepted_by_depth"):
        assert getattr(again.talon_stats, name) == getattr(anew.talon_stats, name)


def test_the_drafter_of_a_second_turn_is_told_every_token_once(model: Any) -> None:
    """Also those that the first turn committed in its last round, after the drafter's last step."""
    sessions: list[Any] = []

    class Recorded(ScriptedDrafter):
        def open(self, target: Any, rows: int) -> Any:
            sessions.append(super().open(target, rows))
            return sessions[-1]

    drafter = Recorded(lambda _, text: peaked(text[-1]))
    out = talon(model, PROMPT, drafter, **OPTIONS)
    for _ in range(2):
        ids, cache = next_turn(out)
        out = talon(model, ids, drafter, **OPTIONS, **cache)
    (session,) = sessions
    told = session._texts[0]
    assert len(told) > ids.shape[1]
    assert told == out.sequences[0, : len(told)].tolist()


@pytest.mark.parametrize("change", ["another text", "another drafter", "used twice"])
def test_a_turn_that_does_not_fit_is_read_anew(
    model: Any, head: EagleDraft, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache = next_turn(talon(model, PROMPT, head, **OPTIONS))
    drafter = head
    if change == "another text":
        ids[0, 2] += 1
    elif change == "another drafter":
        drafter = random_head(model, seed=9)
    else:
        talon(model, ids, head, **OPTIONS, **cache)
        ids[0, 3] += 1
    want = plain(model, ids, max_new_tokens=NEW)
    shapes = shapes_of_forwards(model, monkeypatch)
    assert sequences(talon(model, ids, drafter, **OPTIONS, **cache)) == want.tolist()
    assert shapes[0] == ids.shape


def test_a_call_that_breaks_off_leaves_a_cache_that_gives_the_right_text(model: Any, head: EagleDraft) -> None:
    ids, cache = next_turn(talon(model, PROMPT, head, **OPTIONS))

    def stop(*_: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talon(model, ids, head, stopping_criteria=[stop], **OPTIONS, **cache)
    out = talon(model, ids, head, **OPTIONS, **cache)
    assert sequences(out) == sequences(plain(model, ids, max_new_tokens=NEW))


@pytest.mark.parametrize("meddle", ["crop", "reset", "another forward", "crop and another forward"])
def test_a_cache_that_was_changed_in_between_is_read_anew(model: Any, head: EagleDraft, meddle: str) -> None:
    ids, options = next_turn(talon(model, PROMPT, head, **OPTIONS))
    (cache,) = options.values()
    if "crop" in meddle:
        cache.crop(-1)
    if meddle == "reset":
        cache.reset()
    if "forward" in meddle:
        model(input_ids=torch.tensor([[5]]), **{cache_keyword(model): cache})
    out = talon(model, ids, head, **OPTIONS, **options)
    assert sequences(out) == sequences(plain(model, ids, max_new_tokens=NEW))


@pytest.mark.parametrize("masks", [("0011111", "0011111"), ("1101111", "1101111"), ("0011111", "1111111")])
def test_a_masked_prompt_is_read_anew(masks: tuple[str, str]) -> None:
    """The cache holds no masked column, so its text and the prompt do not lie side by side."""
    model = tiny_model("llama", eos_token_id=None)
    head = random_head(model, seed=3)
    first, second = (torch.tensor([[int(bit) for bit in mask]]) for mask in masks)
    ids, cache = next_turn(talon(model, PROMPT, head, attention_mask=first, **OPTIONS))
    mask = torch.cat([second, torch.ones(1, ids.shape[1] - second.shape[1], dtype=torch.long)], dim=1)
    out = talon(model, ids, head, attention_mask=mask, **OPTIONS, **cache)
    assert sequences(out) == sequences(plain(model, ids, attention_mask=mask, max_new_tokens=NEW))


def test_a_prompt_that_is_masked_only_the_second_time_is_read_anew(model: Any, head: EagleDraft) -> None:
    ids, cache = next_turn(talon(model, PROMPT, head, **OPTIONS))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    out = talon(model, ids, head, attention_mask=mask, **OPTIONS, **cache)
    assert sequences(out) == sequences(plain(model, ids, attention_mask=mask, max_new_tokens=NEW))
