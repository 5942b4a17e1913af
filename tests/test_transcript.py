"""Transcript: whatever pace its rows advance at, what it streams, asks, keeps and returns is plain decoding's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from models import drafter_zoo, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer

from talon_hf import generate
from talon_hf.compat import streams_before_stopping
from talon_hf.transcript import Transcript

EOS, PAD = 9, 0
PROMPT = torch.tensor([[5, 6], [0, 7], [8, 8]])
TEXTS = [[1, 2, EOS], [3, 4, 5, 6, 7, EOS], [EOS]]


class Recorder(BaseStreamer):
    """Keeps the shape and the values of every put."""

    def __init__(self) -> None:
        self.puts: list[tuple[torch.Size, list[Any]]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert self.ended == 0
        assert value.device.type == "cpu"
        self.puts.append((value.shape, value.tolist()))

    def end(self) -> None:
        self.ended += 1


class Asked:
    """A stopping criterion that never stops and notes what it is asked about."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        self.calls.append((input_ids.tolist(), scores))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def transcript_of(rows: int = 3, *criteria: Any, **options: Any) -> Transcript:
    stops = StoppingCriteriaList([EosTokenCriteria(EOS), *criteria])
    return Transcript(PROMPT[:rows], stops, pad_token_id=PAD, **options)


def in_any_order(texts: Sequence[Sequence[int]], seed: int) -> Iterator[tuple[int, int]]:
    """(row, token): every row in its own order, the rows at random paces."""
    rng, left = random.Random(seed), [list(text) for text in texts]
    while rows := [row for row, text in enumerate(left) if text]:
        row = rng.choice(rows)
        yield row, left[row].pop(0)


def padded(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    longest = max(map(len, texts))
    return [[*text, *[PAD] * (longest - len(text))] for text in texts]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_step_is_put_once_every_running_row_has_it(rows: int, seed: int) -> None:
    streamer = Recorder()
    transcript = transcript_of(rows, streamer=streamer)
    for row, token in in_any_order(TEXTS[:rows], seed):
        before = list(transcript.finished)
        transcript.append([row], [token])
        finished = before if streams_before_stopping() else transcript.finished
        running = [length for length, done in zip(transcript.lengths, finished, strict=True) if not done]
        assert len(streamer.puts) == min(running, default=max(transcript.lengths)) - PROMPT.shape[1]
    assert streamer.ended == 0
    transcript.close()
    steps = zip(*padded(TEXTS[:rows]), strict=True)
    assert streamer.puts == [(torch.Size([rows]), list(step)) for step in steps]
    assert streamer.ended == 1


def test_a_single_row_streams_every_token_at_once() -> None:
    streamer = Recorder()
    transcript = transcript_of(1, streamer=streamer)
    for count, token in enumerate(TEXTS[0], start=1):
        transcript.append([0], [token])
        assert len(streamer.puts) == count


@pytest.mark.parametrize("seed", range(3))
def test_stopping_criteria_are_asked_once_a_token_in_order_about_the_whole_row(seed: int) -> None:
    asked = Asked()
    transcript = transcript_of(3, asked)
    order = list(in_any_order(TEXTS, seed))
    for row, token in order:
        transcript.append([row], [token])
    said: list[list[int]] = PROMPT.tolist()
    for (row, token), (ids, scores) in zip(order, asked.calls, strict=True):
        said[row].append(token)
        assert (ids, scores) == ([said[row]], None)


def test_stopping_criteria_are_shown_the_rows_own_scores_where_they_are_kept() -> None:
    asked = Asked()
    transcript = transcript_of(2, asked, keep_scores=True)
    for row, token in ((0, 1), (1, 3), (1, 4)):
        transcript.append([row], [token], torch.full((1, 4), 10.0 * row + token))
    assert [[step.tolist() for step in scores] for _, scores in asked.calls] == [
        [[[1.0] * 4]],
        [[[13.0] * 4]],
        [[[13.0] * 4], [[14.0] * 4]],
    ]


def test_a_criterion_hears_of_a_token_before_or_after_the_streamer_as_with_plain_generate() -> None:
    order: list[str] = []

    class Listening(Recorder):
        def put(self, value: Tensor) -> None:
            order.append("put")

    def criterion(input_ids: Tensor, scores: Any) -> Tensor:
        order.append("asked")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    model = tiny_model("llama", eos_token_id=None)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "stopping_criteria": [criterion]}
    want = model.generate(PROMPT[:1], streamer=Listening(), **options)
    plain, order = order, []
    drafter = drafter_zoo(want.tolist(), model)["perfect"]
    generate(PROMPT[:1], model=model, assistant_model=drafter, streamer=Listening(), **options)
    assert order == plain


def test_in_lockstep_all_rows_are_appended_before_the_column_is_streamed_and_asked_about() -> None:
    streamer, asked = Recorder(), Asked()
    transcript = transcript_of(3, asked, lockstep=True, streamer=streamer, keep_scores=True)
    said = []
    for tokens in ([1, 3, EOS], [2, 4, 5], [EOS, 5, 6], [7, EOS, 8]):
        said.append(transcript.append([0, 1, 2], tokens, torch.full((3, 4), 10.0 * len(said))))
        assert [transcript.has_ended(row) for row in range(3)] == [len(said) == 4] * 3
    assert said == [[1, 3, EOS], [2, 4, PAD], [EOS, 5, PAD], [PAD, EOS, PAD]]
    assert streamer.puts == [(torch.Size([3]), step) for step in said]
    for step, (ids, scores) in enumerate(asked.calls, start=1):
        assert ids == [[*p, *row] for p, row in zip(PROMPT.tolist(), zip(*said[:step], strict=True), strict=True)]
        assert [float(kept[0, 0]) for kept in scores] == [10.0 * i for i in range(step)]
    assert [tuple(step.shape) for step in transcript.scores()] == [(3, 4)] * 4


def test_in_lockstep_without_an_end_token_a_finished_row_talks_on_until_the_last_has_ended() -> None:
    class EndsRow:
        def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
            return input_ids[:, -1] == EOS

    transcript = Transcript(PROMPT, StoppingCriteriaList([EndsRow()]), pad_token_id=PAD, lockstep=True)
    assert transcript.append([0, 1, 2], [EOS, 3, EOS]) == [EOS, 3, EOS]
    assert transcript.append([0, 1, 2], [4, 5, 6]) == [4, 5, 6]
    assert [transcript.finished, [transcript.is_padded(row) for row in range(3)]] == [[True, False, True], [False] * 3]
    transcript.append([0, 1, 2], [7, EOS, 8])
    assert transcript.has_ended(0)
    assert transcript.sequences()[:, 2:].tolist() == [[EOS, 4, 7], [3, 5, EOS], [EOS, 6, 8]]


@pytest.mark.parametrize("seed", range(3))
def test_finished_rows_are_padded_and_rows_know_where_they_are(seed: int) -> None:
    transcript = transcript_of()
    for row, token in in_any_order(TEXTS, seed):
        assert not transcript.finished[row]
        transcript.append([row], [token])
        assert transcript.prefix(row)[0, -1] == transcript.last([row])[0] == token
        assert transcript.finished[row] is (token == EOS)
    assert transcript.lengths == [5, 8, 3]
    assert transcript.sequences().tolist() == [p + t for p, t in zip(PROMPT.tolist(), padded(TEXTS), strict=True)]
    assert transcript.last([2, 1]).tolist() == [EOS, EOS]


def test_a_long_text_outgrows_its_buffer_unharmed() -> None:
    transcript, text = transcript_of(2), [1 + i % 8 for i in range(500)]
    for token in text:
        transcript.append([1], [token])
    transcript.append([0], [EOS])
    assert transcript.prefix(1).tolist() == [[0, 7, *text]]
    assert transcript.sequences().tolist() == [[5, 6, EOS, *[PAD] * 499], [0, 7, *text]]


def test_the_prompt_is_not_written_to() -> None:
    before = PROMPT.clone()
    transcript = transcript_of()
    transcript.append([0], [3])
    assert PROMPT.equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_and_logits_are_kept_by_step_in_float32_with_zeros_behind_a_finished_row(dtype: torch.dtype) -> None:
    transcript = transcript_of(2, keep_scores=True, keep_logits=True)
    for row, token in ((0, 1), (1, 3), (1, 4), (0, EOS), (1, EOS)):
        kept = torch.full((1, 3), token, dtype=dtype)
        transcript.append([row], [token], kept, -kept)
    want = torch.tensor([[[1.0] * 3, [3.0] * 3], [[9.0] * 3, [4.0] * 3], [[0.0] * 3, [9.0] * 3]])
    assert [step.dtype for step in transcript.scores()] == [torch.float32] * 3
    assert torch.stack(transcript.scores()).equal(want)
    assert torch.stack(transcript.logits()).equal(-want)


def test_nothing_is_kept_unless_asked_for() -> None:
    transcript = transcript_of(1)
    transcript.append([0], [1], torch.zeros(1, 3), torch.zeros(1, 3))
    assert (transcript.scores(), transcript.logits()) == (None, None)


# A whole call, against plain `generate`.


@pytest.fixture(scope="module")
def endless() -> PreTrainedModel:
    """A model without an end-of-sequence token, so that each test chooses where its rows end."""
    return tiny_model("llama", eos_token_id=None)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["perfect", "good", "adversarial"])
def test_the_puts_of_a_call_are_plain_generates(rows: int, name: str, endless: PreTrainedModel) -> None:
    ids = torch.tensor([[7, 11, 3, 42], [9, 23, 5, 17], [31, 8, 19, 4]])[:rows]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    options |= {
        "eos_token_id": [49, 26],
        "pad_token_id": PAD,
    }  # row 1 says 49 as its tenth token, row 2 says 26 as its fourth
    plain, ours = Recorder(), Recorder()
    want = endless.generate(ids, streamer=plain, **options)
    drafter = drafter_zoo(want.tolist(), endless)[name]
    got = generate(ids, model=endless, assistant_model=drafter, streamer=ours, **options)
    assert got.equal(want)
    assert len({row.tolist().count(PAD) for row in want}) == rows
    assert ours.puts == plain.puts
    assert ours.ended == plain.ended == 1
