"""Stores: rows of equal shape and dtype that live on the host."""

from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.base import Store
from pinfeed.stores.file import MmapStore
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.remote import RemoteStore

__all__ = [
    "ArrayStore",
    "ArrowStore",
    "MmapStore",
    "PinnedStore",
    "RaggedStore",
    "RemoteStore",
    "Store",
]
