"""Memory and threads of wrap_readers, and what a loop leaves behind."""

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import numpy as np
import pytest
import torch
from support.reader_functions import DEPTHS, DEPTHS_AND_READERS, DEVICES, stack, wrapped
from support.schedules import SLOTS, STREAMS

from pinfeed import errors, wrap_readers
from pinfeed.testing import SimDevice, favour


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


class Sample(np.ndarray):
    """An array that can be watched."""


class Watch:
    """Counts the samples that are alive, whenever one is made."""

    def __init__(self, n_identities: int) -> None:
        self.n_identities = n_identities
        self.alive = 0
        self.most = []
        self.made = 0
        self._lock = threading.Lock()

    def __call__(self, i: int) -> Iterator[Sample]:
        for _ in range(2):
            yield self.sample()

    def sample(self) -> Sample:
        made = np.zeros((4, 4)).view(Sample)
        weakref.finalize(made, self.gone)
        with self._lock:
            self.alive = self.alive + 1
            self.made = self.made + 1
            if self.made % (2 * self.n_identities) == 1:
                self.most.append(0)
            self.most[-1] = max(self.most[-1], self.alive)
        return made

    def gone(self) -> None:
        with self._lock:
            self.alive -= 1


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "n_readers", "limit"), [(0, 1, 1), (2, 1, 1), (5, 1, 1), (2, 3, 3)]
)
def test_samples_do_not_pile_up(depth: int, n_readers: int, limit: int) -> None:
    """Each sample is written to its batch at once.

    In 3 epochs of 50 batches, no more samples are alive than are being read.
    """
    watch = Watch(200)
    gc.disable()
    try:
        with wrapped(
            200,
            read_input=watch,
            get_output=lambda i: [0, 0],
            one_read_count=2,
            batch_size=8,
            depth=depth,
            n_readers=n_readers,
        ) as f:
            for _ in range(3):
                assert len(list(f)) == 50
        assert watch.made == 3 * 400
        assert watch.alive == 0
        assert len(watch.most) == 3
        assert max(watch.most) <= limit
    finally:
        gc.enable()


@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
def test_samples_that_apply_collects_do_not_pile_up(depth: int, n_readers: int) -> None:
    watch, arguments = (
        Watch(200),
        {"depth": depth, "n_readers": n_readers, "one_read_count": 2, "batch_size": 8},
    )
    gc.disable()
    try:
        with wrapped(
            200,
            read_input=watch,
            get_output=lambda i: [0, 0],
            apply_on_input_batch=list,
            **arguments,
        ) as feeder:
            for _ in range(3):
                for x, _ in feeder:
                    assert len(x) == 8
        # These are the samples of one batch, while the previous one is released.
        assert max(watch.most) <= 2 * 8
        assert watch.alive == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_on_the_device_do_not_pile_up(depth: int) -> None:
    device, peaks = SimDevice(favour(*STREAMS, *SLOTS)), []
    with wrapped(100, depth=depth, device=device) as feeder:
        for _ in range(3):
            for x, y in feeder:
                del x, y
            peaks.append(device.peak_bytes)
    assert peaks[0] == peaks[2] <= (depth + 2) * 2 * 512


def test_generators_of_finished_batches_are_released() -> None:
    """Generators are released when their batch is done, not only when the epoch is."""

    def n_generators() -> int:
        return sum(
            type(thing) is GeneratorType and thing.__name__ == "samples"
            for thing in gc.get_objects()
        )

    with wrapped(100) as feeder:
        for k, _ in enumerate(feeder):
            if k == 45:
                # Without that, four generators of each of the 45 batches would be alive.
                assert n_generators() < 10


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "n_readers", "names"),
    [
        (0, 1, "MainThread"),
        (0, 4, "MainThread"),
        (2, 1, "pinfeed-read_0"),
        (2, 2, r"pinfeed-sample_[01]"),
    ],
)
def test_who_reads(depth: int, n_readers: int, names: str) -> None:
    seen = set()

    def reading(i: int) -> Iterator[int]:
        if i % 2:
            # The reader thread itself begins the first identity of each batch.
            seen.add(threading.current_thread().name)
        yield i

    list(wrapped(20, read_input=reading, depth=depth, n_readers=n_readers))
    assert seen
    assert all(re.fullmatch(names, name) for name in seen)


@pytest.mark.parametrize("applied", [False, True])
def test_identities_are_read_in_parallel_and_yielded_in_order(applied: bool) -> None:
    together = threading.Barrier(4, timeout=30)

    def reading(i: int) -> Iterator[int]:
        yield i
        # All identities of the batch must be in progress at once.
        together.wait()

    arguments: dict[str, Any] = {"apply_on_input_batch": stack} if applied else {}
    assert [
        x.tolist()
        for x, _ in wrapped(4, read_input=reading, batch_size=4, n_readers=4, **arguments)
    ] == [[0, 1, 2, 3]]


def test_batches_are_read_ahead() -> None:
    read = threading.Event()

    def reading(i: int) -> Iterator[int]:
        if i == 5:
            read.set()
        yield i

    for _ in wrapped(10, get_output=reading, depth=2):
        assert read.wait(10)
        break


class Opened:
    """A function whose generators can be seen to end."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.open: set[int] = set()
        self.breaks_at = breaks_at

    def __call__(self, i: int) -> Iterator[int]:
        self.open.add(i)
        try:
            for k in range(2):
                if k and i == self.breaks_at:
                    raise KeyError(i)
                yield i
        finally:
            self.open.remove(i)


# ---- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
@pytest.mark.parametrize("ending", ["break", "raise", "error", "count"])
def test_nothing_stays_open(ending: str, depth: int, n_readers: int, applied: bool) -> None:
    inputs, outputs = Opened(6 if ending == "error" else -1), Opened()
    arguments: dict[str, Any] = {"apply_on_output_batch": stack} if applied else {}
    arguments |= {
        "depth": depth,
        "n_readers": n_readers,
        "one_read_count": 2 if ending != "count" else 1,
    }
    feeder = wrapped(20, read_input=inputs, get_output=outputs, batch_size=8, **arguments)

    def loop() -> None:
        for _ in feeder:
            if ending == "break":
                break
            if ending == "raise":
                raise KeyError

    gc.disable()
    try:
        if ending == "break":
            loop()
        else:
            with pytest.raises((KeyError, errors.ArgumentError)) as caught:
                loop()
            # The error is still held, and its traceback keeps no identity open.
            assert caught.value.__traceback__ is not None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pinfeed")]
        assert not inputs.open | outputs.open
    finally:
        gc.enable()


def test_closing() -> None:
    feeder = wrapped()
    loop = iter(feeder)
    next(loop)
    feeder.close()
    feeder.close()
    assert next(loop, None) is None
    with pytest.raises(errors.ClosedError):
        iter(feeder)


@pytest.mark.parametrize("n_readers", [1, 3])
def test_close_while_another_thread_waits_for_a_batch(n_readers: int) -> None:
    asked = threading.Event()
    go_on = threading.Event()
    reads = []
    caught = []

    def reading(i: int) -> Iterator[int]:
        reads.append(i)
        if i >= 9:
            asked.set()
            assert go_on.wait(10)
        yield i

    feeder = wrapped(100, get_output=reading, batch_size=100, n_readers=n_readers)

    def run() -> None:
        try:
            list(feeder)
        except errors.ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert asked.wait(10)
    feeder.close()
    go_on.set()
    thread.join()
    assert "closed while its loop was waiting" in str(caught[0])
    # Closing has kept the rest of the batch from being read.
    assert len(reads) < 20


@pytest.mark.parametrize("n_readers", [1, 2])
def test_a_loop_that_is_collected_in_its_own_reader(n_readers: int) -> None:
    dropped = threading.Event()

    def reading(i: int) -> Iterator[int]:
        if i == 9:
            dropped.wait(10)
            gc.collect()
        yield i

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.loop = iter(wrapped(40, get_output=reading, depth=3, n_readers=n_readers))

    gc.disable()
    try:
        cycle = Cycle()
        next(cycle.loop)
        next(cycle.loop)
        del cycle
        dropped.set()
        while left := [
            thread for thread in threading.enumerate() if thread.name.startswith("pinfeed")
        ]:
            left[0].join(10)
            assert not left[0].is_alive(), "a thread waits for itself"
    finally:
        gc.enable()


def test_samples_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample of a batch gives its shape, so it is copied before the batch has memory."""
    copies: list[Any] = []
    copy = torch.Tensor.copy_

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies.append(tensor.shape)
        return copy(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    feeder = wrap_readers(
        range(8),
        range(8),
        read_input=lambda i: [np.full((1, 1 << 17), i, np.uint8)],
        get_output=lambda i: [i],
        batch_size=4,
        depth=0,
        device="cpu",
    )
    assert [x[:, 0, 0].tolist() for x, _ in feeder] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(copies) == 2, "one copy of a tensor per batch"
