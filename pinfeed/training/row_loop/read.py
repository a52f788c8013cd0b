"""read_rows(): a loop over a loader that prefetches table rows without training them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from pinfeed.feeders.base_feeder import LoopOptions
from pinfeed.feeders.hints import READ_LOOP_HINTS
from pinfeed.memory.limits import MemoryLimits
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_loop.loop import RowLoop, check_loop_options
from pinfeed.training.row_loop.read_table import read_tables
from pinfeed.validation.arguments import explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import Function, T, TableLoopArguments, U


@overload
def read_rows(
    loader: Any,
    tables: Mapping[HostEmbedding, Any],
    *,
    device_transform: Function[U],
    host_transform: Function[Any] | None = None,
    **options: Unpack[TableLoopArguments],
) -> RowLoop[U]: ...


@overload
def read_rows(
    loader: Any,
    tables: Mapping[HostEmbedding, Any],
    *,
    host_transform: Function[U],
    device_transform: None = None,
    **options: Unpack[TableLoopArguments],
) -> RowLoop[U]: ...


@overload
def read_rows(
    loader: Iterable[T],
    tables: Mapping[HostEmbedding, Any],
    *,
    host_transform: None = None,
    device_transform: None = None,
    **options: Unpack[TableLoopArguments],
) -> RowLoop[T]: ...


@explain_arguments(READ_LOOP_HINTS)
def read_rows(
    loader: Any,
    tables: Mapping[HostEmbedding, Any],
    *,
    config: MemoryLimits | None = None,
    depth: int | None = None,
    look_ahead: int | None = None,
    device: Any = "auto",
    route: str | None = None,
    again: Literal["end", "refuse"] = "end",
    progress: bool = False,
    timeline: bool = False,
    host_transform: Callable[..., Any] | None = None,
    device_transform: Callable[..., Any] | None = None,
    verify: bool = False,
    seed: int | None = None,
) -> RowLoop[Any]:
    """Iterate over a loader's batches, and prefetch their table rows without training them.

    The rows are prefetched as in ``train_rows``. They have no gradients in any mode of the model,
    and are not written back. Optimizer state is not read. Use it to evaluate after an epoch or in a
    training step, to serve a table that another program has written, or to train a dense model on
    frozen tables.

    Examples:
        >>> users = pinfeed.HostEmbedding(1_000, 16, name="users")
        >>> loader = [{"user": torch.tensor([3, 7])}]
        >>> for batch in pinfeed.read_rows(loader, {users: "user"}):
        ...     print(users(batch["user"]).shape)
        torch.Size([2, 16])

    Several loops may read a table at the same time, in one or in several threads. Tables may be
    frozen or read-only, and may share rows. Lookups read ids that the function in ``tables`` did
    not return from the store. While a loop over ``train_rows`` uses one of the tables, loop inside
    its ``evaluating()``:

        with batches.evaluating():
            for batch in pinfeed.read_rows(test_loader, ids):
                ...

    Inside ``evaluating()``, tables have no cache (``device_cache``), because the caches of the
    training loop keep their memory. You can create the loop once and iterate over it in each
    evaluation, or create a new one each time. The results are the same.

    With ``max_norm``, a lookup renormalizes a copy of the rows. The table does not change.

    Args:
        loader: A DataLoader, or any iterable of batches on the host, as for ``wrap_loader``.
        tables: For each table, the key of its ids in the batch, or a function that returns the ids
            of a batch on the host, as for ``train_rows``.
        config: A ``pinfeed.Config`` with memory limits, which bound the caches of tables, as for
            ``train_rows``.
        depth: Number of batches to prefetch. 0 is the synchronous loop. With None, the loop
            measures which is faster, as for ``train_rows``.
        look_ahead: Number of later batches that the caches of tables know, as for ``train_rows``.
        device: Target device, as for ``Feeder``.
        route: Route of rows of page-locked (pinned) stores to a GPU, as for ``Feeder``.
        again: Rule for a loop that begins while an older one has not ended, as for ``Feeder``.
        progress: Whether to show a progress bar.
        timeline: Whether to record what takes time in every batch.
        host_transform: Function that takes each batch of the loader, as for ``train_rows``.
        device_transform: Function that takes each batch on the device, as for ``train_rows``.
        verify: Whether to compare all rows with the synchronous loop, as for ``train_rows``.
        seed: Seed of the random generators of the transforms. None is 0.

    Raises:
        ArgumentError: If no table is given, only some of the tables are sharded, or a cache is
            smaller than a row.
        BudgetError: If caches take more memory than ``config`` leaves.
        UnknownArgument: If an argument does not exist. The message says where it belongs.
        DeviceError: If the device does not exist.
    """
    options = LoopOptions(again, progress, timeline, host_transform, device_transform, seed)
    depth, look_ahead = check_loop_options(config, depth, look_ahead, verify, options)
    return RowLoop(
        loader,
        read_tables(tables),
        config=config,
        depth=depth,
        look_ahead=look_ahead,
        device=device,
        route=route,
        verify=verify,
        options=options,
    )
