"""Two more devices, made of CPU memory, for a machine that has none; a script, as they change torch for good.

A `Far` tensor says that it lies on `far:0` or `far:1` and refuses, as CUDA does, to be mixed with tensors of another
device. `python second_device.py` runs every scenario and prints, as JSON, what each one came to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from models import random_head, tiny_model, zoo_drafter
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

PROMPTS = torch.tensor([[7, 11, 3, 42, 5, 9, 23], [0, 0, 3, 4, 5, 6, 8]])
NEW = 6
# Operators that may read one device and write another, and those whose indices may lie on the CPU.
COPIES = {"_to_copy", "copy_", "_copy_from"}
INDEXED = {"index", "index_put_", "_index_put_impl_"}


class Far(torch.Tensor):
    """A tensor of a far device; `near` holds its values."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor, device: torch.device) -> Far:
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        far = torch.Tensor._make_wrapper_subclass(cls, near.size(), device=device, **layout)
        far.near = near
        return far

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def nearby(value: Any) -> Any:
    """The CPU tensor or device that stands for a far one."""
    if isinstance(value, Far):
        return value.near
    return torch.device("cpu") if isinstance(value, torch.device) else value


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the values and puts what it makes on the device of its inputs, or on the one asked for."""
    name = func.overloadpacket.__name__
    leaves = tree_leaves((args, kwargs))
    # Scalars may come from the CPU.
    devices = {a.device for a in leaves if isinstance(a, Tensor) and (a.dim() or isinstance(a, Far))}
    if name in INDEXED and args[0].device.type == "far":
        devices.discard(torch.device("cpu"))
    if len(devices) > 1 and name not in COPIES:
        raise RuntimeError(f"Expected all tensors to be on the same device, {func} found {sorted(map(str, devices))}")
    made = func(*tree_map(nearby, args), **tree_map(nearby, kwargs))
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    where = kwargs.get("device") or next(iter(devices), torch.device("cpu"))
    return put(made, torch.device(where))


def put(made: Any, where: torch.device) -> Any:
    if where.type != "far":
        return made
    return tree_map(lambda out: Far(out, where) if isinstance(out, Tensor) else out, made)


def register() -> torch.library.Library:
    """Makes "far" a device of torch; the operators below never see a `Far`, so they are given kernels by name."""
    backend_registration._setup_privateuseone_for_python_backend("far")
    library = torch.library.Library("aten", "IMPL")

    def factory(operator: Any) -> Callable[..., Any]:
        def make(*args: Any, device: torch.device, pin_memory: Any = None, **options: Any) -> Any:
            given = {key: value for key, value in options.items() if value is not None}
            return put(operator(*args, **given), torch.device(device))

        return make

    aten = torch.ops.aten
    for name in (
        "empty.memory_format",
        "empty_strided",
        "arange",
        "arange.start",
        "arange.start_step",
        "eye",
        "eye.m",
    ):
        operator, _, overload = name.partition(".")
        library.impl(name, factory(getattr(getattr(aten, operator), overload or "default")), "PrivateUse1")

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        nearby(target).copy_(nearby(source))
        return target

    library.impl("_copy_from", copy_from, "PrivateUse1")
    # No allocator stands behind CPU memory in disguise: torch's own function asks for one, and finds nothing to empty.
    torch.accelerator.empty_cache = lambda: None
    return library


# The upper half lies on another far device than the lower half.
DEVICE_MAP = {
    "model.embed_tokens": "far:0",
    "model.rotary_emb": "far:0",
    **{f"model.layers.{i}": "far:0" if i < 4 else "far:1" for i in range(8)},
    "model.norm": "far:1",
    "lm_head": "far:1",
}


def dispatched(model: Any) -> Any:
    """The model split as `device_map` does it."""
    import accelerate

    return accelerate.dispatch_model(model, DEVICE_MAP, main_device="far:0", force_hooks=True)


def hooked(model: Any) -> Any:
    """The model split by hooks written here, so that a split is tested whatever accelerate asks of a device."""

    def bring(where: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            return tree_map(lambda value: value.to(where) if isinstance(value, Tensor) else value, (args, kwargs))

        return hook

    for name, where in DEVICE_MAP.items():
        model.get_submodule(name).to(where).register_forward_pre_hook(bring(where), with_kwargs=True)
    return model


SPLITS = {"dispatched": dispatched, "hooked": hooked}


def texts(model: Any, drafter: Any, **options: Any) -> list[list[int]]:
    from talon_hf import generate

    ids = PROMPTS.to(model.device)
    torch.manual_seed(5)
    options = {
        "attention_mask": (ids > 0).long(),
        "max_new_tokens": NEW,
        "talon_node_budget": 8,
        "talon_check": False,
        **options,
    }
    output = generate(ids, model=model, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert output.sequences.device == ids.device, "the text is not where the prompt was"
    assert output.talon_stats.rounds > 0
    return output.sequences.tolist()


# Where the target lies, where the head does, and what else the call is given.
SCENARIOS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "head far": ("cpu", "far:0", {}),
    "target far": ("far:0", "cpu", {}),
    "both far": ("far:0", "far:0", {}),
    "two far devices": ("far:0", "far:1", {"output_scores": True, "output_logits": True, "talon_check": True}),
    "eagle policy": ("far:0", "far:1", {"talon_policy": "eagle", "repetition_penalty": 1.2}),
    "split target": ("dispatched", "cpu", {}),
    "split target, head beside its end": ("dispatched", "far:1", {}),
    "target split by hooks": ("hooked", "far:0", {}),
}


def scenario(where: str, head_device: str, options: dict[str, Any]) -> str:
    """The word "same" if the text is that of plain `generate` on the CPU."""
    model = tiny_model("mistral", eos_token_id=None)
    mask = (PROMPTS > 0).long()
    for_plain = {key: value for key, value in options.items() if not key.startswith(("talon_", "output_"))}
    want = model.generate(PROMPTS, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **for_plain)
    continuations = [row[int((keep == 0).sum()) :].tolist() for row, keep in zip(want, mask, strict=True)]
    head = random_head(model, seed=3, draft_vocabulary=17).to(head_device)
    good = zoo_drafter("good", continuations, model)
    model = SPLITS[where](model) if where in SPLITS else model.to(where)
    for drafter in (head, good) if head_device in ("cpu", "far:0") else (head,):
        got = texts(model, drafter, do_sample=False, **options)
        if got != want.tolist():
            return f"{type(drafter).__name__} made it {got}, plain generate {want.tolist()}"
    return "same"


def residual_acceptance() -> str:
    """The word "same" if the residual rule, sampling, gives on a far device the text that it gives on the CPU.

    The draws are the CPU's, so the texts are equal; that the CPU's text has the right law is shown elsewhere.
    """
    options = {"do_sample": True, "top_k": 5, "talon_acceptance": "residual"}
    model = tiny_model("mistral", eos_token_id=None)
    # Half of its children are likely ones: some are taken, and some are refused, which draws from what is left.
    plain = model.generate(PROMPTS, attention_mask=(PROMPTS > 0).long(), do_sample=False, max_new_tokens=NEW).tolist()
    drafter = zoo_drafter("good", [[token for token in row if token] for row in plain], model)
    want = texts(model, drafter, **options)
    got = texts(model.to("far:0"), drafter, **options)
    return "same" if got == want else f"made it {got}, the CPU {want}"


def mixed_devices() -> str:
    """Whether the far devices are strict enough to find a forgotten move."""
    here, there, beyond = torch.ones(3), torch.ones(3, device="far:0"), torch.ones(3).to("far:1")
    mixed: dict[str, Callable[[], Any]] = {
        "add": lambda: here + there,
        "cat": lambda: torch.cat([there, beyond]),
        "index": lambda: here[there.long()],
        "gather": lambda: here.gather(0, there.long()),
        "where": lambda: torch.where(here > 0, there, there),
    }
    refused = []
    for name, operation in mixed.items():
        try:
            operation()
        except RuntimeError as error:
            refused += [name] if "same device" in str(error) else [str(error)]
    return " ".join(refused)


def main() -> None:
    library = register()
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], str]] = {name: partial(scenario, *case) for name, case in SCENARIOS.items()}
    runs |= {"mixed devices": mixed_devices, "residual acceptance": residual_acceptance}
    results = {}
    with torch.no_grad():
        for name, run_it in runs.items():
            try:
                results[name] = run_it()
            except Exception as error:
                results[name] = f"{type(error).__name__}: {str(error)[:300]}"
    print(json.dumps(results))
    del library


if __name__ == "__main__":
    sys.exit(main())
