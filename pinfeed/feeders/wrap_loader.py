"""wrap_loader(): wraps a loader, to get its batches on the device, a few batches ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from pinfeed.errors import ArgumentError
from pinfeed.feeders.batch_functions import check_seed_of_functions
from pinfeed.feeders.dataloader import STATE_METHODS, LoaderFeeder, StatefulLoaderFeeder
from pinfeed.feeders.fetch import FetchStores
from pinfeed.feeders.hints import LOADER_HINTS
from pinfeed.feeders.options import LoaderOptions, check_options
from pinfeed.memory.depth import check_optional_depth
from pinfeed.memory.limits import MemoryLimits
from pinfeed.pipeline.schedule import PrefetchSchedule, measured_schedule
from pinfeed.pipeline.sources.dataloader import LoaderSource, StatefulSource
from pinfeed.validation.arguments import check_choice, explain_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import Fetch, Function, K, LoaderArguments, T, U


@overload
def wrap_loader(
    loader: Any,
    *,
    device_transform: Function[U],
    host_transform: Function[Any] | None = None,
    fetch: Fetch[Any] | None = None,
    **options: Unpack[LoaderArguments],
) -> LoaderFeeder[U]: ...


@overload
def wrap_loader(
    loader: Any,
    *,
    host_transform: Function[U],
    fetch: Fetch[K],
    device_transform: None = None,
    **options: Unpack[LoaderArguments],
) -> LoaderFeeder[tuple[U, dict[K, Any]]]: ...


@overload
def wrap_loader(
    loader: Any,
    *,
    host_transform: Function[U],
    fetch: None = None,
    device_transform: None = None,
    **options: Unpack[LoaderArguments],
) -> LoaderFeeder[U]: ...


@overload
def wrap_loader(
    loader: Iterable[T],
    *,
    fetch: Fetch[K],
    host_transform: None = None,
    device_transform: None = None,
    **options: Unpack[LoaderArguments],
) -> LoaderFeeder[tuple[T, dict[K, Any]]]: ...


@overload
def wrap_loader(
    loader: Iterable[T],
    *,
    fetch: None = None,
    host_transform: None = None,
    device_transform: None = None,
    **options: Unpack[LoaderArguments],
) -> LoaderFeeder[T]: ...


@explain_arguments(LOADER_HINTS, options=LoaderOptions)
def wrap_loader(
    loader: Any,
    *,
    device: Any = "auto",
    depth: int | None = None,
    fetch: Mapping[Any, tuple[Any, Any]] | None = None,
    config: MemoryLimits | None = None,
    **options: Unpack[LoaderOptions],
) -> LoaderFeeder[Any]:
    """Wrap a loader, to get its batches on the device, a few batches ahead.

        for images, labels in pinfeed.wrap_loader(DataLoader(dataset, batch_size=256)):
            ...

    A loop calls ``iter(loader)`` in the caller's thread. A background thread then asks for the
    batches. On the CPU, a loop without a ``depth`` measures whether short batches are faster
    without the thread. While it does, and afterwards if they are, the training thread asks for
    batches. Give a ``depth`` if one thread must ask for all batches of an epoch (because of sqlite
    connections or thread-local values, say).

    The tensors of a batch are copied through page-locked memory on a side stream, whether or not
    the loader pins them. Other objects with a ``to(device)`` method are moved by that method. All
    other leaves (numpy arrays, strings, numbers, None) stay as they are. A batch may be any
    structure of tuples, lists, mappings, named tuples and dataclasses.

    Shuffling and the seeds of worker processes are those of the loader alone under the same
    ``torch.manual_seed``, whatever the training step draws. This does not hold for random numbers
    that a dataset, sampler or ``collate_fn`` draws from a global generator in this process
    (``num_workers=0``). Unless ``depth`` is 0, they are drawn ahead of the training step, with None
    on the CPU for some batches only, and mix with its own; give such objects a generator of their
    own. In the background thread, they also run without the caller's ``torch.no_grad()`` and
    similar modes, as they do in worker processes.

    If the loader has ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader
    does, the feeder has them too. Inside a training step, ``state_dict`` returns the state that the
    loader itself would return there, regardless of prefetched batches. Each of the two loads the
    states of the other. The reader thread asks for the state with every batch. If that takes long,
    worker processes and torchdata's ``snapshot_every_n_steps`` make it rarer. Anything else that a
    loader tells about its position (for example Accelerate's, about the last batch) is the loader's
    own position, which is ahead of the loop.

    With ``fetch``, background threads also read the rows that each batch names by ids, such as the
    features of the nodes of a sampled graph. The loop then yields pairs of the batch and a dict of
    rows:

        fetch = {"x": ("features.npy", "n_id"), "y": (labels, lambda batch: batch["seeds"])}
        for batch, rows in pinfeed.wrap_loader(loader, fetch=fetch):
            loss = model(rows["x"], batch["edges"], rows["y"])

    The rows of a key have the shape ``ids.shape + row_shape`` and the dtype of the source, in the
    order of the ids. Ids may repeat; each distinct row of a batch is read once. Nothing may change
    a source while a loop runs, because batches that were prefetched do not see the change.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or any iterable of batches that can be iterated
            again for the next epoch. Each batch must have memory of its own, because a batch that
            the loader fills again would change while it waits. A dataset, an array, a tensor
            or a dict of them is refused, because iterating it yields single samples or names.
        device: Target device, as for ``Feeder``.
        depth: Number of batches to prefetch, at most 1,024; 0 is the loader itself, with its
            batches moved. None is 2. On the CPU, the loop measures whether 0 is faster for short
            batches, and ``depth_reason`` says what it chose. It does not measure with ``fetch``
            from files. The batches are the same.
        fetch: For each key, a pair (source, ids). The source is one that ``Feeder`` takes: a path,
            array, tensor or store, of any dtype and row shape, or a structure of several with
            equally many rows. The ids are a function of the batch on the host, or a key of the
            batch: a tensor, array or list of integers of any shape, empty or not. The function is
            called like that of ``train_rows``: in order, one batch at a time, in a background
            thread. A ``HeteroData`` of PyG needs a function: ``lambda batch: batch["item"].n_id``.
        config: Memory limits for the files behind ``fetch``, half of which is left for the batches.
            None for the free memory. Its ``depth`` is taken if none is given here.
        again: Rule for a loop that begins while an older one has not ended, as for ``Feeder``.
        on_error: Effect of an error of a batch in the loader, a function, ``fetch`` or the copy to
            the device. With ``"raise"``, the loop ends with the error. With ``"next"``, ``next()``
            of the loop's iterator raises the error, and another ``next()`` gives the next batch, as
            the iterator of a DataLoader does. If the loader is a generator, which cannot continue
            after an error, the loop ends.
        progress: Whether to show a progress bar.
        timeline: Whether to record what takes time in every batch.
        host_transform: Function that takes each batch of the loader, before its ids are asked for,
            and returns a batch of any structure. It is called for one batch at a time, in order, in
            a background thread. It may have a parameter ``generator``: see ``LoopOptions``.
        device_transform: Function that takes each batch on the device, or with ``fetch`` the pair
            of the batch and the dict of rows, and returns what the loop gets. It is called in the
            same way. Its work on a GPU runs in a side stream.
        seed: Seed of the generators of these functions; None is 0.

    Raises:
        DeviceError: If the device does not exist.
        ArgumentError: If ``depth`` is not None or a whole number from 0 to 1,024, ``progress`` or
            ``timeline`` is not a bool, ``loader`` cannot be iterated or does not yield batches,
            ``fetch`` is no mapping to pairs, a function is not callable, or ``seed`` is given
            without a function that gets a generator.
        StoreError: If a source of ``fetch`` cannot be read.
        NotEnoughCPUMemory: If the limits of ``config`` cannot hold the chunks that reading needs.
        UnknownArgument: If an argument does not exist. The message says where it belongs.
    """
    check_options(options)
    check_choice(options["on_error"], "on_error", ("raise", "next"))
    check_seed_of_functions(options)
    depth = check_optional_depth(depth)
    if config is not None and fetch is None:
        raise ArgumentError(
            "config was given without fetch; it limits the memory for rows of files behind fetch=, "
            "and the loader decides the size of its batches; leave config out"
        )
    has_state = all(callable(getattr(loader, name, None)) for name in STATE_METHODS)
    feeder = StatefulLoaderFeeder if has_state else LoaderFeeder
    source = StatefulSource if has_state else LoaderSource
    batches = source(loader)
    batches.keeps_errors = options["on_error"] == "next"
    if fetch is None:
        schedule = measured_schedule() if depth is None else PrefetchSchedule(depth)
        return feeder(batches, device=device, schedule=schedule, options=options)
    stores = FetchStores(fetch, config)
    try:
        schedule = stores.schedule(depth)
        return feeder(batches, device=device, schedule=schedule, options=options, fetch=stores)
    except BaseException:
        stores.close()
        raise
