"""Calls of plain `generate` and of ours, with the same defaults, for the tests that compare them."""

from __future__ import annotations

from typing import Any

import torch
from models import VOCABULARY, drafter_zoo
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from talon_hf import generate

PROMPT = torch.tensor([[7, 11, 3, 42, 5, 9, 23]])
BATCH = torch.tensor([[0, 0, 7, 11, 3, 42], [9, 23, 5, 17, 31, 8], [0, 0, 0, 0, 19, 4]])
BATCH_MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
NEW = 20
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwx"


def plain(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    """Plain `generate`, greedy unless told otherwise."""
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "do_sample": False, **options})


def talon(model: PreTrainedModel, ids: Tensor, name: str, continuations: Any = None, **options: Any) -> Any:
    """Ours, with a drafter of the zoo that knows the right `continuations`, by default plain `generate`'s."""
    mask = options.get("attention_mask", torch.ones_like(ids))
    if continuations is None:
        lengths = {key: value for key, value in options.items() if key in ("max_new_tokens", "max_length")}
        continuations = plain(model, ids, attention_mask=mask, **lengths)
    texts = [row[int((keep == 0).sum()) :].tolist() for row, keep in zip(continuations, mask, strict=True)]
    drafter = drafter_zoo(texts, model)[name]
    return generate(
        ids, model=model, assistant_model=drafter, **{"attention_mask": mask, "do_sample": False, **options}
    )


def sequences(output: Any) -> list[list[int]]:
    """The ids of an output, a tensor or a dict."""
    return (output if isinstance(output, Tensor) else output.sequences).tolist()


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
