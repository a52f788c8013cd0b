"""Earlier: benchmark functions that run with the pinfeed of an earlier commit.

They run in a process of their own, so that one benchmark can measure both in turn:

    git worktree add ../before v0.1
    python -m benchmarks.rows --before ../before
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


class Earlier:
    """A process that imports the benchmarks from here and pinfeed from another checkout.

    Args:
        checkout: Folder that contains the package ``pinfeed``.
    """

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.earlier", str(checkout.resolve())],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Earlier:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # The process ends with its input.
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function in the process and return its result.

        Args:
            function: ``"module:name"``.
            arguments: Values that JSON can represent, as the result must be.

        Raises:
            RuntimeError: If the function raised an error, or the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The pipe is broken if the process has ended.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([function, arguments]) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the earlier pinfeed ended during {function}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{function} with the earlier pinfeed:\n{answer['error']}")
        return answer["result"]


def add_before(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--before``."""
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="folder with an earlier commit, whose pinfeed is measured in the same run",
    )


@contextlib.contextmanager
def opened(checkout: Path | None) -> Iterator[Earlier | None]:
    """Open the earlier pinfeed that ``--before`` names.

    Raises:
        SystemExit: If the folder has no package ``pinfeed``.
    """
    if checkout is None:
        yield None
        return
    if not (checkout / "pinfeed" / "__init__.py").is_file():
        raise SystemExit(
            f"--before {checkout}: has no pinfeed/__init__.py; expected a checkout of an earlier "
            "commit, as git worktree add makes it"
        )
    with Earlier(checkout) as earlier:
        yield earlier


def serve(checkout: str) -> None:
    """Make the calls that the standard input names, and write the results."""
    sys.path.insert(0, checkout)
    import pinfeed

    # The benchmarks are those of this checkout.
    sys.path.remove(checkout)
    assert pinfeed.__file__ is not None
    assert Path(pinfeed.__file__).is_relative_to(checkout)
    # The benchmarks print to the standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        function, arguments = json.loads(line)
        module, name = function.split(":")
        try:
            result = getattr(importlib.import_module(module), name)(*arguments)
            answer = {"result": result}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
