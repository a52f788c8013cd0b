"""Cases of errors that give advice, and what a program that follows the advice does.

Each case is a generator. It first yields a call that fails, with an error that gives the advice.
Then it does what the error says, and yields whether the result is right, once for each advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import Feeder
from pinfeed.errors import PinfeedError

Case = Callable[[Path], Iterator[Any]]


class Cases:
    """Cases of a test module, which a decorator adds."""

    def __init__(self) -> None:
        self._cases: list[Any] = []

    def __call__(self, says: str) -> Callable[[Case], Case]:
        """Add a case whose error matches a pattern."""

        def add(case: Case) -> Case:
            self._cases.append(pytest.param(says, case, id=case.__name__))
            return case

        return add

    @property
    def each(self) -> pytest.MarkDecorator:
        """Mark of a test of all cases that were added so far."""
        return pytest.mark.parametrize(("says", "case"), self._cases)


def follow(says: str, case: Case, path: Path) -> None:
    """Provoke the error of a case, then do what it says."""
    steps = case(path)
    wrong = next(steps)
    with pytest.raises((PinfeedError, TypeError, AttributeError), match=says):
        wrong()
    followed = list(steps)
    assert followed
    assert all(followed), followed


def read(source: Any, batch_size: int = 4, **options: Any) -> Any:
    """Return all rows of an epoch, as arrays of numpy."""
    with Feeder(source, batch_size=batch_size, device="cpu", **options) as feeder:
        return joined(feeder)


def joined(batches: Any) -> Any:
    """Return the rows of all batches, one after the other."""
    found = list(batches)
    if isinstance(found[0], torch.Tensor):
        return torch.cat(found).numpy()
    return [torch.cat(part).numpy() for part in zip(*found, strict=True)]


def equal(found: Any, expected: Any) -> bool:
    """Return whether two arrays are equal."""
    return bool(np.array_equal(np.asarray(found), np.asarray(expected)))
