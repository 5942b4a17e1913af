"""The draft tree: one batch of token trees, stored as parent pointers.

Shapes: B rows, n nodes. Column 0 is the root of every row: the last committed token, not yet in the target's cache.
A row with fewer nodes than the widest row is padded on the right; padding is not `valid` and attends only to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Token trees of B rows, as parent pointers in an order that puts parents before children.

    Attributes:
        tokens: (B, n) int64, target vocabulary ids.
        parents: (B, n) int64, column of the parent; -1 for the root and for padding; `parents[b, i] < i`.
        depths: (B, n) int64, 0 for the root and for padding.
        path_log_probs: (B, n) float32, sum of the draft log-probs from the root; 0 for the root, -inf for padding.
        valid: (B, n) bool, False for padding.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    path_log_probs: Tensor
    valid: Tensor

    @classmethod
    def from_roots(cls, tokens: Tensor) -> DraftTree:
        """Trees of one node each. `tokens`: (B,) int64, the last committed token of every row."""
        roots = tokens.reshape(-1, 1)
        zeros = torch.zeros_like(roots)
        return cls(roots, zeros - 1, zeros, zeros.to(torch.float32), zeros == 0)

    @property
    def size(self) -> int:
        """Number of columns n, padding included."""
        return self.tokens.shape[1]

    def counts(self) -> Tensor:
        """(B,) int64: nodes in each row, the root included."""
        return self.valid.sum(dim=1)

    def with_layer(self, tokens: Tensor, parents: Tensor, path_log_probs: Tensor, valid: Tensor) -> DraftTree:
        """The tree with one more layer of W columns on its right; every argument is (B, W), `parents` are columns."""
        parents = torch.where(valid, parents, -1)
        depths = torch.where(valid, self.depths.gather(1, parents.clamp(min=0)) + 1, 0)
        scores = torch.where(valid, path_log_probs, -torch.inf)
        return DraftTree(
            torch.cat([self.tokens, tokens], dim=1),
            torch.cat([self.parents, parents], dim=1),
            torch.cat([self.depths, depths], dim=1),
            torch.cat([self.path_log_probs, scores], dim=1),
            torch.cat([self.valid, valid], dim=1),
        )

    def select(self, keep: Tensor) -> DraftTree:
        """The subtree of the nodes in `keep` (B, n) bool, which must hold the parent of every node that it holds.

        Kept nodes move left, in order; rows are padded to the widest.
        """
        keep = keep & self.valid
        if bool(keep.all()):
            return self
        width = int(keep.sum(dim=1).max())
        order = torch.argsort(keep.logical_not().to(torch.uint8), dim=1, stable=True)[:, :width]
        new_column = keep.cumsum(dim=1) - 1
        valid = keep.gather(1, order)
        old_parents = self.parents.gather(1, order)
        parents = torch.where(old_parents >= 0, new_column.gather(1, old_parents.clamp(min=0)), -1)
        return DraftTree(
            torch.where(valid, self.tokens.gather(1, order), 0),
            torch.where(valid, parents, -1),
            torch.where(valid, self.depths.gather(1, order), 0),
            torch.where(valid, self.path_log_probs.gather(1, order), -torch.inf),
            valid,
        )

    def with_chains(self, rows: Sequence[int], token: int) -> DraftTree:
        """The same trees, but those of `rows` are chains of `token`, as deep as the deepest tree."""
        if not rows:
            return self
        columns = torch.arange(self.size, device=self.tokens.device)
        valid = columns <= self.depths.max()
        chain = (
            torch.full_like(columns, token), torch.where(valid, columns - 1, -1), torch.where(valid, columns, 0),
            torch.where(valid, 0.0, -torch.inf), valid,
        )  # fmt: skip
        parts = [part.clone() for part in (self.tokens, self.parents, self.depths, self.path_log_probs, self.valid)]
        for part, values in zip(parts, chain, strict=True):
            part[rows] = values
        parts[0][rows, 0] = self.tokens[rows, 0]
        return DraftTree(*parts)

    def packed(self) -> DraftTree:
        """The same trees with all padding on the right, as narrow as the widest row allows."""
        return self.select(self.valid)

    def best_chain(self) -> Tensor:
        """(1, gamma) int64: from the root of a single tree, always the best child, down to a leaf."""
        tokens, node = [], 0
        while bool((below := self.parents[0] == node).any()):
            node = int(self.path_log_probs[0].where(below, -torch.inf).argmax())
            tokens.append(self.tokens[0, node])
        return torch.stack(tokens).unsqueeze(0) if tokens else self.tokens[:, :0]

    def mask(self) -> Tensor:
        """(B, n, n) bool: `mask[b, i, j]` says that node j is node i or one of its ancestors.

        A node's row is its parent's row and itself, so columns are filled in order, one layer of the tree at a time.
        """
        rows, n = self.tokens.shape
        mask = torch.eye(n, dtype=torch.bool, device=self.tokens.device).repeat(rows, 1, 1)
        above = self.parents
        for _ in range(int(self.depths.max())):
            reached = above >= 0
            column = above.clamp(min=0)
            mask.scatter_(2, column.unsqueeze(2), mask.gather(2, column.unsqueeze(2)) | reached.unsqueeze(2))
            above = torch.where(reached, self.parents.gather(1, column), -1)
        return mask
