"""The command `talon-hf`: `generate` answers with a pair and shows what it gains; hub.py and bench.py add theirs."""

from __future__ import annotations

import argparse
import io
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.utils import logging

from ..config import POLICIES, TalonConfig
from ..drafter import Drafter
from ..generate import generate
from ..stats import TalonStats
from . import bench, hub
from .pair import TARGET, load_draft, load_target
from .ties import Parting, find_parting, shared

DTYPES = ("bfloat16", "float16", "float32", "float64")
# On the CPU every node of a tree costs arithmetic time, so small trees are the fast ones (docs/performance.md).
CPU_NODE_BUDGET = 8
CPU_TOP_K = 3
PAIRS = 3
WARM_UP_TOKENS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: arguments; None takes the process's own.

    Returns:
        exit code: 0; 1 where `--compare` finds texts that rounding does not explain; 2 for an error, told in one line;
        130 for Ctrl-C.
    """
    args = _parser().parse_args(argv)
    try:
        code = args.run(args) or 0
        sys.stdout.flush()  # a reader that has gone is met here, not when the interpreter ends
        return code
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            # What is still in the buffer goes nowhere, or the interpreter would complain of it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Our own errors are sentences; of another one the kind says at least as much as its text.
        kind = "" if isinstance(error, (ValueError, OSError)) and str(error) else f"{type(error).__name__}: "
        print(f"talon-hf: {' '.join(f'{kind}{error}'.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # what a shell reports for it


def _parser() -> argparse.ArgumentParser:
    defaults = TalonConfig()
    budgets = f"{defaults.node_budget}, on the CPU {CPU_NODE_BUDGET}"
    widths = f"{defaults.top_k}, on the CPU {CPU_TOP_K}"
    parser = argparse.ArgumentParser(prog="talon-hf", description="TALON draft trees for transformers' generate.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("generate", help="answer a prompt", description="Answers a prompt with TALON.")
    command.set_defaults(run=_run_generate)
    add = command.add_argument
    add("prompt", metavar="PROMPT")
    add("--compare", action="store_true", help="also run plain generate: is the text the same, how much faster is it?")
    add("--model", metavar="SOURCE", help="folder or Hub id of the target (default: SmolLM2-135M-Instruct)")
    add("--draft", metavar="SOURCE", help="folder or Hub id of an EAGLE-3 head (default: the packaged one)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of both models (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy; else sampled with seed 0 (default: 0)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--policy", choices=POLICIES, default=defaults.policy, help="how trees grow (default: %(default)s)")
    add("--node-budget", type=int, metavar="N", help=f"nodes of a tree, root counted (default: {budgets})")
    add("--top-k", type=int, metavar="K", help=f"nodes of TALON's first layer (default: {widths})")
    add("--mu", type=float, default=defaults.mu, help="TALON's gate (default: %(default)s)")
    hub.add_commands(commands)
    bench.add_commands(commands)
    return parser


def _run_generate(args: argparse.Namespace) -> int:
    options = _options(args)
    with _quiet():
        pair = _load(args, options)
        run = pair.talon(args.max_new_tokens, TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True))
        print(run.figures(), flush=True)
        return _compare(pair, args.max_new_tokens) if args.compare else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The `talon_*` arguments, after a check of all values: a wrong one is told before the weights load."""
    if not 0.0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature must be 0 (greedy) or a positive number, got {args.temperature}.")
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}.")
    if args.node_budget is None:
        args.node_budget = CPU_NODE_BUDGET if _device() == "cpu" else TalonConfig().node_budget
    if args.top_k is None:
        args.top_k = CPU_TOP_K if _device() == "cpu" else TalonConfig().top_k
    options = {f"talon_{name}": getattr(args, name) for name in ("policy", "node_budget", "top_k", "mu")}
    TalonConfig.resolve(options)
    return options


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the progress bars, notes and warnings of transformers off the terminal; errors get a line of ours."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class _Run:
    """New tokens of one `generate` call, its wall time, and what TALON counted (None for plain generate)."""

    tokens: list[int]
    seconds: float
    stats: TalonStats | None

    @property
    def speed(self) -> float:
        """Tokens a second, the prompt's forward included."""
        return len(self.tokens) / self.seconds

    def figures(self) -> str:
        """The line under an answer."""
        stats = self.stats or TalonStats()
        speed = f"{len(self.tokens)} tokens, {self.speed:.1f} tokens/s"
        # The first token is the prompt's own, of no round.
        return f"{speed}, tau {stats.tau:.2f}, delta {stats.delta:.2f}" if stats.rounds else f"{speed}, no round"


@dataclass(frozen=True)
class _Pair:
    """A loaded pair and a prompt, which TALON or plain generate can answer.

    Attributes:
        inputs: `input_ids` and `attention_mask`, (1, L).
        sampling: explicit arguments, since a model's own generation config may ask for sampling.
        options: `talon_*` arguments.
    """

    model: Any
    tokenizer: Any
    drafter: Drafter
    inputs: dict[str, Tensor]
    sampling: dict[str, Any]
    options: dict[str, Any]

    def talon(self, max_new_tokens: int, streamer: TextStreamer | None = None) -> _Run:
        ours = {"assistant_model": self.drafter, "streamer": streamer, **self.options}
        return self._run(lambda **kwargs: generate(model=self.model, **ours, **kwargs), max_new_tokens)

    def plain(self, max_new_tokens: int) -> _Run:
        return self._run(self.model.generate, max_new_tokens)

    def _run(self, call: Callable[..., Any], max_new_tokens: int) -> _Run:
        torch.manual_seed(0)
        asked = {**self.inputs, **self.sampling, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
        begin = time.perf_counter()
        output = call(**asked)
        tokens = output.sequences[0, self.inputs["input_ids"].shape[1] :].tolist()
        return _Run(tokens, time.perf_counter() - begin, output.get("talon_stats"))


def _load(args: argparse.Namespace, options: dict[str, Any]) -> _Pair:
    dtype = getattr(torch, args.dtype)
    model: Any
    with _progress(f"loading {Path(args.model or TARGET).name} ...") as step:
        step("the head " + (args.draft or "of the package"))
        drafter = load_draft(args.draft, dtype)
        step(f"the model {args.model or TARGET}")
        model, tokenizer = load_target(args.model, dtype)
    sampled = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    return _Pair(
        model.to(_device()),
        tokenizer,
        drafter.to(_device()),
        _prompt(tokenizer, args.prompt),
        sampled if args.temperature else {"do_sample": False},
        options,
    )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """One line on stderr: what is going on, then how long it took, or which step failed. Nothing else comes between.

    Yields a function that names the next step.
    """
    stderr, begin, steps = sys.stderr, time.perf_counter(), [""]
    print(what, end=" ", file=stderr, flush=True)
    outcome = None
    try:
        # Reading a GGUF file draws a progress bar that no setting of transformers turns off.
        with redirect_stderr(io.StringIO()):
            yield steps.append
        outcome = f"{time.perf_counter() - begin:.1f} s"
    finally:
        print(outcome or f"{steps[-1]} failed".strip(), file=stderr, flush=True)


def _prompt(tokenizer: Any, text: str) -> dict[str, Tensor]:
    """The text as a chat's first turn, or as it is for a model without a chat template."""
    if tokenizer.chat_template is None:
        encoded = tokenizer(text, return_tensors="pt")
    else:
        chat = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return {name: encoded[name].to(_device()) for name in ("input_ids", "attention_mask")}


def _compare(pair: _Pair, max_new_tokens: int) -> int:
    """Runs plain generate and TALON in turns, after a warm-up each, and says how the texts and the speeds compare."""
    for system in (pair.plain, pair.talon):
        system(min(max_new_tokens, WARM_UP_TOKENS))
    turns = [(pair.plain(max_new_tokens), pair.talon(max_new_tokens)) for _ in range(PAIRS)]
    parted = next((turn for turn in turns if turn[0].tokens != turn[1].tokens), turns[0])
    explained, verdict = _difference(pair, *parted)
    plain, talon = (statistics.median(run.speed for run in runs) for runs in zip(*turns, strict=True))
    ratio = statistics.median(talon.speed / plain.speed for plain, talon in turns)
    print(f"plain generate: {verdict}")
    print(f"TALON is {ratio:.2f} times as fast: {talon:.1f} against {plain:.1f} tokens/s ({PAIRS} interleaved pairs)")
    return 0 if explained else 1


def _difference(pair: _Pair, plain: _Run, talon: _Run) -> tuple[bool, str]:
    """Whether rounding explains where two texts part, and a sentence that says so with the figures."""
    if plain.tokens == talon.tokens:
        return True, "the same text"
    if pair.sampling["do_sample"]:
        at = shared(plain.tokens, talon.tokens)
        return True, (
            f"the same for {at} tokens, then different; sampled, where rounding can turn a draw (--dtype float64 "
            "rounds less)"
        )
    parting = cast(Parting, find_parting(pair.model, pair.inputs, plain.tokens, talon.tokens))
    same = f"the same for {parting.at} tokens, then different"
    if math.isinf(parting.gap):
        return False, f"{same}: one of them ends there"
    theirs, ours = (repr(pair.tokenizer.decode([run.tokens[parting.at]])) for run in (plain, talon))
    return parting.is_tie, (
        f"{same}: plain decoding has {theirs} {parting.gap:.3g} above {ours} there, and its own logits move by up to "
        f"{parting.moved:.3g} when it reads the text in one piece: "
        f"{'a rounding tie' if parting.is_tie else 'rounding is no excuse'}"
    )
