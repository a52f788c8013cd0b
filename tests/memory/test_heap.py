"""The heap: freed memory returns to the system if the C library can do this."""

import ctypes
from types import SimpleNamespace

import pytest

from pinfeed.memory.host import trim_heap


@pytest.mark.parametrize("is_glibc", [True, False])
def test_the_heap_is_trimmed_if_the_c_library_can_do_this(
    is_glibc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_nbytes: list[int] = []
    library = SimpleNamespace(malloc_trim=kept_nbytes.append) if is_glibc else SimpleNamespace()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    trim_heap()
    assert kept_nbytes == [0] * is_glibc
