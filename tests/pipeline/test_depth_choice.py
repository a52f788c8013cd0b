"""The choice between prefetching and the synchronous loop, from given times of the batches."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from pinfeed.pipeline.depth_choice import (
    MAX_ROUNDS,
    SHORT_STRETCH_BATCHES,
    WARM_UP_BATCHES,
    DepthChoice,
)
from pinfeed.pipeline.schedule import SHORT_BATCH_S, PrefetchSchedule, measured_schedule

MEASURED = PrefetchSchedule(2, n_readers=2, measures_depth=True)
SHORT_MEASURED = measured_schedule()


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
        """Run until the choice is made or changes."""
        before = str(self.choice)
        for _ in range(n_slots):
            way = self.choice.is_synchronous
            self.ways.append(way)
            for _ in range(self.n_per_slot):
                self.now += self.seconds(way, self.n_lent)
                self.n_lent += 1
            self.choice.count(self.n_per_slot, self.now)
            if str(self.choice) != before:
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
        ((1.32e-3, 0.95e-3), "depth=0: 0.95 ms per batch, 1.32 ms with depth=2"),
        ((5e-3, 6e-3), "depth=2: 5 ms per batch, 6 ms with depth=0"),
        ((1.0, 1.0), "depth=2: 1,000 ms per batch, 1,000 ms with depth=0"),
        ((1e-3, 0.96e-3), "depth=2: 1 ms per batch, 0.96 ms with depth=0"),
        ((1e-3, 0.94e-3), "depth=0: 0.94 ms per batch, 1 ms with depth=2"),
    ],
)
def test_the_faster_way_is_kept_with_a_margin_for_prefetching(
    caplog: pytest.LogCaptureFixture, times_s: tuple[float, float], expected: str
) -> None:
    caplog.set_level(logging.INFO, "pinfeed")
    choice = Loop(even(*times_s)).run().choice
    assert choice.reason == str(choice) == expected
    assert choice.is_synchronous == expected.startswith("depth=0")
    assert choice.depth == int(expected[len("depth=")])
    assert [record.getMessage() for record in caplog.records] == [f"depth=None chose {expected}"]


@pytest.mark.parametrize(
    ("times_s", "expected", "expected_if_short"),
    [
        ((1e-4, 0.94e-4), 0, 0),
        ((1e-4, 0.96e-4), 2, 0),
        ((1e-4, 1e-4), 2, 0),
        ((0.96e-4, 1e-4), 2, 0),
        ((0.94e-4, 1e-4), 2, 2),
    ],
)
def test_in_doubt_only_loops_of_any_length_prefetch(
    times_s: tuple[float, float], expected: int, expected_if_short: int
) -> None:
    assert Loop(even(*times_s)).run().choice.depth == expected
    short = Loop(even(*times_s), SHORT_MEASURED).run().choice
    assert short.depth == expected_if_short


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
    assert str(choice).startswith("depth=2: 1,000 ms")


def test_a_loop_whose_times_vary_is_judged_by_the_medians() -> None:
    """Some measurements of the faster loop are slower than the slowest of the other loop."""
    times = even(1.2, 1.0)
    loop = Loop(lambda way, i: times(way, i) * (3 if i // 30 % 3 == 1 else 1)).run()
    assert str(loop.choice).startswith("depth=0")
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

    assert str(Loop(seconds).run().choice).startswith("depth=2: 1,000 ms per batch, 2,000 ms")


def test_slots_of_several_batches() -> None:
    schedule = PrefetchSchedule(11, batches_per_slot=4, measures_depth=True)
    choice = Loop(even(0.3, 0.2), schedule).run().choice
    assert str(choice) == "depth=0: 200 ms per batch, 300 ms with depth=11"
    assert choice.depth == 0


def test_a_stretch_has_a_turn_of_all_slots() -> None:
    """Two of four slots follow each other at once, because two threads have filled them."""
    schedule = PrefetchSchedule(31, batches_per_slot=8, measures_depth=True)

    def seconds(way: bool, i: int) -> float:
        return 0.7 if way else (1.0 if i // 8 % 4 < 2 else 0.0)

    assert str(Loop(seconds, schedule).run().choice).startswith("depth=31: 500 ms per batch")


def test_long_batches_are_never_gathered_synchronously() -> None:
    loop = Loop(even(2 * SHORT_BATCH_S, 0.0), SHORT_MEASURED).run()
    assert loop.choice.reason == "depth=2: 4 ms per batch; depth=0 is timed only below 2 ms"
    assert loop.n_lent == WARM_UP_BATCHES + SHORT_STRETCH_BATCHES
    assert loop.run(100).n_synchronous == 0
    assert loop.choice.depth == SHORT_MEASURED.depth


def test_batches_that_become_short_are_measured() -> None:
    loop = Loop(even(2 * SHORT_BATCH_S, 0.0), SHORT_MEASURED).run(100)
    loop.seconds = even(1e-3, 0.5e-3)
    for _ in range(2):
        loop.run()
    assert loop.choice.reason == "depth=0: 0.5 ms per batch, 1 ms with depth=2"


@pytest.mark.parametrize("pause_at", [0, 8, 30])
def test_a_pause_does_not_make_short_batches_long(pause_at: int) -> None:
    times = even(1e-3, 0.5e-3)
    loop = Loop(lambda way, i: times(way, i) + (i == pause_at), SHORT_MEASURED)
    while loop.choice.is_measuring:
        loop.run()
    assert str(loop.choice).startswith("depth=0")


def chosen_synchronous() -> Loop:
    loop = Loop(even(1e-3, 0.5e-3), SHORT_MEASURED).run()
    assert loop.choice.depth == 0
    loop.ways.clear()
    return loop


def test_a_synchronous_loop_whose_batches_become_long_prefetches() -> None:
    loop = chosen_synchronous()
    loop.seconds = even(0.0, 5e-3)
    assert loop.run().choice.depth == SHORT_MEASURED.depth
    assert loop.ways == 2 * SHORT_STRETCH_BATCHES * [True]
    assert not loop.choice.is_synchronous
    assert loop.choice.reason == "depth=2: 5 ms per batch; depth=0 is timed only below 2 ms"


def test_a_synchronous_epoch_prefetches_once_batches_are_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pinfeed")
    loop = chosen_synchronous()
    loop.choice.begin()
    loop.seconds = even(0.0, 5e-3)
    assert loop.run().choice.depth == SHORT_MEASURED.depth
    assert caplog.messages[-1] == "depth=None prefetches again, because batches take 5 ms"
    reason = "depth=2: 5 ms per batch; depth=0 is timed only below 2 ms"
    assert loop.choice.reason == reason
    loop.choice.begin()
    assert not loop.choice.is_synchronous
    loop.seconds = even(0.2e-3, 0.1e-3)
    while loop.choice.is_measuring:
        loop.run()
    assert loop.choice.reason == "depth=0: 0.1 ms per batch, 0.2 ms with depth=2"


def test_a_pause_does_not_end_the_synchronous_loop() -> None:
    loop = chosen_synchronous()
    loop.seconds = lambda way, i: 0.5e-3 + (i % 60 == 0)
    assert loop.run(200).choice.depth == 0
    assert all(loop.ways)


def test_short_epochs_measure_together() -> None:
    """Each epoch begins untimed. An epoch that is too short or is left changes nothing."""
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
    assert str(loop.choice) == "depth=0: 500 ms per batch, 1,000 ms with depth=2"


def end_epochs(loop: Loop, n_epochs: int, n_batches: int) -> list[int]:
    """Run whole epochs; return their depths."""
    depths = []
    for _ in range(n_epochs):
        depths.append(loop.choice.depth)
        loop.choice.begin()
        begun_s = loop.now
        loop.run(n_batches)
        loop.choice.end(n_batches, loop.now - begun_s)
    return depths


@pytest.mark.parametrize(
    ("times_s", "chosen"),
    [
        ((1e-3, 0.5e-3), "depth=0: 0.5 ms per batch, 1 ms with depth=2"),
        ((0.5e-3, 1e-3), "depth=2: 0.5 ms per batch, 1 ms with depth=0"),
    ],
)
def test_epochs_of_few_batches_are_stretches(times_s: tuple[float, float], chosen: str) -> None:
    """The cost of threads counts, too: an epoch that is timed as synchronous has no threads."""
    loop = Loop(even(*times_s), SHORT_MEASURED)
    assert end_epochs(loop, 5, 8) == [2, 2, 0, 2, 0]
    assert str(loop.choice) == chosen
    assert end_epochs(loop, 2, 8) == 2 * [int(chosen[len("depth=")])]
    assert loop.choice.is_synchronous == chosen.startswith("depth=0")


def test_epochs_of_few_long_batches_are_prefetched() -> None:
    loop = Loop(even(1.0, 0.5), SHORT_MEASURED)
    assert end_epochs(loop, 9, 8) == 9 * [2]
    assert loop.choice.reason == "depth=2: 1,000 ms per batch; depth=0 is timed only below 2 ms"


def test_epochs_of_few_batches_that_become_long_are_prefetched() -> None:
    loop = Loop(even(1e-3, 0.5e-3), SHORT_MEASURED)
    end_epochs(loop, 6, 8)
    loop.seconds = even(0.5, 1.0)
    assert end_epochs(loop, 4, 8) == [0, 0, 2, 2]


def test_epochs_of_many_batches_follow_those_of_few() -> None:
    """An epoch of many batches, which begins as the synchronous one, is measured on its own."""
    loop = Loop(even(1e-3, 0.5e-3), SHORT_MEASURED)
    depths = end_epochs(loop, 2, 8) + end_epochs(loop, 2, 60)
    assert depths[:3] == [2, 2, 0]
    loop.run()
    assert not loop.choice.is_measuring
    assert loop.choice.depth == 0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_given_depth_is_not_measured(depth: int) -> None:
    schedule = PrefetchSchedule(depth)
    loop = Loop(even(2.0, 1.0), schedule).run(100)
    assert set(loop.ways) == {depth == 0}
    assert str(loop.choice) == f"depth={depth}"
    assert not loop.choice.reason
    assert not loop.choice.is_wait_expected


def test_waiting_is_excused_only_while_both_ways_are_timed() -> None:
    found: list[Any] = []
    for times_s in ((1.0, 2.0), (2.0, 1.0)):
        loop = Loop(even(*times_s))
        found.append((loop.choice.is_wait_expected, str(loop.choice)))
        found.append(loop.run().choice.is_wait_expected)
    measuring = (True, "depth=2, not measured yet")
    assert found == [measuring, False, measuring, False]


def test_a_measuring_loop_excuses_only_synchronous_batches() -> None:
    loop = Loop(even(1e-3, 0.5e-3), SHORT_MEASURED)
    assert not loop.choice.is_wait_expected
    loop.run(WARM_UP_BATCHES + 2 * SHORT_STRETCH_BATCHES)
    assert (loop.choice.is_synchronous, loop.choice.is_wait_expected) == (True, True)
    assert not loop.run().choice.is_wait_expected
