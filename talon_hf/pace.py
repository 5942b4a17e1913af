"""The pace of a batch: each row at its own, or all rows in lockstep.

Rows that advance at their own pace keep all that their trees give them, and what is asked about a token (processors,
stopping criteria) is asked about one row at a time. That equals plain `generate` only for what treats every row alike.
Anything else, a user's own above all, must be called as plain decoding calls it: once a column, with all rows at one
length. In lockstep the rows of a batch advance together, as far as the least of their trees reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList

from .compat import known_classes, processor_for_row

# Processors that never look at the prefix: one call serves all rows, whatever their lengths.
PREFIX_FREE = known_classes(
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization",
)  # fmt: skip
# Processors that treat each row by its own prefix, once `processor_for_row` has narrowed them to it.
ROW_BY_ROW = known_classes(
    "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor", "WatermarkLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)  # fmt: skip
# The first ends all rows at one length. The others end single rows, which plain decoding pads behind an end token's
# criterion; without one it lets them talk on until the last row has ended.
ENDS_TOGETHER = known_classes("MaxLengthCriteria")
ENDS_ALONE = known_classes("EosTokenCriteria", "StopStringCriteria", "MaxTimeCriteria")


def must_keep_step(processors: LogitsProcessorList, criteria: StoppingCriteriaList, rows: int) -> bool:
    """Whether plain `generate`'s text takes lockstep: rows at their own pace would be asked about otherwise.

    What this package does not know for certain (a user's own, a subclass, a class of a newer transformers) takes it.

    Args:
        processors, criteria: as `generate` prepared them.
        rows: batch size B.
    """
    if rows == 1:
        return False
    return not (all(_serves_single_rows(p, rows) for p in processors) and _ask_about_single_rows(criteria))


def _serves_single_rows(processor: Any, rows: int) -> bool:
    if type(processor) in PREFIX_FREE:
        return True
    return type(processor) in ROW_BY_ROW and processor_for_row(processor, 0, rows) is not None


def _ask_about_single_rows(criteria: Sequence[Any]) -> bool:
    allowed = ENDS_TOGETHER | ENDS_ALONE if pads_finished_rows(criteria) else ENDS_TOGETHER
    return all(type(criterion) in allowed for criterion in criteria)


def pads_finished_rows(criteria: Sequence[Any]) -> bool:
    """Whether plain `generate` pads a finished row while others go on: it does if a criterion has an end token."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)
