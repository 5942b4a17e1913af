"""Caches and attention settings that a call may ask for: served, or refused before any token."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from calls import NEW, PROMPT, plain, sequences, talon
from models import random_head, tiny_model
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from talon_hf import EagleDraft
from talon_hf.cache import TreeLayer
from talon_hf.compat import cache_keyword
from talon_hf.target import tree_attention

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


@pytest.mark.parametrize("name", ["static", "dynamic", None])
@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_cache_implementations_that_a_tree_can_use(
    model: Any, head: EagleDraft, name: str | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = plain(model, PROMPT, max_new_tokens=NEW)
    options: dict[str, Any] = {"max_new_tokens": NEW}
    if where == "argument":
        options["cache_implementation"] = name
    elif where == "config":
        options = {"generation_config": GenerationConfig(cache_implementation=name, **options)}
    else:
        monkeypatch.setattr(model.generation_config, "cache_implementation", name)
    assert sequences(talon(model, PROMPT, head, **options)) == want.tolist()
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
    want = plain(model, PROMPT, max_new_tokens=new)
    out = talon(model, PROMPT, "good", want, max_new_tokens=new, cache_implementation="static")
    assert sequences(out) == want.tolist()
    assert grown == [PROMPT.shape[1] + new + 60] * model.config.num_hidden_layers


def test_no_static_cache_is_built_beside_ours(model: Any, head: EagleDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(StaticCache, "__init__", forbidden)
    talon(model, PROMPT, head, max_new_tokens=4, cache_implementation="static")


@pytest.mark.parametrize("name", ["offloaded", "quantized", "offloaded_static", "paged", "nonsense"])
def test_other_cache_implementations_are_refused_by_name(model: Any, head: EagleDraft, name: str) -> None:
    with pytest.raises(ValueError, match=f"`cache_implementation` '{name}'.*Leave it out"):
        talon(model, PROMPT, head, max_new_tokens=NEW, cache_implementation=name)


def test_an_empty_cache_is_taken_and_the_one_to_pass_on_is_returned(model: Any, head: EagleDraft) -> None:
    options = {"return_dict_in_generate": True, cache_keyword(model): DynamicCache()}
    out = talon(model, PROMPT, head, max_new_tokens=NEW, **options)
    assert sequences(out) == sequences(plain(model, PROMPT, max_new_tokens=NEW))
    assert out.past_key_values.get_seq_length() == PROMPT.shape[1] + NEW - 1


def test_a_filled_cache_of_another_kind_gives_the_right_text(model: Any, head: EagleDraft) -> None:
    cache = DynamicCache()
    model(input_ids=PROMPT[:, :-1], **{cache_keyword(model): cache})
    out = talon(model, PROMPT, head, max_new_tokens=NEW, **{cache_keyword(model): cache})
    assert sequences(out) == sequences(plain(model, PROMPT, max_new_tokens=NEW))


def test_an_offloaded_cache_is_refused(model: Any, head: EagleDraft) -> None:
    cache = DynamicCache()
    cache.offloading = True
    with pytest.raises(ValueError, match="offloaded or quantised"):
        talon(model, PROMPT, head, max_new_tokens=NEW, **{cache_keyword(model): cache})


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


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_flex_attention_reads_the_prompt(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, since torch's kernel of it for the CPU does not compile for every shape."""
    options = {"eos_token_id": None, "dtype": torch.float32, "head_dim": 16}
    want = plain(tiny_model(family, **options), PROMPT, max_new_tokens=NEW)
    flex = tiny_model(family, attn_implementation="flex_attention", **options)
    queries: list[int] = []
    attend = ALL_ATTENTION_FUNCTIONS["flex_attention"]

    def spy(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries.append(query.shape[2])
        return attend(module, query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", spy)
    with torch.compiler.set_stance("force_eager"):
        for drafter in ("good", random_head(flex, seed=3)):
            queries.clear()
            assert sequences(talon(flex, PROMPT, drafter, want, max_new_tokens=NEW)) == want.tolist()
            assert queries == [PROMPT.shape[1]] * flex.config.num_hidden_layers
    assert flex.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_eager_and_sdpa_give_plain_generates_text(attention: str) -> None:
    tiny = tiny_model("mistral", eos_token_id=None, attn_implementation=attention)
    assert tiny.config._attn_implementation == attention
    want = plain(tiny, PROMPT, max_new_tokens=NEW)
    for name in ("random", "good"):
        assert sequences(talon(tiny, PROMPT, name, want, max_new_tokens=NEW)) == want.tolist()


def test_an_async_streamer_gets_the_text(model: Any, head: EagleDraft) -> None:
    class Numbers:
        """The smallest tokenizer that a streamer asks for."""

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"{int(token)}\n" for token in (ids if isinstance(ids, list) else [ids]))

    async def read() -> str:
        streamer = transformers.AsyncTextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
        call = partial(talon, model, PROMPT, head, max_new_tokens=NEW, streamer=streamer)
        work = asyncio.get_running_loop().run_in_executor(None, call)
        pieces = [piece async for piece in streamer]
        await work
        return "".join(pieces)

    new = plain(model, PROMPT, max_new_tokens=NEW)[0, PROMPT.shape[1] :].tolist()
    assert asyncio.run(read()) == "".join(f"{token}\n" for token in new)
