"""EAGLE-3 draft heads: one decoder layer that predicts the next token from target features and token embeddings.

The pair (feature of position i, embedding of token i + 1) sits at position i. Features of committed positions come
from the target and pass through `fc`; below the root the layer's own output takes the feature's place (EAGLE-3,
section 3.1). The key-value cache's committed columns hold pairs with target features only: `begin` appends them,
`extend` appends a tree behind them, `end` forgets the tree.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from .cache import TreeCache
from .checkpoints import EagleConfig, draft_ids, read_checkpoint
from .drafter import Commit, DraftSession, FeatureSpec


class EagleDraft(nn.Module):
    """An EAGLE-3 head, usable as `assistant_model`.

    Args:
        config: the head's geometry.
        tensors: official tensors by name; None builds a head with random weights.
    """

    def __init__(self, config: EagleConfig, tensors: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        h, theirs = config.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(len(config.aux_layers or (0, 0, 0)) * theirs, h, bias=False)
        self.layer = DraftLayer(config)
        self.norm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        owns_embeddings = tensors is not None and "embed_tokens.weight" in tensors
        self.embed_tokens = nn.Embedding(config.vocab_size, h) if owns_embeddings else None
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids(config, (tensors or {}).get("d2t")), persistent=False)
        if tensors is not None:
            self.load_state_dict(_canonical(tensors), strict=True, assign=True)  # keeps the file's dtype
        self.eval().requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **hub: Any,
    ) -> EagleDraft:
        """Loads a head of the official EAGLE-3 layout, strictly.

        Args:
            source: folder or Hub id; a folder of a repository is "org/repository/folder".
            dtype: of the weights; None keeps the file's.
            device: where to; None is the CPU.
            hub: `subfolder`, `revision`, `token`, `cache_dir`, `local_files_only`, as in `hf_hub_download`.

        Raises:
            OSError: nothing to load there.
            ValueError: missing, unexpected or misshapen tensors (named), or `d2t` out of range.
        """
        config, tensors = read_checkpoint(source, **hub)
        head = cls(config, tensors)
        return head.to(device=device, dtype=dtype or tensors["fc.weight"].dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.lm_head.weight.dtype

    def features_of(self, target: PreTrainedModel) -> FeatureSpec:
        """The target layers that this head reads.

        Raises:
            ValueError: the head was made for a target of another vocabulary, width or depth.
        """
        text = target.config.get_text_config(decoder=True)
        if self.config.vocab_size != text.vocab_size:
            raise ValueError(
                f"`assistant_model` is a head for a vocabulary of {self.config.vocab_size}, the model's is "
                f"{text.vocab_size}. Use the head that was trained for this model."
            )
        if self.config.target_hidden_size != text.hidden_size:
            raise ValueError(
                f"`assistant_model` reads features of width {self.config.target_hidden_size}, the model's hidden size "
                f"is {text.hidden_size}. Use the head that was trained for this model."
            )
        layers = text.num_hidden_layers
        boundaries = self.config.aux_layers or (2, layers // 2, layers - 3)
        if len(set(boundaries)) < len(boundaries) or not all(0 <= b < layers for b in boundaries):
            raise ValueError(
                f"`assistant_model` reads the inputs of layers {boundaries}, which a model of {layers} layers does "
                "not have, each once. EAGLE-3's default layers need 7; others are named by "
                "`eagle_aux_hidden_state_layer_ids` in the head's config.json."
            )
        return FeatureSpec(tuple(boundaries))

    def open(self, target: PreTrainedModel, rows: int) -> DraftSession:
        """A session for `rows` prompts of this target."""
        embeddings = self.embed_tokens or cast(nn.Embedding, target.get_input_embeddings())
        return EagleSession(self, embeddings, rows)

    def log_probs(self, states: Tensor) -> Tensor:
        """(..., Vd) float32 log-probs from layer outputs (..., h)."""
        return torch.log_softmax(self.lm_head(self.norm(states)).float(), dim=-1)


class DraftLayer(nn.Module):
    """The decoder layer: attention over concat(embedding, feature), residuals on the feature."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        h, self.head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.embed_norm = nn.RMSNorm(h, eps=eps)
        self.hidden_norm = nn.RMSNorm(h, eps=eps)
        self.qkv = nn.Linear(2 * h, (self.heads + 2 * self.key_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, h, bias=False)
        self.post_attention_norm = nn.RMSNorm(h, eps=eps)
        self.gate_up = nn.Linear(h, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, h, bias=False)
        self.activation = ACT2FN[config.hidden_act]
        self.rope_theta = config.rope_theta

    def forward(
        self, embeds: Tensor, features: Tensor, positions: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Tensor:
        """(B, m, h) outputs before any final norm, which are also the next features.

        Args:
            embeds, features: (B, m, h).
            positions: (B, m) int64.
            cache: gets the m columns appended.
            mask: (B, 1, m, columns) bool, True may attend; None is causal over an empty cache.
        """
        rows, m, _ = features.shape
        mixed = torch.cat([self.embed_norm(embeds), self.hidden_norm(features)], dim=-1)
        heads = self.qkv(mixed).view(rows, m, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.key_heads, self.key_heads], dim=1)
        cos, sin = self._rotary(positions, features.dtype)
        key, value = cache.update(_rotate(key, cos, sin), value, 0)
        attended = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        states = features + self.o_proj(attended.transpose(1, 2).reshape(rows, m, -1))
        gate, up = self.gate_up(self.post_attention_norm(states)).chunk(2, dim=-1)
        return states + self.down_proj(self.activation(gate) * up)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, (B, 1, m, head_dim), of any position: the trained length is no bound."""
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device).float() / self.head_dim
        angles = positions.float().unsqueeze(-1) / self.rope_theta**exponents
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class EagleSession:
    """One call's drafting with an EAGLE-3 head (a `DraftSession`).

    Args:
        head: the weights.
        embeddings: token embeddings, weight (V, h).
        rows: batch size.
    """

    max_depth: int | None = None

    def __init__(self, head: EagleDraft, embeddings: nn.Embedding, rows: int) -> None:
        self.draft_ids = head.draft_ids
        self.steps = 0
        self._has_warned = False
        self._head = head
        self._embeddings = embeddings
        self._cache = TreeCache(rows)
        self._outputs = torch.empty(0)  # (B, W, h) of the last forward: the features of its nodes' children
        self._ancestry = torch.empty(0)  # (B, W, tree columns) bool: what the last frontier's nodes may attend to
        self._positions: Tensor = torch.empty(0)  # (B, 1) of the last forward

    def begin(self, commit: Commit) -> Tensor:
        """Appends the committed pairs, the last one ending in the root; log-probs of the root's children."""
        self.end()
        device = self._head.device
        valid, positions = commit.valid.to(device), commit.positions.to(device)
        features = self._head.fc(commit.features.to(device, self._head.dtype))
        mask = self._commit_mask(valid)
        outputs = self._forward(_following_tokens(commit), features, positions, mask)
        self._cache.keep([row.nonzero().flatten().tolist() for row in valid])
        self._warn_beyond_training()
        last = (valid * torch.arange(1, valid.shape[1] + 1, device=device)).argmax(dim=1, keepdim=True)
        self._outputs = outputs.gather(1, last.unsqueeze(2).expand(-1, -1, outputs.shape[2]))
        self._positions = positions.gather(1, last)
        self._ancestry = torch.zeros(len(valid), 1, 0, dtype=torch.bool, device=device)
        return self._head.log_probs(self._outputs).squeeze(1)

    def extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
        """Appends a frontier behind its parents; log-probs of its nodes' children."""
        rows, width = tokens.shape
        device = self._head.device
        index = parents.to(device).unsqueeze(2)
        features = self._outputs.gather(1, index.expand(-1, -1, self._outputs.shape[2]))
        above = self._ancestry.gather(1, index.expand(-1, -1, self._ancestry.shape[2]))
        itself = torch.eye(width, dtype=torch.bool, device=device).expand(rows, -1, -1)
        self._ancestry = torch.cat([above, itself], dim=2)
        self._positions = self._positions + 1
        committed = self._cache.visible(device).unsqueeze(1).expand(-1, width, -1)
        mask = torch.cat([committed, self._ancestry], dim=2).unsqueeze(1)
        self._outputs = self._forward(tokens, features, self._positions.expand(-1, width), mask)
        return self._head.log_probs(self._outputs)

    def end(self) -> None:
        """Forgets the tree."""
        self._cache.drop()

    def select_rows(self, rows: list[int]) -> None:
        """Keeps some rows of the batch, between rounds."""
        self._cache.select_rows(rows)

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        self.steps += 1
        return self._head.layer(self._embed(tokens).to(features), features, positions, self._cache, mask)

    def _warn_beyond_training(self) -> None:
        limit = self._head.config.max_position_embeddings
        if limit is not None and not self._has_warned and max(self._cache.committed) > limit:
            self._has_warned = True
            warnings.warn(
                f"The text is longer than the {limit} positions that the EAGLE-3 head was configured for. The text "
                "stays the model's own; fewer drafts may be accepted.",
                stacklevel=2,
            )

    def _embed(self, tokens: Tensor) -> Tensor:
        """(B, m, h) raw embeddings: a model that scales its own does so after the lookup, which the head never saw."""
        weight = self._embeddings.weight
        if weight.device.type == "meta":
            # Offloaded: only the module's own call brings the weight in. The head's norm takes a scale out again.
            return self._embeddings(tokens)
        return F.embedding(tokens.to(weight.device), weight)

    def _commit_mask(self, valid: Tensor) -> Tensor | None:
        """(B, 1, m, columns) bool: committed columns, then valid new ones up to itself; padding sees itself."""
        m = valid.shape[1]
        visible = self._cache.visible(valid.device)
        if visible.shape[1] == 0 and bool(valid.all()):
            return None
        causal = torch.ones(m, m, dtype=torch.bool, device=valid.device).tril()
        new = (causal & valid.unsqueeze(1)) | torch.eye(m, dtype=torch.bool, device=valid.device)
        return torch.cat([visible.unsqueeze(1).expand(-1, m, -1), new], dim=2).unsqueeze(1)


def _following_tokens(commit: Commit) -> Tensor:
    """(B, m) the token after each committed position; the root follows the last valid one."""
    following = torch.cat([commit.tokens[:, 1:], commit.roots.unsqueeze(1)], dim=1)
    is_last = commit.valid & ~torch.cat([commit.valid[:, 1:], torch.zeros_like(commit.valid[:, :1])], dim=1)
    return torch.where(is_last, commit.roots.unsqueeze(1), following)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-right, left], dim=-1) * sin


def _canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Official names -> this module's; projections that read one input are stacked into one matrix."""
    attention = [tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
    canonical = {
        "fc.weight": tensors["fc.weight"],
        "layer.embed_norm.weight": tensors["midlayer.input_layernorm.weight"],
        "layer.hidden_norm.weight": tensors["midlayer.hidden_norm.weight"],
        "layer.qkv.weight": torch.cat(attention),
        "layer.o_proj.weight": tensors["midlayer.self_attn.o_proj.weight"],
        "layer.post_attention_norm.weight": tensors["midlayer.post_attention_layernorm.weight"],
        "layer.gate_up.weight": torch.cat([tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up")]),
        "layer.down_proj.weight": tensors["midlayer.mlp.down_proj.weight"],
        "norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    if "embed_tokens.weight" in tensors:
        canonical["embed_tokens.weight"] = tensors["embed_tokens.weight"]
    return canonical
