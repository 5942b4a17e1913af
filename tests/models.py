"""Tiny random targets and drafters for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from talon_hf import EagleDraft
from talon_hf.drafter import Commit, FeatureSpec
from talon_hf.head_config import EagleConfig

VOCABULARY = 50
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Windows of 12 are crossed by every test that generates more than a dozen tokens.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 12, "query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
    ),
}


def seed_cpu(seed: int) -> None:
    """Seeds the CPU. `torch.manual_seed` notes stack traces for absent devices too, slower than a tiny forward."""
    torch.default_generator.manual_seed(seed)


def with_random_weights(model: PreTrainedModel, spread: float) -> PreTrainedModel:
    """The model with normal weights of that spread, wide enough for a text that is no constant; norms stay."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread)
    return model


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A random model of a family of `FAMILIES`, whose text is neither constant nor white noise."""
    config_class, extra = FAMILIES[family]
    seed_cpu(seed)
    config = getattr(transformers, config_class)(**{**COMMON, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        # The grouped matrix product of newer versions knows no fp64.
        model.set_experts_implementation("eager")
    return with_random_weights(model, 0.3).to(dtype).eval()


# The image stands where its four tokens do.
IMAGE_TOKEN = VOCABULARY - 1
IMAGE_PROMPT = torch.tensor([[7, 11, *[IMAGE_TOKEN] * 4, 5, 9, 23]])


def image_model() -> PreTrainedModel:
    """A random LLaVA, for transformers 5 and newer."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        ),
        text_config=transformers.LlamaConfig(**{**COMMON, "eos_token_id": None}),
        image_token_id=IMAGE_TOKEN,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return with_random_weights(transformers.LlavaForConditionalGeneration(config), 0.3).eval()


def image(seed: int) -> Tensor:
    """(1, 3, 8, 8) pixels for `image_model`."""
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def random_head(model: PreTrainedModel, seed: int = 0, draft_vocabulary: int = VOCABULARY) -> EagleDraft:
    """An EAGLE-3 head of random weights that fits the model; a smaller draft vocabulary skips some ids."""
    text = model.config.get_text_config(decoder=True)
    config = EagleConfig(
        hidden_size=text.hidden_size,
        target_hidden_size=text.hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=text.hidden_size // 4,
        vocab_size=text.vocab_size,
        draft_vocab_size=draft_vocabulary,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope_theta=10000.0,
        aux_layers=None,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        max_position_embeddings=None,
    )
    seed_cpu(seed)
    head = EagleDraft(config)
    if draft_vocabulary < text.vocab_size:
        head.draft_ids = torch.randperm(text.vocab_size)[:draft_vocabulary].sort().values
    return head


Guess = Callable[[int, list[int]], Tensor]


@dataclass
class ScriptedDrafter:
    """A drafter whose log-probs are a function of (row, all tokens up to the node): (Vd,) log-probs of its children.

    It keeps no cache, so it also checks what it is told: the text that its commits spell is the text so far.
    """

    guess: Guess
    vocabulary: int = VOCABULARY
    calls: list[int] = field(default_factory=list)

    def features_of(self, target: PreTrainedModel) -> FeatureSpec:
        return FeatureSpec()

    def open(self, target: PreTrainedModel, rows: int) -> ScriptedSession:
        return ScriptedSession(self.guess, rows)


class ScriptedSession:
    """One call of a `ScriptedDrafter`."""

    draft_ids = None
    max_depth = None

    def __init__(self, guess: Guess, rows: int) -> None:
        self.steps = 0
        self._guess = guess
        self._rows = list(range(rows))
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._paths: list[list[list[int]]] = []

    def begin(self, commit: Commit) -> Tensor:
        self.steps += 1
        for text, tokens, valid in zip(self._texts, commit.tokens.tolist(), commit.valid.tolist(), strict=True):
            text += [token for token, good in zip(tokens, valid, strict=True) if good]
        self._paths = [[[root]] for root in commit.roots.tolist()]
        return self._log_probs().squeeze(1)

    def extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
        self.steps += 1
        self._paths = [
            [paths[parent] + [token] for token, parent in zip(row_tokens, row_parents, strict=True)]
            for paths, row_tokens, row_parents in zip(self._paths, tokens.tolist(), parents.tolist(), strict=True)
        ]
        return self._log_probs()

    def end(self) -> None:
        self._paths = []

    def select_rows(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._texts = [self._texts[row] for row in rows]

    def _log_probs(self) -> Tensor:
        rows = zip(self._rows, self._texts, self._paths, strict=True)
        return torch.stack(
            [torch.stack([self._guess(row, text + path) for path in paths]) for row, text, paths in rows]
        )


def peaked(token: int, vocabulary: int = VOCABULARY, confidence: float = 0.9) -> Tensor:
    """(V,) log-probs with `confidence` on one token and the rest even."""
    probs = torch.full((vocabulary,), (1.0 - confidence) / (vocabulary - 1))
    probs[token] = confidence
    return probs.log()


# Of the zoo, heads of random weights: what `random_head` is given.
ZOO_HEADS: dict[str, dict[str, int]] = {"random": {"seed": 3}, "small_vocabulary": {"seed": 4, "draft_vocabulary": 17}}


def drafter_zoo(continuations: Sequence[Sequence[int]], model: PreTrainedModel) -> dict[str, Any]:
    """Drafters from perfect to broken, for the prompts whose full right texts are `continuations`."""
    scripted = {name: ScriptedDrafter(guess) for name, guess in zoo_guesses(continuations).items()}
    return scripted | {name: random_head(model, **made) for name, made in ZOO_HEADS.items()}


def zoo_drafter(name: str, continuations: Sequence[Sequence[int]], model: PreTrainedModel) -> Any:
    """One drafter of the zoo."""
    if name in ZOO_HEADS:
        return random_head(model, **ZOO_HEADS[name])
    return ScriptedDrafter(zoo_guesses(continuations)[name])


def zoo_guesses(continuations: Sequence[Sequence[int]]) -> dict[str, Guess]:
    """The drafters of the zoo that are told what to guess."""

    def right(row: int, text: list[int]) -> int | None:
        whole = list(continuations[row])
        return whole[len(text)] if whole[: len(text)] == text and len(text) < len(whole) else None

    def perfect(row: int, text: list[int]) -> Tensor:
        token = right(row, text)
        return peaked(3 if token is None else token)

    def good(row: int, text: list[int]) -> Tensor:
        # Every third guess is wrong at the top, with the right token second.
        token = right(row, text)
        wrong = (sum(text) * 7 + len(text)) % VOCABULARY
        if token is None or len(text) % 3 == 0:
            second = peaked(wrong, confidence=0.6).exp()
            second[3 if token is None else token] += 0.3
            return (second / second.sum()).log()
        return peaked(token, confidence=0.7)

    def adversarial(row: int, text: list[int]) -> Tensor:
        token = right(row, text)
        log_probs = peaked((sum(text) + 1) % VOCABULARY, confidence=0.5)
        if token is not None:
            log_probs[token] = -torch.inf
        return log_probs

    def broken(row: int, text: list[int]) -> Tensor:
        return torch.full((VOCABULARY,), torch.nan) if len(text) % 2 else perfect(row, text)

    return {"perfect": perfect, "good": good, "adversarial": adversarial, "nan": broken}
