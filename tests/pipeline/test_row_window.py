"""Rows in flight come from the newest batch of the window, never from their stores.

``test_table_protocol.py`` runs loops in a window under every schedule, and leaves out each wait.
Here are mistakes that are no waits, each of which some schedule shows, and errors.
"""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import runner_of
from support.schedules import SLOTS, randomly, stalling, switch
from support.simtorch import META, SimTorchDevice
from support.table_runs import check

from pinfeed import ArrayStore, HostEmbedding, RowOptimizer, train_rows
from pinfeed.devices.device import RowPairs
from pinfeed.errors import ClosedError
from pinfeed.pipeline import forwarding
from pinfeed.pipeline.forwarding import RecentRows
from pinfeed.pipeline.row_window import RowWindow, WindowWrites
from pinfeed.testing import favour, lazy

SCHEDULES: list[Callable[[], Any]] = [
    partial(stalling, "compute", 40, ("pinfeed-read", "write")),
    lambda: lazy,
    partial(favour, "read", "pinfeed-read"),
    partial(favour, "compute", "pinfeed-read"),
    *(partial(randomly, seed) for seed in range(8)),
]
# Some rows are in every batch.
BATCHES = [
    ([i % 2, 2 + i % 2, 5, 7 + i % 3, 11], [0, 2, 4, 6 + i % 2, 0], [2, 0, 4, 4, 2])
    for i in range(8)
]
DOES = ("step", "by hand", "twice", "nothing")
SWITCHED: list[dict[str, Any]] = [{"switch_after": 2}, {"switch_once": 3}, {"switch_in": 1}]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def fails(make: Callable[[], Any], **kwargs: Any) -> bool:
    """Return whether a program differs from the synchronous loop."""
    device = SimTorchDevice(make(), direct=True)
    try:
        check(
            device, 2, "momentum", BATCHES, does=("step", "by hand", "twice", "nothing"), **kwargs
        )
    except (AssertionError, RuntimeError, IndexError):
        return True
    return False


def too_short(patch: pytest.MonkeyPatch) -> None:
    """Compare a batch with one batch too few."""
    own = RecentRows.__init__
    patch.setattr(RecentRows, "__init__", lambda self, n: own(self, max(0, n - 1)))


def oldest(patch: pytest.MonkeyPatch) -> None:
    """Take rows from the oldest batch that has them."""
    own = RecentRows.add

    def add(self: RecentRows, *args: Any) -> Any:
        # The comparison and the numbers of batches both begin with the newest one.
        patch.setattr(forwarding, "reversed", list, raising=False)
        return own(self, *args)

    patch.setattr(RecentRows, "add", add)


def not_forwarded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowWindow, "_forward", lambda *_: None)


def freed_too_early(patch: pytest.MonkeyPatch) -> None:
    """Free a batch before a later one has waited for its write."""
    own = RowWindow._free
    patch.setattr(RowWindow, "_free", lambda self, n: own(self, n + 1))


@pytest.mark.parametrize("mistake", [too_short, oldest, not_forwarded, freed_too_early])
def test_a_mistake_is_noticed(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert any(map(fails, SCHEDULES))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kwargs", SWITCHED, ids=str)
@pytest.mark.parametrize("i", range(len(SCHEDULES)))
def test_loops_that_change_their_stream(i: int, kwargs: dict[str, Any]) -> None:
    assert not fails(SCHEDULES[i], **kwargs)


def other_work(device: SimTorchDevice, name: str) -> None:
    """Do work in a stream that no other one waits for, as large as the memory of a batch."""
    current = device.current_stream().name
    device.switch(name)
    for n in (2048, 1024, 512, 15, 12):
        torch.full((n,), 1e9, device=META)
    device.switch(current)


def trained_beside_other_work(device: SimTorchDevice, *, leaves: bool) -> np.ndarray:
    """Return rows after a loop that changes its stream, while the other stream does other work.

    Args:
        device: The device.
        leaves: Whether the loop changes its stream for good; otherwise only the first step of the
            optimizer, which makes new state, is in the other stream.
    """
    start = np.arange(48, dtype=np.float32).reshape(16, 3)
    table = HostEmbedding(16, 3, store=ArrayStore(start))
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1, momentum=0.5)
    ids = [torch.tensor([i % 16, (i + 3) % 16, 5, (i * 7) % 16, 11]).unique() for i in range(10)]
    loop = train_rows(ids, {table: lambda ids: ids}, optimizer=optimizer, device=device)
    with device.factories():
        for i, batch in enumerate(loop):
            table(batch).pow(2).sum().backward()
            if not leaves and not i:
                switch(device, "another")
            optimizer.step()
            if not leaves and not i:
                switch(device, "compute")
            optimizer.zero_grad()
            if leaves and i == 1:
                switch(device, "another")
            if i:
                other_work(device, "compute" if leaves else "another")
    return start


@pytest.mark.parametrize("leaves", [True, False])
def test_memory_of_a_stream_that_the_loop_has_left(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = favour("compute", "another", "read", "write", "pinfeed-read")
    expected = trained_beside_other_work(SimTorchDevice(fast), leaves=leaves)
    worst = partial(favour, "compute" if leaves else "another", "pinfeed-read")
    for make in (*SCHEDULES, worst):
        device = SimTorchDevice(make(), direct=True)
        np.testing.assert_array_equal(trained_beside_other_work(device, leaves=leaves), expected)
    name = "_share" if leaves else "write"
    own = getattr(RowWindow, name)

    def unshared(self: RowWindow, *args: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.device, "share", lambda *_: None)
            own(self, *args, **options)

    monkeypatch.setattr(RowWindow, name, unshared)
    device = SimTorchDevice(worst(), direct=True)
    assert not np.array_equal(trained_beside_other_work(device, leaves=leaves), expected)


@pytest.mark.parametrize("cache", [0.3, 0.6])
@pytest.mark.parametrize("i", range(3))
def test_a_write_in_another_stream_than_the_batch(i: int, cache: float) -> None:
    """The loop then goes back, and the other stream does other work."""

    def trained(device: SimTorchDevice, device_cache: float | None) -> np.ndarray:
        start = np.arange(48, dtype=np.float32).reshape(16, 3)
        table = HostEmbedding(16, 3, store=ArrayStore(start), device_cache=device_cache)
        optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1)
        ids = [torch.tensor([i % 16, (i + 3) % 16, 5, 11]).unique() for i in range(12)]
        loop = train_rows(
            ids, {table: lambda ids: ids}, optimizer=optimizer, device=device, depth=1
        )
        with device.factories():
            for i, batch in enumerate(loop):
                table(batch).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if i % 3 == 2:
                    switch(device, "another")
                elif i % 3 == 0 and i:
                    switch(device, "compute")
                if i % 3 != 2:
                    for _ in range(4):
                        other_work(device, "another")
        return start

    streams = ("compute", "read", "pinfeed-read")
    late = (("another", *streams), ("another", "pinfeed-read"), ("another", "compute"))[i]
    expected = trained(SimTorchDevice(favour("compute", "another", *SLOTS), direct=True), None)
    found = trained(SimTorchDevice(favour(*late), direct=True), cache)
    np.testing.assert_array_equal(found, expected)


class Failing(SimTorchDevice):
    """A device that calls a function in a write of rows."""

    def __init__(self, number: int, call: Callable[[], object]) -> None:
        super().__init__(randomly(number), direct=True)
        self.left = number
        self.call = call

    def write(self, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            self.call()
        super().write(*args)


def ids_of(batch: int) -> list[int]:
    return [batch % 7, 5, (3 * batch + 1) % 7]


def two_tables(device: Any, **options: Any) -> tuple[Any, list[np.ndarray], Callable[[Any], None]]:
    """Return a loop over two tables, their rows, and a training step."""
    starts = [np.ones((9, 2), np.float32), np.ones((7, 3), np.float32)]
    tables = [HostEmbedding(*start.shape, store=ArrayStore(start)) for start in starts]
    optimizer = RowOptimizer(torch.optim.SGD, tables, lr=0.1)
    ids = [torch.tensor(ids_of(i)) for i in range(9)]
    loop = train_rows(
        ids,
        dict.fromkeys(tables, lambda ids: ids),
        optimizer=optimizer,
        device=device,
        depth=2,
        **options,
    )

    def step(batch: Any) -> None:
        sum(table(batch).pow(2).sum() for table in tables).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop, starts, step


def rows_after(n_batches: int) -> list[np.ndarray]:
    """Return the rows of the synchronous loop after some batches."""
    loop, starts, step = two_tables("cpu")
    for batch in itertools.islice(loop, n_batches):
        step(batch)
    loop.close()
    return starts


def fails_with(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("number", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_write_that_fails(kind: type[BaseException], number: int) -> None:
    """Earlier writes are complete, and no later one is made."""
    device = Failing(number, partial(fails_with, kind("no write")))
    loop, starts, step = two_tables(device)
    n_steps = 0
    with pytest.raises(kind, match="no write"), device.factories():
        for batch in loop:
            step(batch)
            n_steps += 1
    failed = (number - 1) // 2
    assert n_steps == failed + 1
    # The table before the one whose write failed may have been written.
    before, after = rows_after(failed), rows_after(failed + 1)
    for i, start in enumerate(starts):
        is_written = i < (number - 1) % 2
        np.testing.assert_array_equal(start, (after if is_written else before)[i])


@pytest.mark.parametrize("number", [1, 2, 6])
@pytest.mark.parametrize("closes", [False, True], ids=["the loop ends", "the loop is closed"])
def test_a_signal_handler_in_a_write(closes: bool, number: int) -> None:
    """The write is completed, and all work with the memory of the loop."""
    device = Failing(number, lambda: loop.close() if closes else runner_of(loop)._last_loop.end())
    loop, starts, step = two_tables(device)
    n_steps = 0
    with pytest.raises(ClosedError), device.factories():
        for batch in loop:
            step(batch)
            n_steps += 1
    for start, expected in zip(starts, rows_after(n_steps), strict=True):
        np.testing.assert_array_equal(start, expected)


def test_rows_in_flight_are_not_read() -> None:
    """Rows that no batch of the window has are read once for each batch, and no others."""
    n_read = 0

    class Counting(SimTorchDevice):
        def read(self, parts: Any, stream: Any, indices: Any = None) -> None:
            nonlocal n_read
            if indices is not None:
                n_read += indices.n if isinstance(indices, RowPairs) else len(indices)
            super().read(parts, stream, indices)

    device = Counting(lazy, direct=True)
    loop, _, step = two_tables(device)
    with device.factories():
        for batch in loop:
            step(batch)
    rows = [
        set(one.tolist()) for one in [torch.tensor([i % 7, 5, (3 * i + 1) % 7]) for i in range(9)]
    ]
    expected = sum(len(own - set().union(*rows[max(0, i - 2) : i])) for i, own in enumerate(rows))
    assert n_read == 2 * expected


def test_cached_tables_run_in_a_window() -> None:
    """No thread writes the rows that stay outside."""
    table = HostEmbedding(16, 3, store=ArrayStore(np.ones((16, 3), np.float32)), device_cache=0.4)
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1)
    device = SimTorchDevice(lazy, direct=True)
    ids = [torch.tensor(ids_of(i)) for i in range(9)]
    with device.factories():
        loop = train_rows(ids, {table: lambda ids: ids}, optimizer=optimizer, device=device)
        for batch in loop:
            table(batch).pow(2).sum().backward()
            optimizer.step()
            running = runner_of(loop)._last_loop
            assert isinstance(running.writes, WindowWrites)
            assert running.threads._writer is None
    assert loop.stats.cache_rows_written > loop.stats.cache_hits > 0


class Program:
    """A loop over a trained and a frozen table, whose steps do something in addition."""

    def __init__(
        self, does: str, *, is_evaluated: bool = False, cache: float | None = None
    ) -> None:
        self.does = does
        starts = [np.arange(48, dtype=np.float32).reshape(16, 3) for _ in range(2)]
        self.starts = starts
        self.trained, self.frozen = (
            HostEmbedding(16, 3, store=ArrayStore(start), device_cache=cache) for start in starts
        )
        self.frozen.requires_grad_(False)
        made: Any = torch.optim.SGD
        self.optimizer = RowOptimizer(made, [self.trained], lr=0.1, momentum=0.5)
        self.ids = [torch.tensor([[1, 3, 11], [5, 8], [1, 3, 11, 5]][i % 3]) for i in range(9)]
        self.is_evaluated = is_evaluated

    def step(self, i: int, ids: torch.Tensor) -> torch.Tensor:
        trained = self.trained
        if self.is_evaluated:
            trained.eval()
        loss = trained(ids).pow(2).sum() + self.frozen(ids).sum()
        if i % 3 != 1 and not self.is_evaluated:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif self.does == "changes state":
            for state in self.optimizer.state.values():
                state["momentum_buffer"].mul_(3)
        elif self.does == "changes data":
            trained.weight.data.add_(1)
        elif self.does == "changes frozen rows":
            with torch.no_grad():
                self.frozen.weight.add_(1)
        elif self.does == "changes frozen data":
            self.frozen.weight.data.add_(1)
        return loss.detach()

    def run(self, device: Any, depth: int, between: Callable[[int], object] = {}.get) -> list[Any]:
        """Return all losses, and the rows after the loop."""
        is_simulated = isinstance(device, SimTorchDevice)
        tables: Any = dict.fromkeys((self.trained, self.frozen), lambda ids: ids)
        loop = train_rows(self.ids, tables, optimizer=self.optimizer, device=device, depth=depth)
        losses = []
        with device.factories() if is_simulated else contextlib.nullcontext():
            for i, ids in enumerate(loop):
                losses.append(self.step(i, ids))
                if between(i):
                    break
            if is_simulated:
                other_work(device, "compute")
                losses = [device.host(loss) for loss in losses]
        return [[loss.item() for loss in losses], *(start.tolist() for start in self.starts)]


DOES_MORE = (
    "changes state",
    "changes data",
    "changes frozen rows",
    "changes frozen data",
)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("does", DOES_MORE)
def test_changes_without_a_step(does: str, is_evaluated: bool) -> None:
    """Recorded changes of frozen rows count, and so do those of weights and state in any mode."""
    expected = Program(does, is_evaluated=is_evaluated).run("cpu", 0)
    for depth, direct, make in itertools.product((0, 1, 2, 3), (True, False), SCHEDULES[:5]):
        found = Program(does, is_evaluated=is_evaluated).run(
            SimTorchDevice(make(), direct=direct), depth
        )
        assert found == expected, (depth, direct)
    assert Program(does, is_evaluated=is_evaluated).run("cpu", 2) == expected
    cached = Program(does, is_evaluated=is_evaluated, cache=0.5)
    assert cached.run(SimTorchDevice(lazy), 2) == expected


@pytest.mark.parametrize("direct", [True, False])
def test_the_route_changes_in_a_loop(direct: bool) -> None:
    """Another feeder on the same device object may choose another route."""
    expected = Program("nothing").run("cpu", 0)
    for depth, make in itertools.product((0, 1, 2), SCHEDULES[:6]):
        device = SimTorchDevice(make(), direct=direct)

        def change(i: int, device: Any = device) -> None:
            device._direct = direct if i < 3 else not direct

        assert Program("nothing").run(device, depth, change) == expected


def test_memory_that_a_loop_frees_in_another_stream() -> None:
    """Rows in flight are copied in the stream to which the loop has changed, and then it ends."""
    for make in (*SCHEDULES, partial(favour, "compute", "pinfeed-read")):
        device = SimTorchDevice(make(), direct=True)

        def change(i: int, device: Any = device) -> bool:
            if i == 1:
                switch(device, "another")
            return i == 2

        expected = Program("nothing", is_evaluated=True).run("cpu", 0, lambda i: i == 2)
        assert Program("nothing", is_evaluated=True).run(device, 2, change) == expected


def test_after_a_failed_flush_nothing_is_written() -> None:
    device = Failing(3, partial(fails_with, OSError("no write")))
    loop, starts, step = two_tables(device)
    with device.factories():
        for i, batch in enumerate(loop):
            step(batch)
            if i:
                with pytest.raises(OSError, match="no write"):
                    loop.flush_writes()
                break
    for start, expected in zip(starts, rows_after(1), strict=True):
        np.testing.assert_array_equal(start, expected)


def test_a_loop_that_has_ended_keeps_no_memory() -> None:
    device = SimTorchDevice(lazy, direct=True)
    loop, _, step = two_tables(device)
    with device.factories():
        for batch in loop:
            step(batch)
        del batch
    device.drain()
    gc.collect()
    assert device.allocated_bytes == 0
    loop.close()


def test_a_timeline_has_the_writes_of_a_window() -> None:
    device = SimTorchDevice(randomly(1), direct=True)
    loop, _, step = two_tables(device, timeline=True)
    with device.factories():
        for batch in loop:
            step(batch)
    assert device.names.count("pinfeed write 3") == 1
    assert {span.batch for span in loop.timeline.spans if span.lane == "write"} == set(range(9))


def test_a_loader_may_fill_its_tensor_again_without_prefetching() -> None:
    """The device reads the loader's memory itself, but never after the next batch is requested."""
    device = SimTorchDevice(lazy, direct=True)
    own = torch.zeros(5)

    class Filling:
        def __iter__(self) -> Iterator[Any]:
            for number in range(4):
                own.fill_(number)
                yield {"x": own, "ids": torch.tensor([number])}

    with device.factories():
        table = HostEmbedding(8, 4)
        optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1)
        loop = train_rows(Filling(), {table: "ids"}, optimizer=optimizer, device=device, depth=0)
        found = [batch["x"].clone() for batch in loop]
        assert [device.host(x).tolist() for x in found] == [[number] * 5 for number in range(4)]
