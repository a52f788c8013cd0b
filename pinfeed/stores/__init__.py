"""Where rows live on the host."""

from .array import ArrayStore
from .arrow import ArrowStore
from .base import Store
from .mmap import MmapStore
from .pinned import PinnedStore
from .remote import RemoteStore

__all__ = ["ArrayStore", "ArrowStore", "MmapStore", "PinnedStore", "RemoteStore", "Store"]
