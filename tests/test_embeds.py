"""Prompts given as embeddings: the text is plain `generate`'s, with every drafter; the sequences are plain's too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from calls import BATCH, BATCH_MASK, PROMPT, Recorder, sequences, talon
from models import ScriptedDrafter, drafter_zoo, peaked, random_head, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from talon_hf import generate
from talon_hf.compat import cache_output_field

pytestmark = pytest.mark.conformance

NEW = 12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


def embedded(model: PreTrainedModel, ids: Tensor, seed: int = 1) -> Tensor:
    """(B, m, h) embeddings that are no token's."""
    table = model.get_input_embeddings()(ids)
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(seed), dtype=table.dtype)
    return (table + 0.3 * noise).detach()


def ours(model: PreTrainedModel, drafter: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    return generate(model=model, assistant_model=drafter, **{"do_sample": False, "max_new_tokens": NEW, **options})


def theirs(model: PreTrainedModel, **options: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**{"do_sample": False, "max_new_tokens": NEW, **options})


def same(model: PreTrainedModel, budgets: tuple[int, ...] = (8,), **options: Any) -> list[list[int]]:
    """The one text that plain `generate`, and TALON with bad and good drafters and several budgets, give."""
    want = sequences(theirs(model, **options))
    owning = random_head(model, seed=6)
    owning.embed_tokens = torch.nn.Embedding(50, 32)
    zoo = drafter_zoo(want, model)
    for budget in budgets:
        for drafter in (zoo["perfect"], zoo["adversarial"], random_head(model, seed=3), owning):
            assert sequences(ours(model, drafter, talon_node_budget=budget, **options)) == want
    return want


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_embeddings_alone_give_new_tokens_only(family: str) -> None:
    model = tiny_model(family, eos_token_id=None)
    text = same(model, inputs_embeds=embedded(model, PROMPT))
    assert len(text[0]) == NEW


def test_embeddings_beside_tokens_are_what_the_model_reads(model: PreTrainedModel) -> None:
    text = same(model, input_ids=PROMPT, inputs_embeds=embedded(model, PROMPT))
    assert text[0][: PROMPT.shape[1]] == PROMPT[0].tolist()
    assert text != sequences(theirs(model, input_ids=PROMPT))


def test_a_few_tokens_may_stand_beside_more_embeddings(model: PreTrainedModel) -> None:
    same(model, input_ids=PROMPT[:, :3], inputs_embeds=embedded(model, PROMPT), attention_mask=torch.ones_like(PROMPT))


@pytest.mark.parametrize("with_ids", [False, True])
def test_sampling_and_processors_see_what_plain_generate_shows_them(model: PreTrainedModel, with_ids: bool) -> None:
    ids = {"input_ids": PROMPT} if with_ids else {}
    given = {"inputs_embeds": embedded(model, PROMPT), "attention_mask": torch.ones_like(PROMPT), **ids}
    same(model, do_sample=True, temperature=1.5, top_k=20, **given)
    same(model, no_repeat_ngram_size=2, repetition_penalty=1.3 if with_ids else 1.0, **given)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("limits", [{"max_length": 20}, {"min_length": 15, "max_length": 24}, {"min_new_tokens": 9}])
def test_lengths_mean_what_they_mean_in_plain_generate(with_ids: bool, limits: dict[str, int]) -> None:
    model = tiny_model("llama", eos_token_id=[*range(2, 25)])
    limits = {"max_new_tokens": None, **limits} if "max_length" in limits else limits
    ids = {"input_ids": PROMPT} if with_ids else {}
    same(model, inputs_embeds=embedded(model, PROMPT), **ids, **limits)


@pytest.mark.parametrize("with_ids", [False, True])
def test_left_padded_batches(with_ids: bool) -> None:
    model = tiny_model("llama", eos_token_id=[*range(2, 8)])
    ids = {"input_ids": BATCH} if with_ids else {}
    options = {"inputs_embeds": embedded(model, BATCH), "attention_mask": BATCH_MASK, **ids}
    same(model, **options)
    # The one most probable token, so the order of the draws tells nothing.
    options |= {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    want = sequences(theirs(model, **options))
    assert sequences(ours(model, random_head(model), **options)) == want


def test_streamers_scores_and_logits(model: PreTrainedModel) -> None:
    options: dict[str, Any] = {"inputs_embeds": embedded(model, PROMPT), "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    told, want = Recorder(), Recorder()
    out = ours(model, random_head(model), streamer=told, **options)
    plainly = theirs(model, streamer=want, **options)
    assert (told.puts, told.ends) == (want.puts, want.ends)
    for name in ("scores", "logits"):
        assert torch.allclose(torch.stack(out[name]), torch.stack(plainly[name]), atol=1e-5)


def test_a_drafter_of_tokens_alone_begins_at_the_first_generated_token(model: PreTrainedModel) -> None:
    texts = []

    def guess(row: int, text: list[int]) -> Tensor:
        texts.append(text)
        return peaked(3)

    out = ours(model, ScriptedDrafter(guess), inputs_embeds=embedded(model, PROMPT), talon_policy="chain")
    assert texts[0] == out[0, :1].tolist()


def test_a_head_reads_the_embeddings(model: PreTrainedModel) -> None:
    """Embeddings that are the tokens' own give the drafts of the tokens; a head with its own has no use for them."""
    options = {"return_dict_in_generate": True, "talon_node_budget": 8}
    table = model.get_input_embeddings()(PROMPT)
    by_tokens = talon(model, PROMPT, random_head(model, seed=3), max_new_tokens=NEW, **options)
    alone = ours(model, random_head(model, seed=3), inputs_embeds=table, **options)
    assert sequences(alone)[0] == sequences(by_tokens)[0][PROMPT.shape[1] :]
    assert alone.talon_stats.accepted_by_depth == by_tokens.talon_stats.accepted_by_depth


@pytest.mark.parametrize("again", ["same head", "another head"])
def test_a_later_turn_goes_on_or_says_that_it_lacks_the_embeddings(model: PreTrainedModel, again: str) -> None:
    head, options = random_head(model, seed=3), {"return_dict_in_generate": True}
    given = {"input_ids": PROMPT, "inputs_embeds": embedded(model, PROMPT)}
    out, plainly = ours(model, head, **given, **options), theirs(model, **given, **options)
    field = cache_output_field()
    ids = torch.cat([out.sequences, PROMPT], dim=1)
    # Token 0 is padding, which `generate` hides where no mask is given.
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if again == "same head":
        want = theirs(model, **whole, **{field: plainly[field]})
        assert sequences(ours(model, head, **whole, **{field: out[field]})) == want.tolist()
    else:
        with pytest.raises(ValueError, match="`inputs_embeds` that this call was not given"):
            ours(model, random_head(model, seed=4), **whole, **{field: out[field]})


def test_a_later_turn_of_embeddings_reads_them_all(model: PreTrainedModel) -> None:
    head, options = random_head(model, seed=3), {"return_dict_in_generate": True}
    first = embedded(model, PROMPT)
    out, plainly = ours(model, head, inputs_embeds=first, **options), theirs(model, inputs_embeds=first, **options)
    field = cache_output_field()
    longer = torch.cat([first, model.get_input_embeddings()(torch.cat([out.sequences, PROMPT], dim=1))], dim=1)
    want = theirs(model, inputs_embeds=longer, **{field: plainly[field]})
    assert sequences(ours(model, head, inputs_embeds=longer, **{field: out[field]})) == want.tolist()


def test_a_mask_of_another_length_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(
        ValueError, match=r"`attention_mask` (has|of) the shape \(1, (3\), `inputs_embeds` \(1, 7\)|7\))"
    ):
        ours(model, random_head(model), inputs_embeds=embedded(model, PROMPT), attention_mask=torch.ones(1, 3))


def test_a_model_that_takes_no_embeddings_says_so_as_in_plain_generate(model: PreTrainedModel) -> None:
    class NoEmbeddings(transformers.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    other = NoEmbeddings(model.config).double().eval()
    for call in (lambda **o: theirs(other, **o), lambda **o: ours(other, random_head(other), **o)):
        with pytest.raises(ValueError, match="doesn't have its forwarding implemented"):
            call(inputs_embeds=embedded(model, PROMPT))
