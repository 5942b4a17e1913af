"""TalonStats: what a generate call did, in the paper's quantities."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class TalonStats:
    """Counts of one `generate` call. A round is one draft, verify, accept cycle of one row; prefill is no round.

    Attributes:
        rounds: rounds, summed over the rows.
        batch_rounds: rounds of the whole batch, i.e. forwards of the target after prefill.
        emitted: tokens that the rounds delivered, bonus tokens counted, after EOS and length.
        draft_steps: forwards of the drafter.
        nodes: nodes that the target checked, roots counted, padding not.
        accepted_by_depth: entry d is the number of rounds that accepted a node at depth d + 1.
        lockstep: whether the rows of the batch advanced together, each round as far as the least of them (see
            `pace.py`): tau is then the least of the rows, and what the others could have taken is drafted again.
        seconds: wall time by phase: "prefill", "draft", "target", "accept", "commit"; "total" is the whole loop's;
            "check" is what trying a model that no test covers took, before the loop.
    """

    rounds: int = 0
    batch_rounds: int = 0
    emitted: int = 0
    draft_steps: int = 0
    nodes: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    lockstep: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean tokens emitted a round (the paper's MAT: the bonus counts). NaN before the first round."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def delta(self) -> float:
        """Mean draft steps a round of the batch (the paper's delta). NaN before the first round."""
        return self.draft_steps / self.batch_rounds if self.batch_rounds else float("nan")

    @property
    def draft_cost_ratio(self) -> float:
        """c: seconds of one draft step over seconds of one tree forward of the target. NaN before the first round."""
        target = self.seconds.get("target", 0.0)
        if not (target and self.draft_steps and self.batch_rounds):
            return float("nan")
        return (self.seconds.get("draft", 0.0) / self.draft_steps) / (target / self.batch_rounds)

    @property
    def predicted_speedup(self) -> float:
        """R = tau / (1 + c * delta): the speed-up if a tree forward cost as much as plain decoding's forward.

        c is measured against the tree forward, so a real speed-up falls short of R by what the wider forward costs.
        """
        return self.tau / (1.0 + self.draft_cost_ratio * self.delta)

    def count(self, accepted: Sequence[int], emitted: Sequence[int], nodes: Sequence[int], draft_steps: int) -> None:
        """Adds one round of the batch.

        Args:
            accepted: per row, nodes on the accepted path, the root not counted.
            emitted: per row, tokens delivered; 0 for a row that was padded, for which it is no round.
            nodes: per row, nodes checked.
            draft_steps: the drafter's forwards since the call began.
        """
        self.batch_rounds += 1
        self.rounds += sum(count > 0 for count in emitted)
        self.emitted += sum(emitted)
        self.nodes += sum(nodes)
        self.draft_steps = draft_steps
        for depth in (d for row, count in zip(accepted, emitted, strict=True) if count for d in range(row)):
            if depth == len(self.accepted_by_depth):
                self.accepted_by_depth.append(0)
            self.accepted_by_depth[depth] += 1

    def add(self, other: TalonStats) -> None:
        """Adds another call's counts and times."""
        for name in ("rounds", "batch_rounds", "emitted", "draft_steps", "nodes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lockstep |= other.lockstep
        depths = zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        self.accepted_by_depth = [mine + theirs for mine, theirs in depths]
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the wall time of its block to `seconds[phase]`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
