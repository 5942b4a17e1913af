"""The prompt of a call, as `generate` prepared it for the model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .masks import layer_windows
from .turns import Turn

# What the loop decides itself, or what `generate` does not hand to the forward either.
NOT_INPUTS = ("use_cache", "logits_to_keep", "cache", "past_key_values", "cache_position", "labels")
# Inputs with a column for each token; they may cover more of a text than its last tokens.
BY_TOKEN = ("position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


@dataclass(frozen=True)
class Prompt:
    """B prompts of L columns.

    Attributes:
        ids: (B, L) int64.
        mask: (B, L), 0 for padding, or None.
        inputs: what else the forward gets; those of `BY_TOKEN` are (..., B, L).
    """

    ids: Tensor
    mask: Tensor | None
    inputs: dict[str, Any]

    @classmethod
    def of(cls, model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Prompt:
        """What `generate` hands to its loop.

        Raises:
            ValueError: new tokens without the text that a cache holds, a mask of another shape, or one that hides a
                token inside the prompt from a window.
        """
        rows, length = input_ids.shape
        _refuse_new_tokens_alone(length, model_kwargs)
        inputs = {name: value for name, value in model_kwargs.items() if name not in NOT_INPUTS}
        mask = inputs.pop("attention_mask", None)
        if mask is not None:
            mask = _fitting(mask, rows, length)
            _refuse_holes(model, mask)
        for name in BY_TOKEN:
            if inputs.get(name) is not None:
                values = inputs[name][..., -length:]
                inputs[name] = values.expand(*values.shape[:-2], rows, length)
        return cls(input_ids.long(), mask, inputs)

    def lengths(self) -> list[int]:
        """Per row, the tokens without the padding."""
        return [self.ids.shape[1]] * len(self.ids) if self.mask is None else self.mask.sum(dim=1).tolist()

    def behind(self, turn: Turn) -> Prompt:
        """What a turn (of one row) has not read yet."""
        new = self.ids.shape[1] - turn.tokens.shape[1]
        inputs = {name: value[..., -new:] if name in BY_TOKEN else value for name, value in self.inputs.items()}
        positions = inputs.get("position_ids")
        if positions is None or positions.dim() != turn.next_positions.dim() + 1:
            steps = torch.arange(new, device=turn.next_positions.device)
            inputs["position_ids"] = turn.next_positions.unsqueeze(-1) + steps
        return Prompt(self.ids[:, -new:], None, inputs)


def _refuse_new_tokens_alone(length: int, model_kwargs: Mapping[str, Any]) -> None:
    cache, positions = given_cache(model_kwargs), model_kwargs.get("position_ids")
    past = 0 if cache is None else int(cache.get_seq_length())
    if past and positions is not None and positions.shape[-1] > length:
        raise ValueError(
            f"`input_ids` has {length} tokens, and the cache holds {past}: pass the whole text, which the drafter and "
            "the logits processors read. What TALON's own cache holds is not run through the model again."
        )


def given_cache(model_kwargs: Mapping[str, Any]) -> Any:
    """The cache that `generate` prepared or was given, under its newer or its older name."""
    cache = model_kwargs.get("cache")
    return model_kwargs.get("past_key_values") if cache is None else cache


def _fitting(mask: Tensor, rows: int, length: int) -> Tensor:
    if mask.dim() != 2 or mask.shape[1] != length or len(mask) not in (1, rows):
        raise ValueError(
            f"`attention_mask` has the shape {tuple(mask.shape)}, `input_ids` {(rows, length)}: TALON reads one 0 or "
            "1 for each token. With a cache, too, pass the whole text as `input_ids`."
        )
    return mask.expand(rows, length)


def _refuse_holes(model: PreTrainedModel, mask: Tensor) -> None:
    """Raises ValueError for a masked token behind a row's first where windows count it, since the cache drops it."""
    valid = mask.bool()
    has_begun = valid.long().cumsum(dim=1) > 0
    if any(layer_windows(model.config).values()) and bool((has_begun & ~valid).any()):
        raise ValueError(
            "`attention_mask` hides a token inside the prompt, and the sliding windows of "
            f"{type(model).__name__} count it: TALON keeps no hidden tokens. Leave such tokens out of `input_ids`; "
            "padding may stand on the left. Where no mask was passed, `generate` hides the pad tokens of the prompt."
        )


def refuse_lost_media(model: PreTrainedModel, prompt: Prompt, cache: Any) -> None:
    """Raises ValueError for a prompt that is read anew, and shows images or sounds that only its cache has."""
    if cache is None or cache.get_seq_length() == 0:
        return
    ids = [getattr(model.config, name, None) for name in PLACEHOLDERS]
    shown = any(bool((prompt.ids == token).any()) for token in ids if token is not None)
    if shown and not any(isinstance(v, Tensor) and v.is_floating_point() for v in prompt.inputs.values()):
        raise ValueError(
            "The prompt shows images, videos or sounds that this call was not given, and its cache cannot be gone on "
            "with (it is of another drafter, another kind or another text). Pass them again, as for a first turn."
        )
