"""The default tier where everything but torch is the newest: `python .ci/newest.py [pytest's arguments]`.

Prints what falls short there on a line of its own, and fails only for what known-newest.txt does not list, so that a
release of something else is seen the day it comes and stops nobody who has written down why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

KNOWN = Path(__file__).with_name("known-newest.txt")


class Outcomes:
    """A pytest plugin that notes which tests passed, and which failed or could not be collected."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def read_known(lines: Iterable[str]) -> dict[str, str]:
    """Test id to reason; a line is `tests/test_x.py::test_y[case] -- the reason`.

    Raises:
        ValueError: a line has no reason.
    """
    known = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            test, _, reason = (part.strip() for part in line.partition(" -- "))
            if not reason:
                raise ValueError(f"{KNOWN.name} must give a reason: `{test} -- why it fails`")
            known[test] = reason
    return known


def verdict(failed: set[str], passed: set[str], known: dict[str, str]) -> tuple[list[str], int]:
    """Lines to print, and how many failures are not written down."""
    new = sorted(failed - known.keys())
    lines = [f"newest: {len(failed)} failed" + (f": {' | '.join(sorted(failed))}" if failed else "")]
    for test, reason in known.items():
        if test in failed:
            lines.append(f"newest: {test} fails as written: {reason}")
        else:
            lines.append(f"newest: {test} is in {KNOWN.name} and {'passes' if test in passed else 'did not run'}")
    if new:
        lines.append(f"newest: not in {KNOWN.name}: {' | '.join(new)}")
    return lines, len(new)


def main(arguments: list[str]) -> int:
    known = read_known(KNOWN.read_text(encoding="utf-8").splitlines())
    outcomes = Outcomes()
    # A file that no longer imports must not hide what the others say.
    code = pytest.main(["--continue-on-collection-errors", *arguments], plugins=[outcomes])
    lines, new = verdict(outcomes.failed, outcomes.passed, known)
    print(*lines, sep="\n")
    # 0 and 1 are verdicts on tests; anything else (no test collected, a usage error) is none.
    return 1 if new or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
