"""Heads load strictly: all of a file is used, and an error names what is wrong with it, the value and a remedy."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import head_config, head_tensors, hub_snapshot, tiny_head, write_head
from models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from talon_hf import EagleDraft, generate
from talon_hf.pair import load_draft

NAMES = [
    "d2t", "fc.weight", "lm_head.weight", "norm.weight",
    "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.down_proj.weight", "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.o_proj.weight", "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
]  # fmt: skip
LAYOUT = "not in the official EAGLE-3 layout"


@pytest.fixture
def config(llama: PreTrainedModel) -> dict[str, Any]:
    return head_config(llama)


def load(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], **options: Any) -> EagleDraft:
    return EagleDraft.from_pretrained(write_head(folder, config, tensors), **options)


def refusal(error: type[Exception], folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """The message of the error that loading raises."""
    with pytest.raises(error) as caught:
        load(folder, config, tensors)
    return str(caught.value)


def test_the_list_of_tensors_is_that_of_a_head(config: dict[str, Any]) -> None:
    assert {*NAMES, "t2d"} == set(head_tensors(config))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    del tensors[name]
    message = refusal(ValueError, tmp_path, config, tensors)
    assert LAYOUT in message
    assert f"missing: {name}." in message
    assert "unexpected:" not in message
    assert str(tmp_path) in message


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_tensor_is_named_twice(name: str, tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    tensors["layers.0." + name] = tensors.pop(name)
    message = refusal(ValueError, tmp_path, config, tensors)
    assert f"missing: {name}." in message
    assert f"unexpected: layers.0.{name}." in message
    assert "A renamed tensor shows up as one missing and one unexpected name" in message


def test_a_tensor_too_many_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    message = refusal(ValueError, tmp_path, config, head_tensors(config) | {"fc.bias": torch.zeros(32)})
    assert "unexpected: fc.bias." in message
    assert "missing:" not in message


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_a_wrong_shape_is_named_with_its_shape(name: str, tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    tensors[name] = tensors[name][:-1].clone()
    message = refusal(ValueError, tmp_path, config, tensors)
    assert LAYOUT in message
    assert "wrong shape: " in message
    assert "expected (" in message
    assert name in message


def test_a_wrong_shape_shows_what_it_is_and_what_it_should_be(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config) | {"fc.weight": torch.zeros(32, 64)}
    assert "fc.weight is (32, 64), expected (32, 96)" in refusal(ValueError, tmp_path, config, tensors)


@pytest.mark.parametrize(("at", "offset", "token"), [(0, -1, -1), (19, VOCABULARY - 19, VOCABULARY)])
def test_an_offset_out_of_the_vocabulary_is_named(
    at: int, offset: int, token: int, tmp_path: Path, config: dict[str, Any]
) -> None:
    tensors = head_tensors(config)
    tensors["d2t"][at] = offset
    message = refusal(ValueError, tmp_path, config, tensors)
    assert str(tmp_path) in message
    assert f"`d2t` maps draft id {at} to {token}, outside the target's vocabulary of {VOCABULARY}" in message
    assert "target id = draft id + d2t[draft id]" in message


def test_two_draft_ids_of_one_target_id_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config) | {"d2t": torch.arange(20).flip(0)}  # every draft id + offset is 19
    message = refusal(ValueError, tmp_path, config, tensors)
    assert "`d2t` maps draft ids 0 and 1 to one target id, 19" in message
    assert "target id = draft id + d2t[draft id]" in message


@pytest.mark.parametrize(
    ("gone", "kept"), [("config.json", "model.safetensors"), ("model.safetensors", "config.json")]
)
def test_a_missing_file_is_named(gone: str, kept: str, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path / "head", config, head_tensors(config))
    (folder / gone).unlink()
    with pytest.raises(FileNotFoundError, match=f"No {gone}") as caught:
        EagleDraft.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert "is a folder with config.json and model.safetensors or pytorch_model.bin" in str(caught.value)


def test_a_folder_that_is_not_there_is_no_hub_id(tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "~/nowhere", "..", Path("org/head")):
        with pytest.raises(FileNotFoundError, match="folder") as caught:
            EagleDraft.from_pretrained(source)
        assert str(source) in str(caught.value)
        assert "Hub is out of reach" not in str(caught.value)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_config_entry_is_named(name: str, tmp_path: Path, llama: PreTrainedModel) -> None:
    tensors = head_tensors(head_config(llama))
    message = refusal(ValueError, tmp_path, head_config(llama, **{name: None}), tensors)
    assert f"no `{name}` in its config.json" in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    "entry",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0}},
    ],
)
def test_scaled_rotary_positions_are_refused(entry: dict[str, Any], tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama, **entry)
    message = refusal(ValueError, tmp_path, config, head_tensors(config))
    ((name, value),) = entry.items()
    assert f"`{name}`={value!r}" in message
    assert "Drop the entry" in message


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path, config, {}, weights="pytorch_model.bin")
    torch.save({"fc.weight": Path(tmp_path)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds more than tensors, and nothing else is loaded") as caught:
        EagleDraft.from_pretrained(folder)
    assert "pytorch_model.bin" in str(caught.value)
    assert "weights_only" not in "".join(traceback.format_exception(caught.value))


# A head for another target -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "head", "values"),
    [
        ({"vocab_size": 40}, {}, ("vocabulary of 50", "the model's is 40", "`d2t`")),
        ({"vocab_size": 150}, {}, ("vocabulary of 50", "150", "more than padding adds")),
        ({"hidden_size": 64}, {}, ("width 32", "64")),
        ({"num_hidden_layers": 6}, {}, ("layers (2, 3, 3)", "6 layers", "eagle_aux_hidden_state_layer_ids")),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, ("layers (2, 4, 8)", "8 layers")),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, ("layers (2, 2, 5)", "each once")),
    ],
    ids=["vocabulary_too_small", "vocabulary_too_large", "width", "depth", "layer_out_of_range", "layer_twice"],
)
def test_a_head_for_another_model_is_refused_before_any_token(
    target: dict[str, Any], head: dict[str, Any], values: tuple[str, ...], tmp_path: Path, llama: PreTrainedModel
) -> None:
    draft = tiny_head(tmp_path, llama, **head)
    model = tiny_model("llama", **target)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="`assistant_model`") as caught:
        generate(torch.tensor([[3, 4]]), model=model, assistant_model=draft, max_new_tokens=4)
    assert all(value in str(caught.value) for value in values)


def test_layers_that_the_config_names_are_read(tmp_path: Path, llama: PreTrainedModel) -> None:
    head = tiny_head(tmp_path, llama, eagle_aux_hidden_state_layer_ids=[1, 6, 3])
    assert head.features_of(llama).boundaries == (1, 6, 3)
    assert tiny_head(tmp_path, llama).features_of(llama).boundaries == (2, 4, 5)


# What loads ----------------------------------------------------------------------------------------------------------


def state_of(head: EagleDraft) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in head.state_dict().items()}


@pytest.mark.parametrize("owned", [False, True])
def test_every_weight_is_the_files_and_none_is_random(owned: bool, tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama, **({"hidden_size": 16, "target_hidden_size": 32} if owned else {}))
    tensors = head_tensors(config)
    torch.manual_seed(1)
    head = load(tmp_path, config, tensors)
    torch.manual_seed(2)
    assert state_of(load(tmp_path, config, tensors)) == state_of(head)
    weights = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    loaded = torch.cat([parameter.flatten() for parameter in head.parameters()])
    assert torch.equal(loaded.sort().values, torch.cat([w.flatten() for w in weights]).sort().values)


def test_bin_and_safetensors_are_one_head(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    for name in ("model.safetensors", "pytorch_model.bin"):
        write_head(tmp_path / name, config, tensors, weights=name)
    first, second = (EagleDraft.from_pretrained(tmp_path / n) for n in ("model.safetensors", "pytorch_model.bin"))
    assert state_of(first) == state_of(second)
    assert first.config == second.config
    assert first.draft_ids.tolist() == second.draft_ids.tolist() == (tensors["d2t"] + torch.arange(20)).tolist()


def test_sizes_are_the_tensors_where_the_config_lies(tmp_path: Path, llama: PreTrainedModel) -> None:
    config = head_config(llama)
    lying = config | {"head_dim": 80, "draft_vocab_size": 32000, "intermediate_size": 7}
    assert load(tmp_path, lying, head_tensors(config)).config == load(tmp_path, config, head_tensors(config)).config


def test_the_packaged_head_loads_and_fits_its_target() -> None:
    head = load_draft()
    smollm2 = LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )
    with torch.device("meta"):
        target = LlamaForCausalLM(smollm2)
    assert head.features_of(target).boundaries == (2, 15, 27)
    assert head.config.draft_vocab_size == len(head.draft_ids) == len(head.draft_ids.unique()) == 8192
    assert head.embed_tokens is None
    assert all(bool(parameter.isfinite().all()) for parameter in head.parameters())


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("folder", "source", "options"),
    [
        ("", "org/head", {}),
        ("drafter", "org/head", {"subfolder": "drafter"}),
        ("drafter/eagle3", "org/head", {"subfolder": "drafter/eagle3"}),
        ("drafter", "org/head/drafter", {}),
        ("drafter/eagle3", "org/head/drafter/eagle3", {}),
        ("drafter/eagle3", "org/head/drafter", {"subfolder": "eagle3"}),
    ],
)
@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_hub_id_loads_from_an_offline_cache(
    folder: str, source: str, options: dict[str, str], weights: str, tmp_path: Path, config: dict[str, Any]
) -> None:
    tensors = head_tensors(config)
    write_head(hub_snapshot(tmp_path, "org/head") / folder, config, tensors, weights)
    head = EagleDraft.from_pretrained(source, cache_dir=tmp_path, local_files_only=True, **options)
    assert torch.equal(head.fc.weight, tensors["fc.weight"])


def test_a_hub_id_that_is_not_cached_is_named_when_offline(tmp_path: Path, config: dict[str, Any]) -> None:
    snapshot = hub_snapshot(tmp_path, "org/head")
    with pytest.raises(FileNotFoundError, match=r"No config\.json under 'org/none' on the Hub, or the Hub is out of"):
        EagleDraft.from_pretrained("org/none", cache_dir=tmp_path, local_files_only=True)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match=r"No model\.safetensors or pytorch_model\.bin under 'org/head'"):
        EagleDraft.from_pretrained("org/head", cache_dir=tmp_path, local_files_only=True)


def test_dtype_and_revision_are_taken(tmp_path: Path, config: dict[str, Any]) -> None:
    snapshot = write_head(hub_snapshot(tmp_path, "org/head"), config, head_tensors(config))
    options = {"cache_dir": tmp_path, "local_files_only": True, "dtype": torch.float32}
    assert EagleDraft.from_pretrained("org/head", revision=snapshot.name, **options).dtype == torch.float32
    with pytest.raises(FileNotFoundError, match="No config"):
        EagleDraft.from_pretrained("org/head", revision="other", **options)


@pytest.mark.parametrize(
    "source", ["./haed", "../haed", "/no/such/haed", "~/haed", "heads//haed", "haed/", Path("haed")]
)
def test_a_mistyped_folder_is_told_as_one_that_does_not_exist(source: str | Path) -> None:
    """Before the Hub is asked for it."""
    with pytest.raises(FileNotFoundError, match=r"The folder '.*haed.*' does not exist"):
        EagleDraft.from_pretrained(source)
