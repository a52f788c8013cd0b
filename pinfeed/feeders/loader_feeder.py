"""wrap_loader(): the batches of a torch DataLoader, prefetched with the rows of their ids."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from pinfeed.devices import DeviceLike, is_cpu
from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError
from pinfeed.feeders.base_feeder import BaseFeeder, LoopOptions, T_co
from pinfeed.feeders.dataset_feeder import check_threads
from pinfeed.feeders.hints import LOADER_HINTS
from pinfeed.memory.limits import DEFAULT_DEPTH, MemoryLimits, check_optional_depth
from pinfeed.memory.plan import Plan
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.planner import plan_reads_by_id
from pinfeed.pipeline.schedule import PrefetchSchedule, n_id_readers
from pinfeed.pipeline.sources.loader_source import LoaderSource, StatefulSource
from pinfeed.pipeline.sources.row_fetch import FetchSpec, RowFetch, ids_function
from pinfeed.pipeline.sources.sample_batch import SkippedSamples
from pinfeed.pipeline.sources.sample_source import ThreadedLoaderSource
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.stores.store import Store
from pinfeed.tensors.argument_types import BatchFunction, IdsOfBatch, Source
from pinfeed.validation.arguments import explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import LoaderArguments, T


STATE_METHODS = ("state_dict", "load_state_dict")
"""Methods of a loader whose epochs can be resumed."""

# Attribute that only code needs which makes another DataLoader of the parts of one.
_REBUILT_WITH = "multiprocessing_context"


class LoaderFeeder(BaseFeeder[T_co]):
    """Loader whose batches are prefetched to the device; ``wrap_loader`` returns it.

    Attributes that it does not have itself are those of the loader (``dataset``,
    ``batch_sampler``, ...).

    Examples:
        >>> loader = torch.utils.data.DataLoader(torch.zeros(100, 8), batch_size=10)
        >>> with pinfeed.wrap_loader(loader) as feeder:
        ...     for batch in feeder:
        ...         loss = batch.mean()
        >>> len(feeder), feeder.batch_size
        (10, 10)

    Args:
        source: Source that iterates the loader.
        device: Target device, as the user named it.
        schedule: Number of batches to prefetch.
        options: Options of the loop.
        n_spare: Number of device buffers that may be kept for reuse. None is one per store, or one
            without ``fetch``, for each batch that is on the device at the same time.
        fetch: Stores of the rows whose ids are in the batches; None without ``fetch``.
    """

    # It returns the data of a batch to the loop. In C, it takes less time than a method.
    _take: Callable[[Any], Any] = operator.methodcaller("take")

    def __init__(
        self,
        source: LoaderSource,
        *,
        device: DeviceLike,
        schedule: PrefetchSchedule,
        options: LoopOptions,
        n_spare: int | None = None,
        fetch: FetchStores | None = None,
    ) -> None:
        self._source = source
        self._loader = source.loader
        self._fetch = fetch
        self._schedule = schedule
        if n_spare is None:
            n_spare = (schedule.depth + 2) * (1 if fetch is None else len(fetch.stores))
        self._open_device(device, n_spare)
        if fetch is not None:
            source.fetch = fetch.on(self._device)
        is_limited = fetch is not None and fetch.limit is not None
        self._transforms = options.transforms(self.device, is_limited=is_limited)
        source.open(self._device)
        source.host_transform = self._transforms.host
        source.transforms_in_thunks = schedule.n_transform_threads > 1
        source.n_ahead = schedule.depth
        self._loop = options.runner(source, self._device, schedule, self._transforms)

    @property
    def plan(self) -> Plan:
        """Memory that the files behind ``fetch`` take; the memory of the batches is unknown.

        The memory of transform results is the measured one so far.
        """
        depth = self._schedule.depth
        plan = Plan(0, depth, "staged", ())
        if self._fetch is not None:
            plan = self._fetch.plan(depth, self._device)
        n_threads = self._schedule.n_transform_threads
        plan = dataclasses.replace(plan, n_transform_threads=n_threads)
        return self._transforms.with_measured(plan, unified=self._device.unified)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, as the loader reports it.

        Raises:
            TypeError: If the loader has no length.
        """
        try:
            return len(self._loader)
        except TypeError as error:
            raise TypeError(
                f"loader={type(self._loader).__name__}: its len() fails ({error}), so the number "
                "of batches is unknown; count them in the loop"
            ) from error

    def __iter__(self) -> Iterator[T_co]:
        """Begin the loader's next epoch, with its batches on the device.

        Raises:
            ClosedError: If the feeder is closed, or an older loop over it runs and cannot be ended.
        """
        skipped = self._source.skipped
        return self._loop.run(
            self._take,
            begin=self._begin,
            through=(lambda batches: batches) if skipped is None else skipped.without_empty,
            keeps_errors=self._source.keeps_errors,
        )

    @property
    def skipped(self) -> list[tuple[int, object, Exception]]:
        """Epoch, index and error of each sample that loops have left out, in order."""
        return [] if self._source.skipped is None else self._source.skipped.found

    def __getattr__(self, name: str) -> Any:
        if name in STATE_METHODS:
            raise AttributeError(
                f"{type(self._loader).__name__} has no {name}, so the loop cannot be resumed; give "
                "a loader that has it (torchdata's StatefulDataLoader), or use a Feeder; for ids, "
                "wrap Feeder(np.arange(n), rows=ids, ...) with fetch="
            )
        if name == _REBUILT_WITH:
            # Not an AttributeError, after which the new loader would take a default.
            raise ArgumentError(
                f"{name} of a {type(self).__name__} was read, as by functions "
                "that make a DataLoader of the parts of another one (skip_first_batches and "
                "prepare_data_loader of Accelerate), without transforms, rows and threads of the "
                "wrapper; give them the loader itself, and wrap the result, as in "
                "wrap_loader(skip_first_batches(loader, n), ...)"
            )
        if name.startswith("_"):
            # Either the constructor has not set the attribute yet, or it belongs to a protocol that
            # the loader must not answer for the feeder.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader if the loader has it and the feeder does not.

        The loader itself refuses changes of fixed attributes, such as the batch size of a
        DataLoader.
        """
        is_own = name.startswith("_") or hasattr(type(self), name)
        if is_own or not hasattr(self._loader, name):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __dir__(self) -> list[str]:
        """Return the names of the feeder's own attributes and of the loader's public ones."""
        of_loader = {name for name in dir(self._loader) if not name.startswith("_")}
        return sorted({*super().__dir__(), *of_loader.difference(STATE_METHODS, (_REBUILT_WITH,))})

    def set_epoch(self, number: int) -> None:
        """Call ``set_epoch`` of the loader, its samplers and its dataset, if they have it.

        If none of these objects has ``set_epoch``, nothing changes and no error is raised, because
        loops that work with any sampler call it in every epoch. Such a loader draws its order from
        torch's random numbers, or always has the same order.

        Args:
            number: Number of the epoch, at least 0.

        Raises:
            ClosedError: If a loop runs and cannot be ended, or the feeder is closed.
        """
        self._loop.set_epoch(number)
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        candidates = [
            self._loader,
            getattr(self._loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(self._loader, "dataset", None),
        ]
        # One object may have several of these roles, and is called once.
        for target in {id(candidate): candidate for candidate in candidates}.values():
            if callable(getattr(target, "set_epoch", None)):
                target.set_epoch(number)

    @property
    def _batches_in_words(self) -> str:
        size = getattr(self._loader, "batch_size", None)
        batches = f"batches of {size:,}" if isinstance(size, int) else "its batches"
        return f"a {type(self._loader).__name__}, {batches}"

    def _begin(self) -> None:
        """Begin an epoch of the loader."""
        self._source.begin()

    def _close_sources(self, stack: contextlib.ExitStack) -> None:
        if self._fetch is not None:
            stack.callback(self._fetch.close)
        stack.callback(self._source.end)


class StatefulLoaderFeeder(LoaderFeeder[T_co]):
    """Resumable loader whose batches are prefetched to the device; ``wrap_loader`` returns it.

    Prefetching moves the loader ahead of the loop. The feeder keeps the state that the loader had
    after the batch of the current training step.

    Examples:
        >>> from torchdata.stateful_dataloader import StatefulDataLoader
        >>> feeder = pinfeed.wrap_loader(StatefulDataLoader(range(100), batch_size=10))
        >>> for batch in feeder:
        ...     state = feeder.state_dict()
        ...     break
        >>> feeder.load_state_dict(state)
        >>> next(iter(feeder))
        tensor([10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    """

    _source: StatefulSource

    def state_dict(self) -> Any:
        """Return the loader's ``state_dict()`` at the position of the loop.

        Prefetched batches do not count. If a transform takes a generator, the state is a dict of
        the loader's own state and of the feeder's position, from which the generators are seeded.

        Raises:
            Exception: If the loader's ``state_dict()`` failed; its error.
        """
        state = self._source.state() if self._loop.is_at_rest else self._state
        if isinstance(state, Exception):
            raise state
        if not self._transforms.take_generators:
            return state
        return {"loader": state, "pinfeed": self._loop.state()}

    def load_state_dict(self, state: Any) -> None:
        """Make the next loop continue at a saved position.

        Args:
            state: Return value of ``state_dict`` of this feeder, or of the loader itself if no
                transform takes a generator.

        Raises:
            ArgumentError: If a transform takes a generator, and the state does not contain the
                batch number, which seeds the generator.
            ClosedError: If a loop runs and cannot be ended, or the feeder is closed.
        """
        is_own = isinstance(state, Mapping) and set(state) == {"loader", "pinfeed"}
        if not is_own and self._transforms.take_generators:
            raise ArgumentError(
                "load_state_dict() got a state of the loader itself, which does not contain the "
                "batch number; expected the return value of this feeder's state_dict(), because "
                "that number seeds the generator of host_transform or device_transform"
            )
        if is_own and self._transforms.take_generators:
            self._loop.load_state(state["pinfeed"])
        else:
            # Only the loader knows the batch. An epoch that the loop has left is not continued.
            self._loop.load_state(self._loop.state() | {"batch": 0, "checksum": 0})
        self._loader.load_state_dict(state["loader"] if is_own else state)

    def _begin(self) -> None:
        """Begin an epoch of the loader, and keep its state before the first batch."""
        super()._begin()
        self._state = self._source.state()

    def _take(self, lent: LentBatch) -> Any:
        """Return the data of a batch to the loop, and keep the loader's state after it."""
        self._state = lent.state
        return lent.take()


class FetchStores:
    """Stores of the rows whose ids are in the batches of a loader.

    Args:
        fetch: For each key a pair of a source, as for ``Feeder``, and of the ids of a batch: a key
            of the batch or a function of the batch.
        config: Memory limits for the rows of files; None is the free memory.

    Attributes:
        stores: The stores of all entries.
        limit: Limit of the host memory in bytes; None without a limit.

    Raises:
        ArgumentError: If ``fetch`` is no such mapping, ``config`` is no ``pinfeed.Config``, or a
            source has ragged rows.
        StoreError: If a source cannot be read.
        NotEnoughCPUMemory: If the limits cannot hold the chunks that reading needs.
    """

    def __init__(self, fetch: Any, config: MemoryLimits | None) -> None:
        expected = (
            "expected a dict such as {'x': (source, ids)}, where ids is a key of the batch or a "
            "function of the batch"
        )
        if not isinstance(fetch, Mapping) or not fetch:
            raise ArgumentError(f"fetch={fetch!r}; {expected}")
        for key, pair in fetch.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ArgumentError(f"fetch[{key!r}] is a {type(pair).__name__}; {expected}")
        if config is not None and not isinstance(config, MemoryLimits):
            raise ArgumentError(f"config={config!r}: expected a pinfeed.Config")
        self.limit = None if config is None else config.cpu_memory_limit
        self._route = ""
        with contextlib.ExitStack() as stack:
            entries = []
            for key, (source, ids) in fetch.items():
                name = f"fetch[{key!r}]"
                tree = StoreTree(source, name)
                stack.callback(tree.close)
                if tree.ragged or tree.texts:
                    kind = "RaggedStore" if tree.ragged else "TextStore"
                    todo = "pad the rows to one length, or " if tree.ragged else ""
                    raise ArgumentError(
                        f"{name} has a {kind}; expected rows of one shape; {todo}give the {kind} "
                        "to a Feeder"
                    )
                entries.append((key, ids_function(ids, name), tree))
            self.stores: list[Store] = [store for *_, tree in entries for store in tree.stores]
            self._read_plan = plan_reads_by_id(self.stores, config)
            for strategy in self._read_plan.strategies:
                stack.callback(strategy.close)
            strategies = iter(self._read_plan.strategies)
            self._specs = []
            for key, ids_of, tree in entries:
                reads = list(itertools.islice(strategies, len(tree.stores)))
                self._specs.append(FetchSpec(key, ids_of, tree.stores, reads, tree.rebuild))
            self._opened = stack.pop_all()

    def on(self, device: Device) -> RowFetch:
        """Return the RowFetch that adds the rows to batches on a device.

        Call it before the loop takes streams of the device.
        """
        self._route = device.choose_route(self.stores, None, "staged")
        return RowFetch(self._specs, device)

    def plan(self, depth: int, device: Device) -> Plan:
        """Return the memory that the rows of files take, without that of the batches."""
        return Plan(
            0,
            depth,
            "direct" if all(map(device.reaches, self.stores)) else "staged",
            self._read_plan.items,
            self.limit,
            notes=(*[self._route] * bool(self._route), *self._read_plan.notes),
        )

    def close(self) -> None:
        """Close the stores that were opened here. A second call does nothing."""
        self._opened.close()


@overload
def wrap_loader(loader: Iterable[T], **options: Unpack[LoaderArguments]) -> LoaderFeeder[T]: ...


@overload
def wrap_loader(
    loader: Iterable[object],
    *,
    fetch: Mapping[Any, tuple[Source, IdsOfBatch]] | None = None,
    host_transform: BatchFunction | None = None,
    device_transform: BatchFunction | None = None,
    **options: Unpack[LoaderArguments],
) -> LoaderFeeder[Any]: ...


@explain_arguments(LOADER_HINTS)
def wrap_loader(
    loader: Iterable[object],
    *,
    device: DeviceLike = "auto",
    depth: int | None = None,
    fetch: Mapping[Any, tuple[Source, IdsOfBatch]] | None = None,
    config: MemoryLimits | None = None,
    progress: bool = False,
    timeline: bool = False,
    host_transform: BatchFunction | None = None,
    device_transform: BatchFunction | None = None,
    threads: int | None = None,
    on_error: Literal["raise", "next", "skip"] = "raise",
    max_skipped: int = 100,
    transform_threads: int | None = None,
    seed: int | None = None,
) -> LoaderFeeder[Any]:
    """Wrap a loader, and prefetch its batches to the device.

    A loop calls ``iter(loader)`` in the thread of the training loop. A reader thread then requests
    the batches. If the loader makes its own batches and they stay on the CPU, nothing is prefetched
    unless you give a ``depth``: the training loop itself requests them. If samples take long,
    ``threads`` or ``depth=2`` make them during the training step.

    The tensors of a batch are copied through page-locked (pinned) memory on a side stream, whether
    or not the loader pins them. Other objects with a ``to(device)`` method are moved by that
    method. All other leaves (numpy arrays, strings, numbers, None) stay unchanged. A batch may be
    any structure of tuples, lists, mappings, named tuples and dataclasses.

    With the same ``torch.manual_seed``, shuffling and the seeds of worker processes equal those of
    the loader alone, whatever the training step draws. If a loop is left early, the generators of
    the loader are put back to where the loader alone would leave them. This does not hold for
    random numbers that a dataset, sampler or ``collate_fn`` draws from a global generator in this
    process (``num_workers=0``). Unless ``depth`` is 0, these numbers are drawn ahead of the
    training step and mix with its own. Give such objects a generator of their own. In the reader
    thread, they also run without the caller's ``torch.no_grad()`` and similar modes, as they do in
    worker processes.

    With ``threads``, threads of this process make the samples of a DataLoader, in place of its
    worker processes: its own dataset, sampler and ``collate_fn``, without a copy of the dataset in
    each process, pickling and shared memory. Batches equal those of the loader with
    ``num_workers=0``, if an item depends on its index alone. Functions of torch that draw random
    numbers in an item draw them from a generator of the sample, so that they depend on
    ``torch.manual_seed`` and not on the number of threads. The dataset must be thread-safe, as for
    ``wrap_dataset``, which can also be resumed.

    If the loader has ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader
    does, the feeder has them too. During a training step, ``state_dict`` returns the state that the
    loader itself would return there, regardless of prefetched batches. The loader loads states of
    the feeder, and the feeder those of the loader, unless a transform takes a generator. The reader
    thread requests the state with every batch. If that is slow, use worker processes with
    torchdata's ``snapshot_every_n_steps``, so that states are made less often. All other reports of
    a loader on its position (for example Accelerate's, about the last batch) refer to the loader
    itself, which is ahead of the loop.

    With ``fetch``, reader threads also read the rows whose ids are in each batch, such as the
    features of the nodes of a sampled graph. The loop then yields pairs of the batch and a dict of
    rows. The rows of a key have the shape ``ids.shape + row_shape`` and the dtype of the source, in
    the order of the ids. Ids may repeat; each distinct row of a batch is read once. Do not change a
    source while a loop runs, because prefetched batches do not see the change.

    Examples:
        >>> loader = torch.utils.data.DataLoader(torch.arange(100), batch_size=10)
        >>> for batch in pinfeed.wrap_loader(loader):
        ...     loss = batch.float().mean()

        With ``fetch``, a batch names rows of another source by ids:

        >>> features = np.zeros((100, 8), np.float32)
        >>> fetch = {"x": (features, lambda batch: batch)}
        >>> for batch, rows in pinfeed.wrap_loader(loader, fetch=fetch):
        ...     loss = rows["x"].mean()

    Args:
        loader: A ``torch.utils.data.DataLoader``, or any iterable of batches that can be iterated
            again for the next epoch. Each batch must have memory of its own; a loop in which
            the loader fills the memory of a prefetched batch again ends with an error. A dataset,
            an array, a tensor or a dict of them is refused, because iterating over it yields single
            samples or names.
        device: Target device, as for ``Feeder``.
        depth: Number of batches to prefetch, at most 1,024. With 0, the training loop requests
            each batch from the loader and copies it to the device. None is ``config.depth``, or 2;
            without ``threads``, ``fetch`` and transforms, it is 1 on a GPU and 0 on the CPU. The
            batches are the same.
        fetch: For each key, a pair (source, ids). The source is one that ``Feeder`` takes: a path,
            array, tensor or store, of any dtype and row shape, or a structure of several with
            equally many rows. The ids are a function of the batch on the host, or a key of the
            batch: a tensor, array or list of integers of any shape, empty or not. A reader thread
            calls the function for one batch at a time, in order. A ``HeteroData`` of PyG needs a
            function: ``lambda batch: batch["item"].n_id``. With ``transform_threads``, several
            threads call the function at the same time.
        config: A ``pinfeed.Config`` with memory limits for the files behind ``fetch``; half of a
            limit is reserved for the batches. None is the free memory. Its ``depth`` is used if
            ``depth`` is None.
        threads: Number of threads that make the samples of a DataLoader, each computing with one
            torch thread, as for ``wrap_dataset``. None leaves them to the loader.
        on_error: Effect of an error of a batch in the loader, a function, ``fetch`` or the copy to
            the device. With ``"raise"``, the loop ends with the error. With ``"next"``, ``next()``
            of the loop's iterator raises the error, and another ``next()`` returns the next batch,
            as for the iterator of a DataLoader. If the loader is a generator, which cannot continue
            after an error, the loop ends. With ``"skip"``, which needs ``threads``, bad samples are
            left out and listed in ``skipped``, as for ``wrap_dataset``.
        max_skipped: Number of samples in a loop that may be skipped; another one raises ReadError.
        progress: Whether to show a progress bar.
        timeline: Whether to record how long each stage of each batch takes.
        host_transform: Function that takes each batch of the loader, before its ids are read, and
            returns a batch of any structure. A reader thread calls it for one batch at a time, in
            order. It may have a parameter ``generator``, as for ``Feeder``.
        transform_threads: Number of reader threads that call ``host_transform``, each for another
            batch, as for ``Feeder``. The loader still returns one batch at a time, in order. After
            ``host_transform``, the same threads read the ids for ``fetch``.
        device_transform: Function that takes each batch on the device, or with ``fetch`` the pair
            of the batch and the dict of rows, and returns what the loop receives. It is called for
            one batch at a time, in order. Its work on a GPU runs in a side stream.
        seed: Seed of the generators of the transforms; None is 0.

    Raises:
        DeviceError: If the device does not exist.
        ArgumentError: If an argument is invalid, ``loader`` does not yield batches, or ``seed`` is
            given without a transform that takes a generator.
        StoreError: If a source of ``fetch`` cannot be read.
        NotEnoughCPUMemory: If the limits of ``config`` cannot hold the chunks that reading needs.
        UnknownArgument: If an argument does not exist. The message says where it belongs.
    """
    skipped = SkippedSamples.for_option(on_error, max_skipped)
    if skipped is not None:
        device_transform = SkippedSamples.passing(device_transform)
    options = LoopOptions(
        progress, timeline, host_transform, device_transform, seed, transform_threads
    )
    options.require_generator_for_seed()
    if skipped is not None and threads is None:
        raise ArgumentError(
            "on_error='skip' was given without threads; expected threads=..., because a loader "
            "that makes its own batches cannot leave out single samples"
        )
    n_threads = None if threads is None else check_threads(threads)
    depth = check_optional_depth(depth)
    if config is not None and fetch is None:
        raise ArgumentError(
            "config was given without fetch; it limits the memory for rows of files behind fetch=, "
            "and the loader decides the size of its batches; leave out config"
        )
    stores = None if fetch is None else FetchStores(fetch, config)
    try:
        if depth is None and config is not None:
            depth = config.depth
        if depth is None:
            # A loader that makes its own batches needs no thread. For the CPU, there is nothing to
            # hide, and on a GPU, one batch is copied during the training step.
            has_work = n_threads is not None or stores is not None or options.has_transforms
            depth = DEFAULT_DEPTH if has_work else int(not is_cpu(device))
        schedule = PrefetchSchedule(depth)
        if stores is not None:
            schedule = dataclasses.replace(schedule, n_readers=n_id_readers(schedule.depth))
        # The synchronous loop has no threads.
        batches = _source_of(loader, 0 if n_threads and not depth else n_threads, skipped)
        if isinstance(batches, ThreadedLoaderSource):
            schedule = batches.schedule(schedule)
        batches.keeps_errors = on_error == "next"
        schedule = options.in_threads(schedule, are_readers=True)
        make = StatefulLoaderFeeder if isinstance(batches, StatefulSource) else LoaderFeeder
        return make(batches, device=device, schedule=schedule, options=options, fetch=stores)
    except BaseException:
        if stores is not None:
            stores.close()
        raise


def _source_of(loader: Any, n_threads: int | None, skipped: SkippedSamples | None) -> LoaderSource:
    """Return the source of a loader's batches, whose samples threads make if there are some."""
    if n_threads is not None:
        return ThreadedLoaderSource(loader, n_threads, skipped)
    if all(callable(getattr(loader, name, None)) for name in STATE_METHODS):
        return StatefulSource(loader)
    return LoaderSource(loader)
