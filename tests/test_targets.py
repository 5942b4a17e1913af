"""Architectures: a tree scores as its paths do, and the text is plain `generate`'s; or the model is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import transformers
from models import COMMON, VOCABULARY, drafter_zoo, random_head, with_random_weights
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from talon_hf import check_target, generate

WINDOW = {"sliding_window": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SMALL_TABLE = {"vocab_size_per_layer_input": VOCABULARY}
LOOPED = {
    "n_input_layers": 2, "n_output_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 4
}  # fmt: skip
SHARED = {
    "num_kv_shared_layers": 3,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention", "full_attention"],
}
ALTUP = {"hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 4}
GPT = {"n_positions": 256, "n_ctx": 256, "n_embd": 32, "n_layer": 8, "n_head": 4}
# A head_dim of None leaves the argument out, for configs that derive it.
VERIFIED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "mixtral": WINDOW | EXPERTS,
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 4},
    "qwen2_moe": EXPERTS,
    "qwen3": WINDOW | {"use_sliding_window": True, "max_window_layers": 4},
    "qwen3_moe": EXPERTS,
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gemma4_text": WINDOW | SMALL_TABLE,
    "gpt2": GPT,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False, "head_dim": None},
    "gpt_neox": {},
    "gptj": GPT | {"rotary_dim": 8},
    "codegen": GPT | {"rotary_dim": 8},
    "gpt_bigcode": GPT,
    "phi": {},
    "phi3": WINDOW,
    "phimoe": WINDOW | EXPERTS,
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "starcoder2": WINDOW,
    "stablelm": {},
    "granite": {},
    "granitemoe": EXPERTS,
    "cohere": {},
    "cohere2": WINDOW,
    "deepseek_v2": LATENT | ROUTED | EXPERTS | {"head_dim": None, "num_key_value_heads": 4},
    "deepseek_v3": LATENT | ROUTED | EXPERTS | {"head_dim": None, "num_key_value_heads": 4},
    "glm": {},
    "glm4": {},
    "ernie4_5": {},
    "smollm3": WINDOW,
    "nemotron": {},
    "persimmon": {},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 8},
    "exaone4": WINDOW,
    "gpt_oss": WINDOW | EXPERTS | {"rope_scaling": None},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 8, "attention_heads": 4},
    "biogpt": {},
    "helium": {},
    "arcee": {},
    "seed_oss": {},
    "dots1": ROUTED | EXPERTS,
    "hunyuan_v1_dense": {},
    "apertus": {},
    "bitnet": {},
    "minimax_m2": EXPERTS,
    "nanochat": {},
    "vaultgemma": WINDOW,
    "ministral": WINDOW,
    "afmoe": WINDOW | EXPERTS,
    "beam": WINDOW | EXPERTS | {"n_group": 1, "topk_group": 1},
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "cohere2_moe": WINDOW | EXPERTS,
    "ctrl": {"n_embd": 32, "n_layer": 8, "n_head": 4, "dff": 48, "n_positions": 256},
    "diffllama": {},
    "dory": WINDOW | LOOPED,
    "exaone_moe": WINDOW | EXPERTS,
    "flex_olmo": EXPERTS,
    "glm4_moe_lite": LATENT | ROUTED | EXPERTS | {"head_dim": None, "num_key_value_heads": 4},
    "granite_swa": WINDOW,
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "head_dim": None},
    "kolibri1": WINDOW | EXPERTS | {"shared_expert_intermediate_size": 16},
    "laguna": WINDOW | EXPERTS | {"shared_expert_intermediate_size": 16},
    "lfm2_moe": EXPERTS | {"layer_types": ["full_attention"] * 8},
    "mellum": WINDOW | EXPERTS,
    "mimo_v2_flash": WINDOW | EXPERTS | ROUTED,
    "minicpm3": LATENT | {"head_dim": None, "num_key_value_heads": 4},
    "ministral3": WINDOW,
    "axk1": LATENT | ROUTED | EXPERTS | {"head_dim": None, "num_key_value_heads": 4},
    "gemma4_text, shared keys": WINDOW | SMALL_TABLE | SHARED,
    "modernbert-decoder": {"local_attention": 24},
}
# Before that version of transformers they are refused.
SINCE = {
    "xglm": ("5.17", "other way round"),
    "ctrl": ("5.17", "takes no 4D attention mask"),
    "bert": ("5.0", "takes no 4D attention mask"),
    "roberta": ("5.0", "takes no 4D attention mask"),
}
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {},
    "mpt": {"d_model": 32, "n_layers": 8, "n_heads": 4},
    "bloom": {"n_layer": 8, "n_head": 4},
    "qwen3_next": EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 4},
    "deepseek_v32": LATENT | ROUTED | EXPERTS | {"head_dim": None, "num_key_value_heads": 4},
    "minimax": EXPERTS,
    "deepseek_v4": {},
    "zaya": {},
    "roformer": {},
    "openai-gpt": {},
    "reformer": {"axial_pos_embds": False, "is_decoder": True, "attn_layers": ["local", "lsh"] * 4},
    "xlm": {},
    "dory": WINDOW | LOOPED | {"recurrent_kv_cache_mode": "last_loop"},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]], "num_layers": 8, "num_heads": 4, "window_size": 12},
}
PROMPT = torch.arange(3, 17).unsqueeze(0)


def random_model(name: str, options: dict[str, Any]) -> PreTrainedModel:
    name = name.split(",")[0]
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    chosen = {**COMMON, "eos_token_id": None, **options}
    config = CONFIG_MAPPING[name](
        **{key: value for key, value in chosen.items() if (key, value) != ("head_dim", None)}
    )
    return with_random_weights(AutoModelForCausalLM.from_config(config), 0.15).eval()


# One of each kind of attention, positions, experts and treatment; the sweep of all the others is slow.
KINDS = (
    "llama", "mixtral", "qwen2", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "falcon", "gptj", "phi3", "cohere2",
    "deepseek_v3", "llama4_text", "gpt_oss", "xglm", "bert", "ctrl", "dory", "gemma4_text, shared keys",
    "modernbert-decoder",
)  # fmt: skip
SWEEP = [pytest.param(name, marks=() if name in KINDS else (pytest.mark.slow, pytest.mark.sweep)) for name in VERIFIED]


@pytest.mark.conformance
@pytest.mark.parametrize("name", SWEEP)
def test_trees_are_scored_right_and_the_text_is_plain_generates(name: str) -> None:
    version, sizes = Version(transformers.__version__), VERIFIED[name]
    if name == "phimoe" and version < Version("5"):
        # In this version its own cached decoding across a window differs from decoding without a cache.
        sizes = EXPERTS
    model = random_model(name, sizes)
    since, why = SINCE.get(name, ("4", ""))
    if version < Version(since):
        with pytest.raises(ValueError, match=why):
            check_target(model)
        return
    assert check_target(model) < 1e-4
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None
    }  # fmt: skip
    want = model.generate(PROMPT, **options)
    got = generate(PROMPT, model=model, assistant_model=random_head(model), talon_node_budget=12, **options)
    assert got.tolist() == want.tolist()
    assert want.shape[1] == PROMPT.shape[1] + 12


@pytest.mark.conformance
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_state_cannot_branch_is_refused_by_name(name: str) -> None:
    model = random_model(name, REFUSED[name])
    with pytest.raises(ValueError, match=type(model).__name__.removesuffix("ForCausalLM")):
        check_target(model)


@pytest.mark.conformance
def test_gemma_3n_verifies_trees_but_hands_on_no_state_that_a_head_reads() -> None:
    """Its layers pass on several states a token (AltUp), so a head is refused; other drafters are served."""
    model = random_model("gemma3n_text", WINDOW | SMALL_TABLE | SHARED | ALTUP)
    assert check_target(model) < 1e-4
    options: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 12, "do_sample": False}
    want = model.generate(PROMPT, **options)
    drafter = drafter_zoo(want.tolist(), model)["good"]
    got = generate(PROMPT, model=model, assistant_model=drafter, **options)
    assert got.tolist() == want.tolist()
    assert len(set(want[0].tolist())) > 15, "the text is too dull to compare"
    with pytest.raises(ValueError, match=r"Gemma3nForCausalLM hands \(4, 1, 14, 32\) states from layer to layer"):
        generate(PROMPT, model=model, assistant_model=random_head(model), **options)


def test_a_model_that_ignores_its_mask_is_caught() -> None:
    model = random_model("llama", {})
    forward = model.forward

    def deaf(*args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, position_ids=position_ids, **kwargs)

    model.forward = deaf
    with pytest.raises(ValueError, match="scores a draft tree wrong"):
        check_target(model)


def test_the_check_takes_under_a_second() -> None:
    model = random_model("llama", {"vocab_size": VOCABULARY})
    begin = time.perf_counter()
    check_target(model)
    assert time.perf_counter() - begin < 1.0
