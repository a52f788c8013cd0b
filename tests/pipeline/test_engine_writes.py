"""Write-backs without Python equal those of the synchronous loop, however the loop ends."""

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import runner_of
from support.programs import Programs
from support.schedules import next_stream, randomly, stalling, switch
from support.sim_engine import SimDriver, SimEngineDevice

from benchmarks.host.gpu import simulated_gpu
from pinfeed import ClosedError, Feeder, WriteBackError
from pinfeed.errors import DeviceError
from pinfeed.native import library as native
from pinfeed.pipeline import engine_writes
from pinfeed.pipeline.engine_writes import EngineWrites
from pinfeed.testing import SimDevice, favour, lazy

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

N = 25
# Rows of a few bytes, whose values share memory, and rows of several pieces.
WIDTHS = {"tiny": 2, "several pieces": 9000}
ACTORS = ("compute", "read", "write", "engine", "writer")
CORNERS: dict[str, Callable[[], Any]] = {"lazy": lambda: lazy}
CORNERS |= {
    f"fast {'+'.join(names)}": lambda names=names: favour(*names)
    for n in (1, 2, 4, 5)
    for names in itertools.combinations(ACTORS, n)
}
CORNERS |= {
    f"{name} stalls after {moves}": lambda name=name, moves=moves: stalling(name, moves, ())
    for name in ACTORS
    for moves in (4, 9, 15, 30)
}
REACHED = ("nothing", "short", "others", "all")


class Device(SimEngineDevice):
    """A device with an engine, which may read and write some stores itself.

    Args:
        reached: ``"nothing"``, ``"short"`` rows of 2 bytes, the ``"others"``, or ``"all"`` rows.
    """

    def __init__(self, choose: Any, reached: str = "nothing", **options: Any) -> None:
        super().__init__(choose, has_engine=True, **options)
        self._reached = reached

    def reaches(self, source: Any) -> bool:
        return self._reached == "all" or (
            self._reached == ("short" if source.dtype.itemsize == 2 else "others")
        )


class Run:
    """Two epochs whose steps change rows, which are written back.

    Args:
        device: The device.
        width: Floats of a row.
        stop_after: Number of batches after which the second epoch is left.
        switch_after: Number of batches after which the loop changes its stream after each batch.
        switch_in: Number of the batch in which the loop changes its stream between the computation
            of new values and their write-back.
    """

    def __init__(
        self,
        device: SimDevice,
        width: int,
        *,
        stop_after: int | None = None,
        switch_after: int | None = None,
        switch_in: int | None = None,
        **options: Any,
    ) -> None:
        self.x = np.arange(N * width, dtype=np.float32).reshape(N, width)
        self.y = np.arange(N, dtype=np.int16)
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []
        self._switch_in = switch_in
        source = {"x": self.x, "y": self.y}
        options = {"shuffle": True, "batch_size": 3} | options
        with Feeder(source, device=device, **options) as feeder:
            for epoch in range(2):
                for i, batch in enumerate(feeder.batches()):
                    self.step(device, i, batch)
                    if (name := next_stream(i, switch_after, None)) is not None:
                        switch(device, name)
                    if epoch and i + 1 == stop_after:
                        break
            self.is_native = isinstance(runner_of(feeder)._last_loop.writes, EngineWrites)
        # The program reads the rows right after the loop, and uses all memory that it has freed.
        self.x, self.y = self.x.copy(), self.y.copy()
        del batch
        gc.collect(0)
        free = [
            (device.stream(name), block) for name in device._free for block in device._free[name]
        ]
        for stream, block in free:
            stream._enqueue(lambda block=block: block.fill(0xAB))
        device.drain()
        self.is_memory_untouched = all((block == 0xAB).all() for _, block in free)

    def step(self, device: SimDevice, i: int, batch: Any) -> None:
        x, y = batch.data["x"], batch.data["y"]
        device.launch(lambda x, y: self.seen.append((x.copy(), y.copy())), x, y)
        new_x, new_y = x, None
        if i % 4 == 3:
            # Other memory, which is not the batch.
            new_x = device.array(x.shape, x.dtype)
        device.launch(lambda x, new: np.copyto(new, x * 2 + 1), x, new_x)
        if i % 3:
            new_y = y
            device.launch(lambda y: np.copyto(y, y + 1), y)
        if i == self._switch_in:
            switch(device, "another")
        batch.write_back({"x": None if i % 5 == 4 else new_x, "y": new_y})
        for array in filter(None, (new_x, new_y)):
            # The values were copied, so the program may change them at once.
            device.launch(lambda a: a.fill(77), array)
        del x, y, new_x, new_y, array
        if i == self._switch_in:
            # The program continues in the earlier stream, too, which waits for nothing.
            device.switch("compute")
            self.use_memory(device)
            device.switch("another")
        self.use_memory(device)

    @staticmethod
    def use_memory(device: SimDevice) -> None:
        """Use memory as a model does: of the sizes of values, and others."""
        for nbytes in (8, 24, 1024, 4096, 108_544, 110_592):
            device.launch(lambda a: a.fill(0xCD), device.array((nbytes,), np.uint8))

    def equals(self, other: "Run") -> bool:
        return (
            len(self.seen) == len(other.seen)
            and all(
                np.array_equal(a, c) and np.array_equal(b, d)
                for (a, b), (c, d) in zip(self.seen, other.seen, strict=True)
            )
            and np.array_equal(self.x, other.x)
            and np.array_equal(self.y, other.y)
        )


def expected(width: int, **options: Any) -> Run:
    run = Run(SimDevice(), width, **options | {"depth": 0})
    assert not run.is_native
    return run


LOOPS = [
    {"width": width, "depth": depth, **end}
    for width, depth, end in itertools.product(
        WIDTHS.values(), (0, 1, 2, 4), ({}, {"stop_after": 2}, {"switch_after": 1, "switch_in": 3})
    )
]


@pytest.mark.sweep(13)
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("options", LOOPS, ids=str)
def test_rows_equal_those_of_the_synchronous_loop(options: dict[str, Any], reached: str) -> None:
    want = expected(**options)
    for name, corner in CORNERS.items():
        run = Run(Device(corner(), reached), **options)
        assert run.is_native
        assert run.equals(want), name
        assert run.is_memory_untouched, name


@given(
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from([1, 2, 700, 9000]),
    depth=st.sampled_from([0, 1, 2, 3, 5, None]),
    batch_size=st.integers(1, 9),
    stop_after=st.one_of(st.none(), st.integers(1, 4)),
    switch_after=st.one_of(st.none(), st.integers(1, 4)),
    switch_in=st.one_of(st.none(), st.integers(0, 4)),
    shuffle=st.booleans(),
    reached=st.sampled_from(REACHED),
)
def test_a_random_schedule_changes_nothing(
    seed: int, width: int, reached: str, **options: Any
) -> None:
    run = Run(Device(randomly(seed), reached), width, **options)
    assert run.is_native
    assert run.equals(expected(width, **options))
    assert run.is_memory_untouched


@pytest.mark.parametrize("reached", ["nothing", "all"])
@pytest.mark.parametrize("hazard", [7, 8])
def test_each_wait_is_needed(hazard: int, reached: str) -> None:
    for options, corner in itertools.product(LOOPS, CORNERS.values()):
        device = Device(corner(), reached, deaf_to=("engine.c", hazard))
        try:
            run = Run(device, **options)
        except AssertionError:
            return
        if not run.equals(expected(**options)) or not run.is_memory_untouched:
            return
    pytest.fail(f"no schedule notices that the waits of hazard ({hazard}) are missing")


class FailingDriver(SimDriver):
    """A driver of which one call fails.

    Args:
        device: The device.
        call: Name of the call, and of its stream or of the one that ``sync`` waits for.
        n: Number of such calls before the one that fails.
    """

    def __init__(self, device: SimDevice, call: tuple[str, str], n: int) -> None:
        super().__init__(device)
        self._call = call
        self._n_left = n

    def _check_call(self, name: str, stream: str) -> None:
        if (name, stream) == self._call:
            self._n_left -= 1
            if self._n_left == -1:
                raise DeviceError("the driver has failed")

    def _record(self, event: int, stream: int) -> None:
        self._check_call("record", self._stream(stream).name)
        super()._record(event, stream)

    def _wait(self, stream: int, event: int, flags: int) -> None:
        self._check_call("wait", self._stream(stream).name)
        super()._wait(stream, event, flags)

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._check_call("copy", self._stream(stream).name)
        super()._copy(to, source, nbytes, stream)

    def _sync(self, event: int) -> None:
        if event in self._writer_events:
            self._check_call("sync", "write")
        super()._sync(event)


def step(device: SimDevice, value: float, data: dict[str, Any]) -> None:
    """Make all values of a batch equal to a number."""
    for tensor in data.values():
        device.launch(lambda x: x.fill(value), tensor)


@pytest.mark.parametrize("reached", ["nothing", "others", "all"])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize(
    "call",
    [
        ("copy", "compute"),
        ("wait", "write"),
        ("copy", "write"),
        ("record", "write"),
        ("sync", "write"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("choose", [lazy, favour("writer"), favour(*ACTORS)])
@pytest.mark.sweep(4)
def test_after_an_error_nothing_is_written(
    choose: Any, call: tuple[str, str], n: int, depth: int, reached: str
) -> None:
    device = Device(choose, reached)
    device.engine_driver = FailingDriver(device, call, n)
    rows = {"x": np.zeros((20, 3)), "y": np.zeros((20, 2), np.int16)}
    if call[0] == "copy" and reached != "nothing":
        # The rows that the GPU reads and writes itself have other copies.
        del rows["x" if reached == "others" else "y"]
    n_copies = len(rows) if call == ("copy", "compute") else 1
    n_accepted = 0
    with Feeder(rows, batch_size=2, depth=depth, device=device) as feeder:
        with pytest.raises(DeviceError, match="has failed"):
            for batch in feeder.batches():
                step(device, 1, batch.data)
                batch.write_back(batch.data)
                n_accepted += 1
        device.drain()
        n_whole = n // n_copies
        assert n_accepted >= n_whole
        for array in rows.values():
            assert (array[: 2 * n_whole] == 1).all()
            # Rows that the GPU writes itself may remain of the write that failed.
            begin = 2 * n_whole + 2 * (reached != "nothing")
            assert (array[begin:] == 0).all()
        # Another loop works.
        for batch in feeder.batches():
            step(device, 2, batch.data)
            batch.write_back(batch.data)
    device.drain()
    assert all((array == 2).all() for array in rows.values())


def test_copies_before_an_error_keep_their_memory() -> None:
    device = SimEngineDevice(lazy, has_engine=True)
    # Each write has two copies to staging memory, of which the second one fails.
    device.engine_driver = FailingDriver(device, ("copy", "write"), 3)
    rows = {"x": np.zeros((20, 9000)), "y": np.ones((20, 9000))}
    with (
        pytest.raises(DeviceError),
        Feeder(rows, batch_size=2, depth=2, device=device) as feeder,
    ):
        for batch in feeder.batches():
            batch.write_back(batch.data)
    del feeder
    gc.collect()
    device.drain()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("choose", [lazy, favour(*ACTORS), favour("compute", "read", "engine")])
def test_an_interrupt_after_the_call_changes_nothing(
    choose: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program catches the interrupts, and its loop continues."""
    found = native.library()
    assert found is not None
    queue_write = found.queue_write
    n_calls = itertools.count()

    def interrupted(request: bytes) -> int:
        code = queue_write(request)
        if next(n_calls) % 3:
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(found, "queue_write", interrupted)
    device = SimEngineDevice(choose, has_engine=True)
    x = np.arange(80.0).reshape(40, 2)
    with Feeder(x, batch_size=4, depth=depth, device=device) as feeder:
        for batch in feeder.batches():
            device.launch(lambda x: np.copyto(x, x * 2 + 1), batch.data)
            with contextlib.suppress(KeyboardInterrupt):
                batch.write_back(batch.data)
            del batch
            Run.use_memory(device)
    device.drain()
    assert np.array_equal(x, np.arange(80.0).reshape(40, 2) * 2 + 1)


@pytest.mark.parametrize(("fast", "counts"), [(("compute", "read", "engine"), True), ((), False)])
def test_waits_count_only_while_the_device_is_idle(fast: tuple[str, ...], counts: bool) -> None:
    device = SimEngineDevice(favour(*fast), has_engine=True)
    with Feeder(np.zeros((40, 2)), batch_size=2, depth=1, device=device) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
        assert (feeder.stats.write_wait_s > 0) == counts


def test_row_indices_are_kept_until_they_are_written() -> None:
    """The loop draws the indices of many batches at a time."""
    device = SimEngineDevice(favour("compute", "read", "engine"), has_engine=True)
    x = np.zeros(300_000, np.float32)
    options: Any = {"batch_size": 5_000, "shuffle": True, "depth": 4, "device": device}
    with Feeder(x, **options) as feeder:
        for batch in feeder.batches():
            device.launch(lambda x: x.fill(1), batch.data)
            batch.write_back(batch.data)
            del batch
            _ = np.full(1 << 16, 7)
    device.drain()
    assert (x == 1).all()


def test_a_loop_that_continues_after_an_error_writes_no_more() -> None:
    device = SimEngineDevice(favour("writer"), has_engine=True)
    device.engine_driver = FailingDriver(device, ("copy", "write"), 1)
    rows = np.zeros((12, 3))
    errors: list[Exception] = []
    feeder = Feeder(rows, batch_size=2, depth=1, device=device)
    with feeder, pytest.raises(WriteBackError, match="an earlier write_back"):
        for batch in feeder.batches():
            device.launch(lambda x: x.fill(1), batch.data)
            try:
                batch.write_back(batch.data)
                feeder.state_dict()
            except DeviceError as error:
                errors.append(error)
    device.drain()
    assert len(errors) == 1
    assert rows.any(axis=1).sum() == 2


def leave_by_break(batches: Any, feeder: Any) -> None:
    for _ in batches:
        break


def leave_by_close(batches: Any, feeder: Any) -> None:
    next(batches)
    feeder.close()


def leave_by_collection(batches: Any, feeder: Any) -> None:
    loop = batches
    next(loop)
    ring: list[Any] = [loop]
    ring.append(ring)


def has_no_more_threads(than: int) -> bool:
    """Return whether threads have ended; the system removes a joined thread a bit later."""
    deadline_s = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > than and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return len(os.listdir("/proc/self/task")) <= than


def interrupt(after_s: float, has_ended: threading.Event) -> None:
    """Interrupt the main thread; again if Python ignores the error, as in a weakref's callback."""
    while not has_ended.wait(after_s):
        signal.raise_signal(signal.SIGINT)
        after_s = 1.0


class Written:
    """Rows on a simulated GPU with real threads, whose loop adds 1 to each row.

    Attributes:
        rows: The rows.
        accepted: Rows that ``write_back`` has taken.
    """

    def __init__(self, device: Any, n: int = 4000, width: int = 16, **options: Any) -> None:
        self.rows = np.zeros((n, width), np.float32)
        self.accepted = np.zeros(n, np.float32)
        options = {"batch_size": 100, "depth": 2, "shuffle": True} | options
        self.feeder = Feeder(self.rows, device=device, **options)

    def batches(self) -> Iterator[Any]:
        for batch in self.feeder.batches():
            batch.data.add_(1)
            batch.write_back(batch.data)
            self.accepted[batch.rows] += 1
            yield batch

    def check(self, *, at_most_more: int = 0) -> None:
        """Check that all accepted rows are written, and no others, or rows of so many batches."""
        assert (self.rows == self.rows[:, :1]).all()
        more = self.rows[:, 0] - self.accepted
        assert ((more == 0) | (more == 1)).all()
        assert more.sum() <= 100 * at_most_more


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_collection])
@pytest.mark.parametrize("depth", [0, 3])
def test_rows_of_a_loop_that_was_left(leave: Any, depth: int) -> None:
    before = len(os.listdir("/proc/self/task"))
    with simulated_gpu(moves=True) as device:
        written = Written(device, depth=depth)
        leave(written.batches(), written.feeder)
        gc.collect()
        written.check()
        assert written.accepted.sum() == 100
        assert has_no_more_threads(before)
        written.feeder.close()


@pytest.mark.parametrize("width", [16, 9000])
def test_several_threads_write_long_rows(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_writes, "N_SCATTER_HELPERS", 3)
    with simulated_gpu(moves=True) as device:
        written = Written(device, 600, width, batch_size=130)
        for _ in range(3):
            for _ in written.batches():
                pass
            written.check()
        assert (written.rows == 3).all()
        assert written.feeder.stats.write_s > 0
        written.feeder.close()


def test_another_thread_may_close_the_feeder() -> None:
    for i in range(20):
        with simulated_gpu(moves=True) as device:
            written = Written(device)
            batches = written.batches()
            next(batches)
            closer = threading.Thread(target=written.feeder.close)
            timer = threading.Timer(0.001 * i, closer.start)
            timer.start()
            with pytest.raises((ClosedError, WriteBackError)):
                while True:
                    for _ in batches:
                        pass
                    batches = written.batches()
            timer.join()
            closer.join()
            written.check()


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_interrupts_lose_no_accepted_row() -> None:
    with simulated_gpu(moves=True) as device:
        for i in range(20):
            written = Written(device)
            has_ended = threading.Event()
            timer = threading.Thread(target=interrupt, args=(0.001 + 0.002 * i, has_ended))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    for _ in written.batches():
                        pass
            has_ended.set()
            timer.join()
            written.feeder.close()
            # The interrupt may come after the write-back, and before the batch is noted.
            written.check(at_most_more=1)


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_signal_handler_may_close_the_feeder() -> None:
    every: list[Written] = []
    earlier = signal.signal(signal.SIGUSR1, lambda *_: every[-1].feeder.close())
    with simulated_gpu(moves=True) as device:
        for i in range(20):
            written = Written(device)
            every.append(written)
            timer = threading.Timer(0.001 + 0.002 * i, signal.raise_signal, [signal.SIGUSR1])
            timer.start()
            with pytest.raises((ClosedError, WriteBackError)):
                while True:
                    for _ in written.batches():
                        pass
            timer.join()
            written.check(at_most_more=1)
    signal.signal(signal.SIGUSR1, earlier)


def test_a_fork_cannot_write() -> None:
    with simulated_gpu(moves=True) as device:
        written = Written(device)
        batches = written.feeder.batches()
        batch = next(batches)
        child = os.fork()
        if not child:
            code = 1
            try:
                batch.write_back(batch.data)
            except ClosedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        batch.write_back(batch.data + 1)
        batches.close()
        assert written.rows.sum() == 100 * 16
        written.feeder.close()


def test_a_program_may_end_within_a_loop(programs: Programs) -> None:
    program = """
import atexit, os
import numpy as np
import pinfeed
from benchmarks.host.gpu import simulated_gpu
opened = simulated_gpu(moves=True)
device = opened.__enter__()
rows = np.zeros((100_000, 64), np.float32)
atexit.register(lambda: (print(int(rows.sum()), flush=True), os._exit(0)))
feeder = pinfeed.Feeder(rows, batch_size=1000, depth=3, device=device)
for i, batch in zip(range(5), feeder.batches()):
    batch.data.add_(1)
    batch.write_back(batch.data)
loop = feeder.batches()
batch = next(loop)
batch.write_back(batch.data.add_(1))
"""
    done = programs.run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{6 * 1000 * 64}\n", "")
