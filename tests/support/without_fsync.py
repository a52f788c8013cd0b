"""A fixture that lets tests write files without waiting for the disk."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def without_fsync() -> Iterator[None]:
    """Leave written pages in the page cache, where other processes read them as well.

    Only a machine that loses power would show a difference, and waiting took up to half of the time
    of these tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
