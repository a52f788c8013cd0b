"""pinfeed: rows of host memory or of files, on the device a batch ahead, under a memory budget that holds."""

import sys
from typing import TYPE_CHECKING, Any

# Before the other imports: some of them fail elsewhere, with errors that do not say why.
if sys.platform != "linux":
    raise ImportError(
        f"pinfeed runs on Linux, and this is {sys.platform}; on Windows, use it within WSL 2, else in a container or on a server"
    )

from pinfeed import errors, rows
from pinfeed.errors import (
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
from pinfeed.feeders.dataloader import wrap_loader
from pinfeed.feeders.feeder import Batch, Feeder
from pinfeed.feeders.functions import wrap_readers
from pinfeed.feeders.restartable import restartable
from pinfeed.memory.limits import GiB, KiB, MiB, Plan
from pinfeed.profiling.stats import FeederStats
from pinfeed.rows.ranks import Ranks
from pinfeed.stores import ArrayStore, ArrowStore, MmapStore, PinnedStore, RemoteStore, Store

if TYPE_CHECKING:
    from pinfeed.feeders.dataset import RowDataset as RowDataset
    from pinfeed.training import checkpoint as checkpoint
    from pinfeed.training.distributed.table import ShardedEmbedding as ShardedEmbedding
    from pinfeed.training.distributed.table import ShardedEmbeddingBag as ShardedEmbeddingBag
    from pinfeed.training.embeddings.bag import HostEmbeddingBag as HostEmbeddingBag
    from pinfeed.training.embeddings.optimizer import RowOptimizer as RowOptimizer
    from pinfeed.training.embeddings.table import HostEmbedding as HostEmbedding
    from pinfeed.training.large_batch.big_batch import BigBatch as BigBatch
    from pinfeed.training.memory_model.config import Config as Config
    from pinfeed.training.memory_model.estimate import estimate as estimate
    from pinfeed.training.row_loop.loop import train_rows as train_rows
    from pinfeed.training.trainer.memory_monitor import MemoryMonitor as MemoryMonitor
    from pinfeed.training.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

_WITH_TORCH = {
    "Config": "training.memory_model.config",
    "HostEmbedding": "training.embeddings.table",
    "HostEmbeddingBag": "training.embeddings.bag",
    "MemoryMonitor": "training.trainer.memory_monitor",
    "RowDataset": "feeders.dataset",
    "RowOptimizer": "training.embeddings.optimizer",
    "ShardedEmbedding": "training.distributed.table",
    "ShardedEmbeddingBag": "training.distributed.table",
    "Trainer": "training.trainer.trainer",
    "BigBatch": "training.large_batch.big_batch",
    "estimate": "training.memory_model.estimate",
    "train_rows": "training.row_loop.loop",
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
