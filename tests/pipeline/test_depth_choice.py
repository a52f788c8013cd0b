"""The choice between prefetching and the synchronous loop, from given times of the batches."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from pinfeed.pipeline.depth_choice import MAX_ROUNDS, WARM_UP_BATCHES, DepthChoice
from pinfeed.pipeline.schedule import PrefetchSchedule

MEASURED = PrefetchSchedule(2, n_readers=2, is_measured=True)


class Loop:
    """A loop that never ends, whose batches take the time that ``seconds`` returns."""

    def __init__(
        self, seconds: Callable[[bool, int], float], schedule: PrefetchSchedule = MEASURED
    ) -> None:
        self.choice = DepthChoice(schedule)
        self.seconds = seconds
        self.n_per_slot = schedule.batches_per_slot
        self.now = 0.0
        self.n_lent = 0
        self.ways: list[bool] = []
        """For each slot whether the loop was synchronous."""
        self.choice.begin()

    def run(self, n_slots: int = 500) -> "Loop":
        """Run until the choice is made."""
        for _ in range(n_slots):
            way = self.choice.is_synchronous
            self.ways.append(way)
            for _ in range(self.n_per_slot):
                self.now += self.seconds(way, self.n_lent)
                self.n_lent += 1
            if self.choice.count(self.n_per_slot, self.now):
                break
        return self

    @property
    def n_synchronous(self) -> int:
        return sum(self.ways) * self.n_per_slot


def even(ahead_s: float, synchronous_s: float) -> Callable[[bool, int], float]:
    return lambda is_synchronous, _: synchronous_s if is_synchronous else ahead_s


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ((1.32e-3, 0.95e-3), "0 ahead: 0.95 ms per batch, 1.32 ms with 2 ahead"),
        ((5e-3, 6e-3), "2 ahead: 5 ms per batch, 6 ms with 0 ahead"),
        ((1.0, 1.0), "2 ahead: 1,000 ms per batch, 1,000 ms with 0 ahead"),
        ((1e-3, 0.96e-3), "2 ahead: 1 ms per batch, 0.96 ms with 0 ahead"),
        ((1e-3, 0.94e-3), "0 ahead: 0.94 ms per batch, 1 ms with 2 ahead"),
    ],
)
def test_the_faster_way_is_kept_with_a_margin_for_prefetching(
    caplog: pytest.LogCaptureFixture, times_s: tuple[float, float], expected: str
) -> None:
    caplog.set_level(logging.INFO, "pinfeed")
    choice = Loop(even(*times_s)).run().choice
    assert choice.reason == str(choice) == expected
    assert choice.is_synchronous == expected.startswith("0")
    assert choice.schedule.depth == int(expected[0])
    assert [record.getMessage() for record in caplog.records] == [f"depth=None chose {expected}"]


@pytest.mark.parametrize(("times_s", "n_batches"), [((1, 2), 44), ((2, 1), 44), ((1, 0.97), 110)])
def test_a_measurement_is_short(times_s: tuple[float, float], n_batches: int) -> None:
    loop = Loop(even(*times_s)).run()
    assert not loop.choice.is_measuring
    assert loop.n_lent <= n_batches
    assert loop.n_synchronous <= 0.46 * n_batches
    assert not any(loop.ways[: WARM_UP_BATCHES + 6])


def test_a_pause_of_the_training_step_does_not_decide() -> None:
    """The pause is in the first stretch with prefetching, which is faster."""
    times = even(1.0, 1.5)
    choice = Loop(lambda way, i: times(way, i) + 60.0 * (i == 8)).run().choice
    assert str(choice).startswith("2 ahead: 1,000 ms")


def test_a_loop_whose_times_vary_is_judged_by_the_medians() -> None:
    """Stretches of the faster way are at times slower than the slowest of the other."""
    times = even(1.2, 1.0)
    loop = Loop(lambda way, i: times(way, i) * (3 if i // 30 % 3 == 1 else 1)).run()
    assert str(loop.choice).startswith("0 ahead")
    assert len(loop.choice._ahead_s) == len(loop.choice._synchronous_s) <= MAX_ROUNDS


def test_batches_around_a_change_do_not_count() -> None:
    """The batches that were gathered ahead are lent at once, and filling the slots takes long."""
    since = 0
    last = False

    def seconds(way: bool, i: int) -> float:
        nonlocal since, last
        since = 0 if way != last else since + 1
        last = way
        if since < 4:
            return 0.0 if way else 50.0
        return 2.0 if way else 1.0

    assert str(Loop(seconds).run().choice).startswith("2 ahead: 1,000 ms per batch, 2,000 ms")


def test_slots_of_several_batches() -> None:
    schedule = PrefetchSchedule(11, batches_per_slot=4, is_measured=True)
    choice = Loop(even(0.3, 0.2), schedule).run().choice
    assert str(choice) == "0 ahead: 200 ms per batch, 300 ms with 11 ahead"
    assert choice.schedule == PrefetchSchedule(0, batches_per_slot=4, is_measured=True)


def test_short_epochs_measure_together() -> None:
    """Each epoch begins untimed. An epoch too short for one stretch changes nothing."""
    loop = Loop(even(1.0, 0.5))
    for _ in range(50):
        loop.choice.begin()
        loop.run(10)
    assert loop.choice.is_measuring
    assert not any(loop.ways)
    n_epochs = 0
    while loop.choice.is_measuring:
        loop.choice.begin()
        loop.run(20)
        n_epochs += 1
    assert n_epochs <= 4
    assert str(loop.choice) == "0 ahead: 500 ms per batch, 1,000 ms with 2 ahead"


@pytest.mark.parametrize("depth", [0, 2])
def test_a_given_depth_is_not_measured(depth: int) -> None:
    schedule = PrefetchSchedule(depth)
    loop = Loop(even(2.0, 1.0), schedule).run(100)
    assert loop.choice.schedule is schedule
    assert set(loop.ways) == {depth == 0}
    assert str(loop.choice) == f"{depth} ahead"
    assert not loop.choice.reason
    assert not loop.choice.excuses_waiting


def test_waiting_is_excused_while_both_ways_are_timed_and_in_the_synchronous_loop() -> None:
    found: list[Any] = []
    for times_s in ((1.0, 2.0), (2.0, 1.0)):
        loop = Loop(even(*times_s))
        found.append((loop.choice.excuses_waiting, str(loop.choice)))
        found.append(loop.run().choice.excuses_waiting)
    measuring = (True, "2 ahead, not measured yet")
    assert found == [measuring, False, measuring, True]
