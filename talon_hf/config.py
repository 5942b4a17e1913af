"""TalonConfig: what a user may tune, with its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

PREFIX = "talon_"
POLICIES = ("talon", "eagle", "chain")
ACCEPTANCE = ("match", "residual")


@dataclass(frozen=True)
class TalonConfig:
    """The shape of the draft trees. None of it changes the text, only the speed.

    Attributes:
        policy: "talon" (confidence-gated, TALON Algorithm 2), "eagle" (EAGLE-2/3 expansion and rerank) or "chain".
        node_budget: N, nodes of a tree **with the root**: 60 means 59 drafted tokens.
        top_k: K, nodes of TALON's first layer; nodes kept a layer, and children a node, of the "eagle" policy.
        mu: TALON's gate: a candidate stays if its path probability is at least mu times the best of its layer.
        top_k_layers: how many layers TALON fills by top K before the gate decides (the paper's ablation k).
        depth: expansions after the first layer for "eagle" (its D), tokens drafted a round for "chain".
        max_depth: no node deeper than this, for every policy; None leaves it to the budget.
        acceptance: "match" (sample, then look for the token among the children) or "residual" (recursive rejection).
        check: whether a model that no test covers is tried on a small tree before it is used (see `probe.py`).
    """

    policy: str = "talon"
    node_budget: int = 60
    top_k: int = 10
    mu: float = 0.03
    top_k_layers: int = 1
    depth: int = 8
    max_depth: int | None = None
    acceptance: str = "match"
    check: bool = True

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, POLICIES)
        _one_of("acceptance", self.acceptance, ACCEPTANCE)
        if not isinstance(self.check, bool):
            raise ValueError(f"`{PREFIX}check` must be True or False, got {self.check!r}.")
        self._whole("node_budget", 2, "the root counts, so 2 drafts one token")
        self._whole("top_k", 1, "the first layer needs a node")
        self._whole("top_k_layers", 0, "0 lets the gate decide from the first layer")
        self._whole("depth", 1, "one expansion is the least")
        if self.max_depth is not None:
            self._whole("max_depth", 1, "leave it out for no limit but the budget")
        if isinstance(self.mu, bool) or not isinstance(self.mu, Real) or not 0.0 < self.mu <= 1.0:
            raise ValueError(
                f"`{PREFIX}mu` must be a number in (0, 1], got {self.mu!r}: it is a fraction of the layer's best path "
                "probability; the default is 0.03."
            )
        object.__setattr__(self, "mu", float(self.mu))

    def _whole(self, name: str, least: int, why: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"`{PREFIX}{name}` must be a whole number of at least {least}, got {value!r}: {why}.")
        # NumPy's numbers wrap around and are no JSON; Python's are neither.
        object.__setattr__(self, name, int(value))

    @classmethod
    def resolve(cls, *sources: Mapping[str, Any]) -> TalonConfig:
        """The config that `talon_*` entries describe; the first source that names an option wins.

        Raises:
            ValueError: a `talon_*` name that is no option, or a value out of bounds.
        """
        known = [field.name for field in fields(cls)]
        chosen: dict[str, Any] = {}
        for source in sources:
            for name, value in source.items():
                if not name.startswith(PREFIX):
                    continue
                option = name.removeprefix(PREFIX)
                if option not in known:
                    names = ", ".join(f"`{PREFIX}{n}`" for n in known)
                    raise ValueError(f"`{name}` (={value!r}) is not an option of TALON. The options are {names}.")
                chosen.setdefault(option, value)
        return cls(**chosen)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"`{PREFIX}{name}` must be one of {choices}, got {value!r}.")
