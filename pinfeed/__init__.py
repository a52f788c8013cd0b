"""pinfeed: rows of host memory or of files, on the device a batch ahead, under a memory budget that holds."""

from . import errors, rows
from .config import Config, GiB, KiB, MiB, Plan
from .errors import (
    ArgumentError,
    BudgetError,
    ClosedError,
    DeviceError,
    FileMissing,
    MissingDependency,
    PinfeedError,
    ReadError,
    RowIndexError,
    StoreError,
    WorkerError,
    WriteBackError,
)
from .feeder import Batch, Feeder
from .loader import wrap_loader
from .stats import FeederStats
from .stores import ArrayStore, MmapStore, PinnedStore, RemoteStore, Store

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArrayStore",
    "Batch",
    "BudgetError",
    "ClosedError",
    "Config",
    "DeviceError",
    "Feeder",
    "FeederStats",
    "FileMissing",
    "GiB",
    "KiB",
    "MiB",
    "MissingDependency",
    "MmapStore",
    "PinfeedError",
    "PinnedStore",
    "Plan",
    "ReadError",
    "RemoteStore",
    "RowIndexError",
    "Store",
    "StoreError",
    "WorkerError",
    "WriteBackError",
    "errors",
    "rows",
    "wrap_loader",
]
