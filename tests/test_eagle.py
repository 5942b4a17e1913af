"""EAGLE-3 heads: equal to the official code on its golden files, and true to what their cache and batches promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heads import (
    Forwards,
    GuidedDrafter,
    golden,
    golden_head,
    golden_target,
    head_config,
    head_tensors,
    random_commits,
    solo,
    tiny_head,
    whole_text_commit,
    write_head,
)
from models import VOCABULARY, drafter_zoo, random_head, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from talon_hf import EagleDraft, TalonCandidateGenerator, TalonConfig, generate
from talon_hf.drafter import Commit
from talon_hf.eagle import EagleSession

FP32 = {"rtol": 0.0, "atol": 1e-5}  # another order of the same fp32 sums
FP64 = {"rtol": 0.0, "atol": 1e-10}
PROMPTS = torch.tensor([[0, 0, 7, 11, 3, 42], [9, 23, 5, 17, 31, 8], [0, 0, 0, 0, 19, 4]])
VALID = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])


# The official code's own numbers -------------------------------------------------------------------------------------


@pytest.fixture
def official(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Tensor], EagleDraft, TalonCandidateGenerator]:
    facts, tensors = golden("eagle3_tree")
    head = golden_head(tmp_path, tensors, facts["config"])
    target = tiny_model("llama", dtype=torch.float32, vocab_size=97)
    config = TalonConfig(policy="eagle", node_budget=facts["total_tokens"], top_k=facts["top_k"], depth=facts["depth"])
    return facts, tensors, head, TalonCandidateGenerator(head, target, config)


def golden_commits(tensors: dict[str, Tensor]) -> list[Commit]:
    """The two rounds of the golden tree as commits: tokens, their features, and the root behind them."""
    commits, read = [], 0
    for r in (0, 1):
        ids, features = tensors[f"round{r}.input_ids"], tensors[f"round{r}.target_features"]
        tokens = ids[:, read:-1]
        positions = torch.arange(read, read + tokens.shape[1]).unsqueeze(0)
        commits.append(Commit(tokens, features, positions, torch.ones_like(tokens, dtype=torch.bool), ids[:, -1]))
        read += tokens.shape[1]
    return commits


@pytest.mark.conformance
def test_every_draft_forward_equals_the_official_one(official: Any) -> None:
    facts, tensors, head, generator = official
    forwards = Forwards().watch(head)
    for commit in golden_commits(tensors):
        generator.get_tree(commit, [100])
    calls = [f"round{r}.call{i}." for r in (0, 1) for i in range(facts["depth"] + 1)]
    assert len(forwards.outputs) == len(calls)
    for at, call in enumerate(calls):
        fed = tensors[call + "in_hidden"]
        features = head.fc(fed) if fed.shape[2] == 96 else fed
        torch.testing.assert_close(forwards.embeds[at], head.embed_tokens(tensors[call + "input_ids"]), **FP32)
        torch.testing.assert_close(forwards.features[at], features, **FP32)
        torch.testing.assert_close(forwards.outputs[at], tensors[call + "out_hidden_prenorm"], **FP32)
        torch.testing.assert_close(head.log_probs(forwards.outputs[at]), tensors[call + "logprobs"], **FP32)
        if call + "position_ids" in tensors:
            assert forwards.positions[at].tolist() == [tensors[call + "position_ids"].tolist()]
            official_mask = tensors[call + "tree_mask"]
            assert forwards.masks[at][..., -official_mask.shape[3] :].tolist() == official_mask.bool().tolist()
            assert bool(forwards.masks[at][..., : -official_mask.shape[3]].all())


@pytest.mark.conformance
def test_trees_of_the_eagle_policy_equal_the_official_ones(official: Any) -> None:
    facts, tensors, _, generator = official
    for r, commit in enumerate(golden_commits(tensors)):
        tree = generator.get_tree(commit, [100])
        assert tree.tokens.tolist() == tensors[f"round{r}.draft_tokens"].tolist()
        assert tree.parents[0].tolist() == facts["rounds"][r]["parents"]
        assert tree.depths[0].tolist() == tensors[f"round{r}.tree_position_ids"].tolist()
        assert tree.mask()[0].tolist() == tensors[f"round{r}.tree_mask"][0, 0].bool().tolist()
        assert generator.draft_steps == (r + 1) * (facts["depth"] + 1)


class StopAt(StoppingCriteria):
    """Stops at a length without telling the drafter beforehand, as the official loop does."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.conformance
def test_golden_loop_gives_the_official_text_in_as_many_rounds(tmp_path: Path) -> None:
    facts, tensors = golden("eagle3_loop")
    target = golden_target(tensors, facts["target_config"])
    head = golden_head(tmp_path, tensors, facts["target_config"] | {"draft_vocab_size": 20})
    # The official loop appends a round's root and accepted nodes, ours the accepted nodes and the bonus; so its 61 new
    # tokens and the root that it has drawn but not appended are our 62, the first of which is prefill's own.
    length = tensors["prompt"].shape[1] + facts["new_token"] + 1
    out = generate(
        tensors["prompt"],
        model=target,
        assistant_model=head,
        talon_policy="eagle",
        talon_node_budget=facts["total_tokens"],
        talon_top_k=facts["top_k"],
        talon_depth=facts["depth"],
        do_sample=False,
        max_new_tokens=100,
        stopping_criteria=StoppingCriteriaList([StopAt(length)]),
        return_dict_in_generate=True,
    )
    assert out.sequences[:, :-1].tolist() == tensors["eagle"].tolist()
    assert out.sequences.tolist() == tensors["greedy"][:, :length].tolist()
    assert out.talon_stats.rounds == facts["target_steps"]
    assert out.talon_stats.emitted == facts["new_token"]
    assert out.talon_stats.tau == pytest.approx(facts["mat"])
    assert out.talon_stats.delta == facts["depth"] + 1


def test_golden_greedy_text_is_the_same_to_its_end_with_talon_trees(tmp_path: Path) -> None:
    facts, tensors = golden("eagle3_loop")
    target = golden_target(tensors, facts["target_config"])
    head = golden_head(tmp_path, tensors, facts["target_config"] | {"draft_vocab_size": 20})
    new = tensors["greedy"].shape[1] - tensors["prompt"].shape[1]
    out = generate(tensors["prompt"], model=target, assistant_model=head, do_sample=False, max_new_tokens=new)
    assert out.tolist() == tensors["greedy"].tolist()


# The cache holds pairs with target features only, in every row of a batch --------------------------------------------


@pytest.mark.conformance
@pytest.mark.parametrize("rows", [[1], [0, 1, 2]])
def test_after_any_accepted_path_the_cache_is_that_of_one_pass_over_the_text(rows: list[int]) -> None:
    target = tiny_model("llama", eos_token_id=None)
    head = random_head(target, seed=2).double()
    options = {"attention_mask": VALID[rows], "do_sample": False, "max_new_tokens": 40}
    plain = target.generate(PROMPTS[rows], **options)
    texts = [text[6 - int(valid.sum()) :].tolist() for text, valid in zip(plain, VALID[rows], strict=True)]
    checked: list[int] = []

    def check(session: EagleSession, script: Any, commit: Commit, log_probs: Tensor) -> None:
        layer = session._cache.layers[0]
        for row, text in enumerate(script._texts):
            fresh = head.open(target, rows=1)
            again = fresh.begin(whole_text_commit(target, head, text, int(commit.roots[row])))
            alone = fresh._cache.layers[0]
            assert session._cache.committed[row] == len(text)
            torch.testing.assert_close(layer.keys[row, :, : len(text)], alone.keys[0], **FP64)
            torch.testing.assert_close(layer.values[row, :, : len(text)], alone.values[0], **FP64)
            torch.testing.assert_close(log_probs[row], again[0], **FP32)
            checked.append(len(text))

    drafter = GuidedDrafter(head, drafter_zoo(texts, target)["good"], check)
    options |= {"talon_node_budget": 6, "talon_top_k": 2, "return_dict_in_generate": True}
    out = generate(PROMPTS[rows], model=target, assistant_model=drafter, **options)
    assert out.sequences.tolist() == plain.tolist()
    assert sum(out.talon_stats.accepted_by_depth) > 10 * len(rows)
    assert len(checked) > 5 * len(rows)


@pytest.mark.parametrize("policy", ["talon", "eagle", "chain"])
def test_a_row_of_a_batch_drafts_what_it_drafts_alone(policy: str, llama: PreTrainedModel) -> None:
    head = random_head(llama, seed=5, draft_vocabulary=17).double()
    config = TalonConfig(policy=policy, node_budget=20, top_k=4, depth=3)
    commits = random_commits(head, rows=3, rounds=4)
    together = TalonCandidateGenerator(head, llama, config, rows=3)
    alone = [TalonCandidateGenerator(head, llama, config) for _ in range(3)]
    for commit in commits:
        trees = together.get_tree(commit, [9, 9, 2])
        for row in range(3):
            tree = alone[row].get_tree(solo(commit, row), [[9, 9, 2][row]])
            valid = trees.valid[row]
            assert trees.tokens[row, valid].tolist() == tree.tokens[0].tolist()
            assert trees.parents[row, valid].tolist() == tree.parents[0].tolist()
            torch.testing.assert_close(trees.path_log_probs[row, valid], tree.path_log_probs[0], **FP32)


def test_rows_that_stay_draft_as_before_when_others_leave(llama: PreTrainedModel) -> None:
    head = random_head(llama, seed=5).double()
    first, second = random_commits(head, rows=3, rounds=1)
    session, alone = head.open(llama, rows=3), head.open(llama, rows=1)
    session.begin(first)
    alone.begin(solo(first, 2))
    session.select_rows([2, 0])
    want = alone.begin(solo(second, 2))
    torch.testing.assert_close(session.begin(second.select_rows([2, 0]))[:1], want, **FP32)


@pytest.mark.parametrize("ended", [True, False])
def test_a_dropped_tree_leaves_no_column_behind(ended: bool, llama: PreTrainedModel) -> None:
    head = random_head(llama, seed=5).double()
    first, second = random_commits(head, rows=3, rounds=1)
    session, fresh = head.open(llama, rows=3), head.open(llama, rows=3)
    session.begin(first)
    fresh.begin(first)
    session.extend(torch.tensor([[3, 4]] * 3), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.bool))
    if ended:
        session.end()
        assert session._cache.get_seq_length() == fresh._cache.get_seq_length()
    torch.testing.assert_close(session.begin(second), fresh.begin(second), **FP32)
    assert session._cache.get_seq_length() == fresh._cache.get_seq_length()


# What a head reads ---------------------------------------------------------------------------------------------------


@pytest.mark.conformance
def test_d2t_holds_offsets_and_the_tree_holds_target_ids(tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama, draft_vocab_size=4)
    tensors = head_tensors(config) | {"d2t": torch.tensor([3, 3, 10, 46])}
    head = EagleDraft.from_pretrained(write_head(tmp_path, config, tensors))
    assert head.draft_ids.tolist() == [3, 4, 12, 49]
    generator = TalonCandidateGenerator(head, llama, TalonConfig(node_budget=5, top_k=4))
    tree = generator.get_tree(random_commits(head, rows=1, rounds=0)[0], [9])
    assert sorted(tree.tokens[0, 1:].tolist()) == [3, 4, 12, 49]


@pytest.mark.parametrize("d2t", [None, torch.zeros(VOCABULARY, dtype=torch.long)])
def test_without_offsets_draft_ids_are_target_ids(d2t: Tensor | None, tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama, draft_vocab_size=VOCABULARY)
    tensors = head_tensors(config) | ({} if d2t is None else {"d2t": d2t})
    head = EagleDraft.from_pretrained(write_head(tmp_path, config, tensors))
    assert head.draft_ids is None
    commit = random_commits(head, rows=1, rounds=0)[0]
    best = head.open(llama, rows=1).begin(commit).argmax(dim=1)
    tree = TalonCandidateGenerator(head, llama, TalonConfig(node_budget=2)).get_tree(commit, [1])
    assert tree.tokens[0, 1:].tolist() == best.tolist()


def test_offsets_of_a_full_vocabulary_permute_it(tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama, draft_vocab_size=VOCABULARY)
    reverse = torch.arange(VOCABULARY).flip(0) - torch.arange(VOCABULARY)
    head = EagleDraft.from_pretrained(write_head(tmp_path, config, head_tensors(config) | {"d2t": reverse}))
    assert head.draft_ids.tolist() == list(range(VOCABULARY - 1, -1, -1))


@pytest.mark.parametrize("owns", [False, True])
def test_embeddings_are_the_targets_unless_the_head_owns_them(owns: bool, tmp_path: Path) -> None:
    target = tiny_model("llama")
    config = head_config(target)
    tensors = head_tensors(config)
    if owns:
        tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, 32, dtype=torch.float64)
    head = EagleDraft.from_pretrained(write_head(tmp_path, config, tensors))
    forwards = Forwards().watch(head)
    commit = random_commits(head, rows=1, rounds=0)[0]
    head.open(target, rows=1).begin(commit)
    weights = tensors["embed_tokens.weight"] if owns else target.get_input_embeddings().weight
    following = torch.cat([commit.tokens[0, 1:], commit.roots])  # a feature meets the token after its position
    assert torch.equal(forwards.embeds[0][0], weights[following])


@pytest.mark.conformance
def test_a_head_narrower_than_its_target_owns_embeddings_and_drafts(tmp_path: Path, llama: PreTrainedModel) -> None:
    head = tiny_head(tmp_path, llama, hidden_size=16, target_hidden_size=32)
    assert head.embed_tokens.weight.shape == (VOCABULARY, 16)
    options = {"attention_mask": VALID, "do_sample": False, "max_new_tokens": 12}
    out = generate(PROMPTS, model=llama, assistant_model=head, return_dict_in_generate=True, **options)
    assert out.sequences.tolist() == llama.generate(PROMPTS, **options).tolist()
    assert out.talon_stats.draft_steps > 0


def test_below_the_root_the_feature_is_the_parents_output_before_the_final_norm(llama: PreTrainedModel) -> None:
    head = random_head(llama, seed=1).double()
    forwards = Forwards().watch(head)
    session = head.open(llama, rows=1)
    session.begin(random_commits(head, rows=1, rounds=0)[0])
    session.extend(torch.tensor([[3, 4]]), torch.tensor([[0, 0]]), torch.ones(1, 2, dtype=torch.bool))
    session.extend(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 0, 1]]), torch.ones(1, 3, dtype=torch.bool))
    last, layer = forwards.outputs[0][:, -1:], forwards.outputs[1]
    assert torch.equal(forwards.features[1], last.expand(-1, 2, -1))
    assert torch.equal(forwards.features[2], layer[:, [1, 0, 1]])


def test_rope_base_is_10000_where_the_config_names_none(tmp_path: Path, llama: PreTrainedModel) -> None:
    own = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    heads = {
        "absent": tiny_head(tmp_path / "absent", llama),
        "same": tiny_head(tmp_path / "same", llama, rope_theta=10000),
        "other": tiny_head(tmp_path / "other", llama, rope_theta=500.0),
        "nested": tiny_head(tmp_path / "nested", llama, **own),
    }
    commit = random_commits(heads["same"], rows=1, rounds=0)[0]
    said = {name: head.open(llama, rows=1).begin(commit) for name, head in heads.items()}
    assert torch.equal(said["absent"], said["same"])
    assert torch.equal(said["nested"], said["other"])
    assert not torch.allclose(said["absent"], said["other"], **FP32)


def test_positions_beyond_the_trained_length_are_positions_like_others(tmp_path: Path, llama: PreTrainedModel) -> None:
    short = tiny_head(tmp_path / "short", llama, max_position_embeddings=8)
    long = tiny_head(tmp_path / "long", llama, max_position_embeddings=1 << 20)
    commit = random_commits(long, rows=1, rounds=0)[0]
    far = Commit(commit.tokens, commit.features, commit.positions + 5000, commit.valid, commit.roots)
    want = long.open(llama, rows=1).begin(far)
    assert torch.equal(short.open(llama, rows=1).begin(far), want)
    # Rotary attention knows distances alone.
    torch.testing.assert_close(want, long.open(llama, rows=1).begin(commit), rtol=0.0, atol=1e-3)


def test_a_head_keeps_the_dtype_of_its_file_unless_told_otherwise(tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama)
    folder = write_head(tmp_path, config, head_tensors(config, dtype=torch.bfloat16))
    assert EagleDraft.from_pretrained(folder).dtype == torch.bfloat16
    assert EagleDraft.from_pretrained(folder, dtype=torch.float32).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in EagleDraft.from_pretrained(folder).parameters())
