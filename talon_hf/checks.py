"""What TALON refuses, before any token: arguments that name another decoding method, targets that cannot branch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from .masks import layer_windows

PLAIN = "Call `generate` without `custom_generate` for it."

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
    "negative_prompt_ids": ((None,), f"Classifier-free guidance runs a second prompt beside the tree. {PLAIN}"),
    "negative_prompt_attention_mask": ((None,), f"Classifier-free guidance runs a second prompt. {PLAIN}"),
    "guidance_scale": ((None, 1), f"Classifier-free guidance runs a second prompt beside the tree. {PLAIN}"),
    "output_attentions": ((None, False), f"Attentions of a tree forward are not those of plain decoding. {PLAIN}"),
    "output_hidden_states": ((None, False), f"Hidden states of drafted nodes would be mixed in. {PLAIN}"),
    "assistant_tokenizer": ((None,), "Leave it out: the drafter must have the model's vocabulary."),
    "token_healing": ((None, False), "Heal the prompt first (`model.heal_tokens`), then call without it."),
    "synced_gpus": ((None, False), f"Rounds of several processes do not keep step. {PLAIN}"),
    "inputs_embeds": ((None,), "Pass `input_ids`: the drafter embeds the tokens itself."),
    "use_cache": ((None, True), "Leave it on: a tree is verified against the cache."),
    "past_key_values": ((None,), "Leave it out and pass the whole prompt: the drafter needs features of all of it."),
    "cache": ((None,), "Leave it out and pass the whole prompt: the drafter needs features of all of it."),
}


def check_arguments(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument, of the call or of the generation configs, that TALON does not serve."""
    configs = [kwargs.get("generation_config"), model.generation_config]
    for name, (off, remedy) in REFUSED.items():
        given = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        value = next((v for v in given if v is not None), None)
        if not any(value is choice or (isinstance(value, (int, float)) and value == choice) for choice in off):
            shown = repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
            raise ValueError(f"TALON does not support `{name}` (got {shown}). {remedy}")


def check_target(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose forward cannot verify a tree."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"TALON drafts for decoder-only models; {name} is an encoder-decoder. {PLAIN}")
    if model._is_stateful:
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: its recurrent state follows one sequence and cannot branch. "
            f"{PLAIN}"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"TALON cannot verify a draft tree on {name}: its forward takes no `position_ids`, so nodes of one depth "
            f"could not share a position. {PLAIN}"
        )
    layer_windows(model.config)
