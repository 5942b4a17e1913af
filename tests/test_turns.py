"""A returned cache, passed back with the longer prompt: the text is plain `generate`'s, and less is read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from calls import NEW, PROMPT, plain, sequences, shapes_of_forwards, talon
from models import ScriptedDrafter, ScriptedSession, peaked, random_head, tiny_model
from torch import Tensor, nn
from transformers import DynamicCache

from talon_hf import EagleDraft
from talon_hf.cache import TreeLayer
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


# Copies --------------------------------------------------------------------------------------------------------------


def unpickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": unpickled}


def cache_of(out: Any) -> Any:
    return out[cache_output_field()]


def bytes_in_use(cache: Any) -> int:
    return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_the_cache_gives_plain_generates_text_and_reads_only_what_is_new(
    model: Any, head: EagleDraft, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = talon(model, PROMPT, head, **OPTIONS)
    twin = COPIES[kind](cache_of(out))
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    want = sequences(plain(model, ids, max_new_tokens=NEW))
    shapes = shapes_of_forwards(model, monkeypatch)
    for cache in (twin, cache_of(out)):
        shapes.clear()
        again = talon(model, ids, head, **OPTIONS, **{cache_output_field(): cache})
        assert sequences(again) == want
        assert shapes[0] == (1, FOLLOW_UP.shape[1] + 1)


# Two calls in turns write to both; the other orders of it are slow.
OTHER_ORDERS = ("copy first", "original first", "copy of the copy")
ORDERS = ["in turns", *(pytest.param(order, marks=pytest.mark.slow) for order in OTHER_ORDERS)]


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("order", ORDERS)
def test_continuations_of_a_cache_and_its_copy_do_not_disturb_each_other(
    model: Any, head: EagleDraft, kind: str, order: str
) -> None:
    """Two different follow-ups, so that a buffer that both write would hold the wrong one for one of them."""
    out = talon(model, PROMPT, head, **OPTIONS)
    caches = [cache_of(out), COPIES[kind](cache_of(out))]
    if order == "copy first":
        caches.reverse()
    if order == "copy of the copy":
        caches = [COPIES[kind](caches[1]), caches[1]]
    texts = [torch.cat([out.sequences, FOLLOW_UP + 5 * i], dim=1) for i in range(2)]
    for _ in range(2):
        for i, cache in enumerate(caches):
            again = talon(model, texts[i], head, **OPTIONS, **{cache_output_field(): cache})
            assert sequences(again) == sequences(plain(model, texts[i], max_new_tokens=NEW))
            if order == "in turns":
                texts[i], caches[i] = torch.cat([again.sequences, FOLLOW_UP], dim=1), cache_of(again)


def test_one_copied_prefix_serves_several_continuations(
    model: Any, head: EagleDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = talon(model, PROMPT, head, **OPTIONS)
    prefix = cache_of(out)
    texts = [torch.cat([out.sequences, FOLLOW_UP + i], dim=1) for i in range(3)]
    wanted = [sequences(plain(model, ids, max_new_tokens=NEW)) for ids in texts]
    shapes = shapes_of_forwards(model, monkeypatch)
    for ids, want in zip(texts, wanted, strict=True):
        shapes.clear()
        cache = {cache_output_field(): copy.deepcopy(prefix)}
        assert sequences(talon(model, ids, head, **OPTIONS, **cache)) == want
        assert shapes[0] == (1, FOLLOW_UP.shape[1] + 1)


def test_a_copy_of_a_cache_with_room_to_spare_takes_only_what_is_in_use(model: Any, head: EagleDraft) -> None:
    cache = cache_of(talon(model, PROMPT, head, cache_implementation="static", **OPTIONS))
    twin = copy.deepcopy(cache)
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert isinstance(other, TreeLayer)
        assert layer.keys.untyped_storage().nbytes() > other.keys.untyped_storage().nbytes()
    assert sum(2 * layer.keys.untyped_storage().nbytes() for layer in twin.layers) == bytes_in_use(cache)


def test_copies_hold_the_weights_of_nobody(model: Any, head: EagleDraft) -> None:
    cache = cache_of(talon(model, PROMPT, head, **OPTIONS))
    session = copy.deepcopy(cache).turn.session
    assert session._head is head
    assert session._embeddings is model.get_input_embeddings()
    assert session._cache is not cache.turn.session._cache
    # The head's one layer is no wider than one of the model's; its features of the last round are a few hundred bytes.
    layers = model.config.num_hidden_layers
    assert len(pickle.dumps(cache)) < bytes_in_use(cache) * (1 + 2 / layers) + 20_000


class Guessing(nn.Module):
    """A drafter that is a module, whose session keeps it, a part of it and a copyable text."""

    def __init__(self, guess: Any) -> None:
        super().__init__()
        self.weights = nn.Linear(4, 4)
        self.script = ScriptedDrafter(guess)

    def features_of(self, target: Any) -> Any:
        return self.script.features_of(target)

    def open(self, target: Any, rows: int) -> ScriptedSession:
        session = self.script.open(target, rows)
        session.parts = {"own": [self.weights], "embeddings": target.get_input_embeddings()}  # type: ignore[attr-defined]
        session.weight = self.weights.weight  # type: ignore[attr-defined]
        return session


def test_sessions_of_other_drafters_are_copied_without_the_modules_that_they_reach(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Guessing(lambda _, text: peaked(text[-1]))
    out = talon(model, PROMPT, drafter, **OPTIONS)
    twin = copy.deepcopy(cache_of(out))
    session = twin.turn.session
    assert session.parts["own"][0] is drafter.weights
    assert session.weight is drafter.weights.weight
    assert session.parts["embeddings"] is model.get_input_embeddings()
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    want = sequences(plain(model, ids, max_new_tokens=NEW))
    shapes = shapes_of_forwards(model, monkeypatch)
    assert sequences(talon(model, ids, drafter, **OPTIONS, **{cache_output_field(): twin})) == want
    assert shapes[0] == (1, FOLLOW_UP.shape[1] + 1)


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_session_that_cannot_be_copied_or_stored_is_opened_anew(model: Any, kind: str) -> None:
    drafter = ScriptedDrafter(lambda _, text: peaked(text[-1]))
    out = talon(model, PROMPT, drafter, **OPTIONS)
    cache_of(out).turn.session.generator = (i for i in range(3))
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    again = talon(model, ids, drafter, **OPTIONS, **{cache_output_field(): COPIES[kind](cache_of(out))})
    assert sequences(again) == sequences(plain(model, ids, max_new_tokens=NEW))


def test_an_unpickled_cache_is_plain_generates_too(model: Any, head: EagleDraft) -> None:
    out = talon(model, PROMPT, head, **OPTIONS)
    cache = unpickled(cache_of(out))
    assert type(cache) is DynamicCache
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    want = sequences(plain(model, ids, max_new_tokens=NEW))
    assert sequences(plain(model, ids, max_new_tokens=NEW, **{cache_output_field(): cache})) == want
    # It has grown since, so it is not gone on with.
    assert sequences(talon(model, ids, head, **OPTIONS, **{cache_output_field(): cache})) == want


@pytest.mark.parametrize("change", ["another text of that length", "another head", "other weights", "no module"])
def test_an_unpickled_cache_that_does_not_fit_is_read_anew(
    model: Any, head: EagleDraft, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = talon(model, PROMPT, head, **OPTIONS)
    cache, drafter, target = unpickled(cache_of(out)), head, model
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    if change == "another text of that length":
        cache.crop(-2)
        model(input_ids=torch.tensor([[5, 6]]), **{cache_keyword(model): cache})
    elif change == "another head":
        drafter = random_head(model, seed=9)
    elif change == "no module":
        drafter = ScriptedDrafter(lambda _, text: peaked(text[-1]))
    else:
        target = tiny_model("mistral", eos_token_id=None, seed=1)
    want = plain(target, ids, max_new_tokens=NEW)
    shapes = shapes_of_forwards(target, monkeypatch)
    assert sequences(talon(target, ids, drafter, **OPTIONS, **{cache_output_field(): cache})) == want.tolist()
    assert shapes[0] == ids.shape


# What has changed on the model since ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["original", *(pytest.param(kind, marks=pytest.mark.slow) for kind in COPIES)])
@pytest.mark.parametrize("change", ["the model's dtype", "the head's dtype", "autocast before", "autocast since"])
def test_a_cache_of_another_dtype_is_read_anew(change: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", eos_token_id=None, dtype=torch.float32)
    head = random_head(model, seed=3)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with autocast if change == "autocast before" else nullcontext():
        out = talon(model, PROMPT, head, **OPTIONS)
    cache = COPIES.get(kind, lambda cache: cache)(cache_of(out))
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    if change == "the model's dtype":
        model.double()
    if change == "the head's dtype":
        head.double()
    with autocast if change == "autocast since" else nullcontext():
        want = plain(model, ids, max_new_tokens=NEW)
        shapes = shapes_of_forwards(model, monkeypatch)
        again = talon(model, ids, head, **OPTIONS, **{cache_output_field(): cache})
    assert shapes[0] == ids.shape
    if change != "autocast since":  # a bfloat16 tie may part two texts
        assert sequences(again) == want.tolist()


def test_a_cache_of_another_model_with_the_same_head_is_read_anew(model: Any, head: EagleDraft) -> None:
    ids, cache = next_turn(talon(model, PROMPT, head, **OPTIONS))
    other = tiny_model("mistral", eos_token_id=None, seed=1)
    out = talon(other, ids, head, **OPTIONS, **cache)
    assert sequences(out) == sequences(plain(other, ids, max_new_tokens=NEW))


class Tuned(nn.Linear):
    """A layer with the attributes of PEFT's, whose adapter doubles what it says."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
        self.weight = linear.weight
        self.active_adapters: list[str] = []
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    def forward(self, states: Tensor) -> Tensor:
        adapted = self.active_adapters and not self.disable_adapters
        return super().forward(states) * (2.0 if adapted else 1.0)


@pytest.mark.parametrize("kind", ["original", "deepcopy", "pickle"])
@pytest.mark.parametrize("change", ["another adapter", "none any more"])
def test_a_cache_of_another_adapter_is_read_anew(change: str, kind: str) -> None:
    model = tiny_model("llama", eos_token_id=None)
    head = random_head(model, seed=3)
    mlp = model.model.layers[2].mlp
    mlp.up_proj = tuned = Tuned(mlp.up_proj)
    tuned.active_adapters = [] if change == "another adapter" else ["one"]
    out = talon(model, PROMPT, head, **OPTIONS)
    cache = COPIES.get(kind, lambda cache: cache)(cache_of(out))
    ids = torch.cat([out.sequences, FOLLOW_UP], dim=1)
    if change == "another adapter":
        tuned.active_adapters = ["two"]
    else:
        tuned.disable_adapters = True
    again = talon(model, ids, head, **OPTIONS, **{cache_output_field(): cache})
    assert sequences(again) == sequences(plain(model, ids, max_new_tokens=NEW))
