"""pinfeed: rows of host memory or of files, on the device a batch ahead, under a memory budget that holds."""

from . import errors, rows
from .config import Config, GiB, KiB, MiB, Plan
from .feeder import Batch, Feeder
from .loader import wrap_loader
from .stats import FeederStats
from .stores import ArrayStore, MmapStore, PinnedStore, Store

__version__ = "0.1.0"

__all__ = [
    "ArrayStore",
    "Batch",
    "Config",
    "Feeder",
    "FeederStats",
    "GiB",
    "KiB",
    "MiB",
    "MmapStore",
    "PinnedStore",
    "Plan",
    "Store",
    "errors",
    "rows",
    "wrap_loader",
]
