"""Errors of a loader, a data set or a worker process, raised in the loop over wrap_loader."""

import gc
import multiprocessing
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.loaders import DEPTHS, SIZE, N, Numbers, Stream, queues_closed, starts
from support.programs import Programs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
)

from pinfeed import errors, wrap_loader

__all__ = ["queues_closed"]


def broken(x: float) -> torch.Tensor:
    if x == 9:
        raise KeyError("number nine")
    return torch.tensor(x)


def stopping(x: float) -> torch.Tensor:
    return torch.tensor(x) if x != 9 else next(iter([]))


def exiting(x: float) -> torch.Tensor:
    return torch.tensor(x) if x != 9 else sys.exit(3)


def dying(x: float) -> torch.Tensor:
    os._exit(3)


def interrupted(x: float) -> torch.Tensor:
    if x == 9:
        raise KeyboardInterrupt
    return torch.tensor(x)


def stopping_collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([stopping(float(sample)) for sample in samples])


def until_error(loader: Any, kind: type[BaseException]) -> tuple[list[int], BaseException]:
    """Return the first sample of each batch, and the error that ended the loop.

    ``pytest.raises`` would make a reference cycle of the error and the frames of the loop.
    """
    got: list[int] = []
    try:
        got.extend(int(batch[0]) for batch in loader)  # one by one
    except kind as error:
        return got, error
    pytest.fail(f"a silent end after {got}")


def clear_frames(error: BaseException | None) -> None:
    """Clear the frames of the error's traceback.

    torch raises a worker's error from a variable. This is a reference cycle, which keeps the worker
    processes until it is collected.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def frames(error: BaseException | None) -> list[str]:
    """Return the names of the functions in the error's traceback."""
    assert error is not None
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("dataset", [Numbers(broken), Stream(broken)], ids=["map", "iterable"])
def test_errors_come_after_the_good_batches_with_their_traceback(dataset: Any, depth: int) -> None:
    loader = wrap_loader(DataLoader(dataset, batch_size=SIZE), device="cpu", depth=depth)
    for _ in range(2):
        # An error ends its loop, not the loader.
        got, error = until_error(loader, KeyError)
        assert got == [0, 4]
        assert error.args == ("number nine",)
        assert frames(error)[-1] == "broken"


def test_errors_of_workers_follow_the_good_batches() -> None:
    got, error = until_error(
        wrap_loader(DataLoader(Numbers(broken), batch_size=SIZE, num_workers=2), device="cpu"),
        KeyError,
    )
    assert got == [0, 4]
    assert "in broken" in str(error)
    clear_frames(error)
    assert not multiprocessing.active_children()


SILENT: dict[str, tuple[Callable[[], Any], str]] = {
    "StopIteration": (lambda: DataLoader(Numbers(stopping), batch_size=SIZE), "stopping"),
    "StopIteration, no length": (
        lambda: DataLoader(Numbers(stopping), batch_sampler=BatchSampler(Endless(), SIZE, False)),
        "stopping",
    ),
    "StopIteration, collate": (
        lambda: DataLoader(Numbers(), batch_size=SIZE, collate_fn=stopping_collate),
        "stopping",
    ),
    "StopIteration, samples": (
        lambda: DataLoader(
            Numbers(lambda x: [stopping(x)]), sampler=range(0, N, 3), batch_size=None
        ),
        "stopping",
    ),
    "StopIteration, iterable": (lambda: DataLoader(Stream(stopping), batch_size=SIZE), "stopping"),
    "SystemExit": (lambda: DataLoader(Numbers(exiting), batch_size=SIZE), "exiting"),
    "SystemExit, iterable": (lambda: DataLoader(Stream(exiting), batch_size=SIZE), "exiting"),
}


class Endless:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(N)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("make", "where"), SILENT.values(), ids=SILENT)
def test_exceptions_that_end_loops_silently_are_worker_errors(
    make: Callable[[], Any], where: str, depth: int
) -> None:
    got, error = until_error(wrap_loader(make(), device="cpu", depth=depth), errors.WorkerError)
    assert got in ([0, 4], [0, 3, 6])
    raised = (
        r"raised (StopIteration\(\)|SystemExit\(3\)), which would end the loop without an error"
    )
    assert re.match(rf"{where} \(.*test_dataloader_errors.py, line \d+\) {raised}", str(error))
    assert where in frames(error.__cause__)


@pytest.mark.parametrize("depth", [0, 2])
def test_stop_iteration_in_a_worker_is_an_error(depth: int) -> None:
    bare = DataLoader(Numbers(stopping), batch_size=SIZE, num_workers=2)
    got, error = until_error(wrap_loader(bare, device="cpu", depth=depth), errors.WorkerError)
    assert got == [0, 4]
    assert "in stopping" in str(error)
    clear_frames(error)
    assert not multiprocessing.active_children()


def test_system_exit_in_a_worker_is_an_error(programs: Programs) -> None:
    """The test runs in a process of its own.

    torch's handler for the death of a worker process raises wherever the main thread is.
    """
    program = """
        import sys
        from torch.utils.data import DataLoader
        from pinfeed import wrap_loader

        class Numbers:
            def __len__(self):
                return 8

            def __getitem__(self, i):
                return i if i != 5 else sys.exit(3)

        try:
            loader = DataLoader(Numbers(), batch_size=None, num_workers=1, timeout=1)
            for batch in wrap_loader(loader, device="cpu"):
                pass
        except Exception as error:
            print("an error:", error)
        else:
            print("silence")
        """
    run = programs.run("if True:" + program, timeout_s=100)
    assert run.stdout.startswith("an error:"), run


@pytest.mark.parametrize("depth", [0, 2])
def test_a_keyboard_interrupt_is_raised_unchanged(depth: int) -> None:
    got, _ = until_error(
        wrap_loader(DataLoader(Numbers(interrupted), batch_size=SIZE), device="cpu", depth=depth),
        KeyboardInterrupt,
    )
    assert got == [0, 4]


class Bounded:
    """A batch sampler whose length is an upper bound."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [4, 5])


class Protocol:
    """The same batches from an iterator class, which ends by raising StopIteration."""

    def __init__(self) -> None:
        self.batches = [[4, 5], [0, 1]]

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> "Protocol":
        return Protocol()

    def __next__(self) -> list[int]:
        return self.fetch()

    def fetch(self) -> list[int]:
        if not self.batches:
            raise StopIteration
        return self.batches.pop()


@pytest.mark.parametrize("sampler", [Bounded(), Protocol()], ids=["generator", "iterator"])
@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_length_that_is_an_upper_bound_is_no_error(sampler: Any, n_workers: int) -> None:
    bare = DataLoader(Numbers(), batch_sampler=sampler, num_workers=n_workers)
    assert starts(wrap_loader(bare, device="cpu")) == [0, 4]


class Refusing:
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        raise self.kind("no batches today")


def test_an_error_at_the_begin_is_raised_there() -> None:
    with wrap_loader(Refusing(KeyError), device="cpu") as loader:
        kept = []
        for _ in range(2):
            with pytest.raises(KeyError, match="no batches today") as caught:
                iter(loader)
            # Python keeps sys.last_exc in the same way. The error must not count as a loop.
            kept.append(caught)
    for kind in (StopIteration, SystemExit):
        with pytest.raises(errors.WorkerError, match="no batches today"):
            iter(wrap_loader(Refusing(kind), device="cpu"))


class Batches:
    """An iterator that can be watched; its third batch is an error."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> int:
        self.n += 1
        if self.n == 3:
            raise KeyError
        return self.n


class Watched:
    def __iter__(self) -> Iterator[int]:
        batches = Batches()
        self.last = weakref.ref(batches)
        return batches


@pytest.mark.parametrize("depth", [0, 2])
def test_nothing_holds_the_loaders_iterator_after_an_error(depth: int) -> None:
    """The worker processes of a held iterator would live until the next garbage collection.

    They would then be forked into those of the next epoch.
    """
    bare = Watched()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError):
            list(wrap_loader(bare, device="cpu", depth=depth))
        assert bare.last() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_worker_that_dies_ends_the_loop_at_once(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data import dataloader

    # Torch's iterator looks for dead workers after 5 s, here after an hour.
    get = dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(get, "__defaults__", (3600,))
    loader = wrap_loader(DataLoader(Numbers(dying), num_workers=1), device="cpu", depth=depth)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(loader)
