"""KeptChunks: the decoded chunks that were used most recently."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

from pinfeed.errors import ReadError
from pinfeed.stores.store import Array
from pinfeed.threads.call import Call


class KeptChunks:
    """The most recently used chunks, decoded once even if several threads need them.

    Args:
        capacity: Most chunks in memory, including those that are being decoded.
        decode: Returns the rows of a chunk. Its arguments are the number of the chunk, and an array
            to reuse that it returned for a chunk that is no longer kept, or None.
    """

    def __init__(self, capacity: int, decode: Callable[[int, Array | None], Array]) -> None:
        self._capacity = capacity
        self._decode = decode
        # Notified when a chunk is no longer in use.
        self._unused = threading.Condition()
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()
        # Without these, the heap would keep some of the freed memory.
        self._spare: list[Array] = []
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, number: int) -> Iterator[Array]:
        """Lend a chunk, which is decoded if it is not kept; it is kept until the context ends.

        A thread uses one chunk at a time, because it may wait until other threads release one.
        """
        with self._unused:
            self._unused.wait_for(lambda: number in self._chunks or self._make_room())
            is_new = number not in self._chunks
            if is_new:
                spare = self._spare.pop() if self._spare else None
                self._chunks[number] = _Chunk(Call(self._decode, number, spare))
            chunk = self._chunks[number]
            self._chunks.move_to_end(number)
            chunk.n_users += 1
        try:
            if is_new:
                chunk.decoding.run()
            yield chunk.decoding.result()
        finally:
            if is_new and not chunk.decoding.done():
                # An interrupt arrived before the decoding that other threads wait for.
                chunk.decoding.fail(ReadError("the decoding of a chunk was interrupted; try again"))
            with self._unused:
                chunk.n_users -= 1
                is_dropped = self._is_closed or chunk.decoding.exception() is not None
                if is_dropped and self._chunks.get(number) is chunk:
                    # If the decoding failed, the next gather of this chunk tries again.
                    del self._chunks[number]
                self._unused.notify_all()

    def close(self) -> None:
        """Free all chunks, and keep none that a running gather still decodes."""
        with self._unused:
            self._is_closed = True
            self._chunks.clear()
            self._spare.clear()
            self._unused.notify_all()

    def _make_room(self) -> bool:
        """Drop the least recently used chunks; return whether there is room for one."""
        for number in [n for n, chunk in self._chunks.items() if not chunk.n_users]:
            if len(self._chunks) < self._capacity:
                break
            self._spare.append(self._chunks.pop(number).decoding.result())
        return len(self._chunks) < self._capacity


class _Chunk:
    """A chunk that is decoded, or is being decoded."""

    def __init__(self, decoding: Call[Array]) -> None:
        self.decoding = decoding
        self.n_users = 0
