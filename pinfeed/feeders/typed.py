"""Types of the arguments of feeders, for type checkers; it is not imported at run time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import numpy.typing as npt
import torch

from pinfeed.devices import DeviceLike
from pinfeed.memory.limits import MemoryLimits
from pinfeed.rows.orders import Order
from pinfeed.rows.ranks import Ranks
from pinfeed.stores.store import Store
from pinfeed.tensors.argument_types import Ids

Tensor = torch.Tensor
TensorSource = npt.NDArray[Any] | torch.Tensor | Store
"""Source with batches that are tensors. It excludes paths, because tables in files have columns."""
S = TypeVar("S", bound=TensorSource)
K = TypeVar("K")
T = TypeVar("T")


class NamedSources(Protocol):
    """Named tuple. Its batches have the same class, with the types of its fields."""

    @property
    def _fields(self) -> tuple[str, ...]: ...


class LoopArguments(TypedDict, total=False):
    """Keyword arguments of every loop, without transforms."""

    device: DeviceLike
    depth: int | None
    progress: bool
    timeline: bool
    transform_threads: int | None


class FeederArguments(LoopArguments, total=False):
    """Keyword arguments of ``Feeder``, without transforms."""

    batch_size: int | None
    config: MemoryLimits | None
    rows: Order | Iterable[Ids] | None
    shuffle: bool
    seed: int
    drop_last: bool
    ranks: Ranks | Literal["pad", "drop", "join", "all"] | None
    route: str | None
    verify: bool
    continuous: bool | None


class LoaderArguments(LoopArguments, total=False):
    """Keyword arguments of ``wrap_loader``, without ``fetch`` and transforms."""

    config: MemoryLimits | None
    threads: int | None
    on_error: Literal["raise", "next", "skip"]
    max_skipped: int
    seed: int | None


class TableLoopArguments(LoopArguments, total=False):
    """Keyword arguments of ``read_rows``, without transforms."""

    config: MemoryLimits | None
    route: str | None
    verify: bool
    seed: int | None


class TrainArguments(TableLoopArguments, total=False):
    """Keyword arguments of ``train_rows``, without transforms."""

    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
