"""wrap_loader(): a torch DataLoader as a source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pinfeed.devices import resolve
from pinfeed.memory.limits import check_depth, safe_repr
from pinfeed.pipeline.epochs import EpochRunner, no_copy, no_items
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.dataloader import LoaderSource, StatefulSource
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.stores.base import Store
from pinfeed.validation.arguments import check_flag, explain_arguments

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
