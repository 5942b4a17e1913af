"""What plain `generate` hands to the model at its first forward, and at every later one.

The model's own `prepare_inputs_for_generation` says both. A tree brings its own tokens, masks, positions and cache;
whatever else a later forward would get, a tree forward gets too. It scores many steps at once, so what changes from
step to step cannot be served, and is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .compat import chunks_ignore_padding, hooks_of, own_preparation, prepared_inputs, updated_inputs
from .prompt import BY_TOKEN, Prompt

# What a forward of the loop brings itself.
OURS = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "cache_position",
    "use_cache", "logits_to_keep", "num_logits_to_keep", "return_dict", "labels", "next_sequence_length",
    "is_first_iteration", *BY_TOKEN,
)  # fmt: skip
# Columns of another text, which may be as long as the prompt.
OF_AN_ENCODER = ("encoder_hidden_states", "encoder_attention_mask")
# Lists with an entry for each row of the batch.
LISTS_BY_ROW = ("adapter_names",)


def first_inputs(
    model: PreTrainedModel, prompt: Prompt, cache: Any, past: int, is_first: bool = True
) -> dict[str, Any]:
    """What the forward gets that reads the prompt behind the `past` columns that `cache` holds.

    Returns:
        the arguments without cache, `use_cache` and `logits_to_keep`, which the target sets: `input_ids` (B, m) or
        `inputs_embeds` (B, m, h), `attention_mask` if it is no 2D mask, the others as they are.
    """
    given = dict(prompt.given)
    if prompt.embeds is not None:
        given["inputs_embeds"] = prompt.embeds
    if prompt.mask is not None:
        given["attention_mask"] = prompt.mask
    inputs = prepared_inputs(model, prompt.ids, given, cache, past, prompt.columns, is_first)
    read, expected = inputs.get("input_ids"), prompt.columns - past
    if isinstance(read, Tensor) and inputs.get("inputs_embeds") is None and read.shape[1] != expected:
        raise ValueError(
            f"TALON cannot verify a draft tree on {type(model).__name__}: with a cache, its "
            f"`prepare_inputs_for_generation` hands on {read.shape[1]} of {expected} tokens. Call `generate` without "
            "`custom_generate`."
        )
    mask = inputs.pop("attention_mask", None)
    kept = ("input_ids", "inputs_embeds", "position_ids", *BY_TOKEN)
    inputs = {name: value for name, value in inputs.items() if name not in OURS or name in kept}
    inputs = {name: value for name, value in inputs.items() if name not in kept or value is not None}
    is_made = mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)
    return inputs | ({"attention_mask": mask} if is_made else {})


def later_inputs(model: PreTrainedModel, prompt: Prompt, cache: Any, new: int, outputs: Any = None) -> dict[str, Any]:
    """What every forward behind the prompt gets beside tokens, mask, positions and cache.

    Args:
        model: the target.
        prompt: as it was read.
        cache: holds the prompt.
        new: the most tokens that may follow it.
        outputs: of the first forward.

    Raises:
        ValueError: an argument has a value for each token, or changes from step to step.
    """
    _refuse_updates(model, prompt, outputs)
    inputs = _at_step(model, prompt, cache, 1)
    if not own_preparation(model):
        # Made by code that nobody knows: it must be the same at the next steps, and at the last one.
        for step in sorted({2, 3, max(new, 4)}):
            later = _at_step(model, prompt, cache, step)
            for name in {**inputs, **later}:
                if name not in inputs or name not in later or not _equal(inputs[name], later[name]):
                    raise ValueError(_changes(model, name, "prepare_inputs_for_generation"))
    _refuse_by_token(inputs, prompt)
    _refuse_unknown_rows(inputs, len(prompt.ids))
    return inputs


def lasting(model: PreTrainedModel, prompt: Prompt, cache: Any) -> dict[str, Any]:
    """Those of a call's arguments that every forward gets; images and sounds belong to the prompt's alone."""
    later = _at_step(model, prompt, cache, 1)
    return {name: value for name, value in prompt.given.items() if name in later or name == "use_cache"}


def refuse_in_chunks(model: PreTrainedModel, prompt: Prompt, inputs: Mapping[str, Any], cache: Any) -> None:
    """Raises ValueError for what several forwards that read the prompt cannot share: images, sounds, embeddings."""
    if prompt.embeds is not None:
        raise ValueError(
            "`prefill_chunk_size` splits `input_ids` alone: plain `generate` reads all of `inputs_embeds` again for "
            "each chunk. Leave one of the two out."
        )
    if prompt.mask is not None and not bool(prompt.mask.all()) and chunks_ignore_padding():
        raise ValueError(
            "`prefill_chunk_size` with padding: this version of transformers numbers the positions of chunks as if "
            "there were none. Leave it out, or upgrade to transformers 5."
        )
    given = _at_step(model, prompt, cache, 1)
    media = [name for name in inputs if name not in given and name not in OURS]
    if media:
        raise ValueError(
            f"Chunked prefill cannot split the raw multimodal inputs {media} into chunks, so pass "
            "`prefill_chunk_size=None`."
        )


def select_rows(inputs: Mapping[str, Any], rows: Sequence[int], count: int) -> dict[str, Any]:
    """The inputs of some rows of a batch of `count`: tensors that begin with a row for each, and known lists."""
    return {name: _of_rows(name, value, rows, count) for name, value in inputs.items()}


def _of_rows(name: str, value: Any, rows: Sequence[int], count: int) -> Any:
    if isinstance(value, Tensor) and value.dim() and len(value) == count:
        return value[list(rows)]
    if name in LISTS_BY_ROW and isinstance(value, (list, tuple)):
        return [value[row] for row in rows]
    return value


def _at_step(model: PreTrainedModel, prompt: Prompt, cache: Any, step: int) -> dict[str, Any]:
    """What the forward of the `step`-th new token gets beside what a tree brings; tokens are made up."""
    rows, columns = len(prompt.ids), prompt.columns + step
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = (torch.arange(step, device=prompt.ids.device) * 7 + 3) % vocabulary
    given = dict(prompt.given)
    for name, value in given.items():
        if name in BY_TOKEN and isinstance(value, Tensor) and value.shape[-1]:
            count = torch.arange(1, step + 1, device=value.device) if name == "position_ids" else 0
            given[name] = torch.cat([value, value[..., -1:] + count * torch.ones_like(value[..., -1:])], dim=-1)
    if prompt.embeds is not None:
        given["inputs_embeds"] = prompt.embeds
    if prompt.mask is not None:
        given["attention_mask"] = torch.cat([prompt.mask, prompt.mask.new_ones(rows, step)], dim=1)
    ids = torch.cat([prompt.ids, tokens.expand(rows, -1)], dim=1)
    inputs = prepared_inputs(model, ids, given, cache, columns - 1, columns, False)
    if inputs.get("inputs_embeds") is not None:
        raise ValueError(
            f"{type(model).__name__} reads `inputs_embeds` again at every step in this version of transformers, if "
            "they are one position. Pass `input_ids`, or more than one position."
        )
    return {name: value for name, value in inputs.items() if name not in OURS}


def _refuse_updates(model: PreTrainedModel, prompt: Prompt, outputs: Any) -> None:
    """Raises ValueError if the model's own `_update_model_kwargs_for_generation` changes an argument."""
    if outputs is None:
        return
    before = {name: _snapshot(value) for name, value in prompt.given.items()}
    for name, value in updated_inputs(model, outputs, dict(prompt.given), prompt.columns).items():
        if name not in OURS and (name not in before or not _equal(before[name], value)):
            raise ValueError(_changes(model, name, "_update_model_kwargs_for_generation"))


def _changes(model: PreTrainedModel, name: str, where: str) -> str:
    return (
        f"`{name}`, which {type(model).__name__}'s `{where}` sets, changes from token to token, and a draft tree "
        "scores several tokens in one forward. Call `generate` without `custom_generate`."
    )


def _refuse_by_token(inputs: Mapping[str, Any], prompt: Prompt) -> None:
    for name, value in inputs.items():
        if name in OF_AN_ENCODER or not isinstance(value, Tensor) or value.dim() < 2 or prompt.columns == 1:
            continue
        if value.shape[1] == prompt.columns and len(value) in (1, len(prompt.ids)):
            raise ValueError(
                f"`{name}` has the shape {tuple(value.shape)}, an entry for each of the prompt's {prompt.columns} "
                "tokens, and every later forward gets it too: what the tokens of a draft tree would have there is "
                "not known. Call `generate` without `custom_generate`."
            )


def _refuse_unknown_rows(inputs: Mapping[str, Any], rows: int) -> None:
    for name, value in inputs.items():
        if rows > 1 and name not in LISTS_BY_ROW and not isinstance(value, Tensor) and _holds(value, rows):
            raise ValueError(
                f"`{name}` (a {type(value).__name__}) may hold an entry for each of the {rows} rows of the batch, and "
                "rows that have finished leave it. Pass a tensor that begins with a row for each, or one prompt at a "
                "time."
            )


def _holds(value: Any, rows: int) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(part, rows) for part in value.values())
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == rows
    return isinstance(value, (list, tuple)) and (len(value) == rows or any(_holds(part, rows) for part in value))


def _snapshot(value: Any) -> Any:
    """The value as it is now, should it be changed in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(value) if type(value) in (list, dict, set) else value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left is right or bool(left == right)


def modules_by_row(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """The modules that a hook hands a list with an entry for each row, and the list's name: PEFT's `adapter_names`."""
    return [
        (module, name)
        for module in model.modules()
        for hook in hooks_of(module).values()
        for name in LISTS_BY_ROW
        if name in (getattr(hook, "keywords", None) or {})
    ]


@contextmanager
def following_rows(modules: Sequence[tuple[nn.Module, str]], rows: Sequence[int]) -> Iterator[None]:
    """Narrows what such hooks hand on to the rows that are left, during one forward by this thread."""
    owner = threading.get_ident()

    def narrowing(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() != owner or len(kwargs[name]) <= len(rows):
                return None
            return args, kwargs | {name: [kwargs[name][row] for row in rows]}

        return hook

    # Registered later, it runs behind theirs.
    handles = [module.register_forward_pre_hook(narrowing(name), with_kwargs=True) for module, name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
