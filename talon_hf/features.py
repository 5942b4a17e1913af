"""Taps: the inputs of chosen decoder layers, read by forward pre-hooks.

`output_hidden_states` keeps every layer and its indices mean different things in different transformers versions; a
pre-hook reads the three tensors that exist anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .drafter import FeatureSpec


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers, whatever the architecture calls it."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # Some models call their output layer the decoder.
    for root in (model.get_decoder(), model.base_model):
        for module in root.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
    raise ValueError(
        f"{type(model).__name__} keeps its decoder layers where TALON does not find them, so their inputs cannot be "
        "read for an EAGLE-3 head. Call `generate` without `custom_generate`."
    )


@contextmanager
def features_of(model: PreTrainedModel, spec: FeatureSpec) -> Iterator[dict[int, Tensor]]:
    """Collects the inputs of the layers in `spec` during one forward by this thread: boundary -> (B, n, hidden)."""
    taps: dict[int, Tensor] = {}
    owner = threading.get_ident()

    def tap(boundary: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            # Another thread may run the same model meanwhile: its states are not ours, and it may meet this hook
            # before it is marked as taking kwargs.
            if threading.get_ident() == owner:
                states = args[0] if args else (kwargs or {})["hidden_states"]
                if states.dim() != 3:
                    raise ValueError(
                        f"{type(model).__name__} hands {tuple(states.shape)} states from layer to layer; an EAGLE-3 "
                        "head reads (batch, length, hidden). Call `generate` without `custom_generate`."
                    )
                taps[boundary] = states

        return hook

    handles = []
    try:
        for boundary in set(spec.boundaries):
            handles.append(decoder_layers(model)[boundary].register_forward_pre_hook(tap(boundary), with_kwargs=True))
        yield taps
    finally:
        for handle in handles:
            handle.remove()
