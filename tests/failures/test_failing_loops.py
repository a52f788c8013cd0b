"""Faults of loops: shared feeders, sources and stores that fail at any batch, many feeders."""

import contextlib
import copy
import itertools
import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    NpyStore,
    RowOptimizer,
    errors,
    rows,
    train_rows,
    wrap_loader,
    wrap_readers,
)
from pinfeed.devices.cpu import HostDevice
from pinfeed.memory.host import resident_bytes
from pinfeed.rows.runs import Runs
from pinfeed.testing import SimDevice

N, SIZE = 200, 10


class Fault(Exception):
    """Error that failing stores and sources raise."""


class Failing(ArrayStore):
    """Array store that fails at certain rows while the test says so."""

    gather_at = scatter_at = -1

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        if self.gather_at in rows:
            raise Fault("gather")
        super().gather(rows, out)

    def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
        if self.scatter_at in rows:
            raise Fault("scatter")
        super().scatter(rows, values)


# ---- at any batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 7, N // SIZE - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("depth", [None, 0, 1, 4])
@pytest.mark.parametrize("make_device", [HostDevice, SimDevice])
def test_a_store_that_fails_at_any_batch(
    bad: int, depth: int | None, make_device: Callable[[], Any]
) -> None:
    """The loop gets the good batches and then one error, and runs again after the fault."""
    store, device = Failing(np.arange(N * 2.0).reshape(N, 2)), make_device()
    with Feeder(store, batch_size=SIZE, depth=depth, device=device) as feeder:
        for store.gather_at, want in (
            (bad * SIZE + 3, bad),
            (-1, N // SIZE),
            (bad * SIZE, bad),
            (-1, N // SIZE),
        ):
            count = 0
            with pytest.raises(Fault) if want == bad else contextlib.nullcontext():
                for batch in feeder:
                    count += 1
                    del batch
            assert count == want


@pytest.mark.parametrize("bad", [0, 7, N // SIZE - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_write_back_that_fails_at_any_batch(bad: int, depth: int) -> None:
    table = np.zeros((N, 2))
    store = Failing(table)
    store.scatter_at = bad * SIZE
    with Feeder(store, batch_size=SIZE, depth=depth) as feeder:
        with pytest.raises(Fault):
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
        assert (table[: bad * SIZE] == 1).all()
        assert (table[bad * SIZE :] == 0).all(), "later writes do not overtake it"
        store.scatter_at = -1
        for batch in feeder.batches():
            batch.write_back(torch.full_like(batch.data, 5))
        assert (table == 5).all()


SOURCES: dict[str, Callable[[Callable[[int], Any], int], Any]] = {
    "loader": lambda sample, depth: wrap_loader(
        DataLoader(_Dataset(sample), batch_size=SIZE), depth=depth, device="cpu"
    ),
    "readers": lambda sample, depth: wrap_readers(
        range(N),
        range(N),
        read_input=lambda i: iter([sample(i)]),
        get_output=lambda i: iter([i]),
        one_read_count=1,
        batch_size=SIZE,
        depth=depth,
        device="cpu",
    ),
}


class _Dataset:
    def __init__(self, sample: Callable[[int], Any]) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self._sample(i), i


@pytest.mark.parametrize("bad", [0, 7, N // SIZE - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_fails_at_any_batch(source: str, depth: int, bad: int) -> None:
    bad_sample = bad * SIZE + 4

    def sample(i: int) -> np.ndarray:
        if i == bad_sample:
            raise Fault(f"sample {i}")
        return np.full(3, i)

    with SOURCES[source](sample, depth) as feeder:
        for again in range(2):
            count = 0
            with pytest.raises(Fault) if not again else contextlib.nullcontext():
                for _, numbers in feeder:
                    assert numbers.tolist() == list(range(count * SIZE, (count + 1) * SIZE))
                    count += 1
            assert count == (N // SIZE if again else bad)
            bad_sample = -1


# ---- leaving -------------------------------------------------------------------------------------


class Sly(ThreadPoolExecutor):
    """Pool that cancels every other waiting task, as if a worker took one between two cancels."""

    def __init__(self, left: threading.Event, n_threads: int, name: str) -> None:
        super().__init__(n_threads, thread_name_prefix=name)
        self._left, self._futures = left, []  # type: ignore[var-annotated]

    def submit(self, *args: Any, **more: Any) -> Any:
        self._futures.append(super().submit(*args, **more))
        return self._futures[-1]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future in [future for future in self._futures if not future.done()][1::2]:
                future.cancel()
        self._left.set()
        super().shutdown(wait)


@pytest.mark.parametrize("n_readers", [1, 2])
def test_a_loop_that_is_left_while_fills_wait_for_their_turn(n_readers: int) -> None:
    left, asked = threading.Event(), threading.Event()

    class Slow(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            if SIZE in rows:
                asked.set()
                left.wait()
            super().gather(rows, out)

    class Device(HostDevice):
        def worker(self, name: str, n_threads: int = 1) -> Any:
            return Sly(left, n_readers, name)

    with Feeder(Slow(np.zeros((N, 2))), batch_size=SIZE, depth=6, device=Device()) as feeder:
        loop = iter(feeder)
        next(loop)
        asked.wait()
        # A break also drops the loop.
        del loop
        assert len(list(feeder)) == N // SIZE


# ---- threads -------------------------------------------------------------------------------------


def test_a_feeder_in_each_of_eight_threads(tmp_path: Path) -> None:
    table = np.arange(N * 2.0).reshape(N, 2)
    np.save(tmp_path / "x.npy", table)
    together = threading.Barrier(8)

    def run(i: int) -> bool:
        together.wait()
        with Feeder(
            tmp_path / "x.npy" if i % 2 else table, batch_size=SIZE, shuffle=True, seed=i, depth=i
        ) as feeder:
            return all(
                (torch.cat(list(feeder)).sort(0).values.numpy() == table).all() for _ in range(3)
            )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(8)))


def test_one_feeder_in_two_threads() -> None:
    """One of them gets the loop.

    An iterator that both threads use is in use whenever one of them waits.
    """
    for _ in range(5):
        together = threading.Barrier(2)
        with Feeder(np.zeros((N, 2)), batch_size=SIZE) as feeder:

            def run(feeder: Feeder = feeder, together: threading.Barrier = together) -> Any:
                together.wait()
                try:
                    return iter(feeder)
                except errors.ClosedError as error:
                    return error

            with ThreadPoolExecutor(2) as threads:
                results = sorted(
                    (future.result() for future in [threads.submit(run) for _ in range(2)]),
                    key=lambda r: isinstance(r, Exception),
                )
            assert isinstance(results[1], errors.ClosedError)
            assert "a loop over this feeder is running" in str(results[1])
            assert len(list(results[0])) == N // SIZE


def test_one_iterator_in_two_threads() -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            if SIZE in rows:
                asked.set()
                go_on.wait()
            super().gather(rows, out)

    with (
        Feeder(Slow(np.zeros((N, 2))), batch_size=SIZE, depth=0) as feeder,
        ThreadPoolExecutor(1) as other,
    ):
        loop = iter(feeder)
        next(loop)
        waiting = other.submit(next, loop)
        asked.wait()
        with pytest.raises(ValueError, match="generator already executing"):
            next(loop)
        go_on.set()
        assert len(waiting.result()) == SIZE
        assert len(list(loop)) == N // SIZE - 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_feeder_is_not_copied(copied: Callable[[Any], Any]) -> None:
    table = HostEmbedding(5, 2, name="t")
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=1)
    for feeder in (
        Feeder(np.zeros(9), batch_size=3),
        wrap_loader(DataLoader(list(range(9)))),
        SOURCES["readers"](lambda i: np.zeros(3), 2),
        train_rows([torch.arange(3)], {table: lambda batch: batch}, optimizer=optimizer),
    ):
        with (
            feeder,
            pytest.raises(
                TypeError,
                match=r"cannot be pickled or copied, .* in the process that uses it",
            ),
        ):
            copied(feeder)


# ---- many feeders, long runs ---------------------------------------------------------------------


def assert_thousands_leave_nothing(path: Path, n: int) -> None:
    x = np.load(path)

    def make(i: int) -> None:
        with Feeder(
            path if i % 3 else (x, path),
            batch_size=64,
            shuffle=i % 2 == 0,
            depth=i % 4,
            device="cpu",
        ) as feeder:
            next(iter(feeder))
            if i % 5 == 0:
                # close() ends this loop.
                loop = iter(feeder)
                next(loop)

    def found() -> tuple[int, int, int]:
        return (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            Path("/proc/self/maps").read_text().count("\n"),
        )

    for i in range(n // 5):
        make(i)
    before, memory = found(), resident_bytes()["anonymous"]
    for i in range(n):
        make(i)
    threads, files, maps = (after - once for after, once in zip(found(), before, strict=True))
    assert (threads, files) == (0, 0)
    assert maps < 20
    assert resident_bytes()["anonymous"] - memory < (4 << 20) + 300 * n, (
        "less than 300 bytes a feeder, and what the allocator keeps"
    )


def test_hundreds_of_feeders_leave_nothing(tmp_path: Path) -> None:
    # The file has 1 MiB, so a leak of one file per feeder shows.
    np.save(tmp_path / "x.npy", np.zeros((4096, 64), np.float32))
    assert_thousands_leave_nothing(tmp_path / "x.npy", 80)


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
def test_ten_thousand_feeders_leave_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4096, 64), np.float32))
    assert_thousands_leave_nothing(tmp_path / "x.npy", 10_000)


class Moody(NpyStore):
    """File store with random faults of reads and writes."""

    rate = 0.0
    rng = random.Random(0)

    def gather_runs(self, runs: Runs, out: np.ndarray) -> None:
        self.fail()
        super().gather_runs(runs, out)

    def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
        self.fail()
        super().scatter(rows, values)

    def fail(self) -> None:
        if self.rng.random() < self.rate:
            raise Fault("at random")


def soak(path: Path, seconds: float, seed: int) -> int:
    """Run loops with random faults, depths, orders and ends for a time; return their number.

    Wherever a loop ends, the file equals that of the plain loop.
    """
    rng = random.Random(seed)
    want = np.zeros((2000, 8))
    np.save(path, want)
    end, settled = time.monotonic() + seconds, 0
    for n_loops in itertools.count():
        if time.monotonic() > end and n_loops >= 20:
            return n_loops
        order = rng.choice(
            [rows.sequential(), rows.shuffled(n_loops), rows.block_shuffled(n_loops, block_rows=64)]
        )
        n = rng.choice([7, 64, 500])
        stop = rng.choice([1, 3, 10**9])
        device = rng.choice([HostDevice(), "cpu"])
        with Moody(path, mode="r+") as store:
            store.rate = rng.choice([0, 0, 0.02])
            written: list[np.ndarray] = []
            with (
                contextlib.suppress(Fault),
                Feeder(
                    store, batch_size=n, rows=order, depth=rng.randrange(6), device=device
                ) as feeder,
            ):
                for i, batch in enumerate(feeder.batches(), 1):
                    np.testing.assert_array_equal(batch.data.numpy(), want[batch.rows])
                    batch.write_back(batch.data + 1)
                    written.append(batch.rows)
                    if i == stop:
                        break
                    if rng.random() < 0.001:
                        raise Fault("of the body")
            store.rate = 0.0
            found = np.empty_like(want)
            store.gather(np.arange(len(want)), found)
        for batch_rows in written:
            # Completed writes precede the others.
            if (found[batch_rows] == want[batch_rows]).all():
                break
            want[batch_rows] += 1
        np.testing.assert_array_equal(found, want)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pinfeed")]
        if n_loops == 200:
            settled = resident_bytes()["anonymous"]
        elif n_loops > 200 and n_loops % 100 == 0:
            assert resident_bytes()["anonymous"] - settled < 16 << 20, f"after {n_loops} loops"
    raise AssertionError


def test_some_loops_with_random_faults(tmp_path: Path) -> None:
    assert soak(tmp_path / "x.npy", 0, seed=1) == 20


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
def test_an_hour_of_random_faults(tmp_path: Path) -> None:
    """The environment variable PINFEED_SOAK_S gives the seconds; the default is an hour."""
    n_loops = soak(
        tmp_path / "x.npy", float(os.environ.get("PINFEED_SOAK_S", "3600")), seed=int(time.time())
    )
    print(f"{n_loops} loops")
