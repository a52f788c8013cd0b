"""Storages out to host memory and back: every wait and record of it.

Rule 1: no call here blocks the host, but ``close``. Rule 2: device memory is taken and given back
in the order of the stream that computes; so the allocator may hand it out again at once.
        Memory that was allocated for another stream is shared with the one that saves it (``Device.share``): the allocator then keeps it
        until that stream has done the work that it was given before the memory was let go of. The window does not bound such memory.

             compute                     write                      read
    pack:    values computed
             ready = compute.record()
                                         write.wait(ready)                                   the values may not be computed yet
                                         write.wait(block.busy)                              a copy back may still read the block
                                         memory -> block
                                         copied = write.record()
    release: compute.wait(copied)                                                            the copy may still read what is free now
    fetch:   memory <- allocator
             taken = compute.record()
                                                                    read.wait(taken)         kernels may still use the memory's past
                                                                    read.wait(block.busy)    the values may not have arrived yet
                                                                    block -> memory
                                                                    back = read.record()
    unpack:  compute.wait(back)                                                              the values may not be back yet

What was saved last stays on the device as well, at most ``window`` bytes of it: their copies are
under way, and the backward pass asks for them first. When more is saved, the compute stream waits
for the oldest copy and lets go of its memory; it waits in fact only if the link cannot keep up.
Letting go when the host sees that a copy is done (``is_done``, or ``record_stream``, for which the
allocator asks) would not do: the host runs ahead of the device, sees nothing done yet, and all that
is saved would be held through the forward pass. So the peak is the same in every run.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from pinfeed.devices.base import Device, Event, Stream
from pinfeed.training.offload.pinned_pool import PinnedBlock, PinnedPool

_BYTES = np.dtype(np.uint8)
_LOOK = (
    1024  # positions that are looked through for one to fetch: those of other branches may be gone
)


class StoragePiece:
    """Bytes of a storage that were saved.

    Attributes:
        memory: On the device: where they were, while they are still there; where they came back to;
            None while they are on the host only.
        block: On the host; None if there is no room.
        position: In the order of saving.
    """

    __slots__ = ("__weakref__", "back", "block", "memory", "nbytes", "position", "stream")

    def __init__(self, position: int, memory: torch.Tensor, stream: Stream) -> None:
        self.position = position
        self.nbytes = memory.numel()
        self.memory: torch.Tensor | None = memory
        self.stream, self.block = stream, None  # type: tuple[Stream, PinnedBlock | None]
        self.back: Event | None = None
        """Behind the copy that filled ``memory``, in whose stream nobody else may look at it yet."""


@dataclass(frozen=True)
class _UnderWay:
    """A copy that may not be done, and the device memory that must not be used again before it is."""

    memory: torch.Tensor
    done: Event
    stream: Stream
    """Whose the memory is."""


class _Copies:
    """Copies in one direction that no other stream has waited for, by the position of their piece; the oldest first."""

    def __init__(self) -> None:
        self.all: dict[int, _UnderWay] = {}
        self.nbytes = 0

    def add(self, position: int, copy: _UnderWay) -> None:
        self.all[position] = copy
        self.nbytes += copy.memory.numel()

    def pop(self, position: int) -> _UnderWay | None:
        copy = self.all.pop(position, None)
        self.nbytes -= 0 if copy is None else copy.memory.numel()
        return copy


class OffloadTransfer:
    """Moves pieces, for one caller at a time; only the end of a piece may come at any time, in any thread.

    Args:
        device: Where they are.
        blocks: Where to.
        window: Bytes of device memory that what was saved last may hold, and as many for what comes
            back ahead of its use.
    """

    def __init__(self, device: Device, blocks: PinnedPool, window: int) -> None:
        self.device = device
        self._blocks = blocks
        self._window = window
        self._write = device.stream("write")
        self._read = device.stream("read")
        self._going = _Copies()
        self._coming = _Copies()
        self._pieces: weakref.WeakValueDictionary[int, StoragePiece] = weakref.WeakValueDictionary()
        self._ended: deque[int] = (
            deque()
        )  # positions; a deque as in PinnedPool, and for the same reason
        self._asked = self._seen = 0
        """Positions: the last one asked for, and the last one that was looked at then, whether it is to be fetched ahead."""
        self._closed = False
        self.offloaded = self.restored = self.n_missed = 0

    def send(self, piece: StoragePiece) -> bool:
        """Start the way to the host; False if there is no room for it."""
        self.tidy()
        block = self._blocks.take(piece.nbytes)
        if block is None:
            return False
        assert piece.memory is not None
        self._write.wait(piece.stream.record())  # the values may not be computed yet
        if block.busy is not None:
            self._write.wait(block.busy)  # a copy back may still read the block
        self.device.copy(piece.memory, block.memory[: piece.nbytes], self._write)
        block.busy = copied = self._write.record()
        piece.block = block
        weakref.finalize(piece, self._end, piece.position, block).atexit = False
        self._pieces[piece.position] = piece
        self._going.add(piece.position, _UnderWay(piece.memory, copied, piece.stream))
        self.offloaded += piece.nbytes
        while self._going.nbytes > self._window:
            self._release(next(iter(self._going.all)))
        return True

    def ask(self, piece: StoragePiece, compute: Stream) -> torch.Tensor:
        """The bytes on the device, for work in ``compute``."""
        self.tidy()
        if piece.memory is None:
            coming = self._coming.pop(piece.position)
            if coming is None:
                self.n_missed += 1
                coming = self._fetch(piece, compute)
            coming.stream.wait(
                coming.done
            )  # the values may not be back yet; nor must this memory have other values when it is free
            piece.memory = coming.memory
            piece.back = coming.done
            piece.stream = coming.stream
        if compute != piece.stream and piece.back is not None:
            compute.wait(piece.back)  # as above, in another stream than the memory was taken for
            self.device.share(piece.memory, compute)
        assert piece.memory is not None
        return piece.memory

    def fetch_ahead(self, asked: StoragePiece, compute: Stream) -> None:
        """Start the way back of the pieces saved before ``asked``, as far as the window has room; of one, if it is larger than that."""
        if not self._seen <= asked.position <= self._asked:
            self._seen = asked.position  # not further down where the last one was, but elsewhere
        self._asked = asked.position
        for position in range(self._seen - 1, max(-1, self._seen - _LOOK), -1):
            piece = self._pieces.get(position)
            if piece is not None and piece.memory is None and position not in self._coming.all:
                if not self._has_room(piece, asked.position):
                    return
                try:
                    self._coming.add(position, self._fetch(piece, compute))
                except torch.cuda.OutOfMemoryError:
                    return  # nothing was started; it comes when it is asked for, when other memory may be free
            self._seen = position

    def forget(self, piece: StoragePiece) -> None:
        """Let go of what came back; it comes again if it is asked for."""
        if piece.back is not None:
            piece.memory = piece.back = None

    def tidy(self) -> None:
        """Let go of device memory that nobody wants any more, and find blocks that are free."""
        while self._ended:
            position = self._ended.popleft()
            self._release(position)
            self._drop(position)
        self._blocks.reap()

    def close(self) -> None:
        """Wait for what is under way."""
        self._closed = True
        self._write.record().sync()  # copies may still read memory, and write blocks, that are about to be freed
        self._read.record().sync()  # copies may still write memory, and read blocks, that are about to be freed
        for position in list(self._going.all):
            self._let_go(position)
        self._coming = _Copies()
        self._blocks.close()

    def _fetch(self, piece: StoragePiece, compute: Stream) -> _UnderWay:
        block = piece.block
        assert block is not None
        assert block.busy is not None
        memory = self.device.tensor(
            self.device.empty(piece.nbytes, compute), (piece.nbytes,), _BYTES
        )
        self._read.wait(compute.record())  # kernels may still use what the memory was before
        self._read.wait(block.busy)  # the values may not have arrived in the block yet
        self.device.copy(block.memory[: piece.nbytes], memory, self._read)
        block.busy = back = self._read.record()
        self.restored += piece.nbytes
        return _UnderWay(memory, back, compute)

    def _has_room(self, piece: StoragePiece, asked: int) -> bool:
        """Whether the piece may come back ahead of its use, once those have made way that are asked for later.

        They are not between it and what is asked for now: the backward pass went past them, or they
        are of another graph.
        """
        room = self._window - piece.nbytes
        if self._coming.nbytes > room:
            for other in [
                position for position in self._coming.all if not piece.position <= position <= asked
            ]:
                self._drop(other)
                if self._coming.nbytes <= room:
                    break
        return self._coming.nbytes <= room or not self._coming.all

    def _drop(self, position: int) -> None:
        if (coming := self._coming.pop(position)) is not None:
            coming.stream.wait(coming.done)  # the copy may still write memory that is free now

    def _release(self, position: int) -> None:
        if (going := self._going.all.get(position)) is not None:
            going.stream.wait(going.done)  # the copy may still read memory that is free now
            self._let_go(position)

    def _let_go(self, position: int) -> None:
        self._going.pop(position)
        piece = self._pieces.get(position)
        if piece is not None:
            piece.memory = None

    def _end(self, position: int, block: PinnedBlock) -> None:
        """The last saved tensor of a piece is gone. In any thread, at any time."""
        if self._closed and block.busy is not None:
            block.busy.sync()  # a copy may still use a block that is about to be freed
        self._blocks.give(block)
        self._ended.append(position)
