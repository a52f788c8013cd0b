"""pinfeed: rows of host memory or of files, on the device a batch ahead, under a memory budget that holds."""

from typing import TYPE_CHECKING, Any

from . import errors, rows
from .config import GiB, KiB, MiB, Plan
from .errors import (
    ArgumentError,
    BudgetError,
    CheckpointError,
    ClosedError,
    DeviceError,
    EstimateError,
    FileMissing,
    MissingDependency,
    NotEnoughCPUMemory,
    NotEnoughGPUMemory,
    PinfeedError,
    ReadError,
    RowIndexError,
    StoreError,
    VerificationError,
    WorkerError,
    WriteBackError,
)
from .feeder import Batch, Feeder
from .loader import wrap_loader
from .ranks import Ranks
from .readers import wrap_readers
from .stats import FeederStats
from .stores import ArrayStore, MmapStore, PinnedStore, RemoteStore, Store

if TYPE_CHECKING:
    from .training import checkpoint as checkpoint
    from .training.big.bigbatch import BigBatch as BigBatch
    from .training.embedding import HostEmbedding as HostEmbedding
    from .training.embedding import HostEmbeddingBag as HostEmbeddingBag
    from .training.manage.monitor import MemoryMonitor as MemoryMonitor
    from .training.manage.trainer import Trainer as Trainer
    from .training.memory.config import Config as Config
    from .training.memory.estimate import estimate as estimate
    from .training.optimizer import RowOptimizer as RowOptimizer
    from .training.rowloop import train_rows as train_rows

__version__ = "0.1.0"

_TRAINING = {
    "Config": "memory.config",
    "HostEmbedding": "embedding",
    "HostEmbeddingBag": "embedding",
    "MemoryMonitor": "manage.monitor",
    "RowOptimizer": "optimizer",
    "Trainer": "manage.trainer",
    "BigBatch": "big.bigbatch",
    "estimate": "memory.estimate",
    "train_rows": "rowloop",
}

__all__ = [
    "ArgumentError",
    "ArrayStore",
    "Batch",
    "BigBatch",
    "BudgetError",
    "CheckpointError",
    "ClosedError",
    "Config",
    "DeviceError",
    "EstimateError",
    "Feeder",
    "FeederStats",
    "FileMissing",
    "GiB",
    "HostEmbedding",
    "HostEmbeddingBag",
    "KiB",
    "MemoryMonitor",
    "MiB",
    "MissingDependency",
    "MmapStore",
    "NotEnoughCPUMemory",
    "NotEnoughGPUMemory",
    "PinfeedError",
    "PinnedStore",
    "Plan",
    "Ranks",
    "ReadError",
    "RemoteStore",
    "RowIndexError",
    "RowOptimizer",
    "Store",
    "StoreError",
    "Trainer",
    "VerificationError",
    "WorkerError",
    "WriteBackError",
    "checkpoint",
    "errors",
    "estimate",
    "rows",
    "train_rows",
    "wrap_loader",
    "wrap_readers",
]


def __getattr__(name: str) -> Any:
    """What a training loop adds needs torch from the start, and is loaded when it is asked for."""
    import importlib

    if name == "checkpoint":
        return importlib.import_module(".training.checkpoint", __name__)
    if name in _TRAINING:
        return getattr(importlib.import_module(f".training.{_TRAINING[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
