"""train_rows(): a loop over a loader's batches that prefetches the rows which they look up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from pinfeed.feeders.hints import TABLE_LOOP_HINTS
from pinfeed.feeders.options import TableLoopOptions
from pinfeed.memory.limits import MemoryLimits
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_loop.lent_table import RowOptimizers, lent_tables
from pinfeed.training.row_loop.loop import RowLoop, check_loop_options
from pinfeed.validation.arguments import explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import Function, T, TrainArguments, U


@overload
def train_rows(
    loader: Any,
    tables: Mapping[HostEmbedding, Any],
    *,
    device_transform: Function[U],
    host_transform: Function[Any] | None = None,
    **options: Unpack[TrainArguments],
) -> RowLoop[U]: ...


@overload
def train_rows(
    loader: Any,
    tables: Mapping[HostEmbedding, Any],
    *,
    host_transform: Function[U],
    device_transform: None = None,
    **options: Unpack[TrainArguments],
) -> RowLoop[U]: ...


@overload
def train_rows(
    loader: Iterable[T],
    tables: Mapping[HostEmbedding, Any],
    *,
    host_transform: None = None,
    device_transform: None = None,
    **options: Unpack[TrainArguments],
) -> RowLoop[T]: ...


@explain_arguments(TABLE_LOOP_HINTS, options=TableLoopOptions)
def train_rows(
    loader: Any,
    tables: Mapping[HostEmbedding, Any],
    *,
    optimizer: RowOptimizers = (),
    config: MemoryLimits | None = None,
    depth: int | None = None,
    look_ahead: int | None = None,
    device: Any = "auto",
    route: str | None = None,
    **options: Unpack[TableLoopOptions],
) -> RowLoop[Any]:
    """Iterate a loader's batches on the device, together with the table rows that they look up.

    A few batches ahead, background threads ask the loader for a batch, collect the distinct ids
    that it looks up, and copy those rows of the tables, with their optimizer state, to the device.
    Rows that an earlier batch changes in the meantime are updated on the device. When the loop asks
    for the next batch, or ends, the rows of the batch are written back in the background, after all
    work that is queued in the current stream. All writes are complete when the loop has ended.
    Losses, tables and state equal those of the synchronous loop, ``depth=0``, bit for bit.

        users = pinfeed.HostEmbedding(50_000_000, 128)
        optimizer = pinfeed.RowOptimizer(torch.optim.Adam, [users], lr=1e-3)
        ids = {users: lambda batch: batch["user"]}
        for batch in pinfeed.train_rows(loader, ids, optimizer=optimizer):
            loss = model(users(batch["user"]), batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    If tables are sharded, all ranks loop at the same time, each over its own batches, and over
    equally many of them.

    Args:
        loader: A DataLoader, or any iterable of batches on the host, as for ``wrap_loader``.
        tables: For each table, a function that takes a batch on the host and returns the ids that
            the training step will look up: integers in a tensor or array of any shape, or several
            of these in a tuple, list or dict. Or the key of the batch under which they are. The
            function is called by a background thread, or by the training thread in the synchronous
            loop, one batch at a time, in order.
        optimizer: The RowOptimizer, or several, that step in the loop, alone or in a
            CombinedOptimizer; their state is moved with the rows.
        config: Memory limits, which bound the caches of tables (``device_cache``). Caches of the
            size ``"auto"`` take ``Config(device_cache=...)`` bytes, or else three quarters of what
            the limits leave, because the rows of the batches need memory, too. None for the free
            memory. Its ``depth`` is taken if none is given here.
        depth: Number of batches to prefetch, at most 1,024. 0 is the synchronous loop, in which the
            training thread asks for batches and ids. With None, the loop times some batches with 2
            of them ahead and some in the synchronous loop, and keeps the faster way, which
            ``depth_reason`` names. With ``verify`` or sharded tables, None is 2.
        look_ahead: Number of later batches that the caches of tables know when they decide which
            rows of a batch to keep. The loader is asked for these batches in advance, and they wait
            in host memory. With more of them, somewhat fewer rows travel. None is 2, or 0 in the
            synchronous loop. It has no effect without caches, or if tables are sharded.
        device: Target device, as for ``Feeder``.
        route: Route of rows of page-locked stores to a GPU, as for ``Feeder``.
        verify: Whether to keep a copy of every row that was lent, run the synchronous loop on it,
            and raise VerificationError at the first difference. Every batch then waits for the
            device.
        again: Rule for a loop that begins while an older one has not ended, as for ``Feeder``. The
            rows of the older loop are written back.
        progress: Whether to show a progress bar.
        timeline: Whether to record what takes time in every batch.
        host_transform: Function that takes each batch of the loader, before the ids are asked for,
            and returns a batch of any structure, as for ``wrap_loader``.
        device_transform: Function that takes each batch on the device, without the rows of tables,
            and returns what the loop gets, as for ``wrap_loader``. Ids that it returns unchanged
            are looked up without a search.
        seed: Seed of the generators of these functions; None is 0.

    Raises:
        ArgumentError: If there are no tables, tables share rows, some tables are sharded and some
            are not, an optimizer is not a RowOptimizer, a cache does not hold a row, a function is
            not callable, or ``seed`` is given without a function that gets a generator.
        BudgetError: If caches take more memory than ``config`` leaves.
        UnknownArgument: If an argument does not exist. The message says where it belongs.
        DeviceError: If the device does not exist.
    """
    depth, look_ahead = check_loop_options(config, depth, look_ahead, options)
    return RowLoop(
        loader,
        lent_tables(tables, optimizer),
        config=config,
        depth=depth,
        look_ahead=look_ahead,
        device=device,
        route=route,
        options=options,
    )
