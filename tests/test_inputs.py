"""What plain `generate` hands to every forward reaches every tree forward too, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from calls import BATCH, BATCH_MASK, PROMPT, plain, sequences, shapes_of_forwards, talon
from models import IMAGE_PROMPT, VOCABULARY, image, image_model, random_head, tiny_model
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

from talon_hf.compat import cache_output_field

pytestmark = pytest.mark.conformance

VERSION = Version(transformers.__version__)
NEW = 12
UNCHECKED = {"talon_check": False}


class Shifted(LlamaForCausalLM):
    """Adds the caller's vectors to the logits, at every step."""

    own: Any = None

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        shift: Any = None,
        adapter_names: Any = None,
        **kwargs: Any,
    ) -> Any:
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        if isinstance(shift, dict):
            shift = shift["shift"]
        if isinstance(shift, list):
            shift = torch.stack(shift)
        if adapter_names is not None:
            shift = torch.stack([rows_of_shift(3)[int(name)] for name in adapter_names])
        if shift is not None:
            out.logits = out.logits + shift[:, None]
        return out


class Prepared(Shifted):
    """Prepares the vector itself, the same at every step."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs) | {"shift": self.own}


class ByLength(Shifted):
    """Changes the vector behind so many tokens."""

    own = 9

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        shift = rows_of_shift(2)[int(input_ids.shape[1] > self.own)][None]
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs) | {"shift": shift}


class ByToken(Shifted):
    """Makes the vector of the last token."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        shift = rows_of_shift(VOCABULARY)[input_ids[:, -1]]
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs) | {"shift": shift}


class Updated(Shifted):
    """Changes the vector with each output, or nothing."""

    own = 1.0

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        return model_kwargs | {"shift": model_kwargs["shift"] * self.own}


class LastOf(Shifted):
    """Adds the caller's last numbers to the logits of the tokens that it reads."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, shift: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        out.logits = out.logits + shift[:, -input_ids.shape[1] :, None]
        return out


def rows_of_shift(rows: int) -> Tensor:
    return 8 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def shifted(kind: type[Shifted] = Shifted, **changes: Any) -> Any:
    base = tiny_model("llama", **{"eos_token_id": None, **changes})
    model = kind(base.config).double().eval()
    model.load_state_dict(base.state_dict())
    return model


def same(model: PreTrainedModel, ids: Tensor, budgets: tuple[int, ...] = (4, 20), **options: Any) -> list[list[int]]:
    """The one text that plain `generate`, and TALON with bad and good drafters and several budgets, give."""
    want = plain(model, ids, **{"max_new_tokens": NEW, **options})
    for budget in budgets:
        for drafter in ("good", "adversarial", random_head(model, seed=3)):
            more = {"max_new_tokens": NEW, "talon_node_budget": budget, **options, **UNCHECKED}
            assert sequences(talon(model, ids, drafter, want, **more)) == sequences(want)
    return sequences(want)


def refusal(model: PreTrainedModel, ids: Tensor, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        talon(model, ids, random_head(model), **{"max_new_tokens": NEW, **options, **UNCHECKED})
    return str(caught.value)


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 20, "temperature": 2.0}])
def test_an_argument_of_the_models_own_reaches_every_forward(sampled: dict[str, Any]) -> None:
    model = shifted()
    text = same(model, PROMPT, shift=rows_of_shift(1), **sampled)
    assert text != sequences(plain(model, PROMPT, max_new_tokens=NEW, **sampled))


def test_what_an_override_prepares_reaches_every_forward() -> None:
    model = shifted(Prepared)
    model.own = rows_of_shift(1)
    assert same(model, PROMPT) == same(shifted(), PROMPT, budgets=(4,), shift=model.own)


def test_an_arguments_rows_leave_with_the_rows_of_the_batch() -> None:
    model = shifted(eos_token_id=[*range(2, 12)])
    text = same(model, BATCH, attention_mask=BATCH_MASK, shift=rows_of_shift(3), max_new_tokens=20)
    assert len({sum(token != 0 for token in row[6:]) for row in text}) > 1, "no row leaves before another"


def test_one_row_of_an_argument_serves_a_batch() -> None:
    same(shifted(eos_token_id=[*range(2, 12)]), BATCH, attention_mask=BATCH_MASK, shift=rows_of_shift(1))


def test_return_sequences_repeat_an_argument_as_in_plain_generate() -> None:
    model = shifted(eos_token_id=[*range(2, 12)])
    # The one most probable token, so the order of the draws tells nothing.
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "attention_mask": BATCH_MASK}
    want = plain(model, BATCH, max_new_tokens=NEW, shift=rows_of_shift(3), **options)
    out = talon(model, BATCH, random_head(model), max_new_tokens=NEW, shift=rows_of_shift(3), **options, **UNCHECKED)
    assert sequences(out) == want.tolist()


def test_adapter_names_follow_their_rows() -> None:
    model = shifted(eos_token_id=[*range(2, 12)])
    same(model, BATCH, attention_mask=BATCH_MASK, adapter_names=["2", "0", "1"], max_new_tokens=20)


@pytest.mark.parametrize("form", ["list", "dict"])
def test_rows_in_a_form_that_nobody_knows_are_refused_in_a_batch(form: str) -> None:
    model, shift = shifted(), rows_of_shift(3)
    value = {"list": list(shift), "dict": {"shift": shift}}[form]
    message = refusal(model, BATCH, attention_mask=BATCH_MASK, shift=value)
    assert f"`shift` (a {form}) may hold an entry for each of the 3 rows" in message
    same(model, PROMPT, shift={"list": [shift[0]], "dict": {"shift": shift[:1]}}[form], budgets=(4,))


def test_an_entry_for_each_token_of_the_prompt_is_refused() -> None:
    message = refusal(shifted(LastOf), PROMPT, shift=torch.zeros(1, PROMPT.shape[1]))
    assert "`shift` has the shape (1, 7), an entry for each of the prompt's 7 tokens" in message


@pytest.mark.parametrize("kind", [ByLength, ByToken])
def test_what_an_override_changes_from_step_to_step_is_refused(kind: type[Shifted]) -> None:
    message = refusal(shifted(kind), PROMPT)
    assert f"`shift`, which {kind.__name__}'s `prepare_inputs_for_generation` sets, changes" in message


def test_what_an_override_updates_is_refused_if_it_changes() -> None:
    model = shifted(Updated)
    same(model, PROMPT, shift=rows_of_shift(1), budgets=(4,))
    model.own = 0.5
    message = refusal(model, PROMPT, shift=rows_of_shift(1))
    assert "`shift`, which Updated's `_update_model_kwargs_for_generation` sets, changes" in message


def test_hooks_that_hand_out_adapters_by_row_follow_the_rows() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("llama", eos_token_id=[*range(2, 12)], dtype=torch.float32)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config, adapter_name="one")
    model.add_adapter("two", config)
    model.eval()
    options = {"adapter_names": ["one", "two", "__base__"], "max_new_tokens": 20}
    want = plain(model, BATCH, attention_mask=BATCH_MASK, **options)
    assert len({sum(token != 0 for token in row[6:]) for row in want.tolist()}) > 1, "no row leaves before another"
    for seed in (3, 4):
        out = model.generate(
            input_ids=BATCH, attention_mask=BATCH_MASK, do_sample=False, custom_generate=".", trust_remote_code=True,
            assistant_model=random_head(base, seed=seed), talon_node_budget=8, **options, **UNCHECKED,
        )  # fmt: skip
        assert out.tolist() == want.tolist()


# A prompt in chunks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_a_prompt_read_in_chunks_gives_the_same_text_and_the_same_drafts(family: str, chunk: int) -> None:
    model = tiny_model(family, eos_token_id=None)
    want = plain(model, PROMPT, max_new_tokens=NEW)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "talon_node_budget": 8}
    whole = talon(model, PROMPT, random_head(model, seed=3), **options)
    out = talon(model, PROMPT, random_head(model, seed=3), prefill_chunk_size=chunk, **options)
    assert sequences(out) == sequences(want) == sequences(whole)
    if Version("5.0.0") != VERSION:  # whose own chunks find no cache
        assert sequences(plain(model, PROMPT, max_new_tokens=NEW, prefill_chunk_size=chunk)) == sequences(want)
    assert out.talon_stats.accepted_by_depth == whole.talon_stats.accepted_by_depth
    assert out.talon_stats.rounds == whole.talon_stats.rounds


def test_the_prompts_forwards_are_no_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", eos_token_id=None)
    head, shapes = random_head(model), shapes_of_forwards(model, monkeypatch)
    talon(model, PROMPT, head, max_new_tokens=2, prefill_chunk_size=3, **UNCHECKED)
    assert shapes[:3] == [(1, 3), (1, 3), (1, 1)]


def test_a_padded_batch_and_a_later_turn_are_read_in_chunks() -> None:
    model = tiny_model("llama", eos_token_id=None)
    options = {"max_new_tokens": NEW, "prefill_chunk_size": 2}
    if Version("5") > VERSION:
        with pytest.raises(ValueError, match=r"prefill_chunk_size.*padding"):
            talon(model, BATCH, random_head(model), attention_mask=BATCH_MASK, **options)
    else:
        want = plain(model, BATCH, attention_mask=BATCH_MASK, max_new_tokens=NEW)
        out = talon(model, BATCH, random_head(model), attention_mask=BATCH_MASK, **options)
        assert sequences(out) == sequences(want)
    head = random_head(model)
    first = talon(model, PROMPT, head, return_dict_in_generate=True, **options)
    ids = torch.cat([first.sequences, PROMPT], dim=1)
    again = talon(model, ids, head, **{cache_output_field(): first[cache_output_field()]}, **options)
    assert sequences(again) == sequences(plain(model, ids, max_new_tokens=NEW))


@pytest.mark.parametrize("chunk", [0, -2, 2.5, "4"])
def test_a_chunk_that_is_no_size_raises_as_in_plain_generate(chunk: Any) -> None:
    model = tiny_model("llama", eos_token_id=None)
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        plain(model, PROMPT, max_new_tokens=2, prefill_chunk_size=chunk)
    with pytest.raises((RuntimeError, TypeError), match=r"`prefill_chunk_size` must be.*got") as ours:
        talon(model, PROMPT, random_head(model), max_new_tokens=2, prefill_chunk_size=chunk)
    assert ours.type is theirs.type


@pytest.mark.skipif(Version("5") > VERSION, reason="the config differs")
def test_an_image_is_not_split_into_chunks() -> None:
    model = image_model()
    with pytest.raises(ValueError, match=r"cannot split the raw multimodal inputs \['(pixel_values|mm_enc)"):
        talon(model, IMAGE_PROMPT, random_head(model), max_new_tokens=2, pixel_values=image(1), prefill_chunk_size=4)


# Names of caches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window"])
def test_a_cache_is_taken_by_name_where_this_version_of_plain_generate_takes_it(name: str) -> None:
    model = tiny_model("llama", eos_token_id=None)
    try:
        want = plain(model, PROMPT, max_new_tokens=NEW, cache_implementation=name)
    except ValueError:
        with pytest.raises(ValueError, match=f"cache_implementation.*{name}"):
            talon(model, PROMPT, random_head(model), max_new_tokens=NEW, cache_implementation=name)
        return
    out = talon(model, PROMPT, random_head(model), max_new_tokens=NEW, cache_implementation=name)
    assert out.tolist() == want.tolist()
    assert GenerationConfig(cache_implementation=name).cache_implementation == name
