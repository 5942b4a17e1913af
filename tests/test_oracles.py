"""The oracles against examples worked by hand, and against each other where two formulations exist."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import (
    Grown,
    Node,
    Path,
    add_fp32,
    ancestors,
    chi_square,
    depths,
    enumerate_law,
    greedy_rows,
    grow_chain,
    grow_eagle,
    grow_talon,
    inverse_cdf,
    normalised,
    path_tokens,
    residual_accept,
    residual_law,
    softmax,
    total_variation,
    tree_mask,
    vanilla_decode,
    walk_match,
)
from strategies import (
    TABLE_KINDS,
    LogProbTable,
    named_table,
    random_draws,
    random_prob_rows,
    random_tree,
)

# The worked tree of docs/algorithm.md: letters A B C D are the draft ids 0 1 2 3, the root carries the letter A.
A, B, C, D = range(4)
WORKED_ROOT = A
WORKED_NODE_BUDGET, WORKED_TOP_K, WORKED_MU = 6, 2, 0.3
WORKED_PROBS: dict[Path, list[float]] = {
    (): [0.60, 0.30, 0.08, 0.02],
    (A,): [0.05, 0.20, 0.70, 0.05],
    (B,): [0.20, 0.05, 0.25, 0.50],
    (A, C): [0.50, 0.40, 0.05, 0.05],
    (B, D): [0.90, 0.05, 0.03, 0.02],
}
WORKED_TOKENS = [A, A, B, C, D, A]
WORKED_PARENTS = [-1, 0, 0, 1, 2, 3]
WORKED_DEPTHS = [0, 1, 1, 2, 2, 3]
WORKED_PATH_PROBS = [1.0, 0.60, 0.30, 0.42, 0.15, 0.21]
WORKED_MASK = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 0],
    [1, 0, 1, 0, 1, 0],
    [1, 1, 0, 1, 0, 1],
]
WORKED_DRAFT_STEPS = 3

# fp32 keeps about seven digits; the worked probabilities are products of two-digit numbers.
WORKED_TOLERANCE = 1e-6

# A correct sampler fails one run in ten thousand; the seeds are fixed, so a run that passes keeps passing.
SIGNIFICANCE = 1e-4
DRAWS = 10_000


def worked_table(path: Path) -> list[float]:
    """KeyError for a path the policy has no business asking about."""
    return [float(np.float32(math.log(prob))) for prob in WORKED_PROBS[path]]


def shape(grown: Grown) -> list[tuple[int, int]]:
    return [(node.token, node.parent) for node in grown.nodes]


def row_of(*probs: float) -> Callable[[Path], list[float]]:
    """A table that says the same at every path."""
    return lambda _: [math.log(prob) if prob > 0 else -math.inf for prob in probs]


def uniforms_of(*values: float) -> Iterator[float]:
    return iter(values)


def test_ancestors_are_listed_nearest_first():
    assert ancestors(WORKED_PARENTS, 5) == [3, 1, 0]
    assert ancestors(WORKED_PARENTS, 0) == []


def test_the_worked_mask_is_ancestor_or_self():
    assert [[int(seen) for seen in row] for row in tree_mask(WORKED_PARENTS)] == WORKED_MASK
    assert depths(WORKED_PARENTS) == WORKED_DEPTHS


def test_a_chain_has_a_causal_mask_and_a_star_sees_only_root_and_self():
    assert tree_mask([-1, 0, 1]) == [[True, False, False], [True, True, False], [True, True, True]]
    assert tree_mask([-1, 0, 0]) == [[True, False, False], [True, True, False], [True, False, True]]


def test_an_unattached_padding_node_sees_itself_only():
    assert tree_mask([-1, 0, -1])[2] == [False, False, True]


def test_path_tokens_leave_out_the_root():
    tree = list(zip(WORKED_TOKENS, WORKED_PARENTS, strict=True))
    assert path_tokens(tree, 5) == (A, C, A)
    assert path_tokens(tree, 0) == ()


def grow_worked(**changes: Any) -> Grown:
    settings: dict[str, Any] = {"node_budget": WORKED_NODE_BUDGET, "top_k": WORKED_TOP_K, "mu": WORKED_MU} | changes
    return grow_talon(worked_table, WORKED_ROOT, **settings)


def test_talon_grows_the_worked_tree():
    grown = grow_worked()
    assert [node.token for node in grown.nodes] == WORKED_TOKENS
    assert [node.parent for node in grown.nodes] == WORKED_PARENTS
    assert [node.depth for node in grown.nodes] == WORKED_DEPTHS
    assert [math.exp(node.path_log_prob) for node in grown.nodes] == pytest.approx(
        WORKED_PATH_PROBS, abs=WORKED_TOLERANCE
    )
    assert grown.draft_steps == WORKED_DRAFT_STEPS


def test_the_expected_emission_of_the_worked_trees():
    def expected(**changes: Any) -> float:
        return sum(math.exp(node.path_log_prob) for node in grow_worked(**changes).nodes)

    emissions = [expected(), expected(mu=0.4), expected(mu=0.25)]
    assert emissions == pytest.approx([2.68, 2.698, 2.59], abs=WORKED_TOLERANCE)


def test_talon_asks_for_every_frontier_row_and_no_more():
    asked: list[Path] = []

    def recording_table(path: Path) -> list[float]:
        asked.append(path)
        return worked_table(path)

    grow_talon(recording_table, WORKED_ROOT, WORKED_NODE_BUDGET, WORKED_TOP_K, WORKED_MU)
    assert asked == [(), (A,), (B,), (A, C), (B, D)]


@pytest.mark.parametrize(
    ("changes", "expected", "draft_steps"),
    [
        ({"node_budget": 1}, [], 0),
        ({"node_budget": 2}, ["A"], 1),
        ({"node_budget": 3}, ["A", "B"], 1),
        ({"node_budget": 4}, ["A", "B", "AC"], 2),
        ({"depth_limit": 0}, [], 0),
        ({"depth_limit": 1}, ["A", "B"], 1),
        ({"depth_limit": 2}, ["A", "B", "AC", "BD"], 2),
        # AC alone passes 0.4 * 0.42, and the room for two goes to its children: EAGLE's tree below.
        ({"mu": 0.4}, ["A", "B", "AC", "ACA", "ACB"], 3),
        # 0.25 * 0.42 = 0.105 lets AB in.
        ({"mu": 0.25}, ["A", "B", "AC", "BD", "AB"], 2),
        ({"top_k_layers": 2}, ["A", "B", "AC", "BD", "ACA"], 3),
        # The gate on the first layer: 0.6 * 0.3 = 0.18 keeps A and B, 0.6 * 0.6 = 0.36 keeps A alone.
        ({"top_k_layers": 0}, ["A", "B", "AC", "BD", "ACA"], 3),
        ({"top_k_layers": 0, "mu": 0.6, "depth_limit": 2}, ["A", "AC"], 2),
    ],
)
def test_talon_by_hand(changes: dict[str, float], expected: list[str], draft_steps: int):
    grown = grow_worked(**changes)
    letters = ["".join("ABCD"[t] for t in path_tokens(grown.nodes, i)) for i in range(1, len(grown.nodes))]
    assert (letters, grown.draft_steps) == (expected, draft_steps)


def test_top_k_layers_pool_the_whole_layer_not_each_parent():
    # With K = 2 the second layer is AC 0.42 and BD 0.15; K for each parent would also keep AB and BC.
    assert len(grow_worked(node_budget=60, top_k_layers=2, depth_limit=2).nodes) == 1 + 2 + 2


def test_equal_path_log_probs_go_by_parent_then_draft_id():
    grown = grow_talon(row_of(0.5, 0.5), 9, node_budget=5, top_k=2, mu=1.0)
    assert shape(grown) == [(9, -1), (0, 0), (1, 0), (0, 1), (1, 1)]


def test_the_gate_includes_its_own_boundary():
    # Both children of the best node tie with the anchor; mu = 1 keeps exact ties and nothing else.
    table = {(): [-1.0, -3.0], (0,): [-0.5, -0.5], (1,): [0.0, -1.0]}
    grown = grow_talon(table.__getitem__, 9, node_budget=60, top_k=2, mu=1.0, depth_limit=2)
    assert shape(grown) == [(9, -1), (0, 0), (1, 0), (0, 1), (1, 1)]


def test_path_log_probs_are_rounded_to_fp32_at_every_step():
    tenth = float(np.float32(0.1))
    grown = grow_talon(lambda _: [-tenth], 9, node_budget=4, top_k=1, mu=0.5)
    expected = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float32).neg().cumsum(0)
    assert [node.path_log_prob for node in grown.nodes[1:]] == expected.tolist()
    assert grown.nodes[3].path_log_prob != -3 * tenth


def test_the_gate_adds_as_a_float32_tensor_adds():
    rng = random.Random(0)
    for _ in range(2000):
        mu, anchor = rng.uniform(0.001, 1.0), float(np.float32(-rng.expovariate(0.3)))
        tensor_gate = torch.tensor([anchor], dtype=torch.float32) + math.log(mu)
        assert add_fp32(math.log(mu), anchor) == tensor_gate.item()


def test_non_finite_log_probs_are_never_candidates():
    grown = grow_talon(lambda _: [-math.inf, -1.0, math.inf], 9, node_budget=3, top_k=3, mu=0.1)
    assert shape(grown) == [(9, -1), (1, 0), (1, 1)]


@pytest.mark.parametrize("bad", [[-math.inf, -math.inf], [math.nan, -0.1]])
def test_an_empty_pool_ends_the_growth_after_one_draft_step(bad: list[float]):
    root_alone = Grown([Node(9, -1, 0, 0.0)], draft_steps=1)
    assert grow_talon(lambda _: bad, 9, 6, 2, 0.3) == root_alone
    assert grow_eagle(lambda _: bad, 9, 6, 2, depth=3) == root_alone
    assert grow_chain(lambda _: bad, 9, 3, 6) == root_alone


def test_a_nan_row_silences_its_own_node_only():
    table = {(): [-0.7, -0.8], (0,): [math.nan, -0.1], (1,): [-0.2, -1.9]}
    grown = grow_talon(table.__getitem__, 9, node_budget=4, top_k=2, mu=0.3)
    assert shape(grown) == [(9, -1), (0, 0), (1, 0), (0, 2)]


def test_eagle_reranks_the_worked_tree():
    # Layers: A .6 B .3 | AC .42 AB .12 BD .15 BC .075 | ACA .21 ACB .168 BDA .135 BDB .0075; the best five stay.
    grown = grow_eagle(worked_table, WORKED_ROOT, node_budget=6, top_k=2, depth=2)
    assert shape(grown) == [(A, -1), (A, 0), (B, 0), (C, 1), (A, 3), (B, 3)]
    assert grown.draft_steps == 3


def test_eagle_keeps_node_order_not_score_order():
    # All ten nodes fit: children of the frontier in frontier order, each parent's best child first.
    grown = grow_eagle(worked_table, WORKED_ROOT, node_budget=60, top_k=2, depth=2)
    letters = ["".join("ABCD"[t] for t in path_tokens(grown.nodes, i)) for i in range(1, len(grown.nodes))]
    assert letters == ["A", "B", "AC", "AB", "BD", "BC", "ACA", "ACB", "BDA", "BDB"]


@pytest.mark.parametrize(
    ("depth", "depth_limit", "draft_steps"),
    [(2, None, 3), (1, None, 2), (2, 2, 2), (2, 1, 1), (2, 0, 0), (0, None, 1)],
)
def test_eagle_takes_one_draft_step_for_each_layer(depth: int, depth_limit: int | None, draft_steps: int):
    grown = grow_eagle(worked_table, WORKED_ROOT, 60, 2, depth, depth_limit)
    assert grown.draft_steps == draft_steps == max(node.depth for node in grown.nodes)


def test_a_budget_of_one_node_takes_no_draft_step():
    root_alone = Grown([Node(9, -1, 0, 0.0)], draft_steps=0)
    assert grow_talon(row_of(1.0), 9, 1, 2, 0.3) == root_alone
    assert grow_eagle(row_of(1.0), 9, 1, 2, depth=3) == root_alone
    assert grow_chain(row_of(1.0), 9, 3, 1) == root_alone


@pytest.mark.parametrize("kind", sorted(TABLE_KINDS))
def test_a_smaller_talon_budget_grows_the_first_nodes_of_a_larger_one(kind: str):
    for seed in range(4):
        large = grow_talon(named_table(kind, seed), 0, 30, 4, 0.1).nodes
        for budget in range(1, 31):
            assert grow_talon(named_table(kind, seed), 0, budget, 4, 0.1).nodes == large[:budget]


def test_children_rank_by_path_log_prob_even_where_fp32_merges_their_own():
    # Beside -8, fp32 cannot tell -1e-9 from -2e-9: the two children tie, and the lower draft id goes first.
    table = {(): [-8.0], (0,): [-2e-9, -1e-9]}
    eagle = grow_eagle(table.__getitem__, 9, node_budget=3, top_k=1, depth=1)
    chain = grow_chain(table.__getitem__, 9, length=2, node_budget=3)
    assert shape(eagle) == shape(chain) == [(9, -1), (0, 0), (0, 1)]


def test_eagle_keeps_a_parent_that_ties_with_its_child():
    # Token 0 is certain after token 0, so the whole chain 0 0 0 ties at -0.5; the budget takes it from the top.
    table = row_of(1.0, 0.0)
    grown = grow_eagle(lambda path: [-0.5, -0.9] if path == () else table(path), 9, 4, 2, depth=3)
    assert shape(grown) == [(9, -1), (0, 0), (0, 1), (0, 2)]


def test_chain_follows_the_most_probable_token():
    table = {(): [-2.0, -0.1], (1,): [-0.6, -0.6], (1, 0): [-0.3, -1.0]}
    grown = grow_chain(table.__getitem__, 9, length=3, node_budget=60)
    assert shape(grown) == [(9, -1), (1, 0), (0, 1), (0, 2)]
    assert grown.draft_steps == 3


@pytest.mark.parametrize(
    ("length", "node_budget", "depth_limit", "drafted"), [(5, 3, None, 2), (5, 60, 1, 1), (0, 9, None, 0)]
)
def test_chain_is_as_long_as_the_tightest_limit(length: int, node_budget: int, depth_limit: int | None, drafted: int):
    grown = grow_chain(row_of(0.9, 0.1), 9, length, node_budget, depth_limit)
    assert (len(grown.nodes) - 1, grown.draft_steps) == (drafted, drafted)


@pytest.mark.parametrize("kind", sorted(TABLE_KINDS))
def test_grown_trees_are_well_formed_whatever_the_drafter_says(kind: str):
    for seed, budget in itertools.product(range(4), (1, 2, 7, 20)):
        table = named_table(kind, seed)
        for grown in (
            grow_talon(table, 0, budget, 4, 0.1),
            grow_eagle(table, 0, budget, 4, 3),
            grow_chain(table, 0, 5, budget),
        ):
            nodes = grown.nodes
            assert len(nodes) <= budget
            assert [node.depth for node in nodes] == depths([node.parent for node in nodes])
            assert all(node.parent < i for i, node in enumerate(nodes))
            assert len({(node.parent, node.token) for node in nodes}) == len(nodes)
            assert all(node.path_log_prob <= nodes[node.parent].path_log_prob for node in nodes[1:])


def worked_tree() -> list[tuple[int, int]]:
    return list(zip(WORKED_TOKENS, WORKED_PARENTS, strict=True))


@pytest.mark.parametrize(
    ("draws", "path", "bonus"),
    [
        ([A, C, D, B, A, D], [1, 3], B),  # A, C drafted; the target wants B after AC, which the cut left out
        ([A, C, D, A, A, D], [1, 3, 5], D),  # a whole row accepted: the bonus comes from the leaf
        ([C, C, D, A, A, D], [], C),  # nothing matches at the root
        ([B, C, A, A, A, D], [2], A),
    ],
)
def test_walk_by_hand(draws: list[int], path: list[int], bonus: int):
    assert walk_match(worked_tree(), draws) == (path, bonus)
    assert greedy_rows(worked_tree(), draws) == (path, bonus)


def test_the_walk_equals_the_longest_prefix_over_all_rows():
    accepted = 0
    for seed in range(300):
        tree = random_tree(seed, nodes=1 + seed % 17, vocab_size=2 + seed % 4)
        draws = random_draws(seed, tree, 2 + seed % 4)
        walked = walk_match(tree, draws)
        accepted += len(walked[0])
        assert walked == greedy_rows(tree, draws)
    assert accepted > 300


@pytest.mark.parametrize(
    ("uniforms", "path", "bonus"),
    [
        ((0.49, 0.55), [1], B),  # accept A (0.49 < 0.5), then one draw at its leaf
        ((0.51, 0.39, 0.0), [2], A),  # refuse A; B has 0.2 / 0.5 = 0.4 of what is left
        ((0.51, 0.41, 0.66), [], C),  # refuse both; C has 0.2 / 0.3 of what is left
        ((0.51, 0.41, 0.67), [], D),
    ],
)
def test_residual_acceptance_by_hand(uniforms: tuple[float, ...], path: list[int], bonus: int):
    rows = [[0.5, 0.2, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    tree = [(D, -1), (A, 0), (B, 0)]
    assert residual_accept(rows, tree, uniforms_of(*uniforms)) == (path, bonus)


def test_residual_acceptance_never_takes_an_impossible_token():
    rows = [[0.0, 1.0], [1.0, 0.0]]
    assert residual_accept(rows, [(9, -1), (0, 0)], uniforms_of(0.0, 0.0)) == ([], 1)
    assert residual_accept(rows, [(9, -1), (0, 0)], uniforms_of(0.0, 0.999)) == ([], 1)


def test_a_child_that_holds_all_that_is_left_is_accepted():
    # After 0 and 1 are refused, child 2 has everything; no uniform below one can refuse it.
    tree = [(9, -1), (0, 0), (1, 0), (2, 0)]
    rows = [[0.3, 0.3, 0.4]] + [[1.0, 0.0, 0.0]] * 3
    assert residual_accept(rows, tree, uniforms_of(0.99, 0.99, 0.999999, 0.5)) == ([3], 0)


def test_both_acceptance_rules_have_the_same_law_at_a_node():
    # Exact: rational probabilities, every order of every set of children, zeros included.
    for weights in ([1, 2, 3, 4], [0, 1, 1, 3], [5, 0, 0, 0], [1, 1, 1, 1]):
        p = [Fraction(weight, sum(weights)) for weight in weights]
        for size in range(len(p) + 1):
            for children in itertools.permutations(range(len(p)), size):
                assert residual_law(p, children) == p


def emitted_law(rule: Callable, rows: list[list[Fraction]], tree: list[tuple[int, int]]) -> dict[Path, Fraction]:
    """The law of what one round emits, when rule(p, children) is the law of the next token at a node."""
    law: dict[Path, Fraction] = {}
    open_nodes: list[tuple[int, Path, Fraction]] = [(0, (), Fraction(1))]
    while open_nodes:
        v, said, prob = open_nodes.pop()
        children = {tree[i][0]: i for i in range(len(tree)) if tree[i][1] == v}
        for token, token_prob in enumerate(rule(rows[v], list(children))):
            if token in children:
                open_nodes.append((children[token], (*said, token), prob * token_prob))
            else:
                law[(*said, token)] = prob * token_prob
    return law


def test_both_acceptance_rules_have_the_same_law_over_a_whole_round():
    for seed in range(40):
        tree = random_tree(seed, nodes=1 + seed % 8, vocab_size=4)
        rng = random.Random(seed)
        weights = [[rng.randrange(4) for _ in range(3)] + [1] for _ in tree]
        rows = [[Fraction(w, sum(row)) for w in row] for row in weights]
        match, residual = (emitted_law(rule, rows, tree) for rule in (lambda p, _: p, residual_law))
        assert match == residual
        assert sum(match.values()) == 1


def test_a_law_by_hand():
    table = {(): [math.log(0.75), math.log(0.25)], (0,): [math.log(0.5), math.log(0.5)], (1,): [0.0, -math.inf]}
    law = enumerate_law(table.__getitem__, 2)
    assert law == pytest.approx({(0, 0): 0.375, (0, 1): 0.375, (1, 0): 0.25, (1, 1): 0.0})


def test_five_tokens_and_three_steps_have_125_outcomes():
    law = enumerate_law(LogProbTable(0, vocab_size=5), 3)
    assert len(law) == 125
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)


def test_a_process_sees_the_prefix_and_changes_the_law():
    def never_twice(prefix: Path, scores: Sequence[float]) -> list[float]:
        return [-math.inf if token in prefix else score for token, score in enumerate(scores)]

    law = enumerate_law(row_of(0.5, 0.3, 0.2), 2, never_twice)
    assert law[(0, 0)] == law[(1, 1)] == law[(2, 2)] == 0.0
    assert law[(0, 1)] == pytest.approx(0.5 * 0.3 / 0.5)
    assert law[(1, 2)] == pytest.approx(0.3 * 0.2 / 0.7)


def test_chi_square_by_hand():
    # One degree of freedom: (20^2 + 20^2) / 50 = 16, and the tail is erfc(sqrt(16 / 2)).
    assert chi_square({"a": 30, "b": 70}, {"a": 0.5, "b": 0.5}, 100) == pytest.approx(math.erfc(math.sqrt(8)))
    # Two degrees: (50^2 + 10^2 + 40^2) / 300 = 14, and the tail is exp(-14 / 2).
    thirds = dict.fromkeys("abc", 1 / 3)
    assert chi_square({"a": 150, "b": 90, "c": 60}, thirds, 300) == pytest.approx(math.exp(-21))
    assert chi_square({"a": 100, "b": 100, "c": 100}, thirds, 300) == pytest.approx(1.0)


def test_chi_square_pools_the_small_cells():
    law = {"a": 0.96, "b": 0.02, "c": 0.01, "d": 0.01}
    # n = 200: b, c, d expect 4, 2, 2 and become one cell of 8 that holds 16: 8^2 / 8 + 8^2 / 192.
    statistic = 8 + 64 / 192
    counts = {"a": 184, "b": 16}
    assert chi_square(counts, law, 200) == pytest.approx(math.erfc(math.sqrt(statistic / 2)))
    # n = 100: the pool of 4 is still too small, joins a, and nothing is left to test.
    assert chi_square({"a": 90, "b": 10}, law, 100) == 1.0


def test_chi_square_refuses_an_impossible_outcome():
    assert chi_square({"a": 999, "b": 1}, {"a": 1.0, "b": 0.0}, 1000) == 0.0
    assert chi_square({"a": 999, "z": 1}, {"a": 1.0}, 1000) == 0.0


def test_total_variation_by_hand():
    assert total_variation({"a": 30, "b": 70}, {"a": 0.5, "b": 0.5}, 100) == pytest.approx(0.2)
    assert total_variation({"a": 10}, {"b": 1.0}, 10) == 1.0


def test_chi_square_p_values_are_uniform_under_the_right_law():
    law = enumerate_law(LogProbTable(3, vocab_size=5, easy=0.0), 2)
    rng, outcomes = random.Random(0), list(law)
    p_values = []
    for _ in range(200):
        counts = Counter(rng.choices(outcomes, weights=list(law.values()), k=1000))
        p_values.append(chi_square(counts, law, 1000))
    # The mean of 200 uniform values has a standard deviation of 0.0204; five of them either side.
    assert abs(sum(p_values) / 200 - 0.5) < 0.102
    assert min(p_values) > SIGNIFICANCE


# Rounds over this tree must keep this target's law, and the chi-square must notice a rule that does not.
TARGET = LogProbTable(7, vocab_size=5, easy=0.0)
TREE = [(0, -1), (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]  # two children everywhere, two deep
Rule = Callable[[list[list[float]], list[tuple[int, int]], random.Random], tuple[list[int], int]]


def match_rule(rows: list[list[float]], tree: list[tuple[int, int]], rng: random.Random) -> tuple[list[int], int]:
    return walk_match(tree, [inverse_cdf(row, rng.random()) for row in rows])


def residual_rule(rows: list[list[float]], tree: list[tuple[int, int]], rng: random.Random) -> tuple[list[int], int]:
    return residual_accept(rows, tree, iter(rng.random, None))


def bonus_from_p(rows: list[list[float]], tree: list[tuple[int, int]], rng: random.Random) -> tuple[list[int], int]:
    """Wrong: after refusals the bonus comes from p instead of the residual."""
    path, _ = residual_rule(rows, tree, rng)
    return path, inverse_cdf(rows[path[-1] if path else 0], rng.random())


def siblings_without_renormalising(
    rows: list[list[float]], tree: list[tuple[int, int]], rng: random.Random
) -> tuple[list[int], int]:
    """Wrong: the second sibling is tried with p[x] instead of its share of what is left."""
    path: list[int] = []
    v = 0
    while True:
        p, accepted = list(rows[v]), None
        for child in (i for i, node in enumerate(tree) if node[1] == v):
            if rng.random() < p[tree[child][0]]:
                accepted = child
                break
            p[tree[child][0]] = 0.0
        if accepted is None:
            return path, inverse_cdf(normalised(p), rng.random())
        path.append(accepted)
        v = accepted


def sample(rule: Rule, length: int, n: int, seed: int) -> Counter[Path]:
    """n continuations of `length` tokens, each said in rounds over TREE."""
    rng = random.Random(seed)
    cached: dict[Path, list[list[float]]] = {}
    counts: Counter[Path] = Counter()
    for _ in range(n):
        said: Path = ()
        while len(said) < length:
            if said not in cached:
                cached[said] = [softmax(TARGET(said + path_tokens(TREE, v))) for v in range(len(TREE))]
            path, bonus = rule(cached[said], TREE, rng)
            said = (*said, *(TREE[v][0] for v in path), bonus)
        counts[said[:length]] += 1
    return counts


@pytest.mark.parametrize("rule", [match_rule, residual_rule])
def test_a_lossless_rule_is_accepted(rule: Rule):
    law = enumerate_law(TARGET, 3)
    counts = sample(rule, 3, DRAWS, seed=1)
    assert chi_square(counts, law, DRAWS) > SIGNIFICANCE, f"TV {total_variation(counts, law, DRAWS):.3f}"


@pytest.mark.parametrize("rule", [bonus_from_p, siblings_without_renormalising])
def test_a_lossy_rule_is_refused(rule: Rule):
    counts = sample(rule, 3, DRAWS, seed=1)
    assert chi_square(counts, enumerate_law(TARGET, 3), DRAWS) < SIGNIFICANCE


class CountingModel:
    """The next token is (sum of the whole prefix + its length) mod 7."""

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        following = (input_ids.cumsum(1) + torch.arange(1, input_ids.shape[1] + 1)) % 7
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 7).double())


def test_vanilla_decode_by_hand():
    # 1 2 | 3 + 2 = 5 | 8 + 3 = 11 = 4 | 12 + 4 = 16 = 2
    assert vanilla_decode(CountingModel(), torch.tensor([[1, 2]]), 3) == [5, 4, 2]
    assert vanilla_decode(CountingModel(), torch.tensor([[1, 2]]), 0) == []


def test_tables_are_functions_of_seed_and_path():
    literal = LogProbTable(5, vocab_size=4)((1, 2))
    assert literal == LogProbTable(5, vocab_size=4)((1, 2))
    assert literal != LogProbTable(6, vocab_size=4)((1, 2))
    assert literal != LogProbTable(5, vocab_size=4)((2, 1))


def test_tables_hold_normalised_fp32_values():
    for kind, seed in itertools.product(("mixed", "easy", "tied", "minus_inf"), range(20)):
        row = named_table(kind, seed)((0,))
        assert all(value == float(np.float32(value)) and value <= 0 for value in row)
        if max(row) > -math.inf:
            assert math.fsum(math.exp(value) for value in row) == pytest.approx(1.0, abs=1e-5)


def test_tied_tables_tie_across_parents_and_with_their_own_parent():
    across, with_parent = 0, 0
    for seed in range(10):
        nodes = grow_talon(named_table("tied", seed), 0, 60, 4, 0.03).nodes
        scores = [(node.depth, node.path_log_prob) for node in nodes[1:]]
        parents_of_score: dict[tuple[int, float], set[int]] = {score: set() for score in scores}
        for node in nodes[1:]:
            parents_of_score[node.depth, node.path_log_prob].add(node.parent)
        across += sum(len(parents) > 1 for parents in parents_of_score.values())
        with_parent += sum(node.path_log_prob == nodes[node.parent].path_log_prob for node in nodes[1:])
    assert across > 50
    assert with_parent > 50


def test_nan_rows_come_whole_and_single():
    nans = [sum(map(math.isnan, named_table("nan_rows", 0)((i,)))) for i in range(200)]
    assert {0, 1, 12} == set(nans)
    assert 30 < sum(count > 0 for count in nans) < 90


@pytest.mark.parametrize("layered", [False, True])
def test_random_trees_are_trees_with_distinct_siblings(layered: bool):
    for seed in range(100):
        tree = random_tree(seed, nodes=1 + seed % 30, vocab_size=1 + seed % 5, layered=layered)
        parents = [parent for _, parent in tree]
        assert parents[0] == -1
        assert all(0 <= parent < i for i, parent in enumerate(parents) if i > 0)
        assert len({(parent, token) for token, parent in tree}) == len(tree) == 1 + seed % 30
        assert not layered or depths(parents) == sorted(depths(parents))


def test_random_prob_rows_sum_to_one():
    assert [math.fsum(row) for row in random_prob_rows(0, 3, 5)] == pytest.approx([1.0] * 3)
