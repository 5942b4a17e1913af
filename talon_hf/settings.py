"""Settings that the loop serves itself, taken out of a call before `generate` prepares it.

`generate` would build a stop-string criterion without the tokenizer (which it keeps from callables) and a cache that
no tree fits. A setting may come from an argument, from the call's `GenerationConfig` or from the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel


def take_settings(
    model: PreTrainedModel, kwargs: dict[str, Any], names: Sequence[str]
) -> tuple[PreTrainedModel, dict[str, Any], dict[str, Any]]:
    """Takes the settings `names` out of a call.

    Returns:
        a model to prepare the call with; the arguments without the settings; the settings, None where none was given.
        Where the model's own generation config holds one, that model is a shallow copy with another config, so the
        user's is never changed.
    """
    own, given = model.generation_config, kwargs.get("generation_config")
    configs = [config for config in (given, own) if config is not None]
    taken = {name: kwargs[name] if name in kwargs else _first_set(configs, name) for name in names}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    if given is not None:
        rest["generation_config"] = _without(given, names)
    if any(getattr(own, name, None) is not None for name in names):
        model = copy.copy(model)
        model.generation_config = _without(own, names)
    return model, rest, taken


def _first_set(configs: Sequence[GenerationConfig], name: str) -> Any:
    return next((v for v in (getattr(config, name, None) for config in configs) if v is not None), None)


def _without(config: GenerationConfig, names: Sequence[str]) -> GenerationConfig:
    if all(getattr(config, name, None) is None for name in names):
        return config
    config = copy.deepcopy(config)
    for name in names:
        setattr(config, name, None)
    return config
