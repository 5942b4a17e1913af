"""Threads, nesting, abandoned and repeated calls: nothing leaks into another call or stays on the model."""

from __future__ import annotations

import gc
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from calls import NEW, PROMPT, plain, sequences, talon
from models import drafter_zoo, random_head, tiny_model
from transformers import TextIteratorStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from talon_hf import EagleDraft
from talon_hf.target import SWITCHING

PROMPTS = [PROMPT, torch.tensor([[14, 31, 6, 8]]), torch.tensor([[33, 4, 18]])]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


def plain_texts(model: Any) -> list[list[list[int]]]:
    return [sequences(plain(model, ids, max_new_tokens=NEW)) for ids in PROMPTS]


def texts_of_threads(model: Any, head: EagleDraft, calls: int) -> dict[int, list[list[list[int]]]]:
    """What a thread for each prompt got, from `calls` calls one after the other."""
    got: dict[int, list[list[list[int]]]] = {}

    def work(number: int) -> None:
        got[number] = [sequences(talon(model, PROMPTS[number], head, max_new_tokens=NEW)) for _ in range(calls)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_threads_on_one_model_and_one_head_get_their_own_texts(model: Any, head: EagleDraft) -> None:
    want = plain_texts(model)
    assert texts_of_threads(model, head, 4) == {number: [text] * 4 for number, text in enumerate(want)}


def test_threads_whose_trees_need_another_attention_setting_do_not_mix_them_up(
    head: EagleDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting lies in the config that the threads share; the stand-in refuses what FlashAttention cannot take."""
    model = tiny_model("llama", eos_token_id=None)
    want = plain_texts(model)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        assert mask is None or mask.dim() != 4, "FlashAttention takes no mask of a tree"
        return sdpa(module, query, key, value, None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    model.config._attn_implementation = "flash_attention_2"
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        got = texts_of_threads(model, head, 3)
    finally:
        sys.setswitchinterval(interval)
    assert got == {number: [text] * 3 for number, text in enumerate(want)}
    assert model.config._attn_implementation == "flash_attention_2"


def test_no_forward_of_such_a_call_meets_another_threads_setting(head: EagleDraft) -> None:
    """Each forward holds the lock that a switch of the setting takes, the prompt's too."""
    model = tiny_model("llama", eos_token_id=None, attn_implementation="eager")
    model.config._attn_implementation = "flex_attention"
    held: list[bool] = []

    def try_lock() -> None:
        is_free = SWITCHING.acquire(blocking=False)
        held.append(not is_free)
        if is_free:
            SWITCHING.release()

    def try_from_another_thread(*_: Any) -> None:
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()

    model.register_forward_pre_hook(try_from_another_thread)
    with torch.compiler.set_stance("force_eager"):
        out = talon(model, PROMPT, head, max_new_tokens=8, return_dict_in_generate=True, talon_check=False)
    assert held == [True] * (1 + out.talon_stats.batch_rounds)


@pytest.mark.parametrize("inner", ["plain", "talon"])
def test_a_stopping_criterion_may_generate_with_the_same_model(model: Any, head: EagleDraft, inner: str) -> None:
    call = partial(plain, model, PROMPTS[1]) if inner == "plain" else partial(talon, model, PROMPTS[1], head)
    want_inside = sequences(plain(model, PROMPTS[1], max_new_tokens=5))
    seen: list[list[list[int]]] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        seen.append(sequences(call(max_new_tokens=5)))
        return torch.zeros(len(ids), dtype=torch.bool)

    outer = talon(model, PROMPT, head, max_new_tokens=8, stopping_criteria=[criterion])
    assert sequences(outer) == sequences(plain(model, PROMPT, max_new_tokens=8))
    assert seen == [want_inside] * 8


def test_a_stream_that_is_abandoned_half_way_leaves_the_model_usable(model: Any, head: EagleDraft) -> None:
    class GoneError(Exception):
        pass

    class Leaving(TextIteratorStreamer):
        def put(self, value: torch.Tensor) -> None:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 5:
                raise GoneError

    with pytest.raises(GoneError):
        talon(model, PROMPT, head, max_new_tokens=NEW, streamer=Leaving(tokenizer=None))
    assert not any(module._forward_pre_hooks for module in model.modules())
    out = talon(model, PROMPT, head, max_new_tokens=NEW)
    assert sequences(out) == sequences(plain(model, PROMPT, max_new_tokens=NEW))


@pytest.mark.slow
def test_two_hundred_rounds_leave_nothing_behind(model: Any) -> None:
    """Objects that the collector tracks and attributes of the model are counted, not bytes, which allocators keep."""
    adversary = drafter_zoo(sequences(plain(model, PROMPTS[1], max_new_tokens=201)), model)["adversarial"]

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    talon(model, PROMPTS[1], adversary, max_new_tokens=20)
    before = tensors()
    out = talon(model, PROMPTS[1], adversary, max_new_tokens=201, return_dict_in_generate=True)
    assert out.talon_stats.rounds == 200
    del out
    assert tensors() <= before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
