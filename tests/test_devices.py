"""Every device keeps the contract; devices are found by name."""

from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import Feeder, errors
from pinfeed.devices import resolve
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
