"""Orders: complete, random, the same again for the same seed and epoch, and shared by ranks."""

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.row_batches import ORDERS, drawn, whole
from torch.utils.data import (
    DistributedSampler,
)

from pinfeed.errors import ArgumentError, RowIndexError
from pinfeed.pipeline.loop_memory import index_allocations
from pinfeed.rows import block_shuffled, per_rank, sequential, shuffled, weighted, where
from pinfeed.rows import drawn as drawn_rows
from pinfeed.rows.order_batches import ORDER_BYTES, OrderBatches
from pinfeed.rows.orders import Order, known


# -- orders ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_an_order_can_be_asked_for_any_positions(order: Order) -> None:
    for n in (1, 2, 20, 21, 22, 100, 1000):
        rows, length = whole(order, n, 5), order.length(n)
        assert rows.dtype == np.int64
        assert len(rows) == length, f"{n} rows"
        positions = np.random.default_rng(0).integers(0, max(1, length), 200 if length else 0)
        assert np.array_equal(order.bind(n, 5)(positions), rows[positions]), f"{n} rows"
        at = order.bind(n, 5)
        for begin in range(0, length, 13):
            assert np.array_equal(
                at(np.arange(begin, min(begin + 13, length))), rows[begin : begin + 13]
            ), f"{n} rows, from position {begin}"


@pytest.mark.parametrize("order", ORDERS[:6], ids=repr)
def test_an_epoch_has_every_row_once(order: Order) -> None:
    for n in (0, 1, 2, 6, 7, 8, 20, 21, 22, 41, 42, 43, 1000):
        for epoch in range(3):
            rows = whole(order, n, epoch)
            assert np.array_equal(np.sort(rows), np.arange(n)), f"epoch {epoch} of {n} rows"


@given(
    n=st.integers(1, 500),
    block_rows=st.integers(1, 600),
    window_blocks=st.integers(1, 20),
    seed=st.integers(),
)
def test_a_block_shuffle_has_every_row_once_from_few_blocks(
    n: int, block_rows: int, window_blocks: int, seed: int
) -> None:
    rows = whole(block_shuffled(seed, block_rows=block_rows, window_blocks=window_blocks), n)
    assert np.array_equal(np.sort(rows), np.arange(n))
    window = block_rows * window_blocks
    for begin in range(0, n, window):
        # The rows of a window are at most so many runs on the ring of rows.
        here = np.sort(rows[begin : begin + window])
        gaps = int((np.diff(np.append(here, here[0] + n)) != 1).sum())
        assert gaps <= min(window_blocks, -(-len(here) // block_rows))


def test_a_block_shuffle_reads_whole_blocks() -> None:
    n = 10_000
    block = 64
    blocks = 8
    rows = whole(block_shuffled(1, block_rows=block, window_blocks=blocks), n)
    for begin in range(0, n - block * blocks, block * blocks):
        here = np.sort(rows[begin : begin + block * blocks])
        stretches = np.diff(np.flatnonzero(np.concatenate([[True], np.diff(here) != 1, [True]])))
        whole_blocks = int((stretches % block == 0).sum())
        assert whole_blocks >= len(stretches) - 2, "only the ring's end cuts a block"


def test_a_block_shuffle_mixes_blocks_and_rows() -> None:
    n = 100_000
    rows = whole(block_shuffled(1, block_rows=100, window_blocks=16), n)
    assert abs(np.corrcoef(np.arange(n), rows)[0, 1]) < 0.05
    first_window = rows[:1600]
    assert abs(np.corrcoef(np.arange(1600), first_window)[0, 1]) < 0.1
    assert (np.abs(np.diff(first_window)) == 1).sum() < 16


def test_blocks_begin_at_other_rows_in_every_epoch() -> None:
    order = block_shuffled(1, block_rows=10, window_blocks=1)
    begins = {int(whole(order, 1000, epoch)[:10].min()) % 10 for epoch in range(50)}
    assert len(begins) > 5


def test_the_short_block_is_another_one_in_every_epoch() -> None:
    order = block_shuffled(1, block_rows=10, window_blocks=1)
    assert len({tuple(sorted(whole(order, 19, epoch)[10:].tolist())) for epoch in range(40)}) > 10


@pytest.mark.parametrize(
    "order",
    [
        shuffled(1),
        block_shuffled(1, block_rows=5, window_blocks=4),
        block_shuffled(1, block_rows=1),
    ],
    ids=repr,
)
def test_every_epoch_and_every_seed_has_an_order_of_its_own(order: Any) -> None:
    orders = [
        whole(type(order)(seed, *list(vars(order).values())[1:]), 100, epoch)
        for seed in (1, 2, -1)
        for epoch in range(5)
    ]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 12
    assert np.array_equal(whole(order, 100, 3), orders[3])


def test_equal_arguments_are_equal_orders() -> None:
    assert shuffled(np.int64(4)) == shuffled(4)
    assert repr(shuffled(np.int64(4))) == repr(shuffled(4)) == "Shuffled(seed=4)"
    assert (
        repr(block_shuffled(1, block_rows=np.int64(2)))
        == "BlockShuffled(seed=1, block_rows=2, window_blocks=16)"
    )
    assert shuffled(4) != shuffled(5)


def test_a_share_has_a_row_twice_only_if_it_is_padded() -> None:
    for drop_last, most in ((True, 1), (False, 2)):
        share = per_rank(shuffled(1), rank=1, world_size=3, drop_last=drop_last)
        assert known(share).most_copies == most
        assert all(np.bincount(whole(share, n)).max(initial=0) <= most for n in range(3, 20))
    assert known(per_rank(drawn_rows(9), rank=0, world_size=3)).most_copies is None


def test_a_user_cannot_change_rows_that_were_checked() -> None:
    class Own:
        rows = np.arange(4)

        def length(self, n_rows: int) -> int:
            return n_rows

        def bind(self, n_rows: int, epoch: int) -> Any:
            return lambda positions: self.rows[positions[0] : positions[-1] + 1]

    own = Own()
    found = whole(known(own), 4)
    own.rows[:] = 99
    assert found.tolist() == [0, 1, 2, 3]
    assert known(known(own)) == known(own)
    with pytest.raises(RowIndexError, match=r"order=.*Own.*row 99 is out of range"):
        whole(where([3, 1], own), 9)


def test_sequential_is_sequential() -> None:
    assert whole(sequential(), 5, 7).tolist() == [0, 1, 2, 3, 4]


# A run that is resumed under a later version must continue in the same order. So these orders must
# not change.
GOLDEN: list[tuple[Order, int, int, list[int]]] = [
    (shuffled(0), 10, 0, [1, 4, 7, 2, 0, 5]),
    (shuffled(0), 10, 1, [2, 4, 3, 1, 0, 8]),
    (shuffled(-1), 10, 0, [1, 8, 5, 6, 2, 9]),
    (shuffled(12345678901234567890), 65536, 7, [61132, 61896, 4270, 27785, 24629, 64020]),
    (shuffled(0), 65537, 0, [326, 39159, 49181, 44193, 10906, 53368]),
    (shuffled(1), 10**6, 3, [566333, 811794, 4661, 357033, 100008, 938385]),
    (
        shuffled(1),
        10**12,
        0,
        [466301852926, 94100070096, 395443500632, 518155575314, 451675316113, 251640407462],
    ),
    (block_shuffled(0, block_rows=3, window_blocks=2), 17, 0, [13, 1, 15, 8, 4, 3]),
    (block_shuffled(0, block_rows=3, window_blocks=2), 17, 1, [11, 9, 15, 14, 13, 8]),
    (
        block_shuffled(5, block_rows=4096),
        10**6,
        2,
        [192791, 949756, 446506, 591116, 421827, 219748],
    ),
    (
        block_shuffled(5, block_rows=10**5),
        10**9,
        0,
        [368027833, 757302822, 23596777, 470772946, 57305782, 752408403],
    ),
    (per_rank(shuffled(0), rank=1, world_size=4), 10, 0, [4, 4, 2, 2, 3, 3]),
    (drawn_rows(10), 10, 0, [0, 4, 3, 1, 3, 3]),
    (
        drawn_rows(10**9, 5),
        10**12,
        2,
        [653793887958, 978561207266, 110127313186, 297966495147, 996947359457, 882820009141],
    ),
    (weighted([1, 0, 2, 5], 9), 4, 1, [2, 2, 2, 2, 3, 3]),
    (
        per_rank(block_shuffled(0, block_rows=3, window_blocks=2), rank=1, world_size=2),
        17,
        0,
        [6, 5, 10, 11, 12, 2],
    ),
]


@pytest.mark.parametrize(("order", "n", "epoch", "rows"), GOLDEN)
def test_orders_are_the_same_in_every_version(
    order: Order, n: int, epoch: int, rows: list[int]
) -> None:
    assert (
        order.bind(n, epoch)(
            np.linspace(0, order.length(n), 6, endpoint=False).astype(np.int64)
        ).tolist()
        == rows
    )


@pytest.mark.parametrize("block_rows", [0, -1])
def test_blocks_have_rows(block_rows: int) -> None:
    with pytest.raises(
        ArgumentError, match=f"block_rows={block_rows}: expected a whole number, at least 1"
    ):
        block_shuffled(block_rows=block_rows)
    with pytest.raises(
        ArgumentError, match=f"window_blocks={block_rows}: expected a whole number, at least 1"
    ):
        block_shuffled(block_rows=1, window_blocks=block_rows)


def test_seeds_and_blocks_are_integers() -> None:
    with pytest.raises(ArgumentError, match=r"seed=1\.5"):
        shuffled(1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"block_rows=4\.0"):
        block_shuffled(1, block_rows=4.0)  # type: ignore[arg-type]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("n", "batch_size"),
    [(65536, 1), (65536, 100_000), (65537, 1000), (10**7, 1), (10**7, 1000), (10**7, 100_000)],
)
@pytest.mark.parametrize(
    "order",
    [
        shuffled(1),
        block_shuffled(1, block_rows=4096),
        block_shuffled(1, block_rows=160, window_blocks=400),
        block_shuffled(1, block_rows=10**6),
        per_rank(block_shuffled(1, block_rows=160, window_blocks=400), rank=0, world_size=2),
        drawn_rows(10**7, 1),
    ],
    ids=repr,
)
def test_an_order_takes_no_more_memory_than_is_planned_for_it(
    order: Order, n: int, batch_size: int
) -> None:
    (indices,) = index_allocations(
        min(batch_size, order.length(n)), depth=0, n_held=0, by_device=False
    )
    batches = drawn(OrderBatches(order, n, batch_size).epoch(0))
    tracemalloc.start()
    held = None
    for held, _ in itertools.islice(batches, max(4, 20_000 // batch_size)):  # noqa: B007
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held is not None
    assert peak < ORDER_BYTES + indices.total


# -- ranks -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_ranks_are_cut_as_torch_cuts_them(world_size: int, drop_last: bool) -> None:
    for n in (*range(1, 40), 99, 100, 101):
        for rank in range(world_size):
            theirs = DistributedSampler(
                range(n), num_replicas=world_size, rank=rank, shuffle=False, drop_last=drop_last
            )  # type: ignore[arg-type, var-annotated]
            order = per_rank(sequential(), rank=rank, world_size=world_size, drop_last=drop_last)
            assert order.length(n) == len(theirs)
            assert whole(order, n).tolist() == list(theirs)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("order", ORDERS[:6], ids=repr)
@pytest.mark.parametrize(
    ("n", "world_size"), [(0, 2), (1, 4), (10, 1), (10, 3), (12, 3), (100, 7), (1000, 8)]
)
def test_ranks_share_all_rows(order: Order, n: int, world_size: int, drop_last: bool) -> None:
    orders = [
        per_rank(order, rank=rank, world_size=world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]
    assert len({share.length(n) for share in orders}) == 1
    counts = np.bincount(np.concatenate([whole(share, n, 2) for share in orders]), minlength=n)
    spare = -n % world_size
    if drop_last or not n:
        assert counts.sum() == n // world_size * world_size
        assert not n or counts.max() <= 1, "shares are disjoint"
    else:
        assert counts.min() >= 1, "no row is left out"
        assert (counts - 1).sum() == spare, "no more rows are repeated than needed"
        again = np.repeat(np.arange(n), counts - 1)
        assert sorted(again) == sorted(np.resize(whole(order, n, 2), spare)), (
            "they are the first ones of the order"
        )


def test_a_rank_of_a_block_shuffle_reads_blocks_of_its_own() -> None:
    n, block = 64_000, 100
    order = block_shuffled(1, block_rows=block, window_blocks=4)
    blocks = [
        {int(row) // block for row in whole(per_rank(order, rank=rank, world_size=4), n)}
        for rank in range(4)
    ]
    assert sum(map(len, blocks)) < 1.1 * 4 * (n // block // 4 * 2), (
        "a block that begins at another row touches two of these"
    )
    shared = sum(len(one & other) for one, other in itertools.combinations(blocks, 2))
    alone = sum(
        len(
            {int(row) // block for row in whole(order, n)[rank::4]}
            & {int(row) // block for row in whole(order, n)[other::4]}
        )
        for rank, other in itertools.combinations(range(4), 2)
    )
    assert alone == 6 * n // block, "cut row by row, every rank reads every block"
    assert shared < alone


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_a_rank_is_one_of_the_world(rank: int, world_size: int) -> None:
    with pytest.raises(
        ArgumentError,
        match=f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size",
    ):
        per_rank(sequential(), rank=rank, world_size=world_size)
