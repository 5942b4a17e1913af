"""Models whose attention changes with the length of the text: served up to the change, refused across it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from calls import plain, sequences, talon
from models import COMMON, random_head, with_random_weights
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from talon_hf import decoding
from talon_hf.positions import are_read_alike, changes

pytestmark = pytest.mark.conformance

PROMPT = torch.tensor([[(7 * i + 3) % 44 + 4 for i in range(14)]])
LIMIT = 30
BUDGET = 12
IS_5 = Version(transformers.__version__) >= Version("5")
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0], "factor": 4.0}
# Before 5.0 Phi-3 takes these three and no more.
PHI3 = {("rope_type" if IS_5 else "type"): "longrope", **{k: LONGROPE[k] for k in ("short_factor", "long_factor")}}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
KINDS = ("longrope", "phi3", "dynamic", "temperature", "kept keys")
# Nodes that count as columns reach further than the text.
REACH = {"temperature": BUDGET + 1, "kept keys": BUDGET}


def rotary(parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    name = "rope_parameters" if IS_5 else "rope_scaling"
    base = {"rope_theta": 10000.0, "original_max_position_embeddings": LIMIT} if IS_5 else {}
    return {**fields, name: {**parameters, **base}}


def build(kind: str) -> PreTrainedModel:
    """A model of eight layers whose attention changes behind `LIMIT` tokens."""
    name, extra = {
        "longrope": ("llama", rotary(LONGROPE)),
        "phi3": ("phi3", rotary(PHI3)),
        "dynamic": ("llama", rotary(DYNAMIC, max_position_embeddings=LIMIT)),
        "temperature": ("llama4_text", {"floor_scale": LIMIT, "attn_scale": 4.0, "num_local_experts": 2}),
        "kept keys": ("doge", {"keep_window_size": LIMIT}),
    }[kind]
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if kind == "phi3":
        extra["original_max_position_embeddings"] = LIMIT
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{**COMMON, "eos_token_id": None, **extra})
    if kind == "longrope" and not IS_5:
        config.original_max_position_embeddings = LIMIT
    return with_random_weights(AutoModelForCausalLM.from_config(config), 0.4).eval()


def furthest(kind: str) -> int:
    """The longest text that may be asked for."""
    return LIMIT + 1 - REACH.get(kind, 0)


def texts(kind: str, ids: torch.Tensor, length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Plain `generate`'s and ours, each by a model that has done nothing yet: some remember the longest text."""
    options: dict[str, Any] = {"max_length": length, "max_new_tokens": None}
    want = plain(build(kind), ids, **options)
    got = talon(build(kind), ids, "perfect", want, talon_node_budget=BUDGET, **options)
    return want.tolist(), sequences(got)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_ends_before_the_change_is_plain_generates(kind: str) -> None:
    want, got = texts(kind, PROMPT, furthest(kind))
    assert got == want


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_may_cross_the_change_is_refused_before_any_token(kind: str) -> None:
    model = build(kind)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(
        ValueError, match=rf"across \d+ tokens.*`max_length` is {furthest(kind) + 1}.*`max_new_tokens`"
    ):
        talon(model, PROMPT, random_head(model), max_length=furthest(kind) + 1, talon_node_budget=BUDGET)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "temperature"])
def test_across_the_change_the_text_would_be_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "refuse_crossing", lambda *_: None)
    want, got = texts(kind, PROMPT, LIMIT + 12)
    assert got != want


@pytest.mark.parametrize("kind", ["longrope", "phi3"])
def test_a_prompt_behind_the_last_change_is_served(kind: str) -> None:
    ids = torch.cat([PROMPT, PROMPT, PROMPT], dim=1)
    want, got = texts(kind, ids, ids.shape[1] + 20)
    assert got == want


def test_rows_on_both_sides_of_the_change_are_refused() -> None:
    model = build("longrope")
    ids = torch.cat([PROMPT, PROMPT, PROMPT], dim=1).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    with pytest.raises(ValueError, match=f"across {LIMIT} tokens"):
        talon(model, ids, random_head(model), attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize("kind", ["longrope", "phi3"])
def test_a_turn_that_crossed_the_change_is_read_anew(kind: str) -> None:
    model = build(kind)
    head = random_head(model)
    first = talon(model, PROMPT, head, max_length=LIMIT, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, PROMPT[:, :8]], dim=1)
    want = plain(build(kind), longer, max_new_tokens=8)
    assert (
        sequences(talon(model, longer, head, past_key_values=first.past_key_values, max_new_tokens=8)) == want.tolist()
    )


def test_a_model_without_a_change_has_none() -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**COMMON))
    assert changes(model.config) == []
    assert are_read_alike(model.config, 5, 5000)


def test_the_same_side_of_a_change_is_read_alike() -> None:
    config = build("longrope").config
    assert are_read_alike(config, 5, LIMIT)
    assert are_read_alike(config, LIMIT + 1, LIMIT + 50)
    assert not are_read_alike(config, LIMIT, LIMIT + 1)
