"""Every device keeps the contract; devices are found by name."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.reader_functions import StagingDevice

from pinfeed import Feeder, errors
from pinfeed.devices import cuda, resolve
from pinfeed.devices.cpu import HostDevice
from pinfeed.devices.cuda_streams import CudaClock, queued_in
from pinfeed.devices.device import RowCopy, TensorRange
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.tensors.numpy_torch import to_numpy, to_torch
from pinfeed.testing import SimDevice, favour, lazy
from pinfeed.testing.suites import DeviceTests, sample


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
    """The suite fails for a device that does not keep the contract."""

    def make(self) -> Any:
        class Forgetful(SimDevice):
            def share(self, tensor: Any, stream: Any) -> None:
                pass

        return Forgetful(favour("home"))

    @pytest.mark.xfail(
        strict=True,
        raises=AssertionError,
        reason="it reuses memory that another stream still reads",
    )
    def test_memory_lent_to_another_stream_is_not_given_away(self, device: Any) -> None:
        super().test_memory_lent_to_another_stream_is_not_given_away(device)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "'tpu' is not a device"),
        ("mps", "not supported"),
        (3.5, "is not a device"),
        (
            "cuda:99",
            "cuda:99' does not exist" if torch.cuda.is_available() else "finds no usable GPU",
        ),
    ],
)
def test_a_device_that_does_not_exist(device: Any, message: str) -> None:
    with pytest.raises(errors.DeviceError, match=message):
        Feeder(np.zeros((3, 2)), batch_size=1, device=device)


def test_bytes_next_to_booleans_stay_as_they_are() -> None:
    """torch would turn them into 0 and 1 if it copied them as booleans."""
    masks = np.arange(2 * 30_000).reshape(2, -1) % 3 == 0
    source = {"mask": masks[0], "other": masks[1], "bytes": np.arange(30_000).astype(np.uint8)}
    (batch,) = Feeder(source, batch_size=30_000, device=StagingDevice(), depth=0)
    for name, values in source.items():
        assert np.array_equal(batch[name].numpy(), values)


def test_auto_is_cuda_if_there_is_a_gpu() -> None:
    assert resolve("auto", n_spare=1).name == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert resolve(torch.device("cpu"), n_spare=1).name == "cpu"


def test_a_device_that_was_given_stays_open() -> None:
    device = HostDevice()
    for _ in range(2):
        with Feeder(np.zeros((3, 2)), batch_size=1, device=device) as feeder:
            assert len(list(feeder)) == 3


@pytest.mark.parametrize(
    "change", [torch.conj, lambda x: x.conj().imag, torch.t], ids=["conj", "neg", "t"]
)
def test_conjugated_and_transposed_tensors_move_by_torch(change: Any) -> None:
    x = torch.zeros(2, 3, dtype=torch.complex64)
    assert cuda._is_plain(x)
    assert not cuda._is_plain(change(x))


def in_order(positions: torch.Tensor) -> TensorRange:
    return TensorRange(positions, 0, len(positions))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_rows_of_every_dtype_are_copied_as_words(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of a CUDA device, with tensors of the CPU."""
    monkeypatch.setattr(cuda, "OVERLAP_CHUNK_BYTES", 16)
    for row_shape in ((), (3,), (2, 2)):
        src, dst = sample(6, row_shape, DTYPES[name]), sample(20, row_shape, DTYPES[name])[-5:]
        tensor, out = to_torch(src), to_torch(dst.copy())
        src_pos = torch.tensor([5, 0, 5, 2], dtype=torch.int32)
        dst_pos = torch.tensor([1, 4, 0, 2], dtype=torch.int32)
        cuda._copy_rows(RowCopy(tensor, out, *map(in_order, (src_pos, dst_pos))))
        wanted = dst.copy()
        wanted[dst_pos.numpy()] = src[src_pos.numpy()]
        np.testing.assert_array_equal(to_numpy(out, "out"), wanted)
        cuda._copy_rows(RowCopy(tensor[:4], out, into=in_order(dst_pos)))
        wanted[dst_pos.numpy()] = src[:4]
        np.testing.assert_array_equal(to_numpy(out, "out"), wanted)
        cuda._copy_rows(RowCopy(tensor, out[:4], taken=in_order(src_pos)))
        wanted[:4] = src[src_pos.numpy()]
        np.testing.assert_array_equal(to_numpy(out, "out"), wanted)
        cuda._copy_rows(RowCopy(tensor[1:6], out))
        np.testing.assert_array_equal(to_numpy(out, "out"), src[1:])


def test_values_at_any_place_of_a_tensor_are_copied_as_words() -> None:
    whole = torch.arange(9, dtype=torch.float32)
    values = whole[1:].view(4, 2)
    with pytest.raises(RuntimeError, match="storage_offset"):
        cuda._words(values)
    out = torch.zeros(4, 2)
    cuda._copy_rows(RowCopy(values, out, into=in_order(torch.arange(4, dtype=torch.int32))))
    assert torch.equal(out, values)
    assert cuda._aligned(out) is out


class DriftingGpu:
    """A GPU with a clock that is fast by ``drift``; events happen at the host's time ``now_s``."""

    def __init__(self, drift: float) -> None:
        self.now_s = 100.0
        self._drift = drift

    def event(self) -> "DriftingEvent":
        return DriftingEvent(self.now_s * (1 + self._drift) * 1e3)


class DriftingEvent:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, other: "DriftingEvent") -> float:
        return other.at_ms - self.at_ms


@pytest.mark.parametrize("gap_s", [0.1, 9.0, 15.0, 30.0, 300.0])
@pytest.mark.parametrize("drift", [0.0, 1e-4, -1e-4])
def test_the_clock_of_a_gpu_follows_that_of_the_host(drift: float, gap_s: float) -> None:
    """Times never go back, and short spans keep their length.

    The error is never larger than the drift of the two clocks since they were compared.
    """
    gpu, n_marks = DriftingGpu(drift), 0

    def mark() -> Any:
        nonlocal n_marks
        n_marks += 1
        # Every fifth time, the GPU is busy.
        return None if n_marks % 5 == 0 else (gpu.event(), gpu.now_s)

    clock, last_s = CudaClock(mark, (gpu.event(), gpu.now_s)), 0.0
    n = max(20, round(600 / gap_s))
    for i in range(1, n):
        gpu.now_s = 100.0 + i * gap_s
        begin = gpu.event()
        gpu.now_s += 1e-4
        begin_s, end_s = clock.at_s(begin), clock.at_s(gpu.event())
        assert abs(end_s - gpu.now_s) < (
            1.2e-4 * (10 + gap_s) if i * gap_s < 30 + 3 * gap_s else 1e-5
        )
        assert end_s - begin_s == pytest.approx(1e-4, abs=1e-6)
        assert last_s < begin_s
        last_s = end_s
    assert gap_s > 1 or n_marks < n / 50


def test_a_stream_that_is_current_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    current, other = (types.SimpleNamespace(device=gpu, cuda_stream=handle) for handle in (1, 2))
    entered: list[Any] = []

    @contextlib.contextmanager
    def stream(raw: Any) -> Iterator[None]:
        entered.append(raw)
        yield

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for raw in (current, other):
        with queued_in(raw):
            pass
    assert entered == [other]
