"""Seeded random inputs: trees, draws, and log-prob tables that hold the shapes which break tree code.

Everything is a function of its seed alone, across processes and platforms, so a failing case is named by its seed.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Path = tuple[int, ...]

# A row's logits are drawn from N(0, scale): easy rows put nearly all mass on one token, hard rows spread it.
# At EASY_SCALE some log-probs vanish beside their parent's in fp32, so a child ties with its own parent.
EASY_SCALE = 12.0
HARD_SCALE = 0.7

# Logits of a tied row come from this grid: few distinct values, so equal ones are common.
TIE_GRID = (0.0, -1.0, -2.0)


def log_softmax_fp32(logits: Sequence[float]) -> list[float]:
    """log_softmax in double, each value rounded once to fp32; equal logits stay equal."""
    top = max(logits)
    if top == -math.inf:
        return list(logits)
    log_total = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [float(np.float32(min(x - log_total, 0.0))) for x in logits]


@dataclass(frozen=True)
class LogProbTable:
    """A random drafter (or target) as a table: path of draft ids -> fp32 log-probs of the next draft token.

    ties      rows are shuffles of two fixed rows with few distinct values: exact ties inside a row, and between
              children of different parents
    easy      share of peaked rows, the others are flat
    minus_inf chance that an entry is -inf (a whole row may be)
    nan_rows  chance that a row holds NaN, in one entry or in all
    """

    seed: int
    vocab_size: int
    ties: bool = False
    easy: float = 0.5
    minus_inf: float = 0.0
    nan_rows: float = 0.0

    def __call__(self, path: Path) -> list[float]:
        rng = random.Random(f"{self.seed}/{tuple(path)}")
        row = self._row(rng)
        if rng.random() < self.nan_rows:
            if rng.random() < 0.5:
                return [math.nan] * self.vocab_size
            row[rng.randrange(self.vocab_size)] = math.nan
        return row

    def _row(self, rng: random.Random) -> list[float]:
        is_easy = rng.random() < self.easy
        if self.ties:
            row = log_softmax_fp32(self._tied_logits(is_easy))
            rng.shuffle(row)
            return row
        scale = EASY_SCALE if is_easy else HARD_SCALE
        logits = [rng.gauss(0.0, scale) for _ in range(self.vocab_size)]
        return log_softmax_fp32([-math.inf if rng.random() < self.minus_inf else x for x in logits])

    def _tied_logits(self, is_easy: bool) -> list[float]:
        rng = random.Random(f"{self.seed}/tied/{is_easy}")
        logits = [rng.choice(TIE_GRID) for _ in range(self.vocab_size)]
        logits = [-math.inf if rng.random() < self.minus_inf else x for x in logits]
        if is_easy:
            # Far above the rest, so that its log-prob rounds to zero: the child ties with its parent.
            logits[0] = 40.0
        return logits


# One name for every kind of table worth a test; the small vocabularies are smaller than a usual top_k.
TABLE_KINDS: dict[str, dict[str, float | bool | int]] = {
    "mixed": {"vocab_size": 12},
    "easy": {"vocab_size": 12, "easy": 1.0},
    "hard": {"vocab_size": 12, "easy": 0.0},
    "tied": {"vocab_size": 12, "ties": True},
    "tied_with_minus_inf": {"vocab_size": 12, "ties": True, "minus_inf": 0.3},
    "minus_inf": {"vocab_size": 12, "minus_inf": 0.5},
    "nan_rows": {"vocab_size": 12, "nan_rows": 0.3},
    "broken": {"vocab_size": 12, "nan_rows": 0.9, "minus_inf": 0.9},
    "small_vocabulary": {"vocab_size": 3},
    "small_tied_vocabulary": {"vocab_size": 2, "ties": True},
    "one_word": {"vocab_size": 1},
    "wide_vocabulary": {"vocab_size": 97},
}


def named_table(kind: str, seed: int) -> LogProbTable:
    return LogProbTable(seed, **TABLE_KINDS[kind])  # type: ignore[arg-type]


def random_tree(seed: int, nodes: int, vocab_size: int, layered: bool = False) -> list[tuple[int, int]]:
    """(token, parent) for each node, root first, siblings distinct; between a chain and a star, by seed.

    layered=True lists the nodes depth by depth, as a grown tree does; otherwise any parent-first order.
    """
    rng = random.Random(f"{seed}/tree/{nodes}/{vocab_size}")
    chain_bias = rng.random()
    tree = [(rng.randrange(vocab_size), -1)]
    free = {0: rng.sample(range(vocab_size), vocab_size)}
    while len(tree) < nodes:
        newest = len(tree) - 1
        parent = newest if rng.random() < chain_bias else rng.choice([v for v in free if free[v]])
        tree.append((free[parent].pop(), parent))
        free[len(tree) - 1] = rng.sample(range(vocab_size), vocab_size)
    return _depth_by_depth(tree) if layered else tree


def _depth_by_depth(tree: list[tuple[int, int]]) -> list[tuple[int, int]]:
    depth = [0]
    for _, parent in tree[1:]:
        depth.append(depth[parent] + 1)
    order = sorted(range(len(tree)), key=lambda i: (depth[i], i))
    new_index = {old: new for new, old in enumerate(order)}
    new_index[-1] = -1
    return [(tree[i][0], new_index[tree[i][1]]) for i in order]


def random_draws(seed: int, tree: Sequence[Sequence[int]], vocab_size: int, match: float = 0.7) -> list[int]:
    """One target token for each node; with probability `match` it is the token of one of the node's children."""
    rng = random.Random(f"{seed}/draws")
    draws = []
    for v in range(len(tree)):
        children = [node[0] for node in tree if node[1] == v]
        follow = bool(children) and rng.random() < match
        draws.append(rng.choice(children) if follow else rng.randrange(vocab_size))
    return draws


def random_prob_rows(seed: int, rows: int, vocab_size: int) -> list[list[float]]:
    """The target's law after each node: positive double-precision rows that sum to one."""
    rng = random.Random(f"{seed}/probs")
    weights = [[rng.expovariate(1.0) for _ in range(vocab_size)] for _ in range(rows)]
    return [[weight / math.fsum(row) for weight in row] for row in weights]
