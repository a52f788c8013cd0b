"""Where rows live on the host."""

from .array import ArrayStore
from .base import Store
from .mmap import MmapStore
from .pinned import PinnedStore
from .remote import RemoteStore

__all__ = ["ArrayStore", "MmapStore", "PinnedStore", "RemoteStore", "Store"]
