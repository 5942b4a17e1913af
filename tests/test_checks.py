"""What TALON refuses is refused before any token, with an error that names the argument, its value and a remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from calls import BATCH, BATCH_MASK, NEW, PROMPT, Recorder, Seen, letter_tokenizer, plain, sequences, talon
from models import random_head, tiny_model
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from talon_hf import EagleDraft, TalonConfig, generate
from talon_hf.checks import REFUSED
from talon_hf.compat import configs_keep_unset_fields

pytestmark = pytest.mark.conformance

# A value that asks for what is refused, and how the message shows it.
ASKED: dict[str, tuple[Any, str]] = {
    "num_beams": (3, "3"),
    "num_beam_groups": (2, "2"),
    "constraints": ([object()], "a list"),
    "force_words_ids": ([[3, 4]], "a list"),
    "penalty_alpha": (0.6, "0.6"),
    "dola_layers": ("high", "'high'"),
    "prompt_lookup_num_tokens": (4, "4"),
    "assistant_early_exit": (4, "4"),
    "use_mtp": (True, "True"),
    "speculation_type": ("dflash", "'dflash'"),
    "output_attentions": (True, "True"),
    "output_hidden_states": (True, "True"),
    "assistant_tokenizer": (letter_tokenizer(), "a "),
    "token_healing": (True, "True"),
    "synced_gpus": (True, "True"),
    "use_cache": (False, "False"),
}
IN_CONFIGS = [name for name in REFUSED if hasattr(GenerationConfig(), name)]


@pytest.fixture
def silent() -> PreTrainedModel:
    """A model that may not run."""
    model = tiny_model("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    return model


def refusal(model: PreTrainedModel, **options: Any) -> str:
    """The message of the ValueError that a call raises before it streams anything, its own prompt included."""
    streamer = Recorder()
    options = {"assistant_model": random_head(tiny_model("llama")), "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=r"\S") as caught:
        generate(PROMPT, model=model, streamer=streamer, **options)
    assert streamer.puts == []
    return str(caught.value)


def test_every_refused_argument_is_tested() -> None:
    assert not set(REFUSED) - set(ASKED)
    assert {"num_beams", "penalty_alpha", "use_cache", "output_attentions"} <= set(IN_CONFIGS)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_another_method_is_refused(name: str, silent: PreTrainedModel) -> None:
    value, shown = ASKED[name]
    message = refusal(silent, **{name: value})
    assert f"TALON does not support `{name}` (got {shown}" in message
    assert message.endswith(REFUSED[name][1])
    assert any(word in message for word in ("Call ", "Leave ", "Pass ", "Heal "))


@pytest.mark.parametrize("where", ["given", "own"])
@pytest.mark.parametrize("name", IN_CONFIGS)
def test_it_is_refused_in_a_generation_config_too(name: str, where: str, silent: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=4)
    setattr(config if where == "given" else silent.generation_config, name, ASKED[name][0])
    for options in [{"generation_config": config}] + [{}] * (where == "own"):
        message = refusal(silent, **options)
        assert f"TALON does not support `{name}` (got {ASKED[name][1]}" in message


@pytest.mark.parametrize("name", [name for name in IN_CONFIGS if name != "use_mtp"])
def test_an_argument_switches_off_what_a_config_asks_for(name: str) -> None:
    model = tiny_model("llama")
    off = [value for value in REFUSED[name][0] if value is not None]
    want = plain(model, PROMPT, max_new_tokens=NEW)
    for value in off:
        setattr(model.generation_config, name, ASKED[name][0])
        assert sequences(talon(model, PROMPT, "good", want, max_new_tokens=NEW, **{name: value})) == want.tolist()


@pytest.mark.skipif(not configs_keep_unset_fields(), reason="before 5.0 a config's defaults count as left out")
def test_a_given_config_switches_off_what_the_models_asks_for() -> None:
    model = tiny_model("llama")
    want = plain(model, PROMPT, max_new_tokens=NEW)
    model.generation_config.num_beams = 3
    config = GenerationConfig(num_beams=1, max_new_tokens=NEW, do_sample=False)
    assert sequences(talon(model, PROMPT, "good", want, generation_config=config)) == want.tolist()


# The options of TALON ------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    ("node_budget", 1, "a whole number of at least 2, got 1: the root counts"),
    ("node_budget", 0, "at least 2, got 0"),
    ("node_budget", True, "got True"),
    ("node_budget", 60.0, "got 60.0"),
    ("node_budget", "60", "got '60'"),
    ("top_k", 0, "at least 1, got 0"),
    ("top_k_layers", -1, "at least 0, got -1"),
    ("depth", 0, "at least 1, got 0"),
    ("max_depth", 0, "at least 1, got 0"),
    ("mu", 0.0, "must be a number in (0, 1], got 0.0"),
    ("mu", 1.01, "got 1.01"),
    ("mu", -0.1, "got -0.1"),
    ("mu", math.nan, "got nan"),
    ("mu", True, "got True"),
    ("mu", "0.03", "got '0.03'"),
    ("policy", "tree", "must be one of 'talon', 'eagle', 'chain', got 'tree'"),
    ("acceptance", "lossy", "must be one of 'match', 'residual', got 'lossy'"),
]


@pytest.mark.parametrize("where", ["call", "given", "own"])
@pytest.mark.parametrize(("option", "value", "why"), WRONG)
def test_an_option_out_of_bounds_is_refused(
    option: str, value: Any, why: str, where: str, silent: PreTrainedModel
) -> None:
    config = GenerationConfig(max_new_tokens=4)
    options: dict[str, Any] = {"generation_config": config} if where == "given" else {}
    if where == "call":
        options[f"talon_{option}"] = value
    else:
        setattr(config if where == "given" else silent.generation_config, f"talon_{option}", value)
    message = refusal(silent, **options)
    assert f"`talon_{option}`" in message
    assert why in message


@pytest.mark.parametrize("mu", [1, 1.0, 1e-9])
def test_options_at_their_bounds_are_taken(mu: float) -> None:
    config = TalonConfig(node_budget=2, top_k=1, top_k_layers=0, depth=1, max_depth=1, mu=mu)
    assert config.mu == mu


# Drafters ------------------------------------------------------------------------------------------------------------


def test_a_missing_drafter_is_named(silent: PreTrainedModel) -> None:
    message = refusal(silent, assistant_model=None)
    assert "`assistant_model` is missing" in message
    assert "EagleDraft.from_pretrained" in message


@pytest.mark.parametrize("drafter", [3, ["head"], torch.nn.Linear(2, 2)])
def test_what_is_no_drafter_is_named(drafter: Any, silent: PreTrainedModel) -> None:
    message = refusal(silent, assistant_model=drafter)
    assert f"`assistant_model` is a {type(drafter).__name__}" in message
    assert "pass an `EagleDraft`" in message


def test_a_folder_that_is_not_there_is_named(silent: PreTrainedModel) -> None:
    with pytest.raises(OSError, match="nowhere"):
        generate(PROMPT, model=silent, assistant_model="/nowhere", max_new_tokens=4)


# Targets -------------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4}
GPT_NEO = {"vocab_size": 50, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["local"], 2]]}
BLOOM = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}
TARGETS: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "is an encoder-decoder",
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": 50, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
        "state follows one sequence and cannot branch",
    ),
    "Lfm2ForCausalLM": (
        "Lfm2Config",
        SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"] * 4},
        "'conv' layers",
    ),
    "BloomForCausalLM": ("BloomConfig", BLOOM, "position_ids"),
    "FalconForCausalLM": ("FalconConfig", SIZES | {"alibi": True}, "counts columns, not positions"),
    "GPTNeoForCausalLM": ("GPTNeoConfig", GPT_NEO, "counts columns, not positions"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_that_cannot_verify_a_tree_is_refused(name: str) -> None:
    config, sizes, why = TARGETS[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    message = refusal(model.eval())
    assert name.removesuffix("ForCausalLM") in message
    assert why in message
    assert "Call `generate` without `custom_generate`" in message


@pytest.mark.skipif(Version(transformers.__version__) < Version("5"), reason="the config differs")
def test_a_model_that_takes_one_mask_for_all_windows_is_refused() -> None:
    text = {**SIZES, "model_type": "gemma2", "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_id=49)
    with torch.device("meta"):
        model = transformers.PaliGemmaForConditionalGeneration(config)
    assert "its layers see different windows, and it takes one mask for all of them" in refusal(model.eval())


def test_a_model_without_generate_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=48))
    assert "`generate`, which BertModel does not have" in refusal(model.eval())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", [8, 60])
def test_a_tree_shrinks_to_the_positions_that_are_left(budget: int, attention: str) -> None:
    """A GPT-2 whose position table ends with the text, at a budget of more nodes than the table has rows."""
    sizes = {"n_embd": 32, "n_layer": 8, "n_head": 4, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.GPT2Config(vocab_size=50, n_positions=PROMPT.shape[1] + NEW, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    for ids, mask in ((PROMPT, torch.ones_like(PROMPT)), (BATCH, BATCH_MASK)):
        # A criterion ends the text, so its length tells the drafter nothing and the table alone bounds the trees.
        stop = StoppingCriteriaList([Seen(stop_at=config.n_positions)])
        options = {"attention_mask": mask, "max_new_tokens": 200, "stopping_criteria": stop}
        want = plain(model, ids, **options)
        for name in ("perfect", "good"):
            out = talon(model, ids, name, want, talon_node_budget=budget, **options)
            assert sequences(out) == want.tolist()


def test_the_class_of_a_drafter_is_no_drafter(llama: Any) -> None:
    with pytest.raises(ValueError, match="the class EagleDraft"):
        generate(PROMPT, model=llama, assistant_model=EagleDraft, max_new_tokens=2)


@pytest.mark.parametrize("rows", [1, 2])
def test_right_padding_is_refused_in_transformers_words(llama: Any, rows: int) -> None:
    ids = PROMPT.repeat(rows, 1)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    with pytest.raises(ValueError, match=r"right-padding was detected .*padding_side='left'"):
        generate(ids, model=llama, assistant_model=random_head(llama), attention_mask=mask, max_new_tokens=2)
