"""Prefetching of rows from host memory or files to a device, within memory limits."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# This check precedes the other imports, because on other systems they fail with obscure errors.
if sys.platform != "linux":
    raise ImportError(
        f"pinfeed runs on Linux, and this is {sys.platform}; on Windows, use WSL 2; elsewhere, "
        "use a Linux container or server"
    )

from pinfeed import errors, rows
from pinfeed.errors import (
    ArgumentError,
    BudgetError,
    CheckpointError,
    ClosedError,
    DeviceError,
    EstimateError,
    PinfeedError,
    RankError,
    ReadError,
    StoreError,
    VerificationError,
    WriteBackError,
)
from pinfeed.feeders.batch import Batch
from pinfeed.feeders.dataset_feeder import wrap_dataset
from pinfeed.feeders.endless import endless
from pinfeed.feeders.feeder import Feeder
from pinfeed.feeders.loader_feeder import wrap_loader
from pinfeed.feeders.reader_feeder import wrap_readers
from pinfeed.feeders.replay_buffer import ReplayBuffer
from pinfeed.feeders.tar_dataset import TarDataset
from pinfeed.memory.plan import Plan
from pinfeed.memory.units import GiB, KiB, MiB
from pinfeed.profiling.stats import FeederStats
from pinfeed.rows.ranks import Ranks
from pinfeed.stores import (
    ArrayStore,
    ArrowStore,
    HDF5Store,
    MatrixStore,
    NpyStore,
    ParquetStore,
    PinnedStore,
    RaggedStore,
    RemoteStore,
    SparseStore,
    Store,
    TextStore,
    ZarrStore,
)
from pinfeed.stores.concat import concat, source_ids
from pinfeed.validation.messages import install_log_output

install_log_output()

if TYPE_CHECKING:
    from pinfeed import checkpoint as checkpoint
    from pinfeed.feeders.dataset import RowDataset as RowDataset
    from pinfeed.feeders.mean_and_std import mean_and_std as mean_and_std
    from pinfeed.training.distributed.sharded_table import ShardedEmbedding as ShardedEmbedding
    from pinfeed.training.distributed.sharded_table import (
        ShardedEmbeddingBag as ShardedEmbeddingBag,
    )
    from pinfeed.training.embeddings.bag import HostEmbeddingBag as HostEmbeddingBag
    from pinfeed.training.embeddings.combined_optimizer import (
        CombinedOptimizer as CombinedOptimizer,
    )
    from pinfeed.training.embeddings.optimizer import RowOptimizer as RowOptimizer
    from pinfeed.training.embeddings.table import HostEmbedding as HostEmbedding
    from pinfeed.training.large_batch.big_batch import BigBatch as BigBatch
    from pinfeed.training.memory_model.config import Config as Config
    from pinfeed.training.memory_model.estimate import estimate as estimate
    from pinfeed.training.offload.offload import Offload as Offload
    from pinfeed.training.row_loop.train_rows import read_rows as read_rows
    from pinfeed.training.row_loop.train_rows import train_rows as train_rows

__version__ = "0.1.0"

MmapStore = NpyStore
"""Earlier name of ``NpyStore``."""

_WITH_TORCH = {
    "CombinedOptimizer": "training.embeddings.combined_optimizer",
    "Config": "training.memory_model.config",
    "HostEmbedding": "training.embeddings.table",
    "HostEmbeddingBag": "training.embeddings.bag",
    "Offload": "training.offload.offload",
    "RowDataset": "feeders.dataset",
    "RowOptimizer": "training.embeddings.optimizer",
    "ShardedEmbedding": "training.distributed.sharded_table",
    "ShardedEmbeddingBag": "training.distributed.sharded_table",
    "BigBatch": "training.large_batch.big_batch",
    "estimate": "training.memory_model.estimate",
    "mean_and_std": "feeders.mean_and_std",
    "read_rows": "training.row_loop.train_rows",
    "train_rows": "training.row_loop.train_rows",
}
"""Modules of the public names that need torch; each is imported when its name is first used."""

__all__ = [
    "ArgumentError",
    "ArrayStore",
    "ArrowStore",
    "Batch",
    "BigBatch",
    "BudgetError",
    "CheckpointError",
    "ClosedError",
    "CombinedOptimizer",
    "Config",
    "DeviceError",
    "EstimateError",
    "Feeder",
    "FeederStats",
    "GiB",
    "HDF5Store",
    "HostEmbedding",
    "HostEmbeddingBag",
    "KiB",
    "MatrixStore",
    "MiB",
    "MmapStore",
    "NpyStore",
    "Offload",
    "ParquetStore",
    "PinfeedError",
    "PinnedStore",
    "Plan",
    "RaggedStore",
    "RankError",
    "Ranks",
    "ReadError",
    "RemoteStore",
    "ReplayBuffer",
    "RowDataset",
    "RowOptimizer",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "SparseStore",
    "Store",
    "StoreError",
    "TarDataset",
    "TextStore",
    "VerificationError",
    "WriteBackError",
    "ZarrStore",
    "checkpoint",
    "concat",
    "endless",
    "errors",
    "estimate",
    "mean_and_std",
    "read_rows",
    "rows",
    "source_ids",
    "train_rows",
    "wrap_dataset",
    "wrap_loader",
    "wrap_readers",
]


def __getattr__(name: str) -> Any:
    """Import a name that needs torch, when it is first used."""
    if name == "checkpoint":
        return importlib.import_module("pinfeed.checkpoint")
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f"pinfeed.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, loaded or not, and the module's own attributes."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
