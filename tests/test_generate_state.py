"""A call leaves the user's model as it found it, however it ends, and the next call works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from calls import BATCH, BATCH_MASK, NEW, PROMPT, Recorder, Seen, letter_tokenizer, plain, sequences, talon
from models import ScriptedDrafter, peaked, random_head, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteriaList, TextIteratorStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from talon_hf import EagleDraft, generate
from talon_hf.eagle import DraftLayer

pytestmark = pytest.mark.conformance


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything that a module and its submodules hold, by identity, containers such as the hooks by content."""
    state: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            held = tuple(map(id, value.values())) if isinstance(value, dict) else ()
            state[f"{name}.{key}"] = (id(value), held) if not isinstance(value, (int, str)) else value
    if isinstance(module, PreTrainedModel):
        state["config"] = module.config.to_dict() | {"attention": module.config._attn_implementation}
        state["generation_config"] = module.generation_config.to_dict()
    return state


def call(model: PreTrainedModel, drafter: Any, **options: Any) -> Any:
    return generate(PROMPT, model=model, assistant_model=drafter, do_sample=False, max_new_tokens=NEW, **options)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


def test_state_shows_a_hook_an_attribute_and_a_setting(model: PreTrainedModel) -> None:
    """What the tests below compare would change if anything stayed behind."""
    handle = model.model.layers[3].register_forward_pre_hook(lambda *_: None)
    hooked = state_of(model)
    handle.remove()
    clean = state_of(model)
    assert hooked != clean
    model.model.layers[3].mlp.tree_mask = None
    assert state_of(model) != clean
    del model.model.layers[3].mlp.tree_mask
    model.generation_config.max_length = 77
    assert state_of(model) != clean


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "talon_policy": "eagle"},
        {"attention_mask": BATCH_MASK, "return_dict_in_generate": True, "output_scores": True},
        {"stop_strings": "xx", "tokenizer": letter_tokenizer()},
    ],
)
def test_a_call_leaves_model_and_head_as_they_were(options: dict[str, Any], model: PreTrainedModel) -> None:
    head = random_head(model)
    model.generation_config.stop_strings = ["yy"] if "tokenizer" in options else None
    before = state_of(model), state_of(head)
    ids = BATCH if "attention_mask" in options else PROMPT
    generate(ids, model=model, assistant_model=head, **{"do_sample": False, "max_new_tokens": NEW, **options})
    assert (state_of(model), state_of(head)) == before


class StumbleError(Exception):
    """An error of the user's own code."""


def raising(at: int, error: type[BaseException], then: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """A function that calls `then`, and raises at its call number `at`."""
    calls = iter(range(1, 1 << 30))

    def act(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error
        return then(*args, **kwargs)

    return act


def stumble_in_the_drafter(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    guess = raising(5, StumbleError, lambda *_: peaked(3))
    return {"drafter": ScriptedDrafter(guess)}


def stumble_in_the_head(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(DraftLayer, "forward", raising(4, StumbleError, DraftLayer.forward))
    return {}


def stumble_in_the_streamer(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    streamer = Recorder()
    streamer.put = raising(6, StumbleError)  # type: ignore[method-assign]
    return {"streamer": streamer}


def stumble_in_a_criterion(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(Seen, "__call__", raising(5, StumbleError, Seen.__call__))
    return {"stopping_criteria": StoppingCriteriaList([Seen()])}


def stumble_in_prefill(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    mlp = type(model.model.layers[0].mlp)
    patch.setattr(mlp, "forward", raising(6, KeyboardInterrupt, mlp.forward))
    return {}


def stumble_in_a_tree_forward(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    mlp = type(model.model.layers[0].mlp)
    patch.setattr(mlp, "forward", raising(8 + 6, KeyboardInterrupt, mlp.forward))
    return {}


STUMBLES = {name: value for name, value in globals().items() if name.startswith("stumble_")}


@pytest.mark.parametrize("stumble", STUMBLES)
def test_an_error_passes_through_and_the_next_call_works(
    stumble: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head(model)
    want = sequences(plain(model, PROMPT, max_new_tokens=NEW))
    before = state_of(model), state_of(head)
    with monkeypatch.context() as patch:
        options = STUMBLES[stumble](model, patch)
        with pytest.raises((StumbleError, KeyboardInterrupt)):
            call(model, options.pop("drafter", head), **options)
    assert (state_of(model), state_of(head)) == before
    assert sequences(call(model, head)) == want
    assert sequences(plain(model, PROMPT, max_new_tokens=NEW)) == want


# A stream ends with its call -----------------------------------------------------------------------------------------


class Fragile(Recorder):
    """A streamer that raises at its put or end number `at`."""

    def __init__(self, method: str, at: int) -> None:
        super().__init__()
        setattr(self, f"_{method}", raising(at, StumbleError))

    def put(self, value: Tensor) -> None:
        super().put(value)
        getattr(self, "_put", lambda: None)()

    def end(self) -> None:
        super().end()
        getattr(self, "_end", lambda: None)()


BEFORE_THE_FIRST_TOKEN: dict[str, dict[str, Any]] = {
    "an option of ours": {"talon_node_budget": 1},
    "no drafter": {"assistant_model": None},
    "a folder that does not exist": {"assistant_model": "./no/such/head"},
    "an argument that is refused": {"num_beams": 2},
    "an argument that generate does not know": {"nonsense": 1},
    "a length that generate refuses": {"max_new_tokens": 0},
    "a prompt that cannot be read": {"input_ids": PROMPT.double()},
}


@pytest.mark.parametrize("case", BEFORE_THE_FIRST_TOKEN)
def test_an_error_before_the_first_token_ends_the_stream_once(case: str, model: PreTrainedModel) -> None:
    streamer = Recorder()
    options = {"input_ids": PROMPT, "assistant_model": random_head(model), "max_new_tokens": NEW}
    with pytest.raises((ValueError, OSError, RuntimeError)):
        generate(model=model, do_sample=False, streamer=streamer, **{**options, **BEFORE_THE_FIRST_TOKEN[case]})
    assert streamer.ends == 1


@pytest.mark.parametrize("error", [StumbleError, KeyboardInterrupt, SystemExit, StopIteration])
def test_an_error_half_way_ends_the_stream_once_and_is_raised_as_it_was(
    error: type[BaseException], model: PreTrainedModel
) -> None:
    streamer, raised = Recorder(), error("as it was")

    def stumble(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == PROMPT.shape[1] + 3:
            raise raised
        return scores

    with pytest.raises(error, match="as it was") as caught:
        call(model, random_head(model), streamer=streamer, logits_processor=[stumble])
    assert caught.value is raised
    assert streamer.ends == 1
    assert 1 <= len(streamer.puts) <= 4


@pytest.mark.parametrize(("method", "at"), [("put", 1), ("put", 4), ("end", 1)])
def test_a_streamer_that_raises_itself_is_ended_once(method: str, at: int, model: PreTrainedModel) -> None:
    streamer = Fragile(method, at)
    with pytest.raises(StumbleError):
        call(model, random_head(model), streamer=streamer)
    assert streamer.ends == 1


def test_an_end_that_raises_does_not_hide_the_error_that_came_first(model: PreTrainedModel) -> None:
    streamer = Fragile("end", 1)
    with pytest.raises(ValueError, match="talon_node_budget"):
        call(model, random_head(model), streamer=streamer, talon_node_budget=1)
    assert streamer.ends == 1


@pytest.mark.parametrize("options", [{"talon_node_budget": 1}, {"logits_processor": ["stumble"]}])
def test_the_reader_of_a_stream_does_not_wait_for_a_call_that_failed(
    options: dict[str, Any], model: PreTrainedModel
) -> None:
    streamer = TextIteratorStreamer(letter_tokenizer(), skip_prompt=True, timeout=20)
    if "logits_processor" in options:
        options = {"logits_processor": [raising(3, StumbleError, lambda _, scores: scores)]}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call(model, random_head(model), streamer=streamer, **options)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert len("".join(streamer)) < NEW
    thread.join()
    assert len(errors) == 1


# An attention that takes no tree -------------------------------------------------------------------------------------


@pytest.fixture
def flash(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for FlashAttention: it takes causal queries alone. Returns the widths of those that it was given."""
    widths: list[int] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        assert mask is None, "FlashAttention takes no mask of a tree"
        widths.append(query.shape[2])
        return sdpa(module, query, key, value, None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    model.config._attn_implementation = "flash_attention_2"
    return widths


def test_flash_attention_reads_the_prompt_and_sdpa_the_trees(flash: list[int], model: PreTrainedModel) -> None:
    want = plain(tiny_model("llama", eos_token_id=None), PROMPT, max_new_tokens=NEW)
    before = state_of(model)
    for name in ("good", "perfect"):
        flash.clear()
        assert sequences(talon(model, PROMPT, name, want, max_new_tokens=NEW)) == want.tolist()
        assert flash == [PROMPT.shape[1]] * model.config.num_hidden_layers
    assert state_of(model) == before
    assert model.config._attn_implementation == "flash_attention_2"


def test_flash_attention_is_put_back_after_an_error_in_a_tree_forward(
    flash: list[int], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state_of(model)
    with monkeypatch.context() as patch:
        stumble_in_a_tree_forward(model, patch)
        with pytest.raises(KeyboardInterrupt):
            call(model, random_head(model))
    assert state_of(model) == before
    assert model.config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_takes_trees_is_left_alone(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", eos_token_id=None)
    want = plain(model, PROMPT, max_new_tokens=NEW)
    model.set_attn_implementation(attention)
    changes: list[str] = []
    config_class = type(model.config)
    setter = config_class.__setattr__

    def watched(config: Any, name: str, value: Any) -> None:
        if config is model.config:
            changes.append(name)
        setter(config, name, value)

    monkeypatch.setattr(config_class, "__setattr__", watched)
    out = talon(model, PROMPT, "good", want, max_new_tokens=NEW)
    assert sequences(out) == want.tolist()
    assert not [name for name in changes if "attn" in name]


def test_a_head_may_be_shared_by_two_models(model: PreTrainedModel) -> None:
    """Nothing of the first target stays in a head: its embeddings and features are those of the call's target."""
    other = tiny_model("llama", seed=1, eos_token_id=None)
    head: EagleDraft = random_head(model)
    alone = [call(target, random_head(target), return_dict_in_generate=True) for target in (model, other)]
    shared = [call(target, head, return_dict_in_generate=True) for target in (model, other)]
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert ours.talon_stats.accepted_by_depth == theirs.talon_stats.accepted_by_depth != []
