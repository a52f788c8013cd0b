"""Which rows, in which order: complete, random, the same again for the same seed and epoch, resumable, and refused where they are wrong."""

import itertools
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pinfeed.errors import ArgumentError, RowIndexError, WorkerError
from pinfeed.memory.demand import Demand, plan_allocations
from pinfeed.rows.batches import OrderBatches, RowBatches, RowIndices
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Order, Rows, block_shuffled, per_rank, sequential, shuffled
from pinfeed.rows.permutation import permutation
from pinfeed.rows.sampler_batches import SamplerBatches, largest_batch
from pinfeed.rows.windows import windows


def drawn(draws: Iterator[RowIndices]) -> Iterator[tuple[Rows, int]]:
    """Rows and checksum, draw by draw."""
    for draw in draws:
        rows = draw.rows()
        assert draw.n_rows == len(rows) == sum(n for n, _ in draw.batches)
        yield rows, draw.batches[-1][1]


SIZES = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    16,
    100,
    255,
    256,
    257,
    1000,
    4095,
    4096,
    4097,
    65535,
    65536,
    65537,
    131072,
]
ORDERS: list[Order] = [
    sequential(),
    shuffled(3),
    block_shuffled(3, block_rows=1),
    block_shuffled(3, block_rows=7, window_blocks=1),
    block_shuffled(3, block_rows=7, window_blocks=3),
    block_shuffled(3, block_rows=1 << 40, window_blocks=1 << 40),
    per_rank(sequential(), rank=1, world_size=3),
    per_rank(shuffled(3), rank=2, world_size=3, drop_last=True),
    per_rank(block_shuffled(3, block_rows=7, window_blocks=3), rank=2, world_size=3),
    per_rank(per_rank(shuffled(3), rank=1, world_size=2), rank=0, world_size=2),
]


def whole(order: Order, n: int, epoch: int = 0) -> Rows:
    return order.bind(n, epoch)(np.arange(order.length(n)))


def rows_of(
    batches: RowBatches, number: int = 0, start: int = 0, checksum: int = 0
) -> list[list[int]]:
    return [rows.tolist() for rows, _ in drawn(batches.epoch(number, start, checksum))]


class Sampler:
    """A sampler of the user's, with a length and with ``set_epoch``."""

    def __init__(self, elements: list[Any], length: int | None = None) -> None:
        self.elements = elements
        self.length = len(elements) if length is None else length
        self.epochs = list[int]()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def set_epoch(self, number: int) -> None:
        self.epochs.append(number)
        if hasattr(self, "epoch"):
            self.epoch = number


class Unsized:
    """An iterable without a length."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)


# -- permutations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_a_permutation_has_every_number_once(n: int) -> None:
    numbers = permutation(n, "salt")(np.arange(n))
    assert numbers.dtype == np.int64
    assert np.array_equal(np.sort(numbers), np.arange(n))


def test_a_permutation_of_any_small_size_has_every_number_once() -> None:
    for n in range(1, 300):
        assert np.array_equal(np.sort(permutation(n, f"{n}")(np.arange(n))), np.arange(n))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(65537, 1 << 18), salt=st.text(max_size=8))
def test_a_large_permutation_has_every_number_once(n: int, salt: str) -> None:
    assert np.bincount(permutation(n, salt)(np.arange(n)), minlength=n).max() == 1


@pytest.mark.parametrize("n", [10**12, (1 << 40) - 1, 1 << 40, (1 << 40) + 1, 1 << 62])
def test_a_permutation_of_more_rows_than_memory(n: int) -> None:
    positions = np.unique(
        np.concatenate([np.arange(20_000), np.arange(0, n, n // 50_000), np.arange(n - 20_000, n)])
    )
    numbers = permutation(n, "huge")(positions)
    assert numbers.min() >= 0
    assert numbers.max() < n
    assert len(np.unique(numbers)) == len(positions)
    assert abs(numbers.mean() / n - 0.5) < 0.01
    assert abs(np.corrcoef(positions, numbers)[0, 1]) < 0.02


@pytest.mark.parametrize("n", [1000, 4096, 4097, 200_000])
def test_a_permutation_looks_random(n: int) -> None:
    numbers = permutation(n, "random")(np.arange(n))
    assert abs(np.corrcoef(np.arange(n), numbers)[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / n**0.5
    neighbours = int((np.abs(np.diff(numbers)) == 1).sum())
    assert neighbours < 12, "about 2 pairs of neighbours are expected to stay together"
    assert (numbers == np.arange(n)).sum() < 8, "about 1 number is expected to stay where it is"


def test_every_row_comes_first_equally_often() -> None:
    n, draws = 10, 5000
    first = np.bincount(
        [int(shuffled(seed).bind(n, 0)(np.zeros(1, np.int64))[0]) for seed in range(draws)],
        minlength=n,
    )
    chi_square = ((first - draws / n) ** 2 / (draws / n)).sum()
    assert chi_square < 27.9, "0.1 % point of chi-square with 9 degrees of freedom"


def test_every_row_comes_first_equally_often_in_a_large_permutation() -> None:
    n = 70_000
    draws = 4000
    bins = 10
    first = [int(shuffled(7).bind(n, epoch)(np.zeros(1, np.int64))[0]) for epoch in range(draws)]
    chi_square = ((np.histogram(first, bins, (0, n))[0] - draws / bins) ** 2 / (draws / bins)).sum()
    assert chi_square < 27.9


def test_all_permutations_of_three_are_equally_likely() -> None:
    draws = 6000
    counts = Counter(tuple(whole(shuffled(seed), 3).tolist()) for seed in range(draws))
    assert set(counts) == set(itertools.permutations(range(3)))
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5, (
        "0.1 % point of chi-square with 5 degrees of freedom"
    )


# -- orders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 20, 21, 22, 100, 1000])
def test_an_order_can_be_asked_for_any_positions(order: Order, n: int) -> None:
    rows, length = whole(order, n, 5), order.length(n)
    assert rows.dtype == np.int64
    assert len(rows) == length
    positions = np.random.default_rng(0).integers(0, max(1, length), 200 if length else 0)
    assert np.array_equal(order.bind(n, 5)(positions), rows[positions])
    at = order.bind(n, 5)
    for begin in range(0, length, 13):
        assert np.array_equal(
            at(np.arange(begin, min(begin + 13, length))), rows[begin : begin + 13]
        )


@pytest.mark.parametrize("order", ORDERS[:6], ids=repr)
@pytest.mark.parametrize("n", [0, 1, 2, 6, 7, 8, 20, 21, 22, 41, 42, 43, 1000])
def test_an_epoch_has_every_row_once(order: Order, n: int) -> None:
    for epoch in range(3):
        assert np.array_equal(np.sort(whole(order, n, epoch)), np.arange(n))


@settings(deadline=None)
@given(
    n=st.integers(1, 500),
    block_rows=st.integers(1, 600),
    window_blocks=st.integers(1, 20),
    seed=st.integers(),
)
def test_a_block_shuffle_has_every_row_once_from_few_blocks_at_a_time(
    n: int, block_rows: int, window_blocks: int, seed: int
) -> None:
    rows = whole(block_shuffled(seed, block_rows=block_rows, window_blocks=window_blocks), n)
    assert np.array_equal(np.sort(rows), np.arange(n))
    window = block_rows * window_blocks
    for begin in range(0, n, window):
        # On the ring of rows: at most so many stretches.
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


def test_blocks_begin_elsewhere_in_every_epoch() -> None:
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


def test_sequential_is_sequential() -> None:
    assert whole(sequential(), 5, 7).tolist() == [0, 1, 2, 3, 4]


# A run that is resumed under a later version must go on in the same order: these may not change.
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


@pytest.mark.parametrize("batch_size", [1, 1000, 100_000])
@pytest.mark.parametrize("n", [65536, 65537, 10**7])
@pytest.mark.parametrize(
    "order",
    [
        shuffled(1),
        block_shuffled(1, block_rows=4096),
        block_shuffled(1, block_rows=160, window_blocks=400),
        block_shuffled(1, block_rows=10**6),
        per_rank(block_shuffled(1, block_rows=160, window_blocks=400), rank=0, world_size=2),
    ],
    ids=repr,
)
def test_an_order_takes_no_more_memory_than_is_planned_for_it(
    order: Order, n: int, batch_size: int
) -> None:
    load = Demand((4,), (False,), resident_bytes=0, n_rows=n, unified=True, staged=(False,))
    planned = {
        item.what: item.total
        for item in plan_allocations(load, min(batch_size, order.length(n)), depth=0)
    }
    batches = drawn(OrderBatches(order, n, batch_size).epoch(0))
    tracemalloc.start()
    held = None
    for held, _ in itertools.islice(batches, max(4, 20_000 // batch_size)):  # noqa: B007
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held is not None
    assert peak < planned["the order of the rows"] + planned["row numbers"]


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
        assert (counts - 1).sum() == spare, "no more rows come twice than are needed"
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
        "a block that begins elsewhere touches two of these"
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


# -- batches of orders -----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize(
    ("n", "batch_size"),
    [
        (1, 1),
        (1, 5),
        (20, 1),
        (20, 20),
        (20, 21),
        (100, 7),
        (1000, 10),
        (40_000, 9000),
        (40_000, 17_000),
    ],
)
def test_batches_of_an_order_are_the_order_in_pieces(
    order: Order, n: int, batch_size: int, drop_last: bool
) -> None:
    batches = OrderBatches(order, n, batch_size, drop_last)
    got, rows = rows_of(batches, 3), whole(order, n, 3).tolist()
    want = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    if drop_last and want and len(want[-1]) < batch_size:
        want.pop()
    assert got == want
    assert len(batches) == len(got)
    for start in {0, 1, len(got) // 2, max(0, len(got) - 1), len(got)}:
        assert rows_of(batches, 3, start) == got[start:]


def test_batches_are_the_users_to_change() -> None:
    batches = OrderBatches(shuffled(1), 100, 10)
    want = rows_of(batches)
    got = []
    for rows, _ in drawn(batches.epoch(0)):
        got.append(rows.tolist())
        rows[:] = -1
    assert got == want


class Broken:
    """An order of the user's that goes one row too far."""

    def length(self, n_rows: int) -> int:
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> Any:
        return lambda positions: positions + 1

    def __repr__(self) -> str:
        return "Broken()"


def test_rows_of_a_users_order_are_checked() -> None:
    assert isinstance(Broken(), Order)
    with pytest.raises(
        RowIndexError,
        match=re.escape("rows=Broken(): row 10 is out of range; expected 0 <= row < 10"),
    ):
        rows_of(OrderBatches(Broken(), 10, 4))


def test_the_fingerprint_tells_orders_apart() -> None:
    fingerprints = [
        OrderBatches(order, n, size, drop_last).fingerprint
        for order in (
            shuffled(1),
            shuffled(2),
            per_rank(shuffled(1), rank=0, world_size=2),
            per_rank(shuffled(1), rank=1, world_size=2),
        )
        for n in (10, 11)
        for size in (2, 3)
        for drop_last in (False, True)
    ]
    assert all(one != other for one, other in itertools.combinations(fingerprints, 2))


# -- samplers --------------------------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SequentialSampler(range(23)),
        lambda: RandomSampler(range(23), generator=generator()),
        lambda: RandomSampler(range(23), replacement=True, num_samples=40, generator=generator()),
        lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6], generator=generator()),
        lambda: SubsetRandomSampler(torch.tensor([3, 1, 4, 15, 9, 2, 6]), generator=generator()),  # type: ignore[arg-type]
        lambda: WeightedRandomSampler([0.1] * 22 + [5.0], 30, generator=generator()),
        lambda: DistributedSampler(range(23), num_replicas=3, rank=1, seed=4),  # type: ignore[arg-type]
    ],
)
def test_a_torch_sampler_gives_the_rows_that_it_gives_torch(make: Any, drop_last: bool) -> None:
    batches = SamplerBatches(make(), 23, 4, drop_last)
    want = [[int(row) for row in batch] for batch in BatchSampler(make(), 4, drop_last)]
    assert len(batches) == len(want)
    assert rows_of(batches) == want
    assert len(batches) == len(want)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_torch_batch_sampler_gives_whole_batches(drop_last: bool) -> None:
    sampler = BatchSampler(RandomSampler(range(23), generator=generator()), 4, drop_last)
    assert largest_batch(sampler) == 4
    batches = SamplerBatches(sampler, 23, None, drop_last=False)
    want = list(BatchSampler(RandomSampler(range(23), generator=generator()), 4, drop_last))
    assert len(batches) == len(want)
    assert rows_of(batches) == want


def test_a_sampler_gives_another_order_in_every_epoch() -> None:
    random = SamplerBatches(RandomSampler(range(50), generator=generator()), 50, 10, False)
    distributed = SamplerBatches(
        DistributedSampler(range(50), num_replicas=1, rank=0), 50, 10, False
    )  # type: ignore[arg-type]
    for batches in (random, distributed):
        epochs = [rows_of(batches, number) for number in range(3)]
        assert all(one != other for one, other in itertools.combinations(epochs, 2))
    assert rows_of(distributed, 1) == epochs[1], "set_epoch makes it repeatable"


def test_set_epoch_is_called_once_an_epoch() -> None:
    """Of a sampler that tells its epoch: of another one, nobody knows what its owner has set."""
    for tells in (False, True):
        sampler: Any = Sampler([0, 1, 2])
        if tells:
            sampler.epoch = 0
        batches = SamplerBatches(sampler, 3, 2, False)
        rows_of(batches, 4)
        rows_of(batches, 5)
        assert sampler.epochs == ([4, 5] if tells else [])


ROWS = [4, 0, 3, 3, 1, 2, 0]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        np.array(ROWS),
        np.array(ROWS, np.uint8),
        np.array(ROWS, ">i4"),
        np.array([ROWS, ROWS]).T[:, 0],
        np.array(ROWS[::-1])[::-1],
        torch.tensor(ROWS),
        Sampler(ROWS),
        Sampler(list(map(np.int32, ROWS))),
        Sampler(list(torch.tensor(ROWS))),
        Unsized(ROWS),
        dict.fromkeys([4, 0, 3, 1, 2]),
    ],
    ids=lambda rows: f"{type(rows).__name__}-{getattr(rows, 'dtype', '')}",
)
def test_single_rows_are_cut_into_batches(rows: Any, drop_last: bool) -> None:
    want = [4, 0, 3, 1, 2] if isinstance(rows, dict) else ROWS
    batches = SamplerBatches(rows, 5, 2, drop_last)
    expected = [want[i : i + 2] for i in range(0, len(want), 2)]
    got = rows_of(batches)
    assert got == expected[: -1 if drop_last else None]
    assert rows_of(batches, 1) == got
    for array, _ in drawn(batches.epoch(2)):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous


def test_a_range_is_rows() -> None:
    assert rows_of(SamplerBatches(range(2, 9, 3), 10, 2, False)) == [[2, 5], [8]]


BATCHES = [[0, 1], [2], [4, 4, 3]]


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize(
    "rows",
    [
        BATCHES,
        [np.array(batch) for batch in BATCHES],
        [np.array(batch, np.uint16) for batch in BATCHES],
        [torch.tensor(batch) for batch in BATCHES],
        [tuple(batch) for batch in BATCHES],
        np.array([np.array(batch) for batch in BATCHES], object),
        Sampler(BATCHES),
        Unsized([np.array(batch) for batch in BATCHES]),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_whole_batches_are_taken_as_they_are(rows: Any, batch_size: int | None) -> None:
    batches = SamplerBatches(rows, 5, batch_size, drop_last=True)
    assert rows_of(batches) == BATCHES
    if not isinstance(rows, Unsized):
        assert len(batches) == 3
    assert largest_batch(rows) == (None if isinstance(rows, (Sampler, Unsized)) else 3)


def test_the_rows_of_a_matrix_are_batches() -> None:
    rows = np.arange(6).reshape(3, 2)
    assert largest_batch(rows) == 2
    assert rows_of(SamplerBatches(rows, 6, None, False)) == rows.tolist()


def test_a_batch_may_be_empty() -> None:
    for empty in ([], np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)):
        assert rows_of(SamplerBatches([[1], empty, [2, 3]], 5, None, False)) == [[1], [], [2, 3]]


def test_rows_without_a_length_have_no_number_of_batches() -> None:
    with pytest.raises(TypeError, match=r"rows=Unsized has no len\(\)"):
        len(SamplerBatches(Unsized([1]), 2, 1, False))


def test_a_sampler_that_calls_its_batch_size_so_may_give_single_rows() -> None:
    sampler = Sampler(ROWS)
    sampler.batch_size = 2  # type: ignore[attr-defined]
    batches = SamplerBatches(sampler, 5, 2, False)
    assert rows_of(batches) == [[4, 0], [3, 3], [1, 2], [0]]
    assert len(batches) == 4


def test_an_iterator_serves_one_epoch() -> None:
    batches = SamplerBatches(iter(ROWS), 5, 4, False)
    assert rows_of(batches) == [[4, 0, 3, 3], [1, 2, 0]]
    with pytest.raises(ArgumentError, match="is used up, it serves one epoch"):
        rows_of(batches, 1)


# -- resuming --------------------------------------------------------------------------------------

SAMPLERS: list[Any] = [
    np.arange(30)[::-1].copy(),
    list(range(30)),
    [list(range(i, i + 3)) for i in range(0, 30, 3)],
    Sampler(list(range(30))),
    Unsized(list(range(30))),
    Unsized([np.arange(i, i + 3) for i in range(0, 30, 3)]),
    DistributedSampler(range(30), num_replicas=1, rank=0, seed=1),  # type: ignore[arg-type]
    BatchSampler(SequentialSampler(range(30)), 4, False),
]


def batches_of(rows: Any, n_rows: int = 30) -> SamplerBatches:
    whole_batches = largest_batch(rows) is not None or (
        isinstance(rows, Unsized)
        and any(isinstance(element, np.ndarray) for element in rows.elements)
    )
    return SamplerBatches(rows, n_rows, None if whole_batches else 4, drop_last=False)


@pytest.mark.parametrize("rows", SAMPLERS, ids=lambda rows: type(rows).__name__)
def test_a_resumed_epoch_is_the_rest_of_it(rows: Any) -> None:
    batches = batches_of(rows)
    epoch = [(batch.tolist(), checksum) for batch, checksum in drawn(batches.epoch(2))]
    for start in range(len(epoch) + 1):
        checksum = epoch[start - 1][1] if start else 0
        assert [
            (batch.tolist(), total)
            for batch, total in drawn(batches_of(rows).epoch(2, start, checksum))
        ] == epoch[start:]


@pytest.mark.parametrize("rows", [Sampler, Unsized], ids=lambda rows: rows.__name__)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_another_order_is_noticed(rows: Any, start: int) -> None:
    saved = [checksum for _, checksum in drawn(batches_of(rows(list(range(12)))).epoch(0))][
        start - 1
    ]
    swapped = [1, 0, *range(2, 12)]
    cut = list(range(4 * start - 1))
    late = [*range(4 * start - 1), 11, *range(4 * start, 12)]
    for other in (swapped, cut, [], *([late] if start < 3 else [])):
        with pytest.raises(
            ArgumentError,
            match=f"rows={rows.__name__} gave other rows for epoch 0 than when the state was saved",
        ):
            rows_of(batches_of(rows(other)), 0, start, saved)


def test_another_order_is_noticed_at_the_end_of_an_epoch() -> None:
    saved = [checksum for _, checksum in drawn(batches_of(np.arange(8)).epoch(0))][-1]
    assert rows_of(batches_of(np.arange(8)), 0, 2, saved) == []
    for other in ([0, 1, 2, 3, 4, 5, 7, 6], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3]):
        with pytest.raises(ArgumentError, match="gave other rows for epoch 0"):
            rows_of(batches_of(np.array(other)), 0, 2, saved)


def test_a_resume_tells_batches_apart_that_hold_the_same_rows() -> None:
    saved = [checksum for _, checksum in drawn(batches_of([[0, 1], [2], [3]]).epoch(0))][1]
    assert rows_of(batches_of([[0, 1], [2], [3]]), 0, 2, saved) == [[3]]
    with pytest.raises(ArgumentError, match="gave other rows"):
        rows_of(batches_of([[0], [1, 2], [3]]), 0, 2, saved)


def test_an_iterator_that_is_used_up_cannot_be_resumed() -> None:
    batches = batches_of(iter(range(8)))
    (_, saved), *_ = drawn(batches.epoch(0))
    with pytest.raises(ArgumentError, match="gave other rows"):
        rows_of(batches, 0, 1, saved)


def test_the_order_that_follows_a_matching_beginning_is_not_known() -> None:
    saved = next(checksum for _, checksum in drawn(batches_of(np.arange(12)).epoch(0)))
    assert rows_of(batches_of(np.array([0, 1, 2, 3, 9, 8])), 0, 1, saved) == [[9, 8]]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 5], "row 5 is out of range; expected 0 <= row < 5"),
        ([0, -1], "row -1 is out of range"),
        ([-1, 9], "row -1 is out of range"),
        ([2**63], "row 9223372036854775808 is out of range"),
        (np.array([2**64 - 1], np.uint64), "row 18446744073709551615 is out of range"),
        ([2**64], r"got shape \(1,\) of object"),
        ([0.0, 1.0], r"got shape \(2,\) of float64; expected a 1-d array of integer row numbers"),
        ([True, False], r"got shape \(2,\) of bool"),
        (["0"], r"got shape \(1,\) of <U1"),
        ([None], r"got shape \(1,\) of object"),
        ([[0, 1], [2, 3]], r"got shape \(2, 2\) of int64"),
        ([0, [1]], "inhomogeneous"),
        (3, r"got shape \(\) of int64"),
        (np.array(3), r"got shape \(\) of int64"),
        ("abc", r"got shape \(\) of <U3"),
    ],
    ids=repr,
)
def test_what_is_no_row_number_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(RowIndexError, match=f"mine: .*{message}"):
        check_rows(rows, 5, "mine")


def test_row_numbers_are_checked_without_a_copy_where_none_is_needed() -> None:
    rows = np.arange(5)
    assert check_rows(rows, 5) is rows


BAD_ARRAYS: list[Any] = [
    [0, 5],
    [0, -1],
    [0.5, 1.0],
    np.array([0.0]),
    np.array([True, False]),
    np.array(3),
    [0, [1, 2]],
    "rows",
    b"rows",
    np.zeros((2, 2, 2), int),
    [[0, 5]],
    [[0], [1], [-1]],
    [[0.0]],
    [[True]],
    [[0], 1],
    [[[0]]],
    [[0, [1]]],
]


@pytest.mark.parametrize("rows", BAD_ARRAYS, ids=repr)
def test_bad_rows_are_refused_at_once_where_they_are_given(rows: Any) -> None:
    # Comes first in a feeder.
    largest_batch(rows)
    with pytest.raises(RowIndexError):
        SamplerBatches(rows, 5, 4, False)


@pytest.mark.parametrize(
    "elements",
    [
        [0, 5],
        [0, -1],
        [0.5],
        [True],
        [[0], [5]],
        [[0], 1],
        [0, [1]],
        [[[0]]],
        ["0"],
        [{0, 1}],
        [None],
    ],
    ids=repr,
)
def test_bad_rows_of_a_sampler_are_refused_when_they_come(elements: list[Any]) -> None:
    with pytest.raises(RowIndexError):
        rows_of(SamplerBatches(Sampler(elements), 5, 4, False))


def test_a_bad_batch_is_named() -> None:
    with pytest.raises(
        RowIndexError, match="batch 1 of rows: row 7 is out of range; expected 0 <= row < 5"
    ):
        SamplerBatches([[0], [1, 7]], 5, None, False)


def test_rows_changed_by_the_user_are_checked_again() -> None:
    rows = np.arange(8)
    batches = SamplerBatches(rows, 8, 4, False)
    rows[6] = 8
    with pytest.raises(RowIndexError, match="row 8 is out of range"):
        rows_of(batches)


@pytest.mark.parametrize(
    "rows", [[], (), np.empty(0, np.int64), np.empty((0, 3), np.int64), range(0)], ids=repr
)
def test_empty_rows_are_refused(rows: Any) -> None:
    assert largest_batch(rows) is None
    with pytest.raises(ArgumentError, match="rows is empty"):
        SamplerBatches(rows, 5, 2, False)


@pytest.mark.parametrize("rows", [[0, 1], np.arange(2), range(2)], ids=repr)
def test_single_rows_need_a_batch_size(rows: Any) -> None:
    with pytest.raises(
        ArgumentError, match="rows gives single row numbers: give batch_size= or config= as well"
    ):
        SamplerBatches(rows, 5, None, False)
    with pytest.raises(ArgumentError, match="rows gives single row numbers"):
        rows_of(SamplerBatches(Sampler(list(rows)), 5, None, False))


def test_a_batch_larger_than_planned_is_refused() -> None:
    message = "batch 1 of rows has 3 rows; expected at most 2, the batch size that was planned"
    with pytest.raises(ArgumentError, match=message):
        SamplerBatches([[0], [1, 2, 3]], 5, 2, False)
    with pytest.raises(ArgumentError, match=message):
        rows_of(SamplerBatches(Unsized([[0], [1, 2, 3]]), 5, 2, False))


@pytest.mark.parametrize(("elements", "length", "drop_last", "promised", "came"), [
    ([0, 1, 2], 5, False, 3, 2),
    ([0, 1, 2], 6, True, 3, 1),
    ([], 1, False, 1, 0),
    ([[0], [1]], 3, False, 3, 2),
])  # fmt: skip
def test_a_sampler_that_gives_less_than_it_promised_is_an_error(
    elements: list[Any], length: int, drop_last: bool, promised: int, came: int
) -> None:
    message = re.escape(
        f"rows=Sampler promised {promised} batches (its len) and ended after {came} in epoch 6"
    )
    with pytest.raises(WorkerError, match=message):
        rows_of(SamplerBatches(Sampler(elements, length), 5, 2, drop_last), 6)


def test_a_sampler_may_give_more_than_it_promised() -> None:
    assert rows_of(SamplerBatches(Sampler([0, 1, 2], 1), 5, 2, False)) == [[0, 1], [2]]


def test_an_error_of_a_sampler_goes_up() -> None:
    def rows() -> Iterator[int]:
        yield 0
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rows_of(SamplerBatches(rows(), 5, 1, False))


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(-2, 12), min_size=1),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    kind=st.sampled_from([list, np.array, Sampler, Unsized]),
)
def test_single_rows_come_in_order_or_are_refused(
    rows: list[int], batch_size: int, drop_last: bool, kind: Any
) -> None:
    n_full = len(rows) // batch_size * batch_size
    # What is given at once is checked at once.
    used = rows[:n_full] if drop_last and kind in (Sampler, Unsized) else rows
    if not all(0 <= row < 10 for row in used):
        with pytest.raises(RowIndexError):
            rows_of(SamplerBatches(kind(rows), 10, batch_size, drop_last))
        return
    want = [
        rows[i : i + batch_size] for i in range(0, n_full if drop_last else len(rows), batch_size)
    ]
    assert rows_of(SamplerBatches(kind(rows), 10, batch_size, drop_last)) == want


# ---- windows -------------------------------------------------------------------------------------


@given(
    n_rows=st.integers(1, 300),
    block_rows=st.integers(1, 40),
    window_blocks=st.integers(1, 6),
    epoch=st.integers(0, 3),
    world_size=st.integers(1, 4),
    data=st.data(),
)
def test_a_position_has_a_row_of_its_window(
    n_rows: int,
    block_rows: int,
    window_blocks: int,
    epoch: int,
    world_size: int,
    data: st.DataObject,
) -> None:
    whole = block_shuffled(7, block_rows=block_rows, window_blocks=window_blocks)
    order: Order = (
        per_rank(whole, rank=data.draw(st.integers(0, world_size - 1)), world_size=world_size)
        if world_size > 1
        else whole
    )
    start = data.draw(st.integers(0, order.length(n_rows)))
    stop = data.draw(st.integers(start, order.length(n_rows)))
    found = windows(order, n_rows, epoch)
    assert found is not None
    rows = order.bind(n_rows, epoch)(np.arange(start, stop))
    spans = found.spans(start, stop)
    assert sum(n for _, n in spans) == stop - start
    for number, n in spans:
        runs = found.runs(number)
        assert runs == sorted(runs)
        there = np.concatenate([np.arange(*run) for run in runs])
        assert len(there) == len(set(there.tolist())) <= found.window_rows
        assert set(rows[:n].tolist()) <= set(there.tolist())
        rows = rows[n:]


def test_orders_without_windows() -> None:
    for order in (sequential(), shuffled(), per_rank(shuffled(), rank=0, world_size=2)):
        assert windows(order, 10, 0) is None


@pytest.mark.parametrize(
    "rows",
    [
        shuffled(1),
        sequential(),
        list(range(100)),
        np.arange(100)[::-1],
        [[1, 2], [3], [4, 5, 6]] * 9,
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [0, 3])
def test_batches_that_are_drawn_together_are_the_same(rows: Any, start: int) -> None:
    batches: RowBatches = (
        OrderBatches(rows, 100, 7)
        if isinstance(rows, Order)
        else SamplerBatches(rows, 100, 7, drop_last=False)
    )
    alone = list(drawn(batches.epoch(1)))
    checksum = alone[start - 1][1] if start else 0
    for n in (1, 2, 5, 100):
        groups = list(batches.epoch(1, start, checksum, n))
        assert all(len(group.batches) == n for group in groups[:-1])
        assert [part for group in groups for part in group.batches] == [
            (len(wanted), total) for wanted, total in alone[start:]
        ]
        assert (
            np.concatenate([group.rows() for group in groups]).tolist()
            == np.concatenate([wanted for wanted, _ in alone[start:]]).tolist()
        )


def test_batches_before_an_error_are_drawn() -> None:
    def rows() -> Iterator[list[int]]:
        yield from ([0], [1], [2], [3], [4])
        raise KeyError("five")

    draws = SamplerBatches(rows(), 10, None, drop_last=False).epoch(0, batches_per_slot=3)
    assert [draw.rows().tolist() for draw in itertools.islice(draws, 2)] == [[0, 1, 2], [3, 4]]
    with pytest.raises(KeyError, match="five"):
        next(draws)
