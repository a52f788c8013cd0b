"""Types of what feeders are given, for type checkers; no module imports this one when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import numpy.typing as npt
import torch

from pinfeed.memory.limits import MemoryLimits
from pinfeed.pipeline.active_run import Again
from pinfeed.rows.orders import Order
from pinfeed.rows.ranks import Ranks
from pinfeed.stores.base import Store

Tensor = torch.Tensor
TensorSource = npt.NDArray[Any] | torch.Tensor | Store
"""Source whose batches are tensors. A path is none, because a Parquet file has several columns."""
S = TypeVar("S", bound=TensorSource)
K = TypeVar("K")
T = TypeVar("T")
U = TypeVar("U")
Function = Callable[..., U]
"""Function that takes a batch and maybe a generator."""
Fetch = Mapping[K, tuple[Any, Any]]
"""Source and ids of the rows of each key, as ``wrap_loader`` takes them."""


class NamedSources(Protocol):
    """Named tuple. Its batches are of the same class, whose fields have types of their own."""

    @property
    def _fields(self) -> tuple[str, ...]: ...


class LoopArguments(TypedDict, total=False):
    """Keyword arguments of every loop, without functions on batches."""

    device: Any
    depth: int | None
    again: Again
    progress: bool
    timeline: bool


class FeederArguments(LoopArguments, total=False):
    """Keyword arguments of ``Feeder``, without functions on batches."""

    batch_size: int | None
    config: MemoryLimits | None
    rows: Order | Iterable[Any] | None
    shuffle: bool
    seed: int
    drop_last: bool
    ranks: Ranks | Literal["pad", "drop", "join", "all"] | None
    route: str | None
    verify: bool


class LoaderArguments(LoopArguments, total=False):
    """Keyword arguments of ``wrap_loader``, without ``fetch`` and functions on batches."""

    config: MemoryLimits | None
    on_error: Literal["raise", "next"]
    seed: int | None


class TableLoopArguments(LoopArguments, total=False):
    """Keyword arguments of ``read_rows``, without functions on batches."""

    config: MemoryLimits | None
    look_ahead: int | None
    route: str | None
    verify: bool
    seed: int | None


class TrainArguments(TableLoopArguments, total=False):
    """Keyword arguments of ``train_rows``, without functions on batches."""

    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
