"""What a call may say of its prompt beside the ids: served as plain `generate` does, or refused before any token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from calls import BATCH, BATCH_MASK, PROMPT, plain, sequences, talon
from models import IMAGE_PROMPT, image, image_model, random_head, tiny_model
from packaging.version import Version
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from talon_hf import EagleDraft
from talon_hf.compat import cache_keyword, cache_output_field

pytestmark = pytest.mark.conformance

NEW = 12
HIDDEN = torch.tensor([[1, 1, 0, 0, 1, 1, 1]])
VERSION = Version(transformers.__version__)
# In older versions given positions do not go on behind the prompt.
positions_go_on = pytest.mark.skipif(Version("5.17") > VERSION, reason="plain generate's own text is of no use")
is_5 = pytest.mark.skipif(Version("5") > VERSION, reason="the config differs")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def head(model: PreTrainedModel) -> EagleDraft:
    return random_head(model, seed=3)


def same(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> None:
    """Plain `generate` and TALON with a random head and a good drafter give one text."""
    options = {"max_new_tokens": NEW, **options}
    want = plain(model, ids, **options)
    assert sequences(talon(model, ids, random_head(model, seed=3), **options)) == want.tolist()
    assert sequences(talon(model, ids, "good", want, **options)) == want.tolist()


def test_token_types_go_on_with_the_prompts_last() -> None:
    sizes = {"n_embd": 32, "n_layer": 8, "n_head": 4, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    gpt2 = AutoModelForCausalLM.from_config(transformers.GPT2Config(vocab_size=50, **sizes)).eval()
    for parameter in gpt2.parameters():
        parameter.data.normal_(0.0, 0.3)
    same(gpt2, BATCH, attention_mask=BATCH_MASK, token_type_ids=torch.tensor([[3, 3, 3, 3, 9, 9]]).repeat(3, 1))
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    typed, untyped = plain(gpt2, PROMPT, token_type_ids=PROMPT, **options), plain(gpt2, PROMPT, **options)
    assert not torch.allclose(typed.logits[1], untyped.logits[1])


def test_tokens_inside_the_prompt_may_be_hidden(model: PreTrainedModel) -> None:
    same(model, PROMPT, attention_mask=HIDDEN)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_windows_count_hidden_tokens_so_there_they_are_refused(family: str) -> None:
    windowed = tiny_model(family)
    windowed.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    padding_inside = torch.tensor([[7, 0, 3, 42, 5, 9, 23]])
    for ids, options in ((PROMPT, {"attention_mask": HIDDEN}), (padding_inside, {"attention_mask": None})):
        with pytest.raises(ValueError, match=r"hides a token inside the prompt.*Leave such tokens out"):
            talon(windowed, ids, random_head(windowed), max_new_tokens=4, **options)


@pytest.mark.parametrize("filled_by", ["talon", "a forward"])
def test_new_tokens_without_the_text_of_a_cache_are_refused(
    model: PreTrainedModel, head: EagleDraft, filled_by: str
) -> None:
    if filled_by == "talon":
        out = talon(model, PROMPT, head, max_new_tokens=4, return_dict_in_generate=True)
        cache, past = out[cache_output_field()], PROMPT.shape[1] + 3
    else:
        cache, past = DynamicCache(), 4
        model(input_ids=PROMPT[:, :past], **{cache_keyword(model): cache})
    new = torch.tensor([[5, 9, 23]])
    options = {"attention_mask": torch.ones(1, past + 3).long(), cache_output_field(): cache}
    with pytest.raises(ValueError, match="pass the whole text"):
        talon(model, new, head, max_new_tokens=4, **options)


def test_a_mask_of_another_shape_is_refused(model: PreTrainedModel, head: EagleDraft) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"`attention_mask` has the shape \(1, 9\), `input_ids` \(1, 7\)"):
        talon(model, PROMPT, head, max_new_tokens=4, attention_mask=mask)


@positions_go_on
def test_one_row_of_positions_serves_a_batch_whose_rows_leave(model: PreTrainedModel) -> None:
    ids = torch.tensor([[7, 11, 3, 42], [9, 23, 5, 17], [30, 2, 19, 4]])
    ends = int(plain(model, ids, max_new_tokens=1)[0, -1])
    same(model, ids, eos_token_id=ends, pad_token_id=0, position_ids=torch.arange(4).unsqueeze(0))


def test_labels_and_other_integers_are_taken_as_by_plain_generate(model: PreTrainedModel, head: EagleDraft) -> None:
    want = plain(model, PROMPT, max_new_tokens=NEW)
    assert sequences(talon(model, PROMPT, head, max_new_tokens=NEW, labels=PROMPT)) == want.tolist()
    out = talon(model, PROMPT.int(), head, max_new_tokens=NEW)
    assert out.dtype == torch.int64
    assert out.equal(want)


@pytest.mark.parametrize("flag", [1, torch.tensor(True)])
def test_flags_may_be_anything_that_is_true(flag: Any, model: PreTrainedModel, head: EagleDraft) -> None:
    options = {"max_new_tokens": NEW, "do_sample": flag, "top_k": 0}
    want = plain(model, PROMPT, **options)
    assert want.tolist() != plain(model, PROMPT, max_new_tokens=NEW).tolist()
    assert sequences(talon(model, PROMPT, head, **options)) == want.tolist()
    out = talon(model, PROMPT, head, return_dict_in_generate=1, output_scores=1, output_logits=1, **options)
    assert len(out.scores) == len(out.logits) == NEW


@positions_go_on
@pytest.mark.parametrize("first", [None, 5])
@pytest.mark.parametrize("second", [None, 9])
def test_positions_of_turns_are_those_that_generate_prepares(
    model: PreTrainedModel, head: EagleDraft, first: int | None, second: int | None
) -> None:
    def two(call: Any) -> list[list[int]]:
        ids, cache = PROMPT, {}
        for start in (first, second):
            given = {} if start is None else {"position_ids": torch.arange(ids.shape[1]).unsqueeze(0) + start}
            out = call(ids, max_new_tokens=6, return_dict_in_generate=True, **given, **cache)
            ids = torch.cat([out.sequences, torch.tensor([[4, 5]])], dim=1)
            cache = {cache_output_field(): out[cache_output_field()]}
        return sequences(out)

    assert two(lambda ids, **o: talon(model, ids, head, **o)) == two(lambda ids, **o: plain(model, ids, **o))


def test_a_turn_may_leave_inference_mode(model: PreTrainedModel, head: EagleDraft) -> None:
    with torch.inference_mode():
        out = talon(model, PROMPT, head, max_new_tokens=6, return_dict_in_generate=True)
    ids = torch.cat([out.sequences, torch.tensor([[4, 5]])], dim=1)
    want = plain(model, ids, max_new_tokens=6)
    again = talon(model, ids, head, max_new_tokens=6, **{cache_output_field(): out[cache_output_field()]})
    assert sequences(again) == want.tolist()


def test_a_cache_and_a_cache_implementation_are_one_too_many(model: PreTrainedModel, head: EagleDraft) -> None:
    options = {"cache_implementation": "static", cache_output_field(): DynamicCache()}
    with pytest.raises(ValueError, match="Use only one of the two"):
        talon(model, PROMPT, head, max_new_tokens=4, **options)


@is_5
def test_a_second_turn_goes_on_with_an_image_or_says_that_it_has_none() -> None:
    model = image_model()
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "suppress_tokens": [49]}

    def two(call: Any, again: Any = None) -> list[list[int]]:
        out = call(IMAGE_PROMPT, pixel_values=image(1), **options)
        ids = torch.cat([out.sequences, torch.tensor([[4, 5]])], dim=1)
        return sequences((again or call)(ids, **{cache_output_field(): out[cache_output_field()]}, **options))

    def with_head(seed: int) -> Any:
        drafter = random_head(model, seed=seed)
        return lambda ids, **more: talon(model, ids, drafter, **more)

    first = with_head(3)
    assert two(first) == two(lambda ids, **more: plain(model, ids, **more))
    with pytest.raises(ValueError, match="images, videos or sounds that this call was not given"):
        two(first, with_head(4))
