"""DraftTree: drawn trees and their masks first, then what holds for every tree."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from oracles import depths, path_tokens, tree_mask
from strategies import random_tree
from test_oracles import (
    WORKED_DEPTHS,
    WORKED_MASK,
    WORKED_MU,
    WORKED_NODE_BUDGET,
    WORKED_PARENTS,
    WORKED_PATH_PROBS,
    WORKED_PROBS,
    WORKED_TOKENS,
    WORKED_TOP_K,
)

from talon_hf.tree import DraftTree

DOCS = Path(__file__).parent.parent / "docs" / "algorithm.md"
LETTERS = "ABCD"
WORKED_PICTURE = """\
root
├── A
│   └── C
│       └── A
└── B
    └── D"""
Pair = tuple[int, int]


def tree_of(*rows: Sequence[Pair]) -> DraftTree:
    """A batch of (token, parent) trees, padded on the right; a node's path log-prob is minus its column."""
    width = max(map(len, rows))

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in values])

    tokens, parents = ([[node[i] for node in row] for row in rows] for i in (0, 1))
    valid = padded([[1] * len(row) for row in rows], 0).bool()
    scores = torch.arange(width, dtype=torch.float32).neg().expand(len(rows), -1)
    scores = torch.where(valid, scores, -torch.inf)
    return DraftTree(padded(tokens, 0), padded(parents, -1), padded([*map(depths, parents)], 0), scores, valid)


def worked_tree() -> DraftTree:
    pairs = tree_of(list(zip(WORKED_TOKENS, WORKED_PARENTS, strict=True)))
    return DraftTree(pairs.tokens, pairs.parents, pairs.depths, torch.tensor([WORKED_PATH_PROBS]).log(), pairs.valid)


def pairs_of(tree: DraftTree, row: int = 0) -> list[Pair]:
    """(token, parent) of a row's nodes, which must come before its padding."""
    count = int(tree.valid[row].sum())
    assert tree.valid[row].tolist() == [True] * count + [False] * (tree.size - count)
    return list(zip(tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist(), strict=True))


def drawn(tree: DraftTree, row: int = 0) -> str:
    """The tree as docs/algorithm.md draws it, children in column order."""
    pairs = pairs_of(tree, row)

    def below(node: int, indent: str) -> list[str]:
        lines, children = [], [i for i, (_, parent) in enumerate(pairs) if parent == node]
        for child in children:
            last = child == children[-1]
            lines.append(indent + ("└── " if last else "├── ") + LETTERS[pairs[child][0]])
            lines += below(child, indent + ("    " if last else "│   "))
        return lines

    return "\n".join(["root", *below(0, "")])


def random_batch(seed: int) -> tuple[DraftTree, list[list[Pair]]]:
    """Three trees of different sizes, in any parent-first order."""
    rows = [random_tree(3 * seed + i, nodes=1 + (seed * 5 + i * 7) % 19, vocab_size=5) for i in range(3)]
    return tree_of(*rows), rows


def assert_padding_is_blank(tree: DraftTree) -> None:
    blank = ~tree.valid
    assert tree.parents[blank].tolist() == [-1] * int(blank.sum())
    assert not tree.depths[blank].any()
    assert tree.path_log_probs[blank].tolist() == [-torch.inf] * int(blank.sum())


def test_the_worked_tree_is_drawn_as_in_the_docs() -> None:
    assert drawn(worked_tree()) == WORKED_PICTURE


def test_the_worked_mask_is_the_literal_one() -> None:
    assert worked_tree().mask().int().tolist() == [WORKED_MASK]


def test_roots_alone_are_trees_of_one_node() -> None:
    tree = DraftTree.from_roots(torch.tensor([7, 8]))
    assert [pairs_of(tree, row) for row in range(2)] == [[(7, -1)], [(8, -1)]]
    assert (tree.size, tree.counts().tolist()) == (1, [1, 1])
    assert (tree.depths.tolist(), tree.path_log_probs.tolist()) == ([[0], [0]], [[0.0], [0.0]])
    assert tree.path_log_probs.dtype == torch.float32
    assert tree.mask().tolist() == [[[True]], [[True]]]


def test_layers_add_up_to_the_worked_tree() -> None:
    tree, start = DraftTree.from_roots(torch.tensor(WORKED_TOKENS[:1])), 1
    for width in (2, 2, 1):
        layer = slice(start, start + width)
        scores = torch.tensor([WORKED_PATH_PROBS[layer]]).log()
        tokens, parents = torch.tensor([WORKED_TOKENS[layer]]), torch.tensor([WORKED_PARENTS[layer]])
        tree, start = tree.with_layer(tokens, parents, scores, tokens >= 0), start + width
    assert drawn(tree) == WORKED_PICTURE
    assert tree.depths.tolist() == [WORKED_DEPTHS]
    assert tree.path_log_probs.exp().tolist() == [pytest.approx(WORKED_PATH_PROBS)]


def test_a_layer_leaves_padding_blank_and_the_old_tree_alone() -> None:
    old = DraftTree.from_roots(torch.tensor([7, 8]))
    valid = torch.tensor([[True, True], [True, False]])
    new = old.with_layer(torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2).long(), -torch.ones(2, 2), valid)
    assert [pairs_of(new, row) for row in range(2)] == [[(7, -1), (1, 0), (2, 0)], [(8, -1), (3, 0)]]
    assert_padding_is_blank(new)
    assert (old.size, new.size, new.counts().tolist()) == (1, 3, [3, 2])


@pytest.mark.parametrize(
    ("pairs", "picture"),
    [
        ([(0, -1), (1, 0), (2, 1), (3, 2)], ["1...", "11..", "111.", "1111"]),  # a chain is causal
        ([(0, -1), (1, 0), (2, 0), (3, 0)], ["1...", "11..", "1.1.", "1..1"]),  # siblings never see each other
        ([(0, -1), (1, 0), (2, 0), (3, 1)], ["1...", "11..", "1.1.", "11.1"]),  # nor does a nephew its uncle
    ],
)
def test_masks_as_pictures(pairs: list[Pair], picture: list[str]) -> None:
    rows = tree_of(pairs).mask()[0].tolist()
    assert ["".join(".1"[seen] for seen in row) for row in rows] == picture


def test_padding_sees_itself_and_is_seen_by_nobody() -> None:
    mask = tree_of([(0, -1)], [(0, -1), (1, 0), (2, 1)]).mask()
    assert mask[0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_the_mask_is_ancestor_or_self(seed: int) -> None:
    tree, rows = random_batch(seed)
    for mask, pairs in zip(tree.mask(), rows, strict=True):
        n = len(pairs)
        assert mask[:n, :n].tolist() == tree_mask([parent for _, parent in pairs])
        assert mask[n:].equal(torch.eye(tree.size, dtype=torch.bool)[n:])


@pytest.mark.parametrize("seed", range(20))
def test_the_mask_is_its_own_closure_and_its_rows_count_the_depth(seed: int) -> None:
    tree, _ = random_batch(seed)
    mask = tree.mask()
    assert ((mask.int() @ mask.int()) > 0).equal(mask)
    assert mask.sum(dim=2).equal(tree.depths + 1)
    assert mask.equal(mask.tril())


@pytest.mark.parametrize("seed", range(20))
def test_a_subtree_keeps_its_paths_and_their_order(seed: int) -> None:
    tree, rows = random_batch(seed)
    rng = random.Random(seed)
    keep = [[False] * tree.size for _ in rows]
    for kept, pairs in zip(keep, rows, strict=True):
        for i, (_, parent) in enumerate(pairs):
            kept[i] = i == 0 or (kept[parent] and rng.random() < 0.7)
    chosen = tree.select(torch.tensor(keep))
    assert chosen.size == max(map(sum, keep))
    assert_padding_is_blank(chosen)
    for row, (kept, pairs) in enumerate(zip(keep, rows, strict=True)):
        columns = [i for i in range(len(pairs)) if kept[i]]
        got = pairs_of(chosen, row)
        assert [path_tokens(got, i) for i in range(len(got))] == [path_tokens(pairs, i) for i in columns]
        assert chosen.depths[row, : len(got)].tolist() == depths([parent for _, parent in got])
        assert chosen.path_log_probs[row, : len(got)].tolist() == [-i for i in columns]


def test_packing_moves_the_padding_to_the_right_and_changes_nothing_else() -> None:
    # Row 0 skips a column in the first layer and row 1 skips the second layer, as rows of a batch do.
    tree = DraftTree.from_roots(torch.tensor([7, 8]))
    first = torch.tensor([[True, False], [True, True]])
    tree = tree.with_layer(torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2).long(), -torch.ones(2, 2), first)
    second = torch.tensor([[True], [False]])
    tree = tree.with_layer(torch.tensor([[5], [6]]), torch.tensor([[1], [1]]), -torch.ones(2, 1), second)
    packed = tree.packed()
    assert [pairs_of(packed, row) for row in range(2)] == [[(7, -1), (1, 0), (5, 1)], [(8, -1), (3, 0), (4, 0)]]
    assert (tree.size, packed.size) == (4, 3)
    assert_padding_is_blank(packed)
    assert packed.packed() is packed


def test_the_best_chain_follows_the_best_child_of_each_node() -> None:
    assert worked_tree().best_chain().tolist() == [[0, 2, 0]]
    # Node 1 beats node 2 at the root, although node 2 leads deeper.
    greedy = tree_of([(0, -1), (1, 0), (2, 0), (3, 2)])
    assert greedy.best_chain().tolist() == [[1]]
    assert DraftTree.from_roots(torch.tensor([7])).best_chain().shape == (1, 0)


def docs_section() -> str:
    return DOCS.read_text(encoding="utf-8").split("## A worked tree")[1]


def test_the_docs_work_the_same_example_as_the_literals() -> None:
    section = docs_section()
    settings = re.search(r"`N = (\d+)`, `K = (\d+)`, `mu = ([\d.]+)`", section)
    assert settings
    assert tuple(map(float, settings.groups())) == (WORKED_NODE_BUDGET, WORKED_TOP_K, WORKED_MU)
    rows = re.findall(r"^\| (root|[A-D]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    told = {tuple(map(LETTERS.index, name.replace("root", ""))): [*map(float, probs)] for name, *probs in rows}
    assert told == WORKED_PROBS


def test_the_docs_draw_the_same_tree_and_mask_as_the_literals() -> None:
    block = docs_section().split("```text\n")[1].split("```")[0].splitlines()
    picture, table = zip(*((line[:24].rstrip(), line[24:]) for line in block), strict=True)
    assert "\n".join(picture).rstrip() == WORKED_PICTURE
    fields = [line.split() for line in table[1:]]
    assert [int(line[0]) for line in fields] == [int(line[5]) for line in fields] == [0, 1, 2, 3, 4, 5]
    assert [LETTERS.index(line[1]) for line in fields] == WORKED_TOKENS
    assert [int(line[2]) for line in fields] == WORKED_PARENTS
    assert [int(line[3]) for line in fields] == WORKED_DEPTHS
    assert [float(line[4]) for line in fields] == WORKED_PATH_PROBS
    assert [[int(seen) for seen in line[6:]] for line in fields] == WORKED_MASK
