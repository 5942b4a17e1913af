"""TalonStats: the paper's quantities, counted by hand and on real calls."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import drafter_zoo, tiny_model
from transformers import PreTrainedModel

from talon_hf import TalonStats, generate

NEW_TOKENS = 20
PROMPTS = torch.tensor([[7, 11, 3, 42, 5], [9, 23, 4, 8, 15]])


def counted() -> TalonStats:
    stats = TalonStats()
    stats.count(accepted=[2, 0], emitted=[3, 1], nodes=[6, 4], draft_steps=3)
    stats.count(accepted=[1], emitted=[2], nodes=[5], draft_steps=5)
    return stats


def test_rounds_counted_by_hand() -> None:
    stats = counted()
    assert (stats.rounds, stats.batch_rounds, stats.emitted, stats.nodes) == (3, 2, 6, 15)
    assert (stats.draft_steps, stats.accepted_by_depth) == (5, [2, 1])
    assert (stats.tau, stats.delta) == (2.0, 2.5)


def test_the_bonus_counts_in_tau() -> None:
    stats = TalonStats()
    for _ in range(4):
        stats.count(accepted=[0], emitted=[1], nodes=[60], draft_steps=1)
    assert stats.tau == 1.0
    assert stats.accepted_by_depth == []


def test_cost_and_prediction_by_hand() -> None:
    stats = counted()
    stats.seconds = {"draft": 1.0, "target": 0.8, "total": 9.0}
    # A draft step takes 1.0 / 5 = 0.2 s, a target forward 0.8 / 2 = 0.4 s.
    assert stats.draft_cost_ratio == pytest.approx(0.5)
    assert stats.predicted_speedup == pytest.approx(2.0 / (1 + 0.5 * 2.5))


def test_every_ratio_is_nan_before_the_first_round() -> None:
    stats = TalonStats(seconds={"prefill": 1.0, "target": 1.0})
    ratios = (stats.tau, stats.delta, stats.draft_cost_ratio, stats.predicted_speedup)
    assert all(math.isnan(ratio) for ratio in ratios)


def test_acceptance_by_depth_counts_every_node_of_every_path() -> None:
    rng, stats, lengths = random.Random(0), TalonStats(), []
    for step in range(50):
        accepted = [rng.randrange(6) for _ in range(1 + step % 3)]
        stats.count(accepted, [a + 1 for a in accepted], [9] * len(accepted), step)
        lengths += accepted
    assert stats.accepted_by_depth == [sum(length > depth for length in lengths) for depth in range(5)]
    assert stats.rounds == len(lengths)


def test_two_calls_add_up() -> None:
    total, other = counted(), TalonStats(seconds={"draft": 2.0})
    total.seconds = {"draft": 1.0, "target": 3.0}
    other.count(accepted=[3], emitted=[4], nodes=[7], draft_steps=4)
    total.add(other)
    assert (total.rounds, total.batch_rounds, total.emitted, total.nodes, total.draft_steps) == (4, 3, 10, 22, 9)
    assert total.accepted_by_depth == [3, 2, 1]
    assert total.seconds == {"draft": 3.0, "target": 3.0}


def test_a_phase_adds_up_over_its_blocks_even_when_one_raises() -> None:
    stats = TalonStats()
    with pytest.raises(RuntimeError, match="inside"), stats.timed("draft"):
        raise RuntimeError("inside")
    once = stats.seconds["draft"]
    with stats.timed("draft"):
        pass
    assert stats.seconds.keys() == {"draft"}
    assert stats.seconds["draft"] > once >= 0


def assert_invariants(stats: TalonStats, new_tokens: int, rows: int) -> None:
    assert stats.emitted == new_tokens - rows  # prefill says each row's first token
    assert stats.rounds >= stats.batch_rounds > 0
    assert 1 <= stats.tau <= 1 + len(stats.accepted_by_depth)
    assert sum(stats.accepted_by_depth) + stats.rounds >= stats.emitted
    assert all(below <= above for above, below in pairwise([stats.rounds, *stats.accepted_by_depth]))
    assert stats.rounds <= stats.nodes <= stats.rounds * 20
    assert sum(stats.accepted_by_depth) <= stats.nodes - stats.rounds
    rate = stats.tau / (1 + stats.draft_cost_ratio * stats.delta)
    assert stats.predicted_speedup == pytest.approx(rate, nan_ok=True)
    assert stats.predicted_speedup <= stats.tau or math.isnan(stats.predicted_speedup)
    parts = sum(seconds for phase, seconds in stats.seconds.items() if phase != "total")
    assert 0 < parts <= stats.seconds["total"]


@pytest.fixture(scope="module")
def endless() -> PreTrainedModel:
    """A model without an end-of-sequence token."""
    return tiny_model("llama", eos_token_id=None)


def stats_of(model: PreTrainedModel, name: str, rows: int, **options: Any) -> TalonStats:
    """A greedy call with a drafter of the zoo, whose text must be plain `generate`'s."""
    ids = PROMPTS[:rows]
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    want = model.generate(ids, **common)
    drafter = drafter_zoo(want.tolist(), model)[name]
    output = generate(ids, model=model, assistant_model=drafter, return_dict_in_generate=True, **common, **options)
    assert output.sequences.equal(want)
    return output.talon_stats


@pytest.mark.parametrize("name", ["perfect", "good", "adversarial", "nan", "random"])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_holds_for_every_call(name: str, rows: int, endless: PreTrainedModel) -> None:
    assert_invariants(stats_of(endless, name, rows, talon_node_budget=20), NEW_TOKENS * rows, rows)


def test_a_perfect_drafter_fills_every_round(endless: PreTrainedModel) -> None:
    stats = stats_of(endless, "perfect", rows=1, talon_policy="chain", talon_depth=4)
    # 19 tokens after prefill's, in rounds of 5, 5, 5, 4: the last one drafts three, for the bonus is the last token.
    assert (stats.rounds, stats.emitted, stats.draft_steps) == (4, 19, 15)
    assert stats.accepted_by_depth == [4, 4, 4, 3]
    assert (stats.tau, stats.delta) == (4.75, 3.75)
