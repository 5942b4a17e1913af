"""`talon-hf bench`: draft trees against plain `generate` and prompt lookup, paired on the same prompts.

Every system answers every prompt `repeats` times, in turns (A B C, B C A, ...), after one warm-up each. A system's
time on a prompt is the median of its repeats; its speed-up there is plain's seconds per token over its own. Nothing is
timed that is not also compared with plain's text. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..eagle import EagleDraft
from ..generate import generate
from ..stats import TalonStats
from .pair import load_draft, load_target
from .ties import Parting, find_parting

SYSTEMS = ("plain", "lookup", "talon", "eagle", "chain")
Run = Callable[[Tensor], tuple[Tensor, TalonStats | None]]


@dataclass
class Tally:
    """One system's results over all prompts."""

    seconds: float = 0.0
    tokens: int = 0
    speedups: list[float] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)
    stats: TalonStats = field(default_factory=TalonStats)


def systems(
    model: PreTrainedModel, head: EagleDraft, new_tokens: int, names: list[str], options: dict[str, Any]
) -> dict[str, Run]:
    """The systems by name: ids (1, L) -> (sequences, stats or None), greedy."""
    common: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}

    def stock(**extra: Any) -> Run:
        def run(ids: Tensor) -> tuple[Tensor, None]:
            sequences = cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), **common, **extra)
            return sequences, None

        return run

    def tree(policy: str) -> Run:
        def run(ids: Tensor) -> tuple[Tensor, TalonStats]:
            out: Any = generate(
                ids, model=model, attention_mask=torch.ones_like(ids), assistant_model=head, talon_policy=policy,
                return_dict_in_generate=True, **common, **options,
            )  # fmt: skip
            return out.sequences, out.talon_stats

        return run

    runs: dict[str, Run] = {"plain": stock(), "lookup": stock(prompt_lookup_num_tokens=10)}
    return {name: runs.get(name) or tree(name) for name in ("plain", *(n for n in names if n != "plain"))}


def measure(runs: dict[str, Run], model: PreTrainedModel, prompts: list[Tensor], repeats: int) -> dict[str, Tally]:
    """Runs every system on every prompt, interleaved."""
    names = list(runs)
    tallies = {name: Tally() for name in names}
    for name in names:
        runs[name](prompts[0])
    for number, ids in enumerate(prompts):
        times: dict[str, list[float]] = {name: [] for name in names}
        last: dict[str, tuple[Tensor, TalonStats | None]] = {}
        for turn in range(repeats):
            for k in range(len(names)):
                name = names[(k + turn) % len(names)]
                begin = time.perf_counter()
                last[name] = runs[name](ids)
                times[name].append(time.perf_counter() - begin)
        _record(tallies, model, ids, times, last)
        print(f"prompt {number + 1} of {len(prompts)}", end="\r", file=sys.stderr, flush=True)
    return tallies


def _record(
    tallies: dict[str, Tally],
    model: PreTrainedModel,
    ids: Tensor,
    times: dict[str, list[float]],
    last: dict[str, tuple[Tensor, TalonStats | None]],
) -> None:
    texts = {name: sequences[0, ids.shape[1] :].tolist() for name, (sequences, _) in last.items()}
    pace = {name: statistics.median(t) / len(texts[name]) for name, t in times.items()}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, tally in tallies.items():
        stats = last[name][1]
        tally.tokens += len(texts[name])
        tally.seconds += pace[name] * len(texts[name])
        tally.speedups.append(pace["plain"] / pace[name])
        parting = find_parting(model, inputs, texts["plain"], texts[name])
        tally.partings += [] if parting is None else [parting]
        if stats is not None:
            tally.stats.add(stats)


def report(tallies: dict[str, Tally], settings: dict[str, Any]) -> None:
    """Prints the table, where a round's time goes, and the JSON line."""
    plain = tallies["plain"]
    plain_step = plain.seconds / plain.tokens
    count = len(plain.speedups)
    print(" ".join(f"{key}={value}" for key, value in settings.items()))
    print(
        f"{'system':8} {'tokens/s':>8} {'speed-up':>8} {'worst':>6} {'tau':>5} {'delta':>6} {'c':>5} {'same text':>10}"
    )
    rows = {}
    for name, tally in tallies.items():
        stats = tally.stats
        speedup = statistics.mean(tally.speedups)
        c = stats.seconds.get("draft", 0.0) / stats.draft_steps / plain_step if stats.draft_steps else float("nan")
        same = count - len(tally.partings)
        print(
            f"{name:8} {tally.tokens / tally.seconds:8.1f} {speedup:8.2f} {min(tally.speedups):6.2f} "
            f"{_shown(stats.tau, 5)} {_shown(stats.delta, 6)} {_shown(c, 5)} {same:5d} of {count}"
        )
        rows[name] = {
            "tokens_per_second": tally.tokens / tally.seconds, "speedup_mean": speedup, "speedups": tally.speedups,
            "tau": stats.tau, "delta": stats.delta, "c": c, "same_text": same,
            "partings": [asdict(parting) for parting in tally.partings], "stats": asdict(stats),
        }  # fmt: skip
    for name, tally in tallies.items():
        if tally.stats.batch_rounds:
            print(f"a round of {name}: {_round_times(tally.stats, plain_step)}")
        if tally.partings:
            print(f"{name}: {_explained(tally.partings)}")
    print(json.dumps({"settings": settings, "prompts": count, "systems": rows}))


def _shown(ratio: float, width: int) -> str:
    """A ratio in the table; a dash where nothing was counted, as for plain generate or answers of one token."""
    return "-".rjust(width) if math.isnan(ratio) else f"{ratio:{width}.2f}"


def _explained(partings: list[Parting]) -> str:
    ties = sum(parting.is_tie for parting in partings)
    gap, moved = (max(values) for values in zip(*((p.gap, p.moved) for p in partings), strict=True))
    return (
        f"{len(partings)} texts part from plain's, {ties} of them at a rounding tie: the two tokens' scores at most "
        f"{gap:.3g} apart, where plain's own logits move by up to {moved:.3g} when it reads the text in one piece"
    )


def _round_times(stats: TalonStats, plain_step: float) -> str:
    rounds = stats.batch_rounds
    parts = {phase: stats.seconds[phase] for phase in ("target", "draft", "accept", "commit")}
    parts["rest"] = stats.seconds["total"] - stats.seconds["prefill"] - sum(parts.values())
    shown = ", ".join(f"{phase} {1000 * seconds / rounds:.1f} ms" for phase, seconds in parts.items())
    width = stats.nodes / rounds
    ratio = parts["target"] / rounds / plain_step
    return (
        f"{shown}; its target forward of {width:.1f} nodes costs {ratio:.2f} plain steps of {1000 * plain_step:.1f} ms"
    )


def read_prompts(folder: Path, per_set: int, tokenizer: Any) -> list[Tensor]:
    """The first turns of the first `per_set` questions of every `*.jsonl` in `folder`, as chat prompts (1, L)."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(
            f"`--questions` {str(folder)!r} holds no .jsonl file. Each line of one is an object with `turns`, a list "
            "of texts, as in EAGLE's eagle/data."
        )
    prompts = []
    for path in files:
        for line in path.read_text().splitlines()[:per_set]:
            messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            prompts.append(prompt["input_ids"])
    return prompts


def run_bench(args: argparse.Namespace) -> int:
    """The `bench` command."""
    dtype = getattr(torch, args.dtype)
    transformers.logging.set_verbosity_error()
    model, tokenizer = load_target(args.model, dtype)
    head = load_draft(args.draft, dtype)
    options = {
        "talon_node_budget": args.node_budget,
        "talon_mu": args.mu,
        "talon_top_k": args.top_k,
        "talon_depth": args.depth,
    }
    prompts = read_prompts(args.questions, args.per_set, tokenizer)
    runs = systems(model, head, args.max_new_tokens, args.systems.split(","), options)
    settings = {
        "dtype": args.dtype, "new_tokens": args.max_new_tokens, "repeats": args.repeats, **options,
        "device": model.device.type, "threads": torch.get_num_threads(), "machine": platform.machine(),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    report(measure(runs, model, prompts, args.repeats), settings)
    return 0


def add_commands(subparsers: Any) -> None:
    """Registers `bench`."""
    parser = subparsers.add_parser("bench", help="measure draft trees against plain generate, on your questions")
    parser.add_argument("--questions", type=Path, required=True, help="folder of .jsonl files with `turns`")
    parser.add_argument("--per-set", type=int, default=2, help="questions of each file (default 2)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help=f"which of {', '.join(SYSTEMS)}; plain always runs"
    )
    parser.add_argument("--model", help="folder or Hub id of the target (default: the real pair's)")
    parser.add_argument("--draft", help="folder or Hub id of the head (default: the packaged one)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "float64"))
    parser.add_argument("--node-budget", type=int, default=60)
    parser.add_argument("--mu", type=float, default=0.03)
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--depth", type=int, default=8)
    parser.set_defaults(run=run_bench)
