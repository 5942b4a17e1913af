"""The text of a call: every row's tokens, with what `generate` promises about each one of them.

Rows advance at their own pace. A token that is appended is streamed, its scores are recorded and the stopping criteria
are asked, in plain `generate`'s order, before the next token of that row is chosen; so a round can never pass a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from .compat import criteria_for_row, streams_before_stopping


class Transcript:
    """The tokens of B rows.

    Args:
        prompt: (B, L) int64, left padding included: the prefix that processors and stopping criteria see.
        stopping_criteria: asked after every token, one row at a time, with ids (1, length). In a batch every row has
            its own copies of the user's.
        pad_token_id: fills rows that finish before the last one.
        streamer: gets what plain `generate` would put: one (B,) tensor a step, as soon as all rows have that step.
        keep_scores: record the processed scores of each emitted token.
        keep_logits: record the raw logits of each emitted token.
    """

    def __init__(
        self,
        prompt: Tensor,
        stopping_criteria: StoppingCriteriaList,
        pad_token_id: int,
        streamer: Any = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        rows, self.prompt_length = prompt.shape
        self.lengths = [self.prompt_length] * rows
        self.finished = [False] * rows
        self._ids = prompt.clone()
        self._stopping_criteria = [criteria_for_row(stopping_criteria, rows) for _ in range(rows)]
        self._pad = pad_token_id
        self._streamer = streamer
        self._streamed = self.prompt_length
        self._scores: list[list[Tensor]] | None = [[] for _ in range(rows)] if keep_scores else None
        self._logits: list[list[Tensor]] | None = [[] for _ in range(rows)] if keep_logits else None

    def prefix(self, row: int) -> Tensor:
        """(1, length) int64: everything of a row so far."""
        return self._ids[row : row + 1, : self.lengths[row]]

    def last(self, rows: Sequence[int]) -> Tensor:
        """(R,) int64: the newest token of each of `rows`."""
        return torch.stack([self._ids[row, self.lengths[row] - 1] for row in rows])

    def append(self, row: int, token: int, scores: Tensor | None = None, logits: Tensor | None = None) -> None:
        """Emits one token of a row; `scores` and `logits` are its (V,) float32 rows, kept if asked for."""
        length = self.lengths[row]
        if length == self._ids.shape[1]:
            spare = torch.full_like(self._ids[:, :1], self._pad).expand(-1, max(64, length // 2))
            self._ids = torch.cat([self._ids, spare], dim=1)
        self._ids[row, length] = token
        self.lengths[row] = length + 1
        if self._scores is not None and scores is not None:
            self._scores[row].append(scores.float())
        if self._logits is not None and logits is not None:
            self._logits[row].append(logits.float())
        if streams_before_stopping():
            self._stream()
        self.finished[row] = self._ends(row)
        if not streams_before_stopping():
            self._stream()

    def _ends(self, row: int) -> bool:
        seen = None if self._scores is None else tuple(step.unsqueeze(0) for step in self._scores[row])
        done = self._stopping_criteria[row](self.prefix(row), seen)
        if done.numel() != 1:
            raise ValueError(
                f"A stopping criterion was asked about one row and answered for {done.numel()}: rows of a batch emit "
                "at their own pace, so each is asked about alone. Answer for the ids that are given, or generate one "
                "prompt at a time."
            )
        return bool(done)

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
        return torch.where(reached, self._ids[:, column], self._pad)

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
        return torch.where(inside, self._ids[:, :longest], self._pad)

    def scores(self) -> tuple[Tensor, ...] | None:
        """One (B, V) float32 tensor a step; zeros where a row had already finished."""
        return self._steps(self._scores)

    def logits(self) -> tuple[Tensor, ...] | None:
        """One (B, V) float32 tensor a step; zeros where a row had already finished."""
        return self._steps(self._logits)

    def _steps(self, rows: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
        if rows is None:
            return None
        longest = max(len(row) for row in rows)
        blank = torch.zeros_like(rows[0][0])
        return tuple(torch.stack([row[t] if t < len(row) else blank for row in rows]) for t in range(longest))
