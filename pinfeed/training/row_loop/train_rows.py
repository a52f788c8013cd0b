"""train_rows() and read_rows(): loops over a loader that prefetch the table rows of each batch.

``RowLoop`` is such a loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from pinfeed.devices import DeviceLike, is_cpu
from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError
from pinfeed.feeders.base_feeder import LoopOptions, T_co
from pinfeed.feeders.hints import READ_LOOP_HINTS, TABLE_LOOP_HINTS
from pinfeed.feeders.loader_feeder import LoaderFeeder
from pinfeed.memory.limits import DEFAULT_DEPTH, MemoryLimits, check_optional_depth
from pinfeed.memory.plan import Plan, check_route
from pinfeed.pipeline.active_run import is_suspended
from pinfeed.pipeline.schedule import PrefetchSchedule, n_id_readers
from pinfeed.stores import ArrayStore
from pinfeed.tensors.argument_types import BatchFunction, IdsOfBatch
from pinfeed.training.distributed.rank_loop import Exchanged, RankLoop
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_loop.caches import cache_allocations, cache_notes, row_caches
from pinfeed.training.row_loop.loop_table import (
    LoopTable,
    RowOptimizers,
    read_tables,
    trained_tables,
)
from pinfeed.training.row_loop.row_source import LoaderReplay, TableRowSource
from pinfeed.training.row_loop.session import TableSession
from pinfeed.validation.arguments import check_flag, explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import T, TableLoopArguments, TrainArguments


class RowLoop(LoaderFeeder[T_co]):
    """A loop over a loader that prefetches the table rows of each batch.

    ``train_rows`` and ``read_rows`` return it. Each iteration over it is one epoch.

    Examples:
        >>> users = pinfeed.HostEmbedding(1_000, 16, name="users")
        >>> rows = pinfeed.RowOptimizer(torch.optim.SGD, [users], lr=0.1)
        >>> loader = [{"user": torch.tensor([3, 7])}]
        >>> batches = pinfeed.train_rows(loader, {users: "user"}, optimizer=rows)
        >>> for epoch in range(2):
        ...     for batch in batches:
        ...         users(batch["user"]).sum().backward()
        ...         rows.step()
        >>> state = batches.state_dict()

    Args:
        loader: Iterable of batches on the host.
        tables: The tables, with their optimizers.
        config: A ``pinfeed.Config`` with memory limits. With None, the free memory is the limit.
        depth: Number of batches to prefetch. None is 2, or 0 on the CPU without sharded tables
            and transforms, because no copy needs to be hidden.
        device: Target device, as the user named it.
        route: Route of rows of page-locked stores to a GPU. None is ``"direct"``, if possible.
        verify: Whether to compare all rows with the synchronous loop.
        options: The other options of the loop.
    """

    _source: TableRowSource

    def __init__(
        self,
        loader: Any,
        tables: Sequence[LoopTable],
        *,
        config: MemoryLimits | None,
        depth: int | None,
        device: DeviceLike,
        route: str | None,
        verify: bool,
        options: LoopOptions,
    ) -> None:
        if config is not None and not isinstance(config, MemoryLimits):
            raise ArgumentError(f"config={config!r}: expected a pinfeed.Config")
        depth = check_optional_depth(depth)
        if depth is None and config is not None:
            depth = config.depth
        check_flag(verify, "verify")
        options.require_generator_for_seed()
        self._wanted_route = check_route(route)
        self._config = config
        self._tables = tables
        self._stores = [store for used in tables for store in used.stores]
        is_sharded = any(used.sharded is not None for used in tables)
        if depth is None:
            # On the CPU, no copy needs to be hidden. Ranks also exchange rows ahead.
            has_work = is_sharded or options.has_transforms
            depth = DEFAULT_DEPTH if has_work or not is_cpu(device) else 0
        writes = not any(used.reads for used in tables)
        # A training step takes longer than to read its rows from memory.
        is_fast = writes and all(isinstance(store, ArrayStore) for store in self._stores)
        schedule = PrefetchSchedule(
            depth,
            n_readers=1 if is_fast else n_id_readers(depth),
            writes=writes,
            has_caches=any(used.table.device_cache is not None for used in tables),
        )
        schedule = options.in_threads(schedule, are_readers=True)
        if schedule.n_transform_threads > 1:
            _require_no_order(schedule, options, is_sharded=is_sharded)
        self._schedule = schedule
        self._ranks = RankLoop(tables, schedule, verify=verify) if is_sharded else None
        # For each batch: rows of every store, ids of every table, and leaves of the loader's batch.
        n_spare = (len(self._stores) + len(tables) + 4) * (2 * schedule.depth + 2)
        super().__init__(
            TableRowSource(loader, tables, self._ranks),
            device=device,
            schedule=schedule,
            options=options,
            n_spare=n_spare,
        )
        self._replay = LoaderReplay(self._source)
        self._session = TableSession(
            tables, self._loop, self._device, ranks=self._ranks, verify=verify
        )

    def __repr__(self) -> str:
        loader = type(self._loader).__name__
        tables = ", ".join(
            f"{used.name} ({used.n_rows:,}, {used.table.embedding_dim})" for used in self._tables
        )
        return (
            f"<RowLoop: a {loader}, with rows of {tables}; batches on {self.device}, {self._loop}>"
        )

    def __iter__(self) -> Iterator[T_co]:
        """Begin the loader's next epoch, with its batches and their table rows on the device.

        Raises:
            ClosedError: If the loop is closed, or if it, or another loop over one of its tables, is
                running. Several loops over ``read_rows`` may run at a time, also in
                ``evaluating()``.
            StoreError: If a table or its optimizer state is in an existing file that was not
                resumed.
        """
        with contextlib.nullcontext() if self._ranks is None else self._ranks.report_failure():
            for used in self._tables:
                used.require_resumed()
        # Checked again when the loop begins, because two iterators may be made before that.
        self._loop.end_last()
        for used in self._tables:
            used.require_free()
        return self._session.iterate(self._begin)

    @property
    def route(self) -> str:
        """Why rows of page-locked stores are staged, if they need not be; otherwise empty.

        On the CPU, it says if the argument ``route`` has no effect.
        """
        return self._route

    @property
    def plan(self) -> Plan:
        """Memory plan for the caches of the tables.

        The memory of the batches is not known in advance. Results of ``host_transform`` and
        ``device_transform`` are counted as measured so far.
        """
        caches = self._caches
        notes = cache_notes(self._tables, caches, self._device)
        is_direct = all(map(self._device.reaches, self._stores))
        plan = Plan(
            0,
            self._schedule.depth,
            "direct" if is_direct else "staged",
            cache_allocations(caches, self._device),
            notes=(*[self._route] * bool(self._route), *notes),
            n_transform_threads=self._schedule.n_transform_threads,
        )
        return self._transforms.with_measured(plan, unified=self._device.unified)

    @property
    def exchanged(self) -> Exchanged:
        """Bytes that this rank has sent to other ranks for sharded tables."""
        return Exchanged() if self._ranks is None else self._ranks.exchanged

    @property
    def epoch(self) -> int:
        """Number of the running epoch, or of the next epoch if no loop is running."""
        return self._loop.epoch

    @property
    def is_running(self) -> bool:
        """Whether a loop has begun and has not ended."""
        return self._loop.is_running

    @property
    def is_evaluating(self) -> bool:
        """Whether the training step is inside ``evaluating()``."""
        return self._session.is_evaluating

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for evaluating the tables in the middle of a training step.

            for step, batch in enumerate(batches):
                train(batch)
                if step % 1000 == 0:
                    with batches.evaluating():
                        for test in pinfeed.read_rows(test_loader, ids):
                            ...

        Entering the context writes all changes so far to the stores. Inside, lookups and loops over
        ``read_rows`` read the stores. The optimizer cannot step, ``weight`` is not available, and
        lookups in training mode with gradients raise ClosedError. Background threads continue to
        read the next training batches.

        Leaving the context ends all loops over ``read_rows`` of the tables. Their iterators raise
        ClosedError if the program requests another batch. The training step then continues with the
        same rows, gradients and optimizer state.

        Raises:
            ClosedError: If the caller is not in a training step of this loop, is in another thread,
                or is already inside the context. Also at the end of the context, if rows were
                changed inside it.
            Exception: If a write-back has failed. The original error is raised.
        """
        return self._session.evaluating()

    def set_epoch(self, number: int) -> None:
        """Set the number of the next epoch, and pass it to the loader, as ``wrap_loader`` does.

        Args:
            number: Number of the epoch, at least 0.

        Raises:
            ClosedError: If an iteration is running that may not be ended, or the loop is closed.
        """
        super().set_epoch(number)
        self._replay.note_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop, as plain values and tensors.

        Inside a training step, the batch of that step counts as done. The state does not contain
        rows. ``pinfeed.checkpoint`` saves them, too.
        """
        return self._replay.state(self._loop.state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a saved position.

        The loader begins the saved epoch again with the random generators of that time, and the
        loop drops the batches that were done. The next batch is the one that would have followed,
        if the loader draws random numbers only from generators of this process.

        Args:
            state: Return value of ``state_dict``.

        Raises:
            ArgumentError: If ``state`` is not such a state, or belongs to a loop over other tables.
            ClosedError: If an iteration is running that may not be ended, or the loop is closed.
        """
        if not {"told", "random"} <= set(state):
            raise ArgumentError(
                "not a state of a loop over train_rows; expected what its state_dict() returned"
            )
        if state["told"] is not None:
            self.set_epoch(state["told"])
        self._loop.load_state(state)
        is_finished = bool(state["batch"]) and not self._loop.start
        self._replay.load(state, is_finished=is_finished)

    def flush_writes(self) -> None:
        """Wait until every change so far, including those of this step, is in the stores.

        Raises:
            ClosedError: If the loop runs in another thread.
            Exception: If a write-back has failed. The original error is raised.
        """
        self._session.flush_writes()

    def close(self) -> None:
        """End a running loop, and complete its write-backs.

        The loader, tables and optimizers stay open. A second call does nothing.

        Raises:
            Exception: If a write-back has failed and the loop has not raised its error yet. The
                original error is raised.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            generator = self._session.iterator
            if generator is None or self._session.is_in_other_thread:
                return
            # Any other loop raises ClosedError when it requests a batch.
            if is_suspended(generator):
                generator.close()

    def _open_device(self, device: DeviceLike, n_spare: int) -> Device:
        found = super()._open_device(device, n_spare)
        # The rows of a batch are few, and the GPU writes them back without a thread of the host.
        self._route = found.choose_route(self._stores, self._wanted_route, "direct")
        self._caches = row_caches(self._tables, found, self._config)
        self._source.caches = self._caches
        return found

    def _begin(self) -> None:
        """Begin an epoch of the loader at the first batch of the loop."""
        # The caches of a training loop keep their memory inside evaluating().
        inside = self._session.is_inside_evaluation
        self._source.caches = [None] * len(self._tables) if inside else self._caches
        self._replay.begin(self._loop.start)


@overload
def train_rows(
    loader: Iterable[T],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    **options: Unpack[TrainArguments],
) -> RowLoop[T]: ...


@overload
def train_rows(
    loader: Iterable[object],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    host_transform: BatchFunction | None = None,
    device_transform: BatchFunction | None = None,
    **options: Unpack[TrainArguments],
) -> RowLoop[Any]: ...


@explain_arguments(TABLE_LOOP_HINTS)
def train_rows(
    loader: Iterable[object],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    optimizer: RowOptimizers = (),
    config: MemoryLimits | None = None,
    depth: int | None = None,
    device: DeviceLike = "auto",
    route: str | None = None,
    progress: bool = False,
    timeline: bool = False,
    host_transform: BatchFunction | None = None,
    device_transform: BatchFunction | None = None,
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
    loader: Iterable[object],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    host_transform: BatchFunction | None = None,
    device_transform: BatchFunction | None = None,
    **options: Unpack[TableLoopArguments],
) -> RowLoop[Any]: ...


@explain_arguments(READ_LOOP_HINTS)
def read_rows(
    loader: Iterable[object],
    tables: Mapping[HostEmbedding, IdsOfBatch],
    *,
    config: MemoryLimits | None = None,
    depth: int | None = None,
    device: DeviceLike = "auto",
    route: str | None = None,
    progress: bool = False,
    timeline: bool = False,
    host_transform: BatchFunction | None = None,
    device_transform: BatchFunction | None = None,
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


def _require_no_order(
    schedule: PrefetchSchedule, options: LoopOptions, *, is_sharded: bool
) -> None:
    """Check that the rows of a batch can be chosen without those of earlier batches.

    Raises:
        ArgumentError: If tables are sharded or have a cache.
    """
    if not is_sharded and not schedule.has_caches:
        return
    which = "sharded tables" if is_sharded else "a table that has a device_cache"
    n_threads = options.transform_threads
    raise ArgumentError(
        f"transform_threads={n_threads} was given with {which}, which need the ids of every batch "
        "in order; expected one thread; wrap the loader first: wrap_loader(loader, "
        f'host_transform=..., transform_threads={n_threads}, device="cpu")'
    )
