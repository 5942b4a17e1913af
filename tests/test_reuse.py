"""Threads, nesting, abandoned and repeated calls: nothing leaks into another call or stays on the model."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch
from models import drafter_zoo, random_head, tiny_model
from transformers import TextIteratorStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from talon_hf import EagleDraft, generate

PROMPTS = [torch.tensor([[7, 11, 3, 42, 5, 9, 23]]), torch.tensor([[14, 31, 6, 8]]), torch.tensor([[33, 4, 18]])]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


def plain(model: Any, ids: torch.Tensor, new: int = 24) -> list[int]:
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0].tolist()


def talon(model: Any, drafter: Any, ids: torch.Tensor, new: int = 24, **options: Any) -> list[int]:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, **options}
    return generate(ids, model=model, assistant_model=drafter, **options)[0].tolist()


def test_threads_on_one_model_and_one_head_get_their_own_texts(model: Any, head: EagleDraft) -> None:
    want = [plain(model, ids) for ids in PROMPTS]
    got: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        got[number] = [talon(model, head, PROMPTS[number]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: [text] * 4 for number, text in enumerate(want)}


def test_threads_whose_trees_need_another_attention_setting_do_not_mix_them_up(
    head: EagleDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting lies in the config that the threads share; the stand-in refuses what FlashAttention cannot take."""
    model = tiny_model("llama", eos_token_id=None)
    want = [plain(model, ids) for ids in PROMPTS]
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        assert mask is None or mask.dim() != 4, "FlashAttention takes no mask of a tree"
        return sdpa(module, query, key, value, None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    model.config._attn_implementation = "flash_attention_2"
    got: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        got[number] = [talon(model, head, PROMPTS[number]) for _ in range(3)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert got == {number: [text] * 3 for number, text in enumerate(want)}
    assert model.config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("inner", ["plain", "talon"])
def test_a_stopping_criterion_may_generate_with_the_same_model(model: Any, head: EagleDraft, inner: str) -> None:
    want_inside = plain(model, PROMPTS[1], new=5)
    seen: list[list[int]] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        run = plain(model, PROMPTS[1], 5) if inner == "plain" else talon(model, head, PROMPTS[1], 5)
        seen.append(run)
        return torch.zeros(len(ids), dtype=torch.bool)

    outer = talon(model, head, PROMPTS[0], new=8, stopping_criteria=[criterion])
    assert outer == plain(model, PROMPTS[0], new=8)
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
        talon(model, head, PROMPTS[0], streamer=Leaving(tokenizer=None))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert talon(model, head, PROMPTS[0]) == plain(model, PROMPTS[0])


def test_two_hundred_rounds_leave_nothing_behind(model: Any) -> None:
    """Objects that the collector tracks and attributes of the model are counted, not bytes, which allocators keep."""
    adversary = drafter_zoo([plain(model, PROMPTS[1], new=201)], model)["adversarial"]

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    talon(model, adversary, PROMPTS[1], new=20)
    before = tensors()
    out = generate(
        PROMPTS[1],
        model=model,
        assistant_model=adversary,
        attention_mask=torch.ones_like(PROMPTS[1]),
        max_new_tokens=201,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert out.talon_stats.rounds == 200
    del out
    assert tensors() <= before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
