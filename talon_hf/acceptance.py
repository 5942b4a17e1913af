"""Acceptance: walk a scored tree as plain decoding would walk the text.

At the root the target picks its next token. If a child carries that token, its logits are already there: move to it
and pick again. The first pick that no child carries is the bonus token, and the round ends. Since drafts are
deterministic (point masses), picking first and matching second has the law of rejection with residual resampling
(docs/algorithm.md proves it); `residual` is that other form, as the paper and EAGLE write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import Picker
from .transcript import Transcript
from .tree import DraftTree

Rule = Callable[[Picker, Tensor, Sequence[Sequence[int]]], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What the target took of R trees.

    Attributes:
        paths: per row, columns of the accepted nodes in order, the root first.
        emitted: per row, how many tokens the round emitted: the accepted ones and the bonus, up to a stop; the
            padding of a finished row in lockstep is none.
    """

    paths: list[list[int]]
    emitted: list[int]


def match(picker: Picker, scores: Tensor, children: Sequence[Sequence[int]]) -> Tensor:
    """(R,) tokens by sample-then-match: one draw of plain decoding; `children` plays no part in it.

    Args:
        picker: draws.
        scores: (R, V) float32 processed scores.
        children: per row, the tokens of the current node's children.
    """
    return picker.draw(scores)


def residual(picker: Picker, scores: Tensor, children: Sequence[Sequence[int]]) -> Tensor:
    """(R,) tokens by recursive rejection and residual resampling (TALON section 3.3, EAGLE's `evaluate_posterior`).

    Child x of a node is taken with probability p[x]; a refused one leaves p with p[x] = 0, renormalised, for the next;
    with no child left the token comes from the residual p. Same arguments as `match`. Greedy is `match`.
    """
    if not picker.do_sample:
        return match(picker, scores, children)
    return torch.stack(
        [_residual_draw(p, row) for p, row in zip(torch.softmax(scores, dim=-1), children, strict=True)]
    )


def _residual_draw(p: Tensor, children: Sequence[int]) -> Tensor:
    """() int64 token of one node with distribution `p` (V,); `children` in order."""
    for token in children:
        if bool(torch.rand((), device=p.device) < p[token]):
            return torch.tensor(token, device=p.device)
        rest = p.index_fill(0, torch.tensor([token], device=p.device), 0.0)
        mass = rest.sum()
        if not bool(mass > 0):
            # The child holds all of p but for rounding: refusing it would leave nothing to draw from.
            return torch.tensor(token, device=p.device)
        p = rest / mass
    return torch.multinomial(p, num_samples=1).squeeze(0)


RULES: dict[str, Rule] = {"match": match, "residual": residual}


def walk(
    tree: DraftTree, logits: Tensor, rows: Sequence[int], picker: Picker, transcript: Transcript, rule: Rule = match
) -> Verdict:
    """Walks R scored trees, in step, and appends what the target says to the transcript.

    A row's walk ends with its tree or its text; in lockstep the first row that has no child to move to ends all walks.

    Args:
        tree: R trees of n nodes.
        logits: (R, n, V) the target's logits at every node.
        rows: each tree's row in the transcript.
        picker: processors and draws.
        transcript: supplies each node's prefix, takes each token, says when a row has finished.
        rule: how a token is drawn at a node.
    """
    children = [_children(t, p) for t, p in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)]
    processed = greedy = None
    if picker.is_prefix_free and _at_once(logits):
        # Such processors read no prefix: any will do.
        processed = picker.scores(rows, transcript.prefixes(rows), logits.flatten(0, 1)).view(logits.shape)
        greedy = None if picker.do_sample else processed.argmax(dim=-1).tolist()
    paths, emitted = [[0] for _ in rows], [0] * len(rows)
    walking = list(range(len(rows)))
    while walking:
        nodes = [paths[i][-1] for i in walking]
        raw = logits[walking, nodes]
        at = [rows[i] for i in walking]
        scores = picker.scores(at, transcript.prefixes(at), raw) if processed is None else processed[walking, nodes]
        if greedy is not None:
            tokens = [greedy[i][node] for i, node in zip(walking, nodes, strict=True)]
        else:
            below = [[*children[i][node]] for i, node in zip(walking, nodes, strict=True)]
            tokens = rule(picker, scores, below).tolist()
        for i, row in zip(walking, at, strict=True):
            emitted[i] += not transcript.is_padded(row)
        tokens = transcript.append(at, tokens, scores, raw)
        moves = {
            i: children[i][node][token]
            for i, row, node, token in zip(walking, at, nodes, tokens, strict=True)
            if token in children[i][node] and not transcript.has_ended(row)
        }
        if transcript.lockstep and len(moves) < len(walking):
            break
        for i, child in moves.items():
            paths[i].append(child)
        walking = list(moves)
    return Verdict(paths, emitted)


def _at_once(logits: Tensor) -> bool:
    """Whether processing all nodes at once beats each accepted node alone: where the latter waits for the device."""
    return logits.device.type != "cpu"


def _children(tokens: Sequence[int], parents: Sequence[int]) -> list[dict[int, int]]:
    """Per node, its children's columns by token, in column order; padding is nobody's child."""
    children: list[dict[int, int]] = [{} for _ in tokens]
    for column, parent in enumerate(parents):
        if parent >= 0:
            children[parent][tokens[column]] = column
    return children
