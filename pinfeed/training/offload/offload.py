"""Offload: what autograd saves for the backward pass waits for it in page-locked host memory.

    with Offload("cuda", host_limit=GiB(16)) as offload:      # made once
        for x, y in loader:
            with offload.step(model):
                loss = loss_fn(model(x), y)
            loss.backward()                                   # what was saved comes back ahead of its use
            optimizer.step(); optimizer.zero_grad()

The gradients are those of the plain step, bit for bit, and so are all other effects (dropout,
BatchNorm's running statistics): nothing is computed twice or in another order. Each storage goes
once, however many tensors on it are saved, and all blocks on the host are used again in the next
step.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pinfeed.devices import resolve
from pinfeed.devices.base import Device, Event
from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.units import KiB, MiB
from pinfeed.training.offload.offload_transfer import OffloadTransfer, StoragePiece
from pinfeed.training.offload.pinned_pool import PinnedPool
from pinfeed.training.offload.saved_tensors import (
    Geometry,
    Range,
    Same,
    Storages,
    geometry_of,
    tensors_of,
    version_of,
)


@dataclass(frozen=True)
class OffloadStats:
    """What an Offload did so far; sizes in bytes.

    Attributes:
        n_tensors: Saved tensors whose storages went to the host, or were there already.
        n_storages: Storages, or parts of them, that went.
        offloaded_bytes: Their size.
        kept_bytes: Of those that stayed, for the host limit was reached.
        restored_bytes: What came back.
        n_missed: How many came back only when they were asked for.
        host_bytes: On the host now.
        peak_host_bytes: Most that was there at a time.
        blocks_bytes: Page-locked now, free blocks included.
        n_blocks_made: Blocks that were page-locked; none in a step like an earlier one.
    """

    n_tensors: int
    n_storages: int
    offloaded_bytes: int
    kept_bytes: int
    restored_bytes: int
    n_missed: int
    host_bytes: int
    peak_host_bytes: int
    blocks_bytes: int
    n_blocks_made: int


class _Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output would keep its node of the graph alive, and so itself.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(tensor)


class _Moved(StoragePiece):
    """A piece, and what tells whether another saved tensor is the same values."""

    __slots__ = ("handles", "probe", "range", "same")

    same: Same
    probe: torch.Tensor
    range: Range
    handles: list[weakref.ref[_Handle]]

    @property
    def is_served(self) -> bool:
        """Whether every tensor on it has been asked for since it came back."""
        return all(
            handle is None or handle.back is self.back for handle in (ref() for ref in self.handles)
        )


class _Handle:
    """What the graph has instead of a saved tensor; the piece lives as long as one of its handles."""

    __slots__ = ("__weakref__", "back", "geometry", "piece")

    def __init__(self, piece: _Moved, geometry: Geometry) -> None:
        self.piece = piece
        self.geometry = geometry
        self.back: Event | None = None
        """Of the piece, when this was asked for last."""
        piece.handles.append(weakref.ref(self))


class Offload:
    """Moves what autograd saves on one device to the host during the forward pass and back during the backward pass.

    The first step page-locks the blocks, which takes time; after that the host waits for nothing.
    Several graphs may be there at a time, be kept for several backward passes, be differentiated
    again, or be dropped; blocks are free when the last saved tensor on them is.

    A saved tensor that is changed in place before the backward pass is an error, as it is without
    Offload: the change may come before the copy is done. What torch does not count (``.data``,
    kernels of one's own) is not seen, and must leave alone what was saved. A saved tensor that
    another stream reads without saving it needs ``record_stream``, as if the graph did not keep it.

    Args:
        device: Where the model is: ``"auto"``, ``"cuda"``, ``"cuda:1"``, ``"cpu"`` (for tests), or
            a Device.
        host_limit: Most bytes of page-locked memory, free blocks included; what finds no room stays
            on the device. None for half of what is free.
        threshold: Storages of fewer bytes stay on the device.
        window: Bytes of device memory that what was saved last may hold while it is copied, and as
            many for what comes back ahead of its use. Enough for a few layers: with too little,
            computation waits for copies.

    Raises:
        ArgumentError: A size that cannot be.
        DeviceError: There is no such device.
    """

    storages: type[Storages] = Storages
    """How tensors lie on their storages; otherwise on a simulated device."""

    def __init__(
        self,
        device: Any = "auto",
        *,
        host_limit: int | None = None,
        threshold: int = KiB(64),
        window: int = MiB(256),
    ) -> None:
        for name, value, least in (
            ("host_limit", host_limit, 0),
            ("threshold", threshold, 0),
            ("window", window, 1),
        ):
            if value is not None and value < least:
                raise ArgumentError(f"{name}={value}: expected bytes, at least {least}")
        self.device: Device = resolve(device, n_spare=0)
        self._owns_device = self.device is not device
        self._storages = self.storages(self.device.name)
        self._blocks = PinnedPool(
            self.device, free_host_bytes() // 2 if host_limit is None else host_limit
        )
        self._spill = OffloadTransfer(self.device, self._blocks, window)
        self._threshold = threshold
        self._window = window
        # The backward pass runs in threads of autograd's.
        self._lock = threading.Lock()
        self._saved: weakref.WeakValueDictionary[tuple[int, Range], _Moved] = (
            weakref.WeakValueDictionary()
        )
        self._served: list[weakref.ref[_Moved]] = []
        self._n_pieces = self._n_tensors = self._n_storages = self._kept_bytes = 0
        self._closed = False

    @contextlib.contextmanager
    def step(self, *models: nn.Module | torch.Tensor) -> Iterator[None]:
        """What autograd saves in this context, in this thread, goes to the host: wrap the forward pass and the loss.

        Args:
            models: Whose parameters and buffers stay; also tensors that stay because they are on
                the device anyway, such as the inputs.

        Raises:
            ClosedError: The Offload is closed.
        """
        if self._closed:
            raise ClosedError("step() of a closed Offload; make a new one")
        staying = {
            id(owner): owner for owner in map(self._owner, tensors_of(models)) if owner is not None
        }
        try:
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, staying), self._unpack):
                yield
        finally:
            # The graph has the hooks, and lives on.
            staying.clear()
            with self._lock:
                self._spill.tidy()

    @property
    def stats(self) -> OffloadStats:
        """What was done so far."""
        with self._lock:
            self._spill.tidy()
            spill, blocks = self._spill, self._blocks
            return OffloadStats(
                n_tensors=self._n_tensors,
                n_storages=self._n_storages,
                offloaded_bytes=spill.offloaded,
                kept_bytes=self._kept_bytes,
                restored_bytes=spill.restored,
                n_missed=spill.n_missed,
                host_bytes=blocks.used,
                peak_host_bytes=blocks.peak,
                blocks_bytes=blocks.nbytes,
                n_blocks_made=blocks.n_made,
            )

    def close(self) -> None:
        """Wait for copies that are under way and free the host's blocks.

        A graph that is still there keeps its own, and can be used.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._spill.close()
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _owner(self, tensor: torch.Tensor) -> Any:
        return self._storages.owner(tensor) if self._storages.is_dense(tensor) else None

    def _pack(self, tensor: torch.Tensor, staying: dict[int, Any]) -> _Kept | _Handle:
        """The graph saves a tensor.

        In the thread of the forward pass, or of a backward pass that is differentiated again.
        """
        storages = self._storages
        if self._closed or not storages.can_move(tensor):
            return _Kept(tensor)
        owner = storages.owner(tensor)
        if (
            id(owner) in staying
            or storages.nbytes(owner) < self._threshold
            or not (ranges := storages.ranges(tensor))
        ):
            return _Kept(tensor)
        with self._lock, torch.no_grad():
            # Without Offload the graph would keep this memory, whatever stream it was allocated
            # for, until the backward pass is queued.
            self.device.share(tensor, self.device.current_stream())
            piece = self._find(tensor, owner, ranges) or self._move(tensor, owner, ranges[0])
            self._n_tensors += piece.block is not None
            return _Handle(piece, geometry_of(tensor, piece.range))

    def _find(self, tensor: torch.Tensor, owner: Any, ranges: list[Range]) -> _Moved | None:
        """The piece that has the tensor's values already."""
        found = (self._saved.get((id(owner), cut)) for cut in ranges)
        same = owner, self._storages.base(tensor), version_of(tensor)
        return next((piece for piece in found if piece is not None and piece.same.has(*same)), None)

    def _move(self, tensor: torch.Tensor, owner: Any, cut: Range) -> _Moved:
        storages = self._storages
        piece = _Moved(self._n_pieces, storages.piece(tensor, cut), self.device.current_stream())
        piece.range = cut
        piece.handles = []
        piece.same = Same(owner, storages.base(tensor), version_of(tensor))
        piece.probe = storages.watch(tensor)
        self._n_pieces += 1
        if self._spill.send(piece):
            self._n_storages += 1
        else:
            self._kept_bytes += cut.nbytes
        self._saved[id(owner), cut] = piece
        return piece

    def _unpack(self, packed: _Kept | _Handle) -> torch.Tensor:
        """The graph asks for a saved tensor: in a thread of autograd's, in the stream of the forward pass."""
        if isinstance(packed, _Kept):
            _check_version(packed.tensor, packed.version)
            return packed.tensor
        piece = packed.piece
        _check_version(piece.probe, piece.same.version)
        with self._lock, torch.no_grad():
            compute = self.device.current_stream()
            memory = self._spill.ask(piece, compute)
            packed.back = piece.back
            self._forget_served(piece)
            if not self._closed:
                self._spill.fetch_ahead(piece, compute)
            return self._storages.remade(memory, packed.geometry)

    def _forget_served(self, piece: _Moved) -> None:
        """Let go of what a retained graph has been given whole; the last of it stays, for one node may ask more than once."""
        served = [
            other
            for other in (ref() for ref in self._served)
            if other is not None and other is not piece and other.back is not None
        ]
        if piece.back is not None and piece.is_served:
            served.append(piece)
        while len(served) > 1 and sum(other.nbytes for other in served) > self._window:
            self._spill.forget(served.pop(0))
        self._served = [weakref.ref(other) for other in served]


def _check_version(tensor: torch.Tensor, expected: int) -> None:
    """As torch itself does where there are no hooks."""
    if version_of(tensor) != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
            f"{tensor.dtype} tensor is at version {version_of(tensor)}; expected version {expected} instead"
        )
