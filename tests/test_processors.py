"""Every logits processor of transformers, seen with each node's own prefix: the tokens are plain `generate`'s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from calls import NEW, PROMPT, padded, plain, sequences, talon
from models import VOCABULARY, drafter_zoo, tiny_model
from packaging.version import Version
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, WatermarkingConfig

pytestmark = pytest.mark.conformance

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
# A small budget, so that trees leave candidates out.
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "talon_node_budget": 12}
CASES = [pytest.param({"do_sample": False, **options}, id=name) for name, options in GREEDY.items()]
CASES += [pytest.param({"do_sample": True, "top_k": 0, **options}, id=name) for name, options in SAMPLED.items()]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=None)


@pytest.mark.parametrize("options", CASES)
def test_processor_gives_plain_generates_tokens(model: Any, options: dict[str, Any]) -> None:
    want = plain(model, PROMPT, max_new_tokens=NEW, **options)
    for name in ("perfect", "good", "adversarial"):
        assert sequences(talon(model, PROMPT, name, want, **OPTIONS, **options)) == want.tolist(), name
    base = {"do_sample": True, "top_k": 0} if options["do_sample"] else {}
    if not {"renormalize_logits", "remove_invalid_values"} & set(options):
        unprocessed = plain(model, PROMPT, max_new_tokens=NEW, **base)
        assert want.tolist() != unprocessed.tolist(), "the processor changes nothing here, so nothing was tested"


@pytest.mark.parametrize("options", [case for case in CASES if case.values[0]["do_sample"] is False])
def test_processor_treats_each_row_of_a_batch_as_plain_generate_does(model: Any, options: dict[str, Any]) -> None:
    ids, mask = padded(ROWS)
    want = plain(model, ids, attention_mask=mask, max_new_tokens=NEW, **options)
    # The drafter that expects the padding in the text knows the longest row alone.
    for drafter in (drafter_zoo(want.tolist(), model)["good"], "good"):
        out = talon(model, ids, drafter, want, attention_mask=mask, **OPTIONS, **options)
        assert sequences(out) == want.tolist()


def test_a_forced_bos_follows_a_prompt_of_one_token(model: Any) -> None:
    ids = torch.tensor([[7]])
    want = plain(model, ids, max_new_tokens=NEW, forced_bos_token_id=4)
    assert want[0, 1] == 4
    assert sequences(talon(model, ids, "good", want, forced_bos_token_id=4, **OPTIONS)) == want.tolist()


NEGATIVE = [[9, 8, 7], [4, 4], [11]]
GUIDED: dict[str, list[str]] = {
    "the last token alone": [],
    "negative prompts": ["negative_prompt_ids"],
    "masked negative prompts": ["negative_prompt_ids", "negative_prompt_attention_mask"],
}


def guidance(rows: int, arguments: list[str]) -> dict[str, Any]:
    given = dict(zip(("negative_prompt_ids", "negative_prompt_attention_mask"), padded(NEGATIVE[:rows]), strict=True))
    return {"guidance_scale": 1.7, **{name: given[name] for name in arguments}}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("arguments", GUIDED.values(), ids=GUIDED)
def test_guidance_gives_plain_generates_tokens(model: Any, arguments: list[str], do_sample: bool) -> None:
    options = {"do_sample": do_sample, **guidance(1, arguments)}
    want = plain(model, PROMPT, max_new_tokens=NEW, **options)
    for name in ("perfect", "adversarial"):
        assert sequences(talon(model, PROMPT, name, want, **OPTIONS, **options)) == want.tolist()
    assert want.tolist() != sequences(plain(model, PROMPT, max_new_tokens=NEW, do_sample=do_sample))


@pytest.mark.parametrize("arguments", GUIDED.values(), ids=GUIDED)
def test_guidance_treats_each_row_of_a_batch_as_plain_generate_does(model: Any, arguments: list[str]) -> None:
    ids, mask = padded(ROWS)
    options = {"attention_mask": mask, **guidance(len(ROWS), arguments)}
    want = plain(model, ids, max_new_tokens=NEW, **options)
    assert sequences(talon(model, ids, "good", want, **OPTIONS, **options)) == want.tolist()


def test_guidance_runs_one_unconditional_forward_for_each_token(model: Any) -> None:
    want = plain(model, PROMPT, max_new_tokens=NEW, guidance_scale=1.7)
    forwards: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    options = {"guidance_scale": 1.7, "return_dict_in_generate": True, "talon_check": False, **OPTIONS}
    out = talon(model, PROMPT, "perfect", want, **options)
    handle.remove()
    assert len(forwards) == 1 + out.talon_stats.batch_rounds + NEW
    assert out.talon_stats.batch_rounds < NEW / 2


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
    want = plain(model, PROMPT, max_new_tokens=NEW, logits_processor=LogitsProcessorList([theirs]))
    out = talon(model, PROMPT, "good", want, logits_processor=LogitsProcessorList([ours]), **OPTIONS)
    assert sequences(out) == want.tolist()
    prefixes = [want[0, : PROMPT.shape[1] + step].tolist() for step in range(NEW)]
    assert ours.prefixes == theirs.prefixes == prefixes


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
    talon(model, ids, "perfect", ids, do_sample=True, top_k=4, **OPTIONS)
    assert max(heights) == 3
    assert sum(heights) == 3 * NEW


@pytest.mark.skipif(Version(transformers.__version__) < Version("4.46"), reason="no SynthID")
def test_synthid_watermark_gives_plain_generates_tokens(model: Any) -> None:
    config = transformers.SynthIDTextWatermarkingConfig(
        ngram_len=3, keys=[654, 400, 836, 123, 340], sampling_table_size=64, context_history_size=16
    )
    options = {"do_sample": True, "top_k": 0, "watermarking_config": config}
    want = plain(model, PROMPT, max_new_tokens=NEW, **options)
    assert sequences(talon(model, PROMPT, "good", want, **OPTIONS, **options)) == want.tolist()
