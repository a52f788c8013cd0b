"""The statistics divide the time of a loop into waits for data, overhead and training steps."""

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.internals import counters_of, runner_of
from support.simulated_loops import Clock, Slow, simulated

from pinfeed import Feeder
from pinfeed.devices.cpu import HostDevice
from pinfeed.memory.pages import BufferPool
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.testing import favour
from pinfeed.threads.call import Call

N = 6
READ_S = 1.0
ALLOCATE_S = 0.5
HAND_OVER_S = 0.125
STEP_S = 4.0
FREE_S = 0.0625
JOIN_S = 8.0


class SteppedWorkers:
    """Workers that make their calls when the test says so, or when a thread waits for them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: deque[Call[Any]] = deque()

    def submit(self, fn: Any, /, *args: Any) -> "SteppedCall":
        self.calls.append(Call(fn, *args))
        return SteppedCall(self, self.calls[-1])

    def shutdown(self, wait: bool = True) -> None:
        self.work()
        self.clock.pass_s(JOIN_S)

    def work(self, last: Call[Any] | None = None) -> None:
        """Make the calls that were submitted, until ``last`` was made."""
        while self.calls and not (last and last.done()):
            self.calls.popleft().run()


class SteppedCall:
    """A call of SteppedWorkers."""

    def __init__(self, workers: SteppedWorkers, call: Call[Any]) -> None:
        self._workers = workers
        self._call = call
        self.done = call.done

    def exception(self) -> BaseException | None:
        self._workers.work(self._call)
        return self._call.exception()

    def result(self) -> Any:
        self._workers.work(self._call)
        return self._call.result()


class SlowPool(BufferPool):
    """A pool in which freeing a block takes time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(4)
        self._clock = clock
        self._give_at_once, self._give = self._give, self._give_slowly

    def _give_slowly(self, loan: Any) -> None:
        self._clock.pass_s(FREE_S)
        self._give_at_once(loan)


class SteppedDevice(HostDevice):
    """A CPU with worker threads that work when the test says so, and with slow allocation."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.workers: dict[str, SteppedWorkers] = {}

    def worker(self, name: str, n_threads: int = 1) -> Any:
        self.workers[name] = SteppedWorkers(self.clock)
        return self.workers[name]

    def empty(self, nbytes: int, stream: Any) -> Any:
        self.clock.pass_s(ALLOCATE_S)
        return super().empty(nbytes, stream)


class Loop:
    """A feeder with known times, and a loop over it that measures its own time."""

    def __init__(self, depth: int | None, *, scatter_s: float = 0.0) -> None:
        self.clock = Clock()
        self.device = SteppedDevice(self.clock)
        store = Slow(np.zeros((10 * N, 3), np.float32), self.clock, READ_S, scatter_s)
        self.feeder = Feeder(
            store, batch_size=10, depth=depth, device=self.device, timeline=True, progress=True
        )
        counters_of(self.feeder).now = self.clock
        self.waited_s = 0.0

    def batches(self) -> Iterator[Any]:
        """Yield the batches, and measure how long the loop waits for each."""

        def hand_over(lent: LentBatch) -> Any:
            self.clock.pass_s(HAND_OVER_S)
            return lent.take()

        asked = self.clock.s
        for batch in runner_of(self.feeder).run(hand_over):
            self.waited_s += self.clock.s - asked
            yield batch
            asked = self.clock.s
        self.waited_s += self.clock.s - asked

    def step(self, *, reads: bool) -> None:
        """Pass the time of a training step, in which the reader threads may read."""
        end = self.clock.s + STEP_S
        if reads:
            self.device.workers["pinfeed-read"].work()
        self.clock.s = end


@pytest.mark.parametrize(
    ("depth", "reads", "wait_s", "overhead_s", "bottleneck"),
    [
        # The first request waits for a batch, which takes memory and is read. The others find
        # theirs ready. The last one finds no batch, and joins the threads.
        (2, True, 1.5, 6 * 0.125 + JOIN_S, "overhead"),
        # Each batch is read when the loop asks for it.
        (2, False, 6 * 1.5, 6 * 0.125 + JOIN_S, "unevenness"),
        (0, False, 6 * 1.5, 6 * 0.125, "reading"),
    ],
)
def test_time_is_divided_exactly(
    depth: int, reads: bool, wait_s: float, overhead_s: float, bottleneck: str
) -> None:
    loop = Loop(depth)
    for _ in loop.batches():
        loop.step(reads=reads)
    stats = loop.feeder.stats
    assert (stats.wait_s, stats.overhead_s, stats.write_wait_s) == (wait_s, overhead_s, 0.0)
    assert stats.wait_s + stats.overhead_s == stats.starved_s == loop.waited_s
    assert stats.compute_s == N * STEP_S
    assert stats.seconds == loop.clock.s
    assert stats.starved == loop.waited_s / loop.clock.s
    assert stats.late == (1 if reads else N)
    assert stats.bottleneck == bottleneck
    loop.feeder.close()


@pytest.mark.parametrize("depth", [0, 1, 3, None])
def test_a_timeline_divides_time_as_the_statistics_do(depth: int | None) -> None:
    loop = Loop(depth)
    for number, _ in enumerate(loop.batches()):
        loop.step(reads=depth != 0 and number % 2 == 0)
    stats = loop.feeder.stats
    spent = dict.fromkeys(("wait", "lend", "compute"), 0.0)
    for span in loop.feeder.timeline.spans:
        if span.lane in spent:
            spent[span.lane] += span.end_s - span.start_s
    # The last request has no batch, and no spans.
    end_s = loop.clock.s - max(span.end_s for span in loop.feeder.timeline.spans)
    assert spent["compute"] == stats.compute_s
    assert spent["wait"] + spent["lend"] + end_s == stats.starved_s
    loop.feeder.close()


def test_a_loop_that_drops_its_batches_frees_them_in_requests() -> None:
    """No more than two batches exist at a time: the one of the step, and the one before it."""
    loop = Loop(2)
    loop.device._pool = SlowPool(loop.clock)
    alive: list[weakref.ref[Any]] = []
    for batch in loop.batches():
        alive.append(weakref.ref(batch))
        assert sum(one() is not None for one in alive) == min(2, len(alive))
        loop.step(reads=True)
    stats = loop.feeder.stats
    # All batches but the last one.
    freeing_s = (N - 1) * FREE_S
    assert stats.starved_s == loop.waited_s == 1.5 + 6 * 0.125 + freeing_s + JOIN_S
    assert stats.compute_s == N * STEP_S
    loop.feeder.close()


def test_statistics_within_a_loop_divide_all_time() -> None:
    loop = Loop(2)
    for _ in loop.batches():
        stats = loop.feeder.stats
        assert stats.seconds == stats.wait_s + stats.overhead_s + stats.compute_s == loop.clock.s
        loop.step(reads=True)
        assert loop.feeder.stats.compute_s == stats.compute_s + STEP_S
    loop.feeder.close()


def test_a_loop_that_is_left_has_waited_for_its_threads() -> None:
    loop = Loop(2)
    for _ in loop.feeder:
        loop.step(reads=True)
        break
    assert loop.feeder.stats.compute_s == STEP_S
    assert loop.feeder.stats.overhead_s == JOIN_S
    loop.feeder.close()


def test_writes_that_the_end_of_a_loop_waits_for() -> None:
    loop = Loop(2, scatter_s=0.25)
    for batch in loop.feeder.batches():
        batch.write_back(batch.data)
        loop.step(reads=False)
    stats = loop.feeder.stats
    assert stats.write_wait_s == N * 0.25
    # The copy that write_back makes is a part of the step, and takes memory.
    assert stats.compute_s == N * (STEP_S + ALLOCATE_S)
    parts = (stats.wait_s, stats.overhead_s, stats.write_wait_s, stats.compute_s)
    assert sum(parts) == stats.seconds == loop.clock.s
    loop.feeder.close()


@pytest.mark.parametrize(("fast", "is_idle"), [((), False), (("compute",), True)])
def test_overhead_counts_only_where_the_device_has_nothing_to_do(
    fast: tuple[str, ...], is_idle: bool
) -> None:
    feeder, clock, device = simulated(favour("read", "pinfeed-read", *fast), n=8)
    empty = device.empty

    def slow(nbytes: int, stream: Any) -> Any:
        clock.pass_s(ALLOCATE_S)
        return empty(nbytes, stream)

    device.empty = slow
    for batch in feeder:
        device.launch(lambda _: None, batch)
        clock.pass_s(STEP_S)
    stats = feeder.stats
    assert stats.overhead_s >= 7 * ALLOCATE_S
    # In both cases, the device has no work before the first batch.
    assert (stats.starved_s > stats.first_batch_s > 0) == is_idle
    assert stats.compute_s == 8 * STEP_S
    feeder.close()
