"""LoopWrites: the write-backs of one loop, and their first error; WriteQueue: those by a thread."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

from pinfeed.errors import ClosedError, WriteBackError
from pinfeed.pipeline.cache_transfer import CacheTransfer
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.row_cache import ChangedRows
from pinfeed.pipeline.sources.source import BatchValues, RowGroup
from pinfeed.pipeline.writer import PendingWrite, Writer
from pinfeed.threads.call import Pending


class LoopWrites:
    """The write-backs of one loop; their first error is raised once.

    Args:
        threads: Threads of the loop.
        caches: Moves the rows of caches; None if the loop has none.
    """

    def __init__(self, threads: LoopThreads, caches: CacheTransfer | None = None) -> None:
        self._threads = threads
        self._caches = caches
        # Held from taking values of a cache until they are queued. Another thread or a signal
        # handler that closes the feeder must not take or queue the values of caches in between.
        self._adding = threading.RLock()
        self._has_failed = False
        self.failure: BaseException | None = None
        """The first error of a write-back, until it is raised. It causes all later errors."""

    def require_running(self) -> None:
        """Check that the loop runs, in this process.

        Raises:
            ClosedError: If it does not.
        """
        self._threads.require_running()

    def write(self, batch: BatchValues, *, copied: bool, check: bool) -> None:
        """Take values that are to be written back, and queue them (consumer).

        Args:
            batch: The values.
            copied: Whether to copy the values, because the user may change them immediately.
            check: Whether to raise the error of an earlier write-back first.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error of a write-back that has failed.

        Raises:
            WriteBackError: If the error was raised before, and the loop continues.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all write-backs have ended; ``failure`` has the first error."""
        raise NotImplementedError

    def flush(self, *, is_last: bool = False) -> None:
        """Queue writes of all rows that only the device has.

        Args:
            is_last: Whether the loop is ending, after which no row may change.
        """
        if self._caches is None:
            return
        with self._adding:
            for group, changed in self._caches.changed_rows(is_last=is_last):
                self._write_cached(group, changed)
        if is_last:
            self._caches.note_flushed()

    def save(self) -> None:
        """Queue writes of all rows that only the device has, because the program ends next."""
        self.flush()

    def drain(self) -> None:
        """Wait until all values so far are in their stores, and raise the error of a write-back."""
        self.flush()
        self.finish()
        self.check()
        if self._caches is not None:
            # After an error, the loop writes the rows of caches again when it ends.
            self._caches.note_flushed()

    def _write_cached(self, group: RowGroup, changed: ChangedRows) -> None:
        """Queue a write of some rows of a cache."""
        raise NotImplementedError

    def _note(self, error: BaseException) -> None:
        """Keep the first error."""
        if not self._has_failed:
            self.failure = error
            self._has_failed = True

    def _raise_noted(self, *, is_over: bool) -> None:
        """Raise the error, or, if it was raised before, one that refers to it.

        Args:
            is_over: Whether the loop continues, but makes no write-back any more.
        """
        if self._has_failed and self.failure is None and is_over:
            raise WriteBackError(
                "an earlier write_back of this loop failed, so no later one is made; leave the "
                "loop, remove the cause, and begin a new loop"
            )
        if self.failure is not None:
            failure = self.failure
            self.failure = None
            try:
                raise failure
            finally:
                # The error's traceback keeps this frame, which must not keep the error.
                del failure


class WriteQueue(LoopWrites):
    """Write-backs that the writer thread has not completed, oldest first.

    The consumer thread adds write-backs. When the queue is full, the consumer thread waits for the
    oldest one, which bounds the memory of all.

    Args:
        writer: Writes values to their stores.
        threads: Threads of the loop.
        limit: Maximum number of write-backs in the queue; with 0, the caller's thread completes
            each one before ``add`` returns.
    """

    def __init__(self, writer: Writer, threads: LoopThreads, limit: int) -> None:
        super().__init__(threads, writer.caches)
        self._writer = writer
        self._counters = writer.counters
        self._limit = limit
        self._calls: deque[Pending[None]] = deque()

    def write(self, batch: BatchValues, *, copied: bool, check: bool) -> None:
        is_cached = any(group.cached is not None for group in batch.groups)
        with self._adding if is_cached else contextlib.nullcontext():
            self.require_running()
            held = self._writer.capture_values(batch, copied=copied)
            self.add(held, check=check)

    def add(self, write: PendingWrite, *, check: bool) -> None:
        """Queue a write-back.

        Args:
            write: Values that ``Writer.capture_values`` has taken.
            check: Whether to raise the error of an earlier write-back first.
        """
        while self._calls and len(self._calls) >= self._limit:
            if self._is_oldest_done():
                self._take()
            elif self._may_wait():
                self._wait_for_oldest(write)
            else:
                break
        if check:
            self.check()
        self.require_running()
        if self._limit:
            self._calls.append(self._submit(write))
        else:
            self._write_now(write)

    def check(self) -> None:
        while self._calls and self._is_oldest_done():
            self._take()
        self._raise_noted(is_over=self._writer.log.has_failed)

    def finish(self) -> None:
        if not self._calls:
            return
        start = self._counters.now()
        while self._calls:
            self._take()
        # A GPU may still work on the last training steps.
        self._counters.count_write_wait(start, idle=self._writer.device.unified)

    def _write_cached(self, group: RowGroup, changed: ChangedRows) -> None:
        self.add(self._writer.capture_cached(group, changed), check=False)

    def _write_now(self, write: PendingWrite) -> None:
        """Complete a write-back in this thread. Its error is raised by the next ``check``."""
        start = self._counters.now()
        is_idle = write.is_computed()
        try:
            self._threads.write_now(write.batch, self._writer.write_to_stores, write)
        except Exception as error:
            self._note(error)
        # The loop has waited for the write.
        self._counters.count_write_wait(start, idle=is_idle, batch=write.batch)

    def _submit(self, write: PendingWrite) -> Pending[None]:
        """Begin a write-back, and submit the rest; return this call."""
        writer: Any = self._writer
        threads = self._threads
        if writer.device.unified or threads.is_in_pool:
            # A worker thread, in which the garbage collector ends a loop, must not wait for an
            # earlier write.
            return threads.submit_write(write.batch, writer.write_to_stores, write)
        # Only a copy of a deque is safe while another thread, which closes the feeder, changes it.
        writer.begin_write(write, tuple(self._calls.copy())[-2:])
        try:
            return threads.submit_write(
                write.batch, writer.finish_write, write, threads.scatter_all
            )
        except ClosedError:
            # Another thread ends the loop, and may have waited for its copies before these.
            writer.abandon_write(write)
            raise

    def _may_wait(self) -> bool:
        """Return whether this thread may wait for a write-back.

        A worker thread, in which the garbage collector can end a loop, must not wait. A forked
        process must not wait either, because it has no writer thread.
        """
        return not self._threads.is_inside and not self._threads.is_forked

    def _wait_for_oldest(self, write: PendingWrite) -> None:
        """Wait for the oldest write-back, and count the time before ``write`` can begin."""
        start = self._counters.now()
        self._take()
        self._counters.count_write_wait(start, idle=write.is_computed(), batch=write.batch)

    def _is_oldest_done(self) -> bool:
        try:
            return self._calls[0].done()
        except IndexError:
            # A thread that closes the feeder has taken the write-back.
            return False

    def _take(self) -> None:
        """Wait for the oldest write-back, and note its error.

        The consumer thread and a thread that closes the feeder may wait for the same write-back.
        Only one thread takes it.
        """
        try:
            oldest = self._calls[0]
            error = oldest.exception()
            # If an interrupt ends the wait, the write-back stays the oldest one.
            self._calls.remove(oldest)
        except (IndexError, ValueError):
            # The other thread has taken the write-back.
            return
        if error is not None:
            self._note(error)
