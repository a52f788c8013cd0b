"""Bench: a device, tables whose rows are views of one memory, and timing of device work."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.recorder import Skipped
from pinfeed import PinnedStore
from pinfeed.devices import resolve
from pinfeed.memory.host import free_host_bytes
from pinfeed.stores.host_rows import StoreRows, part_nbytes

WORD = 8
_SPARE_HOST_BYTES = 8 << 30
_N_CHECKED = 200
# A GPU has about two cycles in a nanosecond.
_CYCLES_PER_S = 2.5e9


class Bench:
    """A device and two of its streams.

    Args:
        name: ``cuda`` or ``cpu``.
    """

    def __init__(self, name: str) -> None:
        self.device: Any = resolve(name, n_spare=8)
        self.cuda = not self.device.unified
        self.read = self.device.stream("read")
        self.write = self.device.stream("write")

    def latency_s(self, work: Callable[[], object]) -> float:
        """Return the seconds until the work that a call queues is complete; the fastest of 5."""
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            work()
            self.read.record().sync()
            self.write.record().sync()
            times.append(time.perf_counter() - begin)
        # The first call may load code.
        return min(times[1:])

    def queued_s(self, work: Callable[[], object], n: int = 4) -> float:
        """Return the seconds of device time of one of ``n`` calls; the fastest of 5 repeats.

        All calls are queued while the device sleeps, so that the host's time is not measured.
        """

        def work_n_times() -> None:
            for _ in range(n):
                work()

        if not self.cuda:
            return self.latency_s(work_n_times) / n
        work_n_times()
        wait(self.device.name)
        begin = time.perf_counter()
        work_n_times()
        host_s = time.perf_counter() - begin
        wait(self.device.name)
        times = []
        for _ in range(5):
            start, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            with torch.cuda.stream(self.read.raw):
                torch.cuda._sleep(int(_CYCLES_PER_S * host_s))
                start.record()
            self.write.raw.wait_event(start)
            work_n_times()
            for end, stream in zip(ends, (self.read, self.write), strict=True):
                end.record(stream.raw)
                end.synchronize()
            times.append(max(start.elapsed_time(end) for end in ends) / 1e3 / n)
        return min(times)

    def words(self, nbytes: int) -> PinnedStore:
        """Return host memory for tables, page-locked for a GPU; each word is its own index."""
        return words(nbytes, pin=self.cuda)

    def room(self, sample: StoreRows) -> Any:
        """Allocate device memory for the rows of a sample."""
        memory = self.device.empty(part_nbytes(sample), self.device.current_stream())
        return self.device.tensor(memory, sample.shape, sample.dtype)

    def use_route(self, n_blocks: int) -> None:
        """Set the blocks of the kernels that copy rows."""
        if self.cuda:
            self.device.kernels.n_blocks = n_blocks
            # This also forgets the launches with other blocks.
            self.device.choose_route([], None, "direct")
            self.device.is_direct = True

    def indices(self, sample: StoreRows) -> Any:
        """Return the row indices of a sample on the device, or None if the device needs none."""
        dtype = self.device.index_dtype([sample.store], sample.rows) if self.cuda else None
        if dtype is None:
            return None
        copied = torch.from_numpy(sample.rows.astype(dtype)).to(self.device.name)
        # Other streams use them.
        wait(self.device.name)
        return copied

    def gather(self, sample: StoreRows, into: Any, indices: Any = None) -> None:
        """Queue the copy of a sample's rows to the device, and that of row indices if not given."""
        on_device = () if indices is None else (indices,)
        self.device.read([(sample, into)], self.read, *on_device)

    def scatter(self, sample: StoreRows, values: Any, indices: Any = None) -> None:
        """Queue the copy of values to the rows of a sample, and of row indices if not given."""
        on_device = () if indices is None else (indices,)
        self.device.write([(sample.store, values)], sample.rows, self.write, *on_device)


class Samples:
    """Samples of rows, each with memory of its own on the device; calls take them in turn.

    Rows that were just copied are in the host's caches, so a single sample would measure the
    caches. The memory on the device has the rows of its sample from the beginning, so a scatter
    does not change the tables. Row indices are on the device, because a loop copies them ahead, in
    a stream of their own.

    Args:
        bench: The bench.
        samples: Samples of equally many rows of equal size, of a table of words.

    Raises:
        AssertionError: If rows are wrong on the device.
    """

    def __init__(self, bench: Bench, samples: Sequence[StoreRows]) -> None:
        self._bench = bench
        self.pairs = [(sample, bench.room(sample)) for sample in samples]
        self.nbytes = part_nbytes(samples[0])
        calls = [(*pair, bench.indices(pair[0])) for pair in self.pairs]
        for call in calls:
            bench.gather(*call)
        bench.read.record().sync()
        for pair in self.pairs:
            compare(*pair)
        self._gathered = itertools.cycle(calls)
        # If both are queued at the same time, they work on different samples.
        half = len(calls) // 2
        self._scattered = itertools.cycle(calls[half:] + calls[:half])

    def gather(self) -> None:
        """Queue the copy of the next sample's rows to the device."""
        self._bench.gather(*next(self._gathered))

    def scatter(self) -> None:
        """Queue the copy of the next sample's rows back to the table."""
        self._bench.scatter(*next(self._scattered))


def words(nbytes: int, *, pin: bool) -> PinnedStore:
    """Create a store of words, each of which is its own index.

    Raises:
        Skipped: If the machine has too little free memory.
    """
    if pin:
        require_host_memory(nbytes)
    store = PinnedStore.empty((nbytes // WORD,), "int64", pin=pin)
    torch.arange(store.n_rows, out=torch.from_numpy(store.array))
    return store


def require_host_memory(nbytes: int) -> None:
    """Skip the cell if tables of ``nbytes`` do not fit the free memory.

    Raises:
        Skipped: If the machine has too little free memory.
    """
    free = free_host_bytes()
    if nbytes + _SPARE_HOST_BYTES > free:
        raise Skipped(
            f"tables of {nbytes / 1e9:.1f} GB need {_SPARE_HOST_BYTES / 1e9:.1f} GB in addition; "
            f"{free / 1e9:.1f} GB of host memory are free"
        )


def as_rows(memory: PinnedStore, row_nbytes: int) -> PinnedStore:
    """Return the same memory as rows of ``row_nbytes``, which is a multiple of 8."""
    store = copy.copy(memory)
    n_words = row_nbytes // WORD
    whole = memory.n_rows // n_words * n_words
    store._array = memory.array[:whole].reshape(-1, n_words)
    return store


def first_part(memory: PinnedStore, nbytes: int) -> PinnedStore:
    """Return a store of the first ``nbytes`` of words."""
    store = copy.copy(memory)
    store._array = memory.array[: nbytes // WORD]
    return store


def expected_rows(numbers: np.ndarray, row_nbytes: int) -> np.ndarray:
    """Return the rows of such a table at these row indices."""
    n_words = row_nbytes // WORD
    return numbers[:, None] * n_words + np.arange(n_words)


def some_of(rows: np.ndarray) -> np.ndarray:
    """Return the positions of some rows of a sample, the first and the last among them."""
    return np.unique(np.linspace(0, len(rows) - 1, _N_CHECKED).astype(np.int64))


def compare(sample: StoreRows, into: torch.Tensor) -> None:
    """Compare some rows on the device with those of a table of words.

    Raises:
        AssertionError: If they differ.
    """
    row_nbytes = part_nbytes(sample) // len(sample.rows)
    some = some_of(sample.rows)
    found = into[torch.from_numpy(some)].cpu().numpy()
    if not np.array_equal(found, expected_rows(sample.rows[some], row_nbytes)):
        raise AssertionError(f"{len(sample.rows)} gathered rows of {row_nbytes} bytes are wrong")


def rate(nbytes: int, seconds: float) -> float:
    """Return the throughput in GB/s."""
    return round(nbytes / seconds / 1e9, 3)


def wait(device: str) -> None:
    """Wait until the device has completed all work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
