"""A restartable feeder, iterated by frameworks that keep an iterator when they begin a loop."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pinfeed import ClosedError, Feeder, Ranks, errors, restartable, wrap_loader, wrap_readers

N = 20
SIZE = 8
N_BATCHES = 3


def feeder(**options: Any) -> Feeder:
    return Feeder(np.arange(N), batch_size=SIZE, shuffle=True, device="cpu", **options)


def epochs(n: int) -> list[list[list[int]]]:
    with feeder() as plain:
        return [[batch.tolist() for batch in plain] for _ in range(n)]


def take(batches: Iterator[Any], n: int) -> list[list[int]]:
    return [next(batches).tolist() for _ in range(n)]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_new_loop_ends_the_one_before_and_is_the_next_epoch(depth: int) -> None:
    want = epochs(3)
    with feeder(depth=depth) as plain:
        loop = restartable(plain)
        assert len(loop) == N_BATCHES
        first = iter(loop)
        # No batch is requested from this iterator, so it is no epoch.
        unused = iter(loop)
        second = iter(loop)
        assert take(second, N_BATCHES) == want[0]
        third = iter(loop)
        assert take(third, 1) == want[1][:1]
        assert [batch.tolist() for batch in loop] == want[2]
        for ended in (first, unused, second, third):
            with pytest.raises(StopIteration):
                next(ended)


def test_a_restartable_feeder_keeps_no_loop_alive() -> None:
    """``break`` ends the loop, as it ends a loop over the feeder itself."""
    with feeder(again="refuse") as plain:
        loop = restartable(plain)
        for _ in loop:
            break
        assert plain.epoch == 1
        # A running loop would refuse the call.
        plain.set_epoch(0)
        for _ in loop:
            with pytest.raises(ClosedError):
                iter(plain)
            loop.end()
            break
        loop.end()


def test_other_attributes_are_those_of_the_feeder() -> None:
    with feeder() as plain:
        loop = restartable(plain)
        loop.set_epoch(4)
        assert (loop.epoch, loop.device, loop.plan.batch_size) == (4, "cpu", SIZE)
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = loop.no_such_thing
        with pytest.raises(AttributeError):
            _ = loop._private
    with pytest.raises(ClosedError):
        iter(loop)


def readers() -> Any:
    return wrap_readers(
        range(N),
        range(N),
        read_input=lambda i: [i],
        get_output=lambda i: [i],
        batch_size=SIZE,
        one_read_count=1,
        device="cpu",
        shuffle=True,
    )


@pytest.mark.parametrize("make", [feeder, readers])
@pytest.mark.parametrize("n_lent", range(2 * N_BATCHES + 1))
def test_it_resumes_where_it_was_left(make: Callable[[], Any], n_lent: int) -> None:
    """The framework takes the state before the end of the loop, and begins a loop twice."""
    with make() as plain:
        want = [str(batch) for _ in range(2) for batch in plain]
    with make() as plain:
        loop, got = restartable(plain), []
        for n in (min(n_lent, N_BATCHES), max(0, n_lent - N_BATCHES)):
            batches = iter(loop)
            got += [str(next(batches)) for _ in range(n)]
        state = loop.state_dict()
        batches.close()
        assert loop.state_dict() == state
    with make() as plain:
        loop = restartable(plain)
        _unused, _ = iter(loop), loop.load_state_dict(state)
        _unused = iter(loop)
        while len(got) < len(want):
            begun = len(got)
            got += [str(batch) for batch in loop]
            assert len(got) > begun, "an epoch without batches"
    assert got == want


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_an_epoch_that_more_ranks_began(uneven: Any) -> None:
    def share(rank: int, world_size: int) -> Feeder:
        return Feeder(
            np.arange(40),
            batch_size=2,
            ranks=Ranks(uneven, rank=rank, world_size=world_size),
            device="cpu",
        )

    with share(0, 4) as plain:
        next(iter(plain))
        state = plain.state_dict()
    with share(1, 2) as plain:
        loop = restartable(plain)
        loop.load_state_dict(state)
        for _ in loop:
            last = loop.state_dict()
    with share(1, 2) as plain:
        loop = restartable(plain)
        loop.load_state_dict(last)
        assert (loop.epoch, len(list(loop))) == (1, 10)


def test_a_restartable_loader() -> None:
    loader = wrap_loader(DataLoader(range(N), batch_size=SIZE), device="cpu")  # type: ignore[arg-type]
    loop = restartable(loader)
    kept = iter(loop)
    next(kept)
    assert torch.cat(list(loop)).tolist() == list(range(N))
    assert not hasattr(loop, "state_dict")


def test_rows_of_unknown_number() -> None:
    class Rows:
        def __iter__(self) -> Iterator[int]:
            return iter(range(N))

    with Feeder(np.arange(N), rows=Rows(), batch_size=SIZE, device="cpu") as plain:
        loop = restartable(plain)
        batches = iter(loop)
        take(batches, N_BATCHES)
        assert loop.state_dict()["batch"] == N_BATCHES
        assert next(batches, None) is None
        assert (loop.state_dict()["epoch"], loop.state_dict()["batch"]) == (1, 0)


@pytest.mark.parametrize(
    "wrong", [None, [1], DataLoader(range(N))], ids=lambda value: type(value).__name__
)  # type: ignore[arg-type]
def test_objects_that_are_no_feeders_are_refused(wrong: Any) -> None:
    with pytest.raises(
        errors.ArgumentError,
        match=r"expected a Feeder, or what wrap_loader or wrap_readers returned; give restartable",
    ):
        restartable(wrong)
