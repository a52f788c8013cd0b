"""Write-backs of these tests are completed by the writer thread, unless a test says otherwise."""

from collections.abc import Iterator

import pytest
from support.schedules import short_writes


@pytest.fixture(autouse=True)
def long_writes() -> Iterator[None]:
    with short_writes(False):
        yield
