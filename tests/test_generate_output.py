"""What a call gives back, token by token, for one row and for several: plain `generate` is the reference, in fp64."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import BATCH, BATCH_MASK, NEW, PROMPT, Recorder, letter_tokenizer, plain, sequences, talon
from models import VOCABULARY, drafter_zoo, random_head, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from talon_hf import TalonOutput, TalonStats, generate
from talon_hf.compat import cache_keyword, cache_output_field

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def endless() -> PreTrainedModel:
    """A model without an end-of-sequence token."""
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer()


# What it gives back --------------------------------------------------------------------------------------------------


def test_a_dict_is_asked_for_or_not(llama: PreTrainedModel) -> None:
    ids = talon(llama, PROMPT, "good", max_new_tokens=NEW)
    assert type(ids) is Tensor
    assert ids.dtype == torch.int64
    out = talon(llama, PROMPT, "good", max_new_tokens=NEW, return_dict_in_generate=True)
    assert isinstance(out, TalonOutput)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert isinstance(out.talon_stats, TalonStats)
    assert out.sequences.tolist() == ids.tolist()
    assert out.scores is None
    assert out.logits is None


def record(rows: int, model: PreTrainedModel, **options: Any) -> tuple[Any, Any]:
    """Outputs with scores and logits, plain `generate`'s and ours, for one prompt or a padded batch of three."""
    ids, mask = (PROMPT, torch.ones_like(PROMPT)) if rows == 1 else (BATCH, BATCH_MASK)
    options |= {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    want = plain(model, ids, **options)
    return want, talon(model, ids, "good", want.sequences, **options)


@pytest.mark.parametrize("processors", [{}, {"no_repeat_ngram_size": 2, "suppress_tokens": [5, 42]}])
@pytest.mark.parametrize("rows", [1, 3])
def test_scores_and_logits_are_plain_generates(
    rows: int, processors: dict[str, Any], endless: PreTrainedModel
) -> None:
    want, out = record(rows, endless, **processors)
    assert sequences(out) == sequences(want)
    for name in ("scores", "logits"):
        assert len(out[name]) == NEW
        for ours, theirs in zip(out[name], want[name], strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("processors", [{}, {"suppress_tokens": [5]}])
def test_scores_and_logits_are_float32_whatever_the_models_dtype(
    processors: dict[str, Any], endless: PreTrainedModel
) -> None:
    want, out = record(1, endless, **processors)
    for name in ("scores", "logits"):
        assert {step.dtype for step in out[name]} == {step.dtype for step in want[name]} == {torch.float32}


def test_the_cache_of_one_row_is_plain_generates(llama: PreTrainedModel) -> None:
    want, out = record(1, llama)
    ours, theirs = out[cache_output_field()], want[cache_output_field()]
    assert ours.get_seq_length() == theirs.get_seq_length() == out.sequences.shape[1] - 1
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(mine.values, other.values, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("name", ["perfect", "good", "adversarial"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_gets_what_plain_generate_gives_it(rows: int, name: str, llama: PreTrainedModel) -> None:
    ids, mask = (PROMPT, torch.ones_like(PROMPT)) if rows == 1 else (BATCH, BATCH_MASK)
    ours, theirs = Recorder(), Recorder()
    want = plain(llama, ids, attention_mask=mask, max_new_tokens=NEW, streamer=theirs)
    talon(llama, ids, name, want, attention_mask=mask, max_new_tokens=NEW, streamer=ours)
    assert ours.puts == theirs.puts
    assert ours.ends == theirs.ends == 1


def test_text_streamers_print_the_text(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    want = plain(llama, PROMPT, max_new_tokens=NEW)
    talon(llama, PROMPT, "good", want, max_new_tokens=NEW, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == tokenizer.decode(want[0]) + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"max_new_tokens": NEW, "streamer": streamer}
    thread = threading.Thread(target=talon, args=(llama, PROMPT, "good", want), kwargs=options)
    thread.start()
    assert "".join(streamer) == tokenizer.decode(want[0, PROMPT.shape[1] :])
    thread.join()


# Copied, pickled, and without a cache --------------------------------------------------------------------------------


def test_a_copy_of_an_output_holds_what_it_holds(llama: PreTrainedModel) -> None:
    _, out = record(1, llama)
    for twin in (copy.copy(out), copy.deepcopy(out)):
        assert type(twin) is TalonOutput
        assert set(twin.keys()) == set(out.keys())
        assert sequences(twin) == sequences(out)
        assert twin.talon_stats == out.talon_stats
        assert twin[cache_output_field()].turn is not None
    assert copy.deepcopy(out)[cache_output_field()] is not out[cache_output_field()]


READER = """
import pickle, sys
class Blind:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("talon_hf", "transformers_modules"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blind())
one, three = pickle.load(open(sys.argv[1], "rb"))
print(type(one).__name__, type(one[sys.argv[2]]).__name__, type(getattr(three, sys.argv[2])).__name__)
print(one.sequences.tolist(), one.talon_stats.rounds, one.talon_stats.tau, sorted(three.keys()))
"""


def test_a_pickled_output_is_read_where_this_code_is_not(llama: PreTrainedModel, tmp_path: Path) -> None:
    one, three = record(1, llama)[1], record(3, llama)[1]
    (tmp_path / "outputs").write_bytes(pickle.dumps((one, three)))
    command = [sys.executable, "-c", READER, str(tmp_path / "outputs"), cache_output_field()]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    stats = one.talon_stats
    keys = ["logits", "scores", "sequences", "talon_stats"]
    assert told[0] == "GenerateDecoderOnlyOutput DynamicCache ValueError"
    assert told[1] == f"{one.sequences.tolist()} {stats.rounds} {stats.tau} {keys}"


USES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda cache: cache.get_seq_length(),
    "an attribute": lambda cache: cache.layers,
    "len": len,
    "iteration": list,
    "an index": lambda cache: cache[0],
    "truth": bool,
}


@pytest.mark.parametrize("copied", [lambda out: out, copy.copy, copy.deepcopy])
def test_what_stands_for_the_cache_of_a_batch_is_no_item_and_says_why_when_used(
    copied: Callable[[Any], Any], llama: PreTrainedModel
) -> None:
    out = copied(
        talon(llama, BATCH, "good", attention_mask=BATCH_MASK, max_new_tokens=NEW, return_dict_in_generate=True)
    )
    name = cache_output_field()
    assert list(out.keys()) == ["sequences", "talon_stats"]
    assert name not in out
    assert len(out) == len(out.to_tuple()) == 2
    cache = getattr(out, name)
    assert out.past_key_values is cache
    for use in USES.values():
        with pytest.raises(ValueError, match=r"at their own pace.*without one"):
            use(cache)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_call_with_what_stands_for_the_cache_of_a_batch_is_refused(pickled: bool, llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"attention_mask": BATCH_MASK, "max_new_tokens": NEW, "return_dict_in_generate": True}
    out = talon(llama, BATCH, "good", **options)
    name = cache_output_field()
    cache = getattr(pickle.loads(pickle.dumps(out)) if pickled else out, name)
    with pytest.raises(ValueError, match="at their own pace"):
        talon(llama, BATCH, random_head(llama), **options, **{name: cache})
    with pytest.raises(AttributeError if pickled else ValueError):
        plain(llama, BATCH, **options, **{name: cache})
    with pytest.raises(AttributeError if pickled else ValueError):
        llama(input_ids=BATCH, **{cache_keyword(llama): cache})


# Several rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["perfect", "good", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adversarial", "small_vocabulary"))],
)
def test_rows_of_a_left_padded_batch_say_what_they_say_alone(name: str, llama: PreTrainedModel) -> None:
    want = plain(llama, BATCH, attention_mask=BATCH_MASK, max_new_tokens=20)
    out = talon(llama, BATCH, name, want, attention_mask=BATCH_MASK, max_new_tokens=20)
    assert sequences(out) == want.tolist()
    for row, valid, text in zip(BATCH, BATCH_MASK.bool(), out.tolist(), strict=True):
        alone = sequences(talon(llama, row[valid].unsqueeze(0), name, max_new_tokens=20))[0]
        padding = int((~valid).sum())
        assert text[padding : padding + len(alone)] == alone
        assert not any(text[padding + len(alone) :])


def test_num_return_sequences_repeats_every_prompt(llama: PreTrainedModel) -> None:
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": NEW}
    want = plain(llama, BATCH, attention_mask=BATCH_MASK, **options)
    texts = [
        row[6 - int(keep.sum()) :].tolist() for row, keep in zip(want, BATCH_MASK.repeat_interleave(2, 0), strict=True)
    ]
    drafter = drafter_zoo(texts, llama)["good"]
    out = generate(BATCH, model=llama, assistant_model=drafter, attention_mask=BATCH_MASK, **options)
    assert len(out) == 6
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_processors_that_know_their_row_meet_it(rows: int, llama: PreTrainedModel) -> None:
    def allowed(batch_id: int, ids: Tensor) -> list[int]:
        return [token for token in range(3, VOCABULARY) if (token + batch_id + len(ids)) % 3]

    options = {"attention_mask": BATCH_MASK[:rows], "max_new_tokens": NEW, "prefix_allowed_tokens_fn": allowed}
    want = plain(llama, BATCH[:rows], **options)
    assert sequences(talon(llama, BATCH[:rows], "good", want, **options)) == want.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_repetition_penalty_holds_in_every_row(rows: int, llama: PreTrainedModel) -> None:
    options = {"attention_mask": BATCH_MASK[:rows], "max_new_tokens": NEW, "repetition_penalty": 2.0}
    want = plain(llama, BATCH[:rows], **options)
    assert sequences(talon(llama, BATCH[:rows], "good", want, **options)) == want.tolist()


def test_a_repetition_penalty_holds_in_every_returned_sequence(llama: PreTrainedModel) -> None:
    options = {"attention_mask": BATCH_MASK, "max_new_tokens": NEW, "repetition_penalty": 2.0}
    want = plain(llama, BATCH, **options).repeat_interleave(2, dim=0)
    options |= {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    assert plain(llama, BATCH, **options).tolist() == want.tolist()
    out = generate(BATCH, model=llama, assistant_model=random_head(llama), **options)
    assert out.tolist() == want.tolist()
