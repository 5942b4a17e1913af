"""Picker: the next token at a node, chosen exactly as plain `generate` chooses it.

The processors are those that `generate` prepared, called with the node's own prefix, once per emitted token and in its
order, so stateful ones work. A sampled token is one draw of `torch.multinomial` from the softmax of the processed
scores: batch 1 uses the generator as plain `generate` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .compat import processor_for_row

# Processors of transformers that never look at the prefix: one call serves all rows, whatever their lengths.
PREFIX_FREE = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    }
)


class Picker:
    """Applies processors and draws.

    Args:
        processors: `generate`'s list, warpers included.
        do_sample: draw from the processed distribution, or take its argmax.
        rows: batch size. In a batch every row gets processors of its own, as if it were alone.

    Raises:
        ValueError: a batch, and a user's processor that cannot be copied for each row.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, rows: int = 1) -> None:
        self.do_sample = do_sample
        self._ignore_prefix = all(map(_is_prefix_free, processors))
        # Per processor: itself, if one call serves all rows, or one processor a row.
        self._processors: list[Any] = [
            processor
            if rows == 1 or _is_prefix_free(processor)
            else [processor_for_row(processor, row, rows) for row in range(rows)]
            for processor in processors
        ]

    @property
    def is_prefix_free(self) -> bool:
        """Whether scores depend on their logits row alone, so that all nodes can be processed at once."""
        return self._ignore_prefix

    def scores(self, rows: Sequence[int], prefixes: Sequence[Tensor], logits: Tensor) -> Tensor:
        """(R, V) float32 processed scores of R nodes.

        Args:
            rows: the R nodes' rows in the batch.
            prefixes: R tensors (1, length) int64, the ids in front of each node's next token.
            logits: (R, V), the target's logits at those nodes.
        """
        # Processors may write into their input, and plain `generate` hands them float32 whatever the model's dtype.
        scores = logits.to(device=prefixes[0].device, dtype=torch.float32, copy=True)
        for processor in self._processors:
            if isinstance(processor, list):
                each = [
                    _one_row(processor[row], ids, scores[i : i + 1])
                    for i, (row, ids) in enumerate(zip(rows, prefixes, strict=True))
                ]
                scores = torch.cat(each)
            else:
                scores = processor(prefixes[0], scores)
        return scores

    def draw(self, scores: Tensor) -> Tensor:
        """(R,) int64 tokens from processed scores (R, V)."""
        if not self.do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)


def _one_row(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    processed = processor(ids, scores)
    if len(processed) != 1:
        raise ValueError(
            f"The logits processor {type(processor).__name__} was given one row of scores and returned "
            f"{len(processed)}: rows of a batch emit at their own pace, so each is processed alone. Return as many "
            "rows as are given, or generate one prompt at a time."
        )
    return processed


def _is_prefix_free(processor: Any) -> bool:
    return type(processor).__module__.startswith("transformers.") and type(processor).__name__ in PREFIX_FREE
