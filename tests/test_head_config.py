"""Entries of a head's config.json are obeyed, without effect, or refused by name; its geometry is checked at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import head_config, head_tensors, random_commits, write_head
from transformers import PretrainedConfig, PreTrainedModel

from talon_hf import EagleDraft

LAYERS = "eagle_aux_hidden_state_layer_ids"
# What trainers publish with heads in the official layout: a Llama, a Gemma 3, a dense head for gpt-oss, Qwens.
COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 8, "initializer_range": 0.02, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.53.2", "use_cache": True,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": False, "pretraining_tp": 1, "num_hidden_layers": 1},
    "gemma3": {
        "sliding_window": 512, "use_sliding_window": False, "target_model_type": "gemma3_text", "additional_fc": False,
        "reuse_target_lm_head": True, "eagle_config": {LAYERS: [2, 4, 5]},
    },
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4},
    "qwen3": {"max_window_layers": 36, "sliding_window": None, "head_dim": 80, "tie_word_embeddings": True},
    "qwen2.5": {"num_hidden_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False},
    "of_eagle_config": {"eagle_config": {
        LAYERS: [2, 4, 5], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    }},
    "of_transformers_5": {
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "layer_types": ["full_attention"],
        "sliding_window": 4096,
    },
    "all_off": {
        "norm_before_residual": False, "norm_before_fc": False, "norm_output": False, "fc_norm": False,
        "partial_rotary_factor": 1.0, "use_qk_norm": False, "quantization_config": None, "eagle_config": {},
        "rope_scaling": {"type": "linear", "factor": 1.0}, "logit_scale": 1.0, "final_logit_softcapping": None,
        "layer_types": [], "sliding_window": 0,
    },
}  # fmt: skip
# What changes a head's arithmetic, at the top and inside `eagle_config`.
ARITHMETIC: list[tuple[str, Any]] = [
    ("norm_before_residual", True), ("norm_before_fc", True), ("norm_output", True), ("fc_norm", True),
    ("use_aux_norm", True), ("use_aux_hidden_state", False), ("use_input_layernorm_in_first_layer", False),
    ("use_last_layernorm", False), ("use_mtp_layernorm", True), ("parallel_draft_step", 2),
    ("partial_rotary_factor", 0.5), ("rotary_pct", 0.25), ("mrope_section", [2, 1, 1]), ("rope_type", "yarn"),
    ("num_hidden_layers", 2), ("sliding_window", 8), ("use_sliding_window", True),
    ("layer_types", ["sliding_attention"]), ("layer_types", "full_attention"), ("attention_bias", True),
    ("mlp_bias", True), ("qkv_bias", True), ("use_qk_norm", True), ("qk_layernorm", True), ("logit_scale", 0.0625),
    ("residual_multiplier", 0.22), ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0),
    ("query_pre_attn_scalar", 256), ("quantization_config", {"quant_method": "fp8"}), ("mask_token_id", 7),
    ("speculators_model_type", "eagle3"), ("transformer_layer_config", {"hidden_size": 32}),
    ("rope_scaling", "yarn"), ("rope_scaling", {"type": "linear"}), ("rope_scaling", {"type": "mrope"}),
    ("rope_scaling", {"rope_type": "default", "mrope_section": [2, 1, 1]}),
    ("rope_scaling", {"rope_type": "default", "type": "mrope", "mrope_section": [2, 1, 1]}),
    ("rope_parameters", {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    ("rope_parameters", {"full_attention": {"rope_theta": 10000.0}}),
    ("a_name_that_nobody_knows", 3), ("another", "pre"),
]  # fmt: skip


def load(folder: Path, model: PreTrainedModel, **changes: Any) -> EagleDraft:
    """A head whose tensors are those of the unchanged config."""
    config = head_config(model)
    return EagleDraft.from_pretrained(write_head(folder, config | changes, head_tensors(config)))


def refusal(folder: Path, model: PreTrainedModel, **changes: Any) -> str:
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load(folder, model, **changes)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.conformance
@pytest.mark.parametrize("kind", PUBLISHED)
def test_entries_of_published_heads_load_and_change_nothing(kind: str, tmp_path: Path, llama: PreTrainedModel) -> None:
    official, published = load(tmp_path / "official", llama), load(tmp_path / kind, llama, **COMMON | PUBLISHED[kind])
    assert published.features_of(llama) == official.features_of(llama)
    commit = random_commits(official, rows=1, rounds=0)[0]
    said = [head.open(llama, rows=1).begin(commit) for head in (official, published)]
    assert torch.equal(*said)


@pytest.mark.conformance
def test_what_transformers_writes_into_every_config_is_without_effect(tmp_path: Path, llama: PreTrainedModel) -> None:
    written = {name: value for name, value in PretrainedConfig().to_dict().items() if not name.endswith("token_id")}
    assert load(tmp_path / "with", llama, **written).config == load(tmp_path / "without", llama).config


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("name", "value"), ARITHMETIC)
def test_an_entry_that_changes_the_arithmetic_is_refused_by_name(
    name: str, value: Any, nested: bool, tmp_path: Path, llama: PreTrainedModel
) -> None:
    if nested and name in head_config(llama):
        message = refusal(tmp_path, llama, eagle_config={name: value})
        assert f"`{name}`=" in message
        assert "in its `eagle_config`" in message
        return
    message = refusal(tmp_path, llama, **({"eagle_config": {name: value}} if nested else {name: value}))
    spelled = f"eagle_config.{name}" if nested else name
    assert f"`{spelled}`={value!r}" in message
    assert "Drop the entry if the head was trained without it" in message


@pytest.mark.conformance
def test_layers_named_inside_eagle_config_are_read(tmp_path: Path, llama: PreTrainedModel) -> None:
    head = load(tmp_path, llama, eagle_config={LAYERS: [1, 3, 6], "use_aux_hidden_state": True})
    assert head.features_of(llama).boundaries == (1, 3, 6)


def test_one_entry_in_two_places_must_say_the_same(tmp_path: Path, llama: PreTrainedModel) -> None:
    same = load(tmp_path / "same", llama, **{LAYERS: [1, 3, 6], "eagle_config": {LAYERS: [1, 3, 6]}})
    assert same.features_of(llama).boundaries == (1, 3, 6)
    message = refusal(tmp_path / "other", llama, **{LAYERS: [1, 3, 6], "eagle_config": {LAYERS: [2, 3, 6]}})
    assert "[1, 3, 6]" in message
    assert "[2, 3, 6]" in message
    own = {"rope_theta": 500.0, "rope_type": "default"}
    assert load(tmp_path / "rope", llama, rope_scaling=own).config.rope_theta == 500.0
    assert "`rope_parameters`" in refusal(tmp_path / "ropes", llama, rope_theta=10000.0, rope_parameters=own)


# Geometry ------------------------------------------------------------------------------------------------------------

COUNTS = [
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "draft_vocab_size",
    "target_hidden_size", "max_position_embeddings", "num_hidden_layers",
]  # fmt: skip


@pytest.mark.parametrize("value", ["32", True, 32.0, -4, 0, [32], float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number(name: str, value: Any, tmp_path: Path, llama: PreTrainedModel) -> None:
    message = refusal(tmp_path, llama, **{name: value})
    assert f"`{name}`={value!r}" in message
    assert "must be a whole number of at least 1" in message


@pytest.mark.parametrize("value", ["1e-5", True, -1e-5, 0, 0.0, [1e-5], float("nan"), float("inf"), 7.0], ids=repr)
def test_eps_is_a_small_positive_number(value: Any, tmp_path: Path, llama: PreTrainedModel) -> None:
    assert f"`rms_norm_eps`={value!r}" in refusal(tmp_path, llama, rms_norm_eps=value)


@pytest.mark.parametrize("value", ["10000", True, -1.0, 0, {}, float("nan"), float("inf")], ids=repr)
def test_the_rotary_base_is_a_positive_number(value: Any, tmp_path: Path, llama: PreTrainedModel) -> None:
    assert f"`rope_theta`={value!r}" in refusal(tmp_path / "top", llama, rope_theta=value)
    assert "`rope_theta`" in refusal(tmp_path / "nested", llama, rope_parameters={"rope_theta": value})


@pytest.mark.parametrize("value", ["nonsense", 3, True, ["silu"], "prelu"], ids=repr)
def test_an_activation_is_one_of_transformers_without_weights(
    value: Any, tmp_path: Path, llama: PreTrainedModel
) -> None:
    assert f"`hidden_act`={value!r}" in refusal(tmp_path, llama, hidden_act=value)


@pytest.mark.parametrize("value", [[], "1,3,6", [1, 3, "6"], [1.0, 3.0, 6.0], [True, 3, 6], [-1, 3, 6], {}], ids=repr)
def test_layers_are_a_list_of_numbers(value: Any, tmp_path: Path, llama: PreTrainedModel) -> None:
    assert f"`{LAYERS}`={value!r}" in refusal(tmp_path, llama, **{LAYERS: value})


@pytest.mark.parametrize("value", [[], "on", 3, True], ids=repr)
def test_eagle_config_is_an_object(value: Any, tmp_path: Path, llama: PreTrainedModel) -> None:
    assert f"`eagle_config`={value!r}" in refusal(tmp_path, llama, eagle_config=value)


def test_key_heads_divide_heads(tmp_path: Path, llama: PreTrainedModel) -> None:
    assert "`num_key_value_heads`=3" in refusal(tmp_path, llama, num_key_value_heads=3)


def test_an_odd_head_size_is_refused(tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama, num_attention_heads=32, num_key_value_heads=16)
    with pytest.raises(ValueError, match=r"head size of 1 .*`num_attention_heads`=32") as caught:
        EagleDraft.from_pretrained(write_head(tmp_path, config, head_tensors(config)))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("heads", [5, 8, 10**30])
def test_heads_that_the_tensors_do_not_have_are_refused(heads: int, tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama)
    wrong = config | {"num_attention_heads": heads, "num_key_value_heads": heads}
    with pytest.raises(ValueError, match=r"wrong shape: .*sizes are those of config\.json"):
        EagleDraft.from_pretrained(write_head(tmp_path, wrong, head_tensors(config)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["midlayer.mlp.up_proj.weight", "norm.weight"])
def test_weights_of_another_dtype_are_refused(
    name: str, dtype: torch.dtype, tmp_path: Path, llama: PreTrainedModel
) -> None:
    config = head_config(llama)
    tensors = head_tensors(config)
    tensors[name] = tensors[name].to(dtype)
    folder = write_head(tmp_path, config, tensors, "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"wrong dtype: {name} is .*{dtype}.*quantised heads are not supported"):
        EagleDraft.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_offsets_are_whole_numbers(dtype: torch.dtype, tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama)
    tensors = head_tensors(config)
    tensors["d2t"] = tensors["d2t"].to(dtype)
    with pytest.raises(ValueError, match=r"wrong dtype: d2t is .*expected dense whole numbers"):
        EagleDraft.from_pretrained(write_head(tmp_path, config, tensors))


def test_whole_numbers_of_any_size_are_offsets(tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama)
    tensors = head_tensors(config)
    want = tensors["d2t"] + torch.arange(20)
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    assert EagleDraft.from_pretrained(write_head(tmp_path, config, tensors)).draft_ids.tolist() == want.tolist()


def test_the_packaged_config_has_no_entry_that_is_passed_over() -> None:
    path = Path(__file__).parent.parent / "talon_hf" / "assets" / "smollm2-135m-eagle3" / "config.json"
    from talon_hf.head_config import READ, WITHOUT_EFFECT

    assert set(json.loads(path.read_text())) <= READ | WITHOUT_EFFECT
