"""Shared fixtures: tiny models in fp64, where plain `generate` and TALON must agree to the token."""

from __future__ import annotations

import pytest
import torch
from models import tiny_model
from transformers import PreTrainedModel


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tiny matrices gain nothing from threads, and two spinning pools on two cores lose a factor of twenty.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """An 8-layer random Llama in fp64."""
    return tiny_model("llama")
