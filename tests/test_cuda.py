"""What only a GPU can show. Run with ``pytest -m gpu``; ``python -m benchmarks.gpu`` does, and writes down what it saw."""

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pinfeed import ArrayStore, Config, Feeder, MiB, MmapStore, PinnedStore, wrap_loader
from pinfeed.devices.cuda import CudaDevice
from pinfeed.memory import resident_bytes
from pinfeed.testing.suites import DeviceTests, StoreTests

pytestmark = pytest.mark.gpu

LATE = 20_000_000  # clock ticks: about 10 ms, a thousand times what a small copy takes


def late(stream: Any) -> None:
    """Queue a kernel that does nothing for long."""
    with torch.cuda.stream(stream.raw):
        torch.cuda._sleep(LATE)


class TestCudaDevice(DeviceTests):
    def make(self) -> CudaDevice:
        return CudaDevice()

    def delay(self, device: Any, stream: Any) -> None:
        late(stream)


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
    return MmapStore(tmp_path / "t.npy", mode="r+")


@pytest.mark.parametrize("lateness", ["none", "compute", "read", "write", "all"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["array", "pinned", "file"])
def test_equal_to_the_synchronous_loop(kind: str, depth: int, lateness: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(depth)
    values = rng.integers(0, 1 << 40, (200, 33))
    batches = [rng.permutation(200)[: rng.integers(1, 60)] for _ in range(25)]
    want, seen = values.copy(), []
    for chosen in batches:
        seen.append(want[chosen])
        want[chosen] = want[chosen] * 3 + 1

    store = table_of(kind, values, tmp_path)
    got = []
    with Feeder(store, rows=batches, depth=depth, device="cuda") as feeder:
        transfer = feeder._loop._transfer
        for batch in feeder.batches():
            for name, stream in (("compute", feeder._stores.device.current_stream()), ("read", transfer._read), ("write", transfer._write)):
                if lateness in (name, "all"):
                    late(stream)
            got.append(batch.data.clone())
            batch.write_back(batch.data.mul_(3).add_(1))
            batch.data.fill_(-1)
            scratch = torch.full_like(batch.data, -2)  # takes memory that was freed before
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
        late(feeder._stores.device.current_stream())
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
    x = np.ones((4096, 4096), np.float32)  # not zeros, whose pages would only be there once they are written
    x.flags.writeable = write
    config = Config(cpu_memory_limit=MiB(64), gpu_memory_limit=MiB(32))
    before, pinned_before = torch.cuda.memory_allocated(), resident_bytes()["shared"] + resident_bytes()["anonymous"]
    with Feeder(x, config=config, device="cuda") as feeder:
        for batch in feeder.batches():
            if write:
                batch.write_back(batch.data)
            del batch
        assert torch.cuda.max_memory_allocated() - before <= feeder.plan.device_bytes <= MiB(32)
        grown = resident_bytes()["shared"] + resident_bytes()["anonymous"] - pinned_before
        assert grown <= feeder.plan.host_bytes + MiB(32)


def test_the_loop_makes_no_call_that_blocks() -> None:
    """torch reports implicit synchronisations, of any thread."""
    store = PinnedStore.zeros((4096, 64), pin="auto")
    rng = np.random.default_rng(0)
    with Feeder(store, rows=[rng.permutation(4096)[:512] for _ in range(40)], device="cuda") as feeder:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert store.array.sum() == 40 * 512 * 64


def test_wrap_loader() -> None:
    data = TensorDataset(torch.arange(1000.0).reshape(500, 2), torch.arange(500))
    for pin in (False, True):
        loader = DataLoader(data, batch_size=32, pin_memory=pin)
        got = [(x.cpu(), y.cpu()) for x, y in wrap_loader(loader, device="cuda")]
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(got, loader, strict=True))


def test_pinned_store_takes_exactly_what_it_needs_and_gives_it_back() -> None:
    pytest.importorskip("cupy")
    store = PinnedStore.zeros((100_000, 33))
    assert torch.from_numpy(store.array).is_pinned()
    address = store.array.ctypes.data
    del store
    gc.collect()
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostUnregister(address) != runtime.cudaError.success  # it was unregistered already
    with pytest.raises(RuntimeError):  # that call left its code behind: fetch it, so that no later launch reports it
        torch.zeros(1, device="cuda").add_(1)
