"""Feeder: batches of rows of arrays and files, prefetched to a device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

from pinfeed.devices import DeviceLike
from pinfeed.errors import ArgumentError, logger
from pinfeed.feeders.base_feeder import LoopOptions, ResumableFeeder, T_co
from pinfeed.feeders.batch import Batch
from pinfeed.feeders.hints import FEEDER_HINTS
from pinfeed.feeders.memory_trials import measure_transforms
from pinfeed.feeders.row_selection import RowSelection
from pinfeed.memory.limits import DEFAULT_DEPTH, MemoryLimits, check_optional_depth, n_held
from pinfeed.memory.plan import Plan, check_route
from pinfeed.pipeline.host_transfer import rows_on_host
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.planner import Planner
from pinfeed.pipeline.schedule import PrefetchSchedule, choose_schedule, engine_schedule
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.pipeline.sources.text_rows import row_source
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.orders import Order, known
from pinfeed.rows.packed import Packed
from pinfeed.rows.ranks import Ranks
from pinfeed.tensors.argument_types import BatchFunction, Ids, Source
from pinfeed.validation.arguments import check_flag, explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import FeederArguments, K, NamedSources, S, Tensor, TensorSource


class Feeder(ResumableFeeder[T_co]):
    """Batches of rows from host memory or files, prefetched to a device.

    The synchronous loop (``depth=0``) gathers, computes and writes in turn. At every other depth,
    the batches, and the contents of the stores after the loop, equal those of the synchronous loop
    bit for bit. The condition is that rows change only by ``write_back`` while a loop runs. A
    prefetched batch does not see other changes of its array or file. The caller owns each batch,
    which stays valid and unchanged for as long as it is kept.

    A feeder replaces a DataLoader. Do not wrap a feeder in a DataLoader, even with
    ``batch_size=None``. ``next(iter(feeder))`` returns one batch. ``feeder[0]`` raises a TypeError,
    because a feeder has no rows by index; use ``RowDataset`` for these.

    Examples:
        >>> np.save("x.npy", np.zeros((1000, 8), np.float32))
        >>> with pinfeed.Feeder("x.npy", batch_size=256, shuffle=True) as feeder:
        ...     for epoch in range(2):
        ...         for batch in feeder:
        ...             loss = batch.square().mean()
        >>> batch.shape
        torch.Size([232, 8])

    Args:
        source: Path of a .npy file (or a pattern of shards), numpy array, CPU tensor, Arrow column,
            Store, or RaggedStore for rows of unequal length. It may also be tuples, lists and dicts
            of these, all with the same number of rows; batches have the same structure. Several
            paths in a tuple or a list are separate sources, such as inputs and labels. Give the
            file shards of one source as a pattern or as ``NpyStore([...])``. An Arrow table, a
            Hugging Face dataset, a pandas or polars DataFrame and the path of a Parquet file are
            dicts of their columns. An open ``h5py.Dataset`` or ``zarr.Array`` is one source.
        batch_size: Rows per batch. Give either this or ``config``; give neither if ``rows`` yields
            whole batches.
        config: A ``pinfeed.Config`` with memory limits, from which pinfeed computes the batch size.
            The constructor then calls the transforms on some of the first rows, to predict their
            memory.
        rows: Sampling order: an order of ``pinfeed.rows``, a torch Sampler or BatchSampler, or an
            iterable of row indices or of whole batches of row indices. None is the order of the
            source. The feeder sets a sampler that has an ``epoch`` attribute, such as
            DistributedSampler, to the epoch of the loop. If the user sets another epoch on the
            sampler, the loop uses that one.
        shuffle: Whether every epoch has a new order; short for
            ``rows=pinfeed.rows.shuffled(seed)``. Every run of the program repeats the same orders,
            because the default seed is 0. For others, give ``seed=random.randrange(2**32)``, the
            same number on all ranks.
        seed: Seed of the shuffle, a whole number; the order is a function of (seed, epoch). It is
            also the seed of the generators of the transforms.
        drop_last: Whether to leave out a last batch that is not full.
        ranks: Rule by which the processes of a job (such as those of torchrun) share an epoch if
            the rows do not divide evenly. ``"pad"`` repeats the first rows, ``"drop"`` leaves out
            the remainder, and ``"join"`` gives some ranks one row more. Ranks share whole batches
            of ``element_batches``, and whole sequences of ``packed``, by the same rule. Use
            ``Ranks`` for more options. With ``"all"`` or None, every process iterates over all
            rows.
        depth: Number of batches to prefetch, at most 1,024, because each takes memory; 0 is the
            synchronous loop. It replaces ``config.depth``. None is 2, or more for small batches,
            and 0 for loops over ``batches()`` of writable sources on the CPU.
        device: ``"auto"`` (CUDA if available), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a
            ``torch.device`` or a Device.
        route: Route of rows from page-locked (pinned) stores to a GPU. On the ``"staged"`` route,
            the default, the CPU gathers the rows before they are copied. On the ``"direct"`` route,
            GPU kernels read the rows straight from pinned host memory. It has no effect on batches
            on the CPU.
        verify: Compare each batch with its rows in the stores before the loop receives it, and
            raise VerificationError if anything but ``write_back`` has changed them. This reads
            every row twice and waits for write-backs.
        progress: Show a progress bar.
        timeline: Record how long each stage of each batch takes, and name the stages for GPU
            profilers.
        host_transform: Function that takes each batch as CPU tensors, in the structure of the
            source, and returns a batch of any structure, whose tensors are copied to the device.
            The transform thread calls it for one batch at a time, in order. A parameter
            ``generator`` receives a new ``torch.Generator`` for every batch, whose seed is a
            function of (seed, epoch, batch), as the guide to batch transforms describes it.
        device_transform: Function that takes each batch on the device, and returns what the loop
            receives. It is called for one batch at a time, in order, with the same kind of
            generator; on a GPU in the loop's thread, with its work in a side stream.
        transform_threads: Number of threads that call ``host_transform``, each for another batch,
            from 1 to 64. The loop receives the batches in order, with the same results. In addition
            to ``depth`` finished batches, up to ``transform_threads - 1`` more are prefetched, and
            ``plan`` counts them. Several threads help if the function releases the interpreter's
            lock. None is one thread. The synchronous loop has no threads.
        continuous: Whether the first batches of the next epoch are read before an epoch ends, so
            that its loop begins without a pause. None does so if an order of ``pinfeed.rows`` draws
            rows of read-only files, without transforms. A file that has changed between two epochs
            is read again. True promises that rows, transforms and orders do not change between
            epochs. Loops with writes are never continuous. Between epochs, threads and up to
            ``depth`` batches stay until ``close``.

    Raises:
        ArgumentError: If an argument is invalid, two arguments conflict, or ``seed`` is given
            without ``shuffle`` or a transform that takes a generator.
        UnknownArgument: If an argument does not exist. The message names the one to use.
        StoreError: If a source cannot be read, or sources have different numbers of rows.
        RowIndexError: If a row index is out of range.
        BudgetError: If the limits of ``config`` cannot hold one row per buffer.
        DeviceError: If the device does not exist.
    """

    _plan: Plan

    @overload
    def __init__(
        self: Feeder[Tensor], source: TensorSource, **options: Unpack[FeederArguments]
    ) -> None: ...

    @overload
    def __init__(
        self: Feeder[Any], source: NamedSources, **options: Unpack[FeederArguments]
    ) -> None: ...

    @overload
    def __init__(
        self: Feeder[tuple[Tensor, ...]],
        source: tuple[TensorSource, ...],
        **options: Unpack[FeederArguments],
    ) -> None: ...

    @overload
    def __init__(
        self: Feeder[list[Tensor]], source: list[S], **options: Unpack[FeederArguments]
    ) -> None: ...

    @overload
    def __init__(
        self: Feeder[dict[K, Tensor]], source: dict[K, S], **options: Unpack[FeederArguments]
    ) -> None: ...

    @overload
    def __init__(
        self: Feeder[Any],
        source: Source,
        *,
        host_transform: BatchFunction | None = None,
        device_transform: BatchFunction | None = None,
        **options: Unpack[FeederArguments],
    ) -> None: ...

    @explain_arguments(FEEDER_HINTS)
    def __init__(
        self,
        source: Source,
        *,
        batch_size: int | None = None,
        config: MemoryLimits | None = None,
        rows: Order | Iterable[Ids] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        ranks: Ranks | Literal["pad", "drop", "join", "all"] | None = None,
        depth: int | None = None,
        device: DeviceLike = "auto",
        route: str | None = None,
        progress: bool = False,
        timeline: bool = False,
        host_transform: BatchFunction | None = None,
        device_transform: BatchFunction | None = None,
        transform_threads: int | None = None,
        verify: bool = False,
        continuous: bool | None = None,
    ) -> None:
        depth = check_optional_depth(depth)
        selection = RowSelection(batch_size, config, rows, shuffle, seed, drop_last, ranks)
        if depth is None and selection.config is not None:
            depth = selection.config.depth
        options = LoopOptions(
            progress,
            timeline,
            host_transform,
            device_transform,
            seed,
            transform_threads,
            continuous,
            depth,
            device,
        )
        _check_transforms(options, verify, route)
        _check_continuous(options, selection, verify)
        self._verify = verify
        self._begin = selection.note_workers
        self._stores = StoreTree(source)
        try:
            options = _making_batches(options, self._stores, verify)
            self._prepare(selection, options, route)
        except BaseException:
            self._stores.close()
            raise
        logger.info("%s", self._plan)

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.close()
        except Exception:
            if exc_info[1] is None:
                raise
            logger.exception("closing a feeder failed, in addition to the error that is raised")

    def __iter__(self) -> Iterator[T_co]:
        """Begin the next epoch.

        Returns:
            Iterator over batches: tensors on the device, in the structure of the source, each of
            shape (n, *row_shape). Ragged rows have the layout of their ``RaggedStore``.

        Raises:
            ClosedError: If the feeder is closed, or an older loop over it runs and cannot be ended.
        """
        return self._loop.run(self._take, begin=self._begin)

    def batches(self) -> Iterator[Batch[T_co]]:
        """Begin the next epoch, with ``Batch`` objects that have row indices and ``write_back``.

        If a source is writable, the loop also holds values that are written back, and prefetches
        fewer batches if the limits of ``config`` require it.

        Raises:
            ClosedError: If the feeder is closed, or an older loop over it runs and cannot be ended.
            BudgetError: If the limits of ``config`` cannot hold these values.
        """
        take = self._take
        stores = self._stores
        device = self._device
        is_source = not self._transforms

        def lend(lent: LentBatch) -> Batch[T_co]:
            return Batch(lent, take(lent), stores, device, is_source=is_source)

        writes = is_source and any(store.writable for store in stores.stores)
        return self._loop.run(lend, self._plan_writes() if writes else None, self._begin)

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, as in ``plan``; None if ``rows`` yields batches of any size."""
        return self._plan.batch_size or None

    @property
    def plan(self) -> Plan:
        """Batch size and memory of every buffer; ``print(feeder.plan)`` explains them in words.

        From the first loop over ``batches()`` on, it includes values that are written back. The
        memory of transform results is the measured one so far, or with ``config`` the predicted
        one.
        """
        if self._is_limited:
            return self._plan
        return self._transforms.with_measured(self._plan, unified=self._device.unified)

    def flush_writes(self) -> None:
        """Wait until all write-backs so far are in their stores.

        Call it in the thread that runs the loop.

        Raises:
            Exception: If a write-back failed; its error.
        """
        self._loop.drain()

    def _prepare(self, selection: RowSelection, options: LoopOptions, route: str | None) -> None:
        """Open the device, plan the memory and the reads, and make the runner of the epochs."""
        tree = self._stores
        config = selection.config
        is_packed = isinstance(selection.order, Packed)
        if self._verify and (is_packed or any(one.layout == "packed" for one in tree.ragged)):
            raise ArgumentError(
                "verify=True was given with packed rows; verify compares whole rows; leave out "
                "verify, or give layout='offsets' and rows=element_batches(...)"
            )
        if isinstance(selection.order, LengthBatches):
            for ragged in tree.ragged:
                selection.order.require_bound(ragged.lengths, repr(ragged))
        schedule = self._schedule_on(selection, options)
        on = self._device
        is_limited = config is not None and config.cpu_memory_limit is not None
        transforms = options.transforms(on.name, selection.rank, is_limited=is_limited)
        if transforms.host is not None and not on.unified:
            # The CPU gathers the rows for host_transform.
            route = "staged"
        transform_nbytes = None
        if transforms and config is not None:
            transform_nbytes = measure_transforms(tree, on, transforms)
        rows, batch_size = selection.order, selection.batch_size
        self._planner = planner = Planner(
            tree, rows, batch_size, config, schedule, on, transforms, transform_nbytes
        )
        plan, self._reads = planner.plan(route)
        batches = selection.batches(tree.n_rows, plan)
        self._plan = selection.with_notes(plan, tree.n_rows, unified=on.unified)
        capacity = planner.capacity(plan.batch_size)
        if transforms.host is not None:
            gather = rows_on_host(capacity, schedule.n_slots + 1)
            transforms = dataclasses.replace(transforms, gather=gather)
            # The results of host_transform take other memory than rows.
            capacity = []
        self._is_limited = config is not None
        self._transforms = transforms
        reads = self._reads
        source = RowSource(tree.stores, reads.strategies, tree.rebuild, batches, reads.ragged)
        self._source = row_source(source, tree.texts)
        if options.continuous is None:
            # Files show whether they have changed; arrays and functions of the user do not.
            continuous = (
                not options.has_transforms
                and not self._verify
                and known(rows).is_repeatable
                and tree.only_reads_files
            )
            options = dataclasses.replace(options, continuous=continuous)
        self._loop = options.runner(self._source, on, schedule, transforms, capacity)

    def _schedule_on(self, selection: RowSelection, options: LoopOptions) -> PrefetchSchedule:
        """Open the device, and choose the number of batches that are prefetched to it."""
        tree = self._stores
        config = selection.config
        depth = options.depth
        is_ragged = bool(tree.ragged or tree.texts)
        schedule = choose_schedule(
            tree.row_nbytes, selection.batch_size, config, depth, is_ragged=is_ragged
        )
        if options.has_transforms:
            schedule = _schedule_of_single_batches(schedule, depth)
        schedule = options.in_threads(schedule, are_readers=False)
        # A loop that writes back prefetches single batches.
        single = _schedule_of_single_batches(schedule, depth)
        n_batches = max(schedule.n_slots, single.n_slots) + 1 + n_held(single.depth)
        n_parts = len(tree.stores) + len(tree.ragged) + len(tree.parts_of_ragged)
        self._open_device(options.device, n_parts * n_batches)
        is_default = depth is None and self._device.unified
        # On the CPU, no copy to a device would hide the work that write-backs cost.
        self._schedule_with_writes = dataclasses.replace(
            single, writes=True, depth=0 if is_default else single.depth
        )
        is_limited = config is not None and bool(config.cpu_memory_limit)
        if (
            is_default
            and isinstance(selection.order, Order)
            and not options.has_transforms
            and tree.may_have_engine(is_limited=is_limited)
        ):
            return engine_schedule((selection.batch_size or 0) * tree.row_nbytes)
        return schedule

    def _plan_writes(self) -> PrefetchSchedule:
        """Plan a loop that writes back, and return its schedule.

        Every write is looked up in all batches that were gathered before it. With many prefetched
        batches, this costs more than prefetching saves, so such a loop prefetches fewer.
        """
        schedule = dataclasses.replace(
            self._schedule_with_writes, repeats=not self._source.batches.is_distinct
        )
        self._plan = plan = self._planner.with_writes(self._plan, schedule, self._reads)
        return dataclasses.replace(schedule, depth=plan.depth)

    @property
    def _batches_in_words(self) -> str:
        size = f"{self._plan.batch_size:,} rows" if self._plan.batch_size else "any size"
        return f"{self._stores}; batches of {size}"

    def _close_sources(self, stack: contextlib.ExitStack) -> None:
        if self._transforms.gather is not None:
            stack.callback(self._transforms.gather.device.close)
        stack.callback(self._stores.close)
        for close in self._reads.closes:
            stack.callback(close)

    @property
    def _take(self) -> Callable[[LentBatch], T_co]:
        """Function that returns the data of a batch to the loop."""
        return self._take_verified if self._verify else LentBatch.take

    def _take_verified(self, lent: LentBatch) -> Any:
        """Return the data of a batch after comparing it with the stores."""
        data = lent.take()
        self._loop.drain()
        self._stores.require_equal(data, lent.groups[0].rows, lent.number, self._loop.copy_to_host)
        return data


def _check_transforms(options: LoopOptions, verify: bool, route: str | None) -> None:
    """Raise ArgumentError if ``verify`` or ``route`` is invalid, or excludes a transform."""
    check_route(route)
    check_flag(verify, "verify")
    if verify and options.has_transforms:
        raise ArgumentError(
            "verify=True was given with host_transform or device_transform; verify compares each "
            "batch with its rows, which the transforms change; leave out verify or the transforms"
        )
    if route == "direct" and options.host_transform is not None:
        raise ArgumentError(
            "route='direct' was given with host_transform, which needs the rows on the host; leave "
            "out route, or give device_transform"
        )


def _making_batches(options: LoopOptions, tree: StoreTree, verify: bool) -> LoopOptions:
    """Return options with which the transform thread makes the batches that take new memory.

    Raises:
        ArgumentError: If ``verify`` is set, but the batches differ from the rows of the stores.
    """
    if not tree.made_row_nbytes:
        return options
    if verify:
        raise ArgumentError(
            "verify=True was given with a SparseStore whose batches are dense or have columns of "
            "another dtype than its file; verify compares batches with stored rows; leave out "
            "verify, or give layout='csr' with columns of int32 or int64"
        )
    if options.has_transforms:
        return options
    return dataclasses.replace(options, device_transform=_unchanged)


def _unchanged(batch: Any) -> Any:
    """Return the batch; the thread that calls this has made it."""
    return batch


def _check_continuous(options: LoopOptions, selection: RowSelection, verify: bool) -> None:
    """Raise ArgumentError if ``continuous=True`` conflicts with another argument."""
    reason = ""
    if not isinstance(selection.order, Order):
        reason = (
            f"rows is a {type(selection.order).__name__}, which may depend on the loop; give an "
            "order of pinfeed.rows"
        )
    if verify:
        reason = "verify=True compares each batch with the rows as they are now; leave out verify"
    options.require_continuous(reason)


def _schedule_of_single_batches(schedule: PrefetchSchedule, depth: int | None) -> PrefetchSchedule:
    """Return a schedule that gathers each batch separately.

    Args:
        schedule: Schedule that may gather small batches together.
        depth: The user's choice; with None, fewer batches are prefetched.
    """
    if schedule.batches_per_slot == 1:
        return schedule
    depth = DEFAULT_DEPTH if depth is None else depth
    return dataclasses.replace(schedule, depth=depth, batches_per_slot=1)
