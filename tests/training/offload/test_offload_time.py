"""Time of a step with Offload on a device whose streams have clocks."""

from typing import Any

import pytest
import torch

from pinfeed.devices.cpu import HostDevice
from pinfeed.training.offload.offload import Offload

N_LAYERS = 86
N_LOSS = 24
"""Tensors of a layer's size in the one that the loss saves: 22% of all, as in a GPT."""
UNIT = 4096
"""Bytes of a layer's tensor; it stands for 32 MiB."""
COPY_MS = 0.61
FORWARD_MS = 12.0
BACKWARD_MS = 23.0


class ClockEvent:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def sync(self) -> None:
        pass

    def is_done(self) -> bool:
        """Return False, because the host is ahead of the device."""
        return False


class ClockStream:
    """A stream with the time at which its work ends."""

    handle = 0

    def __init__(self) -> None:
        self.now_ms = 0.0

    def record(self, *, timed: bool = False) -> ClockEvent:
        return ClockEvent(self.now_ms)

    def wait(self, event: ClockEvent) -> None:
        self.now_ms = max(self.now_ms, event.at_ms)


class ClockDevice(HostDevice):
    """The CPU, with streams whose copies take time."""

    def __init__(self) -> None:
        super().__init__(n_spare=0)
        self.compute = ClockStream()

    def stream(self, name: str) -> Any:
        return ClockStream()

    def current_stream(self) -> Any:
        return self.compute

    def copy(self, src: Any, dst: Any, stream: Any) -> None:
        stream.now_ms += COPY_MS * dst.nbytes / UNIT
        super().copy(src, dst, stream)


def step_ms(device: ClockDevice, offload: Offload) -> float:
    """Run a step of layers and a loss, and return its time."""
    begin = device.compute.now_ms

    def compute(ms: float) -> None:
        device.compute.now_ms += ms / (N_LAYERS + 1)

    x = torch.randn(UNIT // 4, requires_grad=True)
    with offload.step():
        y = x
        for i in range(N_LAYERS + 1):
            y = (y.repeat(N_LOSS) if i == N_LAYERS else y).tanh()
            y.register_hook(lambda _: compute(BACKWARD_MS))
            compute(FORWARD_MS)
        loss = y.sum()
    loss.backward()
    return device.compute.now_ms - begin


@pytest.mark.parametrize("n_units", [16, 48, 64, 80, 96, 110])
def test_a_step_takes_the_time_of_computation_or_of_copies(n_units: int) -> None:
    device = ClockDevice()
    with Offload(device, threshold=0, host_limit="1MiB", device_limit=n_units * UNIT) as offload:
        for _ in range(3):
            before = offload.stats.n_storages
            step = step_ms(device, offload)
            n_sent = offload.stats.n_storages - before
        # The tensors that the loss saves stay, and so do the layers before it within the limit.
        assert n_sent == max(0, N_LAYERS - max(0, n_units - N_LOSS + 1))
        copies = n_sent * COPY_MS
        assert step <= 1.02 * (max(FORWARD_MS, copies) + max(BACKWARD_MS, copies))
        assert offload.stats.n_missed == 0
    if n_units >= 96:
        # The link hides 14 of 110 tensors behind the computation.
        assert step <= 1.01 * (FORWARD_MS + BACKWARD_MS)
