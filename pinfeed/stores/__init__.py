"""Stores: rows of equal shape and dtype, in host memory or in files."""

from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.file import MmapStore
from pinfeed.stores.hdf5 import HDF5Store
from pinfeed.stores.parquet import ParquetStore
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.store import Store
from pinfeed.stores.zarr import ZarrStore

__all__ = [
    "ArrayStore",
    "ArrowStore",
    "HDF5Store",
    "MmapStore",
    "ParquetStore",
    "PinnedStore",
    "RaggedStore",
    "RemoteStore",
    "Store",
    "ZarrStore",
]
