"""TreeCache: columns that carry their own names first, then real models whose next step must not notice the tree."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from models import VOCABULARY
from oracles import ancestors
from strategies import random_tree
from test_masks import ROUNDING, model_of, plain_logits, prompts, target_of
from test_tree import Pair, tree_of
from torch import Tensor

from talon_hf.cache import TreeCache
from talon_hf.compat import cache_keyword
from talon_hf.tree import DraftTree


def append(cache: TreeCache, columns: Sequence[Sequence[float]], layers: int = 2) -> None:
    """One forward: per row, columns named by numbers; keys hold the name, values its negative."""
    names = torch.tensor(columns, dtype=torch.float64)[:, None, :, None].expand(-1, 2, -1, 3)
    for layer in range(layers):
        cache.update(names + 1000 * layer, -names, layer)


def contents(cache: TreeCache, layer: int = 0) -> list[list[int]]:
    """Per row, the names of its committed columns; keys and values must agree on them."""
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    names = keys[:, 0, :, 0] - 1000 * layer
    assert keys.equal((names + 1000 * layer)[:, None, :, None].expand_as(keys))
    assert values.equal(-names[:, None, :, None].expand_as(values))
    return [row[:end] for row, end in zip(names.long().tolist(), cache.committed, strict=True)]


def test_keep_by_hand() -> None:
    cache = TreeCache(2)
    append(cache, [[0, 1, 2], [10, 11, 12]])
    cache.keep([[0, 1, 2], [2]])
    assert (contents(cache), cache.get_seq_length()) == ([[0, 1, 2], [12]], 3)
    append(cache, [[3, 4, 5, 6], [13, 14, 15, 16]])
    assert cache.get_seq_length() == 7
    cache.keep([[0, 2], [0, 1, 3]])
    assert (contents(cache), cache.get_seq_length()) == ([[0, 1, 2, 3, 5], [12, 13, 14, 16]], 5)
    assert contents(cache, layer=1) == contents(cache)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_rounds_of_any_shape_keep_what_was_picked_in_order(rows: int, seed: int) -> None:
    rng, cache, names = random.Random(seed), TreeCache(rows), 0
    kept: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(30):
        width = rng.randint(1, 12)
        columns = [[names + 100 * row + c for c in range(width)] for row in range(rows)]
        picked = [sorted(rng.sample(range(width), rng.randint(1, width))) for _ in range(rows)]
        append(cache, columns)
        cache.keep(picked)
        kept = [old + [new[c] for c in row] for old, new, row in zip(kept, columns, picked, strict=True)]
        names += 1000
    assert contents(cache) == contents(cache, layer=1) == kept
    assert cache.get_seq_length() == max(map(len, kept))
    assert cache.visible().tolist() == [[c < len(row) for c in range(cache.get_seq_length())] for row in kept]


def test_a_buffer_is_written_in_place_and_moves_only_when_it_is_full() -> None:
    cache = TreeCache(1)
    append(cache, [[0, 1, 2]])
    cache.keep([[0, 1, 2]])
    moves, before = 0, cache.layers[0].keys.data_ptr()
    for step in range(1, 1000):
        append(cache, [[2 + step, -1, -2]])
        cache.keep([[0]])
        moves += cache.layers[0].keys.data_ptr() != before
        before = cache.layers[0].keys.data_ptr()
    assert contents(cache) == [list(range(1002))]
    # Growth by half: 3 columns become 1002 in fewer than log(1002 / 67) / log(1.5) + 2 moves, one a step would be 999.
    assert 0 < moves < 9


def test_a_cache_that_is_told_its_capacity_is_allocated_once() -> None:
    cache = TreeCache(1, capacity=500)
    append(cache, [[0]])
    cache.keep([[0]])
    before = cache.layers[0].keys.data_ptr()
    append(cache, [[*range(1, 500)]])
    cache.keep([[*range(499)]])
    assert cache.layers[0].keys.data_ptr() == before
    append(cache, [[500]])
    cache.keep([[0]])
    assert cache.layers[0].keys.data_ptr() != before
    assert contents(cache) == [[*range(501)]]


def test_keeping_a_ragged_batch_moves_no_buffer() -> None:
    cache = TreeCache(3)
    append(cache, [[*range(20)]] * 3)
    cache.keep([[*range(20)], [3, 5], [7]])
    pointers = [layer.keys.data_ptr() for layer in cache.layers]
    for _ in range(5):
        append(cache, [[*range(6)]] * 3)
        cache.keep([[0], [0, 2, 5], [0, 1]])
    assert [layer.keys.data_ptr() for layer in cache.layers] == pointers


def test_growth_keeps_the_content_of_every_row() -> None:
    cache = TreeCache(2)
    append(cache, [[0, 1], [100, 101]])
    cache.keep([[0, 1], [1]])
    append(cache, [[*range(2, 602)], [*range(102, 702)]])
    cache.keep([[*range(600)], [0, 599]])
    assert contents(cache) == [[*range(602)], [101, 102, 701]]


def test_drop_forgets_the_last_forward() -> None:
    cache = TreeCache(2)
    append(cache, [[0, 1], [10, 11]])
    cache.keep([[0, 1], [0]])
    append(cache, [[2, 3, 4], [12, 13, 14]])
    cache.drop()
    assert (cache.get_seq_length(), contents(cache)) == (2, [[0, 1], [10]])
    append(cache, [[5], [15]])
    cache.keep([[0], [0]])
    assert contents(cache) == [[0, 1, 5], [10, 15]]


def test_selected_rows_keep_their_columns_and_their_pace() -> None:
    cache = TreeCache(3)
    append(cache, [[0, 1, 2], [10, 11, 12], [20, 21, 22]])
    cache.keep([[0, 1, 2], [0], [1, 2]])
    cache.select_rows([2, 1])
    assert (cache.committed, cache.get_seq_length(), contents(cache)) == ([2, 1], 2, [[21, 22], [10]])
    append(cache, [[23, 24], [13, 14]])
    cache.keep([[0], [0, 1]])
    assert contents(cache) == [[21, 22, 23], [10, 13, 14]]


def test_a_cropped_column_is_overwritten_by_the_next() -> None:
    cache = TreeCache(1)
    append(cache, [[0, 1, 2, 3]])
    cache.crop(-2)
    append(cache, [[9]])
    assert cache.get_seq_length() == 3
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [0, 1, 9]


def test_a_reset_layer_starts_over() -> None:
    cache = TreeCache(1)
    append(cache, [[0, 1, 2]])
    cache.reset()
    assert cache.get_seq_length() == 0
    append(cache, [[7]])
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [7]


def test_rows_repeat_and_reorder_as_in_any_cache() -> None:
    cache = TreeCache(2)
    append(cache, [[0, 1], [10, 11]])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0]))
    append(cache, [[2], [12]])
    assert cache.layers[1].keys[:, 0, :, 0].tolist() == [[1010, 1011, 1002], [1000, 1001, 1012]]


# Real models: random prompts, then rounds of random trees and random accepted paths.


def random_rounds(seed: int, rows: int, rounds: int) -> list[tuple[list[list[Pair]], list[list[int]]]]:
    """Per round, a tree for each row and the columns of an accepted path, the root first."""
    rng, drawn = random.Random(seed), []
    for round_ in range(rounds):
        sizes = [rng.randint(1, 9) for _ in range(rows)]
        trees = [random_tree(1000 * seed + 10 * round_ + i, n, VOCABULARY) for i, n in enumerate(sizes)]
        ends = [rng.randrange(len(tree)) for tree in trees]
        parents = [[parent for _, parent in tree] for tree in trees]
        drawn.append((trees, [[*reversed(ancestors(p, end)), end] for p, end in zip(parents, ends, strict=True)]))
    return drawn


def poison(cache: TreeCache) -> None:
    """Overwrites every column that is not committed."""
    for layer in cache.layers:
        for row, end in enumerate(cache.committed):
            layer.keys[row, :, end:] = layer.values[row, :, end:] = 1e4


@torch.no_grad()
def check_next_step(family: str, lengths: Sequence[int], seed: int, rounds: int = 4) -> None:
    """After every `keep`, the next root's logits are those of a fresh prefill of the same text."""
    model = model_of(family)
    ids, mask, texts = prompts(*lengths)
    target = target_of(model, len(lengths))
    target.prefill(ids, mask)
    for trees, paths in random_rounds(seed, len(lengths), rounds):
        target.score(tree_of(*trees))
        target.keep(paths)
        poison(target.cache)
        texts = [text + [tree[c][0] for c in path] for text, tree, path in zip(texts, trees, paths, strict=True)]
        roots = [(seed + len(text)) % VOCABULARY for text in texts]
        logits = target.score(DraftTree.from_roots(torch.tensor(roots))).logits[:, 0]
        target.cache.drop()
        want = torch.stack([plain_logits(model, [*text, root]) for text, root in zip(texts, roots, strict=True)])
        torch.testing.assert_close(logits, want, atol=ROUNDING, rtol=0)
    assert target.cache.committed == [len(text) for text in texts]


# The windows of mistral and gemma3 are 12 tokens long: both prompts and rounds cross them.
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("seed", range(4))
def test_after_keep_the_next_step_is_that_of_a_fresh_prefill(family: str, seed: int) -> None:
    check_next_step(family, [5 + 4 * seed], seed)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("lengths", [(3, 14, 8), (13, 13, 2)])
def test_rows_of_a_padded_batch_keep_their_own_columns(family: str, lengths: tuple[int, ...]) -> None:
    check_next_step(family, lengths, seed=sum(lengths))


@torch.no_grad()
def test_rows_that_stay_do_not_notice_the_ones_that_leave() -> None:
    model = model_of("mistral")
    ids, mask, texts = prompts(9, 15, 4)
    target = target_of(model, 3)
    target.prefill(ids, mask)
    target.select_rows([2, 0])
    texts = [texts[2], texts[0]]
    tree = tree_of([(5, -1), (6, 0)], [(7, -1), (8, 0)])
    logits = target.score(tree).logits
    for row, path in enumerate(([5, 6], [7, 8])):
        torch.testing.assert_close(logits[row, 1], plain_logits(model, texts[row] + path), atol=ROUNDING, rtol=0)


@torch.no_grad()
def test_a_settled_cache_serves_plain_decoding() -> None:
    model = model_of("llama")
    ids, _, texts = prompts(6)
    target = target_of(model, 1)
    target.prefill(ids, None)
    target.score(tree_of([(5, -1), (6, 0), (7, 0), (8, 2)]))
    target.keep([[0, 2, 3]])
    next_token: Tensor = torch.tensor([[9]])
    logits = model(input_ids=next_token, **{cache_keyword(model): target.cache}).logits[0, -1]
    torch.testing.assert_close(logits, plain_logits(model, texts[0] + [5, 7, 8, 9]), atol=ROUNDING, rtol=0)


def test_cropping_and_resetting_keep_the_rows_lengths_true() -> None:
    cache = TreeCache(2)
    append(cache, [[1, 2, 3, 4], [5, 6, 7, 8]])
    cache.keep([[0, 1, 2, 3], [0, 1]])
    cache.crop(-1)
    assert (cache.committed, cache.get_seq_length()) == ([3, 2], 3)
    cache.reset()
    assert (cache.committed, cache.get_seq_length()) == ([0, 0], 0)
    append(cache, [[9, 9], [8, 8]])
    cache.keep([[0, 1], [1]])
    assert contents(cache) == [[9, 9], [8]]
