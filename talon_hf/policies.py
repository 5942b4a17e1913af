"""Tree policies: which nodes a draft tree gets.

A policy sees rows of draft log-probs and parent pointers, never hidden states. All path log-probs are float32, and
every choice is ordered by (path log-prob, then lower parent, then lower draft id), so equal scores give one tree.
Shapes: B rows, W frontier nodes, Vd draft tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .tree import DraftTree


class LogProbSource(Protocol):
    """What a policy asks for log-probs; `candidates.py` answers with the drafter."""

    def begin(self) -> Tensor:
        """(B, Vd) float32 log-probs of the roots' children."""

    def extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
        """(B, W, Vd) float32 log-probs below a frontier (see `DraftSession.extend`)."""

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""


class TreePolicy(Protocol):
    """Grows one draft tree a row."""

    def grow(self, source: LogProbSource, roots: Tensor, depth_limits: Tensor) -> DraftTree:
        """A tree per row, rooted at `roots` (B,), no node deeper than `depth_limits` (B,) int64; 0: only the root."""


@dataclass(frozen=True)
class TalonPolicy:
    """Confidence-gated growth under a node budget: TALON, Algorithm 2.

    Attributes:
        node_budget: N, the root included.
        top_k: K, nodes of a top-K layer.
        mu: the gate; a candidate stays if p(path) >= mu * anchor, the best p(path) of its pool.
        top_k_layers: layers filled by top K before the gate decides (the paper's k, 1).
    """

    node_budget: int
    top_k: int
    mu: float
    top_k_layers: int = 1

    def grow(self, source: LogProbSource, roots: Tensor, depth_limits: Tensor) -> DraftTree:
        """Layers of gated candidates until the budget is spent; no rerank, every node is kept (Algorithm 2)."""
        tree = DraftTree.from_roots(roots)
        frontier = _Frontier.of_roots(roots)
        while True:
            depth = frontier.depth + 1
            room = torch.where(depth_limits >= depth, self.node_budget - tree.counts(), 0)
            alive = frontier.valid & (room > 0).unsqueeze(1)
            if not bool(alive.any()):
                break
            pool = frontier.pool(source, alive)
            if depth <= self.top_k_layers:
                room = room.clamp(max=self.top_k)
                bound = _kth_best(pool.flatten(1), self.top_k)
            else:
                bound = pool.flatten(1).amax(dim=1) + math.log(self.mu)
            columns, valid = _best(pool.flatten(1), bound, room)
            if not bool(valid.any()):
                break
            tree, frontier = frontier.add_layer(tree, pool, columns, valid, source)
        return tree.packed()


@dataclass(frozen=True)
class EaglePolicy:
    """Fixed-depth top-K expansion, then a rerank to the budget: EAGLE-2 section 4 (EAGLE-3 keeps it).

    Attributes:
        node_budget: N, the root included.
        top_k: K, nodes expanded a layer, and children a node.
        depth: D, expansions after the first layer; the tree has D + 1 layers.
    """

    node_budget: int
    top_k: int
    depth: int

    def grow(self, source: LogProbSource, roots: Tensor, depth_limits: Tensor) -> DraftTree:
        """K + D * K * K candidates; the best N - 1 of all stay, parents before children (EAGLE-2, 4.1 and 4.2)."""
        tree = DraftTree.from_roots(roots)
        frontier = _Frontier.of_roots(roots)
        while frontier.depth <= self.depth:
            alive = frontier.valid & (depth_limits > frontier.depth).unsqueeze(1)
            if not bool(alive.any()):
                break
            pool = frontier.pool(source, alive)
            rows, width, vocabulary = pool.shape
            each = pool.flatten(0, 1)
            columns, valid = _best(each, _kth_best(each, self.top_k), _filled(self.top_k, each))
            if not bool(valid.any()):
                break
            offsets = torch.arange(width, device=pool.device).view(1, width, 1) * vocabulary
            columns = (columns.view(rows, width, -1) + offsets).flatten(1)
            tree, layer = frontier.add_layer(tree, pool, columns, valid.view(rows, width, -1).flatten(1), source)
            frontier = layer.narrowed(self.top_k)
        return tree.select(_rerank(tree, self.node_budget))


@dataclass(frozen=True)
class ChainPolicy:
    """The drafter's greedy continuation: plain speculative decoding's draft.

    Attributes:
        node_budget: N, the root included.
        length: tokens drafted a round (gamma).
    """

    node_budget: int
    length: int

    def grow(self, source: LogProbSource, roots: Tensor, depth_limits: Tensor) -> DraftTree:
        """One best child a node, `length` times."""
        tree = DraftTree.from_roots(roots)
        frontier = _Frontier.of_roots(roots)
        limits = depth_limits.clamp(max=min(self.length, self.node_budget - 1))
        while True:
            alive = frontier.valid & (limits > frontier.depth).unsqueeze(1)
            if not bool(alive.any()):
                break
            pool = frontier.pool(source, alive)
            columns, valid = _best(pool.flatten(1), pool.flatten(1).amax(dim=1), torch.ones_like(limits))
            if not bool(valid.any()):
                break
            tree, frontier = frontier.add_layer(tree, pool, columns, valid, source)
        return tree.packed()


@dataclass(frozen=True)
class _Frontier:
    """The newest layer that may be forwarded; every tensor is (B, W).

    `nodes` are the layer's columns in the tree, `slots` the parents' columns in the drafter's previous forward.
    """

    depth: int
    nodes: Tensor
    slots: Tensor
    tokens: Tensor
    path_log_probs: Tensor
    valid: Tensor

    @classmethod
    def of_roots(cls, roots: Tensor) -> _Frontier:
        tokens = roots.reshape(-1, 1)
        zeros = torch.zeros_like(tokens)
        return cls(0, zeros, zeros, tokens, zeros.to(torch.float32), zeros == 0)

    def pool(self, source: LogProbSource, alive: Tensor) -> Tensor:
        """(B, W, Vd) path log-probs of all candidates: the paper's S_d. -inf is no candidate.

        One draft step. A node whose log-probs hold a NaN or a +inf has no candidates: broken drafts are none.
        """
        log_probs = source.begin().unsqueeze(1) if self.depth == 0 else source.extend(self.tokens, self.slots, alive)
        # A NaN propagates through amax and fails the comparison, as does +inf.
        broken = ~(log_probs.amax(dim=2) < torch.inf) | ~alive
        start = torch.where(broken, -torch.inf, self.path_log_probs)
        # Scores above 0 are no log-probs; they would lift a child over its parent.
        pool = start.unsqueeze(2) + log_probs.clamp(max=0.0)
        return pool.masked_fill_(broken.unsqueeze(2), -torch.inf) if bool(broken.any()) else pool

    def add_layer(
        self, tree: DraftTree, pool: Tensor, columns: Tensor, valid: Tensor, source: LogProbSource
    ) -> tuple[DraftTree, _Frontier]:
        """The tree with the candidates `columns` (B, W') of the flattened pool, and the frontier that they make."""
        slots = columns // pool.shape[2]
        tokens = source.token_ids(columns % pool.shape[2])
        scores = torch.where(valid, pool.flatten(1).gather(1, columns), -torch.inf)
        nodes = torch.arange(tree.size, tree.size + columns.shape[1], device=columns.device).expand_as(columns)
        grown = tree.with_layer(tokens, self.nodes.gather(1, slots), scores, valid)
        return grown, _Frontier(self.depth + 1, nodes, slots, tokens, scores, valid)

    def narrowed(self, width: int) -> _Frontier:
        """The best `width` nodes of each row, best first."""
        scores = self.path_log_probs
        columns, valid = _best(scores, _kth_best(scores, width), _filled(width, scores))
        nodes, slots, tokens = (t.gather(1, columns) for t in (self.nodes, self.slots, self.tokens))
        return _Frontier(self.depth, nodes, slots, tokens, scores.gather(1, columns), valid)


def _filled(count: int, scores: Tensor) -> Tensor:
    """(R,) int64, `count` for each row of `scores` (R, M)."""
    return torch.full(scores.shape[:1], count, dtype=torch.int64, device=scores.device)


def _kth_best(scores: Tensor, k: int) -> Tensor:
    """(R,) the k-th largest of each row of `scores` (R, M), or the smallest where M < k."""
    return scores.topk(min(k, scores.shape[1]), dim=1).values[:, -1]


def _best(scores: Tensor, at_least: Tensor, at_most: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of the best finite scores of each row, best first, equal scores by column.

    Args:
        scores: (R, M) float32.
        at_least: (R,) float32, inclusive lower bound.
        at_most: (R,) int64, how many a row may take.

    Returns:
        columns (R, W) int64 and valid (R, W) bool, W being the most that a row took.
    """
    rows, columns = ((scores >= at_least.unsqueeze(1)) & (scores > -torch.inf)).nonzero(as_tuple=True)
    order = scores[rows, columns].argsort(descending=True, stable=True)
    if scores.shape[0] > 1:
        order = order[rows[order].argsort(stable=True)]
    found = torch.bincount(rows, minlength=scores.shape[0])
    taken = torch.minimum(found, at_most)
    rank = torch.arange(int(taken.max()), device=scores.device)
    first = (found.cumsum(0) - found).unsqueeze(1)
    valid = rank < taken.unsqueeze(1)
    picked = columns[order[torch.where(valid, first + rank, 0)]] if len(order) else first + rank
    return torch.where(valid, picked, 0), valid


def _rerank(tree: DraftTree, node_budget: int) -> Tensor:
    """(B, n) bool: the root and the best `node_budget` - 1 other nodes; a stable order keeps parents with children.

    A child's path log-prob is at most its parent's and its column is larger, so it never outranks its parent.
    """
    ranks = tree.path_log_probs.masked_fill(tree.depths == 0, torch.inf).where(tree.valid, -torch.inf)
    order = ranks.argsort(dim=1, descending=True, stable=True)[:, :node_budget]
    return torch.zeros_like(tree.valid).scatter_(1, order, True) & tree.valid
