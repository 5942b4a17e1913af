"""TreeCache: a preallocated key-value cache that can keep some columns of the last forward and forget the others.

Every row's committed columns lie at the left of the buffer without a gap. A tree forward appends its n columns behind
the longest row, for all rows; `keep` moves each row's accepted ones down to that row's own end. Columns between a
row's end and the buffer's end are hidden by the mask. Sliding-window layers keep every column: the mask does the
window, so a rejected branch cannot push a column out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import DynamicCache, DynamicLayer

from .compat import make_layers_with


class TreeLayer(DynamicLayer):
    """Keys and values of one layer in buffers that grow by half: (B, heads, capacity, head_dim)."""

    is_compileable = False

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: list[Tensor] = []
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Notes dtype and device; buffers are allocated by the first `update`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends (B, heads, q, head_dim) columns; returns views of all columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._buffers and self._buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            # What an earlier turn made in inference mode may be read here, not written.
            self._buffers = [buffer.clone() for buffer in self._buffers]
        end = self._length + key_states.shape[-2]
        if not self._buffers or end > self._buffers[0].shape[-2]:
            spare = end + max(end // 2, 64)
            self._grow((key_states, value_states), self._capacity if end <= self._capacity else spare)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = states
        self._view(end)
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    def _grow(self, states: tuple[Tensor, Tensor], capacity: int) -> None:
        old = self._buffers
        self._buffers = [s.new_empty(*s.shape[:2], capacity, s.shape[3]) for s in states]
        for buffer, full in zip(self._buffers, old, strict=bool(old)):
            buffer[:, :, : self._length] = full[:, :, : self._length]

    def _view(self, length: int) -> None:
        self._length = length
        if self._buffers:
            self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeLayer:
        """A layer with the columns in use alone, in buffers of its own."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._buffers = [buffer[:, :, : self._length].clone() for buffer in self._buffers]
        twin._view(self._length)
        return twin

    def get_seq_length(self) -> int:
        """Columns in use, those of the longest row."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns; a positive number is the length to keep, as before 5.20."""
        keep = tokens_to_remove if tokens_to_remove > 0 else self._length + tokens_to_remove
        self._view(max(0, min(keep, self._length)))

    def reset(self) -> None:
        """Forgets every column and frees the buffers."""
        self._buffers, self._length = [], 0
        self.keys = self.values = None
        self.is_initialized = False

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies columns `source` (B, a) to `target` (B, a) and ends the layer at `length`."""
        for buffer in self._buffers:
            if len(buffer) == 1:
                buffer[:, :, target[0]] = buffer[:, :, source[0]]
            else:
                shape = (-1, buffer.shape[1], -1, buffer.shape[3])
                moved = buffer.gather(2, source[:, None, :, None].expand(shape))
                buffer.scatter_(2, target[:, None, :, None].expand(shape), moved)
        self._view(length)

    def spread(self, columns: Tensor) -> None:
        """Replaces the columns by the present ones at `columns` (B, length) int64."""
        index = columns.to(self.device)[:, None, :, None]
        self._buffers = [b.gather(2, index.expand(-1, b.shape[1], -1, b.shape[3])) for b in self._buffers]
        self._view(columns.shape[1])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` (R,), in that order."""
        self._buffers = [buffer[indices.to(buffer.device)] for buffer in self._buffers]
        self._view(self._length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        self._buffers = [buffer.repeat_interleave(repeats, dim=0) for buffer in self._buffers]
        self._view(self._length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows."""
        self.batch_select_indices(beam_idx)


class TreeCache(DynamicCache):
    """The cache of B rows that commit at their own pace.

    Args:
        rows: B.
        capacity: columns to allocate at once; 0 lets the buffers grow as they fill.

    Attributes:
        committed: per row, how many columns are committed; the buffer ends at their maximum between rounds.
        of_embeddings: whether the text that it holds was given as embeddings, which no tokens tell.
    """

    def __init__(self, rows: int, capacity: int = 0) -> None:
        super().__init__()
        # Layers appear as the model first updates them, so layers that share another's keys cost nothing.
        make_layers_with(self, partial(TreeLayer, capacity))
        self.committed = [0] * rows
        self.of_embeddings = False

    def fill(self, columns: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Copies the `columns` of another cache into this one, which is empty; all of them are committed."""
        for index, (keys, values) in columns.items():
            self.update(keys, values, index)
        self.committed = [self.get_seq_length()] * len(self.committed)

    def keep(self, picked: list[list[int]]) -> None:
        """Settles the last forward: keeps its columns `picked` (per row, counted from its first column), in order."""
        start = max(self.committed)
        length = max(done + len(row) for done, row in zip(self.committed, picked, strict=True))
        if any(
            done != start or row != list(range(len(row))) for done, row in zip(self.committed, picked, strict=True)
        ):
            width = max(len(row) for row in picked)
            source = torch.tensor([[start + c for c in row + [0] * (width - len(row))] for row in picked])
            target = torch.tensor(self.committed).unsqueeze(1) + torch.arange(width)
            self._move(source, target, length)
        else:
            self._view(length)
        self.committed = [done + len(row) for done, row in zip(self.committed, picked, strict=True)]

    def spread(self, mask: Tensor) -> None:
        """Puts each row's columns where plain `generate` keeps them, for whoever goes on with the cache.

        Args:
            mask: (B, L), 0 for the columns of a prompt that this cache did not keep; what fills them is never read.
        """
        generated = {done - kept for done, kept in zip(self.committed, mask.sum(dim=1).tolist(), strict=True)}
        kept = torch.cat([mask.bool(), mask.new_ones(len(mask), *generated, dtype=torch.bool)], dim=1)
        for layer in self._tree_layers():
            layer.spread((kept.long().cumsum(dim=1) - 1).clamp(min=0))
        self._set_rows([kept.shape[1]] * len(mask))

    def drop(self) -> None:
        """Forgets every column that is not committed."""
        self._view(max(self.committed))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns of every row."""
        super().crop(tokens_to_remove)
        self._set_rows([min(done, self.get_seq_length()) for done in self.committed])

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self._set_rows([0] * len(self.committed))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows."""
        super().reorder_cache(cast(LongTensor, beam_idx))
        self._set_rows([self.committed[row] for row in beam_idx.tolist()])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` (R,), in that order."""
        super().batch_select_indices(indices)
        self._set_rows([self.committed[row] for row in indices.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._set_rows([done for done in self.committed for _ in range(repeats)])

    def _set_rows(self, committed: list[int]) -> None:
        self.committed = committed

    def visible(self, device: torch.device | None = None) -> Tensor:
        """(B, longest row) bool: the committed columns of each row."""
        ends = torch.tensor(self.committed, device=device).unsqueeze(1)
        return torch.arange(max(self.committed), device=device) < ends

    def select_rows(self, rows: list[int]) -> None:
        """Keeps the rows `rows`, in that order."""
        self.batch_select_indices(torch.tensor(rows))
        self._view(max(self.committed))

    def _move(self, source: Tensor, target: Tensor, length: int) -> None:
        placed: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for layer in self._tree_layers():
            if layer.device not in placed:
                placed[layer.device] = (source.to(layer.device), target.to(layer.device))
            layer.move(*placed[layer.device], length)

    def _view(self, length: int) -> None:
        for layer in self._tree_layers():
            layer._view(length)

    def _tree_layers(self) -> list[TreeLayer]:
        return [layer for layer in self.layers if isinstance(layer, TreeLayer) and layer.is_initialized]


def columns_of(cache: DynamicCache) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, its keys and values (B, heads, columns, head_dim); layers that keep none are left out."""
    layers: list[Any] = cache.layers
    return {i: (layer.keys, layer.values) for i, layer in enumerate(layers) if layer.is_initialized}
