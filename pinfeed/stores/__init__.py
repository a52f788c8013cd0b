"""Stores: rows of equal shape and dtype, in host memory or in files."""

from pinfeed.stores.array import ArrayStore as ArrayStore
from pinfeed.stores.arrow import ArrowStore as ArrowStore
from pinfeed.stores.hdf5 import HDF5Store as HDF5Store
from pinfeed.stores.matrix import MatrixStore as MatrixStore
from pinfeed.stores.npy_store import NpyStore as NpyStore
from pinfeed.stores.parquet import ParquetStore as ParquetStore
from pinfeed.stores.pinned import PinnedStore as PinnedStore
from pinfeed.stores.ragged import RaggedStore as RaggedStore
from pinfeed.stores.remote import RemoteStore as RemoteStore
from pinfeed.stores.sparse import SparseStore as SparseStore
from pinfeed.stores.store import Store as Store
from pinfeed.stores.text import TextStore as TextStore
from pinfeed.stores.zarr import ZarrStore as ZarrStore
