"""What a head's config.json says, entry by entry: obeyed, without effect, or refused by name; never ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .compat import activation

NESTED = "eagle_config"
# A head of EAGLE-3's default layers belongs to a target of seven layers or more (2, L // 2 and L - 3 of L).
LEAST_TARGET_LAYERS = 7

READ = {
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "draft_vocab_size",
    "target_hidden_size", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters",
    "eagle_aux_hidden_state_layer_ids", "num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
WITHOUT_EFFECT = {
    # Labels. Published heads of one arithmetic call themselves llama, phi3, gpt_oss or kimi_k2.
    "architectures", "model_type", "target_model_type", "draft_model_type", "modal_type", "torch_dtype", "dtype",
    "transformers_version", "name_or_path", "auto_map", "tokenizer_class", "finetuning_task", "problem_type", "prefix",
    "task_specific_params", "id2label", "label2id", "attn_implementation",
    # What training alone reads.
    "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "embed_requires_grad",
    "router_aux_loss_coef", "gradient_checkpointing", "pretraining_tp", "use_bfloat16",
    # What the tensors decide: all of them are accounted for by name and shape.
    "head_dim", "tie_word_embeddings", "reuse_target_lm_head", "num_aux_hidden_states", "next_layer_regular",
    "num_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token", "moe_intermediate_size",
    "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    # How a model is called, and the defaults that transformers writes into every config.
    "use_cache", "max_window_layers", "chunk_size_feed_forward", "is_decoder", "return_dict", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict_in_generate", "max_length", "min_length", "do_sample",
    "num_beams", "num_beam_groups", "num_return_sequences", "temperature", "top_k", "top_p", "typical_p",
    "length_penalty", "diversity_penalty", "repetition_penalty", "sep_token_id", "decoder_start_token_id",
}  # fmt: skip
# The values of other entries that change nothing; of one that is not here, false, zero and empty ones.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "has_lm_head": (True,),
    "parallel_draft_step": (1,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_type": ("default",),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
}
OFF: tuple[Any, ...] = (False, "", [], {})
SHOWN = 100  # characters of a value in an error


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


def read_config(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> EagleConfig:
    """The head that a config.json describes.

    Args:
        raw: the file's entries.
        tensors: official tensors by name, for the sizes that published configs give wrong now and then.
        source: the head's name in errors.

    Raises:
        ValueError: an entry that is missing, malformed, or changes the head's arithmetic in a way that is not served.
    """
    entries = _Entries(raw, source)
    entries.refuse_unserved()
    hidden, heads = entries.count("hidden_size"), entries.count("num_attention_heads")
    vocabulary, key_heads = entries.count("vocab_size"), entries.count("num_key_value_heads", heads)
    if heads % key_heads:
        raise entries.wrong("num_key_value_heads", f"does not divide `num_attention_heads`={heads}")
    inner, drafts = entries.count("intermediate_size", 4 * hidden), entries.count("draft_vocab_size", vocabulary)
    return EagleConfig(
        hidden_size=hidden,
        target_hidden_size=entries.count("target_hidden_size", hidden),
        intermediate_size=_rows(tensors, "midlayer.mlp.gate_proj.weight", inner),
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=_rows(tensors, "midlayer.self_attn.q_proj.weight", hidden) // heads,
        vocab_size=vocabulary,
        draft_vocab_size=_rows(tensors, "lm_head.weight", drafts),
        rms_norm_eps=entries.number("rms_norm_eps", 1e-6, below=1.0),
        hidden_act=entries.activation(),
        rope_theta=entries.rope_theta(),
        aux_layers=entries.layers(),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_id=raw.get("eos_token_id"),
        pad_token_id=raw.get("pad_token_id"),
        max_position_embeddings=entries.count("max_position_embeddings", None),
    )


def _rows(tensors: Mapping[str, Tensor], name: str, fallback: int) -> int:
    return tensors[name].shape[0] if name in tensors and tensors[name].dim() else fallback


class _Entries:
    """The entries that are set, those inside `eagle_config` among them, and errors that name one as it is written."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._values = {name: value for name, value in raw.items() if value is not None and name != NESTED}
        self._nested: set[str] = set()
        inside = raw.get(NESTED)
        if inside is not None and not isinstance(inside, Mapping):
            raise ValueError(f"The head {source!r} has `{NESTED}`={_shown(inside)} in its config.json, not an object.")
        for name, value in (inside or {}).items():
            if value is None:
                continue
            if name in self._values and self._values[name] != value:
                raise ValueError(
                    f"The head {source!r} has `{name}`={_shown(self._values[name])} in its config.json and "
                    f"{_shown(value)} in its `{NESTED}`. Keep the one that it was trained with."
                )
            self._values[name] = value
            self._nested.add(name)

    def wrong(self, name: str, why: str) -> ValueError:
        """An error about an entry."""
        spelled = f"{NESTED}.{name}" if name in self._nested else name
        return ValueError(
            f"The head {self._source!r} has `{spelled}`={_shown(self._values[name])} in its config.json, which {why}."
        )

    def refused(self, name: str) -> ValueError:
        """An error about an entry whose arithmetic is not this package's."""
        spelled = f"{NESTED}.{name}" if name in self._nested else name
        return ValueError(
            f"The head {self._source!r} sets `{spelled}`={_shown(self._values[name])} in its config.json, which is "
            "not supported: it changes what an official EAGLE-3 head computes, or may do so. Drop the entry if the "
            "head was trained without it."
        )

    def refuse_unserved(self) -> None:
        """Raises for what is neither read nor without effect."""
        for name, value in self._values.items():
            known = name in READ or name in WITHOUT_EFFECT or name.startswith("_")
            if not known and value not in NEUTRAL.get(name, OFF):
                raise self.refused(name)
        layers = self.count("num_hidden_layers", 1)
        # Published configs copy their target's number (36, 40), and a file in the official layout holds one layer.
        if 1 < layers < LEAST_TARGET_LAYERS:
            raise self.refused("num_hidden_layers")
        kinds = self._values.get("layer_types", [])
        is_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
        if not is_full:
            raise self.refused("layer_types")
        if self._values.get("use_sliding_window", False) is not False:
            raise self.refused("use_sliding_window")
        if self._values.get("sliding_window") and "use_sliding_window" not in self._values and not kinds:
            raise self.refused("sliding_window")

    def count(self, name: str, default: Any = ...) -> Any:
        """A whole number of at least 1; without a default it must be there."""
        if name not in self._values:
            if default is ...:
                raise ValueError(
                    f"The head {self._source!r} has no `{name}` in its config.json: it is incomplete, or no EAGLE-3 "
                    "head's."
                )
            return default
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "must be a whole number of at least 1, without quotes")
        return value

    def number(self, name: str, default: float, below: float = math.inf) -> float:
        """A positive number below a bound."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < below:
            bound = "" if math.isinf(below) else f" below {below:g}"
            raise self.wrong(name, f"must be a positive number{bound}, without quotes")
        return float(value)

    def activation(self) -> str:
        """The name of an activation of transformers that has no weights of its own."""
        name = self._values.get("hidden_act", "silu")
        try:
            function = activation(str(name))
        except (KeyError, AttributeError):
            function = None
        if function is None or (isinstance(function, nn.Module) and any(True for _ in function.parameters())):
            raise self.wrong("hidden_act", "is no activation of transformers without weights, such as silu or gelu")
        return name

    def layers(self) -> tuple[int, ...] | None:
        """The layers whose inputs the head reads; None where none are named."""
        name = "eagle_aux_hidden_state_layer_ids"
        if name not in self._values:
            return None
        ids = self._values[name]
        if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise self.wrong(name, "must be a list of layer numbers from 0 on")
        return tuple(ids)

    def rope_theta(self) -> float:
        """The rotary base: 10000 where the config names none, whatever the target's is."""
        base = self.number("rope_theta", 10000.0)
        for name in ("rope_scaling", "rope_parameters"):
            entry = self._values.get(name)
            if not entry:
                continue
            if not isinstance(entry, Mapping) or not _is_plain(entry):
                raise self.refused(name)
            own = entry.get("rope_theta")
            if own is None:
                continue
            if isinstance(own, bool) or not isinstance(own, (int, float)) or not 0.0 < own < math.inf:
                raise self.wrong(name, "must have a positive number as `rope_theta`, without quotes")
            if "rope_theta" in self._values and own != base:
                raise self.wrong(name, f"contradicts `rope_theta`={base:g}: keep the base it was trained with")
            base = float(own)
        return base


def _is_plain(rope: Mapping[str, Any]) -> bool:
    """Whether a rotary entry describes plain positions, with every channel turned and nothing scaled."""
    plain = {"rope_type": ("default", "linear"), "type": ("default", "linear"), "factor": (1,)}
    plain |= {"partial_rotary_factor": (1,)}
    rest = {name: value for name, value in rope.items() if value is not None and name != "rope_theta"}
    return all(value in plain.get(name, OFF) for name, value in rest.items()) and (
        "linear" not in rest.values() or "factor" in rest
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
