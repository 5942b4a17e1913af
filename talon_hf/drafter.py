"""The Drafter protocol: what proposes tokens, and what it is told about the target's text.

A `Drafter` is what the user passes as `assistant_model`; it is shared and never changed by a call. `open` gives a
`DraftSession`, which holds one call's state (its key-value cache, its draft step count).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class FeatureSpec:
    """What of the target's forward a drafter reads.

    Attributes:
        boundaries: layer boundaries b, in the order of concatenation. Boundary b is the input of decoder layer b,
            before any norm of that layer (EAGLE-3 reads the inputs of layers 2, L//2 and L-3).
        embeddings: whether it can read a prompt that was given as embeddings (`Commit.embeddings`). One that cannot
            is told nothing of such a prompt, and begins at the first generated token.
    """

    boundaries: tuple[int, ...] = ()
    embeddings: bool = False


@dataclass(frozen=True)
class Commit:
    """Positions that the target has just committed, in order.

    Attributes:
        tokens: (B, m) int64, the tokens at those positions: the prompt, or the old root and the accepted tokens; -1
            where the target read an embedding that is no known token's (only with `embeddings`).
        features: (B, m, F) in the target's dtype, the target's features at those positions, F = sum of the widths.
        positions: (B, m) int64, position ids.
        valid: (B, m) bool, False for padding (left of a prompt, right of a round's commit).
        roots: (B,) int64, the token that follows the last valid position: committed, not yet in any cache.
        embeddings: (B, e, h) with e <= m, what the target read at the first e positions in the place of its own
            embeddings of tokens; None where it read tokens.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    valid: Tensor
    roots: Tensor
    embeddings: Tensor | None = None

    def with_roots(self, roots: Tensor) -> Commit:
        """The same positions, followed by `roots` (B,)."""
        return replace(self, roots=roots)

    def then(self, later: Commit) -> Commit:
        """Both commits of one row, in order."""
        parts = zip(
            (self.tokens, self.features, self.positions, self.valid),
            (later.tokens, later.features, later.positions, later.valid),
            strict=True,
        )
        tokens, features, positions, valid = (torch.cat(pair, dim=1) for pair in parts)
        # Only a prompt is given as embeddings, and nothing comes before it.
        return Commit(tokens, features, positions, valid, later.roots, self.embeddings)

    def select_rows(self, rows: list[int]) -> Commit:
        """Some rows of the batch."""
        embeddings = None if self.embeddings is None else self.embeddings[rows]
        kept = (part[rows] for part in (self.tokens, self.features, self.positions, self.valid))
        tokens, features, positions, valid = kept
        return Commit(tokens, features, positions, valid, self.roots[rows], embeddings)

    def for_tokens(self) -> Commit:
        """The same for a drafter that reads tokens alone, to which a prompt without any is one column of padding."""
        if not bool((self.tokens < 0).any()):
            return replace(self, embeddings=None)
        last = slice(self.tokens.shape[1] - 1, None)
        parts = (self.tokens, self.features, self.positions, self.valid)
        tokens, features, positions, valid = (part[:, last] for part in parts)
        return Commit(torch.zeros_like(tokens), features, positions, torch.zeros_like(valid), self.roots)


class DraftSession(Protocol):
    """One call's drafting state. Shapes: B rows, W frontier nodes, Vd draft tokens.

    A returned cache holds it for the next turn, and a deep copy of that cache deep-copies it, but for the modules that
    it reaches: those are shared.
    """

    draft_ids: Tensor | None  # (Vd,) int64 target id of each draft id; None when they are the same
    max_depth: int | None  # deepest node it can draft; None for no limit
    steps: int  # draft steps so far

    def begin(self, commit: Commit) -> Tensor:
        """Reads the commit; returns (B, Vd) float32 log-probs of the roots' children."""

    def extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
        """Forwards a frontier; returns (B, W, Vd) float32 log-probs of its nodes' children.

        Args:
            tokens: (B, W) int64 target ids.
            parents: (B, W) int64, each node's parent as a column of the previous `extend`; all 0 in the first, whose
                nodes are children of the root.
            valid: (B, W) bool, False for padding.
        """

    def end(self) -> None:
        """Forgets the tree, keeps what `begin` read."""

    def select_rows(self, rows: list[int]) -> None:
        """Keeps some rows of the batch, in that order."""


@runtime_checkable
class StoredSession(Protocol):
    """A session whose state can be written to a file; any other one is opened anew after unpickling."""

    def state(self) -> dict[int, tuple[Tensor, Tensor]]:
        """What `begin` has read, as tensors of its own: by layer, keys and values."""

    def restore(self, state: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Takes over the `state` of another session of this drafter; nothing has been read before."""


@runtime_checkable
class Drafter(Protocol):
    """What `assistant_model` may be. `EagleDraft` is one."""

    def features_of(self, target: PreTrainedModel) -> FeatureSpec:
        """What the drafter reads of this target's forward. Raises ValueError if the two don't fit."""

    def open(self, target: PreTrainedModel, rows: int) -> DraftSession:
        """A session for a batch of `rows` prompts of this target."""
