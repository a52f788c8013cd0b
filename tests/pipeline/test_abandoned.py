"""Loops that only a traceback keeps give way to the next one; all others are refused."""

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from pinfeed import Feeder, HostEmbedding, RowOptimizer, train_rows, wrap_loader
from pinfeed.errors import ClosedError

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before Python 3.11 such a loop is refused"
)

N = 5


def rows_loop(**options: Any) -> Any:
    batches = [torch.tensor([i]) for i in range(N)]
    return train_rows(batches, {HostEmbedding(N, 2): lambda ids: ids}, **options)


KINDS: dict[str, Callable[..., Any]] = {
    "Feeder": lambda **options: Feeder(np.zeros((N, 2)), batch_size=1, **options),
    "wrap_loader": lambda **options: wrap_loader(DataLoader(range(N)), **options),
    "train_rows": rows_loop,
}
FEEDERS: dict[str, Callable[[], Any]] = {
    kind: functools.partial(make, device="cpu", again="refuse") for kind, make in KINDS.items()
}


def fail(batch: Any) -> Any:
    raise KeyError(batch)


def for_loop(feeder: Any) -> None:
    for batch in feeder:
        fail(batch)


def variable(feeder: Any) -> None:
    iterator = iter(feeder)
    for batch in iterator:
        fail(batch)


def progress(feeder: Any) -> None:
    for batch in tqdm(feeder, disable=True):
        fail(batch)


def counted(feeder: Any) -> None:
    for i, batch in enumerate(itertools.islice(feeder, 3)):
        fail((i, batch))


def zipped(feeder: Any) -> None:
    for both in zip(feeder, range(N), strict=True):
        fail(both)


def mapped(feeder: Any) -> None:
    list(map(fail, feeder))


def closure(feeder: Any) -> None:
    iterator = iter(feeder)

    def inner() -> None:
        fail(next(iterator))

    inner()


def generator(feeder: Any) -> None:
    def batches() -> Iterator[Any]:
        for batch in feeder:
            yield fail(batch)

    for _ in batches():
        pass


LEFT_BY = [for_loop, variable, progress, counted, zipped, mapped, closure, generator]


def error_of(run: Callable[[Any], None], feeder: Any) -> BaseException:
    with pytest.raises(KeyError) as info:
        run(feeder)
    return info.value


@pytest.mark.parametrize(
    ("kind", "looked_at"), [*((kind, False) for kind in FEEDERS), ("Feeder", True)]
)
@pytest.mark.parametrize("run", LEFT_BY)
def test_a_loop_that_a_traceback_keeps_gives_way(
    kind: str, run: Callable[[Any], None], looked_at: bool
) -> None:
    with FEEDERS[kind]() as feeder:
        error = error_of(run, feeder)
        traceback = error.__traceback__
        while looked_at and traceback is not None:
            # Tools that show the variables of each frame leave a dictionary of the variables there.
            assert traceback.tb_frame.f_locals is not None
            traceback = traceback.tb_next
        assert len(list(feeder)) == N
        del error


def test_a_table_whose_loop_a_traceback_keeps() -> None:
    """Only the frame of the ``for`` statement, which the traceback keeps, holds the loop."""
    table = HostEmbedding(N, 2, init="zeros")
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=1.0)
    ids = [torch.tensor([i]) for i in range(N)]

    def train(bad: int) -> None:
        for batch in train_rows(ids, {table: lambda ids: ids}, optimizer=optimizer, device="cpu"):
            table(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch.item() == bad:
                fail(batch)

    with pytest.raises(KeyError) as info:
        train(1)
    train(-1)
    assert table.read(range(N))[:, 0].tolist() == [-2, -2, -1, -1, -1]
    assert isinstance(info.value, KeyError)


KEPT: list[Any] = []


def keep_in_a_list(feeder: Any) -> Iterable[Any]:
    KEPT.append(iter(feeder))
    return KEPT[-1]


def keep_in_an_object(feeder: Any) -> Iterable[Any]:
    class Trainer:
        batches = iter(feeder)

    KEPT.append(Trainer())
    return Trainer.batches


def keep_in_a_generator(feeder: Any) -> Iterable[Any]:
    def batches() -> Iterator[Any]:
        yield from feeder

    KEPT.append(batches())
    return KEPT[-1]


@pytest.mark.parametrize("keep", [keep_in_a_list, keep_in_an_object, keep_in_a_generator])
@pytest.mark.parametrize("kind", FEEDERS)
def test_a_loop_that_can_continue_is_refused(kind: str, keep: Callable[[Any], Any]) -> None:
    with FEEDERS[kind]() as feeder:
        try:
            batches = keep(feeder)
            next(batches)
            with pytest.raises(ClosedError, match="is running"):
                iter(feeder)
            assert len(list(batches)) == N - 1
        finally:
            KEPT.clear()


@pytest.mark.parametrize("kind", FEEDERS)
def test_a_loop_that_runs_is_refused(kind: str) -> None:
    """The loop runs in this thread, or in another one, whose stack alone holds the iterator."""
    with FEEDERS[kind]() as feeder:
        for _ in feeder:
            with pytest.raises(ClosedError, match="is running"):
                iter(feeder)
    # A loop in another thread is not ended.
    with KINDS[kind](device="cpu", again="end") as feeder:
        begun = threading.Event()
        go_on = threading.Event()
        n = 0

        def run() -> None:
            nonlocal n
            for _ in feeder:
                begun.set()
                go_on.wait()
                n += 1

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        with pytest.raises(ClosedError, match="is running"):
            iter(feeder)
        go_on.set()
        thread.join()
        assert n == N
