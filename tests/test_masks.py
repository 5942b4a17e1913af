"""Tree masks: pictures, a naive oracle for windows and chunks, and the model's own word on every node's logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from models import FAMILIES, VOCABULARY, tiny_model
from oracles import ancestors, path_tokens
from strategies import random_tree
from test_tree import Pair, random_batch, tree_of, worked_tree
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from talon_hf.cache import TreeCache
from talon_hf.drafter import FeatureSpec
from talon_hf.masks import layer_windows, tree_masks
from talon_hf.target import Target, tree_attention, using_attention
from talon_hf.tree import DraftTree

# Two fp64 forwards of one text that add in different orders differ by a few hundred roundings. Inside transformers,
# eager attention takes its softmax and Llama 4 its rotation in fp32, whatever the model's dtype. A wrong mask is off
# by more than a tenth.
ROUNDING, FP32_ROUNDING = 1e-10, 1e-5
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

# The worked tree behind three committed tokens; a bar parts the committed columns from the tree's.
PICTURES: dict[tuple[str, int | None], list[str]] = {
    (FULL, None): ["111|1.....", "111|11....", "111|1.1...", "111|11.1..", "111|1.1.1.", "111|11.1.1"],
    (SLIDING, 3): [".11|1.....", "..1|11....", "..1|1.1...", "...|11.1..", "...|1.1.1.", "...|.1.1.1"],
    (SLIDING, 1): ["...|1.....", "...|.1....", "...|..1...", "...|...1..", "...|....1.", "...|.....1"],
    (CHUNKED, 4): ["111|1.....", "...|.1....", "...|..1...", "...|.1.1..", "...|..1.1.", "...|.1.1.1"],
}


def boolean_mask(tree: DraftTree, committed: Sequence[int], kind: str, size: int | None) -> Tensor:
    """(B, n, columns) bool."""
    mask = tree_masks({kind: size}, tree, committed, boolean=True, dtype=torch.float32)
    assert mask.dtype == torch.bool
    return mask.squeeze(1)


def pictured(mask: Tensor, committed: int) -> list[str]:
    rows = ["".join(".1"[seen] for seen in row) for row in mask.tolist()]
    return [row[:committed] + "|" + row[committed:] for row in rows]


@pytest.mark.parametrize(("kind", "size"), PICTURES)
def test_masks_as_pictures(kind: str, size: int | None) -> None:
    assert pictured(boolean_mask(worked_tree(), [3], kind, size)[0], 3) == PICTURES[kind, size]


def test_a_row_never_sees_the_columns_behind_its_own_end() -> None:
    tree = tree_of([(0, -1), (1, 0)], [(0, -1), (1, 0)], [(0, -1)])
    masks = boolean_mask(tree, [3, 1, 0], FULL, None)
    assert [pictured(mask, 3) for mask in masks] == [["111|1.", "111|11"], ["1..|1.", "1..|11"], ["...|1.", "...|.1"]]


def test_a_window_counts_each_rows_own_positions() -> None:
    tree = tree_of([(0, -1), (1, 0)], [(0, -1), (1, 0)])
    masks = boolean_mask(tree, [4, 2], SLIDING, 3)
    assert [pictured(mask, 4) for mask in masks] == [["..11|1.", "...1|11"], ["11..|1.", ".1..|11"]]


def naive_mask(
    pairs: list[Pair], committed: int, longest: int, n: int, kind: str, size: int | None
) -> list[list[bool]]:
    """A row's mask by asking, of every node and every column, where it is and whose ancestor."""
    parents = [parent for _, parent in pairs] + [-1] * (n - len(pairs))
    mask = []
    for i in range(n):
        here, row = committed + len(ancestors(parents, i)), []
        for column in range(longest + n):
            j = column - longest
            there = column if j < 0 else committed + len(ancestors(parents, j))
            seen = column < committed if j < 0 else j == i or j in ancestors(parents, i)
            near = {
                FULL: True,
                SLIDING: here - there < (size or 0),
                CHUNKED: here // (size or 1) == there // (size or 1),
            }
            row.append(seen and near[kind])
        mask.append(row)
    return mask


@pytest.mark.parametrize(("kind", "size"), [(FULL, None), (SLIDING, 1), (SLIDING, 4), (SLIDING, 9), (CHUNKED, 5)])
@pytest.mark.parametrize("seed", range(6))
def test_windows_count_node_depth_like_the_naive_mask(kind: str, size: int | None, seed: int) -> None:
    tree, rows = random_batch(seed)
    committed = [seed, 2 * seed + 1, 7]
    masks = boolean_mask(tree, committed, kind, size)
    for mask, pairs, end in zip(masks, rows, committed, strict=True):
        assert mask.tolist() == naive_mask(pairs, end, max(committed), tree.size, kind, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_additive_mask_is_zero_where_the_boolean_one_is_true_and_lowest_elsewhere(dtype: torch.dtype) -> None:
    tree, _ = random_batch(3)
    committed = [5, 0, 3]
    allowed = boolean_mask(tree, committed, SLIDING, 4).unsqueeze(1)
    additive = tree_masks({SLIDING: 4}, tree, committed, boolean=False, dtype=dtype)
    assert additive.dtype == dtype
    assert (additive == 0).equal(allowed)
    assert (additive == torch.finfo(dtype).min).equal(~allowed)


def test_only_a_model_that_mixes_layer_types_gets_a_dict() -> None:
    tree = worked_tree()
    assert isinstance(tree_masks({FULL: None}, tree, [3], boolean=True, dtype=torch.float32), Tensor)
    mixed = tree_masks({FULL: None, SLIDING: 3}, tree, [3], boolean=True, dtype=torch.float32)
    assert {kind: pictured(mask[0, 0], 3) for kind, mask in mixed.items()} == {
        FULL: PICTURES[FULL, None],
        SLIDING: PICTURES[SLIDING, 3],
    }


def test_layer_windows_by_family() -> None:
    windows = {family: layer_windows(model_of(family).config) for family in FAMILIES}
    assert windows == {
        "llama": {FULL: None},
        "qwen3": {FULL: None},
        "mistral": {SLIDING: 12},
        "gemma3": {FULL: None, SLIDING: 12},
        "gpt_oss": {FULL: None, SLIDING: 12},
    }


def test_a_layer_whose_state_cannot_branch_is_refused_by_name() -> None:
    config = LlamaConfig()
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="'linear_attention' layers"):
        layer_windows(config)


# The model's own word: a node's logits are those of a plain forward over the text that leads to it.


@cache
def model_of(family: str, implementation: str | None = None) -> PreTrainedModel:
    model = tiny_model(family)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    return model


def target_of(model: PreTrainedModel, rows: int) -> Target:
    return Target(model, FeatureSpec(), TreeCache(rows))


def prompts(*lengths: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """(B, L) ids and mask, padded on the left, and the texts without padding."""
    rng, width = torch.Generator().manual_seed(0), max(lengths)
    texts = [torch.randint(3, VOCABULARY, (n,), generator=rng).tolist() for n in lengths]
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return ids, mask, texts


@torch.no_grad()
def plain_logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """(V,) what plain decoding would compute after `text`."""
    return model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0, -1]


@torch.no_grad()
def check_tree_logits(model: PreTrainedModel, lengths: Sequence[int], seed: int, rounding: float) -> None:
    ids, mask, texts = prompts(*lengths)
    rows = [random_tree(seed + i, nodes=9 - 3 * i, vocab_size=VOCABULARY) for i in range(len(lengths))]
    target = target_of(model, len(lengths))
    target.prefill(ids, mask)
    logits = target.score(tree_of(*rows)).logits
    for row, (text, pairs) in enumerate(zip(texts, rows, strict=True)):
        for node in range(len(pairs)):
            want = plain_logits(model, [*text, pairs[0][0], *path_tokens(pairs, node)])
            torch.testing.assert_close(logits[row, node], want, atol=rounding, rtol=0)


# gpt_oss has attention sinks, which only its eager attention knows.
BACKENDS = [(f, i) for f in FAMILIES for i in ("eager", "sdpa") if (f, i) != ("gpt_oss", "sdpa")]


@pytest.mark.parametrize(("family", "implementation"), BACKENDS)
def test_a_nodes_logits_are_those_of_its_path(family: str, implementation: str) -> None:
    model = model_of(family, implementation)
    assert tree_attention(model) == implementation
    check_tree_logits(model, [14], 1, FP32_ROUNDING if implementation == "eager" else ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nodes_logits_are_those_of_its_path_in_a_ragged_batch(family: str) -> None:
    check_tree_logits(model_of(family), [15, 4, 11], 5, ROUNDING)


def test_a_chunked_model_sees_chunks_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"attention_chunk_size": 6, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_hidden_layers": 4}
    monkeypatch.setitem(FAMILIES, "llama4", ("Llama4TextConfig", changes))
    model = tiny_model("llama4")
    assert layer_windows(model.config) == {CHUNKED: 6, FULL: None}
    check_tree_logits(model, [17, 10, 4], seed=3, rounding=FP32_ROUNDING)


def test_flash_attention_gives_way_to_sdpa_for_the_tree_forward_alone() -> None:
    model: Any = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    assert tree_attention(model) == "sdpa"
    with using_attention(model, "sdpa"):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "flash_attention_2"


def test_the_models_attention_comes_back_when_a_forward_raises() -> None:
    model: Any = tiny_model("llama")
    with pytest.raises(RuntimeError, match="mid-forward"), using_attention(model, "eager"):
        raise RuntimeError("mid-forward")
    assert model.config._attn_implementation == "sdpa"
