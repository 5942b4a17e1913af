"""Calls at the edge of what `generate` takes: plain's text where there is one, else plain's type of error and why."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from calls import BATCH, NEW, PROMPT, plain, sequences, talon
from models import random_head, tiny_model
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from talon_hf import EagleDraft, generate

pytestmark = pytest.mark.conformance

# What the call is given -> words of the reason.
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"inputs": PROMPT[:, :0]}, "there is no token to go on from"),
    "no token in two rows": ({"input_ids": BATCH[:2, :0]}, "there is no token to go on from"),
    "no row": ({"inputs": PROMPT[:0]}, "there is no prompt to go on from"),
    "no row, no token": ({"inputs": PROMPT[:0, :0]}, "there is no prompt to go on from"),
    "one dimension": ({"inputs": PROMPT[0]}, "the shape .*unsqueeze"),
    "no dimension": ({"inputs": PROMPT[0, 0]}, "the shape .*unsqueeze"),
    "three dimensions": ({"inputs": PROMPT[None]}, "the shape .*unsqueeze"),
    "float64": ({"inputs": PROMPT.double()}, "holds torch.float64, where token ids are"),
    "float16": ({"input_ids": PROMPT.half()}, "holds torch.float16, where token ids are"),
    "bool": ({"inputs": PROMPT > 9}, "holds torch.bool, where token ids are"),
    "uint8": ({"inputs": PROMPT.to(torch.uint8)}, "holds torch.uint8, where token ids are"),
    "a list": ({"inputs": PROMPT.tolist()}, "is a list, not a tensor"),
    "a text": ({"inputs": "a text"}, "is a str, not a tensor"),
    "a dict of a tokenizer": ({"inputs": {"input_ids": PROMPT}}, "is a dict, not a tensor"),
    "a dict as config": ({"inputs": PROMPT, "generation_config": {"do_sample": False}}, "is a dict: pass a `Gener"),
    "an empty dict as config": ({"inputs": PROMPT, "generation_config": {}}, "is a dict: pass a `GenerationConfig`"),
}


class Third:
    """A processor that wants more than it gets."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, more: Any = None) -> torch.Tensor:
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def head(model: Any) -> EagleDraft:
    return random_head(model, seed=3)


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_plain_generate_cannot_read_is_its_error_with_a_reason(model: Any, head: EagleDraft, case: str) -> None:
    options, reason = UNREADABLE[case]
    options = {"do_sample": False, "max_new_tokens": 4, **options}
    with pytest.raises(Exception, match=r".") as theirs:
        model.generate(**options)
    with pytest.raises(theirs.type, match=reason) as ours:
        generate(model=model, assistant_model=head, **options)
    assert ours.type is theirs.type


def test_a_processor_of_three_parameters_is_plain_generates_error_with_a_reason(model: Any, head: EagleDraft) -> None:
    options: dict[str, Any] = {"logits_processor": [Third()], "max_new_tokens": 4}
    with pytest.raises(ValueError, match="required parameters"):
        plain(model, PROMPT, **options)
    with pytest.raises(ValueError, match=r"Third takes \['input_ids', 'scores', 'more'\]"):
        talon(model, PROMPT, head, **options)


def test_int32_ids_and_a_processor_that_is_a_function_are_served(model: Any, head: EagleDraft) -> None:
    options: dict[str, Any] = {"logits_processor": [lambda _, scores: scores.clone()], "max_new_tokens": NEW}
    options["generation_config"] = GenerationConfig(eos_token_id=None)
    want = sequences(plain(model, PROMPT.int(), **options))
    assert sequences(talon(model, PROMPT.int(), head, **options)) == want


def gpt2() -> Any:
    """A model of learned positions, where it matters which ones a hidden prompt's text goes on with."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=8, n_head=4, n_positions=128, initializer_range=0.3, eos_token_id=None
    )
    return GPT2LMHeadModel(config).double().eval()


@pytest.mark.parametrize("name", ["random", "good"])
@pytest.mark.parametrize("family", ["llama", "mistral", pytest.param("gemma3", marks=pytest.mark.slow), "gpt2"])
def test_a_row_that_its_mask_hides_as_a_whole_is_plain_generates(family: str, name: str) -> None:
    model = gpt2() if family == "gpt2" else tiny_model(family, eos_token_id=None)
    for ids, hidden in ((PROMPT, [0]), (BATCH, [1]), (BATCH, [0, 1, 2])):
        mask = torch.ones_like(ids)
        mask[hidden] = 0
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0}
        want = plain(model, ids, **options)
        assert sequences(talon(model, ids, name, want, **options)) == want.tolist()


# The callable form ---------------------------------------------------------------------------------------------------


def test_the_callable_form_is_told_which_forms_work(model: Any, head: EagleDraft) -> None:
    """It loses the drafter inside transformers, so it cannot be served."""
    for options in ({}, {"assistant_model": head}, {"input_ids": PROMPT}):
        inputs = () if "input_ids" in options else (PROMPT,)
        with pytest.raises(
            ValueError, match=r'custom_generate="org/talon".*talon_hf\.generate\(input_ids, model=model'
        ):
            model.generate(*inputs, custom_generate=generate, max_new_tokens=4, **options)


@pytest.mark.parametrize("call", [(), (PROMPT,), ("model",), ("model", PROMPT)])
def test_a_call_by_position_is_told_the_same(model: Any, head: EagleDraft, call: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"talon_hf\.generate\(input_ids, model=model"):
        generate(*[model if part == "model" else part for part in call], assistant_model=head)


def test_a_callable_that_binds_the_drafter_itself_works_by_name(model: Any, head: EagleDraft) -> None:
    ours = partial(generate, model=model, assistant_model=head)
    assert sequences(ours(PROMPT, max_new_tokens=NEW)) == sequences(plain(model, PROMPT, max_new_tokens=NEW))
