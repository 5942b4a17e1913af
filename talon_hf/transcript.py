"""The text of a call: every row's tokens, with what `generate` promises about each one of them.

Rows advance at their own pace, or in lockstep (`pace.py`). Tokens that are appended are streamed, their scores are
recorded and the stopping criteria are asked, in plain `generate`'s order, before the next token is chosen; so a round
can never pass a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from .compat import streams_before_stopping
from .pace import pads_finished_rows


class Transcript:
    """The tokens of B rows.

    Args:
        prompt: (B, L) int64, left padding included: the prefix that processors and stopping criteria see.
        stopping_criteria: asked after every token: about one row at a time, with ids (1, length), or in lockstep about
            all of them, with ids (B, length).
        pad_token_id: fills rows that finish before the last one.
        streamer: gets what plain `generate` would put: one (B,) tensor a step, as soon as all rows have that step.
        keep_scores: record the processed scores of each emitted token.
        keep_logits: record the raw logits of each emitted token.
        lockstep: whether all rows are appended to at once.
    """

    def __init__(
        self,
        prompt: Tensor,
        stopping_criteria: StoppingCriteriaList,
        pad_token_id: int,
        streamer: Any = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        lockstep: bool = False,
    ) -> None:
        rows, self.prompt_length = prompt.shape
        self.lengths = [self.prompt_length] * rows
        self.finished = [False] * rows
        self.lockstep = lockstep
        self._ids = prompt.clone()
        self._stopping_criteria = stopping_criteria
        self._pads_finished = pads_finished_rows(stopping_criteria)
        self.pad = pad_token_id
        self._streamer = streamer
        self._streamed = self.prompt_length
        # Per group of rows that advance together, one (rows of the group, V) tensor a step.
        groups = 1 if lockstep else rows
        self._scores: list[list[Tensor]] | None = [[] for _ in range(groups)] if keep_scores else None
        self._logits: list[list[Tensor]] | None = [[] for _ in range(groups)] if keep_logits else None

    def prefix(self, row: int) -> Tensor:
        """(1, length) int64: everything of a row so far."""
        return self._ids[row : row + 1, : self.lengths[row]]

    def prefixes(self, rows: Sequence[int]) -> list[Tensor]:
        """Everything of the rows so far: R tensors (1, length) int64, or in lockstep one (B, length)."""
        if self.lockstep:
            # Contiguous, since what plain `generate` hands to a user's own processor is.
            return [self._ids[:, : self.lengths[0]].contiguous()]
        return [self.prefix(row) for row in rows]

    def last(self, rows: Sequence[int]) -> Tensor:
        """(R,) int64: the newest token of each of `rows`."""
        return torch.stack([self._ids[row, self.lengths[row] - 1] for row in rows])

    def is_padded(self, row: int) -> bool:
        """Whether a row in lockstep says nothing but padding while others go on, as with plain `generate`."""
        return self.lockstep and self._pads_finished and self.finished[row]

    def has_ended(self, row: int) -> bool:
        """Whether a row gets no further token; in lockstep a finished one goes on until all are."""
        return all(self.finished) if self.lockstep else self.finished[row]

    def append(
        self, rows: Sequence[int], tokens: Sequence[int], scores: Tensor | None = None, logits: Tensor | None = None
    ) -> list[int]:
        """Emits one token of each of R rows, in lockstep of all.

        Args:
            rows, tokens: R of each.
            scores, logits: (R, V) float32, kept if asked for.

        Returns:
            the R tokens as emitted: padding for rows that are padded.
        """
        emitted = [self.pad if self.is_padded(row) else token for row, token in zip(rows, tokens, strict=True)]
        if self.lockstep:
            self._advance(0, rows, emitted, scores, logits)
            return emitted
        for i, row in enumerate(rows):
            parts = [None if steps is None else steps[i : i + 1] for steps in (scores, logits)]
            self._advance(row, [row], emitted[i : i + 1], *parts)
        return emitted

    def _advance(
        self, group: int, rows: Sequence[int], tokens: Sequence[int], scores: Tensor | None, logits: Tensor | None
    ) -> None:
        """Emits one token of each row of a group, all at one length."""
        length = self.lengths[rows[0]]
        if length == self._ids.shape[1]:
            spare = self._ids.new_full((len(self._ids), max(64, length // 2)), self.pad)
            self._ids = torch.cat([self._ids, spare], dim=1)
        for row, token in zip(rows, tokens, strict=True):
            self._ids[row, length] = token
            self.lengths[row] = length + 1
        for kept, step in ((self._scores, scores), (self._logits, logits)):
            if kept is not None and step is not None:
                kept[group].append(step.float())
        if streams_before_stopping():
            self._stream()
        seen = None if self._scores is None else tuple(self._scores[group])
        done = self._stopping_criteria(self.prefixes(rows)[0], seen).tolist()
        for row, is_done in zip(rows, done, strict=True):
            self.finished[row] |= is_done
        if not streams_before_stopping():
            self._stream()

    def _stream(self) -> None:
        """Puts every step that all unfinished rows have reached; finished rows show padding, as in `generate`."""
        if self._streamer is None:
            return
        running = [length for length, done in zip(self.lengths, self.finished, strict=True) if not done]
        for column in range(self._streamed, min(running, default=max(self.lengths))):
            self._streamer.put(self._column(column).cpu())
            self._streamed = column + 1

    def _column(self, column: int) -> Tensor:
        reached = torch.tensor([column < length for length in self.lengths], device=self._ids.device)
        return torch.where(reached, self._ids[:, column], self.pad)

    def close(self) -> None:
        """Ends the stream once every row has finished."""
        if self._streamer is not None:
            self._stream()
            self._streamer.end()

    def sequences(self) -> Tensor:
        """(B, longest) int64: the prompts and their continuations, padded on the right."""
        longest = max(self.lengths)
        columns = torch.arange(longest, device=self._ids.device)
        inside = columns < torch.tensor(self.lengths, device=self._ids.device).unsqueeze(1)
        return torch.where(inside, self._ids[:, :longest], self.pad)

    def scores(self) -> tuple[Tensor, ...] | None:
        """One (B, V) float32 tensor a step; zeros where a row at its own pace had already finished."""
        return _steps(self._scores)

    def logits(self) -> tuple[Tensor, ...] | None:
        """One (B, V) float32 tensor a step; zeros where a row at its own pace had already finished."""
        return _steps(self._logits)


def _steps(groups: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
    if groups is None:
        return None
    longest = max(map(len, groups))
    blank = torch.zeros_like(groups[0][0])
    return tuple(torch.cat([group[t] if t < len(group) else blank for group in groups]) for t in range(longest))
