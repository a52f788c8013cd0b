"""wrap_loader(): a torch DataLoader as a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import check_depth
from .devices import resolve
from .epoch import Loan
from .errors import WorkerError
from .loop import Loop
from .sources import Load
from .stats import FeederStats, Timeline
from .tree import Rebuild, flatten


def wrap_loader(loader: Any, *, device: Any = "auto", depth: int = 2, progress: bool = False, timeline: bool = False) -> LoaderFeeder:
    """The same batches as ``loader`` gives, on the device, ``depth`` batches ahead.

    The loader is iterated in a background thread. Its tensors are moved through page-locked memory on a side stream, whether it pins
    them or not; other objects with a ``to(device)`` method move by that; all other leaves (strings, numbers, None) pass through.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or any iterable of batches that can be iterated again for the next epoch.
        device: As for ``Feeder``.
        depth: Batches ahead of the loop; 0 is the loader itself, moved.
        progress: Show a progress bar.
        timeline: Record what takes time in every batch.

    Raises:
        DeviceError: There is no such device.
        ArgumentError: ``depth`` is negative.
    """
    return LoaderFeeder(loader, device=device, depth=depth, progress=progress, timeline=timeline)


class LoaderFeeder:
    """A loader whose batches are on the device; what it does not know itself it asks the loader (``dataset``, ``batch_sampler``, …)."""

    def __init__(self, loader: Any, *, device: Any, depth: int, progress: bool, timeline: bool) -> None:
        check_depth(depth)
        self._loader = loader
        found = resolve(device, n_spare=depth + 2)
        self._device, self._owned_device = found, None if found is device else found
        self._loop = Loop(LoaderSource(loader), found, depth=depth, capacity=(), progress=progress, timeline=timeline)

    def __enter__(self) -> LoaderFeeder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's next epoch, on the device.

        Raises:
            ClosedError: This is closed, or another loop over it runs.
        """
        return self._loop.run(Loan.take)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(f"{name} of the loader counts batches that were prefetched and not lent; resume a Feeder instead")
        if name.startswith("_"):  # not made yet, or a protocol that the loader must not answer for this object
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def stats(self) -> FeederStats:
        """What was measured so far; bytes are those that were moved."""
        return self._loop.stats

    @property
    def timeline(self) -> Timeline:
        """What took time. Only with ``timeline=True``."""
        return self._loop.timeline

    def set_epoch(self, number: int) -> None:
        """Tell the epoch to the loader's sampler, batch sampler and dataset, whichever of them has ``set_epoch``."""
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
        self._loop.close()
        if self._owned_device is not None:
            self._owned_device.close()


class HostLeaf:
    """A leaf of a loader's batch: a tensor on the host, or an object that moves itself."""

    __slots__ = ("dtype", "shape", "value")

    def __init__(self, value: Any, dtype: np.dtype[Any]) -> None:
        self.value, self.dtype = value, dtype
        self.shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """Copy the tensor into ``out``."""
        from .tensors import to_torch

        to_torch(out).copy_(self.value)
        yield


class LoaderSource:
    """The batches of a loader.

    Args:
        loader: Iterated once per epoch, in the reader's thread.
    """

    fingerprint: Mapping[str, Any] = {"order": "a DataLoader's own"}

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, number: int, start: int, checksum: int) -> Iterator[Load]:
        """Raises:
        WorkerError: The loader gave fewer batches than its length says: something below it raised StopIteration.
        """
        count = 0
        for batch in self._loader:
            yield _load(batch)
            count += 1
        promised = self._promised()
        if promised is not None and count < promised:
            raise WorkerError(
                f"the loader ended after {count} of {promised} batches (its len); the dataset or the sampler raised StopIteration, "
                "which ends a loop in silence; raise IndexError or another error instead"
            )

    def _promised(self) -> int | None:
        """The number of batches, where it is binding: of an iterable dataset, len is a guess."""
        from torch.utils.data import IterableDataset

        if isinstance(getattr(self._loader, "dataset", None), IterableDataset):
            return None
        try:
            return len(self._loader)
        except TypeError:
            return None


def _load(batch: Any) -> Load:
    from .tensors import NUMPY

    leaves, rebuild = flatten(batch)
    parts: list[HostLeaf] = []
    moves = []
    for _, leaf in leaves:
        moves.append(callable(getattr(leaf, "to", None)))
        if moves[-1]:
            parts.append(HostLeaf(leaf, NUMPY.get(getattr(leaf, "dtype", None), np.dtype(np.uint8))))  # type: ignore[call-overload]
    return Load(parts, _weave(rebuild, leaves, moves), _n_samples(leaves))


def _weave(rebuild: Rebuild, leaves: list[tuple[str, Any]], moves: list[bool]) -> Rebuild:
    """Builds the batch from the tensors and the leaves that pass through."""
    kept = [None if moved else leaf for (_, leaf), moved in zip(leaves, moves, strict=True)]
    return lambda tensors: rebuild(iter([next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)]))


def _n_samples(leaves: list[tuple[str, Any]]) -> int:
    """Length of the first leaf that has one: by convention, the number of samples."""
    for _, leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    return 1
