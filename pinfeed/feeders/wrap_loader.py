"""wrap_loader(): wraps a loader and prefetches its batches to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from pinfeed.devices import DeviceLike, is_cpu
from pinfeed.errors import ArgumentError
from pinfeed.feeders.base_feeder import LoopOptions
from pinfeed.feeders.dataset_feeder import check_threads
from pinfeed.feeders.hints import LOADER_HINTS
from pinfeed.feeders.loader_feeder import (
    STATE_METHODS,
    FetchStores,
    LoaderFeeder,
    StatefulLoaderFeeder,
)
from pinfeed.memory.limits import DEFAULT_DEPTH, MemoryLimits, check_optional_depth
from pinfeed.pipeline.schedule import PrefetchSchedule, n_id_readers
from pinfeed.pipeline.sources.loader_source import LoaderSource, StatefulSource
from pinfeed.pipeline.sources.sample_batch import SkippedSamples
from pinfeed.pipeline.sources.sample_source import ThreadedLoaderSource
from pinfeed.tensors.argument_types import BatchFunction, IdsOfBatch, Source
from pinfeed.validation.arguments import explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import LoaderArguments, T


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
