"""The entry: what `model.generate(..., custom_generate=...)` calls, and `talon_hf.generate`.

Everything that `generate` promises is prepared by `generate` itself: this function takes out what is TALON's, checks
it, binds the loop and hands the rest to `GenerationMixin.generate`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from .assistants import drafter_of
from .checks import check_arguments, check_cache, check_padding, check_processors, check_prompt, refuse_target
from .compat import prompt_learning, uncompiled
from .config import PREFIX, TalonConfig
from .decoding import talon_decode
from .output import TalonOutput
from .settings import take_settings

# From a local folder, transformers before 5.17 copies only the modules that this file itself imports.
# isort: off
from .acceptance import walk  # noqa: F401
from .cache import TreeCache  # noqa: F401
from .candidates import TalonCandidateGenerator  # noqa: F401
from .checkpoints import read_checkpoint  # noqa: F401
from .drafter import Drafter  # noqa: F401
from .eagle import EagleDraft  # noqa: F401
from .eagle_layer import DraftLayer  # noqa: F401
from .features import features_of  # noqa: F401
from .head_config import read_config  # noqa: F401
from .head_files import HeadFiles  # noqa: F401
from .inputs import first_inputs  # noqa: F401
from .masks import tree_masks  # noqa: F401
from .pace import must_keep_step  # noqa: F401
from .policies import TreePolicy  # noqa: F401
from .positions import refuse_crossing  # noqa: F401
from .probe import check_target  # noqa: F401
from .prompt import Prompt  # noqa: F401
from .sampling import Picker  # noqa: F401
from .stats import TalonStats  # noqa: F401
from .target import Target  # noqa: F401
from .transcript import Transcript  # noqa: F401
from .tree import DraftTree  # noqa: F401
from .turns import Turn  # noqa: F401
# isort: on

# What a call is told that reached this function in another way.
FORMS = (
    "`talon_hf.generate` takes the prompt and, by name, `model`. As a callable (`custom_generate=talon_hf.generate`) "
    "it cannot serve: `generate` keeps `assistant_model` and the `talon_` options from a callable. Call "
    '`model.generate(..., custom_generate="org/talon", trust_remote_code=True)` with a Hub id or a folder, or '
    "`talon_hf.generate(input_ids, model=model, assistant_model=...)`."
)

HUB_ARGUMENTS = (
    "revision", "code_revision", "token", "cache_dir", "force_download", "local_files_only", "proxies", "repo_type",
    "subfolder", "trust_remote_code", "custom_generate",
)  # fmt: skip


@torch.no_grad()
def generate(
    inputs: Tensor | None = None, *misplaced: Any, model: PreTrainedModel | None = None, **kwargs: Any
) -> TalonOutput | Tensor:
    """Generates with TALON draft trees: the text of plain `generate`, in fewer forwards of the model.

    Args:
        inputs: (B, L) int64 prompt, as `generate` takes it; `input_ids=` works too.
        misplaced: nothing; what `custom_generate=talon_hf.generate` would put here is refused in words.
        model: the target.
        kwargs: everything that `model.generate` takes, and
            assistant_model: an EAGLE-3 head (`EagleDraft`), or where to load one from: a folder (a string or a `Path`;
                loaded anew when its files have changed), a Hub id, or "org/name/folder".
            talon_policy, talon_node_budget, talon_mu, ...: the fields of `TalonConfig`; an argument here wins over
                the attribute of that name on `generation_config`, which wins over the default.
            streamer: is ended whatever ends the call, so that nobody waits for its next piece after an error.

    Returns:
        (B, L + new) int64, or a `TalonOutput` under `return_dict_in_generate=True`.

    Raises:
        ValueError: an argument, a model or a drafter that TALON cannot serve; nothing has been generated then.
        Exception: of plain `generate`'s type, with a reason, for a prompt or a config that it cannot read either.
    """
    with _Stream(kwargs.get("streamer")) as stream:
        if misplaced or model is None:
            raise ValueError(FORMS)
        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = stream
        return _generate(inputs, model, kwargs)


class _Stream:
    """The user's streamer, which an error ends: whoever reads it would wait for ever."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_ended = streamer is None

    def put(self, value: Tensor) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        if not self._has_ended:
            # Before the call, since an end that fails is not tried again.
            self._has_ended = True
            self._streamer.end()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            with suppress(Exception):  # the error that ended the call is the one to tell
                self.end()


def _generate(inputs: Tensor | None, model: PreTrainedModel, kwargs: dict[str, Any]) -> TalonOutput | Tensor:
    model = _unwrapped(model)
    refuse_target(model)
    hub = {name: kwargs.pop(name, None) for name in HUB_ARGUMENTS}
    options = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(PREFIX)}
    tokenizer = kwargs.pop("tokenizer", None)
    assistant = kwargs.pop("assistant_model", None)
    prepared, kwargs, taken = take_settings(model, kwargs, ("stop_strings", "cache_implementation"))
    check_arguments(model, kwargs)
    check_prompt(model, inputs, kwargs)
    check_processors(kwargs.get("logits_processor"))
    # An empty cache is false, so it is compared with None.
    given = [kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None]
    check_cache(given[0] if given else None, taken["cache_implementation"])
    check_padding(kwargs)
    TalonConfig.resolve(
        options, vars(kwargs.get("generation_config") or model.generation_config), vars(model.generation_config)
    )
    drafter = drafter_of(assistant, model, hub)
    drafter.features_of(model)
    if taken["stop_strings"] is not None:
        kwargs["stopping_criteria"] = _with_stop_strings(kwargs, taken["stop_strings"], tokenizer)
    loop = partial(
        talon_decode,
        drafter=drafter,
        options=options,
        streamer=kwargs.get("streamer"),
        preallocate=taken["cache_implementation"] == "static",
    )
    return GenerationMixin.generate(prepared, inputs, custom_generate=_on(model, loop), **kwargs)


def _unwrapped(model: Any) -> PreTrainedModel:
    """The model that decodes: what `torch.compile` returns and PEFT's wrappers hold it inside."""
    model = uncompiled(model)
    if not hasattr(model, "get_base_model"):
        return model
    if (method := prompt_learning(model)) is not None:
        raise ValueError(
            f"TALON does not support the PEFT method {method}: its virtual tokens stand "
            "in front of the prompt, where the drafter sees nothing. Use a method that changes weights, such as LoRA."
        )
    return model.get_base_model()


def _on(model: PreTrainedModel, loop: Any) -> Any:
    """`loop` bound to the user's model: what prepared the call may be a copy of it."""

    def decode(
        prepared: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> TalonOutput | Tensor:
        return loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

    return decode


def _with_stop_strings(kwargs: dict[str, Any], strings: Any, tokenizer: Any) -> StoppingCriteriaList:
    """The call's stopping criteria with one for `stop_strings`: `generate` keeps the tokenizer from a callable."""
    if tokenizer is None:
        raise ValueError(
            f"`stop_strings` is {strings!r}, but `generate` could not locate a tokenizer: pass the model's as "
            "`tokenizer=`."
        )
    given = list(kwargs.get("stopping_criteria") or [])
    if any(isinstance(criterion, StopStringCriteria) for criterion in given):
        return StoppingCriteriaList(given)  # one of the caller's own wins, as it does with `generate`
    return StoppingCriteriaList([*given, StopStringCriteria(tokenizer, strings)])
