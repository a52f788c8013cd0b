"""Streams and events of activation offload: copies of storages to host memory and back.

Rule 1: Every wait and record for activations is in this file, and each names the hazard that it
        prevents. The waits and records for batches and rows are in pipeline/transfer.py.
Rule 2: No call here blocks the host, except ``close``.
Rule 3: Device memory is allocated and freed in the order of the compute stream, so that the
        allocator may reuse it at once. Memory that was allocated for another stream is shared
        with the stream that saves it (``Device.share``). The allocator then keeps it until that
        stream has done the work queued before the memory was freed. ``device_limit`` does not
        bound such memory.
Rule 4: A piece is sent once it is certain that ``device_limit`` bytes are saved after it. The
        pieces saved last are needed first: their copies back would begin before their copies out
        had ended. So they stay, and are never sent.

          compute                  write                    read
    pack:    values computed
             ready = record()
                                   wait(ready)                            H1
                                   wait(block.busy)                       H2
                                   memory -> block
                                   copied = record()
    release: wait(copied)                                                 H3
    fetch:   memory <- allocator
             taken = record()
                                                            wait(taken)   H4
                                                            wait(busy)    H5
                                                            block -> memory
                                                            back = record()
    unpack:  wait(back)                                                   H6

    H1: The values may not be computed yet.
    H2: A copy to the device may still read the block.
    H3: The copy may still read memory that is free now.
    H4: Kernels may still use the previous contents of the memory.
    H5: The block may not have the values yet.
    H6: The device memory may not have the values yet.

Steps repeat: the bytes that the step before has saved tell how many will follow, so a piece is sent
as soon as it is saved. If fewer followed than are saved now, as in the first step, a piece is sent
when the bytes after it exist. The bytes of sent pieces wait for their copies within the limit, too.
Beyond it, the compute stream waits for the oldest copy and frees its memory. It stalls only if the
link cannot send, while the forward pass runs, what the limit does not hold.

The host must not decide when to free memory (by ``is_done``, or by ``record_stream``, for which
the allocator polls). The host runs ahead of the device and sees no copy done yet, so all saved
memory would be held through the forward pass. With waits in streams, the peak is the same in every
run.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from pinfeed.devices.device import Device, Event, Stream
from pinfeed.training.offload.pinned_pool import PinnedBlock, PinnedPool
from pinfeed.training.offload.saved_tensors import SavedVersion

_BYTES = np.dtype(np.uint8)
_NODE_PIECES = 16
"""Most pieces that one node of a graph saves; torch's own nodes save fewer."""
_MOST_POSITIONS = 1024
"""Most positions that one search for a piece examines; many may belong to dead pieces."""


@dataclass(eq=False)
class SavedPiece:
    """Bytes of a storage that autograd saved, and the identity of their values.

    Attributes:
        position: Position in the order of saving.
        cut: Range of the storage, in bytes.
        memory: The bytes on the device, in their first place or in a later copy; None while they
            are only on the host.
        stream: Stream in whose order ``memory`` may be used and freed.
        version: Storage and version of the values.
        probe: Tensor without memory that shares the version counter of the saved tensor.
        back: Event after the copy that filled ``memory``; None before that copy. Other
            streams must wait for it.
    """

    position: int
    cut: range
    memory: torch.Tensor | None
    stream: Stream
    version: SavedVersion
    probe: torch.Tensor
    back: Event | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.cut)


@dataclass(frozen=True)
class _PendingCopy:
    """A copy that may not be done, and the device memory that must not be reused before that.

    Attributes:
        memory: The device memory.
        done: Event after the copy.
        stream: Stream in whose order the memory is freed.
    """

    memory: torch.Tensor
    done: Event
    stream: Stream


class _PendingCopies:
    """Copies in one direction that no other stream has waited for, the oldest first.

    Attributes:
        by_position: The copies by the position of their piece.
        nbytes: Device memory of these copies in bytes.
    """

    def __init__(self) -> None:
        self.by_position: dict[int, _PendingCopy] = {}
        self.nbytes = 0

    def add(self, position: int, copy: _PendingCopy) -> None:
        self.by_position[position] = copy
        self.nbytes += copy.memory.numel()

    def pop(self, position: int) -> _PendingCopy | None:
        copy = self.by_position.pop(position, None)
        self.nbytes -= 0 if copy is None else copy.memory.numel()
        return copy


class OffloadTransfer:
    """Copies pieces to the host and back.

    Only one thread at a time may call it. The finalizers of a piece may run at any time, in any
    thread.

    Args:
        device: Device of the pieces.
        pool: Pool of host memory.
        limit: Bytes of device memory that pieces may hold, besides the one that is saved or used.

    Attributes:
        n_sent: Number of pieces that were copied to the host.
        offloaded_bytes: Bytes that were copied to the host.
        kept_bytes: Bytes that stayed on the device because the pool had no room.
        restored_bytes: Bytes that were copied back to the device.
        n_missed: Number of copies to the device that began only when the piece was needed.
    """

    def __init__(self, device: Device, pool: PinnedPool, limit: int) -> None:
        self.device = device
        self._pool = pool
        self._limit = limit
        self._write = device.stream("write")
        self._read = device.stream("read")
        self._unsent: dict[int, int] = {}
        """Bytes by position of the pieces that may still have to leave, the oldest first."""
        self._unsent_bytes = 0
        self._writes = _PendingCopies()
        self._fetches = _PendingCopies()
        self._pieces: weakref.WeakValueDictionary[int, SavedPiece] = weakref.WeakValueDictionary()
        self._blocks: dict[int, PinnedBlock] = {}
        """Bytes on the host, by position of the pieces that were sent."""
        self._restored: dict[int, int] = {}
        """Bytes by position of the pieces that came back, the one that was used last at the end."""
        # Positions of pieces that died. It is a deque, because the operations of a deque are atomic
        # and a finalizer may interrupt any other code.
        self._dead: deque[int] = deque()
        self._saved_bytes = 0
        """Bytes that this step has saved."""
        self._expected_bytes = 0
        """Bytes that the step before has saved."""
        self._last_used = 0
        """Position of the piece that was used last."""
        self._last_examined = 0
        """Position down to which ``fetch_ahead`` has examined pieces."""
        self._is_closed = False
        self.n_sent = 0
        self.offloaded_bytes = 0
        self.kept_bytes = 0
        self.restored_bytes = 0
        self.n_missed = 0

    def begin_step(self) -> None:
        """Expect as many bytes from the next pieces as since the call before."""
        self._expected_bytes = self._saved_bytes
        self._saved_bytes = 0

    def save(self, piece: SavedPiece) -> None:
        """Accept a piece, and start copies to the host of the pieces that have to leave."""
        self.tidy()
        self._pieces[piece.position] = piece
        weakref.finalize(piece, self._on_death, piece.position).atexit = False
        self._unsent[piece.position] = piece.nbytes
        self._unsent_bytes += piece.nbytes
        self._saved_bytes += piece.nbytes
        to_come = max(0, self._expected_bytes - self._saved_bytes)
        while self._unsent:
            position, nbytes = next(iter(self._unsent.items()))
            if self._unsent_bytes - nbytes + to_come <= self._limit:
                break
            self._drop_unsent(position)
            if (leaving := self._pieces.get(position)) is not None:
                self._send(leaving)
        while self._writes.by_position and self._unsent_bytes + self._writes.nbytes > self._limit:
            self._release(next(iter(self._writes.by_position)))

    def use(self, piece: SavedPiece, compute: Stream) -> torch.Tensor:
        """Return the bytes of a piece on the device, for work in ``compute``."""
        self.tidy()
        if piece.memory is None:
            fetch = self._fetches.pop(piece.position)
            if fetch is None:
                self.n_missed += 1
                fetch = self._start_fetch(piece, compute)
            # H6: The device memory may not have the values yet, and the copy must not write to
            # memory that is freed later.
            fetch.stream.wait(fetch.done)
            piece.memory = fetch.memory
            piece.back = fetch.done
            piece.stream = fetch.stream
        if piece.back is not None:
            self._bound_restored(piece)
        if compute != piece.stream and piece.back is not None:
            # H6, in another stream than the one for which the memory was allocated.
            compute.wait(piece.back)
            self.device.share(piece.memory, compute)
        assert piece.memory is not None
        return piece.memory

    def fetch_ahead(self, used: SavedPiece, compute: Stream) -> None:
        """Start to copy pieces saved before ``used`` to the device, while the limit has room.

        A single piece may be larger than the room.
        """
        if not self._last_examined <= used.position <= self._last_used:
            # The backward pass does not continue at the last used piece, but elsewhere.
            self._last_examined = used.position
        self._last_used = used.position
        last = max(-1, self._last_examined - _MOST_POSITIONS)
        for position in range(self._last_examined - 1, last, -1):
            piece = self._pieces.get(position)
            if piece is not None and self._is_only_on_host(piece):
                if not self._make_room(piece, used):
                    return
                try:
                    self._fetches.add(position, self._start_fetch(piece, compute))
                except torch.cuda.OutOfMemoryError:
                    # No copy was started. The piece is fetched at its use, when other memory may be
                    # free.
                    return
            self._last_examined = position

    def tidy(self) -> None:
        """Free the device memory of dead pieces, and reclaim their blocks."""
        while self._dead:
            position = self._dead.popleft()
            self._drop_unsent(position)
            self._release(position)
            self._drop_fetch(position)
            self._restored.pop(position, None)
            if (block := self._blocks.pop(position, None)) is not None:
                self._pool.give(block)

    def close(self) -> None:
        """Wait for running copies, and free the blocks of the pool."""
        self._is_closed = True
        # Copies may still read memory, and write blocks, that are about to be freed.
        self._write.record().sync()
        # Copies may still write memory, and read blocks, that are about to be freed.
        self._read.record().sync()
        for position in list(self._writes.by_position):
            self._free_sent(position)
        self._fetches = _PendingCopies()
        self._pool.close()
        self.tidy()

    def _send(self, piece: SavedPiece) -> None:
        """Start the copy to the host; the piece stays on the device if the pool has no room."""
        block = self._pool.take(piece.nbytes)
        if block is None:
            self.kept_bytes += piece.nbytes
            return
        assert piece.memory is not None
        # H1: The values may not be computed yet.
        self._write.wait(piece.stream.record())
        if block.busy is not None:
            # H2: A copy to the device may still read the block.
            self._write.wait(block.busy)
        self.device.copy(piece.memory, block.memory[: piece.nbytes], self._write)
        copied = self._write.record()
        block.busy = copied
        self._blocks[piece.position] = block
        self._writes.add(piece.position, _PendingCopy(piece.memory, copied, piece.stream))
        self.n_sent += 1
        self.offloaded_bytes += piece.nbytes

    def _start_fetch(self, piece: SavedPiece, compute: Stream) -> _PendingCopy:
        block = self._blocks[piece.position]
        assert block.busy is not None
        buffer = self.device.empty(piece.nbytes, compute)
        memory = self.device.tensor(buffer, (piece.nbytes,), _BYTES)
        # H4: Kernels may still use the previous contents of the memory.
        self._read.wait(compute.record())
        # H5: The block may not have the values yet.
        self._read.wait(block.busy)
        self.device.copy(block.memory[: piece.nbytes], memory, self._read)
        back = self._read.record()
        block.busy = back
        self.restored_bytes += piece.nbytes
        return _PendingCopy(memory, back, compute)

    def _bound_restored(self, used: SavedPiece) -> None:
        """Free the device memory of restored pieces beyond the limit; a use fetches them again.

        A retained graph, or a later node, keeps them alive.
        """
        self._restored.pop(used.position, None)
        self._restored[used.position] = used.nbytes
        while len(self._restored) > 1 and sum(self._restored.values()) > self._limit:
            position = next(iter(self._restored))
            del self._restored[position]
            if (piece := self._pieces.get(position)) is not None:
                piece.memory = None
                piece.back = None

    def _is_only_on_host(self, piece: SavedPiece) -> bool:
        return piece.memory is None and piece.position not in self._fetches.by_position

    def _make_room(self, piece: SavedPiece, used: SavedPiece) -> bool:
        """Return whether the piece may be fetched now, after dropping fetches with later uses.

        A fetch that is not between ``piece`` and the pieces of the node that asks for ``used`` is
        used later: the backward pass has passed it, or it belongs to another graph. The node saved
        its pieces one after the other, and asks for the first one first.
        """
        held = self._unsent_bytes - self._unsent.get(used.position, 0) + self._writes.nbytes
        room = self._limit - held - piece.nbytes
        if self._fetches.nbytes > room:
            fetched = list(self._fetches.by_position)
            for other in fetched:
                if piece.position <= other < used.position + _NODE_PIECES:
                    continue
                self._drop_fetch(other)
                if self._fetches.nbytes <= room:
                    break
        return self._fetches.nbytes <= room or not self._fetches.by_position

    def _drop_unsent(self, position: int) -> None:
        self._unsent_bytes -= self._unsent.pop(position, 0)

    def _drop_fetch(self, position: int) -> None:
        if (fetch := self._fetches.pop(position)) is not None:
            # The copy may still write memory that is free now.
            fetch.stream.wait(fetch.done)

    def _release(self, position: int) -> None:
        if (write := self._writes.by_position.get(position)) is not None:
            # H3: The copy may still read memory that is free now.
            write.stream.wait(write.done)
            self._free_sent(position)

    def _free_sent(self, position: int) -> None:
        """Free the device memory of a piece that was sent."""
        self._writes.pop(position)
        piece = self._pieces.get(position)
        if piece is not None:
            piece.memory = None

    def _on_death(self, position: int) -> None:
        """Free a dead piece's block if the pool is closed, or else let ``tidy`` return it.

        The finalizer of the piece may call this in any thread, at any time.
        """
        block = self._blocks.get(position)
        # First, because another thread may close the transfer now.
        self._dead.append(position)
        if self._is_closed and block is not None:
            if block.busy is not None:
                # A copy may still use a block that is about to be freed.
                block.busy.sync()
            block.memory = block.memory[:0].copy()
