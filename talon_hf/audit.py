"""`check_target`: does this model verify trees right? For a model that nobody has tried yet."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel

from .cache import TreeCache
from .checks import refuse_target
from .drafter import FeatureSpec
from .prompt import Prompt
from .target import Target
from .tree import DraftTree

# Two branches of two levels below the root, and a third leaf: siblings, cousins and a shared position in one tree.
PARENTS = (-1, 0, 0, 1, 2, 3)
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
    allowed = max(TOLERANCE, 8 * torch.finfo(model.dtype).eps)
    if not worst <= allowed * scale:
        raise ValueError(
            f"{type(model).__name__} scores a draft tree wrong: logits differ from plain decoding's by {worst:.3g}, "
            f"and {allowed * scale:.3g} would be rounding, so TALON's text would not be the model's. Call `generate` "
            "without `custom_generate`."
        )
    return worst / scale


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
    tree = DraftTree.from_roots(nodes[:, 0])
    for column, parent in enumerate(PARENTS[1:], start=1):
        one = torch.full_like(nodes[:, :1], parent)
        tree = tree.with_layer(nodes[:, column : column + 1], one, torch.zeros_like(one).float(), one >= 0)
    logits = []

    def score(_: Any, input_ids: Tensor, *prepared: Any, **model_kwargs: Any) -> Tensor:
        target = Target(model, FeatureSpec(), TreeCache(1))
        read = Prompt.of(model, input_ids, model_kwargs)
        target.prefill(read.ids, read.mask, **read.inputs)
        logits.append(target.score(tree).logits[0].float())
        return input_ids

    _generate(model, prompt, 1, custom_generate=score)
    return logits[0]


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
