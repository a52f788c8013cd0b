"""pinfeed: rows of host memory or of files, on the device a batch ahead, under a memory budget that holds."""

import sys
from typing import TYPE_CHECKING, Any

# Before the other imports: some of them fail elsewhere, with errors that do not say why.
if sys.platform != "linux":
    raise ImportError(
        f"pinfeed runs on Linux, and this is {sys.platform}; on Windows, use it within WSL 2, else in a container or on a server"
    )

from . import errors, rows
from .config import GiB, KiB, MiB, Plan
from .errors import (
    ArgumentError,
    BudgetError,
    CheckpointError,
    ClosedError,
    CopyError,
    DeviceError,
    EstimateError,
    FileMissing,
    MissingDependency,
    NotEnoughCPUMemory,
    NotEnoughGPUMemory,
    PinfeedError,
    RankError,
    ReadError,
    RowIndexError,
    StoreError,
    UnknownArgument,
    VerificationError,
    WorkerError,
    WriteBackError,
)
from .feeder import Batch, Feeder
from .loader import wrap_loader
from .ranks import Ranks
from .readers import wrap_readers
from .restarting import restartable
from .seeing.stats import FeederStats
from .stores import ArrayStore, ArrowStore, MmapStore, PinnedStore, RemoteStore, Store

if TYPE_CHECKING:
    from .rowdataset import RowDataset as RowDataset
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
    from .training.sharded.table import ShardedEmbedding as ShardedEmbedding
    from .training.sharded.table import ShardedEmbeddingBag as ShardedEmbeddingBag

__version__ = "0.1.0"

_WITH_TORCH = {
    "Config": "training.memory.config",
    "HostEmbedding": "training.embedding",
    "HostEmbeddingBag": "training.embedding",
    "MemoryMonitor": "training.manage.monitor",
    "RowDataset": "rowdataset",
    "RowOptimizer": "training.optimizer",
    "ShardedEmbedding": "training.sharded.table",
    "ShardedEmbeddingBag": "training.sharded.table",
    "Trainer": "training.manage.trainer",
    "BigBatch": "training.big.bigbatch",
    "estimate": "training.memory.estimate",
    "train_rows": "training.rowloop",
}

__all__ = [
    "ArgumentError",
    "ArrayStore",
    "ArrowStore",
    "Batch",
    "BigBatch",
    "BudgetError",
    "CheckpointError",
    "ClosedError",
    "Config",
    "CopyError",
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
    "RankError",
    "Ranks",
    "ReadError",
    "RemoteStore",
    "RowDataset",
    "RowIndexError",
    "RowOptimizer",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "Store",
    "StoreError",
    "Trainer",
    "UnknownArgument",
    "VerificationError",
    "WorkerError",
    "WriteBackError",
    "checkpoint",
    "errors",
    "estimate",
    "restartable",
    "rows",
    "train_rows",
    "wrap_loader",
    "wrap_readers",
]


def __getattr__(name: str) -> Any:
    """What needs torch from the start is loaded when it is asked for."""
    import importlib

    if name == "checkpoint":
        return importlib.import_module(".training.checkpoint", __name__)
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those that are loaded when they are asked for among them, and the module's own attributes."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
