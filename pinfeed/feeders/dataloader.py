"""wrap_loader(): the batches of a torch DataLoader, prefetched to the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

from pinfeed.errors import ArgumentError
from pinfeed.feeders.base import BaseFeeder, T_co
from pinfeed.feeders.batch_functions import batch_function, check_seed_of_functions
from pinfeed.feeders.fetch import FetchStores
from pinfeed.feeders.hints import LOADER_HINTS
from pinfeed.feeders.options import LoaderOptions, TableLoopOptions, check_options
from pinfeed.memory.depth import check_optional_depth
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.pipeline.epochs import EpochRunner
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_functions import LoopFunctions
from pinfeed.pipeline.schedule import PrefetchSchedule, measured_schedule
from pinfeed.pipeline.sources.dataloader import LoaderSource, StatefulSource
from pinfeed.validation.arguments import check_choice, explain_arguments
from pinfeed.validation.safe_repr import safe_repr

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pinfeed.feeders.typed import Fetch, Function, K, LoaderArguments, T, U

_STATE_METHODS = ("state_dict", "load_state_dict")


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
    has_state = all(callable(getattr(loader, name, None)) for name in _STATE_METHODS)
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


class LoaderFeeder(BaseFeeder[T_co]):
    """Loader whose batches are on the device; ``wrap_loader`` returns it.

    Attributes that it does not have itself are those of the loader (``dataset``,
    ``batch_sampler``, ...).

    Args:
        source: Source that iterates the loader.
        device: Target device, as the user named it.
        schedule: Number of batches to prefetch; it is measured only if the device permits it.
        options: Options of the loop, with their defaults.
        n_spare: Number of device buffers that may be kept for reuse; None is one per store, or one
            without ``fetch``, for each batch that is on the device at a time.
        fetch: Stores of the rows that the batches name by ids; None if there are none.
    """

    def __init__(
        self,
        source: LoaderSource,
        *,
        device: Any,
        schedule: PrefetchSchedule,
        options: LoaderOptions | TableLoopOptions,
        n_spare: int | None = None,
        fetch: FetchStores | None = None,
    ) -> None:
        self._source = source
        self._loader = source.loader
        self._fetch = fetch
        self._depth = schedule.depth
        if n_spare is None:
            n_spare = (schedule.depth + 2) * (1 if fetch is None else len(fetch.stores))
        self._open_device(device, n_spare)
        if fetch is not None:
            source.fetch = fetch.on(self._device)
        seed = options["seed"]
        source.host_transform = batch_function("host_transform", options, seed, "cpu")
        self._functions = LoopFunctions(
            source.host_transform,
            batch_function("device_transform", options, seed, self.device),
        )
        self._loop = EpochRunner(
            source,
            self._device,
            schedule=schedule.on(self._device),
            capacity=(),
            progress=options["progress"],
            timeline=options["timeline"],
            again=options["again"],
            functions=self._functions,
        )

    @safe_repr
    def __repr__(self) -> str:
        size = getattr(self._loader, "batch_size", None)
        batches = f"batches of {size:,}" if isinstance(size, int) else "its batches"
        loader = type(self._loader).__name__
        return f"<{type(self).__name__}: a {loader}, {batches} on {self.device}, {self._loop}>"

    @property
    def plan(self) -> Plan:
        """Memory that the files behind ``fetch`` take. That of the batches is not known.

        Results of functions on batches are counted as measured so far.
        """
        plan = Plan(0, self._depth, "staged", ())
        if self._fetch is not None:
            plan = self._fetch.plan(self._depth, self._device)
        return self._functions.with_measured(plan, unified=self._device.unified)

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
                "of batches is not known; count them in the loop"
            ) from error

    def __iter__(self) -> Iterator[T_co]:
        """Begin the loader's next epoch, with its batches on the device.

        Raises:
            ClosedError: If the feeder is closed, or a loop over it runs that may not be ended.
        """
        source = self._source
        return self._loop.run(LentBatch.take, begin=source.begin, keeps_errors=source.keeps_errors)

    def __getattr__(self, name: str) -> Any:
        if name in _STATE_METHODS:
            raise AttributeError(
                f"{type(self._loader).__name__} has no {name}, so the loop cannot be resumed; give "
                "a loader that has (torchdata's StatefulDataLoader), or a Feeder"
            )
        if name.startswith("_"):
            # Either an attribute that the constructor has not set yet, or a protocol that the
            # loader must not answer for the feeder.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader if the loader has it and the feeder has not.

        The loader refuses what cannot be changed, such as the batch size of a DataLoader.
        """
        is_own = name.startswith("_") or hasattr(type(self), name)
        if is_own or not hasattr(self._loader, name):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __dir__(self) -> list[str]:
        """Return the names of the feeder's own attributes and of the loader's public ones."""
        of_loader = {name for name in dir(self._loader) if not name.startswith("_")}
        return sorted({*super().__dir__(), *of_loader.difference(_STATE_METHODS)})

    def set_epoch(self, number: int) -> None:
        """Call ``set_epoch`` of the loader, its samplers and its dataset, if they have it.

        If none of them has it, nothing changes and no error is raised. Such a loader draws its
        order from torch's random numbers, or has one order. Loops that work with any sampler call
        ``set_epoch`` in every epoch.

        Args:
            number: Number of the epoch, at least 0.

        Raises:
            ClosedError: If a loop runs that may not be ended, or the feeder is closed.
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
        # One object may have several of these roles; it is called once.
        for target in {id(candidate): candidate for candidate in candidates}.values():
            if callable(getattr(target, "set_epoch", None)):
                target.set_epoch(number)

    def _close_sources(self, stack: contextlib.ExitStack) -> None:
        if self._fetch is not None:
            stack.callback(self._fetch.close)
        stack.callback(self._source.end)


class StatefulLoaderFeeder(LoaderFeeder[T_co]):
    """Loader whose batches are on the device, and that can be resumed; ``wrap_loader`` returns it.

    Prefetching moves the loader ahead of the loop. The feeder keeps the state that the loader had
    after the batch of the current training step.
    """

    _source: StatefulSource

    def __iter__(self) -> Iterator[T_co]:
        """Begin the loader's next epoch, with its batches on the device.

        Raises:
            ClosedError: If the feeder is closed, or a loop over it runs that may not be ended.
        """
        return self._loop.run(self._take, begin=self._begin, keeps_errors=self._source.keeps_errors)

    def state_dict(self) -> Any:
        """Return the loader's ``state_dict()`` at the position of the loop.

        Batches that are only prefetched do not count. If a function gets a generator, the state is
        a dict of the loader's own state and of the position of the feeder, which seeds the
        generators.

        Raises:
            Exception: If the loader's ``state_dict()`` failed; its error.
        """
        state = self._source.state() if self._loop.is_at_rest else self._state
        if isinstance(state, Exception):
            raise state
        if not self._functions.take_generators:
            return state
        return {"loader": state, "pinfeed": self._loop.state()}

    def load_state_dict(self, state: Any) -> None:
        """Make the next loop continue at a saved position.

        Args:
            state: Return value of ``state_dict`` of this feeder, or of the loader itself if no
                function gets a generator.

        Raises:
            ArgumentError: If a function gets a generator, and the state does not have the number of
                the batch, which seeds it.
            ClosedError: If a loop runs that may not be ended, or the feeder is closed.
        """
        is_own = isinstance(state, Mapping) and set(state) == {"loader", "pinfeed"}
        if not is_own and self._functions.take_generators:
            raise ArgumentError(
                "load_state_dict() got a state of the loader itself, which does not have the "
                "number of the batch; expected what state_dict() of this feeder returned, because "
                "that number seeds the generator of host_transform or device_transform"
            )
        if is_own and self._functions.take_generators:
            self._loop.load_state(state["pinfeed"])
        else:
            # The loader alone knows the batch. An epoch that was left is not continued.
            self._loop.load_state(self._loop.state() | {"batch": 0, "checksum": 0})
        self._loader.load_state_dict(state["loader"] if is_own else state)

    def _begin(self) -> None:
        """Begin an epoch of the loader, and keep its state before the first batch."""
        self._source.begin()
        self._state = self._source.state()

    def _take(self, lent: LentBatch) -> Any:
        """Return the data of a batch to the loop, and keep the loader's state after it."""
        self._state = lent.state
        return lent.take()
