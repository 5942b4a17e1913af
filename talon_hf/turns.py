"""Turns: what a returned cache remembers, so that the next call reads only what is new.

A conversation passes its cache back with the longer prompt. The target's keys and values are in the cache; the turn
beside them holds the drafter's session and the features that it has not read yet. Where the turn does not fit (another
drafter, another text, another dtype, a batch), the whole prompt is read again: the text is the same, the first token
comes later.

A copy of the cache is a turn of its own, which shares the weights alone. A pickled one is a plain `DynamicCache`, so
that it can be read where this code is not; what the turn needs goes along as tensors.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from .cache import TreeCache, columns_of
from .drafter import Commit, Drafter, DraftSession, StoredSession

# The attribute of an unpickled `DynamicCache` that holds its turn, and the number of that form.
STORED = "talon_turn"
FORM = 1


@dataclass(frozen=True)
class Turn:
    """The end of a call of one row.

    Attributes:
        tokens: (1, L) int64, the text that the cache covers.
        next_positions: (..., 1) int64, the position ids that follow it.
        drafter: whose session this is.
        session: has read all of the text but `unread`.
        unread: committed positions that the session has not read.
        model: whose keys the cache holds.
        conditions: those under which the call ran, see `conditions_of`.
    """

    tokens: Tensor
    next_positions: Tensor
    drafter: Drafter
    session: DraftSession
    unread: Commit
    model: weakref.ref[PreTrainedModel]
    conditions: tuple[Any, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Turn:
        """A turn with a session of its own, of the same weights."""
        # A memo of its own: what is shared here may well be copied elsewhere in the same structure.
        shared: dict[int, Any] = {id(self.drafter): self.drafter}
        for module in _modules(vars(self)):
            shared |= {id(part): part for part in (module, *module.parameters(), *module.buffers())}
        return replace(self, session=copy.deepcopy(self.session, shared))

    def fits(self, model: PreTrainedModel, drafter: Drafter, input_ids: Tensor) -> bool:
        """Whether a call with `input_ids` (1, L) goes on where this one ended."""
        done = self.tokens.shape[1]
        return (
            self.model() is model
            and self.drafter is drafter
            and self.conditions == conditions_of(model, drafter)
            and done < input_ids.shape[1]
            and torch.equal(self.tokens, input_ids[:, :done])
        )


class TurnCache(TreeCache):
    """The cache that a call fills and returns.

    Attributes:
        turn: what the call leaves for the next one; None while it runs, and where nothing can be gone on with.
    """

    def __init__(self, rows: int, capacity: int = 0) -> None:
        super().__init__(rows, capacity)
        self.turn: Turn | None = None

    def _set_rows(self, committed: list[int]) -> None:
        # A turn tells of the rows as they were; a caller that changes them starts anew.
        super()._set_rows(committed)
        self.turn = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TurnCache:
        """A cache of its own: the columns in use and the session's state, no weights."""
        twin = TurnCache.__new__(TurnCache)
        memo[id(self)] = twin
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "turn"})
        try:
            twin.turn = copy.deepcopy(self.turn)
        except Exception:
            twin.turn = None  # somebody's session that cannot be copied: the copy is read anew
        return twin

    def __copy__(self) -> TurnCache:
        """A deep copy: a shallow one would write its next turn into this one's buffers."""
        return copy.deepcopy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a `DynamicCache`, which is read without this code."""
        plain = DynamicCache()
        for index, (keys, values) in columns_of(self).items():
            plain.update(keys, values, index)
        if self.of_embeddings:
            setattr(plain, "of_embeddings", True)  # noqa: B010  # plain has no such attribute
        if self.turn is not None and self.committed == [self.get_seq_length()]:
            setattr(plain, STORED, _stored(self.turn, plain))
        return DynamicCache, (), vars(plain)


def resumable(
    cache: Any, model: PreTrainedModel, drafter: Drafter, input_ids: Tensor, attention_mask: Tensor | None
) -> TurnCache | None:
    """The passed-back cache if its turn covers the beginning of `input_ids` (B, L) and this drafter made it.

    An unpickled cache gives a new one and stays as it is. A mask (B, L) with a zero never fits: the cache holds no
    masked column.
    """
    if len(input_ids) != 1 or (attention_mask is not None and not bool(attention_mask.all())):
        return None
    if not isinstance(cache, TurnCache):
        cache = _unpickled(cache, model, drafter)
    if cache is None or cache.turn is None or not cache.turn.fits(model, drafter, input_ids):
        return None
    # Unequal where somebody else has run the model on this cache since.
    return cache if [cache.get_seq_length()] == cache.committed == [cache.turn.tokens.shape[1]] else None


def conditions_of(model: PreTrainedModel, drafter: Drafter) -> tuple[Any, ...]:
    """What decides the kind of the numbers that a call makes, beside the weights' values.

    The dtype and device of each weight of both, autocast, and which adapters (PEFT) are active, off or merged.
    """
    modules = [model, drafter] if isinstance(drafter, nn.Module) else [model]
    kinds = tuple((parameter.dtype, parameter.device) for module in modules for parameter in module.parameters())
    devices = sorted({device.type for _, device in kinds if torch.amp.is_autocast_available(device.type)})
    autocast = tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in devices)
    tuned: list[Any] = [layer for layer in model.modules() if hasattr(layer, "merged_adapters")]
    adapters = tuple((*layer.active_adapters, layer.disable_adapters, *layer.merged_adapters) for layer in tuned)
    return kinds, autocast, adapters


def _modules(thing: Any, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """The modules that an object reaches through its attributes and through containers."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (type, ModuleType, Tensor)):
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        yield thing
        return
    parts: Any = thing if isinstance(thing, (list, tuple, set)) else getattr(thing, "__dict__", {})
    parts = thing if isinstance(thing, dict) else parts
    for part in parts.values() if isinstance(parts, dict) else parts:
        yield from _modules(part, seen)


def _stored(turn: Turn, plain: DynamicCache) -> dict[str, Any] | None:
    """A turn as tensors and numbers; None where the session or the weights cannot be told of in that way."""
    model = turn.model()
    made_by = None if model is None else _fingerprint(model, turn.drafter)
    if made_by is None or not isinstance(turn.session, StoredSession):
        return None
    return {
        "form": FORM,
        "tokens": turn.tokens.clone(),
        "next_positions": turn.next_positions.clone(),
        "unread": {name: value if value is None else value.clone() for name, value in vars(turn.unread).items()},
        "session": turn.session.state(),
        "conditions": turn.conditions,
        "made_by": made_by,
        "last_keys": _last_keys(plain),
    }


def _unpickled(cache: Any, model: PreTrainedModel, drafter: Drafter) -> TurnCache | None:
    """An unpickled cache as it was before, if its turn went along and the same weights are here to go on with."""
    stored = getattr(cache, STORED, None) if isinstance(cache, DynamicCache) else None
    if stored is None or stored["form"] != FORM or stored["conditions"] != conditions_of(model, drafter):
        return None
    # Keys depend on all of the text in front of them: where the last ones are the same, the cache is as it was.
    if stored["made_by"] != _fingerprint(model, drafter) or not torch.equal(stored["last_keys"], _last_keys(cache)):
        return None
    session = drafter.open(model, 1)
    if not isinstance(session, StoredSession):
        return None
    session.restore(stored["session"])
    twin = TurnCache(rows=1)
    twin.fill(columns_of(cache))
    twin.turn = Turn(
        stored["tokens"],
        stored["next_positions"],
        drafter,
        session,
        Commit(**stored["unread"]),
        weakref.ref(model),
        stored["conditions"],
    )
    return twin


def _last_keys(cache: DynamicCache) -> Tensor:
    """(B, heads, head_dim): of the last position, in the last layer that keeps any."""
    kept = columns_of(cache)
    return kept[max(kept)][0][:, :, -1].clone() if kept else torch.empty(0)


def _fingerprint(model: PreTrainedModel, drafter: Drafter) -> str | None:
    """Says of both whether they are the same in another process, by a few numbers of each weight.

    None where these cannot be read: a drafter that is no module, offloaded or packed weights.
    """
    if not isinstance(drafter, nn.Module):
        return None
    digest = hashlib.sha256()
    try:
        for module in (model, drafter):
            for name, weight in module.named_parameters():
                numbers = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16]
                digest.update(f"{name} {tuple(weight.shape)} {numbers.double().tolist()}".encode())
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return digest.hexdigest()
