"""TalonCandidateGenerator: a drafter and a policy make one draft tree a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .compat import CandidateGenerator
from .config import TalonConfig
from .drafter import Commit, Drafter, DraftSession
from .features import features_of
from .policies import ChainPolicy, EaglePolicy, TalonPolicy, TreePolicy
from .tree import DraftTree


def make_policy(config: TalonConfig) -> TreePolicy:
    """The policy that a config describes."""
    if config.policy == "talon":
        return TalonPolicy(config.node_budget, config.top_k, config.mu, config.top_k_layers)
    if config.policy == "eagle":
        return EaglePolicy(config.node_budget, config.top_k, config.depth)
    return ChainPolicy(config.node_budget, config.depth)


@dataclass
class _Source:
    """Answers a policy with the drafter's log-probs (a `LogProbSource`), on the target's device."""

    session: DraftSession
    commit: Commit
    was_read: bool = False

    def begin(self) -> Tensor:
        self.was_read = True
        return self.session.begin(self.commit).to(self.commit.roots.device)

    def extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
        return self.session.extend(tokens, parents, valid).to(tokens.device)

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        ids = self.session.draft_ids
        return draft_ids if ids is None else ids.to(draft_ids.device)[draft_ids]


class TalonCandidateGenerator(CandidateGenerator):
    """Drafts for one `generate` call.

    `get_tree` serves TALON's loop. `get_candidates` speaks the protocol of transformers' assisted decoding, which
    takes a chain: it returns the tree's best chain, reading the target's features from the stock loop's own forwards
    while the generator is `attached`.

    Args:
        drafter: proposes tokens.
        target: the model that verifies them.
        config: policy and budget.
        rows: batch size.
        session: a session of this drafter to go on with; None opens one.
        max_length: no candidate beyond this many tokens; None for no limit (`get_candidates` alone).
        eos_token_id: no candidate beyond the first of these; None takes the target's own (`get_candidates` alone).
    """

    def __init__(
        self,
        drafter: Drafter,
        target: PreTrainedModel,
        config: TalonConfig | None = None,
        rows: int = 1,
        session: DraftSession | None = None,
        max_length: int | None = None,
        eos_token_id: int | list[int] | None = None,
    ) -> None:
        self.config = config or TalonConfig()
        self.spec = drafter.features_of(target)
        self.session = session or drafter.open(target, rows)
        self.unread: Commit | None = None
        self._steps_before = self.session.steps
        self._policy = make_policy(self.config)
        self._target = target
        self._max_length = max_length
        ends = target.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        self._read = 0
        self._taps: dict[int, Tensor] = {}

    @property
    def draft_steps(self) -> int:
        """Forwards of the drafter in this call."""
        return self.session.steps - self._steps_before

    @property
    def num_drafting_tokens(self) -> int:
        """The longest chain that `get_candidates` returns; the stock loop asks since 5.25."""
        return self.config.node_budget - 1

    def get_tree(self, commit: Commit, depth_limits: list[int]) -> DraftTree:
        """The draft trees of a round.

        Args:
            commit: what the target committed since the last call.
            depth_limits: per row, the deepest node that can still be emitted and positioned; 0 drafts nothing.
                A row's limit never rises, so a round in which no row may draft needs no draft step, then or later.
        """
        caps = [limit for limit in (self.config.max_depth, self.session.max_depth) if limit is not None]
        limits = torch.tensor([min([limit, *caps]) for limit in depth_limits], device=commit.roots.device)
        source = _Source(self.session, commit)
        tree = self._policy.grow(source, commit.roots, limits)
        self.session.end()
        pending = self.unread.then(commit) if self.unread else commit
        self.unread = None if source.was_read else pending
        return tree

    def select_rows(self, rows: list[int]) -> None:
        """Keeps some rows of the batch."""
        self.session.select_rows(rows)
        self.unread = self.unread.select_rows(rows) if self.unread else None

    @contextmanager
    def attached(self) -> Iterator[TalonCandidateGenerator]:
        """Reads the target's features from whatever runs it inside the block (transformers' assisted loop)."""
        with features_of(self._target, self.spec) as self._taps:
            yield self

    def get_candidates(  # type: ignore[override]  # the annotation upstream misses its own None
        self, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The best chain behind `input_ids` (1, L): (1, L + gamma) ids, and no logits, since drafts are point masses.

        A drafter that reads features proposes nothing before the prompt's forward, which the stock loop allows.
        """
        length = input_ids.shape[1]
        limit = self.config.node_budget if self._max_length is None else self._max_length - length - 1
        if limit < 1 or not self._taps.keys() >= set(self.spec.boundaries):
            return input_ids, None
        tokens = input_ids[:, self._read : length - 1]
        features = [self._taps[b][:, : tokens.shape[1]].to(tokens.device) for b in self.spec.boundaries]
        commit = Commit(
            tokens,
            torch.cat(features, dim=-1) if features else tokens.new_empty(*tokens.shape, 0),
            torch.arange(self._read, length - 1, device=tokens.device).unsqueeze(0),
            torch.ones_like(tokens, dtype=torch.bool),
            input_ids[:, -1],
        )
        self._read = length - 1
        self._taps.clear()
        chain = self.get_tree(commit, [limit]).best_chain()
        # Older stock loops, 5.17's among them, look for an end token at the end of a chain alone.
        end = next((i + 1 for i, token in enumerate(chain[0].tolist()) if token in self._ends), chain.shape[1])
        return torch.cat([input_ids, chain[:, :end]], dim=1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to update: the next `get_candidates` sees from `input_ids` what was accepted."""
