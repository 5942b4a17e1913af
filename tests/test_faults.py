"""The tests, tested: a table of faults, each a few characters of library code, and the claim that each must break.

A fault swaps the code of one function for its own source with `old` replaced by `new`, for every importer to see.
A claim returns on the real code and raises on the mutant; a mutant that survives is a hole in the tests. Claims must
not remember what the library computed (as `test_policies.grown` does), or a mutant would outlive its test.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import test_acceptance
import test_cache
import test_masks
import test_policies
import test_sampling
import test_stats
import test_tree
import torch
from models import VOCABULARY, random_head
from test_oracles import A, C, D

from talon_hf import policies
from talon_hf.acceptance import match, walk
from talon_hf.cache import TreeCache
from talon_hf.drafter import Commit
from talon_hf.eagle import EagleSession
from talon_hf.masks import tree_masks
from talon_hf.stats import TalonStats
from talon_hf.target import Target
from talon_hf.tree import DraftTree


@dataclass(frozen=True)
class Fault:
    """`function` with its one occurrence of `old` replaced by `new`, and the claim that must fail then."""

    function: Callable[..., Any]
    old: str
    new: str
    claim: Callable[[], None]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        function = self.function
        assert isinstance(function, FunctionType)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{function.__qualname__} has not one {self.old!r}: rewrite its fault"
        scope: dict[str, Any] = {}
        exec(compile(source.replace(self.old, self.new), "<fault>", "exec"), function.__globals__, scope)
        mutant = scope[function.__name__]
        mutant = mutant.fget if isinstance(mutant, property) else mutant
        monkeypatch.setattr(function, "__code__", mutant.__code__)


def a_rejected_tree_leaves_no_trace_in_the_drafter() -> None:
    model = test_masks.model_of("llama")
    head, rng = random_head(model).double(), torch.Generator().manual_seed(0)

    def commit(tokens: list[int], start: int, root: int) -> Commit:
        positions = torch.arange(start, start + len(tokens)).unsqueeze(0)
        features = torch.randn(1, len(tokens), 3 * model.config.hidden_size, generator=rng, dtype=torch.float64)
        return Commit(torch.tensor([tokens]), features, positions, positions >= 0, torch.tensor([root]))

    rounds = [commit([5, 6, 7], 0, 8), commit([8, 9], 3, 10)]
    clean, used = head.open(model, 1), head.open(model, 1)
    clean.begin(rounds[0])
    used.begin(rounds[0])
    frontier = torch.tensor([[1, 2, 3]])
    used.extend(frontier, torch.zeros_like(frontier), frontier > 0)
    used.end()
    try:
        got = used.begin(rounds[1])
    except RuntimeError as error:
        raise AssertionError("the tree's columns are still there") from error
    assert got.shape == (1, VOCABULARY)
    torch.testing.assert_close(got, clean.begin(rounds[1]))


FAULTS: dict[str, Fault] = {
    "a node sees its siblings": Fault(
        DraftTree.mask,
        "return mask",
        "return mask | (self.parents.unsqueeze(2) == self.parents.unsqueeze(1))",
        test_tree.test_the_worked_mask_is_the_literal_one,
    ),
    "positions by node index": Fault(
        Target.score,
        "+ tree.depths",
        "+ torch.arange(tree.size)",
        partial(test_masks.test_a_nodes_logits_are_those_of_its_path, "llama", "sdpa"),
    ),
    "a window over node indices": Fault(
        tree_masks,
        "positions = ends + tree.depths",
        "positions = ends + torch.arange(tree.size)",
        partial(test_masks.test_masks_as_pictures, "sliding_attention", 3),
    ),
    "a row sees a column behind its end": Fault(
        tree_masks,
        "past < ends",
        "past <= ends",
        test_masks.test_a_row_never_sees_the_columns_behind_its_own_end,
    ),
    "a subtree keeps its old parent pointers": Fault(
        DraftTree.select,
        "new_column.gather(1, old_parents.clamp(min=0))",
        "old_parents",
        partial(test_tree.test_a_subtree_keeps_its_paths_and_their_order, 3),
    ),
    "keep takes one column too many": Fault(
        TreeCache.keep,
        "self.committed = [done + len(row) for",
        "self.committed = [done + len(row) + 1 for",
        test_cache.test_keep_by_hand,
    ),
    "keep reverses the columns": Fault(
        TreeCache.keep,
        "for c in row + ",
        "for c in row[::-1] + ",
        test_cache.test_keep_by_hand,
    ),
    "the root is dropped from the cache": Fault(
        Target.keep,
        "self.cache.keep(paths)",
        "self.cache.keep([path[1:] for path in paths])",
        partial(test_cache.check_next_step, "llama", [9], 1),
    ),
    "the bonus comes from the parent's row": Fault(
        walk,
        "raw = logits[walking, nodes]",
        "raw = logits[walking, [n if children[i][n] else tree.parents[i, n].clamp(min=0)"
        " for i, n in zip(walking, nodes)]]",
        partial(test_acceptance.test_walks_of_the_worked_tree, [A, C, D, A, A, D], [0, 1, 3, 5], [A, C, A, D]),
    ),
    "processors see the committed prefix only": Fault(
        walk,
        "transcript.prefixes(at)",
        "[transcript.prefix(rows[i])[:, : transcript.lengths[rows[i]] - emitted[i]] for i in walking]",
        partial(test_sampling.test_processors_see_each_nodes_own_prefix, False, match),
    ),
    "an extra draw a round": Fault(
        walk,
        "walking = list(range(len(rows)))",
        "walking, _ = list(range(len(rows))), torch.rand(())",
        test_acceptance.test_match_spends_one_draw_a_token_as_plain_decoding_does,
    ),
    "a stop inside the path is passed": Fault(
        walk,
        " and not transcript.has_ended(row)",
        "",
        partial(test_acceptance.test_a_stop_inside_the_path_ends_the_walk_there, "greedy"),
    ),
    "the gate weighs the token, not the path": Fault(
        policies.TalonPolicy.grow,
        "columns, valid = _best(pool.flatten(1), bound, room)",
        "own = (pool - frontier.path_log_probs.unsqueeze(2)).flatten(1);"
        " columns, valid = _best(own, own.amax(dim=1) + math.log(self.mu) if depth > 1 else bound, room)",
        partial(test_policies.test_trees_as_pictures, "worked"),
    ),
    "the gate is strict": Fault(
        policies.TalonPolicy.grow,
        "+ math.log(self.mu)",
        "+ math.log(self.mu); bound = bound.nextafter(bound + 1)",
        test_policies.test_the_gate_includes_its_own_boundary,
    ),
    "the budget is off by one": Fault(
        policies.TalonPolicy.grow,
        "self.node_budget - tree.counts()",
        "self.node_budget + 1 - tree.counts()",
        partial(test_policies.test_trees_as_pictures, "budget_of_a_star"),
    ),
    "the cut keeps the first, not the best": Fault(
        policies._best,
        "scores[rows, columns].argsort(descending=True, stable=True)",
        "torch.arange(len(rows))",
        partial(test_policies.test_every_tree_equals_the_oracle, "mixed"),
    ),
    "ties go to the child, not the parent": Fault(
        policies._rerank,
        "ranks.argsort(dim=1, descending=True, stable=True)",
        "(tree.size - 1 - ranks.flip(1).argsort(dim=1, descending=True, stable=True))",
        test_policies.test_a_child_that_ties_with_its_parent_never_displaces_it,
    ),
    "a parent pointer to the next sibling": Fault(
        policies._Frontier.add_layer,
        "self.nodes.gather(1, slots)",
        "self.nodes.gather(1, (slots + 1) % self.nodes.shape[1])",
        partial(test_policies.test_trees_as_pictures, "worked"),
    ),
    "the drafter keeps a rejected tree": Fault(
        EagleSession.end,
        "self._cache.drop()",
        "pass",
        a_rejected_tree_leaves_no_trace_in_the_drafter,
    ),
    "tau without the bonus": Fault(
        TalonStats.tau.fget,
        "self.emitted / self.rounds",
        "(self.emitted - self.rounds) / self.rounds",
        test_stats.test_the_bonus_counts_in_tau,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_claim_holds_on_the_real_code(name: str) -> None:
    FAULTS[name].claim()


@pytest.mark.parametrize("name", FAULTS)
def test_the_claim_fails_on_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name].install(monkeypatch)
    with pytest.raises(AssertionError):
        FAULTS[name].claim()


def test_a_fault_whose_text_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Fault(DraftTree.mask, "no such text", "", test_tree.test_the_worked_mask_is_the_literal_one)
    with pytest.raises(AssertionError, match="rewrite its fault"):
        gone.install(monkeypatch)
