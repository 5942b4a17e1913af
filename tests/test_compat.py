"""Undocumented names of transformers: without any of them the text is plain's, or an error names the versions."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from calls import BATCH, BATCH_MASK, NEW, PROMPT, plain, sequences, talon
from models import random_head, tiny_model
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from talon_hf import compat
from talon_hf.checks import refuse_target
from talon_hf.compat import NAMES, TESTED, cache_keyword

PACKAGE = Path(compat.__file__).parent
Call = Callable[[PreTrainedModel, pytest.MonkeyPatch], tuple[Any, Any]]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


def both(model: Any, ids: Tensor = PROMPT, base: Any = None, **options: Any) -> tuple[Any, Any]:
    """Plain's output and ours, with a head that was made for `base`."""
    options = {"max_new_tokens": NEW, **options}
    ours = {name: value for name, value in options.items() if name not in ("cache", "past_key_values")}
    return plain(model, ids, **ours), talon(model, ids, random_head(base or model, seed=3), **options)


def with_a_cache(model: PreTrainedModel, cache: Any) -> tuple[Any, Any]:
    return both(model, **{cache_keyword(model): cache})


def with_an_attention_that_takes_no_tree(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> Any:
        assert query.shape[2] in (1, PROMPT.shape[1]), "a tree came here"
        return sdpa(module, query, *args, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    want = plain(model, PROMPT, max_new_tokens=NEW)
    model.config._attn_implementation = "flash_attention_2"
    return want, talon(model, PROMPT, random_head(model, seed=3), max_new_tokens=NEW)


def of_two_rows(model: PreTrainedModel, _: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The end token comes early in one row, which is then padded."""
    end = int(plain(model, BATCH, attention_mask=BATCH_MASK, max_new_tokens=NEW)[0, BATCH.shape[1] + 2])
    model.generation_config.pad_token_id = None
    return both(model, BATCH, attention_mask=BATCH_MASK, eos_token_id=[end, 2])


def of_a_compiled_model(model: PreTrainedModel, _: pytest.MonkeyPatch) -> tuple[Any, Any]:
    torch._dynamo.reset()
    return both(torch.compile(model, backend="eager"), base=model)


def of_a_compiled_forward(model: PreTrainedModel, _: pytest.MonkeyPatch) -> tuple[Any, Any]:
    torch._dynamo.reset()
    model.lm_head.forward = torch.compile(model.lm_head.forward, backend="eager")
    return both(model)


def with_adapters(model: PreTrainedModel, _: pytest.MonkeyPatch) -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return both(adapted, base=model)


def with_a_forward_that_accelerate_replaced(model: PreTrainedModel, _: pytest.MonkeyPatch) -> tuple[Any, Any]:
    hooks = pytest.importorskip("accelerate").hooks
    hooks.add_hook_to_module(model.lm_head, hooks.ModelHook())
    return both(model)


def of_candidates_without_a_base_class(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    base = compat.read(transformers.generation, "CandidateGenerator", object)
    monkeypatch.setattr(compat, "CandidateGenerator", base)
    spec: Any = importlib.util.find_spec("talon_hf.candidates")
    anew = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "talon_hf.candidates", anew)
    spec.loader.exec_module(anew)
    assert anew.TalonCandidateGenerator.__bases__ == (object,)
    decoding = importlib.import_module("talon_hf.decoding")
    monkeypatch.setattr(decoding, "TalonCandidateGenerator", anew.TalonCandidateGenerator)
    return both(model)


def of_a_gguf_file(model: PreTrainedModel, _: pytest.MonkeyPatch) -> tuple[Any, Any]:
    assert compat.dense_gguf("x.gguf") == {"gguf_file": "x.gguf"}
    return both(model)


class Offloading(DynamicCache):
    """A cache that says so under the name that is taken away."""

    offloading = True


class CompressedCache(DynamicCache):
    """A quantised cache under another name."""


def of_rows_with(**options: Any) -> Call:
    """Of a padded batch with a processor that may hold something for each row."""
    return lambda model, _: both(model, BATCH, attention_mask=BATCH_MASK, **options)


# A call that reads the name; what is not here is read by `both` on a Llama.
CALLS: dict[str, Call] = {
    "_supports_sdpa": with_an_attention_that_takes_no_tree,
    "_pad_token_tensor": of_two_rows,
    "offloading": lambda model, _: with_a_cache(model, Offloading()),
    "QuantizedCache": lambda model, _: with_a_cache(model, CompressedCache()),
    "active_peft_config": with_adapters,
    "_hf_hook": with_a_forward_that_accelerate_replaced,
    "_orig_mod": of_a_compiled_model,
    "_torchdynamo_orig_callable": of_a_compiled_forward,
    "CandidateGenerator": of_candidates_without_a_base_class,
    "GgufConfig": of_a_gguf_file,
    "encoder_input_ids": of_rows_with(encoder_repetition_penalty=1.7),
    "generated_ngrams": of_rows_with(encoder_no_repeat_ngram_size=1),
    "batch_size": of_rows_with(encoder_no_repeat_ngram_size=1),
    "unconditional_context": of_rows_with(guidance_scale=1.7),
    "prompt_ignore_length": of_rows_with(repetition_penalty=1.5),
}
STOP = {name for name, (_, without) in NAMES.items() if without == compat.STOPS}
NOT_READ = {"QuantizedCache", "get_extended_attention_mask"}  # looked for in another way than by `read`


def take_away(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Leaves nothing under a name for `compat.read` to find, while transformers itself still has it.

    Returns a list that gets every owner whose name was asked for.
    """
    read, asked = compat.read, []

    def without(owner: Any, which: str, *otherwise: Any) -> Any:
        if which == name:
            asked.append(owner)
            owner = object()
        return read(owner, which, *otherwise)

    monkeypatch.setattr(compat, "read", without)
    return asked


@pytest.mark.conformance
@pytest.mark.parametrize("name", sorted(NAMES))
def test_without_a_name_the_text_is_plains_or_an_error_names_the_versions(
    name: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS.get(name, lambda model, _: both(model))
    asked = take_away(name, monkeypatch)
    if name in STOP:
        with pytest.raises(ValueError, match=name) as caught:
            call(model, monkeypatch)
        for version in (transformers.__version__, *TESTED):
            assert version in str(caught.value)
        assert NAMES[name][0] in str(caught.value)
    else:
        want, out = call(model, monkeypatch)
        assert sequences(out) == sequences(want)
    assert asked or name in NOT_READ


# Recurrence ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXED: dict[str, Any] = SMALL | HEADS | {"layer_types": ["linear_attention", "full_attention"] * 2}
RECURRENT: dict[str, dict[str, Any]] = {
    "Mamba": SMALL | {"state_size": 4},
    "Mamba2": SMALL | {"state_size": 4, "head_dim": 8, "num_heads": 8, "n_groups": 1},
    "Jamba": SMALL | HEADS | {"num_experts": 2},
    "FalconH1": SMALL | HEADS,
    "RecurrentGemma": SMALL | {"num_attention_heads": 4, "lru_width": 32},
    "Qwen3Next": MIXED | {"num_experts": 2},
    "Lfm2": SMALL | HEADS | {"layer_types": ["conv", "full_attention"] * 2},
    "Rwkv": {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2},
}


@pytest.mark.conformance
@pytest.mark.parametrize("said", [True, False], ids=["as it is", "without the name"])
@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_model_is_refused_whoever_says_that_it_is_one(
    family: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not said:
        take_away("_is_stateful", monkeypatch)
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(**RECURRENT[family])
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with pytest.raises(ValueError, match="Call `generate` without `custom_generate`") as caught:
        refuse_target(model.eval())
    if family != "Rwkv":  # whose forward shows its state by taking no positions
        assert "state follows one sequence and cannot branch" in str(caught.value)


@pytest.mark.conformance
def test_a_newer_version_than_the_newest_tested_one_is_served(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = max(compat.TRANSFORMERS, *map(Version, TESTED))
    if Version("5.24") <= compat.TRANSFORMERS:  # what is new in it must be there
        monkeypatch.setattr(compat, "TRANSFORMERS", Version(f"{newest.major + 1}.0"))
    want, out = both(model)
    assert sequences(out) == sequences(want)


# The table and the code ----------------------------------------------------------------------------------------------


def strings(tree: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """What a module defines itself: functions, and attributes that it sets on `self`."""
    defined = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    stores = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return defined | {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


def foreign_reads(tree: ast.AST) -> list[str]:
    """Private names of others, and modules inside transformers, that a module reads."""
    own, found = own_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (private(node.attr) or node.attr in ELSEWHERE):
            found += [ast.unparse(node)] * (node.attr not in own)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names = [n.value for n in node.args[1:2] if isinstance(n, ast.Constant)]
            found += [name for name in names if private(name) or name in NAMES]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inside = str(node.module).startswith("transformers.") and node.module not in DOCUMENTED
            found += [str(node.module)] * inside
    return found


# Names without an underscore that stand for a behaviour.
ELSEWHERE = ("model_type", "__code__", "active_peft_config", "layer_class_to_replicate")
# Modules whose names transformers documents under this path.
DOCUMENTED = ("transformers.generation", "transformers.utils")


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_undocumented_names_are_read_in_one_file(path: Path) -> None:
    if path.stem != "compat":
        assert foreign_reads(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    ["model._is_stateful", "getattr(x, '_attn_implementation', None)", "hasattr(cache, 'offloading')",
     "from transformers.generation.utils import StopCheck", "self._inherited", "c.model_type == 'x'"],
)  # fmt: skip
def test_a_read_elsewhere_is_found(line: str) -> None:
    assert foreign_reads(ast.parse(line))


def test_the_table_lists_what_is_read() -> None:
    code = ast.parse((PACKAGE / "compat.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(code) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    asked = {n.args[1].value for n in calls if n.func.id == "read" and isinstance(n.args[1], ast.Constant)}
    assert asked == set(NAMES) - NOT_READ
    body = [n for n in code.body if not (isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "NAMES")]
    used = {n.attr for part in body for n in ast.walk(part) if isinstance(n, ast.Attribute)}
    assert set(NAMES) - {"QuantizedCache"} <= used | set().union(*map(strings, body))
