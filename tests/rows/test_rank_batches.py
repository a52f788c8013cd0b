"""Ranks share the rows of an epoch, and another number of ranks can resume it.

The parts are equal, or joined so that each row occurs once. Global batches are the same at any
world size.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.unwrapped import unwrapped
from torch.utils.data import SequentialSampler

from pinfeed import Config, Feeder, MiB, NpyStore, Ranks, rows, wrap_readers
from pinfeed.errors import ArgumentError, BudgetError
from pinfeed.readahead.read_plan import plan_reads
from pinfeed.readahead.resident_file import MappedFile
from pinfeed.readahead.source_reads import FreeMemory
from pinfeed.readahead.strategy import DirectReads
from pinfeed.rows.blocks import BlockShuffled
from pinfeed.rows.order_batches import RankBatches
from pinfeed.rows.orders import Order

Uneven = Literal["pad", "drop", "join"]
Batches = list[list[int]]

ORDERS: list[Order] = [
    rows.sequential(),
    rows.shuffled(3),
    rows.block_shuffled(3, block_rows=4, window_blocks=3),
]
ORDER, UNEVEN = st.sampled_from(ORDERS), st.sampled_from(["pad", "drop", "join"])


def shares(
    order: Order, ranks: Ranks, world_size: int, size: int, n: int, *, drop_last: bool = False
) -> list[RankBatches]:
    return [
        RankBatches(order, n, size, drop_last, ranks, rank, world_size)
        for rank in range(world_size)
    ]


def batches_of(batches: RankBatches, epoch: int = 0, start: int = 0) -> Batches:
    groups = list(batches.epoch(epoch, start))
    assert all(len(group.batches) == 1 for group in groups)
    return [group.rows().tolist() for group in groups]


def steps(ranks: Sequence[Batches]) -> Batches:
    """Return the batches of all ranks, joined in the order of ranks."""
    return [flat(batch) for batch in itertools.zip_longest(*ranks, fillvalue=[])]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def whole(order: Order, n: int, epoch: int = 0) -> list[int]:
    return order.bind(n, epoch)(np.arange(n)).tolist()


@given(
    n=st.integers(0, 200),
    world_size=st.integers(1, 9),
    size=st.integers(1, 12),
    order=ORDER,
    uneven=UNEVEN,
    data=st.data(),
)
def test_ranks_share_an_epoch(
    n: int, world_size: int, size: int, order: Order, uneven: Uneven, data: st.DataObject
) -> None:
    drop_last = uneven != "join" and data.draw(st.booleans())
    split = data.draw(st.booleans())
    epoch = data.draw(st.integers(0, 2))
    size *= world_size if split else 1
    all_shares = shares(
        order, Ranks(uneven, split_batches=split), world_size, size, n, drop_last=drop_last
    )
    batches = [batches_of(share, epoch) for share in all_shares]
    assert [len(share) for share in all_shares] == [len(batch) for batch in batches]
    lengths = [[len(batch) for batch in mine] for mine in batches]
    if uneven == "join":
        assert max(map(sum, lengths)) - min(map(sum, lengths)) <= 1
        assert len(lengths[0]) == max(map(len, lengths)) <= min(map(len, lengths)) + 1
    else:
        assert all(other == lengths[0] for other in lengths), (
            "the same number of rows in every step on every rank"
        )
    global_size = all_shares[0].batch_size * world_size
    count = Counter(row for mine in batches for batch in mine for row in batch)
    if uneven == "join":
        assert count == Counter(range(n))
    elif uneven == "drop":
        assert not count or max(count.values()) == 1
        assert n - len(count) < (global_size if drop_last else world_size)
    elif not drop_last:
        again = count - Counter(range(n))
        assert set(count) == set(range(n))
        assert again.total() == -n % world_size if n else again.total() == 0
        assert again == Counter(np.resize(whole(order, n, epoch), again.total()).tolist()), (
            "the first rows of the order are repeated"
        )
    if split or not isinstance(order, BlockShuffled):
        together, one = steps(batches), whole(order, n, epoch)
        for k, batch in enumerate(together[: n // global_size]):
            assert batch == one[k * global_size : (k + 1) * global_size], (
                "joined, the batches are those of one process"
            )
        if uneven == "join":
            assert flat(together) == one


@given(
    n=st.integers(1, 200),
    worlds=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    order=ORDER,
    uneven=UNEVEN,
    data=st.data(),
)
def test_an_epoch_continues_with_another_number_of_ranks(
    n: int, worlds: list[int], order: Order, uneven: Uneven, data: st.DataObject
) -> None:
    size, epoch = data.draw(st.integers(1, 9)), 1
    changes_size = data.draw(st.booleans())
    before = size
    state: Any = {"batch": 0, "ranks": {"world_size": worlds[0], "done": []}}
    seen: Counter[int] = Counter()
    ended, last = False, 0
    for i, world_size in enumerate(worlds):
        size = data.draw(st.integers(1, 9)) if changes_size else size
        ours = shares(order, Ranks(uneven), world_size, size, n)
        resumed = [batches.resumed(state["batch"], state["ranks"], before) for batches in ours]
        before = size
        assert len({done for _, done, _ in resumed}) == 1
        for batches, (_, done, _) in zip(ours, resumed, strict=True):
            batches.begin(epoch, done)
        todo = [
            batches_of(batches, epoch, start)
            for batches, (start, *_) in zip(ours, resumed, strict=True)
        ]
        assert not ended or not any(todo), "a complete epoch stays complete"
        if uneven != "join":
            assert len({tuple(map(len, mine)) for mine in todo}) == 1
        stop = len(todo[0]) if i == len(worlds) - 1 else data.draw(st.integers(0, len(todo[0])))
        last, ended = last if ended else world_size, ended or stop == len(todo[0])
        seen.update(row for mine in todo for batch in mine[:stop] for row in batch)
        n_done = resumed[0][0] + stop
        state = ours[0].state(epoch, n_done)
        for other in ours[1:]:
            assert other.state(epoch, n_done) == state, "of any rank"
    if uneven == "join":
        assert seen == Counter(range(n)), "every row once"
    elif uneven == "drop":
        assert max(seen.values(), default=0) <= 1
        assert n - seen.total() < last, "what others have left out is shared again"
    else:
        assert set(seen) == set(range(n))
        assert seen.total() - n <= sum(world_size - 1 for world_size in worlds)


@given(n=st.integers(1, 200), order=ORDER, uneven=UNEVEN, data=st.data())
def test_split_batches_continue_with_the_next_batch(
    n: int, order: Order, uneven: Uneven, data: st.DataObject
) -> None:
    size, worlds = 12, (1, 2, 3, 4, 6, 12)
    before, after = data.draw(st.sampled_from(worlds)), data.draw(st.sampled_from(worlds))
    ranks = Ranks(uneven, split_batches=True)
    old = shares(order, ranks, before, size, n)
    start = data.draw(st.integers(0, len(old[0])))
    new = shares(order, ranks, after, size, n)
    todo = []
    for batches in new:
        here, done, _ = batches.resumed(start, old[-1].state(2, start)["ranks"], size)
        assert done == ()
        assert here == min(start, len(batches)) or start == len(old[0])
        todo.append(batches_of(batches, 2, here))
    one = whole(order, n, 2)
    for k, batch in enumerate(steps(todo)[: n // size - start]):
        assert batch == one[(start + k) * size : (start + k + 1) * size]
    if start == len(old[0]):
        assert not any(todo)


# ---- feeders -------------------------------------------------------------------------------------


def feeders(
    source: Any, world_size: int, uneven: Uneven = "pad", *, split: bool = False, **options: Any
) -> list[Feeder]:
    ranks = [
        Ranks(uneven, split_batches=split, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return [Feeder(source, ranks=mine, device="cpu", **options) for mine in ranks]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.arange(4000 * 64).reshape(4000, 64))
    return tmp_path / "x.npy"


@pytest.mark.parametrize("split", [False, True])
def test_a_file_is_resumed_with_more_ranks_and_then_with_fewer(path: Path, split: bool) -> None:
    """A rank reads windows of its own blocks, or of all blocks if global batches are split."""
    order = rows.block_shuffled(1, block_rows=128, window_blocks=2)
    seen: list[list[int]] = []
    state = None
    for world_size, n_batches in ((2, 3), (4, 2), (1, None)):
        ours = feeders(str(path), world_size, "join", split=split, rows=order, batch_size=96)
        loops, states = [], []
        for feeder in ours:
            with feeder:
                assert ("read-ahead buffers" in str(feeder.plan)) == (world_size > 1), (
                    "a single rank maps the file"
                )
                assert ("every rank reads every block" in unwrapped(feeder.plan)) == (
                    split and world_size > 1
                )
                if state is not None:
                    feeder.load_state_dict(state)
                loops.append(
                    [(x[:, 0] // 64).tolist() for x in itertools.islice(feeder, n_batches)]
                )
                states.append(feeder.state_dict())
        assert all(other == states[0] for other in states)
        state = states[0]
        seen += steps(loops)
    assert sorted(flat(seen)) == list(range(4000))
    if split:
        assert flat(seen) == whole(order, 4000)
    assert state is not None
    assert (state["epoch"], state["batch"], state["ranks"]) == (
        1,
        0,
        {"world_size": 1, "done": []},
    ), "the next epoch is whole"


def test_set_epoch_and_the_next_epoch_are_whole_again() -> None:
    x = np.arange(40)
    (one, other) = feeders(x, 2, batch_size=np.int64(4), shuffle=True)
    with one, other:
        untouched = one.state_dict()
        next(iter(one))
        state = one.state_dict()
    (only,) = feeders(x, 1, batch_size=4, shuffle=True)
    with only:
        only.load_state_dict(state)
        assert sum(map(len, only)) == 32
        assert sum(map(len, only)) == 40, "the next epoch"
        only.load_state_dict(untouched)
        assert only.state_dict()["ranks"]["done"] == [], (
            "no part of the epoch's history, because no batch was read"
        )
        only.load_state_dict(state)
        only.set_epoch(0)
        assert sum(map(len, only)) == 32, "the position is in this epoch"
        only.set_epoch(0)
        assert sum(map(len, only)) == 40, "the epoch starts from its beginning"
        only.load_state_dict(state)
        for _ in only:
            again = only.state_dict()
            break
        assert again["ranks"] == {"world_size": 1, "done": [[2, 4]]}
        assert json.loads(json.dumps(again)) == again, "plain values"
        only.load_state_dict(again)
        assert sum(map(len, only)) == 28


def test_a_complete_epoch_is_complete_at_any_world_size() -> None:
    x = np.arange(22)
    for before, after in itertools.permutations((1, 3, 4), 2):
        for feeder in (olds := feeders(x, before, "drop", batch_size=2)):
            with feeder:
                for _ in feeder:
                    state = feeder.state_dict()
        assert len(olds[0]) == state["batch"]
        for feeder in feeders(x, after, "drop", batch_size=2):
            with feeder:
                feeder.load_state_dict(state)
                assert feeder.epoch == 1
                assert len(list(feeder)) == len(feeder)
                assert feeder.epoch == 2


@pytest.mark.parametrize("split", [False, True])
def test_too_few_rows_for_more_ranks_end_the_epoch(split: bool) -> None:
    """Two ranks leave two of ten rows, or one of nine, which more ranks cannot share."""
    x = np.arange(9 if split else 10)
    options: dict[str, Any] = {"batch_size": 4 if split else 2, "split": split}
    before, after = (1, 2) if split else (2, 4)
    for feeder in feeders(x, before, "drop", **options):
        with feeder:
            for _ in itertools.islice(feeder, 2):
                state = feeder.state_dict()
    for feeder in feeders(x, after, "drop", **options):
        with feeder:
            feeder.load_state_dict(state)
            assert feeder.epoch == 1
            assert sum(map(len, feeder)) == len(x) // after


def test_identities_are_shared() -> None:
    def read(value: int) -> Any:
        yield from (torch.tensor(value), torch.tensor(-value))

    def make(rank: int, world_size: int, split: bool) -> Any:
        ranks = Ranks("join", split_batches=split, rank=rank, world_size=world_size)
        numbers = list(range(1, 24))
        options: Any = {
            "read_input": read,
            "get_output": read,
            "one_read_count": 2,
            "shuffle": True,
            "device": "cpu",
        }
        return wrap_readers(numbers, numbers, batch_size=8, ranks=ranks, **options)

    for split in (False, True):
        seen: list[int] = []
        state = None
        for world_size, n in ((2, 2), (1, None)):
            for rank in range(world_size):
                with make(rank, world_size, split) as feeder:
                    if state is not None and world_size == 1:
                        feeder.load_state_dict(state)
                    for x, y in itertools.islice(feeder, n):
                        assert len(x) <= 8 // (world_size if split else 1)
                        assert torch.equal(x, y)
                        seen += x[::2].tolist()
                    if world_size == 2:
                        state = feeder.state_dict()
        assert sorted(seen) == list(range(1, 24))
    with pytest.raises(ArgumentError, match="batch_size=4 is not a multiple of one_read_count=3"):
        wrap_readers(
            [1],
            [1],
            read_input=read,
            get_output=read,
            one_read_count=3,
            batch_size=12,
            ranks=Ranks("pad", True, 0, 3),
        )


def test_a_config_must_hold_the_batches_of_all_ranks() -> None:
    x = np.zeros((1000, 1 << 10), np.float32)
    (one, other) = feeders(
        x, 2, "drop", split=True, config=Config(cpu_memory_limit=MiB(8), preferred_batch_size=200)
    )
    with one, other:
        assert one.plan.batch_size == other.plan.batch_size == 100
        assert (
            "rank 1 of 2: 500 of 1000 rows (drop), as parts of global batches of 200 rows"
            in unwrapped(other.plan)
        )
    with pytest.raises(
        BudgetError,
        match=r"hold batches of \d+ rows on rank 0, but all ranks need batches of 800 rows; raise",
    ):
        feeders(x, 1, config=Config(cpu_memory_limit=MiB(8), preferred_batch_size=800))
    with pytest.raises(
        ArgumentError,
        match="batches of the same size on all ranks; set preferred_batch_size in the config",
    ):
        feeders(x, 1, config=Config(cpu_memory_limit=MiB(8)))


def test_a_share_of_a_sequence_is_read_in_sequence(path: Path) -> None:
    """The rows of other ranks are not read into the page cache."""
    store = NpyStore(str(path))
    share = RankBatches(rows.sequential(), 0, 8, False, Ranks(), 1, 3)
    row_by_row = rows.per_rank(rows.sequential(), rank=1, world_size=3)
    found = [
        plan_reads([store], order, 100, FreeMemory(MiB(100), MiB(100))).strategies[0]
        for order in (share.rows(), row_by_row)
    ]
    store.close()
    assert [type(access) for access in found] == [DirectReads, MappedFile]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"ranks": "even"},
            "ranks='even': expected 'pad', 'drop', 'join', 'all', a pinfeed.Ranks or None",
        ),
        ({"ranks": 3}, "ranks=3: expected 'pad'"),
        (
            {"ranks": "join", "drop_last": True},
            "ranks='join' reads every row once, but drop_last=True leaves rows out",
        ),
        (
            {"ranks": "pad", "rows": rows.per_rank(rows.shuffled(), rank=0, world_size=2)},
            "would divide it again",
        ),
        (
            {"ranks": "pad", "rows": SequentialSampler(range(10))},
            "rows is a SequentialSampler, which decides on its own what a process reads",
        ),
        ({"ranks": "pad", "rows": [[1, 2]], "batch_size": None}, "rows is a list"),
        (
            {"ranks": Ranks(split_batches=True, rank=0, world_size=4), "batch_size": 10},
            "batch_size=10 cannot be split among 4 ranks; expected a multiple of 4: 8 or 12",
        ),
        (
            {"ranks": Ranks(split_batches=True, rank=0, world_size=4), "batch_size": 3},
            "expected a multiple of 4: 4",
        ),
    ],
)
def test_rows_that_ranks_cannot_share(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Feeder(np.zeros(10), **{"batch_size": 2, **arguments})


def test_invalid_ranks_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=re.escape("Ranks(rank=1, world_size=None): give both, or neither")
    ):
        Ranks(rank=1)
    for rank, world_size in ((2, 2), (-1, 2), (0, 0), (0.5, 2)):
        with pytest.raises(
            ArgumentError,
            match=re.escape(
                f"Ranks(rank={rank}, world_size={world_size}): expected 0 <= rank < world_size"
            ),
        ):
            Ranks(rank=rank, world_size=world_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": None}, "not a state of a feeder with ranks="),
        ({"ranks": {"world_size": 2}}, "not a state of a feeder with ranks= (KeyError('done'))"),
        (
            {"ranks": {"world_size": 0, "done": []}},
            "(ValueError('negative numbers')): {'world_size': 0, 'done': []}",
        ),
        ({"ranks": {"world_size": 2, "done": [[1, -1]]}}, "not a state of a feeder with ranks="),
        ({"batch": 7}, "the state is at batch 7; expected 0 to 5"),
        ({"batch": -1}, "the state is at batch -1"),
        ({"source": {}, "batch": 99}, "the state is of another feeder: order was None"),
    ],
)
def test_invalid_states_are_refused(change: dict[str, Any], message: str) -> None:
    (one, other) = feeders(np.arange(40), 2, batch_size=4)
    with one, other:
        state = {**one.state_dict(), "batch": 2}
        other.load_state_dict(state)
        with pytest.raises(ArgumentError, match=re.escape(message)):
            other.load_state_dict({**state, **change})
        assert other.state_dict() == state, "nothing has been changed"
        assert len(list(other)) == 3
    (split,) = feeders(np.arange(40), 1, batch_size=4, split=True)
    with split, pytest.raises(ArgumentError, match=re.escape("4 rows for 3 ranks")):
        split.load_state_dict({**split.state_dict(), "ranks": {"world_size": 3, "done": []}})
    with Feeder(np.arange(40), batch_size=4) as alone:
        with pytest.raises(
            ArgumentError, match="the state is of another feeder: ranks was 'pad', is None"
        ):
            alone.load_state_dict(state)
        (sharing,) = feeders(np.arange(40), 1, batch_size=4)
        message = "the state is of another feeder: ranks was None, is 'pad'"
        with sharing, pytest.raises(ArgumentError, match=re.escape(message)):
            sharing.load_state_dict(alone.state_dict())


def test_all_is_no_rule_of_ranks() -> None:
    with pytest.raises(ArgumentError, match=r"Ranks\('all'\): .*give ranks='all' to the Feeder"):
        Ranks("all")  # type: ignore[arg-type]
