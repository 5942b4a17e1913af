"""Does this model verify trees right? `check_target` finds out at length, `probe` in four forwards before a call.

The tests cover transformers' own models. Somebody else's code (a model class, a hook, a quantised layer) may make its
own masks, or let what a token sees depend on which tokens are read together; so a call probes such a model once, and
remembers the outcome for as long as the model stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel

from .cache import TreeCache
from .checks import refuse_target
from .compat import hooks_of, is_compiled_forward, is_moved_by_accelerate
from .drafter import FeatureSpec
from .features import features_of
from .inputs import following_rows, lasting
from .prompt import BY_TOKEN, Prompt
from .target import Target, own_attention
from .tree import DraftTree

# Two branches of two levels below the root, and a third leaf: siblings, cousins and a shared position in one tree.
PARENTS = (-1, 0, 0, 1, 2, 3)
# For four forwards: two children of the root, of which the second is looked at, and a child of each.
SMALL = (-1, 0, 0, 1, 2)
PROMPT_LENGTH = 6
# Packages whose code, hooks and attention the tests cover. Of torch, `nn` alone: `ao` quantises.
COVERED = ("transformers.models.", "transformers.modeling_", "transformers.activations", "torch.nn.", "torch._dynamo.")
HOOKS = ("transformers.", "torch.", "accelerate.", "peft.", features_of.__module__, following_rows.__module__)
ATTENTION = ("sdpa", "eager", "flash", "flex", "kernels-community/")
EXPERTS = ("num_experts_per_tok", "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHECKED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
CHECKING = threading.RLock()
# A wrong mask or position moves logits by tenths of their spread; rounding by thousandths, more in low precision.
TOLERANCE = 1e-3


@torch.no_grad()
def check_target(model: PreTrainedModel, prompt_length: int = 24, seed: int = 0) -> float:
    """Scores one small tree in one forward, and each of its paths by plain `generate`, which is made to take it.

    Args:
        model: the target.
        prompt_length: random prompt tokens in front of the tree; more than a sliding window to test the window.
        seed: of the random tokens.

    Returns:
        the largest difference between the two, as a fraction of the largest logit.

    Raises:
        ValueError: the model cannot verify trees by its kind, or the difference is more than rounding.
    """
    refuse_target(model)
    tokens = _tokens(model, prompt_length + len(PARENTS), seed)
    prompt, nodes = tokens[:, :prompt_length], tokens[:, prompt_length:]
    at_once = _tree_logits(model, prompt, nodes)
    worst = scale = 0.0
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = _path(leaf)
        for column, alone in zip(path, _path_logits(model, prompt, nodes[:, path]), strict=True):
            worst = max(worst, float((at_once[column] - alone).abs().max()))
            scale = max(scale, float(alone.abs().max()))
    _judge(model, worst, scale)
    return worst / scale


def probe(model: PreTrainedModel, prompt: Prompt) -> None:
    """Tries a model that no test covers on a small tree, unless it has passed as it is: four forwards on a few tokens.

    They are the user's model as it stands, so hooks that count or log see them. The global random state is put back.

    Args:
        model: the target.
        prompt: of the call; its arguments are the model's too, for as many rows, but its tokens are not read.

    Raises:
        ValueError: the logits of a tree differ from plain decoding's by more than rounding.
    """
    with CHECKING:
        found = foreign_parts(model)
        if not found or CHECKED.get(model) == found:
            return
        with torch.no_grad(), _random_state_of(model):
            worst, scale = _small_difference(model, prompt)
        _judge(model, worst, scale, "It was checked because of " + ", ".join(sorted({part[0] for part in found})[:3]))
        CHECKED[model] = found


def foreign_parts(model: PreTrainedModel) -> list[tuple[Any, ...]]:
    """What of a model no test covers, and what its check depends on; empty for transformers' own models."""
    parts: list[tuple[Any, ...]] = []
    for name, module in model.named_modules():
        kind = type(module)
        is_ours = kind.__module__.startswith(COVERED) or kind.__module__ == "transformers.pytorch_utils"
        if not is_ours and not kind.__module__.startswith("peft."):
            parts.append((f"the class {kind.__name__}", name, kind))
        forward = vars(module).get("forward")
        # transformers 5.0 puts a class's own forward back onto the module, which is no replacement.
        is_own = forward is None or getattr(forward, "__func__", None) is kind.forward
        if not (is_own or is_moved_by_accelerate(module) or is_compiled_forward(forward)):
            parts.append(("a replaced `forward`", name, id(forward)))
        hooks = hooks_of(module).items()
        parts += [("a forward hook", name, i) for i, hook in hooks if not _origin(hook).startswith(HOOKS)]
        for own, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
                parts.append((f"the weights' class {type(value).__name__}", name, own, type(value)))
    attention = own_attention(model)
    if not str(attention).startswith(ATTENTION):
        parts.append((f"the attention {attention!r}", attention))
    if parts:
        adapters = [(n, str(m.active_adapters), m.disable_adapters, m.merged) for n, m in _adapters(model)]
        parts.append((type(model).__name__, attention, model.dtype, model.training, str(adapters)))
    return parts


def _adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    names = ("active_adapters", "disable_adapters", "merged")
    return ((n, m) for n, m in model.named_modules() if not isinstance(m, PreTrainedModel) and _has(m, names))


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(hasattr(module, name) for name in names)


def _origin(function: Any) -> str:
    """The module that a hook was written in."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", None) or type(function).__module__)


@contextmanager
def _random_state_of(model: PreTrainedModel) -> Iterator[None]:
    kind = model.device.type
    # A device may have no random numbers of its own.
    draws = kind not in ("cpu", "meta") and hasattr(torch.get_device_module(kind), "get_rng_state")
    where: dict[str, Any] = {"devices": [model.device], "device_type": kind} if draws else {"devices": []}
    with torch.random.fork_rng(**where):
        yield


def _small_difference(model: PreTrainedModel, prompt: Prompt) -> tuple[float, float]:
    """The largest difference, and the largest logit, of the root and a child of it: in a tree, and read alone."""
    rows = len(prompt.ids)
    tokens = _tokens(model, PROMPT_LENGTH + len(SMALL), seed=0).to(prompt.ids.device).expand(rows, -1)
    target = Target(model, FeatureSpec(), TreeCache(rows))
    given = {name: value for name, value in lasting(model, prompt, target.cache).items() if name not in BY_TOKEN}
    target.read(Prompt(tokens[:, :PROMPT_LENGTH], None, given))
    nodes = tokens[:, PROMPT_LENGTH:]
    at_once = target.score(_tree(nodes, SMALL)).logits.float()
    target.keep([[] for _ in range(rows)])
    worst = scale = 0.0
    text = tokens[:, :PROMPT_LENGTH]
    for column in (0, 2):
        text = torch.cat([text, nodes[:, column : column + 1]], dim=1)
        alone = target.step(Prompt(text, None, given)).logits[:, -1].float()
        worst = max(worst, _or_infinity((at_once[:, column] - alone).abs().max()))
        scale = max(scale, float(alone.abs().max()))
    return worst, scale


def _or_infinity(value: Tensor) -> float:
    return float("inf") if bool(value.isnan()) else float(value)


def _judge(model: PreTrainedModel, worst: float, scale: float, why: str = "") -> None:
    """Raises ValueError for a difference that rounding does not explain."""
    text = model.config.get_text_config(decoder=True)
    # In low precision rounding may send a token to another expert, which moves its logits further.
    steps = 32 if any(getattr(text, name, None) for name in EXPERTS) else 8
    allowed = max(TOLERANCE, steps * torch.finfo(model.dtype).eps)
    if not worst <= allowed * scale:
        raise ValueError(
            f"{type(model).__name__} scores a draft tree wrong: logits differ from plain decoding's by {worst:.3g}, "
            f"and {allowed * scale:.3g} would be rounding, so TALON's text would not be the model's. Call `generate` "
            f"without `custom_generate`.{' ' * bool(why)}{why}"
            + ("; `talon_check=False` leaves the check out." if why else "")
        )


def _tokens(model: PreTrainedModel, count: int, seed: int) -> Tensor:
    """(1, count) int64 random tokens, none of which ends a text."""
    vocabulary = torch.arange(model.config.get_text_config(decoder=True).vocab_size)
    ends = model.generation_config.eos_token_id
    vocabulary = vocabulary[~torch.isin(vocabulary, torch.tensor([] if ends is None else ends, dtype=torch.long))]
    draw = torch.Generator().manual_seed(seed)
    return vocabulary[torch.randint(len(vocabulary), (1, count), generator=draw)].to(model.device)


def _generate(model: PreTrainedModel, prompt: Tensor, new: int, **options: Any) -> Any:
    # Not the model's own method, which may be ours.
    return GenerationMixin.generate(
        cast(Any, model), prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=1,
        max_new_tokens=new, **options,
    )  # fmt: skip


def _tree_logits(model: PreTrainedModel, prompt: Tensor, nodes: Tensor) -> Tensor:
    """(n, V) float32 logits of the tree of `nodes` (1, n) behind a prompt that `generate` prepares."""
    tree = _tree(nodes, PARENTS)
    logits = []

    def score(_: Any, input_ids: Tensor, *prepared: Any, **model_kwargs: Any) -> Tensor:
        target = Target(model, FeatureSpec(), TreeCache(1))
        target.read(Prompt.of(model, input_ids, model_kwargs))
        logits.append(target.score(tree).logits[0].float())
        return input_ids

    _generate(model, prompt, 1, custom_generate=score)
    return logits[0]


def _tree(nodes: Tensor, parents: tuple[int, ...]) -> DraftTree:
    tree = DraftTree.from_roots(nodes[:, 0])
    for column, parent in enumerate(parents[1:], start=1):
        one = torch.full_like(nodes[:, :1], parent)
        tree = tree.with_layer(nodes[:, column : column + 1], one, torch.zeros_like(one).float(), one >= 0)
    return tree


def _path_logits(model: PreTrainedModel, prompt: Tensor, path: Tensor) -> list[Tensor]:
    """(V,) float32 logits behind each token of `path` (1, m), by plain decoding."""

    def take(ids: Tensor, scores: Tensor) -> Tensor:
        step = ids.shape[1] - prompt.shape[1]
        if step == path.shape[1]:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, path[0, step : step + 1], 0.0)

    output = _generate(
        model, prompt, path.shape[1] + 1, logits_processor=LogitsProcessorList([cast(Any, take)]), output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return [step[0].float() for step in output.logits[1:]]


def _path(column: int) -> list[int]:
    """Columns from the root to a node."""
    return [] if column < 0 else [*_path(PARENTS[column]), column]
