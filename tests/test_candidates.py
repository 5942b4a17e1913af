"""TalonCandidateGenerator in transformers' own assisted decoding, which takes chains: plain `generate`'s text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from calls import NEW, PROMPT, plain, sequences
from heads import GuidedDrafter, whole_text_commit
from models import drafter_zoo, random_head, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from talon_hf import TalonCandidateGenerator, TalonConfig
from talon_hf.tree import DraftTree

pytestmark = pytest.mark.conformance


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


def assisted(
    model: PreTrainedModel, drafter: Any, config: TalonConfig | None = None, **options: Any
) -> tuple[Any, int]:
    """The stock assisted loop's text with our candidates, and how many forwards of the model it took."""
    length = PROMPT.shape[1] + NEW
    eos = options.get("eos_token_id")
    generator = TalonCandidateGenerator(drafter, model, config, max_length=length, eos_token_id=eos)
    model._get_candidate_generator = lambda **_: generator
    forwards: list[int] = []
    counter = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with generator.attached():
            # Prompt lookup selects assisted decoding; its own generator is the one that ours replaces.
            out = plain(model, PROMPT, prompt_lookup_num_tokens=4, max_new_tokens=NEW, **options)
    finally:
        counter.remove()
        del model._get_candidate_generator
    return out, len(forwards)


def guided(model: PreTrainedModel, name: str, whole: Tensor, check: Any = lambda *_: None) -> GuidedDrafter:
    return GuidedDrafter(random_head(model, seed=2).double(), drafter_zoo(whole.tolist(), model)[name], check)


@pytest.mark.parametrize("policy", ["talon", "eagle", "chain"])
@pytest.mark.parametrize("name", ["perfect", "good", "adversarial", "nan"])
def test_the_stock_loop_gives_plain_generates_text(name: str, policy: str, model: PreTrainedModel) -> None:
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    out, _ = assisted(model, guided(model, name, whole), TalonConfig(policy=policy))
    assert sequences(out) == whole.tolist()


@pytest.mark.parametrize("name", ["random", "small_vocabulary", "perfect"])
def test_heads_and_drafters_without_features_serve_it(name: str, model: PreTrainedModel) -> None:
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    out, forwards = assisted(model, drafter_zoo(whole.tolist(), model)[name])
    assert sequences(out) == whole.tolist()
    assert name != "perfect" or forwards <= 2


def test_a_better_drafter_takes_fewer_forwards(model: PreTrainedModel) -> None:
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    names = ("perfect", "good", "adversarial")
    forwards = {name: assisted(model, guided(model, name, whole))[1] for name in names}
    assert forwards["perfect"] == 2
    assert forwards["perfect"] < forwards["good"] < forwards["adversarial"] == NEW


def test_the_head_reads_the_features_of_every_committed_position(model: PreTrainedModel) -> None:
    """Its cache is that of one pass over the text, whatever candidates the loop forwarded and dropped meanwhile."""
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    lengths: list[int] = []

    def check(session: Any, script: Any, commit: Any, log_probs: Tensor) -> None:
        (text,) = script._texts
        fresh = guided.head.open(model, rows=1)
        want = fresh.begin(whole_text_commit(model, guided.head, text, int(commit.roots)))
        layer, alone = session._cache.layers[0], fresh._cache.layers[0]
        torch.testing.assert_close(layer.keys[:, :, : len(text)], alone.keys, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(layer.values[:, :, : len(text)], alone.values, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(log_probs, want, rtol=0.0, atol=1e-5)
        lengths.append(len(text))

    head = random_head(model, seed=2).double()
    guided = GuidedDrafter(head, drafter_zoo(whole.tolist(), model)["good"], check)
    out, _ = assisted(model, guided)
    assert sequences(out) == whole.tolist()
    assert lengths[0] == PROMPT.shape[1]
    assert max(b - a for a, b in itertools.pairwise(lengths)) > 1


def test_an_end_token_inside_a_chain_ends_the_text(model: PreTrainedModel) -> None:
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    new = whole[0, PROMPT.shape[1] :].tolist()
    firsts = sorted({new.index(token) for token in new})
    assert len(firsts) > 10
    for first in firsts:
        for name in ("perfect", "good"):
            out, _ = assisted(model, guided(model, name, whole), eos_token_id=new[first], pad_token_id=0)
            assert sequences(out) == whole[:, : PROMPT.shape[1] + first + 1].tolist()


def test_it_is_a_candidate_generator_that_leaves_no_hook_behind(model: PreTrainedModel) -> None:
    generator = TalonCandidateGenerator(random_head(model), model)
    assert isinstance(generator, CandidateGenerator)
    layers = model.model.layers
    with generator.attached():
        assert [len(layer._forward_pre_hooks) for layer in layers] == [0, 0, 1, 0, 1, 1, 0, 0]
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_before_the_prompts_forward_a_head_proposes_nothing(model: PreTrainedModel) -> None:
    generator = TalonCandidateGenerator(random_head(model), model)
    with generator.attached():
        ids, logits = generator.get_candidates(PROMPT)
        assert ids.tolist() == PROMPT.tolist()
        assert logits is None
        model(PROMPT)
        root = torch.cat([PROMPT, torch.tensor([[4]])], dim=1)
        ids, logits = generator.get_candidates(root)
        assert ids[:, : root.shape[1]].tolist() == root.tolist()
        assert ids.shape[1] > root.shape[1]
        assert logits is None


@pytest.mark.parametrize("left", [1, 2, 3, 9])
def test_no_candidate_leaves_less_than_the_bonus_tokens_room(left: int, model: PreTrainedModel) -> None:
    root = torch.cat([PROMPT, torch.tensor([[4]])], dim=1)
    generator = TalonCandidateGenerator(random_head(model), model, max_length=root.shape[1] + left)
    with generator.attached():
        model(PROMPT)
        ids, _ = generator.get_candidates(root)
    assert ids.shape[1] <= root.shape[1] + left - 1
    assert (ids.shape[1] > root.shape[1]) == (left > 1)


def test_a_round_leaves_no_tree_in_the_drafters_cache(model: PreTrainedModel) -> None:
    generator = TalonCandidateGenerator(random_head(model), model)
    with generator.attached():
        model(PROMPT)
        generator.get_candidates(torch.cat([PROMPT, torch.tensor([[4]])], dim=1))
    assert generator.draft_steps > 1
    assert generator.session._cache.get_seq_length() == PROMPT.shape[1]


def test_the_best_chain_follows_the_best_child_of_each_node() -> None:
    r"""
    Tokens, with the path log-probs below them; the best leaf is not at the end of the best chain.

             9
         /       \
        4         5
      -0.9      -0.5
        |       /   \
        6      7     8
      -1.0   -1.2  -1.1
    """
    tree = DraftTree.from_roots(torch.tensor([9]))
    assert tree.best_chain().shape == (1, 0)
    full = torch.ones(1, 2, dtype=torch.bool)
    tree = tree.with_layer(torch.tensor([[4, 5]]), torch.tensor([[0, 0]]), torch.tensor([[-0.9, -0.5]]), full)
    assert tree.best_chain().tolist() == [[5]]
    full = torch.ones(1, 3, dtype=torch.bool)
    scores = torch.tensor([[-1.0, -1.2, -1.1]])
    tree = tree.with_layer(torch.tensor([[6, 7, 8]]), torch.tensor([[1, 2, 2]]), scores, full)
    assert tree.best_chain().tolist() == [[5, 8]]
