"""What a call returns beside the ids: `TalonOutput`, and what stands in it where a batch has no cache.

Pickled, an output is transformers' own, so that it can be read where this code is not: the classes of code from the
Hub have names that other processes don't know.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace
from typing import Any, NoReturn

from transformers.generation import GenerateDecoderOnlyOutput

from .compat import cache_output_field
from .stats import TalonStats

NO_CACHE = (
    "The rows of this batch advanced at their own pace and left it as they finished, so it has no cache. Generate the "
    "next turn without one, from the whole texts, with their images, videos or sounds again."
)


@dataclass
class TalonOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with `talon_stats` (a `TalonStats`).

    Where rows advanced at their own pace, a `NoCache` is in the cache's place, and no cache among the items. Pickled,
    it is a `GenerateDecoderOnlyOutput` with a `DynamicCache`, its `talon_stats` a namespace of the same figures.
    """

    talon_stats: TalonStats | None = None

    def keep_cache(self, cache: Any) -> None:
        """Takes the cache that the next turn may be called with, or None where there is none."""
        if cache is None:
            # Past the items, which are what code goes through that moves, sums up or prints an output.
            vars(self)[cache_output_field()] = NoCache()
        else:
            self[cache_output_field()] = cache

    def __copy__(self) -> TalonOutput:
        """A shallow copy, with the same tensors and the same cache."""
        twin = TalonOutput(**dict(self.items()))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TalonOutput:
        """A copy with a cache of its own, that can be gone on with like the first."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name, value in self.items():
            twin[name] = copy.deepcopy(value, memo)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, transformers' own output."""
        told = {} if self.talon_stats is None else {"talon_stats": _figures(self.talon_stats)}
        items: dict[str, Any] = {**dict(self.items()), **told}
        names = [field.name for field in fields(GenerateDecoderOnlyOutput)]
        state = {**vars(self), **told}
        return GenerateDecoderOnlyOutput, tuple(items.get(name) for name in names), state, None, iter(items.items())


def _figures(stats: TalonStats) -> SimpleNamespace:
    ratios = ("tau", "delta", "draft_cost_ratio", "predicted_speedup")
    return SimpleNamespace(**asdict(stats), **{name: getattr(stats, name) for name in ratios})


class NoCache:
    """In the place of a cache that does not exist: whoever uses it is told why. Pickled, it is that `ValueError`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # what Python and notebooks ask every object for
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(NO_CACHE)

    def __len__(self) -> int:
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    def __repr__(self) -> str:
        return f"NoCache({NO_CACHE!r})"

    def __copy__(self) -> NoCache:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueError, (NO_CACHE,)
