"""Rows of page-locked tables to a device and back, against what the link can do in the same run."""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pinfeed import Feeder, PinnedStore
from pinfeed.access.base import StoreRows
from pinfeed.devices import resolve
from pinfeed.devices.kernels import External
from pinfeed.devices.tuning import Route
from pinfeed.sources import part_nbytes

BLOCKS = (1, 2, 4, 8, 16, 32, 64)
BLOCK_BYTES = 256 << 20
MOST_BYTES = 1 << 30  # of one batch
PLAIN = r"""
extern "C" __global__ void copy(const uint4* from, uint4* to, unsigned n)
{
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        to[i] = from[i];
}
"""


class Bench:
    """A device, and ways to time its work."""

    def __init__(self, name: str) -> None:
        self.device: Any = resolve(name, n_spare=8)
        self.cuda = not self.device.unified
        self.read, self.write = self.device.stream("read"), self.device.stream("write")

    def latency_s(self, work: Callable[[], object]) -> float:
        """Seconds until what one call queued is done; the fastest of 5."""
        times = []
        for _ in range(6):  # the first one is for what is loaded then
            begin = time.perf_counter()
            work()
            self.read.record().sync()
            self.write.record().sync()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    def queued_s(self, work: Callable[[], object], n: int = 4) -> float:
        """Seconds that the device takes for one of ``n`` calls, one queued after the other while it waits; the fastest of 5 times."""

        def all_of_them() -> None:
            for _ in range(n):
                work()

        if not self.cuda:
            return self.latency_s(all_of_them) / n
        all_of_them()
        begin = time.perf_counter()
        all_of_them()
        host_s, times = time.perf_counter() - begin, []
        for _ in range(5):
            start, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            with torch.cuda.stream(self.read.raw):
                torch.cuda._sleep(int(2.5e9 * host_s))  # cycles, of two a nanosecond: until all is queued
                start.record()
            self.write.raw.wait_event(start)
            all_of_them()
            for end, stream in zip(ends, (self.read, self.write), strict=True):
                end.record(stream.raw)
                end.synchronize()
            times.append(max(start.elapsed_time(end) for end in ends) / 1e3 / n)
        return min(times)

    def memory(self, nbytes: int) -> PinnedStore:
        """Page-locked words, each its own number."""
        store = PinnedStore.empty((nbytes // 8,), "int64", pin=self.cuda)
        torch.arange(store.n_rows, out=torch.from_numpy(store.array))
        return store

    def rows(self, memory: PinnedStore, row_nbytes: int) -> PinnedStore:
        """The same memory as rows of that size, a multiple of 8 bytes."""
        store, n_words = copy.copy(memory), row_nbytes // 8
        store._array = memory.array[: memory.n_rows // n_words * n_words].reshape(-1, n_words)
        return store

    def room(self, sample: StoreRows) -> Any:
        return self.device.tensor(self.device.empty(part_nbytes(sample), self.device.current_stream()), sample.shape, sample.dtype)

    def blocks(self, n_blocks: int) -> None:
        """So many, from now on, for kernels that move rows."""
        if self.cuda:
            self.device.route = Route(n_blocks, True, "")

    def gather(self, sample: StoreRows, into: Any) -> None:
        deque(self.device.read([(sample, into)], self.read), maxlen=0)

    def scatter(self, sample: StoreRows, values: Any) -> None:
        self.device.write([(sample.store, values)], sample.rows, self.write)


def ceilings(bench: Bench) -> dict[str, Any]:
    """GB/s of one block: by the copy engine, by a plain kernel on the whole GPU, and by the kernels that move rows, in sequence."""
    host = [bench.device.staging(BLOCK_BYTES) for _ in range(2)]
    there = [
        bench.device.tensor(bench.device.empty(BLOCK_BYTES, bench.device.current_stream()), (BLOCK_BYTES,), np.dtype("u1"))
        for _ in range(2)
    ]

    def down() -> None:
        bench.device.copy(host[0], there[0], bench.read)

    def up() -> None:
        bench.device.copy(there[1], host[1], bench.write)

    found: dict[str, Any] = {
        "copy engine, to the device": _rate(BLOCK_BYTES, bench.queued_s(down)),
        "copy engine, to the host": _rate(BLOCK_BYTES, bench.queued_s(up)),
        "copy engine, both": _rate(2 * BLOCK_BYTES, bench.queued_s(lambda: [down(), up()])),
    }
    if bench.cuda:
        plain = functools.partial(_plain(), nbytes=BLOCK_BYTES)
        addresses = host[0].ctypes.data, there[0].data_ptr()
        found["plain kernel, read"] = _rate(BLOCK_BYTES, bench.queued_s(lambda: plain(bench.read, *addresses)))
        found["plain kernel, write"] = _rate(BLOCK_BYTES, bench.queued_s(lambda: plain(bench.write, *reversed(addresses))))
    stores = [bench.rows(bench.memory(BLOCK_BYTES), 4096) for _ in range(2)]
    samples = [StoreRows(store, np.arange(store.n_rows)) for store in stores]
    into = [bench.room(sample) for sample in samples]
    for n_blocks in BLOCKS:
        bench.blocks(n_blocks)
        found[f"kernel of {n_blocks} blocks"] = {
            "read": _rate(BLOCK_BYTES, bench.queued_s(lambda: bench.gather(samples[0], into[0]))),
            "write": _rate(BLOCK_BYTES, bench.queued_s(lambda: bench.scatter(samples[1], into[1]))),
        }
    bench.blocks(enough(found))
    both = bench.queued_s(lambda: [bench.gather(samples[0], into[0]), bench.scatter(samples[1], into[1])])
    found["kernels, both"] = _rate(2 * BLOCK_BYTES, both)
    for way in ("read", "write"):
        by_rows = max(found[f"kernel of {n_blocks} blocks"][way] for n_blocks in BLOCKS)
        found[f"kernel, {way}"] = max(by_rows, found.get(f"plain kernel, {way}", 0))
    return found


def enough(ceiling: dict[str, Any]) -> int:
    """Blocks that nearly reach what more of them do."""
    reached = {n_blocks: ceiling[f"kernel of {n_blocks} blocks"]["read"] for n_blocks in BLOCKS}
    return min(n_blocks for n_blocks in BLOCKS if reached[n_blocks] >= 0.97 * max(reached.values()))


def sweep(
    bench: Bench, ceiling: dict[str, Any], table_gb: tuple[float, ...], sizes: tuple[int, ...], counts: tuple[int, ...]
) -> list[dict[str, Any]]:
    """GB/s of gathers and scatters, and their share of what the kernels and the copy engine do in sequence."""
    bench.blocks(enough(ceiling))
    cells, rng = [], np.random.default_rng(0)
    for gb in table_gb:
        memory = bench.memory(int(gb * 1e9))
        for row_nbytes, count in itertools.product(sizes, counts):
            store = bench.rows(memory, row_nbytes)
            if count > store.n_rows or count * row_nbytes > MOST_BYTES:
                continue
            chosen = np.unique(rng.integers(store.n_rows, size=count))
            for order, numbers in (("sorted", chosen), ("random", rng.permutation(chosen))):
                cell = {"table_gb": gb, "row_nbytes": row_nbytes, "count": count, "rows": len(numbers), "order": order}
                cells.append(cell | _moved(bench, StoreRows(store, numbers), ceiling))
        del memory, store  # before there is the next one
    return cells


def _moved(bench: Bench, sample: StoreRows, ceiling: dict[str, Any]) -> dict[str, float]:
    """Rows there and back: checked, then timed one after the other, and one alone."""
    into, n_words = bench.room(sample), sample.shape[1]
    some = np.unique(np.linspace(0, len(sample.rows) - 1, 200).astype(np.int64))
    expected = sample.rows[some, None] * n_words + np.arange(n_words)
    bench.gather(sample, into)
    bench.read.record().sync()
    assert np.array_equal(into[torch.from_numpy(some)].cpu().numpy(), expected), "the rows are wrong"
    for change in (1, -1):
        into += change
        _wait(bench.device.name)
        bench.scatter(sample, into)
        bench.write.record().sync()
        assert np.array_equal(sample.store.array[sample.rows[some]], expected + (change == 1)), "the rows were not written"
    nbytes, found = part_nbytes(sample), {}
    n_queued = max(1, min(8, MOST_BYTES // nbytes))
    for way, work, kernel, engine in (
        ("gather", bench.gather, "kernel, read", "copy engine, to the device"),
        ("scatter", bench.scatter, "kernel, write", "copy engine, to the host"),
    ):
        rate = _rate(nbytes, bench.queued_s(functools.partial(work, sample, into), n_queued))
        found |= {
            f"{way}_gb_per_s": rate,
            f"{way}_to_kernel": round(rate / ceiling[kernel], 3),
            f"{way}_to_copy_engine": round(rate / ceiling[engine], 3),
            f"{way}_alone_us": round(bench.latency_s(functools.partial(work, sample, into)) * 1e6, 1),
        }
    return found


def _plain() -> Callable[..., None]:
    """A kernel that copies one block in sequence, with as many threads as the GPU takes."""
    import cupy

    kernel = cupy.RawKernel(PLAIN, "copy", options=("-std=c++17",))
    n_blocks = 8 * torch.cuda.get_device_properties(0).multi_processor_count

    def copy_(stream: Any, source: int, target: int, nbytes: int) -> None:
        with cupy.cuda.Stream.from_external(External(stream.raw.cuda_stream)):
            kernel((n_blocks,), (256,), (np.uint64(source), np.uint64(target), np.uint32(nbytes // 16)))

    return copy_


def small_batches(name: str, n: int = 300) -> dict[str, float]:
    """Microseconds, median, to bring 6 rows of 3 float64 to the device and back."""
    table, chosen = np.random.default_rng(0).random((1000, 3)), [np.random.default_rng(i).permutation(1000)[:6] for i in range(n)]
    device = torch.device(name)
    pinned = torch.from_numpy(table.copy())
    pinned = pinned.pin_memory() if device.type == "cuda" else pinned
    times = []
    for rows_ in chosen:
        begin = time.perf_counter()
        ids = torch.from_numpy(rows_)
        pinned[ids] = (pinned[ids].to(device) + 0).cpu()
        times.append(time.perf_counter() - begin)
    found = {"torch, pinned": statistics.median(times) * 1e6}
    for depth in (0, 2):
        with Feeder(PinnedStore(table, pin="auto"), rows=chosen, depth=depth, device=name) as feeder:
            times, last = [], time.perf_counter()
            for batch in feeder.batches():
                batch.write_back(batch.data + 0)
                now = time.perf_counter()
                times.append(now - last)
                last = now
        found[f"pinfeed, depth {depth}"] = statistics.median(times) * 1e6
    return {way: round(value, 1) for way, value in found.items()}


def beside_products(bench: Bench) -> dict[str, Any]:
    """Milliseconds of large matrix products alone; and what they take of that while rows come, by so many blocks or by the copy engine."""
    size, dtype = (8192, torch.bfloat16) if bench.cuda else (512, torch.float32)
    a, b, c = (torch.zeros(size, size, dtype=dtype, device=bench.device.name) for _ in range(3))
    store = bench.rows(bench.memory(1 << 30), 512)
    sample = StoreRows(store, np.random.default_rng(0).permutation(store.n_rows)[:65536])
    into, staged = bench.room(sample), bench.device.staging(part_nbytes(sample)).view(np.int64).reshape(sample.shape)

    def products_s(n: int) -> float:
        begin = time.perf_counter()
        for _ in range(n):
            torch.mm(a, b, out=c)
        bench.device.current_stream().record().sync()
        return time.perf_counter() - begin

    products_s(2)
    n = max(3, round(0.05 / (products_s(3) / 3)))
    alone = statistics.median(products_s(n) for _ in range(7))

    def beside(move: Callable[[], object]) -> float:
        n_moves, found = int(3 * alone / bench.latency_s(move)) + 1, []
        for _ in range(5):
            for _ in range(n_moves):
                move()
            done = bench.read.record()
            found.append(products_s(n))
            assert not (bench.cuda and done.is_done()), "the rows were there before the products"
            done.sync()
        return round(statistics.median(found) / alone, 3)

    ways: dict[str, float] = {}
    for n_blocks in BLOCKS:
        bench.blocks(n_blocks)
        ways[f"{n_blocks} blocks"] = beside(lambda: bench.gather(sample, into))
    ways["copy engine"] = beside(lambda: bench.device.copy(staged, into, bench.read))
    return {"alone_ms": round(alone * 1e3, 3), "beside/alone": ways}


def loaders(name: str, n: int = 200) -> dict[str, float]:
    """Milliseconds per batch of a DataLoader's loop with a step: moved by hand, by a side stream written by hand, and wrapped."""
    from torch.utils.data import DataLoader, TensorDataset

    from pinfeed import wrap_loader

    data = TensorDataset(torch.arange(n * 64 * 3072, dtype=torch.float32).reshape(n * 64, 3072))
    cuda = name == "cuda"
    loader = DataLoader(data, batch_size=None, sampler=torch.utils.data.BatchSampler(range(len(data)), 64, False), pin_memory=cuda)
    weight = torch.zeros(3072, 4096 if cuda else 64, device=name)

    def by_hand() -> Any:
        for (x,) in loader:
            yield x.to(name, non_blocking=True)

    def side_stream() -> Any:
        side, later = torch.cuda.Stream(), None
        for (x,) in loader:
            with torch.cuda.stream(side):
                moved = x.to(name, non_blocking=True)
                done = side.record_event()
            if later is not None:
                torch.cuda.current_stream().wait_event(later[1])
                later[0].record_stream(torch.cuda.current_stream())
                yield later[0]
            later = moved, done
        assert later is not None
        torch.cuda.current_stream().wait_event(later[1])
        later[0].record_stream(torch.cuda.current_stream())
        yield later[0]

    ways: dict[str, Callable[[], Any]] = {
        "DataLoader, .to(non_blocking)": by_hand,
        "wrap_loader": lambda: (x for (x,) in wrap_loader(loader, device=name)),
    }
    if cuda:
        ways["a side stream by hand"] = side_stream
    found: dict[str, list[float]] = {way: [] for way in ways}
    sums = {way: float(sum(x.sum(dtype=torch.float64) for x in make())) for way, make in ways.items()}
    assert len(set(sums.values())) == 1, sums
    for _, (way, make) in itertools.product(range(3), ways.items()):
        _wait(name)
        begin = time.perf_counter()
        for x in make():
            x @ weight
        _wait(name)
        found[way].append((time.perf_counter() - begin) / n * 1e3)
    return {way: round(min(times), 3) for way, times in found.items()}


def _rate(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)


def _wait(name: str) -> None:
    if name.startswith("cuda"):
        torch.cuda.synchronize()
