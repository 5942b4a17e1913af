"""What `assistant_model` may be, and when a head that is given by its place is loaded anew."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import PROMPT, plain, sequences, talon
from heads import head_config, head_tensors, hub_snapshot, write_head
from models import tiny_model
from transformers import PreTrainedModel

from talon_hf import EagleDraft, assistants
from talon_hf.assistants import drafter_of
from talon_hf.generate import HUB_ARGUMENTS

NONE = dict.fromkeys(HUB_ARGUMENTS)
WEIGHTS = "model.safetensors"


def save(folder: Path, model: PreTrainedModel, seed: int, weights: str = WEIGHTS) -> Path:
    config = head_config(model)
    return write_head(folder, config, head_tensors(config, seed), weights)


def fc_of(source: Any, model: PreTrainedModel, **hub: Any) -> Any:
    """The first weights of the head that a call gets: they tell which file it is from."""
    head = drafter_of(source, model, NONE | hub)
    assert isinstance(head, EagleDraft)
    return head.fc.weight.tolist()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that every load adds its source to; nothing is kept from other tests."""
    sources: list[Any] = []
    load = EagleDraft.from_pretrained

    def counted(source: Any, **options: Any) -> EagleDraft:
        sources.append(source)
        return load(source, **options)

    monkeypatch.setattr(EagleDraft, "from_pretrained", counted)
    monkeypatch.setattr(assistants, "_heads", {})
    return sources


def written_over(folder: Path, other: Path) -> None:
    for path in other.iterdir():
        shutil.copy(path, folder / path.name)


def replaced(folder: Path, other: Path) -> None:
    for path in other.iterdir():
        copy = folder / f"{path.name}.new"
        shutil.copy2(path, copy)
        copy.replace(folder / path.name)


def with_the_old_times(folder: Path, other: Path) -> None:
    for path in other.iterdir():
        times = (folder / path.name).stat()
        shutil.copy(path, folder / path.name)
        os.utime(folder / path.name, ns=(times.st_atime_ns, times.st_mtime_ns))


def another_folder(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def a_link(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(other)


@pytest.mark.parametrize("change", [written_over, replaced, with_the_old_times, another_folder, a_link])
def test_a_folder_whose_files_changed_is_read_anew(
    change: Any, loads: list[Any], tmp_path: Path, llama: PreTrainedModel
) -> None:
    folder, other = save(tmp_path / "head", llama, seed=3), save(tmp_path / "other", llama, seed=4)
    first = fc_of(str(folder), llama)
    assert fc_of(str(folder), llama) == first
    assert len(loads) == 1
    change(folder, other)
    second = fc_of(str(folder), llama)
    assert second == fc_of(other, llama) != first
    assert fc_of(str(folder), llama) == second
    assert len(loads) == (2 if change is a_link else 3)
    assert len({key[1] for key in assistants._heads}) == len(assistants._heads)  # the head of old is not kept


def test_an_index_or_a_shard_that_changed_counts_too(loads: list[Any], tmp_path: Path, llama: PreTrainedModel) -> None:
    folder = save(tmp_path, llama, seed=3, weights="pytorch_model.bin")
    first = fc_of(folder, llama)
    save(tmp_path, llama, seed=4)  # a safetensors file beside the old one, which goes before it
    assert fc_of(folder, llama) != first


@pytest.mark.conformance
def test_a_call_drafts_with_the_files_of_now(tmp_path: Path) -> None:
    model = tiny_model("llama", eos_token_id=None)
    folder, other = save(tmp_path / "head", model, seed=3), save(tmp_path / "other", model, seed=4)
    options: dict[str, Any] = {"max_new_tokens": 16, "return_dict_in_generate": True}
    old, new = (talon(model, PROMPT, EagleDraft.from_pretrained(place), **options) for place in (folder, other))
    assert old.talon_stats.nodes != new.talon_stats.nodes
    first = talon(model, PROMPT, folder, **options)
    written_over(folder, other)
    second = talon(model, PROMPT, folder, **options)
    assert (first.talon_stats.nodes, second.talon_stats.nodes) == (old.talon_stats.nodes, new.talon_stats.nodes)
    assert sequences(first) == sequences(second) == plain(model, PROMPT, max_new_tokens=16).tolist()


def test_a_relative_folder_follows_the_working_directory(
    loads: list[Any], tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate("ab"):
        save(tmp_path / name / "head", llama, seed=seed)
    seen = []
    for name in "aba":
        monkeypatch.chdir(tmp_path / name)
        seen.append(fc_of("head", llama))
    assert seen[0] == seen[2] != seen[1]
    assert len(loads) == 2


def test_a_folder_is_one_head_however_it_is_spelled(
    loads: list[Any], tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "head", llama, seed=3)
    monkeypatch.chdir(tmp_path)
    for source in ("head", "./head", "head/", str(tmp_path / "head"), tmp_path / "head", Path("head")):
        fc_of(source, llama)
    assert len(loads) == 1


class Place(os.PathLike):
    """A path of some other library."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.conformance
@pytest.mark.parametrize("kind", [Path, Place])
def test_a_path_of_any_kind_is_a_place(kind: Any, tmp_path: Path, llama: PreTrainedModel) -> None:
    folder = save(tmp_path, llama, seed=3)
    out = talon(llama, PROMPT, kind(folder), max_new_tokens=12)
    assert out.tolist() == plain(llama, PROMPT, max_new_tokens=12).tolist()
    assert EagleDraft.from_pretrained(kind(folder)).config.hidden_size == 32


def test_a_head_of_the_hub_is_asked_for_once(
    loads: list[Any], tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(hub_snapshot(tmp_path / "cache", "org/head"), llama, seed=3)
    hub = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    monkeypatch.chdir(tmp_path)
    first = fc_of("org/head", llama, **hub)
    shutil.rmtree(tmp_path / "cache")
    assert fc_of("org/head", llama, **hub) == first
    assert loads == ["org/head"]
    save(tmp_path / "org" / "head", llama, seed=4)  # a folder of that name goes before the Hub, as everywhere
    assert fc_of("org/head", llama, **hub) != first
    shutil.rmtree(tmp_path / "org")
    assert fc_of("org/head", llama, **hub) == first
    assert len(loads) == 2


def test_few_heads_are_kept_and_a_broken_one_never(loads: list[Any], tmp_path: Path, llama: PreTrainedModel) -> None:
    places = [save(tmp_path / str(seed), llama, seed) for seed in range(assistants.KEPT + 1)]
    for place in places:
        fc_of(place, llama)
    assert len(assistants._heads) == assistants.KEPT
    fc_of(places[-1], llama)
    assert len(loads) == len(places)
    (places[-1] / WEIGHTS).write_bytes(b"")
    for _ in range(2):
        with pytest.raises(ValueError, match="is empty"):
            fc_of(places[-1], llama)
    assert len(assistants._heads) == assistants.KEPT - 1


def test_a_target_in_float8_gets_the_head_in_the_dtype_of_its_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = save(tmp_path, model, seed=3)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.float8_e4m3fn)
    assert model.dtype == torch.float8_e4m3fn
    assert drafter_of(folder, model, NONE).dtype == torch.float64
