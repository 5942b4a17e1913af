"""A model that no test covers is tried on a small tree once, before it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import BATCH, BATCH_MASK, PROMPT, plain, sequences, talon
from models import IMAGE_PROMPT, image, image_model, random_head, tiny_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from talon_hf.probe import CHECKED, foreign_parts

NEW = 8


class OwnMask(LlamaForCausalLM):
    """Makes a causal mask of its own, whatever it is given."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kw: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=None, position_ids=position_ids, **kw)


class Wrapped(LlamaForCausalLM):
    """Somebody's subclass that changes nothing."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kw: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kw)


class DynamicInt8(nn.Linear):
    """Rounds what it reads to int8, with one scale for all tokens that are read together."""

    def forward(self, states: Tensor) -> Tensor:
        scale = states.abs().max() / 127
        return super().forward((states / scale).round().clamp(-128, 127) * scale)


def in_class(kind: Any, dtype: torch.dtype = torch.float64) -> Any:
    base = tiny_model("llama", eos_token_id=None, dtype=dtype)
    model = kind(base.config).to(dtype).eval()
    model.load_state_dict(base.state_dict())
    return model


def own_mask() -> PreTrainedModel:
    return in_class(OwnMask)


def last_position() -> PreTrainedModel:
    model = tiny_model("llama", eos_token_id=None)

    def steer(module: nn.Module, args: Any, states: Tensor) -> Tensor:
        states = states.clone()
        states[:, -1] += 1.0
        return states

    model.model.layers[3].mlp.register_forward_hook(steer)
    return model


def dynamic_int8() -> PreTrainedModel:
    model = tiny_model("llama", eos_token_id=None, dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = DynamicInt8
    return model


def forwards_of(model: PreTrainedModel) -> list[int]:
    """A list that every forward of the model from now on adds its tokens to."""
    seen: list[int] = []

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    return seen


@pytest.mark.conformance
@pytest.mark.parametrize("make", [own_mask, last_position, dynamic_int8])
@pytest.mark.parametrize("ids", [PROMPT, BATCH])
def test_a_model_whose_trees_would_be_wrong_is_refused_with_what_was_measured(make: Any, ids: Tensor) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"logits differ from plain decoding's by [0-9.e-]+.*talon_check=False"):
        talon(model, ids, random_head(model), max_new_tokens=NEW)
    assert model not in CHECKED
    assert talon(model, ids, random_head(model), max_new_tokens=NEW, talon_check=False).shape[0] == len(ids)


@pytest.mark.conformance
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_good_model_of_somebodys_own_passes_and_is_tried_once(dtype: torch.dtype) -> None:
    model = in_class(Wrapped, dtype)
    seen = forwards_of(model)
    head = random_head(model).to(dtype)
    out = talon(model, PROMPT, head, max_new_tokens=1, return_dict_in_generate=True)
    assert seen == [6, 5, 1, 1, PROMPT.shape[1]]
    assert out.talon_stats.seconds["check"] > 0
    del seen[:]
    talon(model, PROMPT, head, max_new_tokens=1)
    assert seen == [PROMPT.shape[1]]


@pytest.mark.parametrize("change", ["hook", "dtype", "attention"])
def test_it_is_tried_again_when_it_has_changed(change: str) -> None:
    model = in_class(Wrapped)
    seen = forwards_of(model)
    talon(model, PROMPT, random_head(model), max_new_tokens=1)
    if change == "hook":
        model.model.norm.register_forward_hook(lambda *_: None)
    elif change == "dtype":
        model.float()
    else:
        model.set_attn_implementation("eager")
    del seen[:]
    talon(model, PROMPT, random_head(model), max_new_tokens=1)
    assert len(seen) == 5


def test_transformers_own_model_is_not_tried() -> None:
    model = tiny_model("llama", eos_token_id=None)
    talon(model, PROMPT, random_head(model), max_new_tokens=1)
    assert model not in CHECKED


def test_the_random_state_and_the_model_stay_as_they_were() -> None:
    model = in_class(Wrapped)
    torch.manual_seed(3)

    def noise(module: nn.Module, args: Any, output: Any) -> None:
        torch.rand(1)

    model.model.norm.register_forward_hook(noise)
    options = {"max_new_tokens": 1, "do_sample": True, "top_k": 0}
    states = []
    for check in (True, False):
        talon(model, PROMPT, random_head(model), talon_check=check, **options)
        states.append(torch.get_rng_state())
    assert states[0].equal(states[1])
    assert sorted(vars(model)) == sorted(vars(in_class(Wrapped)))


def test_the_outcome_goes_with_the_model() -> None:
    model = in_class(Wrapped)
    before = len(CHECKED)
    talon(model, PROMPT, random_head(model), max_new_tokens=1)
    assert len(CHECKED) == before + 1
    del model
    assert len(CHECKED) == before


def test_a_batch_of_a_model_of_somebodys_own_gives_plain_generates_text() -> None:
    model = in_class(Wrapped)
    want = plain(model, BATCH, attention_mask=BATCH_MASK, max_new_tokens=NEW)
    got = talon(model, BATCH, random_head(model), attention_mask=BATCH_MASK, max_new_tokens=NEW)
    assert sequences(got) == want.tolist()


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_the_option_is_true_or_false(value: Any) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="`talon_check` must be True or False"):
        talon(model, PROMPT, random_head(model), max_new_tokens=1, talon_check=value)


@pytest.mark.conformance
def test_somebodys_image_model_is_tried_without_the_image_of_the_prompt() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    model = image_model()
    model.__class__ = type("Own", (type(model),), {"__module__": "somebody"})
    options = {"pixel_values": image(1), "max_new_tokens": NEW, "do_sample": False}
    want = model.generate(IMAGE_PROMPT, attention_mask=torch.ones_like(IMAGE_PROMPT), **options)
    assert sequences(talon(model, IMAGE_PROMPT, random_head(model), **options)) == want.tolist()
    assert model in CHECKED


def test_a_forward_that_was_put_back_is_no_replacement() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[2]
    layer.forward = layer.forward
    assert foreign_parts(model) == []
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    assert [part[0] for part in foreign_parts(model)][:1] == ["a replaced `forward`"]
