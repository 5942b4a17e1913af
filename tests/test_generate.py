"""What a call of `generate` promises, kept by ours: plain `generate` on the same tiny fp64 model is the reference."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import BATCH, BATCH_MASK, NEW, PROMPT, Seen, letter_tokenizer, plain, sequences, talon
from heads import head_config, head_tensors, hub_snapshot, write_head
from models import random_head, tiny_model
from transformers import (
    BatchEncoding,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    StopStringCriteria,
    dynamic_module_utils,
    pipeline,
)
from transformers.generation import stopping_criteria

from talon_hf import EagleDraft, generate

pytestmark = pytest.mark.conformance

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def endless() -> PreTrainedModel:
    """A model without an end-of-sequence token."""
    return tiny_model("llama", eos_token_id=None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer()


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for the code that transformers loads from a folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


# How it is called ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["positional", "keyword", "folder"])
def test_the_string_form_gives_plain_generates_text(
    how: str, llama: PreTrainedModel, tmp_path: Path, modules_cache: None
) -> None:
    config = head_config(llama)
    folder = write_head(tmp_path / "head", config, head_tensors(config))
    assistant = str(folder) if how == "folder" else random_head(llama)
    prompt = () if how == "keyword" else (PROMPT,)
    named = {"input_ids": PROMPT} if how == "keyword" else {}
    out = llama.generate(
        *prompt,
        **named,
        attention_mask=torch.ones_like(PROMPT),
        custom_generate=str(ROOT),
        trust_remote_code=True,
        assistant_model=assistant,
        talon_node_budget=8,
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    assert out.sequences.tolist() == sequences(plain(llama, PROMPT, max_new_tokens=NEW))
    assert out.talon_stats.nodes <= 8 * out.talon_stats.rounds


def test_a_string_is_loaded_once_for_a_dtype(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = head_config(llama)
    folder = write_head(tmp_path, config, head_tensors(config))
    loaded: list[EagleDraft] = []
    load = EagleDraft.from_pretrained

    def counted(source: str, **options: Any) -> EagleDraft:
        loaded.append(load(source, **options))
        return loaded[-1]

    monkeypatch.setattr(EagleDraft, "from_pretrained", counted)
    for model in (llama, llama, tiny_model("llama", dtype=torch.float32), llama):
        generate(PROMPT, model=model, assistant_model=str(folder), max_new_tokens=3)
    assert [head.dtype for head in loaded] == [torch.float64, torch.float32]


def test_a_string_may_name_a_folder_of_a_hub_repository(llama: PreTrainedModel, tmp_path: Path) -> None:
    config = head_config(llama)
    write_head(hub_snapshot(tmp_path, "org/talon") / "drafter", config, head_tensors(config))
    hub = {"cache_dir": str(tmp_path), "local_files_only": True}
    out = generate(
        PROMPT, model=llama, assistant_model="org/talon/drafter", do_sample=False, max_new_tokens=NEW, **hub
    )
    assert sequences(out) == sequences(plain(llama, PROMPT, max_new_tokens=NEW))


def test_a_pipeline_takes_a_folder_at_the_call(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, modules_cache: None, tmp_path: Path
) -> None:
    """At construction transformers itself would load the folder, as a model and a tokenizer that are not there."""
    config = head_config(llama)
    folder = write_head(tmp_path / "head", config, head_tensors(config))
    with pytest.raises((ValueError, OSError)):
        pipeline("text-generation", model=llama, tokenizer=tokenizer, assistant_model=str(folder))
    pipe = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    options = {"do_sample": False, "max_new_tokens": NEW}
    ours = {"custom_generate": str(ROOT), "trust_remote_code": True}
    for source in (str(folder), folder):
        assert pipe("Hello", assistant_model=source, **ours, **options) == pipe("Hello", **options)


@pytest.mark.parametrize("where", ["call", "construction"])
def test_a_text_generation_pipeline_takes_it(
    where: str, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, modules_cache: None
) -> None:
    head = random_head(llama)
    at = {"call": {}, "construction": {}}
    at[where] |= {"assistant_model": head, "custom_generate": str(ROOT), "talon_node_budget": 8}
    options = {"do_sample": False, "max_new_tokens": NEW}
    want = pipeline("text-generation", model=llama, tokenizer=tokenizer)("Hello", **options)
    pipe = pipeline("text-generation", model=llama, tokenizer=tokenizer, **at["construction"])
    steps: list[int] = []
    head.layer.register_forward_hook(lambda *_: steps.append(1))
    assert pipe("Hello", trust_remote_code=True, **at["call"], **options) == want
    assert steps


@pytest.mark.parametrize(
    ("call", "given", "own", "depth"),
    [(2, 3, 4, 2), (None, 3, 4, 3), (None, None, 4, 4), (2, None, 4, 2), (None, None, None, NEW - 2)],
)
def test_a_talon_argument_wins_over_the_given_config_and_that_over_the_models(
    call: int | None, given: int | None, own: int | None, depth: int
) -> None:
    """A perfect drafter fills every path, so the deepest accepted node shows which limit held."""
    model = tiny_model("llama", eos_token_id=None)
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    if given is not None:
        options = {"generation_config": GenerationConfig(**options, talon_max_depth=given)}
    if own is not None:
        model.generation_config.talon_max_depth = own
    if call is not None:
        options["talon_max_depth"] = call
    out = talon(model, PROMPT, "perfect", whole, **options)
    assert len(out.talon_stats.accepted_by_depth) == depth
    assert sequences(out) == sequences(whole)


@pytest.mark.parametrize("where", ["call", "given", "own"])
def test_an_unknown_talon_name_is_refused_wherever_it_stands(where: str) -> None:
    model = tiny_model("llama")
    options: dict[str, Any] = {"generation_config": GenerationConfig(max_new_tokens=4)}
    if where == "call":
        options["talon_nodes"] = 60
    else:
        (options["generation_config"] if where == "given" else model.generation_config).talon_nodes = 60
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=r"`talon_nodes` \(=60\) is not an option.*`talon_node_budget`"):
        generate(PROMPT, model=model, assistant_model=random_head(model), **options)


def test_a_tokenizers_encoding_is_taken_as_plain_generate_takes_it(llama: PreTrainedModel) -> None:
    encoding = BatchEncoding({"input_ids": BATCH, "attention_mask": BATCH_MASK})
    want = llama.generate(**encoding, do_sample=False, max_new_tokens=NEW)
    out = generate(**encoding, model=llama, assistant_model=random_head(llama), do_sample=False, max_new_tokens=NEW)
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize("prompt", [(), (PROMPT[:, :1],), (PROMPT,)], ids=["none", "one token", "several"])
def test_a_prompt_may_be_short_and_a_length_left_out(prompt: tuple[Any, ...], llama: PreTrainedModel) -> None:
    want = llama.generate(*prompt, do_sample=False)
    assert (
        generate(*prompt, model=llama, assistant_model=random_head(llama), do_sample=False).tolist() == want.tolist()
    )


# Where it stops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["perfect", "good", "adversarial"])
def test_it_stops_at_an_end_token_at_every_depth_of_an_accepted_path(name: str, endless: PreTrainedModel) -> None:
    whole = plain(endless, PROMPT, max_new_tokens=NEW)
    new = whole[0, PROMPT.shape[1] :].tolist()
    firsts = sorted({new.index(token) for token in new})
    assert len(firsts) > 10
    for first in firsts:
        options = {"eos_token_id": new[first], "pad_token_id": 0, "max_new_tokens": NEW}
        out = talon(endless, PROMPT, name, whole, return_dict_in_generate=True, **options)
        assert (
            sequences(out)
            == whole[:, : PROMPT.shape[1] + first + 1].tolist()
            == sequences(plain(endless, PROMPT, **options))
        )
        assert name != "perfect" or out.talon_stats.rounds == min(first, 1)


def test_any_of_several_end_tokens_ends_a_row_of_a_batch_and_pads_it(endless: PreTrainedModel) -> None:
    whole = plain(endless, BATCH, attention_mask=BATCH_MASK, max_new_tokens=NEW)
    ends = [int(whole[0, 9]), int(whole[1, 14]), int(whole[2, 20])]
    options = {"attention_mask": BATCH_MASK, "eos_token_id": ends, "pad_token_id": 0, "max_new_tokens": NEW}
    want = plain(endless, BATCH, **options)
    lengths = {(row != 0).nonzero().max().item() for row in want}
    assert len(lengths) > 1
    for name in ("perfect", "good", "adversarial", "random"):
        assert sequences(talon(endless, BATCH, name, whole, **options)) == want.tolist()


@pytest.mark.parametrize("name", ["perfect", "good"])
def test_it_stops_at_every_length(name: str, endless: PreTrainedModel) -> None:
    whole = plain(endless, PROMPT, max_new_tokens=NEW)
    for new in range(1, NEW + 1):
        want = whole[:, : PROMPT.shape[1] + new].tolist()
        assert sequences(talon(endless, PROMPT, name, whole, max_new_tokens=new)) == want
        assert sequences(talon(endless, PROMPT, name, whole, max_length=PROMPT.shape[1] + new)) == want


def test_no_node_is_drafted_that_could_not_be_emitted(endless: PreTrainedModel) -> None:
    whole = plain(endless, PROMPT, max_new_tokens=NEW)
    for new in (2, 3, 4, 7):
        options = {"talon_policy": "chain", "max_new_tokens": new, "return_dict_in_generate": True}
        stats = talon(endless, PROMPT, "perfect", whole, **options).talon_stats
        # Prefill gives one token and the root's row another, so new - 2 can be drafted.
        assert stats.nodes == 1 + (new - 2)
        assert stats.draft_steps == new - 2


def test_a_stop_string_criterion_of_the_callers_wins_as_with_plain_generate(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = tiny_model("llama", eos_token_id=None)
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    early, late = tokenizer.decode(whole[0, 9:11]), tokenizer.decode(whole[0, -6:-4])
    options = {"max_new_tokens": NEW, "tokenizer": tokenizer, "stop_strings": [early]}
    own = StoppingCriteriaList([StopStringCriteria(tokenizer, [late])])
    want = plain(model, PROMPT, stopping_criteria=own, **options)
    assert sequences(talon(model, PROMPT, "good", whole, stopping_criteria=own, **options)) == want.tolist()


@pytest.mark.parametrize("where", ["call", "given", "own"])
def test_stop_strings_end_the_text_wherever_they_stand(where: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model("llama", eos_token_id=None)
    whole = plain(model, PROMPT, max_new_tokens=NEW)
    stop = tokenizer.decode(whole[0, -6:-4])
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    if where == "given":
        options = {"generation_config": GenerationConfig(**options, stop_strings=stop)}
    elif where == "own":
        model.generation_config.stop_strings = [stop]
    else:
        options["stop_strings"] = ["nowhere", stop]
    config = model.generation_config
    before = config.to_dict(), options.get("generation_config", config).to_dict()
    want = plain(model, PROMPT, tokenizer=tokenizer, **options)
    assert PROMPT.shape[1] < want.shape[1] < whole.shape[1]
    for name in ("perfect", "good"):
        assert sequences(talon(model, PROMPT, name, whole, tokenizer=tokenizer, **options)) == want.tolist()
    assert model.generation_config is config
    assert (config.to_dict(), options.get("generation_config", config).to_dict()) == before
    with pytest.raises(ValueError, match=r"stop_strings.*tokenizer"):
        talon(model, PROMPT, "perfect", whole, **options)


@pytest.mark.parametrize("name", ["perfect", "good", "adversarial"])
def test_a_stopping_criterion_is_asked_once_a_token_as_by_plain_generate(name: str, endless: PreTrainedModel) -> None:
    whole = plain(endless, PROMPT, max_new_tokens=NEW)
    for stop_at in (PROMPT.shape[1] + 1, PROMPT.shape[1] + 11, 1 << 30):
        ours, theirs = Seen(stop_at), Seen(stop_at)
        want = plain(endless, PROMPT, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([theirs]))
        out = talon(endless, PROMPT, name, whole, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([ours]))
        assert sequences(out) == want.tolist()
        assert ours.ids == theirs.ids


def test_max_time_ends_it_inside_a_round(endless: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes at each look at the clock, which the criterion takes once a token."""
    whole = plain(endless, PROMPT, max_new_tokens=NEW)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    assert talon(endless, PROMPT, "perfect", whole, **options).talon_stats.tau > 5.0

    def outputs(call: Any, *drafter: Any) -> Any:
        monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=itertools.count().__next__))
        return call(endless, PROMPT, *drafter, max_time=4.5, **options)

    want, out = outputs(plain), outputs(talon, "perfect", whole)
    assert want.sequences.tolist() == whole[:, : PROMPT.shape[1] + 5].tolist()
    assert out.sequences.tolist() == want.sequences.tolist()
    assert (out.talon_stats.rounds, out.talon_stats.emitted) == (1, 4)


@pytest.mark.parametrize("name", ["perfect", "good"])
def test_min_new_tokens_holds_the_end_token_back(name: str, endless: PreTrainedModel) -> None:
    whole = plain(endless, PROMPT, max_new_tokens=NEW)
    options = {"eos_token_id": int(whole[0, PROMPT.shape[1] + 4]), "pad_token_id": 0, "max_new_tokens": NEW}
    for least in (3, 6, 12):
        want = plain(endless, PROMPT, min_new_tokens=least, **options)
        assert sequences(talon(endless, PROMPT, name, want, min_new_tokens=least, **options)) == want.tolist()
        assert want.shape[1] >= PROMPT.shape[1] + least


def test_none_switches_off_an_end_token_of_the_models_config(llama: PreTrainedModel) -> None:
    want = plain(llama, BATCH[:1, 2:], eos_token_id=None, max_new_tokens=40)
    assert 2 in want[0, :-1]
    out = talon(llama, BATCH[:1, 2:], "good", want, eos_token_id=None, max_new_tokens=40)
    assert sequences(out) == want.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_length": 3},
        {"max_new_tokens": 4, "no_such_argument": 1},
        {"max_new_tokens": 4, "num_return_sequences": 2},
        {"max_new_tokens": 4, "temperature": -1.0, "do_sample": True},
        {"max_new_tokens": 4, "logits_processor": 3},
    ],
)
def test_what_plain_generate_refuses_is_refused_with_the_same_error(
    options: dict[str, Any], llama: PreTrainedModel
) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 (its type is what is compared)
        plain(llama, PROMPT, **options)
    with pytest.raises(theirs.type) as ours:
        talon(llama, PROMPT, "perfect", PROMPT, **options)
    assert str(ours.value) == str(theirs.value)
