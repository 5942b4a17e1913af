"""Target: the user's model, asked through its public `forward` alone.

It fills a `TreeCache` with the prompt, scores all nodes of a draft tree in one forward (4D attention masks and
`position_ids` make every node see its own ancestors), and hands out the features that a drafter reads. Nothing stays
on the model: hooks live for one forward, and an attention setting that a tree needs is put back after it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import TreeCache
from .compat import (
    attention_of,
    cache_keyword,
    eager_masks_by_column,
    is_compiled,
    run_eagerly,
    runs_sdpa,
    set_attention,
)
from .drafter import FeatureSpec
from .features import features_of
from .inputs import (
    first_inputs,
    following_rows,
    later_inputs,
    modules_by_row,
    refuse_in_chunks,
    select_rows,
)
from .masks import layer_windows, tree_masks
from .prompt import BY_TOKEN, Prompt
from .tree import DraftTree

# The attention setting lives in a config that all threads share, so where tree forwards need another one than the
# prompt's, a call holds this lock in every forward.
SWITCHING = threading.RLock()


@dataclass(frozen=True)
class Scores:
    """What one forward of the target said.

    Attributes:
        logits: (B, n, V) in the model's dtype; n is 1 after prefill.
        features: (B, n, F) in the model's dtype, for every position of the forward; F is 0 without boundaries.
    """

    logits: Tensor
    features: Tensor


class Target:
    """One call's view of the model: its cache, its rows' positions.

    Args:
        model: the causal language model.
        spec: the features that the drafter reads.
        cache: empty, or with the text that the next `prefill` continues.
        next_positions: (..., B) int64, the position ids that follow a cache's text.
    """

    def __init__(
        self, model: PreTrainedModel, spec: FeatureSpec, cache: TreeCache, next_positions: Tensor | None = None
    ) -> None:
        self.model = model
        self.cache = cache
        self.next_positions = torch.zeros(len(cache.committed), dtype=torch.long)
        if next_positions is not None:
            self.next_positions = next_positions
        self.spec = spec
        self._token_types: Tensor | None = None
        self._later: dict[str, Any] = {}
        self._outputs: Any = None
        self._rows = list(range(len(cache.committed)))
        self._modules_by_row = modules_by_row(model) if len(self._rows) > 1 else []
        self._is_compiled = is_compiled(model)
        with SWITCHING:
            self._tree_attention = tree_attention(model)
            self._must_switch = self._tree_attention != own_attention(model)
        self._cache_keyword = cache_keyword(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._windows = layer_windows(model.config)

    def read(
        self, prompt: Prompt, past: int = 0, new: int = 1, chunk: int | None = None
    ) -> tuple[Scores, Tensor, Tensor]:
        """Reads the prompt, or what follows the `past` columns that the cache holds of it (of one row).

        Args:
            prompt: as `generate` prepared it.
            past: columns of it that have been read.
            new: the most tokens that may follow it.
            chunk: the most columns that one forward reads; None reads all in one.

        Returns:
            as `prefill`.

        Raises:
            ValueError: the model gets something at every step that a tree cannot have (see `later_inputs`), or
                images in a prompt that is read in chunks.
        """
        inputs = first_inputs(self.model, prompt, self.cache, past)
        positions = inputs.get("position_ids")
        if past and (positions is None or positions.dim() != self.next_positions.dim() + 1):
            steps = torch.arange(prompt.columns - past, device=self.next_positions.device)
            inputs["position_ids"] = self.next_positions.unsqueeze(-1) + steps
        if chunk is not None and (chunk < prompt.columns - past or prompt.lead):
            refuse_in_chunks(self.model, prompt, inputs, self.cache)
        mask = None if past else prompt.mask
        read = self.prefill(inputs.pop("input_ids", None), mask, chunk, **inputs)
        if prompt.given.get("position_ids") is None:
            # Counted anew at every step by the versions that prepare none; a row hidden as a whole begins at 0.
            self.next_positions = self.next_positions.masked_fill(~read[2].any(dim=1), 0)
        self.cache.of_embeddings = self.cache.of_embeddings or prompt.embeds is not None
        self._later = later_inputs(self.model, prompt, self.cache, new, self._outputs)
        self._outputs = None
        return read

    def step(self, prompt: Prompt) -> Scores:
        """Reads the last token of a text (of rows without padding) as plain decoding does."""
        inputs = first_inputs(self.model, prompt, self.cache, prompt.columns - 1, is_first=False)
        return self.prefill(inputs.pop("input_ids"), None, **inputs)[0]

    def prefill(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, chunk: int | None = None, **inputs: Any
    ) -> tuple[Scores, Tensor, Tensor]:
        """Fills the cache.

        Args:
            input_ids: (B, L) int64, or None where `inputs` has `inputs_embeds` (B, L, h).
            attention_mask: (B, L), 0 for padding, or None.
            chunk: the most columns that one forward reads; None reads all in one.
            inputs: what else the model's forward gets; `position_ids` (..., B, L) may be there, and an
                `attention_mask` of the model's own form.

        Returns:
            scores of the last position (logits (B, 1, V)) with the features of all L positions; places in the text
            (B, L) int64; valid (B, L) bool.
        """
        read = inputs["inputs_embeds"] if input_ids is None else input_ids
        rows, length = read.shape[:2]
        mask = torch.ones(rows, length, device=read.device) if attention_mask is None else attention_mask
        valid = mask.bool()
        places = (valid.long().cumsum(dim=1) - 1 + max(self.cache.committed)).masked_fill(~valid, 1)
        inputs = {"attention_mask": attention_mask, "input_ids": input_ids, "position_ids": places} | inputs
        for name in BY_TOKEN:
            if inputs.get(name) is not None:
                inputs[name] = inputs[name][..., -length:].expand(*inputs[name].shape[:-2], rows, length)
        self.next_positions = inputs["position_ids"][..., -1] + 1
        self._token_types = self._generated_type(inputs.get("token_type_ids"))
        scores = self._in_chunks(inputs, length, chunk or length)
        if self.cache.get_seq_length() != max(self.cache.committed) + length:
            raise ValueError(
                f"TALON cannot verify a draft tree on {type(self.model).__name__}: it does not keep its keys and "
                "values in the cache that it is given. Call `generate` without `custom_generate`."
            )
        self.cache.keep([row.nonzero().flatten().tolist() for row in valid])
        return scores, places, valid

    def _in_chunks(self, inputs: dict[str, Any], length: int, chunk: int) -> Scores:
        """The last position's logits and all positions' features, read `chunk` columns at a time."""
        logits: list[Tensor] = []
        features: list[Tensor] = []
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            part = dict(inputs)
            for name in BY_TOKEN:
                if part.get(name) is not None:
                    # Some models add their offset to the positions in place.
                    part[name] = part[name][..., begin:end].clone()
            if end - begin < length:
                part["input_ids"] = inputs["input_ids"][:, begin:end]
                mask = inputs["attention_mask"]
                part["attention_mask"] = None if mask is None else mask[:, :end]
            last = {"logits_to_keep": self._last_logits(end - begin)} if self._keeps_logits else {}
            scores = self._forward(keep_outputs=end == length, **part, **last)
            logits, features = [scores.logits[:, -1:]], [*features, scores.features]
        return Scores(logits[0], torch.cat(features, dim=1))

    def _generated_type(self, token_types: Tensor | None) -> Tensor | None:
        """(B, 1) the type of what is generated, the prompt's last; multimodal models mark their prompts with types."""
        is_text = self.model.config.get_text_config(decoder=True) is self.model.config
        return token_types[:, -1:] if token_types is not None and is_text else None

    def _last_logits(self, length: int) -> int | Tensor:
        """What to keep of a prompt's logits."""
        text: Any = self.model.config.get_text_config(decoder=True)
        if self.spec.boundaries and getattr(text, "num_kv_shared_layers", None):
            # For a number, Gemma 4 hands its last layers nothing but those positions; a drafter may read all of them.
            return torch.tensor([length - 1], device=self.next_positions.device)
        return 1

    def score(self, tree: DraftTree) -> Scores:
        """Logits and features at every node of the trees, in one forward. `keep` must follow before the next call."""
        # sdpa turns a bool mask into an additive one in every layer; on the CPU that is a third of its time.
        boolean = self._tree_attention == "sdpa" and tree.tokens.device.type != "cpu"
        masks = tree_masks(self._windows, tree, self.cache.committed, boolean=boolean, dtype=self.model.dtype)
        more: dict[str, Any] = {**self._later, "logits_to_keep": 0} if self._keeps_logits else dict(self._later)
        if self._token_types is not None:
            more["token_type_ids"] = self._token_types.expand_as(tree.tokens)
        with using_attention(self.model, self._tree_attention) if self._must_switch else nullcontext():
            return self._forward(
                input_ids=tree.tokens,
                attention_mask=masks,
                position_ids=self.next_positions.unsqueeze(-1) + tree.depths,
                **more,
            )

    def places(self, tree: DraftTree) -> Tensor:
        """(B, n) int64 place in the text of every node: its row's committed tokens and its depth."""
        return torch.tensor(self.cache.committed, device=tree.depths.device).unsqueeze(1) + tree.depths

    def keep(self, paths: list[list[int]]) -> None:
        """Commits the accepted nodes (per row, columns of the tree) and forgets the others."""
        self.cache.keep(paths)
        steps = torch.tensor([len(path) for path in paths], device=self.next_positions.device)
        self.next_positions = self.next_positions + steps

    def positions_left(self) -> list[int]:
        """Per row, how many positions lie behind the root's; unbounded for rotary positions, which need no table."""
        text = self.model.config.get_text_config(decoder=True)
        rotary = any(hasattr(text, name) for name in ("rope_parameters", "rope_theta", "rope_scaling"))
        limit = sys.maxsize if rotary else getattr(text, "max_position_embeddings", None) or sys.maxsize
        return [limit - 1 - place for place in self.cache.committed]

    def select_rows(self, rows: list[int]) -> None:
        """Keeps some rows of the batch."""
        self.cache.select_rows(rows)
        self._later = select_rows(self._later, rows, len(self._rows))
        self._rows = [self._rows[row] for row in rows]
        self.next_positions = self.next_positions[..., rows]
        self._token_types = None if self._token_types is None else self._token_types[rows]

    def _forward(self, keep_outputs: bool = False, **inputs: Any) -> Scores:
        inputs[self._cache_keyword] = self.cache
        taken: AbstractContextManager[Any] = SWITCHING if self._must_switch else nullcontext()
        by_row = following_rows(self._modules_by_row, self._rows)
        with taken, features_of(self.model, self.spec) as taps, by_row, run_eagerly(self._is_compiled):
            outputs = self.model(**inputs, use_cache=True, return_dict=True)
        # A model split by hand leaves them where its last layer lies; plain `generate` takes them to the prompt too.
        logits = outputs.logits.to(self.next_positions.device)
        self._outputs = outputs if keep_outputs else None
        if not self.spec.boundaries:
            return Scores(logits, logits.new_empty(*logits.shape[:2], 0))
        return Scores(logits, torch.cat([taps[b].to(logits.device) for b in self.spec.boundaries], dim=-1))


def own_attention(model: PreTrainedModel) -> str:
    """The attention implementation that the model is set to."""
    return attention_of(model.config.get_text_config(decoder=True))


def tree_attention(model: PreTrainedModel) -> str:
    """The attention implementation for a tree forward: the model's own if it takes 4D masks, else sdpa or eager."""
    impl = own_attention(model)
    if impl in ("sdpa", "eager") and not eager_masks_by_column(model):
        return impl
    return "sdpa" if runs_sdpa(model) else "eager"


@contextmanager
def using_attention(model: PreTrainedModel, impl: str) -> Iterator[None]:
    """Runs the model's attention as `impl` and puts its own setting back, whatever happens inside.

    The setting is read from the configs at every attention call, so nothing else of the model changes.
    """
    with SWITCHING:
        own = own_attention(model)
        configs: list[Any] = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        switched = [config for config in configs if attention_of(config) == own]
        try:
            for config in switched:
                set_attention(config, impl)
            yield
        finally:
            for config in switched:
                set_attention(config, own)
