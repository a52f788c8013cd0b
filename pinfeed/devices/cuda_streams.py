"""CudaStream and CudaEvent: streams and events of torch with the interface of pinfeed."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

from pinfeed.devices.cuda_clock import CudaClock


def queued_in(raw: torch.cuda.Stream) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the calling thread queues its work in a stream.

    A stream that is current already is not entered, because torch's context sets the stream twice.
    Most calls of the training thread are for its current stream.
    """
    is_current = torch.cuda.current_stream(raw.device) == raw
    return contextlib.nullcontext() if is_current else torch.cuda.stream(raw)


class CudaEvent:
    """Event of torch that is recorded once.

    A thread that waits for it sleeps and does not spin, because a spinning reader thread would
    occupy a core that the training loop needs.

    Args:
        stream: Stream in which the event is recorded.
        clock: Clock that gives the time of the event; None for an event that is not timed.
    """

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock | None = None) -> None:
        self.raw = torch.cuda.Event(enable_timing=clock is not None, blocking=True)
        self._clock = clock
        self.raw.record(stream)

    def sync(self) -> None:
        self.raw.synchronize()

    def is_done(self) -> bool:
        return bool(self.raw.query())

    def at_s(self) -> float:
        assert self._clock is not None
        return self._clock.at_s(self.raw)


class TimedDevice(Protocol):
    """Device with a clock for its events."""

    @property
    def clock(self) -> CudaClock: ...


class CudaStream:
    """Stream of torch.

    Args:
        raw: The torch stream.
        device: Device whose clock times the events of the stream.
    """

    def __init__(self, raw: torch.cuda.Stream, device: TimedDevice) -> None:
        self.raw = raw
        self._device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def record(self, *, timed: bool = False) -> CudaEvent:
        return CudaEvent(self.raw, self._device.clock if timed else None)

    def wait(self, event: CudaEvent) -> None:
        self.raw.wait_event(event.raw)
