"""The demo pair, by the name that users import; it lives in `tools/pair.py`, since it does not ship to the Hub."""

from .tools.pair import DRAFT, GGUF_READERS, INSTALL, TARGET, WHEEL, find_gguf, load_draft, load_target

__all__ = ["DRAFT", "GGUF_READERS", "INSTALL", "TARGET", "WHEEL", "find_gguf", "load_draft", "load_target"]
