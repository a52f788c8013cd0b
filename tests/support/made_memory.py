"""Memory that tests allocate, and whether it still exists."""

import weakref

import numpy as np

from pinfeed.memory.pages import Bytes, anonymous


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


class System:
    """Allocator that records which memory has not been freed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._made: list[weakref.ref[Bytes]] = []

    def make(self, nbytes: int) -> Bytes:
        memory = anonymous(nbytes)
        self.sizes.append(nbytes)
        self._made.append(weakref.ref(memory))
        return memory

    @property
    def alive(self) -> list[bool]:
        """Return whether each allocation still exists, in the order of allocation."""
        return [made() is not None for made in self._made]
