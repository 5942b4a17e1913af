"""The prompt of a call, as `generate` prepared it for the model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .masks import layer_windows

# What the loop decides itself, or what `generate` does not hand to the forward either.
NOT_INPUTS = ("logits_to_keep", "cache", "past_key_values", "cache_position", "labels")
# Inputs with a column for each token; they may cover more of a text than its last tokens.
BY_TOKEN = ("position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


@dataclass(frozen=True)
class Prompt:
    """B prompts of m columns.

    Attributes:
        ids: (B, L) int64, the tokens that the sequences begin with: the prompt's own, L = m, if there are no
            embeddings.
        mask: (B, m), 0 for padding, or None.
        given: what else `generate` hands to the model's `prepare_inputs_for_generation`.
        embeds: (B, m, h), what the model reads instead of `ids`, or None.
    """

    ids: Tensor
    mask: Tensor | None
    given: dict[str, Any]
    embeds: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Prompt:
        """What `generate` hands to its loop.

        Raises:
            ValueError: new tokens without the text that a cache holds, a mask or positions of another shape, or a
                mask that hides a token inside the prompt from a window.
        """
        given = {name: value for name, value in model_kwargs.items() if name not in NOT_INPUTS}
        mask, embeds = given.pop("attention_mask", None), given.pop("inputs_embeds", None)
        rows, columns = (input_ids if embeds is None else embeds).shape[:2]
        if embeds is None:
            _refuse_new_tokens_alone(columns, model_kwargs)
        if mask is not None:
            mask = _fitting(mask, rows, columns, "input_ids" if embeds is None else "inputs_embeds")
            _refuse_holes(model, mask)
        positions = given.get("position_ids")
        if embeds is not None and positions is not None and 1 < positions.shape[-1] < columns:
            raise ValueError(
                f"`inputs_embeds` has {columns} positions, `position_ids` {positions.shape[-1]}: pass an "
                f"`attention_mask` of the shape {(rows, columns)}, from which `generate` numbers them."
            )
        return cls(input_ids.long(), mask, given, embeds)

    @property
    def columns(self) -> int:
        """m, which the cache holds once the prompt is read."""
        return self.ids.shape[1] if self.embeds is None else self.embeds.shape[1]

    @property
    def lead(self) -> int:
        """Columns before the first of the sequences' tokens; below 0 for tokens beside fewer embeddings."""
        return self.columns - self.ids.shape[1]

    def lengths(self) -> list[int]:
        """Per row, the columns without the padding."""
        return [self.columns] * len(self.ids) if self.mask is None else self.mask.sum(dim=1).tolist()

    def tokens(self) -> Tensor:
        """(B, m) int64, the token at each column; -1 where there is an embedding and no token."""
        return self.ids if self.lead == 0 else self.ids.new_full((len(self.ids), self.columns), -1)


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


def chunk_size(value: Any) -> int | None:
    """The most columns of a prompt that one forward may read, from `prefill_chunk_size`.

    Raises:
        RuntimeError, TypeError: as plain `generate` does, whose split of the prompt fails.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`prefill_chunk_size` must be a whole number of tokens, got {value!r}.")
    if value < 1:
        raise RuntimeError(f"`prefill_chunk_size` must be at least 1 token, got {value}: leave it out for one chunk.")
    return value


def _fitting(mask: Tensor, rows: int, length: int, name: str) -> Tensor:
    if mask.dim() != 2 or mask.shape[1] != length or len(mask) not in (1, rows):
        raise ValueError(
            f"`attention_mask` has the shape {tuple(mask.shape)}, `{name}` {(rows, length)}: TALON reads one 0 or "
            f"1 for each position. With a cache, too, pass the whole text as `{name}`."
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
    """Raises ValueError for a prompt that is read anew, if only its cache has its images, sounds or embeddings."""
    if cache is None or cache.get_seq_length() == 0:
        return
    if getattr(cache, "of_embeddings", False) and prompt.embeds is None:
        raise ValueError(
            "The prompt began as `inputs_embeds` that this call was not given, and its cache cannot be gone on with "
            "(it is of another drafter, another kind or another text). Pass them again, as for a first turn."
        )
    ids = [getattr(model.config, name, None) for name in PLACEHOLDERS]
    shown = any(bool((prompt.ids == token).any()) for token in ids if token is not None)
    if shown and not any(isinstance(v, Tensor) and v.is_floating_point() for v in prompt.given.values()):
        raise ValueError(
            "The prompt shows images, videos or sounds that this call was not given, and its cache cannot be gone on "
            "with (it is of another drafter, another kind or another text). Pass them again, as for a first turn."
        )
