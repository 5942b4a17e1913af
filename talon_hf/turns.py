"""Turns: what a returned cache remembers, so that the next call reads only what is new.

A conversation passes its cache back with the longer prompt. The target's keys and values are in the cache; the turn
beside them holds the drafter's session and the features that it has not read yet. Where the turn does not fit (another
drafter, another text, a batch), the whole prompt is read again: the text is the same, the first token comes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache import TreeCache
from .drafter import Commit, Drafter, DraftSession


@dataclass
class Turn:
    """The end of a call of one row.

    Attributes:
        tokens: (1, L) int64, the text that the cache covers.
        next_positions: (..., 1) int64, the position ids that follow it.
        drafter: whose session this is.
        session: has read all of the text but `unread`.
        unread: committed positions that the session has not read.
    """

    tokens: Tensor
    next_positions: Tensor
    drafter: Drafter
    session: DraftSession
    unread: Commit


def resumable(cache: Any, drafter: Drafter, input_ids: Tensor, attention_mask: Tensor | None) -> Turn | None:
    """The turn of a passed-back cache if it covers the beginning of `input_ids` (B, L) and this drafter made it.

    A mask (B, L) with a zero never fits: the cache holds no masked column.
    """
    turn = cache.turn if isinstance(cache, TreeCache) else None
    if turn is None or turn.drafter is not drafter or len(input_ids) != 1:
        return None
    if attention_mask is not None and not bool(attention_mask.all()):
        return None
    done = turn.tokens.shape[1]
    if [cache.get_seq_length()] != cache.committed:
        # Somebody else has run the model on this cache since.
        return None
    if done >= input_ids.shape[1] or not torch.equal(turn.tokens, input_ids[:, :done]):
        return None
    return turn
