"""The policies: drawn trees, equality with the naive oracles, and what holds for every grown tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import ScriptedDrafter
from oracles import (
    Grown,
    Node,
    Path,
    Table,
    add_fp32,
    best_first,
    children_pool,
    grow_chain,
    grow_eagle,
    grow_talon,
    path_tokens,
)
from oracles import tree_mask as naive_mask
from strategies import TABLE_KINDS, named_table
from test_oracles import WORKED_DRAFT_STEPS, WORKED_ROOT, row_of, worked_table
from test_tree import WORKED_PICTURE, assert_padding_is_blank, drawn
from transformers import PreTrainedModel

from talon_hf import TalonCandidateGenerator, TalonConfig
from talon_hf.drafter import Commit
from talon_hf.policies import ChainPolicy, EaglePolicy, TalonPolicy, TreePolicy
from talon_hf.tree import DraftTree

NO_LIMIT = 1000
SEEDS = range(4)
KINDS = sorted(TABLE_KINDS)
TALON = [
    TalonPolicy(2, 1, 0.5),
    TalonPolicy(7, 4, 0.1),
    TalonPolicy(13, 2, 1.0),
    TalonPolicy(20, 4, 0.03),
    TalonPolicy(20, 3, 0.3, top_k_layers=0),
    TalonPolicy(20, 3, 0.3, top_k_layers=2),
    TalonPolicy(60, 10, 0.03),
]
EAGLE = [EaglePolicy(2, 4, 1), EaglePolicy(7, 4, 3), EaglePolicy(20, 3, 4), EaglePolicy(60, 10, 2)]
POLICIES: list[Any] = [*TALON, *EAGLE, ChainPolicy(9, 5), ChainPolicy(4, 8)]
ORACLES: dict[type, Callable[..., Grown]] = {
    TalonPolicy: grow_talon,
    EaglePolicy: grow_eagle,
    ChainPolicy: grow_chain,
}


def by_hand(policy: Any, table: Table, root: int = 0, limit: int = NO_LIMIT) -> Grown:
    """The tree of the policy's oracle, which has parameters of the same names."""
    return ORACLES[type(policy)](table, root, **asdict(policy), depth_limit=limit)


class TableSource:
    """A `LogProbSource` over one oracle table a row; padding is told that every token is certain.

    `ids` are the target ids of the draft ids, None where they are the same.
    """

    def __init__(self, *tables: Table, ids: Sequence[int] | None = None) -> None:
        self.steps = 0
        self.asked: list[Path] = []
        self._tables = tables
        self._ids = ids
        self._paths: list[list[Path]] = [[()] for _ in tables]

    def begin(self) -> torch.Tensor:
        return self._answer(torch.ones(len(self._tables), 1, dtype=torch.bool)).squeeze(1)

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        draft = (
            tokens.tolist() if self._ids is None else [[self._ids.index(t) for t in row] for row in tokens.tolist()]
        )
        self._paths = [
            [(*paths[parent], token) for parent, token in zip(above, said, strict=True)]
            for paths, above, said in zip(self._paths, parents.tolist(), draft, strict=True)
        ]
        return self._answer(valid)

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self._ids is None else torch.tensor(self._ids)[draft_ids]

    def _answer(self, valid: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        rows = []
        for table, paths, good in zip(self._tables, self._paths, valid.tolist(), strict=True):
            self.asked += [path for path, real in zip(paths, good, strict=True) if real]
            rows.append(
                [table(path) if real else [0.0] * len(table(())) for path, real in zip(paths, good, strict=True)]
            )
        return torch.tensor(rows, dtype=torch.float32)


def nodes_of(tree: DraftTree, row: int = 0) -> list[Node]:
    """A row's nodes as the oracles list them."""
    count = int(tree.counts()[row])
    assert tree.valid[row, :count].all()
    columns = (tree.tokens, tree.parents, tree.depths, tree.path_log_probs)
    return [Node(*node) for node in zip(*(column[row, :count].tolist() for column in columns), strict=True)]


def grow(policy: TreePolicy, *tables: Table, limits: Sequence[int] | None = None, root: int = 0) -> DraftTree:
    """One tree a table."""
    depth_limits = torch.tensor([NO_LIMIT] * len(tables) if limits is None else limits)
    return policy.grow(TableSource(*tables), torch.tensor([root] * len(tables)), depth_limits)


@cache
def grown(policy: TreePolicy, kind: str, seed: int) -> list[Node]:
    return nodes_of(grow(policy, named_table(kind, seed)))


# Literal trees. Letters A B C D are the draft ids 0 1 2 3.
NARROW = "root\n├── A\n│   └── C\n│       ├── A\n│       └── B\n└── B"
WIDE = "root\n├── A\n│   ├── C\n│   └── B\n└── B\n    └── D"


PICTURES: dict[str, tuple[TreePolicy, str, int]] = {
    "worked": (TalonPolicy(6, 2, 0.3), WORKED_PICTURE, WORKED_DRAFT_STEPS),
    "higher_gate": (TalonPolicy(6, 2, 0.4), NARROW, 3),
    "lower_gate": (TalonPolicy(6, 2, 0.25), WIDE, 2),
    "two_top_k_layers": (TalonPolicy(6, 2, 0.3, top_k_layers=2), WORKED_PICTURE, 3),
    "no_top_k_layer": (
        TalonPolicy(5, 2, 0.6, top_k_layers=0),
        "root\n└── A\n    └── C\n        ├── A\n        └── B",
        3,
    ),
    "budget_of_a_star": (TalonPolicy(3, 2, 0.3), "root\n├── A\n└── B", 1),
    "eagle": (EaglePolicy(6, 2, 2), NARROW, 3),
    "shallow_eagle": (EaglePolicy(4, 2, 1), "root\n├── A\n│   └── C\n└── B", 2),
    "chain": (ChainPolicy(60, 3), "root\n└── A\n    └── C\n        └── A", 3),
    "chain_within_budget": (ChainPolicy(3, 9), "root\n└── A\n    └── C", 2),
}


@pytest.mark.parametrize("name", PICTURES)
def test_trees_as_pictures(name: str) -> None:
    policy, picture, draft_steps = PICTURES[name]
    source = TableSource(worked_table)
    tree = policy.grow(source, torch.tensor([WORKED_ROOT]), torch.tensor([NO_LIMIT]))
    assert drawn(tree) == picture
    assert source.steps == draft_steps


def test_the_drafter_is_asked_for_every_frontier_node_and_no_more() -> None:
    source = TableSource(worked_table)
    TalonPolicy(6, 2, 0.3).grow(source, torch.tensor([WORKED_ROOT]), torch.tensor([NO_LIMIT]))
    assert source.asked == [(), (0,), (1,), (0, 2), (1, 3)]


def test_the_gate_includes_its_own_boundary() -> None:
    # Both children of the best node tie with the anchor; mu = 1 keeps exact ties and nothing else.
    table = {(): [-1.0, -3.0], (0,): [-0.5, -0.5], (1,): [0.0, -1.0]}
    tree = grow(TalonPolicy(60, 2, 1.0), table.__getitem__, limits=[2])
    assert drawn(tree) == "root\n├── A\n│   ├── A\n│   └── B\n└── B"


def test_a_child_that_ties_with_its_parent_never_displaces_it() -> None:
    # A is certain after A: the chain A A A ties at -0.5 on the budget's boundary, and the rerank must cut from below.
    certain = row_of(1.0, 0.0)
    tree = grow(EaglePolicy(4, 2, 3), lambda path: [-0.5, -0.9] if path == () else certain(path))
    assert drawn(tree) == "root\n└── A\n    └── A\n        └── A"
    assert tree.path_log_probs.tolist() == [[0.0, -0.5, -0.5, -0.5]]
    assert tree.depths.tolist() == [[0, 1, 2, 3]]


def test_trees_hold_target_ids_but_ties_go_by_draft_id() -> None:
    source = TableSource(row_of(0.25, 0.25, 0.25, 0.25), ids=[40, 30, 20, 10])
    tree = TalonPolicy(6, 2, 1.0).grow(source, torch.tensor([9]), torch.tensor([NO_LIMIT]))
    assert tree.tokens.tolist() == [[9, 40, 30, 40, 30, 20]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 1]]


# Equality with the oracles: tokens, parents, depths, fp32 scores, mask and draft steps.


@pytest.mark.parametrize("kind", KINDS)
def test_every_tree_equals_the_oracle(kind: str) -> None:
    for policy in POLICIES:
        for seed in SEEDS:
            source = TableSource(named_table(kind, seed))
            tree = policy.grow(source, torch.tensor([0]), torch.tensor([NO_LIMIT]))
            want = by_hand(policy, named_table(kind, seed))
            assert (nodes_of(tree), source.steps) == (want.nodes, want.draft_steps), (policy, seed)
            assert tree.mask()[0].tolist() == naive_mask([node.parent for node in want.nodes]), (policy, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [(NO_LIMIT, 2, 0), (1, 3, NO_LIMIT)])
def test_every_row_of_a_ragged_batch_equals_its_own_oracle(kind: str, limits: tuple[int, ...]) -> None:
    tables, roots = [named_table(kind, seed) for seed in range(3)], [0, 1, 0]
    for policy in POLICIES:
        source = TableSource(*tables)
        tree = policy.grow(source, torch.tensor(roots), torch.tensor(limits))
        want = [by_hand(policy, *row) for row in zip(tables, roots, limits, strict=True)]
        assert [nodes_of(tree, row) for row in range(3)] == [tree.nodes for tree in want], policy
        assert source.steps == max(tree.draft_steps for tree in want), policy
        assert tree.size == max(len(tree.nodes) for tree in want)
        assert_padding_is_blank(tree)


@pytest.mark.parametrize("config", [{"policy": "talon"}, {"policy": "eagle", "depth": 4}, {"policy": "chain"}])
@pytest.mark.parametrize(("max_depth", "drafter_limit", "limit"), [(2, None, 9), (None, 2, 9), (9, 9, 2), (3, 2, 0)])
def test_the_tightest_of_all_depth_limits_wins(
    config: dict[str, Any], max_depth: int | None, drafter_limit: int | None, limit: int, llama: PreTrainedModel
) -> None:
    table = named_table("mixed", 0)
    drafter = ScriptedDrafter(lambda _, text: torch.tensor(table(tuple(text[2:]))))
    settings = TalonConfig(node_budget=20, top_k=4, max_depth=max_depth, **config)
    generator = TalonCandidateGenerator(drafter, llama, settings)
    generator.session.max_depth = drafter_limit
    one = torch.tensor([[1]])
    tree = generator.get_tree(Commit(one, torch.zeros(1, 1, 0), one, one == 1, one[0]), [limit])
    assert int(tree.depths.max()) == generator.draft_steps == min(2, limit)


# What holds for every grown tree. The pool is recomputed from the table, layer by layer.


def pool_of(kind: str, seed: int, nodes: list[Node], depth: int) -> list[Node]:
    """All candidates of a layer, best first: the children of the layer above it."""
    table = named_table(kind, seed)
    return best_first(
        [c for v, node in enumerate(nodes) if node.depth == depth - 1 for c in children_pool(table, nodes, v)]
    )


def talon_layers(kind: str) -> list[tuple[TalonPolicy, list[Node], list[Node], list[Node]]]:
    """(policy, tree above the layer, layer, pool) for every layer of every TALON tree, the empty last one too."""
    found = []
    for policy in TALON:
        for seed in SEEDS:
            nodes = grown(policy, kind, seed)
            for depth in range(1, nodes[-1].depth + 2):
                above = [node for node in nodes if node.depth < depth]
                layer = [node for node in nodes if node.depth == depth]
                if len(above) < policy.node_budget:
                    found.append((policy, above, layer, pool_of(kind, seed, nodes, depth)))
    return found


def passes(policy: TalonPolicy, depth: int, pool: list[Node]) -> list[Node]:
    """The candidates that a layer may hold: the first K of a top-K layer, the gated ones of another."""
    if depth <= policy.top_k_layers:
        return pool[: policy.top_k]
    gate = add_fp32(torch.tensor(policy.mu, dtype=torch.float64).log().item(), pool[0].path_log_prob) if pool else 0.0
    return [node for node in pool if node.path_log_prob >= gate]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_within_its_budget_and_well_formed(kind: str) -> None:
    for policy in POLICIES:
        for seed in SEEDS:
            nodes = grown(policy, kind, seed)
            assert len(nodes) <= policy.node_budget
            assert nodes[0].parent == -1
            assert all(0 <= node.parent < i for i, node in enumerate(nodes) if i)
            assert all(node.depth == nodes[node.parent].depth + 1 for node in nodes[1:])
            assert len({(node.parent, node.token) for node in nodes}) == len(nodes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_log_prob_is_its_parents_plus_its_own_and_never_rises(kind: str) -> None:
    for policy in POLICIES:
        for seed in SEEDS:
            nodes = grown(policy, kind, seed)
            for node in nodes[1:]:
                assert node in children_pool(named_table(kind, seed), nodes, node.parent)
                assert node.path_log_prob <= nodes[node.parent].path_log_prob


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layer_is_the_top_k_with_ties_to_the_lower_id(kind: str) -> None:
    for policy, above, layer, pool in talon_layers(kind):
        if len(above) == 1 and policy.top_k_layers:
            ranked = sorted(pool, key=lambda node: (-node.path_log_prob, node.token))
            assert layer == ranked[: min(policy.top_k, policy.node_budget - 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_passes_its_layer_and_none_that_passes_is_missing_unless_cut(kind: str) -> None:
    for policy, above, layer, pool in talon_layers(kind):
        passing = passes(policy, above[-1].depth + 1, pool)
        assert set(layer) <= set(passing)
        assert len(layer) == len(passing) or len(above) + len(layer) == policy.node_budget


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_keeps_the_highest_and_lists_them_best_first(kind: str) -> None:
    for policy, above, layer, pool in talon_layers(kind):
        assert layer == best_first(layer)
        left_out = [node for node in passes(policy, above[-1].depth + 1, pool) if node not in layer]
        assert not left_out or best_first([*left_out, layer[-1]])[0] == layer[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_growth_stops_only_at_the_budget_or_with_an_empty_pool(kind: str) -> None:
    stopped = [(policy, pool) for policy, _, layer, pool in talon_layers(kind) if not layer]
    assert all(pool == [] for _, pool in stopped)
    for policy in TALON:
        nodes = grown(policy, kind, 0)
        limited = nodes_of(grow(policy, named_table(kind, 0), limits=[2]))
        assert limited == [node for node in nodes if node.depth <= 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_budget_grows_part_of_a_larger_ones_tree(kind: str) -> None:
    talon = [grown(TalonPolicy(budget, 4, 0.1), kind, 0) for budget in range(2, 24)]
    assert all(small == talon[-1][: len(small)] for small in talon)
    eagle = [grown(EaglePolicy(budget, 4, 3), kind, 0) for budget in range(2, 24)]
    paths = [{path_tokens(nodes, i) for i in range(len(nodes))} for nodes in eagle]
    assert all(small <= large for small, large in pairwise(paths))


def test_a_closed_gate_leaves_one_chain_below_the_first_layer() -> None:
    for seed in range(20):
        depths = [node.depth for node in grown(TalonPolicy(20, 4, 1.0), "hard", seed)]
        assert depths == [0, 1, 1, 1, 1, *range(2, 17)]


def test_a_budget_of_the_first_layer_is_a_star() -> None:
    for kind in ("mixed", "tied", "hard"):
        nodes = grown(TalonPolicy(8, 10, 0.5), kind, 0)
        assert [node.parent for node in nodes] == [-1] + [0] * 7


@pytest.mark.parametrize("policy", [TalonPolicy(20, 4, 0.05), EaglePolicy(20, 4, 3), ChainPolicy(9, 8)])
@pytest.mark.parametrize("seed", SEEDS)
def test_renaming_the_vocabulary_renames_the_tree(policy: TreePolicy, seed: int) -> None:
    table, new_name = named_table("hard", seed), torch.randperm(12, generator=torch.manual_seed(seed)).tolist()

    def renamed(path: Path) -> list[float]:
        row = table(tuple(map(new_name.index, path)))
        return [row[new_name.index(token)] for token in range(12)]

    want = [node._replace(token=new_name[node.token]) for node in grown(policy, "hard", seed)[1:]]
    assert nodes_of(grow(policy, renamed))[1:] == want


@pytest.mark.parametrize("seed", SEEDS)
def test_adding_a_constant_to_the_logits_changes_nothing(seed: int) -> None:
    table = named_table("hard", seed)

    def shifted(path: Path) -> list[float]:
        return (torch.tensor(table(path)) + 64.0).log_softmax(0).tolist()

    trees = [grow(TalonPolicy(20, 4, 0.05), source) for source in (table, shifted)]
    assert trees[0].tokens.equal(trees[1].tokens)
    assert trees[0].parents.equal(trees[1].parents)


@pytest.mark.parametrize("kind", ["talon", "eagle", "chain"])
def test_scores_above_zero_keep_every_child_behind_its_parent(kind: str) -> None:
    """A drafter may answer with raw scores; the tree must still be one."""
    scores = {(): [-1.0, -1.2], (0,): [0.5, -3.0], (1,): [-2.0, -2.0]}
    policy = {"talon": TalonPolicy(3, 2, 0.1), "eagle": EaglePolicy(2, 2, 1), "chain": ChainPolicy(3, 2)}[kind]
    tree = grow(policy, lambda path: scores.get(path, [0.4, 0.3]), limits=[5])
    for node in range(1, tree.size):
        parent = int(tree.parents[0, node])
        assert 0 <= parent < node
        assert int(tree.depths[0, node]) == int(tree.depths[0, parent]) + 1
