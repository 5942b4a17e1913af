"""Lockstep: a batch with a user's own processors or criteria has plain `generate`'s text, calls, order and draws."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from calls import BATCH, BATCH_MASK, letter_tokenizer, plain, sequences, talon
from models import VOCABULARY, random_head, tiny_model
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from talon_hf import TalonStats
from talon_hf.compat import cache_keyword, cache_output_field
from talon_hf.pace import must_keep_step

pytestmark = pytest.mark.conformance

ROWS, LENGTH = BATCH.shape
NEW = 14
ENDS = [2, 15, 39, 30, 31, 8]
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.3}
SHAPE = {"talon_node_budget": 12, "talon_top_k": 4}
MODES = {"greedy": {"do_sample": False}, "sampled": SAMPLED}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=None)


def unchanged(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores


class ByRow(LogitsProcessor):
    """Holds an entry a row: row i may say the tokens of its own residue class, and every call shifts them."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.lock = threading.Lock()  # no copy can be made of it

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.append(("processor", input_ids.tolist(), scores.shape, input_ids.is_contiguous()))
        allowed = torch.arange(VOCABULARY) % 3
        return torch.stack(
            [row.masked_fill(allowed == (i + len(self.log)) % 3, -torch.inf) for i, row in enumerate(scores)]
        )


class Ends(StoppingCriteria):
    """Ends row i at its own length, and notes what it is asked."""

    def __init__(self, log: list[Any], lengths: list[int], **attributes: Any) -> None:
        self.log, self.lengths, self.lock = log, lengths, threading.Lock()
        self.__dict__.update(attributes)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        kept = None if scores is None else [tuple(step.shape) for step in scores]
        self.log.append(("criterion", input_ids.tolist(), kept, input_ids.is_contiguous()))
        return torch.tensor([input_ids.shape[1] >= length for length in self.lengths])


class Puts(BaseStreamer):
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        self.log.append(("put", value.tolist()))

    def end(self) -> None:
        self.log.append("end")


# What a batch carries -> arguments of the call, given the log that its objects write to.
CARRIED: dict[str, Callable[[list[Any]], dict[str, Any]]] = {
    "a processor": lambda log: {"logits_processor": LogitsProcessorList([ByRow(log)])},
    "a processor, rows that end": lambda log: {
        "logits_processor": LogitsProcessorList([ByRow(log)]),
        "eos_token_id": ENDS,
    },
    "a criterion": lambda log: {"stopping_criteria": StoppingCriteriaList([Ends(log, [11, 17, 9])])},
    "a criterion, rows that end": lambda log: {
        "stopping_criteria": StoppingCriteriaList([Ends(log, [11, 17, 9])]),
        "eos_token_id": 15,
    },
    "a criterion with an end token": lambda log: {
        "stopping_criteria": StoppingCriteriaList([Ends(log, [11, 17, 9], eos_token_id=7)]),
        "pad_token_id": 0,
    },
    "both, processors of transformers too": lambda log: {
        "stopping_criteria": StoppingCriteriaList([Ends(log, [99, 17, 99])]),
        "logits_processor": LogitsProcessorList([ByRow(log)]),
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "guidance_scale": 1.4,
        "eos_token_id": ENDS,
    },
}


def both(
    model: Any, drafter: str, carried: Callable[[list[Any]], dict[str, Any]], shape: Any = SHAPE, **options: Any
) -> tuple[Any, Any, list[Any], list[Any]]:
    """Outputs and logs of plain `generate` and of ours, each with objects of its own."""
    options = {"attention_mask": BATCH_MASK, "max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    theirs: list[Any] = []
    ours: list[Any] = []
    want = plain(model, BATCH, streamer=Puts(theirs), **options, **carried(theirs))
    got = talon(model, BATCH, drafter, want.sequences, streamer=Puts(ours), **shape, **options, **carried(ours))
    return want, got, theirs, ours


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("carried", CARRIED)
def test_text_calls_order_and_draws_are_plain_generates(model: Any, carried: str, mode: str) -> None:
    for drafter in ("perfect", "adversarial"):
        want, got, theirs, ours = both(model, drafter, CARRIED[carried], output_scores=True, **MODES[mode])
        assert got.sequences.tolist() == want.sequences.tolist(), drafter
        assert ours == theirs, drafter
        assert got.talon_stats.lockstep
        assert got.talon_stats.nodes > got.talon_stats.rounds, "nothing was drafted"
        if drafter == "perfect":
            assert got.talon_stats.tau > 1.5


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_windows_are_crossed_in_lockstep(family: str) -> None:
    windowed = tiny_model(family, eos_token_id=None)
    want, got, theirs, ours = both(windowed, "good", CARRIED["a processor, rows that end"], max_new_tokens=24)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert ours == theirs


def test_the_law_over_policies_budgets_and_rules(model: Any) -> None:
    for policy in ("talon", "eagle", "chain"):
        for budget in (2, 9, 40):
            shape = {"talon_policy": policy, "talon_node_budget": budget}
            want, got, theirs, ours = both(model, "good", CARRIED["a processor, rows that end"], shape)
            assert got.sequences.tolist() == want.sequences.tolist(), (policy, budget)
            assert ours == theirs, (policy, budget)


def test_scores_and_logits_of_finished_rows_are_plain_generates(model: Any) -> None:
    kept = {"output_scores": True, "output_logits": True}
    want, got, _, _ = both(model, "good", CARRIED["a criterion, rows that end"], **kept)
    assert len({row.count(0) for row in want.sequences.tolist()}) > 1, "the rows finish together"
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(want[name]))


@pytest.mark.parametrize("rows", [1, 3])
def test_the_cache_of_a_padded_prompt_goes_on_with_plain_generate(model: Any, rows: int) -> None:
    """Plain `generate` expects a column for every token of the text, padding included."""
    ids, mask = BATCH[:rows], BATCH_MASK[:rows]
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "eos_token_id": ENDS[:1], "pad_token_id": 0}
    own = {"logits_processor": LogitsProcessorList([unchanged])}
    out = talon(model, ids, random_head(model, seed=3), attention_mask=mask, **options, **own)
    field = cache_output_field()
    assert out[field].get_seq_length() == out.sequences.shape[1] - 1
    longer = torch.cat([out.sequences, out.sequences[:, :3] + 1], dim=1)
    seen = torch.cat([mask, torch.ones(rows, longer.shape[1] - LENGTH, dtype=mask.dtype)], dim=1)
    want = plain(model, longer, attention_mask=seen, max_new_tokens=NEW)
    got = plain(model, longer, attention_mask=seen, max_new_tokens=NEW, **{cache_keyword(model): out[field]})
    assert got.tolist() == want.tolist()
    ours = talon(
        model, longer, random_head(model, seed=3), attention_mask=seen, max_new_tokens=NEW, **{field: out[field]}
    )
    assert sequences(ours) == want.tolist()


def test_sequences_of_one_prompt_keep_step_too(model: Any) -> None:
    carried = CARRIED["a processor, rows that end"]
    ids, options = BATCH[1:2], {"attention_mask": BATCH_MASK[1:2], "num_return_sequences": 3, **SAMPLED}
    for drafter in (random_head(model, seed=3), random_head(model, seed=4)):
        theirs: list[Any] = []
        ours: list[Any] = []
        want = plain(model, ids, max_new_tokens=NEW, **options, **carried(theirs))
        got = talon(model, ids, drafter, max_new_tokens=NEW, **options, **carried(ours))
        assert got.tolist() == want.tolist()
        assert ours == theirs


@pytest.mark.parametrize("rows", [1, 3])
def test_a_button_pressed_from_outside_ends_a_batch_at_the_next_token(model: Any, rows: int) -> None:
    class Button(StoppingCriteria):
        def __init__(self) -> None:
            self.pressed, self.asked = False, 0

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.asked += 1
            return torch.full((len(input_ids),), self.pressed)

    button, forwards = Button(), []

    def press(*_: Any) -> None:
        forwards.append(1)
        button.pressed = len(forwards) == 3

    handle = model.register_forward_pre_hook(press)
    options = {"attention_mask": BATCH_MASK[:rows], "max_new_tokens": 40, "talon_check": False}
    head = random_head(model, seed=3)
    out = talon(model, BATCH[:rows], head, stopping_criteria=StoppingCriteriaList([button]), **options)
    handle.remove()
    assert len(forwards) == 3
    assert button.asked == out.shape[1] - LENGTH < 40


@pytest.mark.parametrize("eos", [None, 15])
@pytest.mark.parametrize("name", ["perfect", "adversarial"])
def test_stop_strings_of_a_batch(model: Any, name: str, eos: int | None) -> None:
    options: dict[str, Any] = {"attention_mask": BATCH_MASK, "max_new_tokens": NEW, "eos_token_id": eos}
    options |= {"tokenizer": letter_tokenizer(), "pad_token_id": 0}
    free = plain(model, BATCH, **{**options, "eos_token_id": None}).tolist()
    letters = [options["tokenizer"].decode(row[LENGTH + 2 + i : LENGTH + 4 + i]) for i, row in enumerate(free)]
    want = plain(model, BATCH, stop_strings=letters, **options)
    got = talon(model, BATCH, name, want, stop_strings=letters, return_dict_in_generate=True, **options)
    assert sequences(got) == want.tolist()
    assert want.shape[1] < len(free[0])
    assert got.talon_stats.lockstep is (eos is None)


def test_a_prefix_function_is_asked_in_plain_generates_order(model: Any) -> None:
    def carried(log: list[Any]) -> dict[str, Any]:
        def allowed(row: int, ids: Tensor) -> list[int]:
            log.append((row, ids.tolist()))
            return [(int(ids.sum()) + len(log) + step * (row + 3)) % VOCABULARY for step in range(9)]

        return {"prefix_allowed_tokens_fn": allowed, "eos_token_id": ENDS}

    want, got, theirs, ours = both(model, "good", carried)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert ours == theirs


def test_synthid_keeps_one_state_for_all_rows(model: Any) -> None:
    config = transformers.SynthIDTextWatermarkingConfig(
        ngram_len=3, keys=[654, 400, 836, 123, 340], sampling_table_size=64, context_history_size=16
    )
    want, got, _, _ = both(model, "good", lambda _: {"watermarking_config": config}, **SAMPLED)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.talon_stats.lockstep


def test_learned_positions_end_where_the_longest_row_ends() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=8, n_head=4, n_positions=LENGTH + NEW, eos_token_id=None,
        bos_token_id=1,
    )  # fmt: skip
    learned = transformers.GPT2LMHeadModel(config).double().eval()
    want, got, theirs, ours = both(learned, "perfect", CARRIED["a criterion with an end token"])
    assert got.sequences.tolist() == want.sequences.tolist()
    assert ours == theirs


def test_residual_acceptance_keeps_step_too(model: Any) -> None:
    """Its law is `test_acceptance.py`'s; here every processed token is one that its row's rule allows."""
    for seed in range(3):
        log: list[Any] = []
        options = {"max_new_tokens": NEW, "talon_acceptance": "residual", "return_dict_in_generate": True, **SAMPLED}
        head = random_head(model, seed=seed)
        out = talon(model, BATCH, head, attention_mask=BATCH_MASK, **options, **CARRIED["a processor"](log))
        new = out.sequences[:, LENGTH:]
        assert len(log) == NEW
        assert out.talon_stats.nodes > out.talon_stats.rounds
        for step in range(NEW):
            assert all(int(token) % 3 != (row + step + 1) % 3 for row, token in enumerate(new[:, step]))


class OfANewerRelease(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == 3


OWN: dict[str, list[Any]] = {
    "a function": [unchanged],
    "a subclass": [type("TopKLogitsWarper", (TopKLogitsWarper,), {})(2)],
    "beside one of transformers": [RepetitionPenaltyLogitsProcessor(1.2), unchanged],
}
ALIKE: dict[str, list[Any]] = {
    "none": [],
    "warpers": [TopKLogitsWarper(2)],
    "by the prefix": [RepetitionPenaltyLogitsProcessor(1.2)],
}
UNKNOWN = [OfANewerRelease()]
EOS, LONG, STRING = EosTokenCriteria(2), MaxLengthCriteria(9), StopStringCriteria(letter_tokenizer(), ["AB"])


@pytest.mark.parametrize("processors", OWN.values(), ids=OWN)
def test_what_is_not_transformers_own_keeps_step(processors: list[Any]) -> None:
    assert must_keep_step(LogitsProcessorList(processors), StoppingCriteriaList([EOS, LONG]), rows=2)
    assert not must_keep_step(LogitsProcessorList(processors), StoppingCriteriaList([EOS, LONG]), rows=1)


@pytest.mark.parametrize("processors", ALIKE.values(), ids=ALIKE)
def test_what_treats_every_row_alike_stays_at_its_own_pace(processors: list[Any]) -> None:
    for criteria in ([], [LONG], [EOS, LONG], [EOS, LONG, STRING]):
        assert not must_keep_step(LogitsProcessorList(processors), StoppingCriteriaList(criteria), rows=2)
    for criteria in ([STRING], [LONG, STRING], [EOS, *UNKNOWN], UNKNOWN):
        assert must_keep_step(LogitsProcessorList(processors), StoppingCriteriaList(criteria), rows=2)


def test_a_processor_that_keeps_its_rows_elsewhere_keeps_step() -> None:
    """As one of a newer transformers may, which this package cannot narrow to a row."""
    elsewhere = transformers.EncoderRepetitionPenaltyLogitsProcessor(1.2, BATCH)
    assert not must_keep_step(LogitsProcessorList([elsewhere]), StoppingCriteriaList([EOS]), rows=ROWS)
    del elsewhere.encoder_input_ids
    assert must_keep_step(LogitsProcessorList([elsewhere]), StoppingCriteriaList([EOS]), rows=ROWS)


def test_stats_of_calls_at_both_paces_add_up() -> None:
    total = TalonStats()
    total.add(TalonStats(lockstep=True))
    total.add(TalonStats())
    assert total.lockstep
