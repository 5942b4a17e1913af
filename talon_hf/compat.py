"""Every difference between transformers versions that this package meets, and nothing else.

Supported: transformers 4.57 to 5.x.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedModel

TRANSFORMERS = Version(transformers.__version__)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name of `forward`'s cache argument: "cache" since 5.24, before that "past_key_values"."""
    parameters = inspect.signature(model.forward).parameters
    if "past_key_values" in parameters:
        return "past_key_values"
    if "cache" in parameters:
        return "cache"
    return "cache" if Version("5.24") <= TRANSFORMERS else "past_key_values"


def dense_gguf(file_name: str) -> dict[str, Any]:
    """`from_pretrained` arguments that load a GGUF file as plain dense weights (newer versions keep them packed)."""
    config = getattr(transformers, "GgufConfig", None)
    return {"gguf_file": file_name} | ({"quantization_config": config(dequantize=True)} if config else {})


def cache_output_field() -> str:
    """The name under which `generate` outputs carry the cache."""
    return "cache" if Version("5.24") <= TRANSFORMERS else "past_key_values"
