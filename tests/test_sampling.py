"""Picker: processors see what plain decoding would show them, and a draw is plain decoding's draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_acceptance import walked
from test_oracles import A, B, C, D
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from talon_hf.acceptance import match, residual
from talon_hf.sampling import Picker

ROWS = [2, 0, 1]
RAGGED = [torch.tensor([[5, 6, 7]]), torch.tensor([[5]]), torch.tensor([[5, 6]])]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Recorder(LogitsProcessor):
    """Notes the ids it is called with, then edits the scores."""

    def __init__(self, edit: Callable[[Tensor], Tensor] = lambda scores: scores.mul_(0.5)) -> None:
        self.calls: list[list[list[int]]] = []
        self.dtypes: set[torch.dtype] = set()
        self._edit = edit

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores)
        self.calls.append(input_ids.tolist())
        self.dtypes.add(scores.dtype)
        return self._edit(scores)


class Countdown(LogitsProcessor):
    """Stateful: forbids every token but B until its third call, then every token but C."""

    def __init__(self) -> None:
        self.left = 2

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = B if self.left > 0 else C
        self.left -= 1
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([allowed]), 0.0)


def picker_of(*processors: LogitsProcessor, do_sample: bool = False, rows: int = 1, lockstep: bool = False) -> Picker:
    return Picker(LogitsProcessorList(processors), do_sample, rows, lockstep)


@pytest.mark.parametrize(("do_sample", "rule"), [(False, match), (True, match), (True, residual)])
def test_processors_see_each_nodes_own_prefix(do_sample: bool, rule: Any) -> None:
    # The path C D A passes over siblings; a prefix holds the prompt (A), the accepted tokens and nothing else.
    tree = [(A, -1), (B, 0), (C, 0), (D, 1), (D, 2), (A, 4), (B, 4)]
    logits = torch.nn.functional.one_hot(torch.tensor([[C, A, D, A, A, B, B]]), 4).double()
    recorder = Recorder(lambda scores: scores * 1e4)
    assert walked([tree], logits, [recorder], do_sample, rule)[1] == [[C, D, A, B]]
    assert recorder.calls == [[[A]], [[A, C]], [[A, C, D]], [[A, C, D, A]]]


def test_a_processor_that_reads_the_prefix_changes_what_is_said() -> None:
    # The target says B after A and B; a penalty on what the path itself has said turns the second B to C.
    logits = torch.tensor([0.0, 2.0, 1.5, 0.0]).expand(1, 3, 4)
    tree = [(A, -1), (B, 0), (B, 1)]
    assert walked([tree], logits)[1] == [[B, B, B]]
    assert walked([tree], logits, [RepetitionPenaltyLogitsProcessor(2.0)])[1] == [[B, C]]


def test_in_lockstep_a_stateful_processor_is_called_once_a_column_and_the_least_tree_ends_the_walk() -> None:
    chain = [(A, -1), (B, 0), (B, 1), (C, 2)]
    recorder = Recorder(lambda scores: scores)
    verdict, said = walked([chain, chain[:2], chain], torch.zeros(3, 4, 4), [recorder, Countdown()], lockstep=True)
    assert said == [[B, B]] * 3
    assert verdict.paths == [[0, 1]] * 3
    assert recorder.calls == [[[A]] * 3, [[A, B]] * 3]


def test_ragged_prefixes_are_processed_row_by_row() -> None:
    penalty = RepetitionPenaltyLogitsProcessor(2.0)
    scores = picker_of(penalty, rows=3).scores(ROWS, RAGGED, torch.arange(1.0, 25.0).view(3, 8))
    each = [
        penalty(ids, row.unsqueeze(0)) for ids, row in zip(RAGGED, torch.arange(1.0, 25.0).view(3, 8), strict=True)
    ]
    assert scores.equal(torch.cat(each))
    assert scores[:, 5:].tolist() == [[3.0, 3.5, 4.0], [7.0, 15.0, 16.0], [11.0, 11.5, 24.0]]


def test_processors_that_never_read_a_prefix_take_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = [], TopKLogitsWarper.__call__
    monkeypatch.setattr(
        TopKLogitsWarper, "__call__", lambda self, ids, s: (calls.append(len(s)), own(self, ids, s))[1]
    )
    logits = torch.randn(3, 7, generator=torch.manual_seed(0))
    warpers = (TemperatureLogitsWarper(0.7), TopKLogitsWarper(2))
    scores = picker_of(*warpers, rows=3).scores(ROWS, RAGGED, logits)
    assert calls == [3]
    assert scores.equal(LogitsProcessorList(warpers)(RAGGED[0], logits))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_processors_get_float32_and_the_logits_stay_untouched(rows: int, dtype: torch.dtype) -> None:
    recorder, logits = Recorder(), torch.randn(rows, 4, generator=torch.manual_seed(0)).to(dtype)
    before = logits.clone()
    scores = picker_of(recorder, rows=rows, lockstep=rows > 1).scores(
        range(rows), [torch.zeros(rows, 2).long()], logits
    )
    assert recorder.dtypes == {torch.float32}
    assert scores.dtype == torch.float32
    assert logits.equal(before)
    assert scores.equal(before.float() / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_processors_the_scores_are_a_float32_copy(dtype: torch.dtype) -> None:
    logits = torch.ones(3, 4, dtype=dtype)
    scores = picker_of(rows=3).scores(ROWS, RAGGED, logits)
    assert scores.dtype == torch.float32
    scores.zero_()
    assert logits.equal(torch.ones(3, 4, dtype=dtype))


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draw_is_plain_decodings_and_spends_no_more_randomness(do_sample: bool) -> None:
    scores = torch.randn(3, 7, generator=torch.manual_seed(0))
    torch.manual_seed(5)
    drawn, after = picker_of(do_sample=do_sample).draw(scores), torch.rand(())
    torch.manual_seed(5)
    want = torch.multinomial(scores.softmax(dim=1), 1).squeeze(1) if do_sample else scores.argmax(dim=1)
    assert drawn.equal(want)
    assert torch.rand(()) == after


@pytest.mark.parametrize(
    ("picker", "free"),
    [
        (picker_of(), True),
        (picker_of(Recorder()), False),
        (picker_of(do_sample=True), True),
        (picker_of(TemperatureLogitsWarper(2.0), do_sample=True), True),
        (picker_of(TemperatureLogitsWarper(2.0), Recorder(), do_sample=True), False),
    ],
    ids=["greedy", "processed", "sampled", "warped", "warped and processed"],
)
def test_only_processors_that_ignore_the_prefix_let_all_nodes_be_processed_at_once(picker: Picker, free: bool) -> None:
    assert picker.is_prefix_free is free


@pytest.mark.parametrize("processors", [[], [TemperatureLogitsWarper(1.0)]])
@pytest.mark.parametrize("at_once", [False, True])
def test_close_logits_tie_in_float32_as_they_do_in_plain_decoding(
    processors: list[LogitsProcessor], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # fp64 tells 1 from 1 + 1e-12, float32 does not, and then the lower id wins, at every node alike.
    monkeypatch.setattr("talon_hf.acceptance._at_once", lambda _: at_once)
    logits = torch.tensor([1.0, 1.0 + 1e-12, 0.0, 0.0], dtype=torch.float64).expand(1, 2, 4)
    assert walked([[(D, -1), (A, 0)]], logits, processors)[1] == [[A, A]]
