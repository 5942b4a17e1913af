"""Where two greedy texts of one model part, and whether rounding explains it.

In half precision a forward over several tokens rounds otherwise than one over a single token, so two logits that are
equal but for rounding may change places. How far rounding moves logits, plain decoding shows by itself: its logits at
the place, computed token by token, against those of one forward over the whole text. No tree is involved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Parting:
    """Where another text leaves plain decoding's.

    Attributes:
        at: new tokens that both share.
        gap: plain decoding's score of its own next token less that of the other text's; infinite where one text ends.
        moved: how far plain decoding's logits move there when it reads the text in one piece.
    """

    at: int
    gap: float
    moved: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding can change the two tokens' places: each may move by `moved`."""
        return self.gap <= 2 * self.moved


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(left), len(right)))


@torch.no_grad()
def find_parting(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], plain: Sequence[int], other: Sequence[int]
) -> Parting | None:
    """Where `other` leaves `plain`, both the new tokens of greedy texts of this model; None where it does not.

    Args:
        model: the target.
        inputs: `input_ids` and `attention_mask` (1, L) of the prompt.
        plain: from plain `generate`.
        other: from any other method.
    """
    at = shared(plain, other)
    if at == len(plain) == len(other):
        return None
    if at in (len(plain), len(other)):
        return Parting(at, math.inf, 0.0)
    generator: Any = model
    output = generator.generate(
        **inputs, do_sample=False, max_new_tokens=at + 1, return_dict_in_generate=True, output_scores=True,
        output_logits=True,
    )  # fmt: skip
    scores, logits = output.scores[at][0].float(), output.logits[at][0].float()
    whole = model(input_ids=output.sequences[:, :-1]).logits[0, -1].float()
    return Parting(at, float(scores[plain[at]] - scores[other[at]]), float((whole - logits).abs().max()))
