"""Faults of samples in threads: nothing hangs, and errors are those of the plain loop."""

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import errors, wrap_dataset

N, SIZE = 24, 4
KINDS: list[Any] = [ValueError, StopIteration, SystemExit, MemoryError]


class Fatal(BaseException):
    """An error that no loop skips."""


def failing(bad: dict[int, Any]) -> Any:
    """Return a transform that fails at some samples: an error, or a sample unlike the others."""

    def sample(i: int) -> Any:
        found = bad.get(i)
        if isinstance(found, type):
            raise found(i)
        return torch.tensor([i, i]) if found is None else found

    return sample


# default_collate converts the others of the batch to its dtype.
CONVERTING = torch.zeros(2)
UNLIKE: list[Any] = [torch.zeros(3, dtype=torch.int64), CONVERTING, (1,), "x", object()]


def events(feeder: Any) -> list[Any]:
    """Return the first column of each batch, and the type of each error."""
    found: list[Any] = []
    loop = iter(feeder)
    while True:
        try:
            found.append(next(loop)[:, 0].tolist())
        except StopIteration:
            return found
        except BaseException as error:
            found.append(type(error))
            # The loop has ended, unless it keeps errors.
            if len(found) > N:
                return found


def cases(n: int) -> list[Any]:
    return [pytest.param(i, id=str(i), marks=pytest.mark.slow if i >= 40 else ()) for i in range(n)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", cases(1000))
def test_errors_do_not_depend_on_threads(case: int, caplog: Any) -> None:
    """The error is that of the first sample, and the skipped samples are always the same ones."""
    caplog.set_level(logging.ERROR, "pinfeed")
    rng = np.random.default_rng(case)
    kinds = [*KINDS, *UNLIKE]
    bad = {int(i): kinds[rng.integers(len(kinds))] for i in rng.choice(N, rng.integers(1, 7))}
    on_error = ("raise", "next", "skip")[case % 3]
    if on_error == "raise":
        bad.pop(0, None)
    found = []
    for threads, depth in ((1, 0), (1, 2), (int(rng.integers(2, 9)), int(rng.integers(1, 4)))):
        feeder = wrap_dataset(
            range(N),
            failing(bad),
            batch_size=SIZE,
            threads=threads,
            depth=depth,
            device="cpu",
            on_error=on_error,
        )
        happened = events(feeder)
        skipped = [(epoch, i, type(error)) for epoch, i, error in feeder.skipped]
        found.append((happened, skipped))
        feeder.close()
    assert found[0] == found[1] == found[2]
    if on_error == "raise" and any(kind is not CONVERTING for kind in bad.values()):
        assert any(isinstance(event, type) for event in found[0][0])


@pytest.mark.parametrize("on_error", ["raise", "next", "skip"])
@pytest.mark.parametrize("depth", [0, 2])
def test_fatal_errors_end_every_loop(depth: int, on_error: Any) -> None:
    feeder = wrap_dataset(
        range(N),
        failing({5: KeyError, 9: Fatal}),
        batch_size=SIZE,
        threads=3,
        depth=depth,
        device="cpu",
        on_error=on_error,
    )
    found = events(feeder)
    assert found[-1] is (KeyError if on_error == "raise" else Fatal)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ending", ["break", "close", "drop", "raise"])
def test_no_thread_is_left(ending: str, threads: int) -> None:
    feeder = wrap_dataset(range(1000), failing({}), batch_size=SIZE, threads=threads, device="cpu")
    try:
        loop = iter(feeder)
        next(loop)
        if ending == "close":
            feeder.close()
            assert next(loop, None) is None
        if ending == "raise":
            raise KeyError(ending)
    except KeyError:
        pass
    del loop
    assert not [t for t in threading.enumerate() if t.name.startswith("pinfeed")]
    feeder.close()


@pytest.mark.parametrize("collate", [None, lambda samples: torch.stack(samples)])
def test_close_from_another_thread_ends_a_waiting_loop(collate: Any) -> None:
    begun = threading.Event()
    resume = threading.Event()
    made: list[int] = []
    caught: list[Any] = []

    def sample(i: int) -> torch.Tensor:
        made.append(i)
        if i % 500 >= 5:
            begun.set()
            assert resume.wait(30)
        return torch.tensor([i, i])

    feeder = wrap_dataset(
        range(1000), sample, batch_size=500, threads=2, device="cpu", collate_fn=collate
    )

    def run() -> None:
        try:
            list(feeder)
        except errors.ClosedError as error:
            caught.append(error)

    made.clear()
    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30)
    feeder.close()
    resume.set()
    thread.join(30)
    assert len(caught) == 1
    assert len(made) < 1000


def test_too_many_skipped_samples_raise() -> None:
    feeder = wrap_dataset(
        range(N),
        failing(dict.fromkeys(range(1, N, 5), ValueError)),
        batch_size=SIZE,
        threads=3,
        device="cpu",
        on_error="skip",
        max_skipped=2,
    )
    found = events(feeder)
    assert found == [[0, 2, 3], [4, 5, 7], errors.ReadError]
    assert [index for _, index, _ in feeder.skipped] == [1, 6, 11]


@pytest.mark.parametrize("transform", [None, lambda batch: batch + 1])
def test_batches_without_samples_are_left_out(transform: Any) -> None:
    feeder = wrap_dataset(
        range(N),
        failing(dict.fromkeys(range(4, 12), ValueError)),
        batch_size=SIZE,
        threads=2,
        device="cpu",
        on_error="skip",
        device_transform=transform,
    )
    more = int(transform is not None)
    wanted = [[i + more for i in range(k, k + 4)] for k in (0, 12, 16, 20)]
    assert events(feeder) == wanted
    assert len(feeder) == N // SIZE


def test_skipped_samples_are_those_the_loop_has_received() -> None:
    feeder = wrap_dataset(
        range(N),
        failing(dict.fromkeys(range(1, N, 4), ValueError)),
        batch_size=SIZE,
        threads=2,
        depth=3,
        device="cpu",
        on_error="skip",
        device_transform=lambda batch: batch,
    )
    for number, _ in enumerate(feeder):
        assert [index for _, index, _ in feeder.skipped] == list(range(1, 4 * number + 2, 4))
    for _ in feeder:
        break
    assert [epoch for epoch, _, _ in feeder.skipped] == [0] * 6 + [1]
