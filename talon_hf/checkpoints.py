"""Published EAGLE-3 checkpoints -> the canonical head that `eagle.py` builds.

Raw JSON and raw tensors are read, since the classes that a head's config.json names (a Llama) are not what the file
holds. Loading is strict: every tensor is accounted for by name and shape, or the error says which is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from safetensors.torch import load_file
from torch import Tensor

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
HEAD_FILES = f"config.json and {' or '.join(WEIGHT_FILES)}"
# Training keeps the set of drafted tokens beside their offsets; drafting reads the offsets alone.
UNUSED = ("t2d",)
SIZED_BY = "midlayer.self_attn.q_proj.weight, midlayer.mlp.gate_proj.weight and lm_head.weight"


@dataclass(frozen=True)
class EagleConfig:
    """What a head is, from its config.json and, where those are known to lie, its tensors.

    Attributes:
        hidden_size: h, the head's width.
        target_hidden_size: width of one target feature.
        vocab_size: V, the target's vocabulary. draft_vocab_size: Vd, the head's.
        aux_layers: boundaries of the target features, or None for EAGLE-3's layers 2, L//2 and L-3.
        bos_token_id, eos_token_id, pad_token_id: the target's, which pipelines compare.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    rope_theta: float
    aux_layers: tuple[int, ...] | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    max_position_embeddings: int | None

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> EagleConfig:
        """Itself; pipelines ask every assistant for it."""
        return self


def read_checkpoint(source: str | Path, **hub: Any) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Reads a head from a folder or a Hub repository.

    Args:
        source: folder, or Hub id; a folder of a repository is "org/repository/folder".
        hub: `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only` and the like.

    Returns:
        the config and the official tensors by name, checked against each other.

    Raises:
        OSError: no config.json or weights there.
        ValueError: a tensor or a config entry that the official EAGLE-3 layout does not have, named.
    """
    raw = json.loads(_file(source, ("config.json",), **hub).read_text())
    path = _file(source, WEIGHT_FILES, **hub)
    if path.suffix == ".safetensors":
        tensors = load_file(path)
    else:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    config = _config(raw, tensors, source)
    _check_tensors(config, tensors, source)
    return config, tensors


def _file(source: str | Path, names: tuple[str, ...], subfolder: str | None = None, **hub: Any) -> Path:
    wanted = " or ".join(names)
    if Path(source).is_dir():
        folder = Path(source, subfolder or "")
        for name in names:
            if (folder / name).is_file():
                return folder / name
        raise FileNotFoundError(f"No {wanted} in {str(folder)!r}: an EAGLE-3 head is a folder with {HEAD_FILES}.")
    owner, *rest = str(source).split("/")
    repository = "/".join([owner, *rest[:1]])
    below = "/".join([*rest[1:], *([subfolder] if subfolder else [])]) or None
    absent: EntryNotFoundError | None = None
    for name in names:
        try:
            return Path(hf_hub_download(repository, name, subfolder=below, **hub))
        except EntryNotFoundError as error:
            absent = error
        except HFValidationError as error:
            raise FileNotFoundError(
                f"{str(source)!r} is neither a folder nor a Hub id such as 'org/head' or 'org/repository/head'."
            ) from error
    raise FileNotFoundError(
        f"No {wanted} under {str(source)!r} on the Hub, or the Hub is out of reach and the local cache lacks it. "
        f"An EAGLE-3 head is a folder with {HEAD_FILES}."
    ) from absent


def _config(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str | Path) -> EagleConfig:
    for name in ("hidden_size", "num_attention_heads", "vocab_size"):
        if name not in raw:
            raise ValueError(
                f"The head {str(source)!r} has no `{name}` in its config.json: it is incomplete, or no EAGLE-3 head's."
            )
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    # Published configs give a wrong head_dim or draft vocabulary now and then; a tensor cannot.
    head_dim = _rows(tensors, "midlayer.self_attn.q_proj.weight", hidden) // heads
    layers = raw.get("eagle_aux_hidden_state_layer_ids")
    return EagleConfig(
        hidden_size=hidden,
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        intermediate_size=_rows(tensors, "midlayer.mlp.gate_proj.weight", raw.get("intermediate_size", 4 * hidden)),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=raw["vocab_size"],
        draft_vocab_size=_rows(tensors, "lm_head.weight", raw.get("draft_vocab_size") or raw["vocab_size"]),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        hidden_act=raw.get("hidden_act", "silu"),
        rope_theta=_rope_theta(raw, source),
        aux_layers=tuple(layers) if layers else None,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_id=raw.get("eos_token_id"),
        pad_token_id=raw.get("pad_token_id"),
        max_position_embeddings=raw.get("max_position_embeddings"),
    )


def _rope_theta(raw: Mapping[str, Any], source: str | Path) -> float:
    """The rotary base: 10000 where the config names none, whatever the target's is."""
    for name in ("rope_scaling", "rope_parameters"):
        entry = raw.get(name) or {}
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind != "default" or "factor" in entry:
            raise ValueError(
                f"The head {str(source)!r} sets `{name}`={entry!r}, which is not supported: official EAGLE-3 heads "
                "use plain rotary positions. Drop the entry if the head was trained without it."
            )
    return float(raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta") or 10000.0)


def _rows(tensors: Mapping[str, Tensor], name: str, fallback: int) -> int:
    return tensors[name].shape[0] if name in tensors else fallback


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


def _check_tensors(config: EagleConfig, tensors: Mapping[str, Tensor], source: str | Path) -> None:
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
    if problems:
        raise ValueError(
            f"The head {str(source)!r} is not in the official EAGLE-3 layout. {'. '.join(problems)}. "
            "A renamed tensor shows up as one missing and one unexpected name; docs/drafters.md lists the layout."
        )


def draft_ids(config: EagleConfig, offsets: Tensor | None) -> Tensor | None:
    """(Vd,) int64 target id of each draft id from the `d2t` offsets; None where the vocabularies are one.

    Raises:
        ValueError: an id outside the target's vocabulary, or one that two draft ids share.
    """
    if offsets is None or (config.draft_vocab_size == config.vocab_size and not bool(offsets.any())):
        return None
    ids = torch.arange(config.draft_vocab_size) + offsets.long()
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
