"""Threads of wrap_dataset: how many run, in which order, and what they keep."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from pinfeed import wrap_dataset


@pytest.mark.parametrize("size", [1, 2, 8])
def test_n_samples_run_at_the_same_time_and_never_more(size: int) -> None:
    together = threading.Barrier(3, timeout=30)
    lock = threading.Lock()
    now = most = 0
    is_trial = True
    waiting = [True]

    def sample(i: int) -> int:
        nonlocal now, most
        if is_trial:
            return i
        with lock:
            now += 1
            most = max(most, now)
        # The loop may begin with the samples of the next epoch.
        if i < 3 and waiting:
            together.wait()
            waiting.clear()
        with lock:
            now -= 1
        return i

    feeder = wrap_dataset(range(24), sample, batch_size=size, threads=3, device="cpu")
    is_trial = False
    assert torch.cat(list(feeder)).tolist() == list(range(24))
    assert most == 3


def test_samples_begin_in_order_and_end_in_any_order() -> None:
    begun: list[int] = []
    ended: list[int] = []
    last = threading.Event()
    is_trial = True

    def sample(i: int) -> int:
        if is_trial:
            return i
        begun.append(i)
        # Each thread may keep a sample before the memory of the batch is known.
        if i == 2:
            assert last.wait(30)
        ended.append(i)
        if i == 4:
            last.set()
        return i

    feeder = wrap_dataset(range(5), sample, batch_size=5, threads=2, device="cpu", continuous=False)
    is_trial = False
    assert next(iter(feeder)).tolist() == [0, 1, 2, 3, 4]
    # The other thread has taken the later samples in order.
    assert [i for i in begun if i > 2] == [3, 4]
    assert sorted(ended[:2]) == [0, 1]
    assert ended[2:] == [3, 4, 2]


class Value(torch.Tensor):
    """A tensor that tests can refer to weakly."""


def test_samples_and_batches_are_released() -> None:
    samples: list[weakref.ref[Any]] = []
    most = 0

    def sample(i: int) -> torch.Tensor:
        nonlocal most
        value = torch.full((4,), i)
        samples.append(weakref.ref(value))
        most = max(most, sum(one() is not None for one in list(samples)))
        return value

    batches = []
    gc.collect()
    gc.disable()
    try:
        with wrap_dataset(range(60), sample, batch_size=6, threads=2, device="cpu") as feeder:
            for batch in feeder:
                batches.append(weakref.ref(batch))
                del batch
        assert not any(one() is not None for one in [*samples, *batches])
    finally:
        gc.enable()
    # Three batches are made or full, and two samples are being written.
    assert most <= 3 * 6 + 2


def test_skipped_errors_keep_no_batch() -> None:
    def sample(i: int) -> torch.Tensor:
        if i % 3 == 0:
            raise ValueError(i) from KeyError(i)
        return torch.full((4,), i)

    batches = []
    gc.collect()
    gc.disable()
    try:
        with wrap_dataset(
            range(12), sample, batch_size=4, threads=2, device="cpu", on_error="skip"
        ) as feeder:
            for batch in feeder:
                batches.append(weakref.ref(batch))
                storage = weakref.ref(batch.untyped_storage())
                del batch
        assert [index for _, index, _ in feeder.skipped] == [0, 3, 6, 9]
        error = feeder.skipped[0][2]
        assert error.__traceback__ is None
        assert any("raised in sample" in note for note in error.__notes__)
        assert storage() is None
        assert not any(one() is not None for one in batches)
    finally:
        gc.enable()


def test_samples_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked: list[int] = []
    stack = torch.stack

    def counting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        stacked.append(len(tensors))
        return stack(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "stack", counting)
    list(wrap_dataset(range(8), lambda i: torch.full((2,), i), batch_size=4, device="cpu"))
    assert set(stacked) <= {1}


def test_at_most_depth_and_one_batches_are_begun() -> None:
    begun: set[int] = set()

    def sample(i: int) -> int:
        begun.add(i // 2)
        return i

    with wrap_dataset(range(40), sample, batch_size=2, threads=4, depth=2, device="cpu") as feeder:
        for number, _ in enumerate(feeder):
            assert max(begun) <= number + 3
