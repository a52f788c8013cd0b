"""Transfers, streams, kernels and page-locked memory of a GPU.

``pytest -m gpu`` and ``python -m benchmarks.gpu`` run them; the latter saves its results.
"""

import contextlib
import gc
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import mover_of
from torch.utils.data import DataLoader, TensorDataset

from pinfeed import (
    ArrayStore,
    Config,
    Feeder,
    MiB,
    NpyStore,
    PinnedStore,
    RaggedStore,
    wrap_loader,
)
from pinfeed.devices.cuda import CudaDevice, unlock_on
from pinfeed.errors import DeviceError
from pinfeed.memory.host import resident_bytes
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.stores.host_rows import StoreRows, part_nbytes
from pinfeed.testing.suites import DeviceTests, StoreTests

pytestmark = pytest.mark.gpu

# Clock ticks: about 10 ms, a thousand times what a small copy takes.
LATE = 20_000_000


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    """Make torch raise an error where any thread synchronizes implicitly."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns once that it does not detect every synchronizing operation.
        warnings.simplefilter("ignore")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def late(stream: Any) -> None:
    """Queue a kernel that does nothing for about 10 ms."""
    with torch.cuda.stream(stream.raw):
        torch.cuda._sleep(LATE)


class TestCudaDevice(DeviceTests):
    def make(self) -> CudaDevice:
        return CudaDevice()

    def delay(self, device: Any, stream: Any) -> None:
        late(stream)


class TestDirectCudaDevice(DeviceTests):
    """Kernels move the rows of page-locked stores."""

    def make(self) -> CudaDevice:
        pytest.importorskip("cupy")
        device = CudaDevice()
        device.is_direct = True
        return device

    def store(self, array: np.ndarray) -> PinnedStore:
        return PinnedStore(array)

    def delay(self, device: Any, stream: Any) -> None:
        late(stream)


class TestCudaDeviceWithoutCupy(DeviceTests):
    """torch copies rows on the device."""

    def make(self) -> CudaDevice:
        device = CudaDevice()
        device._row_copy_kernel = None
        return device

    def delay(self, device: Any, stream: Any) -> None:
        late(stream)


def moved(device: Any, store: Any, rows: np.ndarray, **options: Any) -> np.ndarray:
    """Read rows in a side stream, write them back plus one, and return what was read."""
    stream, part = device.stream("read"), StoreRows(store, rows)
    tensor = device.tensor(device.empty(part_nbytes(part), stream), part.shape, part.dtype)
    for _ in device.read([(part, tensor)], stream, **options):
        pass
    with torch.cuda.stream(stream.raw):
        read = tensor.cpu().numpy()
        tensor += 1
    device.write([(store, tensor)], rows, stream, **options)
    stream.record().sync()
    return read


@pytest.mark.parametrize("rows", [np.arange(3, 40), np.array([7])], ids=["run", "row"])
def test_consecutive_rows_are_one_copy(rows: np.ndarray) -> None:
    pytest.importorskip("cupy")
    values = np.random.default_rng(0).integers(1 << 40, size=(50, 5))
    store, device = PinnedStore(values), CudaDevice()
    device.is_direct = True
    assert device.index_dtype([store], rows) is None
    np.testing.assert_array_equal(moved(device, store, rows), values[rows])
    values[rows] += 1
    np.testing.assert_array_equal(store.array, values)
    assert "kernels" not in vars(device), "a kernel was compiled"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_indices_that_are_on_the_device(dtype: torch.dtype) -> None:
    pytest.importorskip("cupy")
    values = np.random.default_rng(0).integers(1 << 40, size=(50, 5))
    store, rows = PinnedStore(values), np.random.default_rng(1).permutation(50)[:30]
    device = CudaDevice()
    device.is_direct = True
    assert device.index_dtype([store], rows) == np.int32
    indices = torch.from_numpy(rows).to("cuda", dtype)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(moved(device, store, rows, indices=indices), values[rows])
    values[rows] += 1
    np.testing.assert_array_equal(store.array, values)


class TestPinnedStore(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> PinnedStore:
        pytest.importorskip("cupy")
        store = PinnedStore(array)
        assert store.page_locked
        return store


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()


def table_of(kind: str, values: np.ndarray, tmp_path: Path) -> Any:
    if kind == "array":
        return ArrayStore(values.copy())
    if kind == "pinned":
        return PinnedStore(values, pin="auto")
    np.save(tmp_path / "t.npy", values)
    return NpyStore(tmp_path / "t.npy", mode="r+")


@pytest.mark.parametrize("lateness", ["none", "compute", "read", "write", "index", "all"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "route"), [("array", None), ("pinned", "direct"), ("pinned", "staged"), ("file", None)]
)
def test_equal_to_the_synchronous_loop(
    kind: str, route: str | None, depth: int, lateness: str, tmp_path: Path
) -> None:
    if kind == "pinned":
        pytest.importorskip("cupy")
    rng = np.random.default_rng(depth)
    values = rng.integers(0, 1 << 40, (200, 33))
    batches = [rng.permutation(200)[: rng.integers(1, 60)] for _ in range(25)]
    want, seen = values.copy(), []
    for chosen in batches:
        seen.append(want[chosen])
        want[chosen] = want[chosen] * 3 + 1

    store = table_of(kind, values, tmp_path)
    got = []
    with Feeder(store, rows=batches, depth=depth, device="cuda", route=route) as feeder:
        assert route is None or feeder.plan.route == route
        transfer = mover_of(feeder)
        for batch in feeder.batches():
            for name, stream in (
                ("compute", feeder._device.current_stream()),
                ("read", transfer._read),
                ("write", transfer._write),
                ("index", transfer._index),
            ):
                if lateness in (name, "all"):
                    late(stream)
            got.append(batch.data.clone())
            batch.write_back(batch.data.mul_(3).add_(1))
            batch.data.fill_(-1)
            # Takes memory that was freed before.
            scratch = torch.full_like(batch.data, -2)
            del batch, scratch
    for g, w in zip(got, seen, strict=True):
        np.testing.assert_array_equal(g.cpu().numpy(), w)
    out = np.empty_like(want)
    store.gather(np.arange(200), out)
    np.testing.assert_array_equal(out, want)
    store.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_kept_batches_stay(depth: int) -> None:
    x = np.arange(1000 * 64, dtype=np.float32).reshape(1000, 64)
    with Feeder(x, batch_size=100, depth=depth, device="cuda") as feeder:
        late(feeder._device.current_stream())
        kept = list(feeder) + list(feeder)
    late(CudaDevice().current_stream())
    np.testing.assert_array_equal(torch.cat(kept).cpu().numpy(), np.concatenate([x, x]))


def test_the_consumer_may_change_its_stream() -> None:
    x = np.arange(2000 * 64).reshape(2000, 64)
    streams, sums = [torch.cuda.Stream() for _ in range(3)], []
    with Feeder(x, batch_size=100, device="cuda") as feeder:
        loop = iter(feeder)
        for stream in itertools.cycle(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LATE // 10)
                batch = next(loop, None)
                if batch is None:
                    break
                torch.cuda._sleep(LATE // 10)
                sums.append(batch.sum(1))
                del batch
    torch.cuda.synchronize()
    np.testing.assert_array_equal(torch.cat(sums).cpu().numpy(), x.sum(1))


@pytest.mark.parametrize("write", [False, True])
def test_memory_is_within_the_plan(write: bool, tmp_path: Path) -> None:
    # Pages of zeros would take memory only once they are written.
    x = np.ones((4096, 4096), np.float32)
    x.flags.writeable = write
    config = Config(cpu_memory_limit=MiB(64), gpu_memory_limit=MiB(32))
    before, pinned_before = (
        torch.cuda.memory_allocated(),
        resident_bytes()["shared"] + resident_bytes()["anonymous"],
    )
    with Feeder(x, config=config, device="cuda") as feeder:
        for batch in feeder.batches():
            if write:
                batch.write_back(batch.data)
            del batch
        assert torch.cuda.max_memory_allocated() - before <= feeder.plan.device_bytes <= MiB(32)
        grown = resident_bytes()["shared"] + resident_bytes()["anonymous"] - pinned_before
        assert grown <= feeder.plan.host_bytes + MiB(32)


def test_the_loop_makes_no_call_that_blocks() -> None:
    """No thread synchronizes implicitly; torch reports it if one does."""
    store = PinnedStore.zeros((4096, 64), pin="auto")
    rng = np.random.default_rng(0)
    with (
        Feeder(
            store, rows=[rng.permutation(4096)[:512] for _ in range(40)], device="cuda"
        ) as feeder,
        no_synchronization(),
    ):
        for batch in feeder.batches():
            batch.write_back(batch.data + 1)
    assert store.array.sum() == 40 * 512 * 64


def test_wrap_loader() -> None:
    data = TensorDataset(torch.arange(1000.0).reshape(500, 2), torch.arange(500))
    for pin in (False, True):
        loader = DataLoader(data, batch_size=32, pin_memory=pin)
        got = [(x.cpu(), y.cpu()) for x, y in wrap_loader(loader, device="cuda")]
        assert all(
            torch.equal(a, c) and torch.equal(b, d)
            for (a, b), (c, d) in zip(got, loader, strict=True)
        )


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_rows_for_the_ids_of_a_loader(pinned: bool, depth: int) -> None:
    rows = np.random.default_rng(0).normal(size=(5000, 3, 8)).astype(np.float32)
    rng = np.random.default_rng(1)
    every_ids = [
        *(torch.from_numpy(rng.integers(0, 5000, (40, 50))) for _ in range(10)),
        torch.from_numpy(rng.permutation(5000)[:900]),
        torch.zeros(0, dtype=torch.int64),
        torch.full((7,), 3),
    ]
    source = PinnedStore(rows, pin=True) if pinned else rows
    fetch = {"x": ((source, np.arange(5000)), lambda ids: ids)}
    with wrap_loader(every_ids, fetch=fetch, device="cuda", depth=depth) as loop:
        for _ in range(2):
            for (ids, got), expected in zip(loop, every_ids, strict=True):
                x, number = got["x"]
                assert x.is_cuda
                np.testing.assert_array_equal(x.cpu().numpy(), rows[expected.numpy()])
                assert torch.equal(number.cpu(), expected)
                assert torch.equal(ids.cpu(), expected)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("layout", ["offsets", "padded", "jagged"])
def test_ragged_rows(layout: Any, depth: int) -> None:
    lengths = np.random.default_rng(0).integers(0, 300, 500)
    offsets = np.concatenate([[0], lengths.cumsum()])
    values = np.random.default_rng(1).normal(size=(offsets[-1], 3)).astype(np.float32)
    store = RaggedStore(values, offsets, layout=layout)
    options: dict[str, Any] = {"batch_size": 32, "shuffle": True, "depth": depth}
    with (
        Feeder((store, lengths), device="cuda", **options) as feeder,
        Feeder((store, lengths), device="cpu", **options) as expected,
    ):
        for (found, n), (wanted, n_wanted) in zip(feeder, expected, strict=True):
            assert torch.equal(n.cpu(), n_wanted)
            for one, other in zip(store.tensors(found), store.tensors(wanted), strict=True):
                assert one.is_cuda
                assert torch.equal(one.cpu(), other)


def test_a_pinned_store_takes_what_it_needs_and_gives_it_back() -> None:
    pytest.importorskip("cupy")
    store = PinnedStore.zeros((100_000, 33))
    assert torch.from_numpy(store.array).is_pinned()
    address = store.array.ctypes.data
    del store
    gc.collect()
    unlock_freed()
    with pytest.raises(RuntimeError, match="cudaHostUnregister failed"):
        # The memory was unlocked already.
        unlock_on(torch.device("cuda"), address)
    # The failed call left no code behind that the next launch reports.
    assert float(torch.zeros(1, device="cuda").add_(1)) == 1


@pytest.mark.parametrize(
    "row_nbytes", [1, 2, 3, 4, 6, 8, 12, 16, 20, 48, 100, 512, 600, 4096, 614_400, 3_000_001]
)
def test_rows_of_every_size(row_nbytes: int) -> None:
    """Kernels gather what numpy gathers, from several stores of different sizes at once."""
    pytest.importorskip("cupy")
    n = max(3, min(5000, (64 << 20) // row_nbytes))
    rng = np.random.default_rng(row_nbytes)
    values = rng.integers(256, size=(n, row_nbytes), dtype=np.uint8)
    others = rng.integers(1 << 40, size=(n, 3))
    stores = PinnedStore(values), PinnedStore(others)
    batches = [rng.permutation(n)[: rng.integers(1, n)] for _ in range(4)]
    with Feeder(stores, rows=batches, device="cuda", route="direct") as feeder:
        for rows, batch in zip(batches, feeder.batches(), strict=True):
            one, other = batch.data
            np.testing.assert_array_equal(one.cpu().numpy(), values[rows])
            np.testing.assert_array_equal(other.cpu().numpy(), others[rows])
            batch.write_back((255 - one, other + 1))
            values[rows], others[rows] = 255 - values[rows], others[rows] + 1
    np.testing.assert_array_equal(stores[0].array, values)
    np.testing.assert_array_equal(stores[1].array, others)


@pytest.mark.parametrize("row_nbytes", [8, 24, 512, 4096, 614_400])
def test_every_grid_moves_the_same_rows(row_nbytes: int) -> None:
    pytest.importorskip("cupy")
    n = max(3, min(50_000, (64 << 20) // row_nbytes))
    rng = np.random.default_rng(row_nbytes)
    values = rng.integers(1 << 40, size=(n, row_nbytes // 8))
    store, rows = PinnedStore(values), rng.permutation(n)[: n // 2]
    device = CudaDevice()
    device.is_direct = True
    for n_blocks in (1, 8, 64):
        device.kernels.n_blocks = n_blocks
        device.choose_route([], None, "direct")
        np.testing.assert_array_equal(moved(device, store, rows), values[rows])
        values[rows] += 1
        np.testing.assert_array_equal(store.array, values)


def test_rows_are_staged_by_default() -> None:
    pytest.importorskip("cupy")
    store = PinnedStore.zeros((100_000, 128))
    for route in (None, "direct", "staged"):
        with Feeder(store, batch_size=8192, shuffle=True, device="cuda", route=route) as feeder:
            assert feeder.plan.route == (route or "staged")
    with pytest.raises(DeviceError, match="rows of a ArrayStore are not in page-locked memory"):
        Feeder(np.zeros((10, 2)), batch_size=2, device="cuda", route="direct")


def test_a_big_table_by_kernels() -> None:
    """Kernels reach rows at offsets of more than 2^32 bytes."""
    pytest.importorskip("cupy")
    store = PinnedStore.zeros((9_000_000, 128))
    rows = np.array([0, 1, 4_194_303, 4_194_304, 8_388_607, 8_388_608, 8_999_999])
    with Feeder(store, rows=[rows, rows], device="cuda", route="direct") as feeder:
        for i, batch in enumerate(feeder.batches()):
            assert bool((batch.data == 7 * i).all())
            batch.write_back(batch.data + 7)
    assert store.array[rows].tolist() == np.full((7, 128), 14).tolist()
    assert store.array[[2, 4_194_305, 8_999_998]].sum() == 0


@pytest.mark.parametrize("route", ["direct", "staged"])
def test_no_memory_is_allocated_once_it_runs(route: str) -> None:
    pytest.importorskip("cupy")
    store = PinnedStore.zeros((100_000, 64))
    rng = np.random.default_rng(0)
    with Feeder(
        store, rows=[rng.permutation(100_000)[:4096] for _ in range(60)], device="cuda", route=route
    ) as feeder:
        streams = [
            feeder._device.current_stream(),
            mover_of(feeder)._read,
            mover_of(feeder)._write,
        ]

        def allocated(lateness: list[Any]) -> int:
            before = (
                torch.cuda.memory_stats()["num_device_alloc"]
                + torch.cuda.host_memory_stats()["num_host_alloc"]
            )
            for batch in feeder.batches():
                for stream in lateness:
                    late(stream)
                batch.write_back(batch.data + 1)
                del batch
            torch.cuda.synchronize()
            return (
                torch.cuda.memory_stats()["num_device_alloc"]
                + torch.cuda.host_memory_stats()["num_host_alloc"]
                - before
            )

        # With late streams, memory holds the largest possible number of batches.
        assert allocated(streams) > 0
        assert allocated([]) <= 2


@pytest.mark.parametrize("route", ["direct", "staged"])
def test_cuda_graphs_and_autocast_while_batches_are_transferred(route: str) -> None:
    pytest.importorskip("cupy")
    store = PinnedStore.normal((4096, 64), std=0.1)
    want = store.array.copy()
    weight = torch.randn(64, 64, device="cuda")
    static = torch.zeros(256, 64, device="cuda")
    graph, out = torch.cuda.CUDAGraph(), torch.empty(256, 64, device="cuda")
    # A capture must not load code, so the product loads it here.
    torch.mm(static, weight)
    torch.cuda.synchronize()
    rng = np.random.default_rng(0)
    batches = [rng.permutation(4096)[:256] for _ in range(30)]
    with Feeder(store, rows=batches, device="cuda", route=route) as feeder:
        for i, batch in enumerate(feeder.batches()):
            if i == 3:
                # The capture runs while batches are transferred.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    torch.mm(static, weight, out=out)
            np.testing.assert_array_equal(batch.data.cpu().numpy(), want[batches[i]])
            if i >= 3:
                static.copy_(batch.data)
                graph.replay()
                torch.testing.assert_close(out, batch.data @ weight)
            with torch.autocast("cuda"):
                assert (batch.data @ weight).dtype == torch.float16
            batch.write_back(batch.data * 0.5)
            want[batches[i]] *= 0.5
    np.testing.assert_array_equal(store.array, want)


@pytest.mark.parametrize("route", ["direct", "staged"])
def test_a_timeline_of_the_gpu(route: str, tmp_path: Path) -> None:
    """The spans are those of the GPU, and no call blocks to record them."""
    pytest.importorskip("cupy")
    store = PinnedStore.zeros((100_000, 64))
    batches = [np.random.default_rng(i).permutation(100_000)[:4096] for i in range(20)]
    with Feeder(store, rows=batches, device="cuda", route=route, timeline=True) as feeder:
        # The first loop sets the clock and loads all code that is loaded lazily.
        list(feeder)
        n_before = len(feeder.timeline.spans)
        with no_synchronization():
            for batch in feeder.batches():
                torch.cuda._sleep(LATE)
                batch.write_back(batch.data + 1)
        spans = [span for span in feeder.timeline.spans if span.loop == 1]
        assert n_before == 20 * 6
        feeder.timeline.save(tmp_path / "t.png")
    for lane in ("read", "copy", "wait", "lend", "compute", "device", "write"):
        assert sorted(span.batch for span in spans if span.lane == lane) == list(range(20)), lane
    device = {span.batch: span for span in spans if span.lane == "device"}
    for copy in (span for span in spans if span.lane == "copy"):
        assert copy.start_s <= copy.end_s <= device[copy.batch].start_s + 1e-3
    # A span has the time of the GPU's work, not the time of queuing it.
    assert all(span.end_s - span.start_s > 1e-3 for span in device.values())
    assert all(device[i].end_s <= device[i + 1].start_s + 1e-6 for i in range(19))
    lent = {span.batch: span for span in spans if span.lane == "lend"}
    # The times of the GPU are on the host's clock.
    assert all(lent[i].start_s <= device[i].start_s + 1e-3 for i in range(20))


def test_a_loop_that_runs_ahead_of_the_gpu_has_no_data_stalls() -> None:
    """The loop waits for slots that the GPU still needs, and the GPU never waits."""
    store = PinnedStore.zeros((4096, 64), pin="auto")
    with Feeder(store, rows=[np.arange(512)] * 30, device="cuda") as feeder:
        for _ in feeder:
            torch.cuda._sleep(LATE)
        assert feeder.stats.starved < 0.2
        assert feeder.stats.bottleneck in ("computing", "unevenness")


def test_names_for_a_profiler() -> None:
    """Each name is removed again, also after an error.

    NVTX counts names only while a profiler is attached.
    """

    def depth() -> int:
        found = torch.cuda.nvtx.range_push("inner")
        torch.cuda.nvtx.range_pop()
        return int(found)

    device, before = CudaDevice(), depth()
    with device.named("pinfeed read 12"):
        inside = depth()
    with pytest.raises(ZeroDivisionError), device.named("pinfeed failing"):
        _ = 1 / 0
    assert inside == before + (before >= 0)
    assert depth() == before
