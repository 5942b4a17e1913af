"""Tiny EAGLE-3 heads in the official layout, the golden ones, and what a test needs to drive a head without a loop."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import VOCABULARY
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from talon_hf import EagleDraft
from talon_hf.drafter import Commit, FeatureSpec
from talon_hf.eagle import EagleSession

GOLDEN = Path(__file__).parent / "golden"
COMMIT = "c0ffee" + 34 * "0"


def head_config(target: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    """config.json of a head for a target, with a draft vocabulary of 20; a change to None leaves the entry out."""
    text = target.config.get_text_config(decoder=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 40,  # wrong, as in published files; a head has one layer
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": 20,
        "max_position_embeddings": 2048,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
    } | changes
    return {name: value for name, value in config.items() if value is not None}


def head_tensors(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random official tensors of a config; embeddings only where the target's have another width."""
    h, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    theirs = config.get("target_hidden_size", h)
    keys = h * config["num_key_value_heads"] // config["num_attention_heads"]
    drafts = config.get("draft_vocab_size", vocabulary)
    shapes = {
        "fc.weight": (h, 3 * theirs),
        "midlayer.self_attn.q_proj.weight": (h, 2 * h),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * h),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, h),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (drafts, h),
    }
    if theirs != h:
        shapes["embed_tokens.weight"] = (vocabulary, h)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        # Norms lie around 1, so that a norm that is left out or put in a wrong place shows.
        name: torch.randn(shape, generator=generator, dtype=dtype) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if drafts < vocabulary:
        ids = torch.randperm(vocabulary, generator=generator)[:drafts].sort().values
        tensors["d2t"] = ids - torch.arange(drafts)
        tensors["t2d"] = torch.isin(torch.arange(vocabulary), ids)
    return tensors


def write_head(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], weights: str = "model.safetensors"
) -> Path:
    """Writes a head as a folder of two files; `weights` names the second, whose ending is its format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights.endswith(".safetensors"):
        save_file(tensors, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder


def tiny_head(folder: Path, target: PreTrainedModel, seed: int = 0, **changes: Any) -> EagleDraft:
    """A head for a target, written and loaded."""
    config = head_config(target, **changes)
    return EagleDraft.from_pretrained(write_head(folder, config, head_tensors(config, seed)))


def hub_snapshot(cache: Path, repo_id: str) -> Path:
    """The folder whose files an offline Hub cache gives for a repository; write a head into it or below it."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A golden file's facts and tensors."""
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")


def golden_head(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> EagleDraft:
    """The head of a golden file, through a folder in the official layout."""
    weights = {name.removeprefix("draft."): t for name, t in tensors.items() if name.startswith("draft.")}
    return EagleDraft.from_pretrained(write_head(folder, config, weights))


def golden_target(tensors: dict[str, Tensor], config: dict[str, Any]) -> LlamaForCausalLM:
    """The target of a golden file, in fp32, without an end-of-sequence token."""
    model = LlamaForCausalLM(LlamaConfig(**config, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    weights = {name.removeprefix("target."): t for name, t in tensors.items() if name.startswith("target.")}
    model.load_state_dict({name: t for name, t in weights.items() if not name.endswith("inv_freq")})
    return model.eval()


@dataclass
class Forwards:
    """What the layer of a head read and returned, forward by forward."""

    embeds: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def watch(self, head: EagleDraft) -> Forwards:
        head.layer.register_forward_hook(self._record)
        return self

    def _record(self, layer: Any, args: tuple[Any, ...], output: Tensor) -> None:
        embeds, features, positions, _, mask = args
        for log, value in zip(vars(self).values(), (embeds, features, positions, mask, output), strict=True):
            log.append(value)


class GuidedDrafter:
    """Drafts what a scripted drafter says, so that paths are accepted, while a head reads and drafts along."""

    def __init__(self, head: EagleDraft, script: Any, check: Any) -> None:
        self.head, self.script, self.check = head, script, check

    def features_of(self, target: PreTrainedModel) -> FeatureSpec:
        return self.head.features_of(target)

    def open(self, target: PreTrainedModel, rows: int) -> GuidedSession:
        return GuidedSession(self.head.open(target, rows), self.script.open(target, rows), self.check)


class GuidedSession:
    draft_ids = None
    max_depth = None

    def __init__(self, eagle: EagleSession, script: Any, check: Any) -> None:
        self.eagle, self.script, self.check = eagle, script, check

    @property
    def steps(self) -> int:
        return self.eagle.steps

    def begin(self, commit: Commit) -> Tensor:
        log_probs = self.eagle.begin(commit)
        scripted = self.script.begin(commit)
        self.check(self.eagle, self.script, commit, log_probs)
        return scripted

    def extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
        self.eagle.extend(tokens, parents, valid)
        return self.script.extend(tokens, parents, valid)

    def end(self) -> None:
        self.eagle.end()
        self.script.end()

    def select_rows(self, rows: list[int]) -> None:
        self.eagle.select_rows(rows)
        self.script.select_rows(rows)


def whole_text_commit(target: PreTrainedModel, head: EagleDraft, text: list[int], root: int) -> Commit:
    """One commit of a whole text, whose features come from one plain forward's hidden states."""
    tokens = torch.tensor([text])
    states = target(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[b] for b in head.features_of(target).boundaries], dim=-1)
    positions = torch.arange(len(text)).unsqueeze(0)
    return Commit(tokens, features, positions, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([root]))


def random_commits(head: EagleDraft, rows: int, rounds: int) -> list[Commit]:
    """A left-padded prompt and `rounds` ragged commits of random tokens and features, in fp64."""
    generator = torch.Generator().manual_seed(7)
    width = len(head.config.aux_layers or (0, 0, 0)) * head.config.target_hidden_size
    lengths = torch.zeros(rows, dtype=torch.long)
    commits = []
    for r in range(rounds + 1):
        m = 6 if r == 0 else 4
        counts = torch.randint(1, m + 1, (rows, 1), generator=generator)
        columns = torch.arange(m).expand(rows, -1)
        valid = columns >= m - counts if r == 0 else columns < counts
        positions = lengths.unsqueeze(1) + (valid.cumsum(dim=1) - 1).clamp(min=0)
        tokens = torch.randint(0, VOCABULARY, (rows, m), generator=generator)
        features = torch.randn(rows, m, width, generator=generator, dtype=torch.float64)
        roots = torch.randint(0, VOCABULARY, (rows,), generator=generator)
        if commits:  # the old root is the first committed token
            tokens[:, 0] = commits[-1].roots
        commits.append(Commit(tokens, features, positions, valid, roots))
        lengths += counts.squeeze(1)
    return commits


def solo(commit: Commit, row: int) -> Commit:
    """One row's commit without its padding."""
    valid = commit.valid[row]
    picked = (t[row : row + 1, valid] for t in (commit.tokens, commit.features, commit.positions, commit.valid))
    return Commit(*picked, commit.roots[row : row + 1])
