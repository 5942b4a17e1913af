"""Target and head on different devices, and a target that lies on two: the devices are CPU memory in disguise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot have a device written in Python",
    ),
]
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """What every scenario came to, from one process: the devices would stay in this one."""
    path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = [sys.executable, str(FOLDER / "second_device.py")]
    run = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_the_devices_refuse_what_cuda_refuses(results: dict[str, str]) -> None:
    assert results["mixed devices"] == "add cat index gather where"


@pytest.mark.parametrize("name", ["head far", "target far", "both far", "two far devices"])
def test_head_and_target_may_lie_on_different_devices(name: str, results: dict[str, str]) -> None:
    assert results[name] == "same"


@pytest.mark.parametrize("name", ["eagle policy", "residual acceptance"])
def test_policies_and_acceptance_keep_to_the_targets_device(name: str, results: dict[str, str]) -> None:
    assert results[name] == "same"


@pytest.mark.parametrize("name", ["split target", "split target, head beside its end", "target split by hooks"])
def test_a_target_split_over_two_devices(name: str, results: dict[str, str]) -> None:
    assert results[name] == "same"
