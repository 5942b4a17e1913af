"""EAGLE-3 draft heads: one decoder layer that predicts the next token from target features and token embeddings.

The pair (feature of position i, embedding of token i + 1) sits at position i. Features of committed positions come
from the target and pass through `fc`; below the root the layer's own output takes the feature's place (EAGLE-3,
section 3.1). The key-value cache's committed columns hold pairs with target features only: `begin` appends them,
`extend` appends a tree behind them, `end` forgets the tree.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import TreeCache, columns_of
from .checkpoints import DTYPES, canonical, draft_ids, read_checkpoint
from .drafter import Commit, DraftSession, FeatureSpec
from .eagle_layer import DraftLayer
from .head_config import EagleConfig

# Embedding matrices are padded to a multiple of at most this many rows.
MOST_PADDING = 1024


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
        owns_embeddings = tensors is not None and "embed_tokens.weight" in tensors
        # Weights that the file's replace are not drawn: that takes time, and the caller's seed has other uses.
        with nullcontext() if tensors is None else torch.device("meta"):
            self.fc = nn.Linear(len(config.aux_layers or (0, 0, 0)) * theirs, h, bias=False)
            self.layer = DraftLayer(config)
            self.norm = nn.RMSNorm(h, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
            self.embed_tokens = nn.Embedding(config.vocab_size, h) if owns_embeddings else None
        ids = draft_ids(config, (tensors or {}).get("d2t"))
        self.highest_id = config.draft_vocab_size - 1 if ids is None else int(ids.max())
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", ids, persistent=False)
        if tensors is not None:
            self.load_state_dict(canonical(tensors), strict=True, assign=True)  # keeps the file's dtype
        self.eval().requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **hub: Any,
    ) -> EagleDraft:
        """Loads a head of the official EAGLE-3 layout, strictly.

        Args:
            source: folder or Hub id; a folder of a repository is "org/repository/folder".
            dtype: of the weights, float16, bfloat16, float32 or float64; None keeps the file's.
            device: where to; None is the CPU.
            hub: `subfolder`, `revision`, `token`, `cache_dir`, `local_files_only`, as in `hf_hub_download`.

        Raises:
            OSError: nothing to load there.
            ValueError: a file that cannot be read, or a tensor, a config entry or a `d2t` out of the layout, by name.
        """
        if dtype not in (None, *DTYPES):
            names = ", ".join(str(known) for known in DTYPES)
            raise ValueError(f"A head computes in one of {names}, got `dtype`={dtype!r}. Leave it out for the file's.")
        config, tensors = read_checkpoint(source, **hub)
        try:
            head = cls(config, tensors)
        except ValueError as error:
            raise ValueError(f"The head {os.fspath(source)!r} has a wrong `d2t`: {error}") from None
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
        self._refuse_vocabulary(text.vocab_size)
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
        width = getattr(target.get_input_embeddings(), "embedding_dim", self.config.hidden_size)
        if self.embed_tokens is None and width != self.config.hidden_size:
            raise ValueError(
                f"`assistant_model` reads the model's token embeddings in a width of {self.config.hidden_size}, and "
                f"theirs is {width}. Use a head that has embeddings of its own (`embed_tokens.weight`)."
            )
        return FeatureSpec(tuple(boundaries), embeddings=True)

    def _refuse_vocabulary(self, rows: int) -> None:
        """Raises unless every drafted id is one of the model's, whose rows may be padded; the head's may be too."""
        ours = self.config.vocab_size
        sizes = f"`assistant_model` is a head for a vocabulary of {ours}, the model's is {rows}"
        if self.highest_id >= rows:
            source = "it has no `d2t`" if self.draft_ids is None else "its `d2t` maps one there"
            raise ValueError(
                f"{sizes}: the head drafts ids up to {self.highest_id} ({source}). Use the head that was trained for "
                "this model."
            )
        if rows - ours >= min(MOST_PADDING, 2 * ours):
            raise ValueError(f"{sizes}, more than padding adds. Use the head that was trained for this model.")

    def open(self, target: PreTrainedModel, rows: int) -> DraftSession:
        """A session for `rows` prompts of this target."""
        embeddings = target.get_input_embeddings() if self.embed_tokens is None else self.embed_tokens
        return EagleSession(self, cast(nn.Module, embeddings), rows)

    def log_probs(self, states: Tensor) -> Tensor:
        """(..., Vd) float32 log-probs from layer outputs (..., h)."""
        return torch.log_softmax(self.lm_head(self.norm(states)).float(), dim=-1)


class EagleSession:
    """One call's drafting with an EAGLE-3 head (a `DraftSession`).

    Args:
        head: the weights.
        embeddings: token embeddings: ids (B, m) in, (B, m, h) out.
        rows: batch size.
    """

    max_depth: int | None = None

    def __init__(self, head: EagleDraft, embeddings: nn.Module, rows: int) -> None:
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
        tokens, embeddings, valid = self._following(commit)
        valid, positions = valid.to(device), commit.positions.to(device)
        features = self._head.fc(commit.features.to(device, self._head.dtype))
        mask = self._commit_mask(valid)
        outputs = self._forward(tokens, features, positions, mask, embeddings)
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

    def state(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The keys and values of what it has read."""
        return {i: (keys.clone(), values.clone()) for i, (keys, values) in columns_of(self._cache).items()}

    def restore(self, state: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Goes on from the `state` of another session of this head."""
        self._cache.fill(state)

    def _following(self, commit: Commit) -> tuple[Tensor, Tensor | None, Tensor]:
        """What follows each committed position: tokens (B, m), embeddings (B, e - 1, h) of the first, valid (B, m).

        A head with embeddings of its own, or of another width, does not know the target's: it reads the positions
        that a token follows.
        """
        tokens, given = _following_tokens(commit), commit.embeddings
        is_own = self._head.embed_tokens is not None
        if given is None or is_own or given.shape[2] != self._head.config.hidden_size:
            return tokens.clamp(min=0), None, commit.valid & (tokens >= 0)
        return tokens.clamp(min=0), given[:, 1:], commit.valid

    def _forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        self.steps += 1
        embeds = self._embed(tokens).to(features)
        if embeddings is not None:
            embeds = torch.cat([embeddings.to(features), embeds[:, embeddings.shape[1] :]], dim=1)
        return self._head.layer(embeds, features, positions, self._cache, mask)

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
        """(B, m, h) embeddings, by the module's own call: a packed, quantised or offloaded weight is no table.

        Heads are trained on the plain weight. Where the module multiplies it by a constant (Gemma 3), the head's norm
        takes the constant out again: it only makes `rms_norm_eps` weigh less.
        """
        known = getattr(self._embeddings, "num_embeddings", None)
        if known is not None:  # a padded model may emit an id beyond the head's own embeddings
            tokens = tokens.clamp(max=known - 1)
        weight = next(chain(self._embeddings.parameters(), self._embeddings.buffers()), None)
        if weight is None or weight.device.type == "meta":  # offloaded: its hook moves the ids too
            return self._embeddings(tokens)
        return self._embeddings(tokens.to(weight.device))

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
