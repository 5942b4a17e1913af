"""TALON for transformers: training-free, confidence-gated draft trees for `generate`."""

from .candidates import TalonCandidateGenerator
from .config import TalonConfig
from .drafter import Drafter
from .eagle import EagleDraft
from .generate import generate
from .output import TalonOutput
from .probe import check_target
from .stats import TalonStats

__all__ = [
    "Drafter",
    "EagleDraft",
    "TalonCandidateGenerator",
    "TalonConfig",
    "TalonOutput",
    "TalonStats",
    "check_target",
    "generate",
]
