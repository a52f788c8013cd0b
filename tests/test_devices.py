"""Every device keeps the contract; devices are found by name."""

from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import Feeder, errors
from pinfeed.devices import resolve
from pinfeed.devices.cuda import CudaClock, Segments
from pinfeed.devices.host import HostDevice
from pinfeed.testing import SimDevice, favour, lazy
from pinfeed.testing.suites import DeviceTests


class TestHostDevice(DeviceTests):
    def make(self) -> HostDevice:
        return HostDevice()


class TestLazySimDevice(DeviceTests):
    def make(self) -> Any:
        return SimDevice(lazy)


class TestDirectSimDevice(DeviceTests):
    def make(self) -> Any:
        return SimDevice(lazy, direct=True)


class TestEagerSimDevice(DeviceTests):
    def make(self) -> Any:
        return SimDevice(favour("compute", "one", "other", "home", "pinfeed-test"))


class TestSimDeviceWithOneEagerStream(DeviceTests):
    @pytest.fixture(params=["one", "other", "home", "compute"])
    def device(self, request: pytest.FixtureRequest) -> Any:
        return SimDevice(favour(request.param))


class TestForgetfulDevice(DeviceTests):
    """A device that does not keep the contract is found out."""

    def make(self) -> Any:
        class Forgetful(SimDevice):
            def share(self, tensor: Any, stream: Any) -> None:
                pass

        return Forgetful(favour("home"))

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason="it gives memory away that another stream still reads")
    def test_memory_lent_to_another_stream_is_not_given_away(self, device: Any) -> None:
        super().test_memory_lent_to_another_stream_is_not_given_away(device)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "'tpu' is not a device"),
        ("mps", "not supported"),
        (3.5, "is not a device"),
        ("cuda:99", "cuda:99' does not exist" if torch.cuda.is_available() else "finds no usable GPU"),
    ],
)
def test_a_device_that_does_not_exist(device: Any, message: str) -> None:
    with pytest.raises(errors.DeviceError, match=message):
        Feeder(np.zeros((3, 2)), batch_size=1, device=device)


def test_auto_takes_cuda_where_there_is_one() -> None:
    assert resolve("auto", n_spare=1).name == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert resolve(torch.device("cpu"), n_spare=1).name == "cpu"


def test_a_device_that_was_given_stays_open() -> None:
    device = HostDevice()
    for _ in range(2):
        with Feeder(np.zeros((3, 2)), batch_size=1, device=device) as feeder:
            assert len(list(feeder)) == 3


class DriftingGpu:
    """A GPU whose clock is fast by ``drift``, and takes events at the host's time ``now_s``."""

    def __init__(self, drift: float) -> None:
        self.now_s, self._drift = 100.0, drift

    def event(self) -> "DriftingEvent":
        return DriftingEvent(self.now_s * (1 + self._drift) * 1e3)


class DriftingEvent:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, other: "DriftingEvent") -> float:
        return other.at_ms - self.at_ms


@pytest.mark.parametrize("drift", [0.0, 1e-4, -1e-4])
def test_the_clock_of_a_gpu_follows_that_of_the_host(drift: float) -> None:
    """An hour: errors stay small, times never go back, and begin and end of a short span keep their distance."""
    gpu, n_comparisons = DriftingGpu(drift), 0

    def mark() -> Any:
        nonlocal n_comparisons
        n_comparisons += 1
        return gpu.event(), gpu.now_s

    clock, last_s = CudaClock(mark), 0.0
    for i in range(1, 36_001):
        gpu.now_s = 100.0 + i / 10
        begin = gpu.event()
        gpu.now_s += 1e-4
        begin_s, end_s = clock.at_s(begin), clock.at_s(gpu.event())
        assert abs(end_s - gpu.now_s) < (1.2e-3 if i < 300 else 1e-5)
        assert end_s - begin_s == pytest.approx(1e-4, abs=1e-6)
        assert last_s < begin_s
        last_s = end_s
    assert 300 < n_comparisons < 400


class Allocator:
    """torch's allocator, as it describes its segments."""

    def __init__(self) -> None:
        self.segments: list[dict[str, int]] = []
        self.n_freed = self.n_snapshots = 0

    def snapshot(self) -> list[dict[str, int]]:
        self.n_snapshots += 1
        return self.segments

    def allocate(self, address: int, nbytes: int, stream: int) -> None:
        self.segments.append({"address": address, "total_size": nbytes, "stream": stream, "device": 0})

    def free(self, address: int) -> None:
        self.segments = [segment for segment in self.segments if segment["address"] != address]
        self.n_freed += 1


def test_the_stream_that_memory_belongs_to() -> None:
    allocator = Allocator()
    segments = Segments(allocator.snapshot, lambda: allocator.n_freed)
    assert segments.stream_of(4096) is None
    allocator.allocate(8192, 4096, stream=7)
    allocator.allocate(4096, 4096, stream=0)
    assert [segments.stream_of(address) for address in (4095, 4096, 8191, 8192, 12287, 12288)] == [None, 0, 0, 7, 7, None]
    before = allocator.n_snapshots
    assert [segments.stream_of(address) for address in (4096, 8192, 9000)] == [0, 7, 7]
    assert allocator.n_snapshots == before, "known addresses need no snapshot"
    allocator.free(8192)
    allocator.allocate(8192, 4096, stream=9)
    assert segments.stream_of(8192) == 9, "another stream has the address now"
