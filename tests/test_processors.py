"""Every logits processor of transformers, seen with each node's own prefix: the tokens are plain `generate`'s."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from models import VOCABULARY, drafter_zoo, tiny_model
from packaging.version import Version
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, WatermarkingConfig

from talon_hf import generate

pytestmark = pytest.mark.conformance

NEW = 16
PROMPT = torch.tensor([[7, 11, 3, 42, 5, 9, 23]])
ROWS = [[7, 11, 3, 42, 5, 9, 23], [5, 9, 23], [33, 4, 18, 21, 40]]


def allowed_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """A rule that depends on the row's number and on the whole prefix."""
    return [(int(ids.sum()) + step * (row + 3)) % VOCABULARY for step in range(9)]


GREEDY: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "sequence_bias": {"sequence_bias": {(9,): 4.0, (30, 15): -9.0, (5, 23): 6.0}},
    "bad_words": {"bad_words_ids": [[30], [15, 39], [31]]},
    "min_length": {"min_length": 18, "eos_token_id": [2, 15, 39]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [2, 15, 39]},
    "forced_eos": {"forced_eos_token_id": 2},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 2},
    "suppress_tokens": {"suppress_tokens": [30, 15, 39, 31]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [30, 15]},
    "prefix_allowed_tokens": {"prefix_allowed_tokens_fn": allowed_tokens},
    "remove_invalid": {"remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.15},
    "eta": {"eta_cutoff": 0.5},
    "renormalize": {"renormalize_logits": True, "top_p": 0.8},
    "all_at_once": {
        "temperature": 1.4,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
    },
}
if hasattr(GenerationConfig(), "top_h"):
    SAMPLED["top_h"] = {"top_h": 0.5}
CASES = [pytest.param({"do_sample": False, **options}, id=name) for name, options in GREEDY.items()]
CASES += [pytest.param({"do_sample": True, "top_k": 0, **options}, id=name) for name, options in SAMPLED.items()]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=None)


def plain(model: Any, ids: torch.Tensor, **options: Any) -> list[int]:
    torch.manual_seed(5)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **options)[0].tolist()


def talon(model: Any, ids: torch.Tensor, drafter: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "talon_node_budget": 12, **options}
    return generate(ids, model=model, assistant_model=drafter, **options)


@pytest.mark.parametrize("options", CASES)
def test_processor_gives_plain_generates_tokens(model: Any, options: dict[str, Any]) -> None:
    want = plain(model, PROMPT, **options)
    zoo = drafter_zoo([want], model)
    for name in ("perfect", "good", "adversarial"):
        assert talon(model, PROMPT, zoo[name], **options)[0].tolist() == want, name
    base = {"do_sample": options["do_sample"], "top_k": 0} if options["do_sample"] else {"do_sample": False}
    if not {"renormalize_logits", "remove_invalid_values"} & set(options):
        assert want != plain(model, PROMPT, **base), "the processor changes nothing here, so nothing was tested"


@pytest.mark.parametrize("options", [case for case in CASES if case.values[0]["do_sample"] is False])
def test_processor_treats_each_row_of_a_batch_as_plain_generate_does(model: Any, options: dict[str, Any]) -> None:
    longest = max(map(len, ROWS))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ROWS])
    want = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options).tolist()
    zoo = drafter_zoo([[t for t, m in zip(row, [1] * 99, strict=False) if m] for row in want], model)
    got = talon(model, ids, zoo["good"], attention_mask=mask, **options).tolist()
    assert got == want
    unpadded = [row[longest - len(prompt) :] for row, prompt in zip(want, ROWS, strict=True)]
    assert talon(model, ids, drafter_zoo(unpadded, model)["good"], attention_mask=mask, **options).tolist() == want


def test_a_forced_bos_follows_a_prompt_of_one_token(model: Any) -> None:
    ids, options = torch.tensor([[7]]), {"do_sample": False, "forced_bos_token_id": 4}
    want = plain(model, ids, **options)
    assert want[1] == 4
    assert talon(model, ids, drafter_zoo([want], model)["good"], **options)[0].tolist() == want


class Counting(LogitsProcessor):
    """Stateful: forbids a token that depends on how often it was called, and remembers every prefix."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prefixes.append(input_ids[0].tolist())
        scores[:, (7 * len(self.prefixes)) % VOCABULARY :] = -torch.inf
        return scores


def test_a_stateful_processor_is_called_once_per_emitted_token_in_order(model: Any) -> None:
    ours, theirs = Counting(), Counting()
    want = plain(model, PROMPT, do_sample=False, logits_processor=LogitsProcessorList([theirs]))
    drafter = drafter_zoo([want], model)["good"]
    got = talon(model, PROMPT, drafter, do_sample=False, logits_processor=LogitsProcessorList([ours]))
    assert got[0].tolist() == want
    assert ours.prefixes == theirs.prefixes == [want[: PROMPT.shape[1] + step] for step in range(NEW)]


def test_in_a_batch_every_row_has_a_stateful_processor_of_its_own(model: Any) -> None:
    solo = [
        plain(model, torch.tensor([row]), do_sample=False, logits_processor=LogitsProcessorList([Counting()]))
        for row in ROWS
    ]
    longest = max(map(len, ROWS))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in ROWS])
    mask = (ids != 0).long()
    shared = Counting()
    drafter = drafter_zoo(solo, model)["good"]
    got = talon(
        model, ids, drafter, attention_mask=mask, do_sample=False, logits_processor=LogitsProcessorList([shared])
    )
    for row, (prompt, want) in enumerate(zip(ROWS, solo, strict=True)):
        assert got[row, longest:].tolist() == want[len(prompt) :]
    assert shared.prefixes == []


def test_a_processor_that_cannot_be_copied_is_refused_in_a_batch_before_any_token(model: Any) -> None:
    class Locked(LogitsProcessor):
        def __init__(self) -> None:
            self.source = itertools.count()
            self.open = open(__file__)  # noqa: SIM115  # a file handle cannot be copied

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise AssertionError("called")

    ids = torch.tensor([[7, 11, 3], [5, 9, 23]])
    drafter = drafter_zoo([[], []], model)["perfect"]
    with pytest.raises(ValueError, match=r"Locked cannot be copied .* one prompt at a time"):
        talon(model, ids, drafter, do_sample=False, logits_processor=LogitsProcessorList([Locked()]))


def test_prefix_free_processors_are_called_once_for_all_rows_of_a_step(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights: list[int] = []
    warper = transformers.TopKLogitsWarper
    call = warper.__call__

    def spy(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        heights.append(len(scores))
        return call(self, input_ids, scores)

    monkeypatch.setattr(warper, "__call__", spy)
    ids = torch.tensor([[7, 11, 3], [5, 9, 23], [33, 4, 18]])
    talon(model, ids, drafter_zoo([[], [], []], model)["perfect"], do_sample=True, top_k=4)
    assert max(heights) == 3
    assert sum(heights) == 3 * NEW


@pytest.mark.skipif(Version(transformers.__version__) < Version("4.46"), reason="no SynthID")
def test_synthid_watermark_gives_plain_generates_tokens(model: Any) -> None:
    config = transformers.SynthIDTextWatermarkingConfig(
        ngram_len=3, keys=[654, 400, 836, 123, 340], sampling_table_size=64, context_history_size=16
    )
    options = {"do_sample": True, "top_k": 0, "watermarking_config": config}
    want = plain(model, PROMPT, **options)
    assert talon(model, PROMPT, drafter_zoo([want], model)["good"], **options)[0].tolist() == want
