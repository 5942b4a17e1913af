"""Naive references, written from the equations alone: slow, plain, and independent of the code they judge.

Nothing here imports talon_hf. A tree is a list whose entries start with (token, parent); entry 0 is the root,
its parent is -1, and a parent comes before its children. A path is the tuple of draft ids below the root.
A table maps a path to the fp32 log-probs of the next draft token.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

Path = tuple[int, ...]
Table = Callable[[Path], Sequence[float]]
Tree = Sequence[Sequence[Any]]
Outcome = TypeVar("Outcome")

# Pearson's statistic follows the chi-square law only where every cell expects at least this many counts.
SMALLEST_EXPECTED_COUNT = 5.0


class Node(NamedTuple):
    token: int
    parent: int
    depth: int
    path_log_prob: float  # an fp32 value, held exactly in a Python float


class Grown(NamedTuple):
    nodes: list[Node]
    draft_steps: int


def ancestors(parents: Sequence[int], i: int) -> list[int]:
    """The nodes above node i, nearest first, the root last."""
    found = []
    while parents[i] != -1:
        i = parents[i]
        found.append(i)
    return found


def depths(parents: Sequence[int]) -> list[int]:
    return [len(ancestors(parents, i)) for i in range(len(parents))]


def tree_mask(parents: Sequence[int]) -> list[list[bool]]:
    """mask[i][j]: node i may attend to node j, which is i itself or one of its ancestors."""
    n = len(parents)
    mask = [[False] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            mask[i][j] = i == j or j in ancestors(parents, i)
    return mask


def path_tokens(tree: Tree, i: int) -> Path:
    """The tokens from below the root down to node i."""
    line = [*reversed(ancestors([node[1] for node in tree], i)), i]
    return tuple(tree[j][0] for j in line[1:])


def add_fp32(a: float, b: float) -> float:
    """a + b rounded once to fp32, as a float32 tensor adds them."""
    return float(np.float32(a) + np.float32(b))


def children_pool(table: Table, nodes: list[Node], parent: int) -> list[Node]:
    """Every possible child of `parent`, by draft id; a row that holds a NaN proposes nothing."""
    row = table(path_tokens(nodes, parent))
    if any(math.isnan(log_prob) for log_prob in row):
        return []
    pool = []
    for token, log_prob in enumerate(row):
        path_log_prob = add_fp32(nodes[parent].path_log_prob, log_prob)
        if math.isfinite(log_prob) and math.isfinite(path_log_prob):
            pool.append(Node(token, parent, nodes[parent].depth + 1, path_log_prob))
    return pool


def best_first(nodes: list[Node]) -> list[Node]:
    """The one order of every policy: higher path log-prob, then lower parent, then lower draft id."""
    return sorted(nodes, key=lambda node: (-node.path_log_prob, node.parent, node.token))


def grow_talon(
    table: Table,
    root: int,
    node_budget: int,
    top_k: int,
    mu: float,
    top_k_layers: int = 1,
    depth_limit: int | None = None,
) -> Grown:
    """TALON, Algorithm 2. The gate is fp32(log mu) + anchor, added in fp32; node_budget counts the root."""
    tree = [Node(root, -1, 0, 0.0)]
    frontier, depth = [0], 0
    while len(tree) < node_budget and frontier and (depth_limit is None or depth < depth_limit):
        pool = best_first([child for v in frontier for child in children_pool(table, tree, v)])
        if depth < top_k_layers:
            layer = pool[:top_k]
        elif pool:
            gate = add_fp32(math.log(mu), pool[0].path_log_prob)
            layer = [child for child in pool if child.path_log_prob >= gate]
        else:
            layer = []
        layer = layer[: node_budget - len(tree)]
        frontier = list(range(len(tree), len(tree) + len(layer)))
        tree += layer
        depth += 1
    return Grown(tree, draft_steps=depth)


def grow_eagle(
    table: Table,
    root: int,
    node_budget: int,
    top_k: int,
    depth: int,
    depth_limit: int | None = None,
) -> Grown:
    """EAGLE-2/3: top_k children for each of top_k frontier nodes, `depth` times after the first layer; then rerank.

    A budget of one node needs no draft step at all.
    """
    nodes = [Node(root, -1, 0, 0.0)]
    frontier, draft_steps = [0], 0
    layers = depth + 1 if depth_limit is None else min(depth + 1, depth_limit)
    while draft_steps < layers and frontier and node_budget > 1:
        draft_steps += 1
        layer = [child for v in frontier for child in best_first(children_pool(table, nodes, v))[:top_k]]
        numbers = range(len(nodes), len(nodes) + len(layer))
        nodes += layer
        frontier = sorted(numbers, key=lambda i: (-nodes[i].path_log_prob, i))[:top_k]
    return Grown(rerank(nodes, node_budget), draft_steps)


def rerank(nodes: list[Node], node_budget: int) -> list[Node]:
    """The root and the node_budget - 1 best nodes of all, in node order, parents renumbered."""
    ranked = sorted(range(1, len(nodes)), key=lambda i: (-nodes[i].path_log_prob, i))
    kept = [0, *sorted(ranked[: node_budget - 1])]
    new_index = {old: new for new, old in enumerate(kept)}
    new_index[-1] = -1
    return [nodes[i]._replace(parent=new_index[nodes[i].parent]) for i in kept]


def grow_chain(table: Table, root: int, length: int, node_budget: int, depth_limit: int | None = None) -> Grown:
    """The greedy continuation, one token a draft step."""
    chain = [Node(root, -1, 0, 0.0)]
    longest = min(length, node_budget - 1) if depth_limit is None else min(length, node_budget - 1, depth_limit)
    draft_steps = 0
    while draft_steps < longest and len(chain) == draft_steps + 1:
        chain += best_first(children_pool(table, chain, len(chain) - 1))[:1]
        draft_steps += 1
    return Grown(chain, draft_steps)


def children_of(tree: Tree, v: int) -> list[int]:
    return [i for i in range(len(tree)) if tree[i][1] == v]


def walk_match(tree: Tree, draws: Sequence[int]) -> tuple[list[int], int]:
    """Sample-then-match: draws[v] is the target's token after node v. Returns (accepted path, bonus token)."""
    path: list[int] = []
    v = 0
    while True:
        matching = [child for child in children_of(tree, v) if tree[child][0] == draws[v]]
        if not matching:
            return path, draws[v]
        v = matching[0]
        path.append(v)


def greedy_rows(tree: Tree, draws: Sequence[int]) -> tuple[list[int], int]:
    """The same result by search: over all root-to-leaf rows, the longest prefix that the target would have said."""
    best: list[int] = []
    for leaf in range(len(tree)):
        if children_of(tree, leaf):
            continue
        row = [*reversed(ancestors([node[1] for node in tree], leaf)), leaf]
        matched = 0
        while matched + 1 < len(row) and tree[row[matched + 1]][0] == draws[row[matched]]:
            matched += 1
        if matched > len(best):
            best = row[1 : matched + 1]
    return best, draws[best[-1] if best else 0]


def residual_accept(p_rows: Sequence[Sequence[float]], tree: Tree, uniforms: Iterator[float]) -> tuple[list[int], int]:
    """EAGLE's rule. p_rows[v] is the target's law after node v; uniforms are in [0, 1).

    One uniform for every child tried, in node order, and one for the bonus token. Returns (accepted path, bonus).
    """
    path: list[int] = []
    v = 0
    while True:
        p = normalised(p_rows[v])
        accepted = None
        for child in children_of(tree, v):
            token = tree[child][0]
            # Strict, so that a uniform of exactly 0 never accepts a token of probability 0.
            if next(uniforms) < p[token]:
                accepted = child
                break
            p[token] = 0.0
            p = normalised(p)
        if accepted is None:
            return path, inverse_cdf(p, next(uniforms))
        path.append(accepted)
        v = accepted


def residual_law(p: Sequence[Any], children: Sequence[int]) -> list[Any]:
    """The law of the next token under EAGLE's rule at one node, branch by branch; exact when p holds Fractions."""
    law, p, reached = [0 * x for x in p], list(p), 1
    for token in children:
        law[token] += reached * p[token]
        reached *= 1 - p[token]
        p[token] = 0
        if sum(p) == 0:
            return law
        p = normalised(p)
    return [so_far + reached * x for so_far, x in zip(law, p, strict=True)]


def normalised(weights: Sequence[Any]) -> list[Any]:
    total = sum(weights)
    return [weight / total for weight in weights]


def inverse_cdf(p: Sequence[float], uniform: float) -> int:
    """The first token whose cumulative probability exceeds `uniform`; rounding falls to the last possible token."""
    cumulative, last_possible = 0.0, -1
    for token, prob in enumerate(p):
        cumulative += prob
        if prob > 0:
            last_possible = token
            if uniform < cumulative:
                return token
    return last_possible


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    return normalised([math.exp(score - top) for score in scores])


def enumerate_law(
    table: Table,
    length: int,
    process: Callable[[Path, Sequence[float]], Sequence[float]] | None = None,
) -> dict[Path, float]:
    """The exact law of the next `length` tokens, impossible sequences included with probability 0.

    `process(prefix, scores)` stands for the logits processors: it sees the tokens so far and returns new scores.
    """
    law: dict[Path, float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for prefix, prob in law.items():
            scores = table(prefix) if process is None else process(prefix, table(prefix))
            for token, token_prob in enumerate(softmax(scores)):
                longer[(*prefix, token)] = prob * token_prob
        law = longer
    return law


def chi_square(counts: Mapping[Outcome, int], expected_probs: Mapping[Outcome, float], n: int) -> float:
    """The p-value of n observed outcomes under the expected law (Pearson's test).

    Cells that expect fewer than five counts are pooled into one; if even the pool expects fewer, it joins the
    smallest other cell. An outcome that the law forbids gives 0.
    """
    if any(count > 0 and expected_probs.get(outcome, 0.0) == 0.0 for outcome, count in counts.items()):
        return 0.0
    cells = [(n * prob, counts.get(outcome, 0)) for outcome, prob in expected_probs.items() if prob > 0]
    large = sorted(cell for cell in cells if cell[0] >= SMALLEST_EXPECTED_COUNT)
    small = [cell for cell in cells if cell[0] < SMALLEST_EXPECTED_COUNT]
    if small:
        pooled = (sum(expected for expected, _ in small), sum(count for _, count in small))
        if pooled[0] < SMALLEST_EXPECTED_COUNT and large:
            large[0] = (large[0][0] + pooled[0], large[0][1] + pooled[1])
        else:
            large.append(pooled)
    if len(large) < 2:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for expected, count in large)
    half_freedom, half_statistic = (len(large) - 1) / 2, statistic / 2
    return float(
        torch.special.gammaincc(
            torch.tensor(half_freedom, dtype=torch.float64), torch.tensor(half_statistic, dtype=torch.float64)
        )
    )


def total_variation(counts: Mapping[Outcome, int], expected_probs: Mapping[Outcome, float], n: int) -> float:
    """Half the summed absolute difference between observed frequencies and the expected law: 0 equal, 1 disjoint."""
    outcomes = counts.keys() | expected_probs.keys()
    return sum(abs(counts.get(o, 0) / n - expected_probs.get(o, 0.0)) for o in outcomes) / 2


@torch.no_grad()
def vanilla_decode(model: Any, input_ids: torch.Tensor, steps: int) -> list[int]:
    """Greedy decoding with a full forward each step and no cache. input_ids: (1, prompt). Returns the new tokens."""
    ids = input_ids
    for _ in range(steps):
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    return ids[0, input_ids.shape[1] :].tolist()
