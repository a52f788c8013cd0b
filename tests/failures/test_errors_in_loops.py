"""Errors of stores, samplers and write-backs: the loop raises them after the good batches."""

import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pinfeed import (
    ArrayStore,
    Feeder,
    NpyStore,
    errors,
)

DEPTHS = [0, 1, 3]


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


class Flaky(ArrayStore):
    """Array store that fails at certain rows."""

    def __init__(
        self, array: np.ndarray, error: BaseException, *, gather: int = -1, scatter: int = -1
    ) -> None:
        super().__init__(array)
        self._error = error
        self._bad_gather = gather
        self._bad_scatter = scatter

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        if self._bad_gather in rows:
            self.raise_it()
        super().gather(rows, out)

    def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
        if self._bad_scatter in rows:
            self.raise_it()
        super().scatter(rows, values)

    def raise_it(self) -> None:
        raise self._error


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_of_a_store_follows_the_good_batches(x: np.ndarray, depth: int) -> None:
    with Feeder(
        Flaky(x, ValueError("disk on fire"), gather=25), batch_size=10, depth=depth
    ) as feeder:
        loop = iter(feeder)
        assert [next(loop)[0, 0].item() for _ in range(2)] == [0, 30]
        with pytest.raises(ValueError, match="disk on fire") as caught:
            next(loop)
        assert "raise_it" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert next(loop, None) is None
        # The feeder can be used again.
        assert len(next(iter(feeder))) == 10


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "error", [StopIteration("x"), SystemExit(0), GeneratorExit(), StopAsyncIteration()], ids=repr
)
def test_exceptions_that_end_loops_silently_are_worker_errors(
    x: np.ndarray, depth: int, error: BaseException
) -> None:
    with Feeder(Flaky(x, error, gather=25), batch_size=10, depth=depth) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)) for _ in range(2)] == [10, 10]
        with pytest.raises(errors.WorkerError, match=r"raise_it .*without an error") as caught:
            next(loop)
        assert isinstance(caught.value.__cause__, type(error))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(0), KeyError("x")], ids=repr)
def test_an_error_of_a_sampler(x: np.ndarray, depth: int, error: BaseException) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            yield [1]
            yield [self.number()]

        def number(self) -> int:
            raise error

    with Feeder(x, rows=Sampler(), depth=depth) as feeder:
        loop = iter(feeder)
        assert len(next(loop)) == 1
        with pytest.raises(
            KeyError if isinstance(error, KeyError) else errors.WorkerError
        ) as caught:
            next(loop)
        assert caught.value is error or caught.value.__cause__ is error


def test_a_sampler_that_ends_early(x: np.ndarray) -> None:
    class Sampler:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2, 3])

    with Feeder(x, rows=Sampler(), batch_size=1) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(errors.WorkerError, match="promised 10 batches"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_later_write_overtakes_the_error_of_a_write_back(
    depth: int,
) -> None:
    table = np.zeros((100, 2))
    with Feeder(
        Flaky(table, OSError(28, "No space left"), scatter=25), batch_size=10, depth=depth
    ) as feeder:
        with pytest.raises(OSError, match="No space left") as caught:
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
        assert "raise_it" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert table[:20].all()
        assert not table[20:].any()
        # close() does not raise the error again.
        feeder.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_of_the_last_write_back_is_raised_after_a_loop(depth: int) -> None:
    table = np.zeros((100, 2))
    feeder = Feeder(
        Flaky(table, OSError(28, "No space left"), scatter=5), batch_size=10, depth=depth
    )
    for batch in feeder.batches():
        batch.write_back(batch.data + 1)
        break
    with pytest.raises(OSError, match="No space left"):
        feeder.close()
    feeder.close()


def test_a_file_that_shrinks_while_it_is_streamed(tmp_path: Path) -> None:
    """Without a map, the error does not depend on when it shrinks."""
    path = tmp_path / "x.npy"
    np.save(path, np.ones((10_000, 100)))
    with (
        NpyStore(path, memory_map=False) as store,
        Feeder(store, batch_size=100) as feeder,
        pytest.raises(errors.ReadError, match="shrunk"),
    ):
        for i, batch in enumerate(feeder):
            assert batch.all()
            if i == 3:
                with path.open("r+b") as file:
                    file.truncate(100_000)
