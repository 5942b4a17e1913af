"""Where a model's attention changes with the length of the text: a draft tree must not cross such a place.

Rotary frequencies that follow the furthest position of a forward, or scales that count its columns, would change for
every node as soon as a tree's last node is there, long before plain decoding gets so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Change:
    """One place.

    Attributes:
        limit: tokens of the longest text before it.
        what: a clause that says what changes.
        is_last: nothing changes any more in texts that are all longer.
        counts_columns: it comes by the number of keys, to which every node of a tree adds one.
    """

    limit: int
    what: str
    is_last: bool = False
    counts_columns: bool = False


def changes(config: PretrainedConfig) -> list[Change]:
    """The places that a model's config tells of."""
    text = config.get_text_config(decoder=True)
    found = []
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type", parameters.get("type")) or "default"
        if "dynamic" in kind:
            found.append(Change(text.max_position_embeddings, "its dynamic rotary frequencies change"))
        elif kind == "longrope":
            found.append(
                Change(_longrope_limit(text, parameters), "its longrope rotary frequencies change", is_last=True)
            )
    if getattr(text, "attn_temperature_tuning", False):  # Llama 4
        found.append(Change(text.floor_scale - 1, "the temperature of its attention changes", counts_columns=True))
    if (kept := getattr(text, "keep_window_size", None)) is not None:  # Doge
        found.append(Change(kept, "the choice of keys that it attends to changes", counts_columns=True))
    return found


def refuse_crossing(model: PreTrainedModel, lengths: Sequence[int], max_length: int, node_budget: int) -> None:
    """Raises ValueError for a call that may cross a change.

    Args:
        model: the target.
        lengths: tokens of each row's prompt.
        max_length: tokens of the longest text; its last one is never read.
        node_budget: nodes of a tree.
    """
    for change in changes(model.config):
        furthest = max_length - 1 + (node_budget if change.counts_columns else 0)
        if change.limit < furthest and not (change.is_last and min(lengths) > change.limit):
            trees = f" and trees of {node_budget} nodes" if change.counts_columns else ""
            raise ValueError(
                f"TALON cannot verify draft trees on {type(model).__name__} across {change.limit} tokens, where "
                f"{change.what} for the whole text: `max_length` is {max_length}{trees}. Lower `max_new_tokens`, "
                "or call `generate` without `custom_generate`."
            )


def are_read_alike(config: PretrainedConfig, shorter: int, longer: int) -> bool:
    """Whether a text of `shorter` tokens has the keys that it has as the beginning of one of `longer` tokens."""
    return not any(shorter <= change.limit < longer for change in changes(config))


def _rope_parameters(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters of a text config, one dict for each kind of layer: called "rope_scaling" before 5.0."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [parameters for parameters in found.values() if isinstance(parameters, dict)]
    return nested or [found]


def _longrope_limit(text: PretrainedConfig, parameters: dict[str, Any]) -> int:
    """The longest text that longrope's short factors serve; before 5.0 the parameters had no say in it."""
    if hasattr(text, "rope_parameters"):
        return parameters["original_max_position_embeddings"]
    return getattr(text, "original_max_position_embeddings", text.max_position_embeddings)
