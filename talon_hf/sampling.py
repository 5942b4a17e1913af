"""Picker: the next token at a node, chosen exactly as plain `generate` chooses it.

The processors are those that `generate` prepared, called with the node's own prefix; a sampled token is one draw of
`torch.multinomial` from the softmax of the processed scores, so batch 1 uses the generator as plain `generate` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessorList


class Picker:
    """Applies processors and draws.

    Args:
        processors: `generate`'s list, warpers included.
        do_sample: draw from the processed distribution, or take its argmax.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool) -> None:
        self.processors = processors
        self.do_sample = do_sample

    @property
    def is_plain_argmax(self) -> bool:
        """Whether a token depends on its logits row alone, as their argmax."""
        return not self.do_sample and len(self.processors) == 0

    def scores(self, prefixes: Sequence[Tensor], logits: Tensor) -> Tensor:
        """(R, V) float32 processed scores of R nodes.

        Args:
            prefixes: R tensors (1, length), the ids in front of each node's next token.
            logits: (R, V), the target's rows at those nodes.
        """
        # Processors may write into their input, and plain `generate` hands them float32 whatever the model's dtype.
        raw = logits.to(device=prefixes[0].device, dtype=torch.float32, copy=True)
        if len(self.processors) == 0:
            return raw
        lengths = {prefix.shape[1] for prefix in prefixes}
        if len(lengths) == 1:
            return self._process(torch.cat(list(prefixes)), raw)
        return torch.cat([self._process(ids, raw[i : i + 1]) for i, ids in enumerate(prefixes)])

    def _process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.processors(cast(LongTensor, input_ids), cast(FloatTensor, scores))

    def draw(self, scores: Tensor) -> Tensor:
        """(R,) int64 tokens from processed scores (R, V)."""
        if not self.do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
