"""Targets that something was done to: adapters, quantised linears, offloaded layers, compilation, low precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from calls import NEW, PROMPT, plain, sequences, talon
from models import IMAGE_PROMPT, drafter_zoo, image, image_model, random_head, tiny_model
from packaging.version import Version

pytestmark = pytest.mark.conformance


def same_text(model: Any, ids: torch.Tensor = PROMPT, base: Any = None, **options: Any) -> list[list[int]]:
    """The one text that plain `generate` and TALON with a random head and with a good drafter give.

    The drafters are made for `base`, the model itself or the one inside a wrapper.
    """
    want = sequences(plain(model, ids, max_new_tokens=NEW, **options))
    base = model if base is None else base
    for drafter in (random_head(base, seed=3), drafter_zoo(want, base)["good"]):
        out = talon(model, ids, drafter, max_new_tokens=NEW, return_dict_in_generate=True, **options)
        assert sequences(out) == want
    assert out.talon_stats.tau > 1.0
    return want


def fp32(family: str = "llama") -> Any:
    return tiny_model(family, dtype=torch.float32, eos_token_id=None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_cpu(dtype: torch.dtype) -> None:
    """Both texts are the model's own; they may part only where its two best logits are equal within rounding."""
    model = tiny_model("llama", dtype=dtype, eos_token_id=None)
    want = plain(model, PROMPT, max_new_tokens=NEW)[0]
    got = talon(model, PROMPT, random_head(model, seed=3), max_new_tokens=NEW)[0]
    parts = (want != got).nonzero().flatten()
    if len(parts):
        logits = model(input_ids=want[None, : int(parts[0])]).logits[0, -1].float()
        best = logits.topk(2).values
        assert float(best[0] - best[1]) <= 4 * torch.finfo(dtype).eps * float(best[0].abs())


# The whole model takes seconds to compile.
WHOLE = [pytest.param(how, marks=pytest.mark.slow) for how in ("model.compile()", "model.forward")]


@pytest.mark.parametrize("how", ["torch.compile(model)", *WHOLE, "one layer"])
def test_a_compiled_model(how: str) -> None:
    model: Any = fp32()
    torch._dynamo.reset()
    compiled = model
    if how == "torch.compile(model)":
        compiled = torch.compile(model, backend="eager")
    elif how == "model.compile()":
        model.compile(backend="eager")
    elif how == "model.forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        model.model.layers[4].compile(backend="eager")
    same_text(compiled, base=model)


def test_a_model_with_lora_adapters() -> None:
    peft = pytest.importorskip("peft")
    base = fp32()
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.5)
    with adapted.disable_adapter():
        unadapted = plain(adapted, PROMPT, max_new_tokens=NEW)
    want = plain(adapted, PROMPT, max_new_tokens=NEW)
    assert want.tolist() != unadapted.tolist()
    got = talon(adapted, PROMPT, random_head(base, seed=3), max_new_tokens=NEW)
    assert got.tolist() == want.tolist()
    string_form = adapted.generate(
        input_ids=PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=NEW,
        do_sample=False,
        custom_generate=str(Path(__file__).parent.parent),
        trust_remote_code=True,
        assistant_model=random_head(base, seed=3),
    )
    assert string_form.tolist() == want.tolist()


def test_prompt_learning_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    base = fp32()
    tuned = peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="PROMPT_TUNING"):
        talon(tuned, PROMPT, random_head(base), max_new_tokens=4)


def test_linears_quantised_to_int8_weights() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = fp32()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ != "Parameter"
    same_text(model)


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_layers_offloaded_by_accelerate(where: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    whole = fp32()
    whole.save_pretrained(tmp_path / "model")
    layers = {f"model.layers.{i}": where if i >= 4 else "cpu" for i in range(8)}
    device_map = {
        "model.embed_tokens": where,
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
        **layers,
    }
    model = accelerate.dispatch_model(
        whole, device_map, main_device="cpu", offload_dir=str(tmp_path / "offload"), force_hooks=True
    )
    if where == "disk":
        assert model.model.layers[7].mlp.up_proj.weight.device.type == "meta"
        assert model.get_input_embeddings().weight.device.type == "meta"
    same_text(model)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5"), reason="the config differs")
def test_a_multimodal_model_called_with_text_alone_and_with_an_image() -> None:
    model = image_model()
    same_text(model)
    texts = [same_text(model, IMAGE_PROMPT, pixel_values=image(seed)) for seed in (1, 2)]
    assert texts[0] != texts[1], "the image changes nothing, so nothing was tested"
