"""A head's files: whatever is wrong with one is an error that names head, file and remedy; shards are one head."""

from __future__ import annotations

import json
import re
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import PROMPT, plain, talon
from heads import head_config, head_tensors, hub_snapshot, write_head
from models import tiny_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from talon_hf import EagleDraft, generate

SAFE, PICKLE = "model.safetensors", "pytorch_model.bin"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


class Thing:
    """A class that a pickle may name."""


@pytest.fixture
def config(llama: PreTrainedModel) -> dict[str, Any]:
    return head_config(llama)


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def write_shards(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], weights: str = SAFE) -> Path:
    """A head in two shards and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stem, ending = weights.rsplit(".", 1)
    places = {name: f"{stem}-0000{1 + at % 2}-of-00002.{ending}" for at, name in enumerate(tensors)}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        if ending == "bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file)
    (folder / f"{weights}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def refusal(folder: Path, file: str, kind: type[Exception] = ValueError, source: Any = None, **options: Any) -> str:
    """The message of the error that loading raises; it names the head and the file, and passes on no bad advice."""
    with pytest.raises(kind) as caught:
        EagleDraft.from_pretrained(folder if source is None else source, **options)
    message = str(caught.value)
    assert str(folder) in message
    assert file in message
    assert "weights_only" not in "".join(traceback.format_exception(caught.value))
    return message


# Files that are something else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: POINTER, "is a git-lfs pointer, not the file itself. Run `git lfs pull`"),
        (lambda _: b"", "is empty. Download or save it again"),
        (half, "Download or save it again"),
        (lambda data: data[:8], "Download or save it again"),
        (lambda data: b"\xff" * 8 + data[8:], "Download or save it again"),
        (lambda data: b"\0" * len(data), "Download or save it again"),
        (lambda _: b"<!DOCTYPE html><title>Sign in</title>", "is a web page, not the file itself"),
        (lambda _: b"no weights at all\n" * 9, "Download or save it again"),
    ],
    ids=["pointer", "empty", "half", "start", "header", "zeros", "page", "text"],
)
@pytest.mark.parametrize("file", [SAFE, PICKLE, "config.json"])
def test_a_file_that_is_something_else_is_named(
    file: str, spoil: Callable[[bytes], bytes], words: str, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = write_head(tmp_path, config, head_tensors(config), SAFE if file == "config.json" else file)
    path = folder / file
    path.write_bytes(spoil(path.read_bytes()))
    assert words in refusal(folder, file)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"head"', "{no", '{"hidden_size": 32', "[" * 100000, "\x00"])
def test_a_config_that_is_no_json_object_is_named(text: str, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path, config, head_tensors(config))
    (folder / "config.json").write_text(text)
    refusal(folder, "config.json")


def test_a_config_may_be_in_any_encoding_of_json(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path, config | {"_name": "tête"}, head_tensors(config))
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (folder / "config.json").write_text(json.dumps(config | {"_name": "tête"}, ensure_ascii=False), encoding)
        assert EagleDraft.from_pretrained(folder).config.hidden_size == 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (OrderedDict(a=Thing()), "holds more than tensors, and nothing else is loaded"),
        ({"model": {"fc.weight": torch.zeros(1)}}, "holds a dict as 'model', not a tensor"),
        ({"step": 5}, "holds a int as 'step', not a tensor"),
        ({5: torch.zeros(1)}, "as 5, not a tensor"),
        ([torch.zeros(1)], "holds a list, no tensors by name"),
        (torch.zeros(3), "holds a Tensor, no tensors by name"),
        (None, "holds a NoneType, no tensors by name"),
    ],
    ids=["class", "nested", "number", "key", "list", "tensor", "none"],
)
def test_a_pickle_of_something_else_is_named(content: Any, words: str, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path, config, {}, PICKLE)
    torch.save(content, folder / PICKLE)
    assert words in refusal(folder, PICKLE)


def test_a_tensor_that_is_not_dense_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    tensors["fc.weight"] = tensors["fc.weight"].to_sparse()
    assert "fc.weight is torch.sparse_coo" in refusal(write_head(tmp_path, config, tensors, PICKLE), "fc.weight")


def test_parameters_with_gradients_load_as_plain_weights(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    wrapped = {n: torch.nn.Parameter(t) if t.is_floating_point() else t for n, t in tensors.items()}
    head = EagleDraft.from_pretrained(write_head(tmp_path, config, wrapped, PICKLE))
    assert torch.equal(head.fc.weight, tensors["fc.weight"])
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path, config, head_tensors(config))
    with pytest.raises(OSError, match="is a file: a head is the folder around it"):
        EagleDraft.from_pretrained(folder / SAFE)
    with pytest.raises(OSError, match="The head is an empty string"):
        EagleDraft.from_pretrained("")


@pytest.mark.conformance
def test_a_spoilt_file_is_told_before_any_token(tmp_path: Path, config: dict[str, Any]) -> None:
    model = tiny_model("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    folder = write_head(tmp_path, config, head_tensors(config))
    (folder / SAFE).write_bytes(POINTER)
    with pytest.raises(ValueError, match="git-lfs pointer"):
        generate(PROMPT, model=model, assistant_model=str(folder), max_new_tokens=3)


# Shards --------------------------------------------------------------------------------------------------------------


@pytest.mark.conformance
@pytest.mark.parametrize("weights", [SAFE, PICKLE])
@pytest.mark.parametrize("where", ["folder", "hub"])
def test_shards_are_one_head(weights: str, where: str, tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    whole = EagleDraft.from_pretrained(write_head(tmp_path / "whole", config, tensors))
    if where == "folder":
        head = EagleDraft.from_pretrained(write_shards(tmp_path / "shards", config, tensors, weights))
    else:
        write_shards(hub_snapshot(tmp_path, "org/head") / "drafter", config, tensors, weights)
        head = EagleDraft.from_pretrained("org/head/drafter", cache_dir=tmp_path, local_files_only=True)
    assert head.config == whole.config
    assert head.draft_ids.tolist() == whole.draft_ids.tolist()
    for name, weight in whole.state_dict().items():
        assert torch.equal(head.state_dict()[name], weight)


@pytest.mark.parametrize(
    "name",
    [
        f"../{SAFE}", f"/etc/{SAFE}", f"sub/{SAFE}", f"..\\{SAFE}", "..", "", ".safetensors", f"C:{SAFE}", f"{SAFE}\n",
        "config.json", 7, None, [SAFE],
    ],
    ids=repr,
)  # fmt: skip
def test_an_index_names_files_beside_it_alone(name: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    """What it names exists, outside the head's folder and inside."""
    tensors = head_tensors(config)
    for place in (tmp_path, tmp_path / "head" / "sub"):
        write_head(place, config, tensors)
    folder = write_shards(tmp_path / "head", config, tensors)
    path = folder / f"{SAFE}.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["fc.weight"] = name
    path.write_text(json.dumps(index))
    message = refusal(folder, path.name)
    assert f"names {name!r}, which is no weights file beside it" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is a JSON list"),
        ("{}", "has no `weight_map`"),
        ('{"weight_map": {}}', "has no `weight_map`"),
        ('{"weight_map": ["model.safetensors"]}', "has no `weight_map`"),
        (POINTER.decode(), "is a git-lfs pointer"),
        ("", "is empty"),
    ],
)
def test_a_broken_index_is_named(content: str, words: str, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_shards(tmp_path, config, head_tensors(config))
    path = folder / f"{SAFE}.index.json"
    path.write_text(content)
    assert words in refusal(folder, path.name)


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_a_missing_shard_is_named(where: str, tmp_path: Path, config: dict[str, Any]) -> None:
    place = tmp_path / "head" if where == "folder" else hub_snapshot(tmp_path, "org/head")
    folder = write_shards(place, config, head_tensors(config))
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    source = {"source": "org/head", "cache_dir": tmp_path, "local_files_only": True} if where == "hub" else {}
    with pytest.raises(FileNotFoundError, match=re.escape(f"{shard.name}, which {SAFE}.index.json names,")) as caught:
        EagleDraft.from_pretrained(source.pop("source", folder), **source)
    assert ("'org/head'" if where == "hub" else str(folder)) in str(caught.value)


def test_a_spoilt_shard_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_shards(tmp_path, config, head_tensors(config))
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(half(shard.read_bytes()))
    refusal(folder, shard.name)


def test_shards_hold_what_the_index_says_once(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = head_tensors(config)
    folder = write_shards(tmp_path, config, tensors)
    first, second = (folder / f"model-0000{at}-of-00002.safetensors" for at in (1, 2))
    save_file(
        {name: t for at, (name, t) in enumerate(tensors.items()) if at in (0, *range(1, len(tensors), 2))}, second
    )
    assert f"both hold {next(iter(tensors))}" in refusal(folder, "index.json")
    write_shards(tmp_path, config, tensors)
    save_file({name: t for at, (name, t) in enumerate(tensors.items()) if at in range(2, len(tensors), 2)}, first)
    assert f"do not hold: {next(iter(tensors))}" in refusal(folder, "index.json")


# What is loaded stays as it is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [SAFE, PICKLE])
def test_a_loaded_head_does_not_follow_its_file(weights: str, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path, config, head_tensors(config), weights)
    head = EagleDraft.from_pretrained(folder)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    path = folder / weights
    with path.open("r+b") as file:  # in place, as a copy over it does
        file.write(b"\1" * path.stat().st_size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("weights", [SAFE, PICKLE])
@pytest.mark.parametrize("how", ["default_device", "device_context", "default_dtype"])
def test_loading_does_not_follow_default_device_and_dtype(
    how: str, weights: str, tmp_path: Path, config: dict[str, Any], llama: PreTrainedModel
) -> None:
    tensors = head_tensors(config)
    tensors["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"], dtype=torch.float64)
    folder = write_head(tmp_path, config, tensors, weights)
    want = EagleDraft.from_pretrained(folder)
    try:
        if how == "default_device":
            torch.set_default_device("meta")
        if how == "default_dtype":
            torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta" if how == "device_context" else torch.get_default_device()):
            head = EagleDraft.from_pretrained(folder)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert {t.device.type for t in head.state_dict().values()} == {"cpu"}
    assert head.draft_ids.tolist() == want.draft_ids.tolist()
    assert all(torch.equal(tensor, want.state_dict()[name]) for name, tensor in head.state_dict().items())
    options = {"max_new_tokens": 8, "return_dict_in_generate": True}
    first, second = (talon(llama, PROMPT, drafter, **options) for drafter in (head, want))
    assert first.sequences.tolist() == second.sequences.tolist()
    assert first.talon_stats.nodes == second.talon_stats.nodes


@pytest.mark.conformance
def test_loading_draws_nothing_from_the_callers_seed(tmp_path: Path, config: dict[str, Any]) -> None:
    """A head that loads inside the call would otherwise change what the seed gives."""
    model = tiny_model("llama", eos_token_id=None)
    folder = write_head(tmp_path, config, head_tensors(config))
    options = {"do_sample": True, "max_new_tokens": 20}
    want = plain(model, PROMPT, **options)
    assert talon(model, PROMPT, Path(folder), **options).tolist() == want.tolist()


def test_a_dtype_that_no_head_computes_in_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_head(tmp_path, config, head_tensors(config))
    for dtype in (torch.int8, torch.float8_e4m3fn, "float32"):
        with pytest.raises(ValueError, match="got `dtype`="):
            EagleDraft.from_pretrained(folder, dtype=dtype)
