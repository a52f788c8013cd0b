"""A rank that fails, leaves or does something else ends the loops of all ranks with an error."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.sharded_programs import (
    BATCHES,
    N,
    RankLoop,
)
from support.simranks import RankThreads

from pinfeed import (
    ShardedEmbedding,
    train_rows,
)
from pinfeed.errors import (
    ArgumentError,
    ClosedError,
    RankError,
    RowIndexError,
)


def fails(i: int) -> None:
    if i == 3:
        raise KeyError("number three")


def failing(batches: Sequence[Any]) -> Iterator[Any]:
    for i, batch in enumerate(batches):
        fails(i)
        yield batch


class Raises(RankLoop):
    def training_step(self, i: int) -> bool:
        if self.rank == 0:
            fails(i)
        return False


class Breaks(RankLoop):
    def training_step(self, i: int) -> bool:
        return self.rank == 0 and i == 3


class StepsNot(RankLoop):
    def training_step(self, i: int) -> bool:
        if self.rank == 0 and i == 3:
            self.optimizer.step = lambda: None
        return False


class Reads(RankLoop):
    def training_step(self, i: int) -> bool:
        if self.rank == 0 and i == 3:
            self.table.read([0])
        return False


class ReadsWrongly(RankLoop):
    def training_step(self, i: int) -> bool:
        self.table.read([N] if self.rank == 0 and i == 3 else [0])
        return False


def everywhere(_: int, batches: Any) -> dict[str, Any]:
    return {}


def on_rank_0(**options: Callable[[Any], Any]) -> Callable[[int, Any], dict[str, Any]]:
    return lambda rank, batches: (
        {name: value(batches) for name, value in options.items()} if rank == 0 else {}
    )


def wrong_id(batches: Any) -> Callable[[Any], Any]:
    return lambda ids: [N] if int(ids[1]) == 3 else ids


SCENES: dict[
    str, tuple[Any, dict[str, Any], Callable[[int, Any], dict[str, Any]], Any, str, str]
] = {
    # The loop of rank 0, its options, the arguments of each rank, the error on rank 0 or the number
    # of its batches, the text of its error, and the text of the error on rank 1.
    "a loader that ends": (
        RankLoop,
        {},
        on_rank_0(loader=lambda b: b[:3]),
        RankError,
        "rank 0: has no batch 3; rank 1: has a batch 3",
        "the same number of batches",
    ),
    "a loader that raises": (
        RankLoop,
        {},
        on_rank_0(loader=failing),
        KeyError,
        "number three",
        "rank 0: failed at batch 3 .KeyError.'number three'",
    ),
    "ids out of range": (
        RankLoop,
        {},
        on_rank_0(ids_of=wrong_id),
        RowIndexError,
        "row 8 is out of range",
        "rank 0: failed at batch 3 .RowIndexError",
    ),
    "a step that raises": (
        Raises,
        {},
        everywhere,
        KeyError,
        "number three",
        "rank 0: left its loop at batch 3 .break, or an error in its training step",
    ),
    "a step that breaks the loop": (
        Breaks,
        {},
        everywhere,
        3,
        "",
        "rank 0: left its loop at batch 3 .*rank 1: calls step.. in batch 3",
    ),
    "no step": (
        StepsNot,
        {},
        everywhere,
        RankError,
        "rank 0: (takes|has a) batch 4; rank 1: calls step.. in batch 3",
        "expected all ranks to take the same steps",
    ),
    "another call": (
        Reads,
        {},
        everywhere,
        RankError,
        "rank 0: reads rows; rank 1: calls step.. in batch 3",
        "the same",
    ),
    "a wrong row to read": (
        ReadsWrongly,
        {},
        everywhere,
        RowIndexError,
        "row 8 is out",
        "rank 0: failed .RowIndexError.*rank 1: reads rows",
    ),
    "a store that cannot be read": (
        RankLoop,
        {"store": "gather"},
        everywhere,
        OSError,
        "cannot read row 4",
        "rank 0: failed at batch 4 .OSError",
    ),
    "a store that cannot be written": (
        RankLoop,
        {"store": "scatter"},
        everywhere,
        OSError,
        "cannot write row 4",
        "rank 0: left its loop at batch",
    ),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("scene", SCENES)
def test_no_rank_waits_for_a_rank_that_fails(scene: str, depth: int) -> None:
    kind, made, given, here, message, told = SCENES[scene]
    ranks = RankThreads(2)

    def program(rank: int) -> int:
        n: int = kind(ranks, rank, depth=depth, **made).run(
            **given(rank, [batch[rank] for batch in BATCHES])
        )
        return n

    first, second = ranks.run(program)
    if isinstance(here, int):
        assert first == here
    else:
        assert type(first) is here
        assert re.search(message, str(first)), first
    assert type(second) is RankError
    assert re.search(told, str(second)), second
    assert ranks.run(lambda rank: RankLoop(ranks, rank, depth=depth).run()) == [6, 6], (
        "the next loop"
    )


def test_loops_that_differ() -> None:
    ranks = RankThreads(2)
    for error in ranks.run(lambda rank: RankLoop(ranks, rank, depth=rank).run()):
        assert re.search(
            "rank 0: begins a loop .*depth=0.*"
            "rank 1: begins a loop .*depth=1.*; expected the same tables",
            str(error),
        )
    assert ranks.run(lambda rank: RankLoop(ranks, rank).run()) == [6, 6]


class Misused(RankLoop):
    """A loop with mistakes that each rank detects alone."""

    def training_step(self, i: int) -> bool:
        other = ShardedEmbedding(N, 2, process_group=self.group)
        with pytest.raises(
            ClosedError, match="a loop over sharded tables of these ranks is running"
        ):
            next(iter(train_rows([torch.tensor([0])], {other: lambda ids: ids}, device="cpu")))
        self.optimizer.step()
        with pytest.raises(ArgumentError, match="table was looked up after step"):
            self.table(torch.tensor([7]))
        if i == 1:
            with torch.no_grad():
                self.table.weight.mul_(2)
        return False


def test_misuse_of_a_sharded_table_is_refused() -> None:
    ranks = RankThreads(2)
    for error in ranks.run(lambda rank: Misused(ranks, rank).run()):
        assert re.search("the training step changed rows of a sharded table", str(error))
    assert ranks.run(lambda rank: RankLoop(ranks, rank).run()) == [6, 6]


def test_rows_are_not_read_by_a_reader() -> None:
    ranks = RankThreads(2)

    def program(rank: int) -> None:
        body = RankLoop(ranks, rank)
        body.run(ids_of=lambda ids: body.table.read(ids).sum() and ids)

    for error in ranks.run(program):
        assert isinstance(error, ClosedError)
        assert "in another thread than that of their loop" in str(error)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_new_loop_on_every_rank_ends_the_one_before(depth: int) -> None:
    """Ending a loop is exact: tables and later loops are those after a break on every rank."""

    def program(rank: int, *, ends: bool) -> Any:
        body = RankLoop(ranks, rank)
        mine = [batch[rank] for batch in BATCHES]
        loop = train_rows(
            mine,
            {body.table: lambda ids: ids},
            optimizer=body.optimizer,
            device="cpu",
            depth=depth,
        )

        def train(batches: Iterator[Any]) -> None:
            for ids in batches:
                body.table(ids).sum().backward()
                body.optimizer.step()
                body.optimizer.zero_grad()

        first = iter(loop)
        train(itertools.islice(first, 2))
        if not ends:
            first.close()  # type: ignore[attr-defined]
        second = iter(loop)
        if ends:
            with pytest.raises(ClosedError, match="another loop over its feeder began"):
                next(first)
        train(second)
        return body.table.read(torch.arange(N)).tolist()

    ranks = RankThreads(2)
    after_break = ranks.run(lambda rank: program(rank, ends=False))
    assert not isinstance(after_break[0], Exception)
    assert ranks.run(lambda rank: program(rank, ends=True)) == after_break
