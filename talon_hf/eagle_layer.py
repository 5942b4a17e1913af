"""The one decoder layer of an EAGLE-3 head, which reads token embeddings and features side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import TreeCache
from .compat import activation
from .head_config import EagleConfig


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
        self.activation = activation(config.hidden_act)
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


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-right, left], dim=-1) * sin
