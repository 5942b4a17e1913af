"""Every difference between transformers versions that this package meets, and every name that a version may drop.

Supported: transformers 4.57 to 5.x. A version newer than the newest of `TESTED` is served like that one: nothing is
refused for its number. What transformers (torch, PEFT) does not document is read here alone, by functions that say
what they answer, and `NAMES` lists it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

TRANSFORMERS = Version(transformers.__version__)
TESTED = ("4.57.6", "5.0.0", "5.17.0", "5.24.0", "5.25.0")

STOPS = "the call stops with an error that names this version and those that were tested"
LOCKSTEP = "the rows of a batch keep step"
# Undocumented name -> (where it is read, what happens without it).
NAMES: dict[str, tuple[str, str]] = {
    "_is_stateful": ("a model's class, to 5.24", "layer types, or a convolution in the decoder, tell of recurrence"),
    "_supports_sdpa": ("a model's class", "eager attention scores the trees that the model's own cannot"),
    "_attn_implementation": ("a model's configs", STOPS),
    "model_type": ("a model's config", STOPS),
    "get_extended_attention_mask": ("a forward's code, before 5.0", "the model is taken to read 4D masks"),
    "prepare_inputs_for_generation": ("a model", "every forward gets the call's arguments as they are"),
    "_update_model_kwargs_for_generation": ("a model", "no argument is taken to change from step to step"),
    "_pad_token_tensor": ("a config that `generate` prepared", "its `pad_token_id`, else an end token, fills rows"),
    "layer_class_to_replicate": ("DynamicCache", STOPS),
    "offloading": ("a given cache", "it is not filled, and the output has a cache of its own"),
    "QuantizedCache": ("the name of a given cache's class", "it is not filled, and the output has a cache of its own"),
    "StopCheck": ("transformers.generation.utils", "a token is streamed before criteria see it, as before 5.17"),
    "GgufConfig": ("transformers", "a GGUF file is read as before 5.24, which knew dense weights alone"),
    "ACT2FN": ("transformers.activations", "a head's activation is torch's function of that name"),
    "CandidateGenerator": ("transformers.generation", "TalonCandidateGenerator serves TALON's own loop alone"),
    "encoder_input_ids": ("EncoderRepetitionPenaltyLogitsProcessor", LOCKSTEP),
    "generated_ngrams": ("EncoderNoRepeatNGramLogitsProcessor", LOCKSTEP),
    "batch_size": ("EncoderNoRepeatNGramLogitsProcessor", LOCKSTEP),
    "unconditional_context": ("UnbatchedClassifierFreeGuidanceLogitsProcessor", LOCKSTEP),
    "prompt_ignore_length": ("RepetitionPenaltyLogitsProcessor", LOCKSTEP),
    "active_peft_config": ("a model of PEFT", STOPS),
    "_orig_mod": ("what `torch.compile` returns", "the model is the one whose `generate` it hands out"),
    "_compiled_call_impl": ("a module of torch", "the model is taken for a compiled one, and runs eagerly"),
    "_forward_pre_hooks": ("a module of torch", "a hook of the user's does not have the model checked"),
    "_forward_hooks": ("a module of torch", "a hook of the user's does not have the model checked"),
    "_hf_hook": ("a module that accelerate moves", "its replaced forward has the model checked"),
    "_torchdynamo_orig_callable": ("a compiled forward", "a forward that was compiled alone runs compiled"),
}


def read(owner: Any, name: str, *otherwise: Any) -> Any:
    """What `owner` has under a name of `NAMES`; `otherwise`, if given, where it has none.

    Raises:
        ValueError: there is no such name, and no answer without it.
    """
    if hasattr(owner, name):
        return getattr(owner, name)
    if otherwise:
        return otherwise[0]
    raise ValueError(
        f"TALON reads `{name}` of {NAMES[name][0]}, which is not there with transformers {TRANSFORMERS}. It was "
        f"tested with transformers {', '.join(TESTED)}: install one of them, or call `generate` without "
        "`custom_generate`."
    )


CandidateGenerator: Any = read(transformers.generation, "CandidateGenerator", object)


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

    Since 5.25 no class says so, and not every class did before (RecurrentGemma's of 4.57). Configs' layer types do;
    where there are none, a convolution along the text inside the decoder's layers tells.
    """
    if read(model, "_is_stateful", False):
        return True
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    stacks = [m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    return any(isinstance(m, nn.Conv1d) and m.kernel_size != (1,) for stack in stacks for m in stack.modules())


def inverts_tree_masks(model: PreTrainedModel) -> bool:
    """Whether the model turns a 4D mask round instead of taking it as it is: XGLM did, some time before 5.17."""
    return _is_kind(model, "xglm") and Version("5.17") > TRANSFORMERS


def takes_flat_masks_only(model: PreTrainedModel) -> bool:
    """Whether the model takes no 4D mask: CTRL some time before 5.17, BERT and its kin before 5.0."""
    if _is_kind(model, "ctrl"):
        return Version("5.17") > TRANSFORMERS
    forward = inspect.unwrap(type(model.base_model).forward)
    return Version("5.0") > TRANSFORMERS and "get_extended_attention_mask" in forward.__code__.co_names


def eager_masks_by_column(model: PreTrainedModel) -> bool:
    """Whether eager attention adds a causal mask over as many columns as there are positions, too few for a tree."""
    return _is_kind(model, "gpt2") and Version("5.17") > TRANSFORMERS


def makes_own_positions(model: PreTrainedModel) -> bool:
    """Whether the model's forward counts positions from another start than `generate` does, and is told none by it."""
    return _is_kind(model, "kosmos-2.5", "xlm")


def takes_no_mask_by_layer(model: PreTrainedModel) -> bool:
    """Whether the model makes a mask for each layer type itself, and cannot be given them: PaliGemma 2."""
    return _is_kind(model, "paligemma")


def _is_kind(model: PreTrainedModel, *kinds: str) -> bool:
    return read(model.config, "model_type") in kinds


def attention_of(config: PretrainedConfig) -> str:
    """The attention implementation that a config is set to."""
    return read(config, "_attn_implementation")


def set_attention(config: PretrainedConfig, implementation: str) -> None:
    """Sets it for the next forward and nothing else: the public setter would load kernels and check anew."""
    config._attn_implementation = implementation


def runs_sdpa(model: PreTrainedModel) -> bool:
    """Whether the model can run torch's own attention in the place of the one that it is set to."""
    return bool(read(model, "_supports_sdpa", False))


def pad_token(generation_config: GenerationConfig) -> int:
    """What fills the rows that finish early, of a config that `generate` has prepared."""
    named, ends = generation_config.pad_token_id, generation_config.eos_token_id
    pad = read(generation_config, "_pad_token_tensor", ends if named is None else named)
    return 0 if pad is None else int(torch.as_tensor(pad).flatten()[0])


def is_elsewhere(cache: Any) -> bool:
    """Whether a given cache keeps its keys and values off the model's device, or in fewer bits."""
    return bool(read(cache, "offloading", False)) or "Quantized" in type(cache).__name__


def make_layers_with(cache: DynamicCache, factory: Callable[[], Any]) -> None:
    """Has a cache make its layers, as a model first updates them, with `factory`."""
    read(cache, "layer_class_to_replicate")
    cache.layer_class_to_replicate = factory  # type: ignore[assignment]  # only called


def activation(name: str) -> Any:
    """The activation function of that name in a config; KeyError or AttributeError if there is none."""
    known = read(transformers.activations, "ACT2FN", None)
    return getattr(nn.functional, name) if known is None else known[name]


def prompt_learning(model: Any) -> Any:
    """The method by which a model of PEFT puts virtual tokens in front of the prompt; None if it does not."""
    config = read(model, "active_peft_config")
    return config.peft_type if config.is_prompt_learning else None


def uncompiled(model: Any) -> Any:
    """The model inside what `torch.compile` returns, or the model itself."""
    return read(model, "_orig_mod", getattr(getattr(model, "generate", None), "__self__", model))


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `torch.compile` has been applied to the model or a part of it."""
    return any(
        read(module, "_compiled_call_impl", True) is not None or is_compiled_forward(module.forward)
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
            ids = read(processor, "encoder_input_ids")
            source = row * len(ids) // rows
            narrowed.encoder_input_ids = ids[source : source + 1]
        elif type(processor) in known_classes("EncoderNoRepeatNGramLogitsProcessor"):
            source = row * read(processor, "batch_size") // rows
            narrowed.generated_ngrams, narrowed.batch_size = [read(processor, "generated_ngrams")[source]], 1
        elif type(processor) in known_classes("UnbatchedClassifierFreeGuidanceLogitsProcessor"):
            narrowed.unconditional_context = {
                key: value[row * len(value) // rows][None] if isinstance(value, torch.Tensor) else value
                for key, value in read(processor, "unconditional_context").items()
            }
        elif type(processor) in known_classes("RepetitionPenaltyLogitsProcessor"):
            ignored = read(processor, "prompt_ignore_length")
            if isinstance(ignored, torch.Tensor):  # since 5.24: how much of each row is padding
                narrowed.prompt_ignore_length = ignored[row : row + 1]
        else:
            return processor
    except ValueError:
        return None
    return narrowed


def streams_before_stopping() -> bool:
    """Whether plain `generate` puts a token to the streamer before it asks the stopping criteria about it."""
    return read(transformers.generation.utils, "StopCheck", None) is None


def dense_gguf(file_name: str) -> dict[str, Any]:
    """`from_pretrained` arguments that load a GGUF file as plain dense weights (newer versions keep them packed)."""
    config = read(transformers, "GgufConfig", None)
    return {"gguf_file": file_name} | ({"quantization_config": config(dequantize=True)} if config else {})


def cache_output_field() -> str:
    """The name under which `generate` outputs carry the cache."""
    return "cache" if Version("5.24") <= TRANSFORMERS else "past_key_values"


def prepared_inputs(
    model: PreTrainedModel, ids: torch.Tensor, given: dict[str, Any], cache: Any, past: int, columns: int, first: bool
) -> dict[str, Any]:
    """What the model's own `prepare_inputs_for_generation` makes of a call, as plain `generate` asks it.

    Args:
        ids: (B, L) int64, the text so far.
        given: the other arguments, without a cache.
        cache: holds the first `past` of the text's `columns`, which are not L if it begins with embeddings.
        first: whether this is the call's first forward.
    """
    prepare = read(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return {"input_ids": ids[:, past - columns :], **given}
    asks = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    asked: dict[str, Any] = {"cache" if "cache" in asks else "past_key_values": cache}
    if "cache_position" in asks:
        asked["cache_position"] = torch.arange(past, columns, device=ids.device)
    if "next_sequence_length" in asks:
        asked["next_sequence_length"] = columns - past
    if "is_first_iteration" in asks and first:
        asked["is_first_iteration"] = True
    return dict(prepare(ids, **asked, **given))


def chunks_ignore_padding() -> bool:
    """Whether plain `generate` numbers the positions of a prompt read in chunks by column: before 5.0."""
    return Version("5.0") > TRANSFORMERS


def own_preparation(model: PreTrainedModel) -> bool:
    """Whether transformers' own code prepares the inputs of this model's forwards."""
    return _is_theirs(read(model, "prepare_inputs_for_generation", None))


def updated_inputs(model: PreTrainedModel, outputs: Any, given: dict[str, Any], columns: int) -> dict[str, Any]:
    """What an override of `_update_model_kwargs_for_generation` makes of the arguments `given` behind a forward.

    Nothing where the method is transformers' own, which changes only what a tree brings itself. `columns` are those of
    the text so far.
    """
    update = read(model, "_update_model_kwargs_for_generation", None)
    if _is_theirs(update):
        return {}
    if "cache_position" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
        given["cache_position"] = torch.arange(columns)
    return dict(update(outputs, given))


def _is_theirs(function: Any) -> bool:
    return function is None or str(getattr(function, "__module__", "")).startswith("transformers.")


def hooks_of(module: nn.Module) -> dict[int, Any]:
    """The hooks around a module's forward, by numbers that torch gives once and never again."""
    return {**read(module, "_forward_pre_hooks", {}), **read(module, "_forward_hooks", {})}


def is_moved_by_accelerate(module: nn.Module) -> bool:
    """Whether accelerate has put its own forward, which moves weights and inputs, around a module's."""
    return read(module, "_hf_hook", None) is not None


def is_compiled_forward(forward: Any) -> bool:
    """Whether a forward is what `torch.compile` made of another."""
    return read(forward, "_torchdynamo_orig_callable", None) is not None
