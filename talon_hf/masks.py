"""Attention masks of a draft tree, for full, sliding-window and chunked layers.

A node sees the committed columns of its row, its ancestors and itself. A window counts positions, and a node's
position is its row's length plus its depth: two nodes of one depth share a position, whatever their columns are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from .tree import DraftTree

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
Window = Callable[[Tensor, Tensor], Tensor]


def layer_windows(config: PretrainedConfig) -> dict[str, int | None]:
    """The model's layer types, each with its window or chunk in tokens (None: full attention).

    Raises:
        ValueError: a layer type whose state a tree cannot branch (recurrent, convolution, sparse index).
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        uses_window = window is not None and getattr(text, "use_sliding_window", True)
        types = ["sliding_attention" if uses_window else "full_attention"]
    unknown = sorted(set(types) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(
            f"TALON cannot verify a draft tree on a model with {', '.join(map(repr, unknown))} layers "
            f"({type(config).__name__}): their state follows one sequence and cannot branch. "
            "Call `generate` without `custom_generate`."
        )
    sizes = {
        "full_attention": None,
        "sliding_attention": window,
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    return {kind: sizes[kind] for kind in sorted(set(types))}


def tree_masks(
    windows: dict[str, int | None], tree: DraftTree, committed: Sequence[int], *, boolean: bool, dtype: torch.dtype
) -> Any:
    """The `attention_mask` of a tree forward.

    Args:
        windows: from `layer_windows`.
        tree: B trees of n nodes, whose columns follow the longest row's.
        committed: per row, its committed columns.
        boolean: True is "may attend" (sdpa); else additive in `dtype`, 0 or the dtype's lowest (eager adds its mask).

    Returns:
        (B, 1, n, longest + n), or a dict of them by layer type for models that mix types.
    """
    device = tree.tokens.device
    ends = torch.tensor(committed, device=device).unsqueeze(1)
    past = torch.arange(max(committed), device=device).expand(len(committed), -1)
    seen = torch.cat([(past < ends).unsqueeze(1).expand(-1, tree.size, -1), tree.mask()], dim=2)
    positions = ends + tree.depths
    keys, queries = torch.cat([past, positions], dim=1).unsqueeze(1), positions.unsqueeze(2)
    masks = {}
    for kind, size in windows.items():
        allowed = seen
        if size is not None and kind == "sliding_attention":
            allowed = seen & (keys > queries - size)
        elif size is not None:
            allowed = seen & (keys // size == queries // size)
        masks[kind] = _formatted(allowed.unsqueeze(1), boolean, dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _formatted(allowed: Tensor, boolean: bool, dtype: torch.dtype) -> Tensor:
    if boolean:
        return allowed
    lowest = torch.finfo(dtype).min
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, lowest)
