"""Types of what feeders are given, for type checkers; no module imports this one when it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import numpy.typing as npt
import torch

from pinfeed.feeders.options import FeederOptions, LoaderOptions, TableLoopOptions
from pinfeed.memory.limits import MemoryLimits
from pinfeed.rows.orders import Order
from pinfeed.rows.ranks import Ranks
from pinfeed.stores.base import Store

Tensor = torch.Tensor
TensorSource = npt.NDArray[Any] | torch.Tensor | Store
"""Source whose batches are tensors. A path is none, because a Parquet file has several columns."""
S = TypeVar("S", bound=TensorSource)
K = TypeVar("K")
T = TypeVar("T")
Fetch = Mapping[Any, tuple[Any, Any]]
"""Source and ids of the rows of each key, as ``wrap_loader`` takes them."""


class NamedSources(Protocol):
    """Named tuple. Its batches are of the same class, whose fields have types of their own."""

    @property
    def _fields(self) -> tuple[str, ...]: ...


class FeederArguments(FeederOptions, total=False):
    """Keyword arguments of ``Feeder``."""

    batch_size: int | None
    config: MemoryLimits | None
    rows: Order | Iterable[Any] | None
    shuffle: bool
    seed: int
    drop_last: bool
    ranks: Ranks | Literal["pad", "drop", "join", "all"] | None
    depth: int | None
    device: Any
    route: str | None


class LoaderArguments(LoaderOptions, total=False):
    """Keyword arguments of ``wrap_loader``, without ``fetch``."""

    device: Any
    depth: int | None
    config: MemoryLimits | None


class TableLoopArguments(TableLoopOptions, total=False):
    """Keyword arguments of ``train_rows``, without ``optimizer``."""

    config: MemoryLimits | None
    depth: int | None
    look_ahead: int | None
    device: Any
    route: str | None
