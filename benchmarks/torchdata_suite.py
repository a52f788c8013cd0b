"""The test suite of torchdata's StatefulDataLoader, with its batches given by ``wrap_loader``.

torchdata's tests are torch's own tests of DataLoader, and tests of states. They run once as they
are, and once for each depth with ``pinfeed.wrap_loader(loader, device="cpu", on_error="next")`` in
place of each loader that a test makes. Only the tests in ``EXPECTED`` may fail, for the reason
given there. Run it from the root, with a checkout of github.com/pytorch/data:

    pip install expecttest parameterized
    # half an hour
    python -m benchmarks.torchdata_suite ../data
    python -m benchmarks.torchdata_suite ../data --ways "depth 0" --select test_sampler

Processes that the tests start load torchdata again, so they run without pinfeed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

FILES = ("test_dataloader.py", "test_state_dict.py")
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "depth None": {},
    "depth 0": {"depth": 0},
    "depth 2": {"depth": 2},
}
"""Arguments of ``wrap_loader`` for each way; None for the loader itself."""
_PRIVATE = "the test reads the private attribute {} of torch's own loader or iterator"
EXPECTED = {
    "test_bulk_loading_nobatch": _PRIVATE.format("_auto_collation"),
    "test_iterable_style_dataset": (
        "the test expects a warning when it requests the batch, but the loader warns when the "
        "batch is prefetched; the test also reads the private attribute _workers of torch's "
        "iterator"
    ),
    "test_partial_workers": _PRIVATE.format("_workers"),
    "test_shuffler_iterdatapipe": _PRIVATE.format("_iterator"),
}
"""For each test that may fail with ``wrap_loader``, the reason."""

_OPTIONS = "PINFEED_SUITE_OPTIONS"
_OUTCOMES = "PINFEED_SUITE_OUTCOMES"

Outcomes = dict[str, str]
"""Outcome of each test: passed, failed or skipped."""


# ---- the plugin of the pytest process ------------------------------------------------------------

_outcomes: Outcomes = {}


def pytest_configure() -> None:
    """Put wrapped loaders in the place of torchdata's, before a test file imports the class."""
    options = json.loads(os.environ[_OPTIONS])
    if options is None:
        return
    from torchdata import stateful_dataloader

    import pinfeed

    plain = stateful_dataloader.StatefulDataLoader

    class Wrapped:
        """Makes wrapped loaders; it is a class because tests write ``StatefulDataLoader[int]``."""

        def __new__(cls, *args: Any, **arguments: Any) -> Any:
            loader = plain(*args, **arguments)
            return pinfeed.wrap_loader(loader, device="cpu", on_error="next", **options)

        def __class_getitem__(cls, item: Any) -> Any:
            return cls

    stateful_dataloader.StatefulDataLoader = Wrapped


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test, which is failed if any phase fails."""
    if report.when == "call" or report.outcome != "passed":
        name = report.nodeid.split("/")[-1]
        if _outcomes.get(name) != "failed":
            _outcomes[name] = report.outcome


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ[_OUTCOMES]).write_text(json.dumps(_outcomes))


# ---- the comparison ------------------------------------------------------------------------------


def run(checkout: Path, way: str, select: str) -> Outcomes:
    """Run the suite in one way, and return the outcome of each test.

    Tests that fail are run once more, because some have time limits that a busy machine exceeds.
    """
    found = _pytest(checkout, way, [*FILES, "-k", select])
    failed = [test for test, outcome in found.items() if outcome == "failed"]
    return {**found, **_pytest(checkout, way, failed)} if failed else found


def _pytest(checkout: Path, way: str, arguments: Sequence[str]) -> Outcomes:
    """Run pytest in a process of its own."""
    with tempfile.TemporaryDirectory() as made:
        outcomes = Path(made) / "outcomes.json"
        variables = {
            **os.environ,
            _OPTIONS: json.dumps(WAYS[way]),
            _OUTCOMES: str(outcomes),
            "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        }
        plugins = ["-p", "benchmarks.torchdata_suite", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugins, *arguments]
        folder = checkout / "test" / "stateful_dataloader"
        subprocess.run(command, cwd=folder, env=variables, check=False)
        found: Outcomes = json.loads(outcomes.read_text())
    return found


def unexpected(found: Mapping[str, Outcomes]) -> dict[str, list[str]]:
    """Return the tests of each way that fail, pass plain, and are not expected to fail."""
    plain = found.get("plain", {})
    return {
        way: [
            test
            for test, outcome in outcomes.items()
            if outcome == "failed"
            and plain.get(test) != "failed"
            and test.split("::")[-1] not in EXPECTED
        ]
        for way, outcomes in found.items()
        if way != "plain"
    }


def table(found: Mapping[str, Outcomes]) -> str:
    """Return the number of tests with each outcome, and the tests that fail, as Markdown."""
    kinds = ("passed", "failed", "skipped")
    counts = [
        [way, *(list(outcomes.values()).count(kind) for kind in kinds)]
        for way, outcomes in found.items()
    ]
    failed: dict[str, list[str]] = {}
    for way, outcomes in found.items():
        for test, outcome in outcomes.items():
            if outcome == "failed":
                failed.setdefault(test.split("::", 1)[-1], []).append(way)
    plain = "it fails without pinfeed, too"
    reasons = [
        [
            test,
            ", ".join(ways),
            plain if "plain" in ways else EXPECTED.get(test.split("::")[-1], "not expected"),
        ]
        for test, ways in failed.items()
    ]
    return "\n\n".join(
        (
            tabulate(counts, ["way", *kinds], tablefmt="github"),
            tabulate(reasons, ["test that fails", "ways", "reason"], tablefmt="github"),
        )
    )


def main() -> int:
    """Run the suite in every way; return 1 if a test fails that is not expected to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/pytorch/data")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--select", default="", help="tests to run, as for pytest -k")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    found = {way: run(arguments.checkout, way, arguments.select) for way in arguments.ways}
    text = table(found)
    print(text)
    if arguments.save:
        from benchmarks.environment import RESULTS, environment, machine

        path = RESULTS / f"torchdata-suite-{machine()}.md"
        path.write_text(f"{text}\n\n{environment()}\n")
    not_expected = unexpected(found)
    for way, tests in not_expected.items():
        for test in tests:
            print(f"{way}: {test} fails, which is not expected")
    return int(any(not_expected.values()))


if __name__ == "__main__":
    sys.exit(main())
