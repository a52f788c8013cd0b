"""Continuous loops: the first batches of the next epoch are read before an epoch ends."""

import contextlib
import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import mover_of, runner_of

from pinfeed import ArgumentError, ArrayStore, Feeder, NpyStore, Ranks, rows, wrap_readers
from pinfeed.rows.orders import known
from pinfeed.stores.paths import file_key, written_maps
from pinfeed.testing import SimDevice, favour, lazy

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
N = 40
SIZE = 4
N_BATCHES = 10
WAIT_S = 30


class Watched(ArrayStore):
    """Rows that count the gathers, which wait for ``go_on``; some rows cannot be read."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.has_gathered = threading.Condition()
        self.n_gathered = 0
        self.bad: set[int] = set()

    def gather(self, rows: Any, out: Any) -> None:
        with self.has_gathered:
            self.n_gathered += 1
            self.has_gathered.notify_all()
        if not self.bad.isdisjoint(rows.tolist()):
            raise OSError(f"bad rows {rows.tolist()}")
        super().gather(rows, out)

    def wait_for(self, n: int) -> bool:
        """Wait until ``n`` gathers have begun; return whether they have."""
        with self.has_gathered:
            return self.has_gathered.wait_for(lambda: self.n_gathered >= n, WAIT_S)


def numbers(n: int = N) -> np.ndarray:
    return np.arange(n, dtype=np.float32)[:, None]


def threads_left() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("pinfeed")]


def is_paused(feeder: Any) -> bool:
    """Return whether a loop waits for its next epoch."""
    return runner_of(feeder)._paused is not None


def epoch(feeder: Any) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in feeder]


def expected(number: int, *, seed: int = 0, size: int = SIZE, n: int = N) -> list[list[float]]:
    """Return the batches of a shuffled epoch, as the synchronous loop makes them."""
    with Feeder(numbers(n), batch_size=size, depth=0, shuffle=True, seed=seed) as feeder:
        feeder.set_epoch(number)
        return epoch(feeder)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", numbers())
    return tmp_path / "x.npy"


def of_file(path: Path, **options: Any) -> Any:
    """Return a feeder of a file, whose rows reader threads copy, because it has ranks."""
    ranks = Ranks("pad", rank=0, world_size=1)
    defaults: dict[str, Any] = {"batch_size": SIZE, "depth": 2, "device": "cpu", "ranks": ranks}
    return Feeder(str(path), **(defaults | options))


# ---- what is read ahead --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("n_epochs", [1, 3])
def test_the_next_epoch_is_read_before_one_ends(depth: int, n_epochs: int) -> None:
    store = Watched(numbers())
    with Feeder(
        store, batch_size=SIZE, depth=depth, device="cpu", shuffle=True, continuous=True
    ) as feeder:
        for number in range(n_epochs):
            found = []
            for batch in feeder:
                found.append(batch.flatten().tolist())
                if len(found) == N_BATCHES:
                    assert store.wait_for((number + 1) * N_BATCHES + depth)
            assert found == expected(number)
            assert is_paused(feeder)
        assert threads_left()
    assert not threads_left()
    # The batches of an epoch that no loop requests are the price.
    assert store.n_gathered == n_epochs * N_BATCHES + depth


@pytest.mark.parametrize("continuous", [None, False])
def test_rows_of_stores_of_the_user_are_not_read_ahead(continuous: bool | None) -> None:
    store = Watched(numbers())
    with Feeder(
        store, batch_size=SIZE, depth=2, device="cpu", shuffle=True, continuous=continuous
    ) as feeder:
        for number in range(2):
            assert epoch(feeder) == expected(number)
            assert not is_paused(feeder)
            assert not threads_left()
            assert store.n_gathered == (number + 1) * N_BATCHES


def test_changes_of_arrays_between_epochs_are_seen() -> None:
    array = numbers()
    ranks = Ranks("pad", rank=0, world_size=1)
    with Feeder(array, batch_size=SIZE, depth=2, device="cpu", ranks=ranks) as feeder:
        for _ in range(3):
            assert epoch(feeder) == array.reshape(-1, SIZE).tolist()
            array *= 2


def test_only_files_are_read_ahead_by_default(file: Path) -> None:
    array = np.load(file)
    sources: list[tuple[Any, dict[str, Any], bool]] = [
        (str(file), {}, True),
        (str(file), {"rows": rows.block_shuffled(0, block_rows=4)}, True),
        (str(file), {"ranks": Ranks("pad", rank=1, world_size=2)}, True),
        ({"x": str(file), "y": NpyStore(file)}, {}, True),
        (str(file), {"rows": torch.utils.data.SequentialSampler(range(N))}, False),
        (str(file), {"verify": True}, False),
        (str(file), {"host_transform": lambda batch: batch}, False),
        (str(file), {"device_transform": lambda batch: batch}, False),
        (NpyStore(file, mode="r+"), {}, False),
        (array, {}, False),
        (torch.from_numpy(array), {}, False),
        ((str(file), array), {}, False),
        (type("Own", (NpyStore,), {})(file), {}, False),
    ]
    for source, options, is_continuous in sources:
        with Feeder(source, batch_size=SIZE, depth=2, device=SimDevice(), **options) as feeder:
            list(feeder)
            assert is_paused(feeder) == is_continuous, (source, options)


def test_loops_that_write_are_not_continuous(file: Path) -> None:
    store = NpyStore(file, mode="r+")
    with (
        of_file(file) as reads,
        Feeder(
            store,
            batch_size=SIZE,
            depth=2,
            device="cpu",
            ranks=Ranks("pad", rank=0, world_size=1),
            continuous=True,
        ) as feeder,
    ):
        for factor in (2, 3):
            list(reads)
            for batch in feeder.batches():
                batch.write_back(batch.data * factor)
            assert not is_paused(feeder)
        list(feeder)
        assert is_paused(feeder)
        # The loop that only reads must not have read rows that this one writes.
        for batch in feeder.batches():
            batch.write_back(batch.data * 5)
        assert epoch(feeder) == (30 * numbers()).reshape(-1, SIZE).tolist()
        assert epoch(reads) == (30 * numbers()).reshape(-1, SIZE).tolist()
    store.close()


def test_an_own_order_is_not_repeatable() -> None:
    class Own(type(rows.shuffled())):  # type: ignore[misc]
        pass

    assert known(rows.per_rank(rows.drawn(3), rank=0, world_size=2)).is_repeatable
    assert not known(Own(0)).is_repeatable
    assert not known([1, 2]).is_repeatable


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 0}, "depth=0 reads nothing ahead"),
        ({"verify": True}, "verify=True"),
        ({"rows": [[1, 2], [3]], "batch_size": None}, "rows is a list"),
        ({"continuous": 1}, "continuous=1"),
    ],
)
def test_continuous_is_refused_where_it_cannot_hold(options: Any, words: str) -> None:
    options = {"batch_size": SIZE, "depth": 2, "continuous": True} | options
    with pytest.raises(ArgumentError, match=words):
        Feeder(numbers(), device="cpu", **options)


# ---- changes between epochs ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["write", "map", "another map"])
def test_files_that_change_between_epochs_are_read_again(file: Path, how: str) -> None:
    mapped = np.load(file, mmap_mode="r+") if how == "map" else None
    with of_file(file) as feeder:
        for factor in (1, 2, 3):
            assert epoch(feeder) == (factor * numbers()).reshape(-1, SIZE).tolist()
            changed = (factor + 1) * numbers()
            # A clock of the file system may be too slow to see two writes.
            stamp = (factor + 10) * 10**9
            if mapped is not None:
                mapped[:] = changed
            elif how == "another map":
                other = np.load(file, mmap_mode="r+")
                other[:] = changed
                del other
            else:
                np.save(file, changed)
                os.utime(file, ns=(stamp, stamp))


def test_files_mapped_for_writing_are_found(file: Path) -> None:
    key = file_key(str(file))
    reading = np.load(file, mmap_mode="r")
    copied = np.load(file, mmap_mode="c")
    assert key not in written_maps()
    writing = np.load(file, mmap_mode="r+")
    assert key in written_maps()
    del reading, copied, writing
    assert key not in written_maps()


def test_set_epoch_keeps_only_the_next_epoch(file: Path) -> None:
    with of_file(file, shuffle=True) as feeder:
        assert epoch(feeder) == expected(0)
        feeder.set_epoch(1)
        assert is_paused(feeder)
        assert epoch(feeder) == expected(1)
        feeder.set_epoch(1)
        assert not is_paused(feeder)
        assert not threads_left()
        assert epoch(feeder) == expected(1)
        assert epoch(feeder) == expected(2)


def test_states_do_not_count_what_was_read_ahead(file: Path) -> None:
    with of_file(file, shuffle=True) as feeder, of_file(file, shuffle=True, depth=0) as plain:
        for _ in range(2):
            for _batches in zip(feeder, plain, strict=True):
                assert feeder.state_dict() == plain.state_dict()
            assert feeder.state_dict() == plain.state_dict()
            assert feeder.epoch == plain.epoch
        state = feeder.state_dict() | {"batch": 3}
        feeder.load_state_dict(state)
        assert not is_paused(feeder)
        assert not threads_left()
        assert epoch(feeder) == expected(2)[3:]
        assert epoch(feeder) == expected(3)


def test_statistics_count_only_received_batches(file: Path) -> None:
    with of_file(file, timeline=True) as feeder:
        for number in range(1, 4):
            list(feeder)
            stats = feeder.stats
            assert (stats.batches, stats.rows) == (number * N_BATCHES, number * N)
        feeder.set_epoch(0)
        assert feeder.stats.seconds == stats.seconds
        assert feeder.stats.starved_s == stats.starved_s
    reads = {(span.loop, span.batch) for span in feeder.timeline.spans if span.lane == "read"}
    lent = {(span.loop, span.batch) for span in feeder.timeline.spans if span.lane == "lend"}
    assert lent == {(loop, batch) for loop in range(3) for batch in range(N_BATCHES)}
    assert lent <= reads <= lent | {(3, batch) for batch in range(N_BATCHES)}


# ---- errors, ends and leaks ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_is_raised_when_its_batch_is_requested(depth: int) -> None:
    store = Watched(numbers())
    options: Any = {"device": "cpu", "continuous": True}
    expected = numbers().reshape(-1, SIZE).tolist()
    with Feeder(store, batch_size=SIZE, depth=depth, **options) as feeder:
        for i, _ in enumerate(feeder):
            if i == N_BATCHES - 1 - depth:
                # All batches of this epoch were requested, and none of the next one.
                assert store.wait_for(N_BATCHES)
                store.bad = {SIZE}
        assert i == N_BATCHES - 1
        found = []
        with pytest.raises(OSError, match="bad rows"):
            # A comprehension would lose the batches before the error.
            for batch in feeder:
                found += [batch.flatten().tolist()]
        assert found == expected[:1]
        assert not threads_left()
        store.bad = set()
        assert epoch(feeder) == expected


def test_a_dropped_feeder_ends_its_threads() -> None:
    gc.collect()
    gc.disable()
    try:
        store = Watched(numbers())
        feeder = Feeder(store, batch_size=SIZE, depth=2, device="cpu", continuous=True)
        list(feeder)
        assert is_paused(feeder)
        assert store.wait_for(N_BATCHES + 2)
        reference = weakref.ref(feeder)
        slots = mover_of(feeder).slots
        del feeder
        assert reference() is None
        assert not threads_left()
        assert all(slot.batch is None for slot in slots)
    finally:
        gc.enable()


def test_a_break_drops_what_was_read_ahead(file: Path) -> None:
    with of_file(file, shuffle=True) as feeder:
        for number in range(4):
            for i, _ in enumerate(feeder):
                if i == (0, N_BATCHES - 1, 4)[number % 3]:
                    break
            assert not is_paused(feeder)
            assert not threads_left()
        assert epoch(feeder) == expected(4)


def test_another_thread_begins_a_loop_of_its_own(file: Path) -> None:
    found: list[Any] = []
    with of_file(file, shuffle=True) as feeder:
        for number in range(3):
            thread = threading.Thread(target=lambda: found.append(epoch(feeder)))
            thread.start()
            thread.join()
            assert found[number] == expected(number)
        assert epoch(feeder) == expected(3)
        assert epoch(feeder) == expected(4)


def test_a_fork_between_epochs_leaves_a_feeder_usable() -> None:
    options: Any = {"device": "cpu", "shuffle": True, "continuous": True}
    with Feeder(Watched(numbers()), batch_size=SIZE, depth=2, **options) as feeder:
        assert epoch(feeder) == expected(0)
        pid = os.fork()
        if not pid:
            code = 1
            with contextlib.suppress(BaseException):
                torch.set_num_threads(1)
                code = int(not (epoch(feeder) == expected(1) and epoch(feeder) == expected(2)))
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert epoch(feeder) == expected(1)
        assert epoch(feeder) == expected(2)


def test_functions_read_ahead_if_they_may() -> None:
    for continuous in (False, True):
        calls: list[int] = []

        def read(i: int, calls: list[int] = calls) -> list[float]:
            calls.append(i)
            return [float(i)]

        options: Any = {"shuffle": True, "n_readers": 2, "continuous": continuous}
        with wrap_readers(
            range(N), range(N), read_input=read, get_output=read, batch_size=SIZE, **options
        ) as feeder:
            for number in range(3):
                found = [x.tolist() for x, _ in feeder]
                assert found == expected(number)
                assert is_paused(feeder) == continuous
            assert continuous or len(calls) == 3 * 2 * N
        assert not threads_left()


# ---- random programs -----------------------------------------------------------------------------


class Program:
    """A program that loops over two feeders, of which one is synchronous, and compares them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.n = rng.choice([0, 1, 7, 8, 20]) or 3
        self.store = Watched(numbers(self.n))
        self.plain_store = Watched(numbers(self.n))
        depth = rng.choice([1, 2, 3, 7, None])
        options: dict[str, Any] = {
            "batch_size": rng.choice([1, 2, 3, 8, 30]),
            "drop_last": rng.random() < 0.3,
            "rows": rng.choice(
                [
                    rows.sequential(),
                    rows.shuffled(seed),
                    rows.drawn(11, seed),
                    rows.block_shuffled(seed, block_rows=2, window_blocks=2),
                ]
            ),
        }
        if rng.random() < 0.4:
            uneven: Any = "pad" if options["drop_last"] else rng.choice(["pad", "drop", "join"])
            world_size = rng.choice([1, 2, 3])
            options["ranks"] = Ranks(uneven, rank=world_size - 1, world_size=world_size)
        if rng.random() < 0.4:
            options["host_transform"] = lambda x, generator: x + torch.rand(1, generator=generator)
        choose = rng.choice([lazy, favour("compute"), favour("read")])
        device = "cpu" if "host_transform" in options else rng.choice(["cpu", "sim"])
        on_sim = device == "sim"
        self.feeder = Feeder(
            self.store,
            depth=depth,
            continuous=True,
            device=SimDevice(choose) if on_sim else "cpu",
            **options,
        )
        self.plain = Feeder(
            self.plain_store, depth=0, device=SimDevice() if on_sim else "cpu", **options
        )

    def run(self) -> None:
        with self.feeder, self.plain:
            for _ in range(12):
                action = self.rng.choice(["epoch"] * 5 + ["break", "set", "next", "state", "error"])
                getattr(self, action)()
                assert self.feeder.state_dict() == self.plain.state_dict()
        assert not threads_left()

    def epoch(self) -> None:
        self.compare(None)

    def compare(self, most: int | None) -> None:
        found = self.batches(self.feeder, most)
        assert found == self.batches(self.plain, most)

    def batches(self, feeder: Any, most: int | None) -> list[Any]:
        found: list[Any] = []
        loop: Iterator[Any] = iter(feeder)
        try:
            while most is None or len(found) < most:
                batch = next(loop, None)
                if batch is None:
                    break
                host = runner_of(feeder).copy_to_host(batch, batch.shape, np.dtype(np.float32))
                found.append((host.tolist(), feeder.state_dict()))
        except OSError as error:
            found.append(str(error))
        loop.close()  # type: ignore[attr-defined]
        return found

    def break_(self) -> None:
        self.compare(self.rng.randrange(1, 6))

    def set(self) -> None:
        number = self.rng.randrange(5)
        for feeder in (self.feeder, self.plain):
            feeder.set_epoch(number)

    def next(self) -> None:
        number = self.feeder.epoch
        assert number == self.plain.epoch
        for feeder in (self.feeder, self.plain):
            feeder.set_epoch(number)

    def state(self) -> None:
        self.break_()
        state = self.plain.state_dict()
        for feeder in (self.feeder, self.plain):
            feeder.load_state_dict(state)

    def error(self) -> None:
        """Read on with rows that fail, which both feeders reach in the same batch."""
        # Batches that were read before these rows fail would hide the error.
        self.feeder.load_state_dict(self.feeder.state_dict())
        self.plain.load_state_dict(self.plain.state_dict())
        bad = {self.rng.randrange(self.n)}
        self.store.bad = self.plain_store.bad = bad
        self.compare(None)
        self.store.bad = self.plain_store.bad = set()
        self.feeder.load_state_dict(self.feeder.state_dict())
        self.plain.load_state_dict(self.plain.state_dict())


setattr(Program, "break", Program.break_)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.filterwarnings("ignore")
def test_random_programs_equal_the_synchronous_loop(seed: int, tmp_path: Path) -> None:
    Program(seed, tmp_path).run()
