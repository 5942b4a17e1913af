"""What TALON refuses, before any token: arguments that name another decoding method, targets that cannot branch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .compat import (
    carries_state,
    configs_keep_unset_fields,
    inverts_tree_masks,
    is_elsewhere,
    makes_own_positions,
    takes_flat_masks_only,
    takes_no_mask_by_layer,
)
from .masks import layer_windows

PLAIN = "Call `generate` without `custom_generate` for it."

# Those of all versions that keep all keys and values on the model's device; a version may know fewer.
CACHE_IMPLEMENTATIONS = (
    None, "dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window", "sliding_window_chunked",
)  # fmt: skip

# Argument -> (values that leave it off, what to do instead).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), f"A draft tree follows one hypothesis a row, beam search several. {PLAIN}"),
    "num_beam_groups": ((None, 1), f"A draft tree follows one hypothesis a row, beam search several. {PLAIN}"),
    "constraints": ((None,), f"Constrained beam search is another decoding method. {PLAIN}"),
    "force_words_ids": ((None,), f"Constrained beam search is another decoding method. {PLAIN}"),
    "penalty_alpha": ((None, 0), f"Contrastive search is another decoding method. {PLAIN}"),
    "dola_layers": ((None,), f"DoLa is another decoding method. {PLAIN}"),
    "prompt_lookup_num_tokens": ((None,), "Leave it out: `assistant_model` drafts here."),
    "assistant_early_exit": ((None,), "Leave it out: `assistant_model` drafts here."),
    "use_mtp": ((None, False), "Leave it out: `assistant_model` drafts here."),
    "speculation_type": ((None,), "Leave it out: `assistant_model` drafts here."),
    "output_attentions": ((None, False), f"Attentions of a tree forward are not those of plain decoding. {PLAIN}"),
    "output_hidden_states": ((None, False), f"Hidden states of drafted nodes would be mixed in. {PLAIN}"),
    "assistant_tokenizer": ((None,), "Leave it out: the drafter must have the model's vocabulary."),
    "token_healing": ((None, False), "Heal the prompt first (`model.heal_tokens`), then call without it."),
    "synced_gpus": ((None, False), f"Rounds of several processes do not keep step. {PLAIN}"),
    "use_cache": ((None, True), "Leave it on: a tree is verified against the cache."),
}


def check_arguments(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument, of the call or of the generation configs, that TALON does not serve."""
    configs = [kwargs.get("generation_config"), model.generation_config]
    for name, (off, remedy) in REFUSED.items():
        in_configs = [getattr(config, name, None) for config in configs]
        if not configs_keep_unset_fields():
            # What is off may have been left out, and `generate` then asks the next config.
            in_configs = [value for value in in_configs if not _is_one_of(value, off)]
        value = next((v for v in [kwargs.get(name), *in_configs] if v is not None), None)
        if not _is_one_of(value, off):
            shown = repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
            raise ValueError(f"TALON does not support `{name}` (got {shown}). {remedy}")


def _is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(value is choice or (isinstance(value, (int, float)) and value == choice) for choice in choices)


def check_cache(cache: Any, implementation: str | None) -> None:
    """Raises ValueError for a cache, given or asked for, that a tree cannot be verified in.

    A given cache of another kind than TALON's own is not filled: the output carries the one to pass on.
    """
    if isinstance(cache, ValueError):
        raise ValueError(*cache.args)  # says why there is no cache: what an unpickled output has in its place
    if implementation not in CACHE_IMPLEMENTATIONS:
        raise ValueError(
            f"TALON does not support `cache_implementation` {implementation!r}: it keeps keys and values in a cache "
            'of its own, on the model\'s device. Leave it out, or take "static" to have that cache allocated at once.'
        )
    if implementation is not None:
        GenerationConfig(cache_implementation=implementation)  # a name that this version does not know raises
    if cache is not None and implementation is not None:
        raise ValueError(
            f"A cache and `cache_implementation` (got {implementation!r}) are passed together, which `generate` does "
            "not support. Use only one of the two."
        )
    if is_elsewhere(cache):
        raise ValueError(
            f"TALON does not support a {type(cache).__name__} that is offloaded or quantised as cache: it keeps "
            "keys and values in a cache of its own, on the model's device. Leave it out."
        )


def check_padding(inputs: Mapping[str, Any]) -> None:
    """Raises ValueError for prompts that are padded on the right, of which plain `generate` warns."""
    mask = inputs.get("attention_mask")
    # A row that is hidden as a whole is not padded on the right, and plain `generate` reads it.
    if mask is not None and mask.dim() == 2 and bool(((mask[:, -1] == 0) & (mask != 0).any(dim=1)).any()):
        raise ValueError(
            "A decoder-only architecture is being used, but right-padding was detected in `attention_mask`! For "
            "correct generation results, please set `padding_side='left'` when initializing the tokenizer."
        )


def check_prompt(model: PreTrainedModel, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises what plain `generate` raises, with a reason, for a prompt or a generation config that it cannot read.

    Which type that is depends on the model and the version, so plain `generate` is asked. Where it can, so can TALON.
    """
    ids = kwargs.get("input_ids") if inputs is None else inputs
    reason = _unreadable_config(kwargs.get("generation_config"))
    if reason is None and ids is not None and kwargs.get("inputs_embeds") is None:
        reason = _unreadable_ids(ids)
    if reason is None:
        return
    try:
        # By its own name, since a model's `generate` may be TALON's.
        GenerationMixin.generate(model, inputs, **{**kwargs, "streamer": None})
    except Exception as error:
        raise type(error)(reason) from error


def _unreadable_config(config: Any) -> str | None:
    if config is None or isinstance(config, GenerationConfig):
        return None
    return f"`generation_config` is a {type(config).__name__}: pass a `GenerationConfig`, or its entries by name."


def _unreadable_ids(ids: Any) -> str | None:
    if not isinstance(ids, Tensor):
        return (
            f"`input_ids` is a {type(ids).__name__}, not a tensor of token ids: pass `torch.tensor([[...]])`, or "
            "unpack what a tokenizer returned with `**`."
        )
    if ids.dim() != 2:
        return (
            f"`input_ids` has the shape {tuple(ids.shape)}: pass token ids of shape (batch, length), one prompt as a "
            "batch of one (`input_ids.unsqueeze(0)`)."
        )
    if ids.dtype not in (torch.int64, torch.int32):
        return f"`input_ids` holds {ids.dtype}, where token ids are torch.int64: pass `input_ids.long()`."
    if ids.numel() == 0:
        return (
            f"`input_ids` has the shape {tuple(ids.shape)}, so there is {'no prompt' if not len(ids) else 'no token'} "
            "to go on from. Leave it out to start from the model's `bos_token_id`."
        )
    return None


def check_processors(processors: Any) -> None:
    """Raises ValueError for a processor that takes more than ids and scores, as plain `generate` does on its way."""
    for processor in processors if isinstance(processors, (list, tuple)) else ():
        taken = list(inspect.signature(processor.__call__).parameters)
        if len(taken) > 2:
            raise ValueError(
                f"The logits processor {type(processor).__name__} takes {taken}, but `generate` hands it `input_ids` "
                "and `scores` alone. Give it what else it needs when it is made."
            )


def refuse_target(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose forward cannot verify a tree."""
    name = type(model).__name__
    if not isinstance(model, GenerationMixin):
        raise ValueError(f"TALON decodes through transformers' `generate`, which {name} does not have.")
    if model.config.is_encoder_decoder:
        raise ValueError(f"TALON drafts for decoder-only models; {name} is an encoder-decoder. {PLAIN}")
    windows = layer_windows(model.config)
    if carries_state(model):
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: its recurrent state follows one sequence and cannot branch. "
            f"{PLAIN}"
        )
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "alibi", False) or hasattr(text, "attention_layers"):
        # ALiBi (Falcon's option) and GPT-Neo's local attention read distances off the key columns.
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: its attention counts columns, not positions, and the nodes "
            f"of a tree lie side by side. {PLAIN}"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: its forward takes no `position_ids`, so nodes of one depth "
            f"could not share a position. {PLAIN}"
        )
    if takes_flat_masks_only(model):
        raise ValueError(
            f"TALON cannot verify a draft tree on {name} in this version of transformers, in which it takes no 4D "
            f"attention mask. Upgrade to transformers 5.17 or newer. {PLAIN}"
        )
    if inverts_tree_masks(model):
        raise ValueError(
            f"TALON cannot verify a draft tree on {name} in this version of transformers, which reads 4D attention "
            f"masks the other way round. Upgrade to transformers 5.17 or newer. {PLAIN}"
        )
    if makes_own_positions(model):
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: its forward numbers positions itself, and the nodes of a "
            f"tree need theirs. {PLAIN}"
        )
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":  # Dory
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: with `recurrent_kv_cache_mode` 'last_loop' what a token "
            f"sees depends on which tokens are read together. {PLAIN}"
        )
    if len(windows) > 1 and takes_no_mask_by_layer(model):
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: its layers see different windows, and it takes one mask for "
            f"all of them. {PLAIN}"
        )
