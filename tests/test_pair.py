"""The real pair: greedy text equals plain `generate` token for token in float32, whatever grows the trees."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from test_cli import FIGURES, RATIO
from transformers import BatchEncoding, PreTrainedModel

from talon_hf import EagleDraft, generate
from talon_hf.pair import INSTALL, find_gguf, load_draft, load_target
from talon_hf.tools import cli

pytestmark = pytest.mark.skipif(find_gguf() is None, reason=f"needs the real target: {INSTALL}")

PROMPTS = (
    "Name three rivers in Africa.",
    "What is 17 times 6? Show your steps.",
    "Write a Python function that reverses a string.",
    "Translate 'good morning' into French and Spanish.",
    "Give me a recipe for pancakes.",
    "Why do leaves turn red in autumn?",
    "Write a limerick about a lazy cat.",
    "List the planets from the Sun outwards.",
    "Explain recursion to a ten-year-old.",
    "Fix the grammar: 'She don't likes apples'.",
    "What would you pack for a week in the mountains?",
    "Summarize in one sentence: The bakery opens at six, sells out of rye bread by eight, and closes at noon.",
    "Write a SQL query that counts orders per customer.",
    "Is a tomato a fruit? Answer yes or no, then say why.",
    "Draft a short email asking for a day off.",
    "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies?",
    "Convert 98.6 degrees Fahrenheit to Celsius.",
    "Invent a name and a slogan for a bicycle shop.",
    "What does the HTTP status code 404 mean?",
    "Continue the sequence: 2, 4, 8, 16,",
)
Pair = tuple[PreTrainedModel, Any, EagleDraft]


@cache
def target() -> tuple[PreTrainedModel, Any]:
    """In float32, where rounding leaves no ties to speak of. Its file takes longer to read than the texts to make."""
    return load_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def real_pair() -> Pair:
    return *target(), load_draft(dtype=torch.float32)


# The first test here, so that the command is the one that reads the file, which takes half a minute.
@pytest.mark.slow
@pytest.mark.real_pair
def test_the_command_answers_and_plain_generate_agrees(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(source: None, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
        assert (source, dtype) == (None, torch.float32)
        return target()

    monkeypatch.setattr(cli, "load_target", load)
    argv = ["generate", "Why is the sky blue?", "--max-new-tokens", "8", "--dtype", "float32", "--compare"]
    assert cli.main(argv) == 0
    out, err = capfd.readouterr()
    answer, figures, verdict, ratio = out.splitlines()
    assert len(answer.split()) > 3
    assert FIGURES.fullmatch(figures)[1] == "8"
    assert verdict == "plain generate: the same text"
    assert RATIO.fullmatch(ratio)
    # capfd sees what C and tqdm write too: nothing but our line.
    assert re.fullmatch(r"loading SmolLM2-135M-Instruct \.\.\. \d+\.\d s\n", err)


def chat(tokenizer: Any, prompt: str) -> BatchEncoding:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def assert_same_text(pair: Pair, prompt: str, new_tokens: int, **options: Any) -> None:
    model, tokenizer, head = pair
    asked = {**chat(tokenizer, prompt), "do_sample": False, "max_new_tokens": new_tokens}
    plain = model.generate(**asked)
    output = generate(model=model, assistant_model=head, return_dict_in_generate=True, **asked, **options)
    assert tokenizer.decode(output.sequences[0]) == tokenizer.decode(plain[0])
    assert output.sequences.tolist() == plain.tolist()
    assert output.talon_stats.tau > 1.0, "no draft was ever accepted"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_talon(prompt: str, real_pair: Pair) -> None:
    assert_same_text(real_pair, prompt, new_tokens=48)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS[::7])
@pytest.mark.parametrize("policy", ["eagle", "chain"])
def test_other_policies(policy: str, prompt: str, real_pair: Pair) -> None:
    assert_same_text(real_pair, prompt, new_tokens=48, talon_policy=policy)
