"""wrap_loader(): a torch DataLoader as a source."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices import resolve
from pinfeed.errors import ArgumentError, WorkerError
from pinfeed.memory.limits import check_depth, safe_repr
from pinfeed.pipeline.epochs import EpochRunner, no_copy, no_items
from pinfeed.pipeline.prefetcher import LentBatch, PrefetchSchedule, guarded
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.stores.base import Store
from pinfeed.tensors.pytree import flatten
from pinfeed.validation.arguments import check_flag, explain_arguments
from pinfeed.validation.suggestions import is_array_like

_OF_ITS_BATCHES = (
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "collate_fn",
    "drop_last",
    "generator",
    "in_order",
)
_OF_ITS_WORKERS = (
    "num_workers",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "persistent_workers",
)
HINTS = {
    **{
        name: f"give it to the DataLoader: DataLoader(dataset, {name}=...)"
        for name in (*_OF_ITS_BATCHES, *_OF_ITS_WORKERS)
    },
    **dict.fromkeys(
        ("pin_memory", "pin_memory_device"),
        "tensors go through page-locked memory where there is a GPU; leave it out",
    ),
    "prefetch_factor": "give it to the DataLoader, for its worker processes; the batches that are ready on the device are depth=",
    "seed": "the DataLoader draws the order: give it generator=torch.Generator().manual_seed(seed)",
    "rows": "the DataLoader has the order: give it sampler= or batch_sampler=",
    "ranks": "the DataLoader has the order: give it sampler=DistributedSampler(dataset)",
    "transform": "give it to the dataset, or apply it to the batch in the loop",
}
"""Advice, by the names that DataLoader and Feeder have for it."""


@explain_arguments(HINTS)
def wrap_loader(
    loader: Any,
    *,
    device: Any = "auto",
    depth: int = 2,
    progress: bool = False,
    timeline: bool = False,
) -> LoaderFeeder:
    """The same batches as ``loader`` gives, on the device, ``depth`` batches ahead.

    A loop begins with ``iter(loader)``, in the caller's thread; its batches are then asked for in a
    background thread. Their tensors are moved through page-locked memory on a side stream, whether
    the loader pins them or not; other objects with a ``to(device)`` method move by that; all other
    leaves (numpy arrays, strings, numbers, None) pass through as they are. The structure may be of
    tuples, lists, mappings, named tuples and dataclasses.

    Shuffling and the seeds of worker processes are those of the loader alone, under the same
    ``torch.manual_seed``, whatever the loop's body draws. Not so what a dataset, sampler or
    ``collate_fn`` itself draws from a global generator in this process (``num_workers=0``): that is
    drawn ahead of the body and, unless ``depth`` is 0, mixes with what the body draws; give them a
    generator of their own. They also run without the caller's ``torch.no_grad()`` and the like, as
    they do in worker processes.

    Of a loader with ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader,
    this has them too, and they are the loader's own: taken in the loop's body, the state that the
    loader itself would give there, whatever was prefetched. Either loads what the other saved. It
    is asked for with every batch, in the reader's thread; where that takes long, worker processes
    and torchdata's ``snapshot_every_n_steps`` make it rarer. Whatever else a loader tells of its
    place (that of Accelerate, which batch is the last) is its own place, ahead of the loop.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or any iterable of batches that can be iterated
            again for the next epoch. Each batch has memory of its own: one that is filled again for
            the next batch would change while it is waiting to be lent. A dataset, an array, a
            tensor or a dict of them is refused: its iteration gives single samples or names.
        device: As for ``Feeder``.
        depth: Batches ahead of the loop, at most 1,024; 0 is the loader itself, moved.
        progress: Show a progress bar.
        timeline: Record what takes time in every batch.

    Raises:
        DeviceError: There is no such device.
        ArgumentError: ``depth`` is not a whole number from 0 to 1,024, ``progress`` or ``timeline``
            is no bool, or ``loader`` cannot be iterated, or gives no batches.
        UnknownArgument: There is no such argument. The message says where it goes instead.
    """
    check_flag(progress, "progress")
    check_flag(timeline, "timeline")
    knows = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    feeder, source = (
        (StatefulLoaderFeeder, StatefulSource) if knows else (LoaderFeeder, LoaderSource)
    )
    return feeder(
        source(loader),
        device=device,
        schedule=PrefetchSchedule(check_depth(depth)),
        progress=progress,
        timeline=timeline,
    )


class LoaderFeeder:
    """A loader whose batches are on the device; what it does not know itself it asks the loader (``dataset``, ``batch_sampler``, …)."""

    def __init__(
        self,
        source: LoaderSource,
        *,
        device: Any,
        schedule: PrefetchSchedule,
        progress: bool,
        timeline: bool,
        n_spare: int | None = None,
        stores: Sequence[Store] = (),
        route: str | None = None,
    ) -> None:
        self._source = source
        self._loader = source.loader
        found = resolve(device, n_spare=schedule.depth + 2 if n_spare is None else n_spare)
        self._device = found
        self._owned_device = None if found is device else found
        self._route = found.choose_route(stores, 0, route) if stores else ""
        self._loop = EpochRunner(
            source, found, schedule=schedule, capacity=(), progress=progress, timeline=timeline
        )

    __reduce__ = no_copy
    __getitems__ = no_items

    @safe_repr
    def __repr__(self) -> str:
        size = getattr(self._loader, "batch_size", None)
        batches = f"batches of {size:,}" if isinstance(size, int) else "its batches"
        return f"<{type(self).__name__}: a {type(self._loader).__name__}, {batches} on {self.device}, {self._loop}>"

    def __enter__(self) -> LoaderFeeder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Batches in an epoch, as the loader says.

        Raises:
            TypeError: If the loader does not know.
        """
        try:
            return len(self._loader)
        except TypeError as error:
            raise TypeError(
                f"loader={type(self._loader).__name__}: its len() fails ({error}), so the number of batches is not known; "
                "count them in the loop"
            ) from error

    def __iter__(self) -> Iterator[Any]:
        """The loader's next epoch, on the device.

        Raises:
            ClosedError: This is closed, or another loop over it runs.
        """
        return self._loop.run(LentBatch.take, begin=self._source.begin)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(
                f"{type(self._loader).__name__} has no {name}, so the loop cannot be resumed; give a loader that has "
                "(torchdata's StatefulDataLoader), or a Feeder"
            )
        if name.startswith("_"):
            # Not made yet, or a protocol that the loader must not answer for this object.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __dir__(self) -> list[str]:
        """Its own names, and those that it asks the loader for."""
        asked = {name for name in dir(self._loader) if not name.startswith("_")} - {
            "state_dict",
            "load_state_dict",
        }
        return sorted({*super().__dir__(), *asked})

    @property
    def device(self) -> str:
        """Name of the device, as torch writes it."""
        return self._device.name

    @property
    def stats(self) -> FeederStats:
        """What was measured so far; bytes are those that were moved."""
        return self._loop.stats

    @property
    def timeline(self) -> Timeline:
        """What took time. Only with ``timeline=True``."""
        return self._loop.timeline

    def set_epoch(self, number: int) -> None:
        """Tell the epoch to the loader's sampler, batch sampler and dataset, whichever of them has ``set_epoch``.

        Where none of them has it, the batches stay as they are, without an error: such a loader
        draws its order from torch's random numbers or has one order, and loops that work with any
        sampler call ``set_epoch`` in every epoch.

        Raises:
            ClosedError: A loop over this runs.
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
        for target in {id(candidate): candidate for candidate in candidates}.values():
            if callable(getattr(target, "set_epoch", None)):
                target.set_epoch(number)

    def close(self) -> None:
        """End a loop that runs. The loader stays as it is. Idempotent."""
        with contextlib.ExitStack() as stack:
            if self._owned_device is not None:
                stack.callback(self._owned_device.close)
            stack.callback(self._source.end)
            stack.callback(self._loop.close)


class StatefulLoaderFeeder(LoaderFeeder):
    """A loader that knows where it is, and this where the loop is: ahead of the loop, that is where the loader was."""

    _source: StatefulSource

    def __iter__(self) -> Iterator[Any]:
        """The loader's next epoch, on the device.

        Raises:
            ClosedError: This is closed, or another loop over it runs.
        """
        return self._loop.run(self._lend, begin=self._begin)

    def state_dict(self) -> Any:
        """What the loader's ``state_dict()`` is where the loop is: batches that were prefetched and not lent count for nothing.

        Raises:
            Exception: What the loader's ``state_dict()`` raised.
        """
        state = self._source.state() if self._loop.is_at_rest else self._state
        if isinstance(state, Exception):
            raise state
        return state

    def load_state_dict(self, state: Any) -> None:
        """Let the next loop go on where ``state`` was taken, here or of the loader itself.

        Raises:
            ClosedError: A loop over this runs.
        """
        # An epoch that was left is left for good.
        self._loop.load_state(self._loop.state() | {"batch": 0, "checksum": 0})
        self._loader.load_state_dict(state)

    def _begin(self) -> None:
        self._source.begin()
        self._state = self._source.state()

    def _lend(self, loan: LentBatch) -> Any:
        batch, self._state = loan.take()
        return batch


class HostLeaf:
    """A leaf of a loader's batch: a tensor on the host, or an object that moves itself, which has neither shape nor dtype."""

    __slots__ = ("host_value",)

    def __init__(self, value: Any) -> None:
        self.host_value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.host_value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        from pinfeed.tensors.numpy_torch import NUMPY

        return NUMPY[self.host_value.dtype]

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """Copy the tensor into ``out``."""
        from pinfeed.tensors.numpy_torch import to_torch

        to_torch(out).copy_(self.host_value)
        yield


def check_loader(loader: Any) -> None:
    """Refuse what gives no batches when it is iterated.

    Raises:
        ArgumentError: ``loader`` cannot be iterated, or gives single samples or names.
    """
    # Tables of pandas and Arrow have columns and no dtype; iterating them gives columns or their
    # names.
    is_table = all(hasattr(loader, name) for name in ("shape", "columns", "__getitem__"))
    if isinstance(loader, Mapping) or is_array_like(loader) or is_table:
        gives = (
            "its keys or columns" if isinstance(loader, Mapping) or is_table else "single samples"
        )
        raise ArgumentError(
            f"loader is a {type(loader).__name__}, and iterating it gives {gives}; expected a DataLoader or another iterable of batches; "
            "give DataLoader(dataset, batch_size=...), or let pinfeed.Feeder(source, batch_size=...) read arrays and tensors as batches"
        )
    if _is_map_style(loader):
        raise ArgumentError(
            f"loader is a {type(loader).__name__}, a Dataset, which gives single samples; expected a DataLoader or another iterable of "
            "batches; give DataLoader(dataset, batch_size=...), or batch_size=None where each item is a whole batch"
        )
    if isinstance(loader, (str, bytes)) or (
        not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__")
    ):
        file = (
            "; a file is streamed by pinfeed.Feeder(path, batch_size=...)"
            if isinstance(loader, (str, bytes, os.PathLike))
            else ""
        )
        raise ArgumentError(
            f"loader={loader!r} cannot be iterated; expected a DataLoader or another iterable of batches{file}"
        )


def _is_map_style(loader: Any) -> bool:
    """Whether it is a torch Dataset that gives samples by index, and has no iteration of its own."""
    from torch.utils.data import Dataset

    return isinstance(loader, Dataset) and not isinstance(loader, Iterable)


class LoaderSource:
    """The batches of a loader.

    Args:
        loader: Iterated once per epoch.

    Raises:
        ArgumentError: It cannot be iterated, or gives single samples or names instead of batches.
    """

    fingerprint: Mapping[str, Any] = {"order": "a DataLoader's own"}

    def __init__(self, loader: Any) -> None:
        check_loader(loader)
        self.loader = loader
        self._begun: Iterator[Any] | None = None
        # If the loader is an iterator itself.
        self._used_up = False

    def __len__(self) -> int:
        return len(self.loader)

    def begin(self) -> None:
        """Consumer. Start the loader's next epoch, as the loop over the loader itself would now.

        Its seeds are drawn here, and its worker processes forked: before there is a reader, and
        where torch can set up its watch over them.
        """
        begun = guarded(iter, self.loader)
        if begun is self.loader and self._used_up:
            raise ArgumentError(
                f"loader={self.loader!r} is an iterator, which gives its batches once; give what it iterates for a second epoch"
            )
        self._begun = begun
        self._used_up = True

    def skip(self, n: int) -> None:
        """Consumer. Drop the first batches of the epoch that was begun.

        Raises:
            ArgumentError: There are fewer.
        """
        assert self._begun is not None
        for i in range(n):
            try:
                guarded(next, self._begun)
            except WorkerError as error:
                if not isinstance(error.__cause__, StopIteration) or not is_end(error.__cause__):
                    raise
                raise ArgumentError(
                    f"{n} batches of this epoch were done when the state was saved; now the loader gives {i}"
                ) from None

    def finish(self) -> None:
        """Consumer.

        Drop all batches that are left, for what the loader draws at the end of an epoch.
        """
        begun = self._begun
        self._begun = None
        assert begun is not None
        for _ in self._draws(begun):
            pass

    def end(self) -> None:
        """Consumer. Let go of an epoch that was begun and never asked for a batch."""
        self._begun = None

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """The batches of the epoch that was begun last, one in a load."""
        batches = self._begun
        self._begun = None
        assert batches is not None
        return self._draws(batches)

    def hint(self, draw_share: float) -> str:
        """What to change where a loop waits for this loader."""
        n_workers = getattr(self.loader, "num_workers", None)
        if draw_share < 0.5:
            return "Most of it is copying the tensors of the batches: a smaller dtype leaves less to copy (uint8, converted on the device)."
        if n_workers is None:
            return f"It is the loader ({type(self.loader).__name__}) that is waited for: pinfeed can only ask it earlier, not make it faster."
        return (
            f"It is the DataLoader that is waited for (num_workers={n_workers}): raise num_workers (this process may use "
            f"{len(os.sched_getaffinity(0))} cores), or make the dataset's __getitem__ and collate_fn cheaper."
        )

    def draw(self, batch: Any) -> BatchThunk:
        """What makes a load of a batch: called in the order of the batches, one at a time; what it returns is not."""
        return functools.partial(load_of, batch)

    def _draws(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        while True:
            try:
                batch = next(batches)
            except StopIteration as stop:
                if is_end(stop):
                    return
                # A RuntimeError, then, for this is a generator.
                raise
            yield self.draw(batch)


class StatefulSource(LoaderSource):
    """The batches of a loader that knows where it is, each with what it said of that when it had given it."""

    def state(self) -> Any:
        """Reader, or consumer where there is none.

        What the loader says, or its error, for whoever asks: a loop need not be resumed.
        """
        try:
            state = self.loader.state_dict()
            # What came out of worker processes stays as it is; what is in this one, a dataset may
            # go on changing.
            return state if getattr(self.loader, "num_workers", 0) else copy.deepcopy(state)
        except Exception as error:
            return error

    def draw(self, batch: Any) -> BatchThunk:
        return functools.partial(self._load, batch, self.state())

    @staticmethod
    def _load(batch: Any, state: Any) -> HostBatch:
        load = load_of(batch)
        rebuild = load.rebuild
        load.rebuild = lambda tensors: (rebuild(tensors), state)
        return load


def is_end(stop: StopIteration) -> bool:
    """Whether there are no more batches; else the user's own code raised this, here or in a worker, and DataLoader let it pass for the end.

    A number of batches below the loader's len proves nothing: there are samplers whose len is an
    upper bound.
    """
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    users = {_MapDatasetFetcher.fetch.__code__, ExceptionWrapper.reraise.__code__}
    return all(frame.f_code not in users for frame, _ in traceback.walk_tb(stop.__traceback__))


def load_of(batch: Any) -> HostBatch:
    """A batch whose leaves are on the host."""
    leaves, rebuild = flatten(batch)
    moves = [callable(getattr(leaf, "to", None)) for _, leaf in leaves]
    kept = [None if moved else leaf for (_, leaf), moved in zip(leaves, moves, strict=True)]
    parts = [HostLeaf(leaf) for (_, leaf), moved in zip(leaves, moves, strict=True) if moved]
    return HostBatch(
        parts,
        lambda tensors: rebuild(
            next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)
        ),
        [(_n_samples(leaves), 0)],
    )


def _n_samples(leaves: list[tuple[str, Any]]) -> int:
    """Length of the first leaf that has one: by convention, the number of samples."""
    for _, leaf in leaves:
        with contextlib.suppress(AttributeError, TypeError, IndexError, RuntimeError):
            # torch has no shape for nested tensors.
            return int(leaf.shape[0])
    return 1
