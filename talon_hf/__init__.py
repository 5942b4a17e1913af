"""TALON for transformers: training-free, confidence-gated draft trees for `generate`."""

from .audit import check_target
from .candidates import TalonCandidateGenerator
from .config import TalonConfig
from .drafter import Drafter
from .eagle import EagleDraft
from .generate import generate
from .output import TalonOutput
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
