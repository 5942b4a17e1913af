"""Every difference between transformers versions that this package meets, and nothing else.

Supported: transformers 4.57 to 5.x.
"""

from __future__ import annotations

import copy
import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

TRANSFORMERS = Version(transformers.__version__)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name of `forward`'s cache argument: "cache" since 5.24, before that "past_key_values"."""
    parameters = inspect.signature(model.forward).parameters
    if "past_key_values" in parameters:
        return "past_key_values"
    if "cache" in parameters:
        return "cache"
    return "cache" if Version("5.24") <= TRANSFORMERS else "past_key_values"


def carries_state(model: PreTrainedModel) -> bool:
    """Whether a layer hands a state from token to token, beside keys and values.

    Since 5.25 no class says so, and their configs' layer types do; where there are none, a convolution along the text
    inside the decoder tells.
    """
    said = getattr(model, "_is_stateful", None)
    if said is not None:
        return bool(said)
    return any(isinstance(m, nn.Conv1d) and m.kernel_size != (1,) for m in model.get_decoder().modules())


def inverts_tree_masks(model: PreTrainedModel) -> bool:
    """Whether the model turns a 4D mask round instead of taking it as it is: XGLM did, some time before 5.17."""
    code = sys.modules[type(model).__module__]
    return model.config.model_type == "xglm" and hasattr(code, "_prepare_4d_causal_attention_mask")


def takes_flat_masks_only(model: PreTrainedModel) -> bool:
    """Whether the model takes no 4D mask: CTRL some time before 5.17, BERT and its kin before 5.0."""
    if model.config.model_type == "ctrl":
        return Version("5.17") > TRANSFORMERS
    forward = inspect.unwrap(type(model.base_model).forward)
    return Version("5.0") > TRANSFORMERS and "get_extended_attention_mask" in forward.__code__.co_names


def eager_masks_by_column(model: PreTrainedModel) -> bool:
    """Whether eager attention adds a causal mask over as many columns as there are positions, too few for a tree."""
    return model.config.model_type == "gpt2" and Version("5.17") > TRANSFORMERS


def rope_parameters(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters of a text config, one dict for each kind of layer: called "rope_scaling" before 5.0."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [parameters for parameters in found.values() if isinstance(parameters, dict)]
    return nested or [found]


def longrope_limit(text: PretrainedConfig, parameters: dict[str, Any]) -> int:
    """The longest text that longrope's short factors serve; before 5.0 the parameters had no say in it."""
    if hasattr(text, "rope_parameters"):
        return parameters["original_max_position_embeddings"]
    return getattr(text, "original_max_position_embeddings", text.max_position_embeddings)


def makes_own_positions(model: PreTrainedModel) -> bool:
    """Whether the model's forward counts positions from another start than `generate` does, and is told none by it."""
    return model.config.model_type in ("kosmos-2.5", "xlm")


def takes_no_mask_by_layer(model: PreTrainedModel) -> bool:
    """Whether the model makes a mask for each layer type itself, and cannot be given them: PaliGemma 2."""
    return model.config.model_type == "paligemma"


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `torch.compile` has been applied to the model or a part of it."""
    return any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def run_eagerly(compiled: bool) -> AbstractContextManager[None]:
    """Runs compiled code as it was written: a compiled graph knows no hooks, and shapes change every round."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def configs_keep_unset_fields() -> bool:
    """Whether a generation config tells what was left out (None) from what was set to its default: since 5.0."""
    return Version("5.0") <= TRANSFORMERS


def known_classes(*names: str) -> frozenset[type]:
    """Those classes of transformers' generation that this version has, by their names in other versions."""
    found = (getattr(transformers.generation, name, None) for name in names)
    return frozenset(cls for cls in found if cls is not None)


def processor_for_row(processor: Any, row: int, rows: int) -> Any:
    """A logits processor of transformers that serves one row of a batch as if that row were alone.

    Most treat every row alike and serve as they are. Those that hold something for each row of the prompt are narrowed
    to the row, in a shallow copy. None where this version keeps it in another place than those that were tested.
    """
    narrowed = copy.copy(processor)
    try:
        if type(processor) in known_classes("EncoderRepetitionPenaltyLogitsProcessor"):
            source = row * len(processor.encoder_input_ids) // rows
            narrowed.encoder_input_ids = processor.encoder_input_ids[source : source + 1]
        elif type(processor) in known_classes("EncoderNoRepeatNGramLogitsProcessor"):
            source = row * processor.batch_size // rows
            narrowed.generated_ngrams, narrowed.batch_size = [processor.generated_ngrams[source]], 1
        elif type(processor) in known_classes("UnbatchedClassifierFreeGuidanceLogitsProcessor"):
            narrowed.unconditional_context = {
                key: value[row * len(value) // rows][None] if isinstance(value, torch.Tensor) else value
                for key, value in processor.unconditional_context.items()
            }
        elif isinstance(padding := getattr(processor, "prompt_ignore_length", None), torch.Tensor):
            # RepetitionPenaltyLogitsProcessor of 5.24: how much of each row is padding.
            narrowed.prompt_ignore_length = padding[row : row + 1]
        else:
            return processor
    except AttributeError:
        return None
    return narrowed


def streams_before_stopping() -> bool:
    """Whether plain `generate` puts a token to the streamer before it asks the stopping criteria about it."""
    return not hasattr(transformers.generation.utils, "StopCheck")


def dense_gguf(file_name: str) -> dict[str, Any]:
    """`from_pretrained` arguments that load a GGUF file as plain dense weights (newer versions keep them packed)."""
    config = getattr(transformers, "GgufConfig", None)
    return {"gguf_file": file_name} | ({"quantization_config": config(dequantize=True)} if config else {})


def without_kernels() -> dict[str, Any]:
    """`from_pretrained` arguments that load a model's own code: 5.25 asks for the package `kernels` otherwise."""
    return {"use_kernels": False}


def cache_output_field() -> str:
    """The name under which `generate` outputs carry the cache."""
    return "cache" if Version("5.24") <= TRANSFORMERS else "past_key_values"
