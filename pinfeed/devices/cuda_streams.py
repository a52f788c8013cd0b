"""CudaStream, TorchEvent and CudaClock: streams, events and times of torch for pinfeed."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pinfeed.devices.cuda_driver import CudaDriver, CudaEvent

# torch gives the time between two events as a 32-bit float in milliseconds, which resolves a
# microsecond at 10 seconds.
_COMPARE_S = 10.0
# Number of attempts to read both clocks at the same time, and the longest time of one, in seconds.
_N_TRIES = 4
_MAX_TRY_S = 1e-3

Mark = tuple[torch.cuda.Event, float]
"""A timed event that the GPU has passed, and the time of ``time.perf_counter()`` at that moment."""


@dataclass(frozen=True)
class ClockComparison:
    """Comparison of the clocks of a GPU and of the host, at one event.

    Attributes:
        event: Event at which the clocks were compared.
        host_s: Time of the host's clock at the event.
        reported_s: Time that ``CudaClock`` reports for the event.
        rate: Seconds of the host's clock per second of the GPU's.
    """

    event: torch.cuda.Event
    host_s: float
    reported_s: float
    rate: float

    def at_s(self, event: torch.cuda.Event) -> float:
        """Return the time of another event; the error at this one fades over ``_COMPARE_S``."""
        elapsed_s = _seconds(self.event, event)
        share = min(max(elapsed_s / _COMPARE_S, 0.0), 1.0)
        return self.reported_s + elapsed_s * self.rate + share * (self.host_s - self.reported_s)


class CudaClock:
    """Clock that gives the times of a GPU's events by the host's clock.

    The two clocks drift apart by about ten microseconds per second, so they are compared again from
    time to time. An error that a comparison finds is corrected gradually until the next comparison.
    Therefore, the reported time never jumps, and spans do not overlap.

    Args:
        mark: Returns a mark, or None if the GPU is busy.
        first: The first mark.
    """

    def __init__(self, mark: Callable[[], Mark | None], first: Mark) -> None:
        self._mark = mark
        event, now_s = first
        self._last = ClockComparison(event, now_s, now_s, 1.0)

    def at_s(self, event: torch.cuda.Event) -> float:
        """Return the time of a timed event that is done, in seconds of ``time.perf_counter()``.

        Any thread may call it.
        """
        last = self._last
        if _seconds(last.event, event) > _COMPARE_S and (mark := self._mark()) is not None:
            now, host_s = mark
            rate = (host_s - last.host_s) / _seconds(last.event, now)
            self._last = last = ClockComparison(now, host_s, last.at_s(now), rate)
        return last.at_s(event)


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3


def take_mark(stream: torch.cuda.Stream) -> Mark | None:
    """Return the mark of the fastest of several attempts, or None if the stream is busy.

    A thread that is interrupted during an attempt reads the host's clock late; the fastest attempt
    has the smallest error. torch's streams are shared, so the stream may have other work; this
    function does not wait for it.
    """
    tries = []
    for _ in range(_N_TRIES):
        event = torch.cuda.Event(enable_timing=True)
        begin_s = time.perf_counter()
        event.record(stream)
        while not event.query():
            if time.perf_counter() - begin_s > _MAX_TRY_S:
                return None
        now_s = time.perf_counter()
        tries.append((now_s - begin_s, event, now_s))
    _, event, now_s = min(tries, key=operator.itemgetter(0))
    return event, now_s


def current_handle(index: int) -> int:
    """Return the handle of the calling thread's current stream on a GPU.

    torch's stream objects cost several microseconds each.
    """
    return int(torch._C._cuda_getCurrentRawStream(index))


def queued_in(raw: torch.cuda.Stream) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the calling thread queues its work in a stream.

    A stream that is current already is not entered, because torch's context sets the stream twice.
    Most calls of the training thread are for its current stream.
    """
    is_current = current_handle(raw.device.index) == raw.cuda_stream
    return contextlib.nullcontext() if is_current else torch.cuda.stream(raw)


class TorchEvent:
    """Event of torch that is recorded once: a timed one, or any without ``CudaDriver``.

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
        self.handle: int = self.raw.cuda_event

    def sync(self) -> None:
        self.raw.synchronize()

    def is_done(self) -> bool:
        return bool(self.raw.query())

    def at_s(self) -> float:
        assert self._clock is not None
        return self._clock.at_s(self.raw)


class TimedDevice(Protocol):
    """Device with a driver, and with a clock for its events."""

    @property
    def clock(self) -> CudaClock: ...

    @property
    def engine_driver(self) -> CudaDriver | None: ...


class CudaStream:
    """Stream of torch. A device has one object for each.

    Args:
        raw: The torch stream.
        device: Device whose clock times the events of the stream.
    """

    def __init__(self, raw: torch.cuda.Stream, device: TimedDevice) -> None:
        self.raw = raw
        self.handle: int = raw.cuda_stream
        self._device = device
        self._driver = device.engine_driver

    def record(self, *, timed: bool = False) -> CudaEvent | TorchEvent:
        if self._driver is None or timed:
            return TorchEvent(self.raw, self._device.clock if timed else None)
        return self._driver.record(self.handle)

    def wait(self, event: CudaEvent | TorchEvent) -> None:
        if self._driver is not None:
            self._driver.wait(self.handle, event.handle)
        elif isinstance(event, TorchEvent):
            self.raw.wait_event(event.raw)
