"""Offload: keeps the tensors that autograd saves in pinned host memory until backward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pinfeed.devices import DeviceLike, resolve
from pinfeed.devices.device import Device
from pinfeed.errors import ClosedError
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.units import KiB, MiB, parse_size
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.training.offload.offload_transfer import OffloadTransfer, SavedPiece
from pinfeed.training.offload.pinned_pool import PinnedPool
from pinfeed.training.offload.saved_tensors import (
    Geometry,
    KeptTensor,
    SavedVersion,
    Storages,
    check_version,
    geometry_of,
    tensors_in,
)


@dataclass(frozen=True)
class OffloadStats:
    """Counts and sizes of an Offload since it was made; sizes are in bytes.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh())
        >>> with pinfeed.Offload("cpu", host_limit=pinfeed.MiB(64)) as offload:
        ...     with offload.step(model):
        ...         loss = model(torch.randn(128, 256)).sum()
        ...     loss.backward()
        >>> offload.stats.n_missed
        0

    Attributes:
        n_storages: Storages, or parts of storages, that were copied to the host. Saved tensors that
            share a storage share the copy.
        offloaded_bytes: Bytes that were copied to the host.
        kept_bytes: Bytes that stayed on the device because ``host_limit`` was reached.
        restored_bytes: Bytes that were copied back to the device.
        n_missed: Copies to the device that began only when the tensor was needed.
        host_bytes: Bytes on the host now.
        peak_host_bytes: Peak of ``host_bytes``.
        blocks_bytes: Pinned memory now, free blocks included.
        n_blocks_made: Blocks of pinned memory that were allocated. A step of the same shapes as an
            earlier one allocates none.
    """

    n_storages: int
    offloaded_bytes: int
    kept_bytes: int
    restored_bytes: int
    n_missed: int
    host_bytes: int
    peak_host_bytes: int
    blocks_bytes: int
    n_blocks_made: int


@dataclass(eq=False)
class MovedTensor:
    """A saved tensor on a piece, which lives as long as any tensor on it.

    Attributes:
        piece: The piece.
        geometry: Layout of the tensor on the piece.
    """

    piece: SavedPiece
    geometry: Geometry


class Offload:
    """Activation offload: keeps saved tensors in pinned host memory until the backward pass.

    The forward pass copies tensors that autograd saves to page-locked (pinned) host memory, except
    for the last ones. The backward pass copies them back to the device before it needs them. Use it
    around checkpointed blocks, which save only their inputs, if checkpoints alone do not fit.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> blocks = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
        >>> optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
        >>> with pinfeed.Offload("auto", host_limit=pinfeed.MiB(64)) as offload:
        ...     with offload.step(blocks):
        ...         x = torch.randn(128, 256)
        ...         for block in blocks:
        ...             x = checkpoint(block, x, use_reentrant=False)
        ...         loss = x.sum()
        ...     loss.backward()
        ...     optimizer.step()

    Gradients and all other results, such as dropout and BatchNorm's running statistics, equal those
    of the plain step bit for bit, because it computes nothing twice or in another order. Each
    storage is copied once, even if several saved tensors share it.

    The first step allocates pinned memory, which takes time. Later steps reuse it, so that the host
    never waits. Several graphs may exist at a time, be kept for several backward passes, be
    differentiated again, or be dropped. A block of pinned memory is free again when its last saved
    tensor is freed.

    A saved tensor that changes in place before the backward pass raises an error, as it does
    without Offload. Offload does not notice changes that torch does not count (``.data``, custom
    kernels); such changes must not touch saved tensors. If another stream reads a saved tensor
    without saving it, call ``record_stream`` on the tensor, as if the graph did not keep it.

    Sizes are in bytes, as an int or as text such as ``"64MiB"``.

    Args:
        device: Device of the model: ``"auto"``, ``"cuda"``, ``"cuda:1"``, ``"cpu"`` (for tests), or
            a Device.
        host_limit: Limit of pinned memory, free blocks included. Tensors beyond it stay
            on the device. None is half of the free host memory.
        threshold: Smallest storage that is offloaded; smaller ones stay on the device.
        device_limit: Device memory that saved tensors may hold, besides the one that an operation
            saves or uses. A tensor is copied to the host only if this many bytes are saved after
            it, so the tensors saved last, which backward needs first, stay. The more stay, the
            less computation waits for copies.

    Raises:
        ArgumentError: If a size is invalid or too small.
        DeviceError: If the device does not exist.
    """

    storages: type[Storages] = Storages
    """Access to storages; a simulated device has its own."""

    def __init__(
        self,
        device: DeviceLike = "auto",
        *,
        host_limit: int | str | None = None,
        threshold: int | str = KiB(64),
        device_limit: int | str = MiB(512),
    ) -> None:
        if host_limit is not None:
            host_limit = parse_size(host_limit, "host_limit", least=0, note=", or None")
        threshold = parse_size(threshold, "threshold", least=0)
        device_limit = parse_size(device_limit, "device_limit", least=0)
        self.device: Device = resolve(device, n_spare=0)
        self._owns_device = self.device is not device
        self._storages = self.storages(self.device.name)
        self._pool = PinnedPool(
            self.device, free_host_bytes() // 2 if host_limit is None else host_limit
        )
        self._transfer = OffloadTransfer(self.device, self._pool, device_limit)
        self._threshold = threshold
        # The backward pass runs in threads of autograd.
        self._lock = threading.Lock()
        self._pieces: weakref.WeakValueDictionary[tuple[int, range], SavedPiece] = (
            weakref.WeakValueDictionary()
        )
        self._n_pieces = 0
        self._is_closed = False

    @contextlib.contextmanager
    def step(self, *models: nn.Module | torch.Tensor) -> Iterator[None]:
        """Offload what autograd saves in this context; put the forward pass and the loss in it.

        The context applies to the thread that enters it.

        Args:
            models: Modules whose parameters and buffers stay on the device. Also tensors that stay
                on the device because the caller keeps them there anyway, such as the inputs.

        Raises:
            ClosedError: If the Offload is closed.
        """
        if self._is_closed:
            raise ClosedError("step() was called on a closed Offload; make a new one")
        with self._lock:
            self._transfer.begin_step()
        owners = map(self._owner, tensors_in(models))
        staying = {id(owner): owner for owner in owners if owner is not None}
        try:
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, staying), self._unpack):
                yield
        finally:
            # The graph keeps the hooks, and outlives this context.
            staying.clear()
            with self._lock:
                self._transfer.tidy()

    @property
    def stats(self) -> OffloadStats:
        """Counts and sizes since the Offload was made."""
        with self._lock:
            self._transfer.tidy()
            return OffloadStats(
                n_storages=self._transfer.n_sent,
                offloaded_bytes=self._transfer.offloaded_bytes,
                kept_bytes=self._transfer.kept_bytes,
                restored_bytes=self._transfer.restored_bytes,
                n_missed=self._transfer.n_missed,
                host_bytes=self._pool.used,
                peak_host_bytes=self._pool.peak,
                blocks_bytes=self._pool.nbytes,
                n_blocks_made=self._pool.n_made,
            )

    def close(self) -> None:
        """Wait for running copies and free the pinned memory.

        A graph that still exists keeps its own blocks and can be used.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._transfer.close()
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _owner(self, tensor: torch.Tensor) -> Any:
        return self._storages.owner(tensor) if self._storages.is_dense(tensor) else None

    def _pack(self, tensor: torch.Tensor, staying: dict[int, Any]) -> KeptTensor | MovedTensor:
        """Save a tensor for the graph.

        Autograd calls this in the thread of the forward pass, or in the thread of a backward pass
        that is differentiated again.
        """
        if self._is_closed or not self._storages.can_move(tensor):
            return KeptTensor(tensor)
        owner = self._storages.owner(tensor)
        if id(owner) in staying or self._storages.nbytes(owner) < self._threshold:
            return KeptTensor(tensor)
        ranges = self._storages.ranges(tensor)
        if not ranges:
            return KeptTensor(tensor)
        with self._lock, torch.no_grad():
            # Without Offload the graph would keep this memory until the backward pass is queued,
            # for whatever stream the memory was allocated.
            self.device.share(tensor, self.device.current_stream())
            piece = self._find(tensor, owner, ranges) or self._save(tensor, owner, ranges[0])
            return MovedTensor(piece, geometry_of(tensor, piece.cut))

    def _find(self, tensor: torch.Tensor, owner: Any, ranges: list[range]) -> SavedPiece | None:
        """Return the piece that already has the tensor's values; None if there is none."""
        base = self._storages.base(tensor)
        for cut in ranges:
            piece = self._pieces.get((id(owner), cut))
            if piece is not None and piece.version.matches(owner, base, version_of(tensor)):
                return piece
        return None

    def _save(self, tensor: torch.Tensor, owner: Any, cut: range) -> SavedPiece:
        """Save a range of the tensor's storage as a piece."""
        storages = self._storages
        piece = SavedPiece(
            self._n_pieces,
            cut,
            storages.bytes_in(tensor, cut),
            self.device.current_stream(),
            SavedVersion(owner, storages.base(tensor), version_of(tensor)),
            storages.version_probe(tensor),
        )
        self._n_pieces += 1
        self._transfer.save(piece)
        self._pieces[id(owner), cut] = piece
        return piece

    def _unpack(self, packed: KeptTensor | MovedTensor) -> torch.Tensor:
        """Return a saved tensor to the graph.

        Autograd calls this in one of its threads, in the stream of the forward pass.
        """
        if isinstance(packed, KeptTensor):
            check_version(packed.tensor, packed.version)
            return packed.tensor
        piece = packed.piece
        check_version(piece.probe, piece.version.number)
        with self._lock, torch.no_grad():
            compute = self.device.current_stream()
            memory = self._transfer.use(piece, compute)
            if not self._is_closed:
                self._transfer.fetch_ahead(piece, compute)
            return self._storages.rebuild(memory, packed.geometry)
