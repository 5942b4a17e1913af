"""`check_target`: does this model verify trees right? For a model that nobody has tried yet."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .cache import TreeCache
from .checks import refuse_target
from .drafter import FeatureSpec
from .target import Target
from .tree import DraftTree

# Two branches of two levels below the root, and a third leaf: siblings, cousins and a shared position in one tree.
PARENTS = (-1, 0, 0, 1, 2, 3)
# A wrong mask or position moves logits by tenths of their spread; rounding by thousandths, more in low precision.
TOLERANCE = 1e-3


@torch.no_grad()
def check_target(model: PreTrainedModel, prompt_length: int = 24, seed: int = 0) -> float:
    """Scores one small tree in one forward and each of its paths in a plain forward of its own.

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
    text = model.config.get_text_config(decoder=True)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, text.vocab_size, (1, prompt_length + len(PARENTS)), generator=draw).to(model.device)
    prompt, nodes = tokens[:, :prompt_length], tokens[:, prompt_length:]
    tree = DraftTree.from_roots(nodes[:, 0])
    for column, parent in enumerate(PARENTS[1:], start=1):
        one = torch.full_like(nodes[:, :1], parent)
        tree = tree.with_layer(nodes[:, column : column + 1], one, torch.zeros_like(one).float(), one >= 0)
    target = Target(model, FeatureSpec(), TreeCache(1))
    target.prefill(prompt, None)
    at_once = target.score(tree).logits[0].float()
    worst = scale = 0.0
    for column in range(len(PARENTS)):
        path = torch.cat([prompt, nodes[:, _path(column)]], dim=1)
        alone = model(input_ids=path, use_cache=False).logits[0, -1].float()
        worst = max(worst, float((at_once[column] - alone).abs().max()))
        scale = max(scale, float(alone.abs().max()))
    allowed = max(TOLERANCE, 8 * torch.finfo(model.dtype).eps)
    if not worst <= allowed * scale:
        raise ValueError(
            f"{type(model).__name__} scores a draft tree wrong: logits differ from plain forwards by {worst:.3g}, "
            f"and {allowed * scale:.3g} would be rounding, so TALON's text would not be the model's. Call `generate` "
            "without `custom_generate`."
        )
    return worst / scale


def _path(column: int) -> list[int]:
    """Columns from the root to a node."""
    return [] if column < 0 else [*_path(PARENTS[column]), column]
