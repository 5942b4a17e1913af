"""Calls of plain `generate` and of ours, with the same defaults and seed, for the tests that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from models import VOCABULARY, seed_cpu, zoo_drafter
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from talon_hf import decoding, generate

PROMPT = torch.tensor([[7, 11, 3, 42, 5, 9, 23]])
BATCH = torch.tensor([[0, 0, 7, 11, 3, 42], [9, 23, 5, 17, 31, 8], [0, 0, 0, 0, 19, 4]])
BATCH_MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
NEW = 16
SEED = 5
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwx"


def plain(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    """Plain `generate`, greedy unless told otherwise."""
    seed_cpu(SEED)
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "do_sample": False, **options})


def talon(model: PreTrainedModel, ids: Tensor, drafter: Any, continuations: Any = None, **options: Any) -> Any:
    """Ours, with a drafter or with the one of that name in the zoo; greedy unless told otherwise.

    A drafter of the zoo knows the right `continuations`, by default plain `generate`'s.
    """
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    if isinstance(drafter, str):
        mask = options["attention_mask"]
        if continuations is None:
            lengths = {key: value for key, value in options.items() if key in ("max_new_tokens", "max_length")}
            continuations = plain(model, ids, attention_mask=mask, **lengths)
        texts = [row[int((keep == 0).sum()) :].tolist() for row, keep in zip(continuations, mask, strict=True)]
        drafter = zoo_drafter(drafter, texts, model)
    # Last, since the heads of the zoo are drawn from seeds of their own.
    seed_cpu(SEED)
    return generate(ids, model=model, assistant_model=drafter, **options)


def sequences(output: Any) -> list[list[int]]:
    """The ids of an output, a tensor or a dict."""
    return (output if isinstance(output, Tensor) else output.sequences).tolist()


def padded(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Prompts as a left-padded batch, and its attention mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def shapes_of_forwards(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that every forward of the model from now on adds its (rows, tokens) to, if it is part of the text."""
    shapes: list[tuple[int, int]] = []
    forward = model.forward

    # Wrapped, since `generate` reads the signature of a model's forward.
    @wraps(forward)
    def spy(*args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    monkeypatch.setattr(decoding, "probe", lambda *_: None)
    return shapes


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Every id is a letter, from A = 0 to x = 49."""
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS[:VOCABULARY])}, unk_token="A"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="B", eos_token="C", pad_token="A")


class Recorder(BaseStreamer):
    """Keeps what a streamer is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.puts.append((value.shape, value.tolist()))

    def end(self) -> None:
        self.ends += 1


class Seen(StoppingCriteria):
    """Keeps the ids that a stopping criterion is asked about; stops at a length."""

    def __init__(self, stop_at: int = 1 << 30) -> None:
        self.stop_at = stop_at
        self.ids: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.ids.append(input_ids.tolist())
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.stop_at)
