"""Picker: the next token at a node, chosen exactly as plain `generate` chooses it.

The processors are those that `generate` prepared, called with the node's own prefix, once per emitted token and in its
order, so stateful ones work. A sampled token is one draw of `torch.multinomial` from the softmax of the processed
scores: batch 1, and a batch in lockstep, use the generator as plain `generate` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from .compat import processor_for_row
from .pace import PREFIX_FREE


class Picker:
    """Applies processors and draws.

    Args:
        processors: `generate`'s list, warpers included.
        do_sample: draw from the processed distribution, or take its argmax.
        rows: batch size B.
        lockstep: whether `scores` is always asked for all rows at one length (see `pace.py`); the list is then called
            as it is.
    """

    def __init__(
        self, processors: LogitsProcessorList, do_sample: bool, rows: int = 1, lockstep: bool = False
    ) -> None:
        self.do_sample = do_sample
        self.is_prefix_free = all(type(processor) in PREFIX_FREE for processor in processors)
        self._processors = processors
        # Per processor: itself, if one call serves all rows, or one processor a row.
        self._by_row: list[Any] | None = None
        if rows > 1 and not lockstep:
            self._by_row = [
                p if type(p) in PREFIX_FREE else [processor_for_row(p, row, rows) for row in range(rows)]
                for p in processors
            ]

    def scores(self, rows: Sequence[int], prefixes: Sequence[Tensor], logits: Tensor) -> Tensor:
        """(R, V) float32 processed scores of R nodes.

        Args:
            rows: the R nodes' rows in the batch.
            prefixes: int64 ids in front of the nodes' next tokens: one tensor (R, length) in lockstep, else R tensors
                (1, length).
            logits: (R, V), the target's logits at those nodes.
        """
        # Processors may write into their input, and plain `generate` hands them float32 whatever the model's dtype.
        scores = logits.to(device=prefixes[0].device, dtype=torch.float32, copy=True)
        if self._by_row is None:
            return self._processors(cast(LongTensor, prefixes[0]), scores)
        for processor in self._by_row:
            if isinstance(processor, list):
                each = zip(rows, prefixes, scores.split(1), strict=True)
                scores = torch.cat([processor[row](ids, row_scores) for row, ids, row_scores in each])
            else:
                scores = processor(prefixes[0], scores)
        return scores

    def draw(self, scores: Tensor) -> Tensor:
        """(R,) int64 tokens from processed scores (R, V)."""
        if not self.do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
