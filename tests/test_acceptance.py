"""The walk equals the oracles' walks, and what it samples has the target's law exactly, whatever the tree.

The law is tested on a table model: five tokens, texts of three, all 125 outcomes enumerated. Rows of a batch draw
independently, so a thousand copies of one prompt are a thousand samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from oracles import Path, Table, chi_square, enumerate_law, greedy_rows, total_variation, walk_match
from strategies import LogProbTable, random_draws, random_tree
from test_oracles import SIGNIFICANCE, A, B, C, D
from test_tree import Pair, tree_of, worked_tree
from torch import LongTensor, Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria

from talon_hf.acceptance import RULES, Rule, Verdict, match, residual, walk
from talon_hf.policies import ChainPolicy, EaglePolicy, TalonPolicy, TreePolicy
from talon_hf.sampling import Picker
from talon_hf.transcript import Transcript
from talon_hf.tree import DraftTree

PLENTY = 100


def point_masses(draws: Sequence[Sequence[int]], vocabulary: int, width: int) -> Tensor:
    """(B, width, V) logits whose only possible token at node v of row b is draws[b][v]."""
    logits = torch.full((len(draws), width, vocabulary), -torch.inf)
    for row, tokens in enumerate(draws):
        logits[row, range(len(tokens)), tokens] = 0.0
    return logits


def walked(
    rows: list[list[Pair]],
    logits: Tensor,
    processors: Sequence[LogitsProcessor] = (),
    do_sample: bool = False,
    rule: Rule = match,
    stop: Any = None,
    lockstep: bool = False,
) -> tuple[Verdict, list[list[int]]]:
    """The verdict, and each row's new tokens; a row's prompt is its root."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(PLENTY), *([stop] if stop else [])])
    roots = torch.tensor([[pairs[0][0]] for pairs in rows])
    transcript = Transcript(roots, criteria, pad_token_id=0, lockstep=lockstep)
    picker = Picker(LogitsProcessorList(processors), do_sample, len(rows), lockstep)
    verdict = walk(tree_of(*rows), logits, range(len(rows)), picker, transcript, rule)
    return verdict, [transcript.prefix(row)[0, 1:].tolist() for row in range(len(rows))]


NO_OP = TemperatureLogitsWarper(1.0)  # takes the walk through the processors
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "processed": {"processors": [NO_OP]},
    "sampled": {"do_sample": True},
    "residual": {"do_sample": True, "processors": [NO_OP], "rule": residual},
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_walk_equals_both_oracles(setting: str, rows: int, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talon_hf.acceptance._at_once", lambda _: at_once)
    accepted = 0
    for seed in range(0, 60, rows):
        trees = [random_tree(seed + i, nodes=1 + (seed + 5 * i) % 17, vocab_size=4) for i in range(rows)]
        draws = [random_draws(seed + i, tree, 4) for i, tree in enumerate(trees)]
        verdict, said = walked(trees, point_masses(draws, 4, max(map(len, trees))), **SETTINGS[setting])
        for row in range(rows):
            path, bonus = walk_match(trees[row], draws[row])
            assert (path, bonus) == greedy_rows(trees[row], draws[row])
            assert verdict.paths[row] == [0, *path]
            assert said[row] == [*(trees[row][v][0] for v in path), bonus]
            assert verdict.emitted[row] == len(path) + 1
            accepted += len(path)
    assert accepted > 60


@pytest.mark.parametrize(
    ("draws", "path", "emitted"),
    [
        ([A, C, D, B, A, D], [0, 1, 3], [A, C, B]),  # the docs' walk: B after AC is the bonus
        ([A, C, D, A, A, D], [0, 1, 3, 5], [A, C, A, D]),  # a whole row accepted: the bonus comes from the leaf
        ([C, C, D, A, A, D], [0], [C]),  # nothing matches at the root
        ([B, C, A, A, A, D], [0, 2], [B, A]),
    ],
)
def test_walks_of_the_worked_tree(draws: list[int], path: list[int], emitted: list[int]) -> None:
    tree = worked_tree()
    pairs = list(zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True))
    verdict, said = walked([pairs], point_masses([draws], 4, 6))
    assert (verdict.paths, said) == ([path], [emitted])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_stop_inside_the_path_ends_the_walk_there(setting: str) -> None:
    chain = [(A, -1), (B, 0), (C, 1), (D, 2)]
    draws = [[B, C, D, A], [B, C, D, A], [D, A, A, A]]
    verdict, said = walked([chain] * 3, point_masses(draws, 4, 4), **SETTINGS[setting], stop=EosTokenCriteria(C))
    assert said == [[B, C], [B, C], [D]]
    assert verdict.paths == [[0, 1], [0, 1], [0]]
    assert verdict.emitted == [2, 2, 1]


def test_match_spends_one_draw_a_token_as_plain_decoding_does() -> None:
    for seed in range(30):
        tree = random_tree(seed, nodes=12, vocab_size=3)
        logits = torch.randn(1, 12, 3, generator=torch.manual_seed(seed))
        torch.manual_seed(seed)
        verdict, (said,) = walked([tree], logits, do_sample=True)
        after = torch.rand(())
        torch.manual_seed(seed)
        for node, token in zip(verdict.paths[0], said, strict=True):
            assert torch.multinomial(logits[:, node].softmax(dim=1), 1).item() == token
        assert torch.rand(()) == after


# The law. Prefixes are numbered like a heap: () is 0, and token t after prefix c is 5 c + 1 + t.


def sharper(table: Table) -> Table:
    """Between flat and certain: rows that differ enough for one wrong row in 25 to show in ten thousand samples."""
    return lambda prefix: [2.0 * log_prob for log_prob in table(prefix)]


V, LENGTH, PREFIXES, ELSEWHERE = 5, 3, 31, 7
N_FAST, N_SLOW, N_PROCESSED, N_CONTROL, N_LOCKSTEP, ROWS = 10_000, 40_000, 3_000, 2_000, 1_200, 1_000
TARGETS = [sharper(LogProbTable(seed, vocab_size=V, easy=0.0)) for seed in (7, 8, 9)]
DRAFTER = LogProbTable(70, vocab_size=V, easy=0.3)
WARPERS = [
    RepetitionPenaltyLogitsProcessor(1.4),
    TemperatureLogitsWarper(0.8),
    TopKLogitsWarper(4),
    TopPLogitsWarper(0.9),
]
LAWS = {"plain": LogitsProcessorList(), "processed": LogitsProcessorList(WARPERS)}
SHAPES: dict[str, TreePolicy] = {
    "talon": TalonPolicy(node_budget=7, top_k=2, mu=0.1),
    "eagle": EaglePolicy(node_budget=7, top_k=2, depth=1),
    "chain": ChainPolicy(node_budget=7, length=2),
}


ALL_PREFIXES = [prefix for length in range(LENGTH) for prefix in product(range(V), repeat=length)]
CODES = {prefix: code for code, prefix in enumerate(ALL_PREFIXES)}


def below(codes: Tensor, tokens: Tensor) -> Tensor:
    # Padding nodes would run past the table.
    return (V * codes + 1 + tokens).clamp(max=PREFIXES - 1)


@dataclass
class CodedSource:
    """A `LogProbSource` that looks every prefix up in one (31, V) tensor."""

    table: Tensor
    codes: Tensor

    def begin(self) -> Tensor:
        self.codes = self.codes.unsqueeze(1)
        return self.table[self.codes[:, 0]]

    def extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
        self.codes = below(self.codes.gather(1, parents), tokens)
        return self.table[self.codes]

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def node_codes(tree: DraftTree, roots: Tensor) -> Tensor:
    """(B, n) the prefix of every node."""
    codes = roots.unsqueeze(1).repeat(1, tree.size)
    for column in range(1, tree.size):
        parent = tree.parents[:, column : column + 1].clamp(min=0)
        codes[:, column] = below(codes.gather(1, parent)[:, 0], tree.tokens[:, column])
    return codes


@dataclass
class Sampler:
    """Decodes table models with draft trees: grow, score, walk, as `talon_decode` does, without a transformer.

    `prompts` and `lengths` are those of the rows; a prompt token picks one of the targets. `wrong_rows` is the chance
    that a node is verified against the row of another prefix.
    """

    rule: Rule
    policy: TreePolicy = SHAPES["talon"]
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    drafter: Table = DRAFTER
    wrong_rows: float = 0.0
    lockstep: bool = False
    accepted: int = 0

    def __post_init__(self) -> None:
        self.targets = torch.tensor([[target(prefix) for prefix in ALL_PREFIXES] for target in TARGETS])
        self.drafts = torch.tensor([self.drafter(prefix) for prefix in ALL_PREFIXES])

    def decode(self, prompts: Tensor, lengths: Tensor) -> list[Path]:
        """One sampled text a row, padded with 0 to the longest."""
        stop = ReachesItsLength(prompts, lengths)
        stops = StoppingCriteriaList([stop])
        transcript = Transcript(prompts.unsqueeze(1), stops, pad_token_id=0, lockstep=self.lockstep)
        picker = Picker(self.processors, do_sample=True, rows=len(prompts), lockstep=self.lockstep)
        while rows := [row for row in range(len(prompts)) if not transcript.has_ended(row)]:
            said = [transcript.prefix(row)[0, 1:].tolist() for row in rows]
            left = lengths[rows] - torch.tensor([len(text) for text in said])
            codes = torch.tensor([CODES[tuple(text)] for text in said])
            tree = self.policy.grow(CodedSource(self.drafts, codes), transcript.last(rows), left - 1)
            seen = node_codes(tree, codes)
            if self.wrong_rows:
                seen = torch.where(torch.rand(seen.shape) < self.wrong_rows, (seen + ELSEWHERE) % PREFIXES, seen)
            verdict = walk(tree, self.targets[prompts[rows].unsqueeze(1), seen], rows, picker, transcript, self.rule)
            self.accepted += sum(len(path) - 1 for path in verdict.paths)
        return [tuple(text[1:]) for text in transcript.sequences().tolist()]

    def counts(self, n: int, seed: int = 1) -> Counter[Path]:
        torch.manual_seed(seed)
        # The least of many rows in lockstep would accept nothing, and no rule would be asked below a root.
        rows = 4 if self.lockstep else min(n, ROWS)
        prompts, lengths = torch.zeros(rows, dtype=torch.long), torch.full((rows,), LENGTH)
        return Counter(text for _ in range(n // rows) for text in self.decode(prompts, lengths))


@dataclass
class ReachesItsLength:
    """Stops each row at its own length: rows of a batch are told apart by their prompt."""

    prompts: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        self._ends = dict(zip(self.prompts.tolist(), self.lengths.tolist(), strict=True))

    def __call__(self, input_ids: LongTensor, scores: Any) -> Tensor:
        return torch.tensor([len(row) - 1 >= self._ends[row[0]] for row in input_ids.tolist()])


def law_of(name: str, prompt: int = 0, length: int = LENGTH) -> dict[Path, float]:
    """The exact law of a table model's text behind its prompt token."""

    def process(prefix: Path, scores: Sequence[float]) -> Sequence[float]:
        return LAWS[name](torch.tensor([[prompt, *prefix]]), torch.tensor([scores])).squeeze(0).tolist()

    return enumerate_law(TARGETS[prompt], length, process if LAWS[name] else None)


def p_value(counts: Counter[Path], law: dict[Path, float], n: int) -> float:
    p = chi_square(counts, law, n)
    print(f"p = {p:.2g}, total variation {total_variation(counts, law, n):.3f}")
    return p


TIERS = [pytest.param(N_FAST // 2, id="fast"), pytest.param(N_SLOW, id="slow", marks=pytest.mark.slow)]
# Rows call their processors one by one: fewer samples show that each node's own prefix is processed.
SIZES = [pytest.param("plain", N_FAST, id="plain-fast"), pytest.param("processed", N_PROCESSED, id="processed-fast")]
SIZES += [pytest.param(law, N_SLOW, id=f"{law}-slow", marks=pytest.mark.slow) for law in LAWS]


@pytest.mark.parametrize(("law", "n"), SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_sampled_has_the_targets_law(rule: str, law: str, n: int) -> None:
    sampler = Sampler(RULES[rule], processors=LAWS[law])
    counts = sampler.counts(n)
    assert sampler.accepted > n / 2
    assert p_value(counts, law_of(law), n) > SIGNIFICANCE


@pytest.mark.parametrize(
    "n", [pytest.param(N_CONTROL, id="fast"), pytest.param(N_SLOW, id="slow", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("shape", ["eagle", "chain"])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_does_not_depend_on_the_policy(rule: str, shape: str, n: int) -> None:
    counts = Sampler(RULES[rule], SHAPES[shape]).counts(n)
    assert p_value(counts, law_of("plain"), n) > SIGNIFICANCE


@pytest.mark.parametrize("n", TIERS)
@pytest.mark.parametrize("rule", RULES)
def test_three_rows_of_a_batch_have_each_its_own_law(rule: str, n: int) -> None:
    """Three prompts and two lengths share every batch, so rows finish in different rounds."""
    torch.manual_seed(1)
    lengths, copies, counts = (3, 2, 3), n // 10, [Counter(), Counter(), Counter()]
    for _ in range(2):
        prompts = torch.arange(3).repeat(copies)
        texts = Sampler(RULES[rule]).decode(prompts, torch.tensor(lengths).repeat(copies))
        for prompt, text in zip(prompts.tolist(), texts, strict=True):
            counts[prompt][text[: lengths[prompt]]] += 1
    for prompt in range(3):
        law = law_of("plain", prompt, lengths[prompt])
        assert p_value(counts[prompt], law, n // 5) > SIGNIFICANCE


@pytest.mark.parametrize("rule", RULES)
def test_rows_in_lockstep_have_the_targets_law(rule: str) -> None:
    sampler = Sampler(RULES[rule], lockstep=True)
    counts = sampler.counts(N_LOCKSTEP)
    assert sampler.accepted > N_LOCKSTEP / 8
    assert p_value(counts, law_of("plain"), N_LOCKSTEP) > SIGNIFICANCE


# Rules and faults that change the law. Each must be refused, or the test above proves nothing.


def sampled_by(draw: Callable[[Tensor, Sequence[int]], int]) -> Rule:
    def rule(picker: Picker, scores: Tensor, children: Sequence[Sequence[int]]) -> LongTensor:
        return torch.tensor([draw(p, row) for p, row in zip(scores.softmax(dim=1), children, strict=True)])

    return rule


def bonus_from_p(p: Tensor, children: Sequence[int]) -> int:
    left = p.clone()
    for token in children:
        if torch.rand(()) < left[token]:
            return token
        left[token] = 0.0
        left = left / left.sum()
    return int(torch.multinomial(p, 1))


def siblings_without_renormalising(p: Tensor, children: Sequence[int]) -> int:
    left = p.clone()
    for token in children:
        if torch.rand(()) < left[token]:
            return token
        left[token] = 0.0
    return int(torch.multinomial(left, 1))


def ratio_to_the_draft(p: Tensor, children: Sequence[int]) -> int:
    q = torch.tensor(DRAFTER(())).exp()
    for token in children:
        if torch.rand(()) < p[token] / q[token]:
            return token
        p = (p - q).clamp(min=0)
        p = p / p.sum()
    return int(torch.multinomial(p, 1))


CONTROLS: dict[str, tuple[Sampler, int]] = {
    "bonus_from_p": (Sampler(sampled_by(bonus_from_p)), N_CONTROL),
    "no_renormalising": (Sampler(sampled_by(siblings_without_renormalising), EaglePolicy(21, 4, 1)), N_CONTROL),
    "bonus_from_p_in_lockstep": (Sampler(sampled_by(bonus_from_p), lockstep=True), N_LOCKSTEP),
    "min_1_p_over_q": (Sampler(sampled_by(ratio_to_the_draft), drafter=lambda _: DRAFTER(())), N_CONTROL),
    "4_percent_wrong_rows": (Sampler(match, wrong_rows=0.04), N_FAST),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_lossy_sampler_is_refused(name: str) -> None:
    sampler, n = CONTROLS[name]
    assert p_value(sampler.counts(n), law_of("plain"), n) < SIGNIFICANCE


@pytest.mark.slow
def test_a_temperature_off_by_five_percent_is_refused() -> None:
    sampler = Sampler(match, processors=LogitsProcessorList([TemperatureLogitsWarper(1.05)]))
    assert p_value(sampler.counts(N_SLOW), law_of("plain"), N_SLOW) < SIGNIFICANCE
