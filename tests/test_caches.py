"""Caches and attention settings that a call may ask for: served, or refused before any token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers
from models import drafter_zoo, random_head, tiny_model
from transformers import DynamicCache, GenerationConfig, StaticCache

from talon_hf import EagleDraft, generate
from talon_hf.cache import TreeLayer
from talon_hf.compat import cache_keyword
from talon_hf.target import tree_attention

pytestmark = pytest.mark.conformance

NEW = 24
PROMPT = torch.tensor([[7, 11, 3, 42, 5, 9, 23]])


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


def plain(model: Any, new: int = NEW) -> list[int]:
    mask = torch.ones_like(PROMPT)
    return model.generate(PROMPT, attention_mask=mask, max_new_tokens=new, do_sample=False)[0].tolist()


def talon(model: Any, head: Any, new: int = NEW, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": new, "do_sample": False, **options}
    return generate(PROMPT, model=model, assistant_model=head, **options)


@pytest.mark.parametrize("name", ["static", "dynamic", None])
@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_cache_implementations_that_a_tree_can_use(
    model: Any, head: EagleDraft, name: str | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = plain(model)
    options: dict[str, Any] = {}
    if where == "argument":
        options["cache_implementation"] = name
    elif where == "config":
        options = {"generation_config": GenerationConfig(cache_implementation=name, max_new_tokens=NEW)}
        options |= {"max_new_tokens": None, "do_sample": None}
    else:
        monkeypatch.setattr(model.generation_config, "cache_implementation", name)
    if where == "config":
        options["generation_config"].do_sample = False
        options = {"generation_config": options["generation_config"]}
        got = generate(PROMPT, model=model, assistant_model=head, attention_mask=torch.ones_like(PROMPT), **options)
    else:
        got = talon(model, head, **options)
    assert got[0].tolist() == want
    if where == "model":
        assert model.generation_config.cache_implementation == name


@pytest.mark.parametrize("new", [1, 2, 3, 8, 23, 40])
def test_static_is_allocated_once_and_holds_the_last_tree(
    model: Any, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt lookup with a static cache runs over its end on the last tokens; a tree must not."""
    grown: list[int] = []
    grow = TreeLayer._grow

    def spy(self: TreeLayer, states: Any, capacity: int) -> None:
        grown.append(capacity)
        grow(self, states, capacity)

    monkeypatch.setattr(TreeLayer, "_grow", spy)
    want = plain(model, new)
    drafter = drafter_zoo([want], model)["good"]
    assert talon(model, drafter, new, cache_implementation="static")[0].tolist() == want
    assert grown == [PROMPT.shape[1] + new + 60] * model.config.num_hidden_layers


def test_no_static_cache_is_built_beside_ours(model: Any, head: EagleDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(StaticCache, "__init__", forbidden)
    talon(model, head, 4, cache_implementation="static")


@pytest.mark.parametrize("name", ["offloaded", "quantized", "offloaded_static", "paged", "nonsense"])
def test_other_cache_implementations_are_refused_by_name(model: Any, head: EagleDraft, name: str) -> None:
    with pytest.raises(ValueError, match=f"`cache_implementation` '{name}'.*Leave it out"):
        talon(model, head, cache_implementation=name)


def test_an_empty_cache_is_taken_and_the_one_to_pass_on_is_returned(model: Any, head: EagleDraft) -> None:
    out = talon(model, head, return_dict_in_generate=True, **{cache_keyword(model): DynamicCache()})
    assert out.sequences[0].tolist() == plain(model)
    assert out.past_key_values.get_seq_length() == PROMPT.shape[1] + NEW - 1


def test_a_filled_cache_of_another_kind_gives_the_right_text(model: Any, head: EagleDraft) -> None:
    cache = DynamicCache()
    model(input_ids=PROMPT[:, :-1], **{cache_keyword(model): cache})
    assert talon(model, head, **{cache_keyword(model): cache})[0].tolist() == plain(model)


def test_an_offloaded_cache_is_refused(model: Any, head: EagleDraft) -> None:
    cache = DynamicCache()
    cache.offloading = True
    with pytest.raises(ValueError, match="offloaded or quantised"):
        talon(model, head, **{cache_keyword(model): cache})


@pytest.mark.parametrize(
    "setting", ["flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/x"]
)
def test_attention_that_takes_no_tree_mask_is_switched_for_tree_forwards(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family, supported in (("llama", "sdpa"), ("gpt_oss", "eager")):
        if family == "gpt_oss" and setting.startswith("flash"):
            continue  # some versions refuse to set it, since its sinks have a kernel of their own
        tiny = tiny_model(family)
        monkeypatch.setattr(tiny.config, "_attn_implementation_internal", setting)
        assert tree_attention(tiny) == supported


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_eager_and_sdpa_give_plain_generates_text(attention: str) -> None:
    tiny = tiny_model("mistral", eos_token_id=None, attn_implementation=attention)
    assert tiny.config._attn_implementation == attention
    want = plain(tiny)
    for drafter in (random_head(tiny, seed=3), drafter_zoo([want], tiny)["good"]):
        assert talon(tiny, drafter)[0].tolist() == want


def test_an_async_streamer_gets_the_text(model: Any, head: EagleDraft) -> None:
    class Numbers:
        """The smallest tokenizer that a streamer asks for."""

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"{int(token)}\n" for token in (ids if isinstance(ids, list) else [ids]))

    async def read() -> str:
        streamer = transformers.AsyncTextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
        work = asyncio.get_running_loop().run_in_executor(None, lambda: talon(model, head, streamer=streamer))
        pieces = [piece async for piece in streamer]
        await work
        return "".join(pieces)

    new = plain(model)[PROMPT.shape[1] :]
    assert asyncio.run(read()) == "".join(f"{token}\n" for token in new)
