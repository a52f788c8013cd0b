"""Row loops without a depth: the measured choice, and loops that change between both ways.

A loop that changes gives the results of the synchronous loop, and ends in the same way.
"""

import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth_choices import script
from support.internals import choice_of, counters_of
from support.schedules import corners
from support.simranks import RankThreads
from support.simulated_loops import Clock
from support.table_runs import MIXED, PLAIN, check, looked_up

from pinfeed import ArrayStore, HostEmbedding, RowOptimizer, ShardedEmbedding, train_rows
from pinfeed.errors import ClosedError
from pinfeed.testing.simtorch import SimTorchDevice
from pinfeed.training.row_loop.loop import RowLoop

N = 40
WAYS = {
    "synchronous": [True],
    "synchronous from batch 6 on": 5 * [False] + [True],
    "back and forth": 10 * [False, False, False, False, True, True, True],
}
CORNERS = corners({"compute": (20, 150), "read": (9, 30)})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread, because more of them slow down work on small tensors."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


class Training:
    """A table, and a loop over it whose batches share rows with those before."""

    def __init__(
        self, n: int, depth: int | None = None, store: Any = ArrayStore, **options: Any
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.loader: Any = [torch.randint(N, (7,), generator=generator) for _ in range(n)]
        self.array = np.random.default_rng(1).standard_normal((N, 3)).astype(np.float32)
        self.table = HostEmbedding(N, 3, store=store(self.array), name="table")
        self.optimizer = RowOptimizer(torch.optim.SGD, [self.table], lr=0.1, momentum=0.9)
        self.drawn_by: list[str] = []
        """For each batch the name of the thread that has asked for its ids."""
        self.loop = self.loop_over(self.loader, depth, **options)

    def loop_over(self, loader: Any, depth: int | None = None, **options: Any) -> RowLoop:
        options = {"optimizer": self.optimizer, "device": "cpu", **options}
        return train_rows(loader, {self.table: self.ids}, depth=depth, **options)

    def ids(self, batch: Any) -> Any:
        self.drawn_by.append(threading.current_thread().name)
        return batch

    def step(self, batch: Any) -> None:
        self.table(batch).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self) -> None:
        for batch in self.loop:
            self.step(batch)


def synchronous(n: int, n_epochs: int = 1) -> np.ndarray:
    """Return the table after epochs of the synchronous loop."""
    training = Training(n, depth=0)
    for _ in range(n_epochs):
        training.epoch()
    return training.array


def synchronous_after(n: int, n_done: int) -> np.ndarray:
    """Return the table after some batches of the synchronous loop."""
    training = Training(n, depth=0)
    for batch in training.loop_over(training.loader[:n_done], 0):
        training.step(batch)
    return training.array


def pinfeed_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("pinfeed")]


@pytest.mark.parametrize(
    ("ahead_s", "synchronous_s", "expected"),
    [
        (1.32e-3, 0.95e-3, "depth=0: 0.95 ms per batch, 1.32 ms with depth=2"),
        (0.002, 0.003, "depth=2: 2 ms per batch, 3 ms with depth=0"),
    ],
)
def test_a_loop_keeps_the_faster_way(
    caplog: pytest.LogCaptureFixture, ahead_s: float, synchronous_s: float, expected: str
) -> None:
    caplog.set_level(logging.INFO, "pinfeed")
    training = Training(60)
    loop = training.loop
    counters_of(loop).now = clock = Clock()
    choice = choice_of(loop)
    assert loop.depth_reason == "depth=2, not measured yet"
    for batch in loop:
        clock.pass_s(synchronous_s if choice.is_synchronous else ahead_s)
        training.step(batch)
    assert loop.depth_reason == expected
    assert repr(loop).endswith(f"batches on cpu, {expected}>")
    assert f"depth=None chose {expected}" in [record.getMessage() for record in caplog.records]
    assert loop.stats.depth == int(expected[len("depth=")])
    is_synchronous = expected.startswith("depth=0")
    assert (training.drawn_by[-1] == "MainThread") == is_synchronous
    for batch in loop:
        assert bool(pinfeed_threads()) != is_synchronous
        training.step(batch)
    np.testing.assert_array_equal(training.array, synchronous(60, 2))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_given_depth_is_kept(depth: int) -> None:
    loop = Training(1, depth).loop
    assert not loop.depth_reason
    assert repr(loop).endswith(f"depth={depth}>")


def test_verified_and_sharded_loops_prefetch_two_batches() -> None:
    training = Training(9, verify=True)
    ranks = RankThreads(1)
    table = ShardedEmbedding(N, 3, process_group=ranks.groups[0], name="sharded")
    sharded = train_rows([torch.tensor([1])], {table: lambda batch: batch}, device="cpu")
    for loop in (training.loop, sharded):
        assert not loop.depth_reason
        assert repr(loop).endswith("depth=2>")


def test_who_fills_the_slots_of_a_loop_that_changes() -> None:
    """The batches that were drawn ahead are lent first, and all slots are filled ahead again."""
    training = Training(12)
    script(training.loop, [False, True, True, True, True, True, False])
    n_drawn = []
    for batch in training.loop:
        n_drawn.append(len(training.drawn_by))
        training.step(batch)
    assert [name == "MainThread" for name in training.drawn_by] == [
        *3 * [False],
        *3 * [True],
        *6 * [False],
    ]
    assert n_drawn[2:6] == [3, 4, 5, 6]
    np.testing.assert_array_equal(training.array, synchronous(12))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 2, 4, 6, 7, 20])
def test_epochs_of_any_length(n: int, way: str) -> None:
    training = Training(n)
    script(training.loop, WAYS[way])
    for _ in range(2):
        training.epoch()
    assert not pinfeed_threads()
    np.testing.assert_array_equal(training.array, synchronous(n, 2))


table_batches = st.lists(st.integers(1, 5).flatmap(looked_up), min_size=1, max_size=7)


@given(
    st.lists(st.integers(0, 5), max_size=400),
    table_batches,
    st.lists(st.booleans(), max_size=7),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["momentum", "Adam", "Pulled"]),
)
@settings(max_examples=40, deadline=None)
def test_any_schedule(
    moves: list[int], batches: Any, ways: list[bool], depth: int, direct: bool, optimizer: str
) -> None:
    coming = iter(moves)

    def choose(ready: Any) -> str | None:
        return next(iter([None, *ready][next(coming, 0) :]), None)

    device = SimTorchDevice(choose, direct=direct)
    check(device, depth, optimizer, batches, does=MIXED, ways=ways)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("number", "corner"), list(enumerate(CORNERS)))
def test_corner_schedules(number: int, corner: str) -> None:
    """Every schedule meets both devices and both loops, and every other one each pair of them."""
    loops = [(MIXED, None), (PLAIN, 5)]
    ways = [[False, False, True], [True, True, False, False, True]]
    for direct in (False, True):
        does, stop_after = loops[(number + direct) % 2]
        device = SimTorchDevice(CORNERS[corner](), direct=direct)
        check(device, 2, "momentum", does=does, stop_after=stop_after, ways=ways[direct])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [0, 2, 5, 8, 11])
def test_an_error_of_the_loader_is_raised_at_its_batch(bad: int, way: str) -> None:
    training = Training(12)

    def batches() -> Iterator[Any]:
        yield from training.loader[:bad]
        raise OSError("the loader failed")

    n_done = 0
    with training.loop_over(batches()) as loop, pytest.raises(OSError, match="loader failed"):
        script(loop, WAYS[way])
        for batch in loop:
            training.step(batch)
            n_done += 1
    assert n_done == bad
    assert not pinfeed_threads()
    training.table.require_idle()
    np.testing.assert_array_equal(training.array, synchronous_after(12, bad))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [0, 3, 5, 6, 8])
def test_an_error_of_a_write_back_ends_the_loop(bad: int, way: str) -> None:
    class Failing(ArrayStore):
        left = bad

        def scatter(self, rows: Any, values: Any) -> None:
            if not self.left:
                raise OSError("the disk is full")
            self.left -= 1
            super().scatter(rows, values)

    training = Training(12, store=Failing)
    script(training.loop, WAYS[way])
    with pytest.raises(OSError, match="the disk is full"):
        training.epoch()
    assert not pinfeed_threads()
    training.table.require_idle()
    np.testing.assert_array_equal(training.array, synchronous_after(12, bad))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ends", ["break", "error", "interrupt", "close", "dropped"])
def test_a_loop_that_is_left(ends: str, way: str) -> None:
    training = Training(12)
    loop = training.loop
    script(loop, WAYS[way])
    batches = iter(loop)
    n_done = 0
    while n_done < 8:
        training.step(next(batches))
        n_done += 1
    if ends == "close":
        loop.close()
    elif ends in ("error", "interrupt"):
        raised = KeyboardInterrupt if ends == "interrupt" else ValueError
        with pytest.raises(raised):
            batches.throw(raised)
    del batches
    assert not pinfeed_threads()
    training.table.require_idle()
    np.testing.assert_array_equal(training.array, synchronous_after(12, 8))


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_of_a_gather_in_the_loops_thread(way: str) -> None:
    training = Training(12)
    loop = training.loop
    script(loop, WAYS[way])
    store = training.table.store
    gather = store.gather
    n_done = 0

    def interrupted(rows: Any, out: Any) -> None:
        if threading.current_thread() is threading.main_thread() and n_done >= 6:
            raise KeyboardInterrupt
        gather(rows, out)

    store.gather = interrupted
    with pytest.raises(KeyboardInterrupt):
        for batch in loop:
            training.step(batch)
            n_done += 1
    assert n_done in (6, 7)
    store.gather = gather
    assert not pinfeed_threads()
    training.table.require_idle()
    np.testing.assert_array_equal(training.array, synchronous_after(12, n_done))


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_that_another_thread_closes(way: str) -> None:
    training = Training(12)
    loop = training.loop
    script(loop, WAYS[way])
    batches = iter(loop)
    for _ in range(8):
        training.step(next(batches))
    thread = threading.Thread(target=loop.close)
    thread.start()
    thread.join()
    with pytest.raises(ClosedError, match="another thread closed"):
        next(batches)
    training.table.require_idle()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_done", [1, 5, 7, 9, 12])
def test_a_loop_that_is_saved_and_resumed(n_done: int, way: str) -> None:
    training = Training(12)
    script(training.loop, WAYS[way])
    state: Any = None
    for i, batch in enumerate(training.loop, 1):
        training.step(batch)
        if i == n_done:
            training.loop.flush_writes()
            state = training.loop.state_dict()
            break
    again = training.loop_over(training.loader)
    again.load_state_dict(state)
    script(again, WAYS[way])
    for batch in again:
        training.step(batch)
    # A loop that was saved after its last batch begins the next epoch.
    np.testing.assert_array_equal(training.array, synchronous(12, 1 + (n_done == 12)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_forked_process_does_not_continue_a_loop(way: str) -> None:
    training = Training(12)
    script(training.loop, WAYS[way])
    batches = iter(training.loop)
    for _ in range(8):
        training.step(next(batches))
    child = os.fork()
    if not child:
        try:
            next(batches)
        except ClosedError as error:
            os._exit("forked" not in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for batch in batches:
        training.step(batch)
    np.testing.assert_array_equal(training.array, synchronous(12))
