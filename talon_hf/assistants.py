"""What `assistant_model` may be: a drafter, or where a head lies: loaded once, and anew when its files change."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedModel

from .checkpoints import DTYPES
from .drafter import Drafter
from .eagle import EagleDraft
from .head_files import HeadFiles

KEPT = 4
_heads: dict[Hashable, tuple[Hashable, EagleDraft]] = {}  # the one used last stands last
_lock = Lock()


def drafter_of(assistant: Any, model: PreTrainedModel, hub: Mapping[str, Any]) -> Drafter:
    """The drafter that a call's `assistant_model` means.

    Args:
        assistant: a drafter, or the folder or Hub id of an EAGLE-3 head.
        model: the target; a head that is loaded gets its dtype and device.
        hub: arguments of the call; `token`, `cache_dir` and `local_files_only` reach the head.

    Raises:
        OSError, ValueError: nothing to load there, or no drafter; the message says which.
    """
    if assistant is None:
        raise ValueError(
            "`assistant_model` is missing: TALON needs a drafter, e.g. "
            "`assistant_model=EagleDraft.from_pretrained(...)` or the folder or Hub id of an EAGLE-3 head."
        )
    if isinstance(assistant, (str, os.PathLike)):
        access = {name: hub[name] for name in ("token", "cache_dir", "local_files_only") if hub[name] is not None}
        # Offloaded weights lie on "meta" between forwards; the head goes where the others are.
        devices = [parameter.device for parameter in model.parameters() if parameter.device.type != "meta"]
        # A model in float8 computes in another dtype, which its weights do not tell: the head keeps its file's.
        dtype = model.dtype if model.dtype in DTYPES else None
        return _loaded(assistant, dtype, devices[0] if devices else torch.device("cpu"), access)
    if isinstance(assistant, type) or not isinstance(assistant, Drafter):
        name = f"the class {assistant.__name__}" if isinstance(assistant, type) else f"a {type(assistant).__name__}"
        raise ValueError(
            f"`assistant_model` is {name}, which is no drafter: pass an `EagleDraft`, or the "
            "folder or Hub id of an EAGLE-3 head."
        )
    return assistant


def _loaded(
    source: str | os.PathLike[str], dtype: torch.dtype | None, device: torch.device, access: dict[str, Any]
) -> EagleDraft:
    """The head at `source`, from memory if its folder is unchanged; of a Hub id nothing is asked again."""
    files = HeadFiles(source)
    # A relative folder is another one in another working directory, and one of a Hub id's name goes before it.
    place = os.path.realpath(files.source) if files.is_folder else files.source
    key = (files.is_folder, place, dtype, device, tuple(access.items()))
    with _lock:
        stamp = files.stamp()  # before the files are read: a change during that is seen by the next call
        known = _heads.pop(key, None)
        if known is None or known[0] != stamp:
            known = stamp, EagleDraft.from_pretrained(source, dtype=dtype, device=device, **access)
        _heads[key] = known
        while len(_heads) > KEPT:
            del _heads[next(iter(_heads))]
        return known[1]
