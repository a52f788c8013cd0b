"""A pytest plugin that writes a line of JSON when a test begins and when it ends.

So the results so far are kept if pytest is killed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "PINFEED_TEST_LOG"
_N_LINES = 60
_N_CHARACTERS = 300


class TestLog:
    """A plugin that appends reports of tests to a file."""

    __test__ = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"test": nodeid, "outcome": "started"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._append(report, report.when or "", report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._append(report, "collect", 0.0)

    def _append(self, report: Any, when: str, seconds: float) -> None:
        line: dict[str, Any] = {
            "test": report.nodeid,
            "when": when,
            "outcome": report.outcome,
            "seconds": round(seconds, 2),
        }
        if not report.passed:
            text = [line[:_N_CHARACTERS] for line in report.longreprtext.splitlines()]
            crash = getattr(report.longrepr, "reprcrash", None)
            line["message"] = str(crash.message)[:1000] if crash else " ".join(text[-3:])[:1000]
            line["text"] = text[-_N_LINES:]
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        # Paths in the tree are the same on all machines.
        text = json.dumps(line).replace(f"{Path.cwd()}/", "")
        with self._path.open("a") as file:
            file.write(text + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the log in the process that gets all reports; with xdist, not in a worker."""
    path = os.environ.get(VARIABLE)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TestLog(Path(path)), "pinfeed-test-log")
