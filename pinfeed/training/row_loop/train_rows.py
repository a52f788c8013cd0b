"""train_rows() and read_rows(): loops over a loader that prefetch the table rows of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from pinfeed.devices import DeviceLike
from pinfeed.feeders.base_feeder import LoopOptions
from pinfeed.feeders.hints import READ_LOOP_HINTS, TABLE_LOOP_HINTS
from pinfeed.memory.limits import MemoryLimits
from pinfeed.tensors.argument_types import IdsOfBatch
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_loop.loop import RowLoop
from pinfeed.training.row_loop.loop_table import RowOptimizers, read_tables, trained_tables
from pinfeed.validation.arguments import explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import T, TableLoopArguments, TrainArguments


@overload
def train_rows(
    loader: Iterable[T],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    **options: Unpack[TrainArguments],
) -> RowLoop[T]: ...


@overload
def train_rows(
    loader: Iterable[Any],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    host_transform: Callable[..., Any] | None = None,
    device_transform: Callable[..., Any] | None = None,
    **options: Unpack[TrainArguments],
) -> RowLoop[Any]: ...


@explain_arguments(TABLE_LOOP_HINTS)
def train_rows(
    loader: Iterable[Any],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    optimizer: RowOptimizers = (),
    config: MemoryLimits | None = None,
    depth: int | None = None,
    device: DeviceLike = "auto",
    route: str | None = None,
    progress: bool = False,
    timeline: bool = False,
    host_transform: Callable[..., Any] | None = None,
    device_transform: Callable[..., Any] | None = None,
    transform_threads: int | None = None,
    verify: bool = False,
    seed: int | None = None,
) -> RowLoop[Any]:
    """Iterate over a loader's batches on the device, and prefetch the table rows of each batch.

    Background threads work a few batches ahead. They request a batch from the loader, collect its
    distinct ids, and copy the rows of these ids and their optimizer state to the device. If an
    earlier batch changes some of these rows, their prefetched copies are updated on the device.
    When the loop requests the next batch or ends, pinfeed writes the rows of the batch back in the
    background. The write-back follows all work that is queued in the current stream. All writes are
    complete when the loop has ended. Losses, tables and optimizer state equal those of the
    synchronous loop (``depth=0``) bit for bit.

    Examples:
        >>> users = pinfeed.HostEmbedding(1_000, 16, name="users")
        >>> optimizer = pinfeed.RowOptimizer(torch.optim.Adam, [users], lr=1e-3)
        >>> loader = [{"user": torch.randint(1_000, (64,))} for _ in range(10)]
        >>> for batch in pinfeed.train_rows(loader, {users: "user"}, optimizer=optimizer):
        ...     users(batch["user"]).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    With sharded tables, all ranks loop at the same time. Each rank loops over its own batches, and
    all ranks need the same number of batches.

    Args:
        loader: A DataLoader, or any iterable of batches on the host, as for ``wrap_loader``.
        tables: For each table, the key of its ids in the batch, or a function that returns the ids
            of a batch on the host. It must return all ids that the training step will look up. Ids
            are integers in a tensor or array of any shape, or several of these in a tuple, list or
            dict. The function gets one batch at a time, in order. A background thread calls it; in
            the synchronous loop, the thread of the training loop does.
        optimizer: The RowOptimizer that steps in the loop, alone or in a CombinedOptimizer, or
            several of these. Their state is moved together with the rows.
        config: A ``pinfeed.Config`` with memory limits, which bound the caches of tables
            (``device_cache``). Caches of size ``"auto"`` take ``Config(device_cache=...)`` bytes.
            If this is not set, they take three quarters of the memory that the limits leave,
            because the rows of the batches need the rest. With None, the free memory is the limit.
            Its ``depth`` is used if the argument ``depth`` is None.
        depth: Number of batches to prefetch, at most 1,024. 0 is the synchronous loop, in which the
            training loop itself requests batches and ids. None is 2, or 0 on the CPU without
            sharded tables and transforms, because no copy needs to be hidden.
        device: Target device, as for ``Feeder``.
        route: Route of rows of page-locked (pinned) stores to a GPU, as for ``Feeder``. None is
            ``"direct"`` if kernels run on the GPU.
        verify: Whether to compare all rows with the synchronous loop. The loop then keeps a copy of
            every row that it has used, and raises VerificationError at the first difference. Every
            batch waits for the device.
        progress: Whether to show a progress bar.
        timeline: Whether to record what takes time in every batch.
        host_transform: Function that takes each batch of the loader and returns a batch of any
            structure, as for ``wrap_loader``. It runs before the ids are collected.
        device_transform: Function that takes each batch on the device, without the rows of tables,
            and returns what the loop receives, as for ``wrap_loader``. Ids that it returns
            unchanged are looked up without a search.
        transform_threads: Number of reader threads that call ``host_transform``, as for
            ``wrap_loader``. With more than one, several threads call the functions in ``tables`` at
            the same time, and tables may be neither sharded nor have a ``device_cache``.
        seed: Seed of the random generators of the transforms. None is 0.

    Raises:
        ArgumentError: If no table is given, a trained table shares its rows, only some of the
            tables are sharded, or an optimizer is not a RowOptimizer. Also if a cache is smaller
            than a row, a function is not callable, or ``seed`` is given without a function that
            takes a generator.
        BudgetError: If caches take more memory than ``config`` leaves.
        UnknownArgument: If an argument does not exist. The message says where it belongs.
        DeviceError: If the device does not exist.
    """
    return RowLoop(
        loader,
        trained_tables(tables, optimizer),
        config=config,
        depth=depth,
        device=device,
        route=route,
        verify=verify,
        options=LoopOptions(
            progress, timeline, host_transform, device_transform, seed, transform_threads
        ),
    )


@overload
def read_rows(
    loader: Iterable[T],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    **options: Unpack[TableLoopArguments],
) -> RowLoop[T]: ...


@overload
def read_rows(
    loader: Iterable[Any],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    host_transform: Callable[..., Any] | None = None,
    device_transform: Callable[..., Any] | None = None,
    **options: Unpack[TableLoopArguments],
) -> RowLoop[Any]: ...


@explain_arguments(READ_LOOP_HINTS)
def read_rows(
    loader: Iterable[Any],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    config: MemoryLimits | None = None,
    depth: int | None = None,
    device: DeviceLike = "auto",
    route: str | None = None,
    progress: bool = False,
    timeline: bool = False,
    host_transform: Callable[..., Any] | None = None,
    device_transform: Callable[..., Any] | None = None,
    transform_threads: int | None = None,
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
        depth: Number of batches to prefetch; None as for ``train_rows``.
        device: Target device, as for ``Feeder``.
        route: Route of rows of page-locked (pinned) stores to a GPU, as for ``Feeder``. None is
            ``"direct"`` if the GPU can read and write all of them.
        progress: Whether to show a progress bar.
        timeline: Whether to record what takes time in every batch.
        host_transform: Function that takes each batch of the loader, as for ``train_rows``.
        device_transform: Function that takes each batch on the device, as for ``train_rows``.
        transform_threads: Number of reader threads that call ``host_transform``, as for
            ``train_rows``.
        verify: Whether to compare all rows with the synchronous loop, as for ``train_rows``.
        seed: Seed of the random generators of the transforms. None is 0.

    Raises:
        ArgumentError: If no table is given, only some of the tables are sharded, or a cache is
            smaller than a row.
        BudgetError: If caches take more memory than ``config`` leaves.
        UnknownArgument: If an argument does not exist. The message says where it belongs.
        DeviceError: If the device does not exist.
    """
    return RowLoop(
        loader,
        read_tables(tables),
        config=config,
        depth=depth,
        device=device,
        route=route,
        verify=verify,
        options=LoopOptions(
            progress, timeline, host_transform, device_transform, seed, transform_threads
        ),
    )
