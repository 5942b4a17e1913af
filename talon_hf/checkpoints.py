"""Published EAGLE-3 checkpoints -> the canonical head that `eagle.py` builds.

Loading is strict: every tensor is accounted for by name, shape and dtype, or the error says which is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .head_config import EagleConfig, read_config
from .head_files import HeadFiles

# Training keeps the set of drafted tokens beside their offsets; drafting reads the offsets alone.
UNUSED = ("t2d",)
SIZED_BY = "midlayer.self_attn.q_proj.weight, midlayer.mlp.gate_proj.weight and lm_head.weight"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_checkpoint(source: str | os.PathLike[str], **hub: Any) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Reads a head from a folder or a Hub repository.

    Args:
        source: folder, or Hub id; a folder of a repository is "org/repository/folder".
        hub: `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only` and the like.

    Returns:
        the config and the official tensors by name, on the CPU, checked against each other.

    Raises:
        OSError: no config.json or weights there.
        ValueError: a file that cannot be read, or a tensor or a config entry that the official EAGLE-3 layout does not
            have, named.
    """
    files = HeadFiles(source, **hub)
    raw, tensors = files.read()
    config = read_config(raw, tensors, files.source)
    _check_tensors(config, tensors, files.source)
    _check_sizes(config, files.source)
    return config, tensors


def expected_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the official layout's tensors, without the optional ones (`d2t`, `embed_tokens.weight`)."""
    h, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    features = len(config.aux_layers or (0, 0, 0)) * config.target_hidden_size
    return {
        "fc.weight": (h, features),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * h),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * h),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, queries),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
    }


def _check_tensors(config: EagleConfig, tensors: Mapping[str, Tensor], source: str) -> None:
    expected = expected_shapes(config)
    optional = {
        "d2t": (config.draft_vocab_size,),
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
    }
    if config.target_hidden_size != config.hidden_size or "embed_tokens.weight" in tensors:
        expected["embed_tokens.weight"] = optional.pop("embed_tokens.weight")
    if config.draft_vocab_size != config.vocab_size or "d2t" in tensors:
        expected["d2t"] = optional.pop("d2t")
    missing = sorted(set(expected) - set(tensors))
    unexpected = sorted(set(tensors) - set(expected) - set(UNUSED))
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [f"missing: {', '.join(missing)}"] * bool(missing)
    problems += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    problems += [f"wrong shape: {'; '.join(wrong)} (sizes are those of config.json, and of {SIZED_BY})"] * bool(wrong)
    if not problems:
        problems = _wrong_dtypes(expected, tensors)
    if problems:
        raise ValueError(
            f"The head {source!r} is not in the official EAGLE-3 layout. {'. '.join(problems)}. "
            "A renamed tensor shows up as one missing and one unexpected name; docs/drafters.md lists the layout."
        )


def _wrong_dtypes(expected: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    wrong = []
    for name in expected:
        dtype, is_offset = tensors[name].dtype, name == "d2t"
        is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if tensors[name].layout != torch.strided or not (is_whole if is_offset else dtype in DTYPES):
            wanted = "whole numbers" if is_offset else "float16, bfloat16, float32 or float64"
            wrong.append(f"{name} is {tensors[name].layout}, {dtype}, expected dense {wanted}")
    return [f"wrong dtype: {'; '.join(wrong)} (quantised heads are not supported)"] * bool(wrong)


def _check_sizes(config: EagleConfig, source: str) -> None:
    """What the tensors agree on among themselves and no head can have."""
    if config.head_dim < 2 or config.head_dim % 2:
        raise ValueError(
            f"The head {source!r} has a head size of {config.head_dim} (rows of midlayer.self_attn.q_proj.weight over "
            f"`num_attention_heads`={config.num_attention_heads} in its config.json), and rotary positions need an "
            "even one. Is `num_attention_heads` right?"
        )
    if not config.intermediate_size or not config.draft_vocab_size:
        raise ValueError(f"The head {source!r} has tensors without rows: the file was not saved whole.")


def draft_ids(config: EagleConfig, offsets: Tensor | None) -> Tensor | None:
    """(Vd,) int64 target id of each draft id from the `d2t` offsets; None where the vocabularies are one.

    Raises:
        ValueError: an id outside the target's vocabulary, or one that two draft ids share.
    """
    if offsets is None or (config.draft_vocab_size == config.vocab_size and not bool(offsets.any())):
        return None
    ids = torch.arange(config.draft_vocab_size, device=offsets.device) + offsets.long()
    outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero().flatten().tolist()
    if outside:
        where = outside[0]
        raise ValueError(
            f"`d2t` maps draft id {where} to {int(ids[where])}, outside the target's vocabulary of "
            f"{config.vocab_size} ({len(outside)} such entries). "
            "`d2t` holds offsets: target id = draft id + d2t[draft id]."
        )
    taken: dict[int, int] = {}
    for draft_id, token in enumerate(ids.tolist()):
        if taken.setdefault(token, draft_id) != draft_id:
            raise ValueError(
                f"`d2t` maps draft ids {taken[token]} and {draft_id} to one target id, {token}, so siblings in a "
                "draft tree would not be distinct. It holds offsets: target id = draft id + d2t[draft id]."
            )
    return ids


def canonical(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official names -> those of `EagleDraft`; projections that read one input are stacked into one matrix."""
    attention = [tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
    renamed = {
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
        renamed["embed_tokens.weight"] = tensors["embed_tokens.weight"]
    return renamed
