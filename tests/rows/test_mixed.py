"""Mixtures: equal to a slow reference, at every position, on any ranks, and resumed."""

import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.row_batches import rows_of, whole

from pinfeed.errors import ArgumentError, RowIndexError
from pinfeed.rows import block_shuffled, drawn, mixed, per_rank, sequential, shuffled, where
from pinfeed.rows.interleaving import Interleaving
from pinfeed.rows.order_batches import OrderBatches, RankBatches
from pinfeed.rows.ranks import Ranks


def reference_turns(weights: list[int], n: int | None = None) -> Iterator[int]:
    """Give ``n`` places to sources, one after the other, by the definition of the binary tree."""

    def take(numbers: list[int], i: int) -> int:
        """Return the source of place i of a node, by counting its places on the left."""
        if len(numbers) == 1:
            return numbers[0]
        middle = (len(numbers) + 1) // 2
        share = sum(weights[k] for k in numbers[:middle])
        total = sum(weights[k] for k in numbers)
        left = [(j * share + total // 2) // total for j in (i, i + 1)]
        if left[1] > left[0]:
            return take(numbers[:middle], left[0])
        return take(numbers[middle:], i - left[0])

    numbers = [k for k, weight in enumerate(weights) if weight]
    for i in itertools.count() if n is None else range(n):
        yield take(numbers, i)


def reference(
    sizes: list[int], weights: list[int], until: Any, epoch: int, orders: list[Any], run: int
) -> list[int]:
    """Draw the rows of an epoch one by one, and count those of each source."""
    turns = reference_turns(weights)
    first = epoch * until if isinstance(until, int) else 0
    rows: list[tuple[int, int, int]] = []
    seen = [0] * len(sizes)

    def one(k: int) -> None:
        n = orders[k].length(sizes[k])
        rows.append((k, seen[k] // n, seen[k] % n))
        seen[k] += 1

    lengths = [order.length(size) for order, size in zip(orders, sizes, strict=True)]
    for k in turns:
        if until == "first" and seen[k] + run > lengths[k]:
            break
        if until == "all" and all(a >= b for a, b in zip(seen, lengths, strict=True)):
            break
        if isinstance(until, int) and len(rows) >= first + until:
            break
        for _ in range(run):
            one(k)
    if isinstance(until, int):
        rows = rows[first : first + until]
        n_passes = [0] * len(sizes)
    else:
        n_passes = [max(1, -(-n // length)) for n, length in zip(seen, lengths, strict=True)]
    begins = [0, *itertools.accumulate(sizes)]
    return [
        begins[k] + int(orders[k].bind(sizes[k], epoch * n_passes[k] + number)(np.array([i]))[0])
        for k, number, i in rows
    ]


@settings(max_examples=60)
@given(data=st.data())
def test_a_mixture_equals_rows_drawn_one_by_one(data: st.DataObject) -> None:
    n_sources = data.draw(st.integers(1, 5))
    run = data.draw(st.sampled_from([1, 1, 4]))
    sizes = data.draw(st.lists(st.integers(run, 30), min_size=n_sources, max_size=n_sources))
    weights = data.draw(st.lists(st.integers(1, 20), min_size=n_sources, max_size=n_sources))
    until = data.draw(st.sampled_from(["first", "all", 12, 40]))
    kinds = [shuffled(3), sequential(), block_shuffled(3, block_rows=4), drawn(9, 3)]
    orders = [data.draw(st.sampled_from(kinds)) for _ in sizes]
    names = [f"s{k}" for k in range(n_sources)]
    order = mixed(
        dict(zip(names, sizes, strict=True)),
        dict(zip(names, weights, strict=True)),
        until=until,
        order=dict(zip(names, orders, strict=True)),
        batch_size=run,
    )
    for epoch in (0, 1, 3):
        expected = reference(sizes, weights, until, epoch, orders, run)
        found = whole(order, sum(sizes), epoch)
        assert found.tolist() == expected
        at = order.bind(sum(sizes), epoch)
        for begin in range(0, len(found), 7):
            part = found[begin : begin + 7]
            assert np.array_equal(at(np.arange(begin, begin + len(part))), part)
        copies = order.most_copies
        if copies is not None and len(found):
            assert np.bincount(found).max() <= copies


def test_shares_of_any_window_are_exact_up_to_rounding() -> None:
    rng = np.random.default_rng(0)
    for n_sources in (2, 3, 5, 8, 13):
        weights = tuple(rng.integers(1, 100, n_sources).tolist())
        turns = np.empty(3000, np.int64)
        for number, places, _ in Interleaving(((0, weights),)).groups(np.arange(3000)):
            turns[places] = number
        assert turns[:500].tolist() == list(reference_turns(list(weights), 500))
        for number, weight in enumerate(weights):
            exact = np.arange(3001) * weight / sum(weights)
            excess = np.append(0, np.cumsum(turns == number)) - exact
            assert excess.max() - excess.min() < math.ceil(math.log2(n_sources))


@pytest.mark.parametrize("randomly", [False, True])
def test_first_ends_before_a_row_would_repeat(randomly: bool) -> None:
    order = mixed({"a": 9000, "b": 5000}, {"a": 1, "b": 1}, randomly=randomly)
    rows = whole(order, 14_000, 1)
    assert len(np.unique(rows)) == len(rows) in (9999, 10_000, 10_001)
    assert order.most_copies == 1


@pytest.mark.parametrize("run", [1, 3])
def test_first_ends_at_the_turn_of_a_source_that_is_empty(run: int) -> None:
    """After its last row, turns of other sources follow, and other sources may have rows left."""
    sizes = {"a": 2 * run, "b": 9 * run}
    order = mixed(sizes, {"a": 1, "b": 3}, order=sequential(), batch_size=run)
    found = whole(order, 11 * run)
    turns = [2, 0, 3, 4, 5, 1, 6, 7, 8]
    assert found.tolist() == [turn * run + i for turn in turns for i in range(run)]


@pytest.mark.parametrize("randomly", [False, True])
def test_all_sees_every_row(randomly: bool) -> None:
    order = mixed({"a": 9000, "b": 500}, {"a": 1, "b": 1}, until="all", randomly=randomly)
    rows = whole(order, 9500, 2)
    counts = np.bincount(rows, minlength=9500)
    assert counts[:9000].min() == counts[:9000].max() == 1
    assert set(counts[9000:].tolist()) <= {17, 18, 19}


@pytest.mark.parametrize("until", ["first", "all"])
def test_default_weights_give_every_row_once(until: Any) -> None:
    order = mixed({"a": 701, "b": 300, "c": 7}, until=until)
    assert np.array_equal(np.sort(whole(order, 1008, 3)), np.arange(1008))


@pytest.mark.parametrize("randomly", [False, True])
def test_short_epochs_see_the_whole_of_a_source(randomly: bool) -> None:
    order = mixed({"a": 1000, "b": 30}, {"a": 3, "b": 1}, until=100, randomly=randomly)
    # Windows of 4,096 random turns cross the ends of epochs; these epochs end with a window.
    n_epochs = 4096 // 4 if randomly else 40
    rows = np.concatenate([whole(order, 1030, epoch) for epoch in range(n_epochs)])
    from_a = rows[rows < 1000]
    for begin in range(0, len(from_a) - 999, 1000):
        assert len(np.unique(from_a[begin : begin + 1000])) == 1000
    assert len(from_a) * 4 == len(rows) * 3


def test_a_run_of_random_turns_does_not_depend_on_epochs() -> None:
    sources = {"a": 1000, "b": 300}
    one = mixed(sources, {"a": 3, "b": 1}, until=6000, randomly=True)
    other = mixed(sources, {"a": 3, "b": 1}, until=2000, randomly=True)
    parts = [whole(other, 1300, epoch) for epoch in range(3)]
    assert np.array_equal(whole(one, 1300), np.concatenate(parts))


def test_random_turns_keep_shares_in_each_window_over_seeds() -> None:
    n = 1 << 12
    places = np.zeros(n)
    for seed in range(60):
        order = mixed({"a": n, "b": n}, {"a": 3, "b": 1}, randomly=True, seed=seed)
        is_b = order.source_of(order.bind(2 * n, 0)(np.arange(n))) == 1
        assert is_b.sum() == n // 4
        places += is_b
    # Chi-square of 64 groups of places: each has a quarter of its rows from b.
    found = places.reshape(64, -1).sum(axis=1)
    expected = 60 * n // 64 / 4
    assert ((found - expected) ** 2 / (expected * 0.75)).sum() < 120


def test_every_row_is_drawn_as_often_as_its_weight_says() -> None:
    counts = np.zeros(40)
    for seed in range(200):
        order = mixed({"a": 30, "b": 10}, {"a": 0.5, "b": 0.5}, until=20, seed=seed)
        counts += np.bincount(whole(order, 40), minlength=40)
    assert counts[:30].sum() == counts[30:].sum() == 2000
    # Ten of 30 rows of a are drawn for each seed, and all rows of b.
    assert (counts[30:] == 200).all()
    variance = 200 * (1 / 3) * (2 / 3)
    assert ((counts[:30] - 200 / 3) ** 2 / variance).sum() < 60


def test_weights_change_at_positions() -> None:
    table = [(0, {"a": 1, "b": 0}), (100, {"a": 1, "b": 1}), (300, {"a": 0, "b": 1})]
    order = mixed({"a": 500, "b": 500}, table, until=200)
    sources = [order.source_of(whole(order, 1000, epoch)) for epoch in range(3)]
    assert [int(source.sum()) for source in sources] == [50, 150, 200]
    assert sources[0][:100].sum() == 0
    rows = np.concatenate([whole(order, 1000, epoch) for epoch in range(3)])
    assert len(np.unique(rows)) == len(rows)
    at = order.bind(1000, 1)
    shuffle = np.random.default_rng(0).permutation(200)
    assert np.array_equal(at(shuffle), whole(order, 1000, 1)[shuffle])


@settings(max_examples=40)
@given(data=st.data())
def test_no_row_is_lost_where_random_weights_change(data: st.DataObject) -> None:
    n_sources = data.draw(st.integers(1, 3))
    run = data.draw(st.sampled_from([1, 1, 3]))
    sizes = data.draw(st.lists(st.integers(run, 6000), min_size=n_sources, max_size=n_sources))
    starts = data.draw(st.lists(st.integers(1, 9000), unique=True, max_size=4))
    until = data.draw(st.sampled_from(["first", "all", 3000]))
    names = [f"s{k}" for k in range(n_sources)]

    def weights(least: int) -> dict[str, int]:
        one = st.lists(st.integers(least, 4), min_size=n_sources, max_size=n_sources)
        return dict(zip(names, data.draw(one.filter(any)), strict=True))

    # The last part has all sources, so that an epoch ends.
    changes = sorted(start * run for start in starts)
    table = [(start, weights(0)) for start in [0, *changes[:-1]]]
    table.append((changes[-1] if changes else run, weights(1)))
    sources = dict(zip(names, sizes, strict=True))
    options: Any = {"until": until, "order": sequential(), "batch_size": run}
    order = mixed(sources, table, randomly=True, **options)
    n_epochs = 3 if until == 3000 else 1
    found = np.concatenate([whole(order, sum(sizes), epoch) for epoch in range(n_epochs)])
    of = order.source_of(found)
    first = 0
    for number, size in enumerate(sizes):
        its_rows = found[of == number] - first
        assert np.array_equal(its_rows, np.arange(len(its_rows)) % size)
        first += size
    even = mixed(sources, table, **options)
    plain = even.source_of(
        np.concatenate([whole(even, sum(sizes), epoch) for epoch in range(n_epochs)])
    )
    # A window of 4,096 turns that ends with the last epoch may have other turns than the rest.
    for begin in range(0, len(found) - 4096 * run + 1, 4096 * run):
        window = slice(begin, begin + 4096 * run)
        assert np.array_equal(np.bincount(of[window]), np.bincount(plain[window]))


def test_batches_may_have_rows_of_one_source_each() -> None:
    order = mixed({"a": 100, "b": 300}, {"a": 1, "b": 3}, batch_size=8)
    batches = rows_of(OrderBatches(order, 400, 8))
    of = [set(order.source_of(np.array(batch)).tolist()) for batch in batches]
    assert all(len(one) == 1 for one in of)
    assert [one.pop() for one in of].count(0) == 12


def test_parts_may_be_orders_of_subsets() -> None:
    mask = np.arange(100) % 3 == 0
    order = mixed(
        {"a": 100, "b": 50},
        {"a": 1, "b": 1},
        order={"a": where(mask, shuffled(1)), "b": block_shuffled(2, block_rows=4)},
    )
    rows = whole(order, 150)
    of_a = rows[rows < 100]
    assert len(np.unique(rows)) == len(rows)
    assert (of_a % 3 == 0).all()
    assert len(of_a) == 34
    assert order.most_copies == 1


ORDERS = {
    "first": mixed({"a": 60, "b": 31}, {"a": 0.6, "b": 0.4}),
    "all": mixed({"a": 60, "b": 11}, {"a": 0.6, "b": 0.4}, until="all", randomly=True),
    "number": mixed({"a": 60, "b": 11}, {"a": 1, "b": 1}, until=90),
    "batches": mixed({"a": 60, "b": 40}, {"a": 1, "b": 1}, until=80, batch_size=4),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_epoch_resumes_at_every_batch(order: Any) -> None:
    batches = OrderBatches(order, sum(order.sizes), 4)
    expected = rows_of(batches, 2)
    for start in range(len(expected) + 1):
        assert rows_of(batches, 2, start) == expected[start:]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_other_numbers_of_ranks_share_the_rest(order: Any) -> None:
    n = sum(order.sizes)
    left = sorted(whole(order, n, 1).tolist())
    state: Any = None
    for world_size in (1, 3, 2, 5):
        for rank in range(world_size):
            batches = RankBatches(order, n, 4, False, Ranks("join"), rank, world_size)
            if state is not None:
                start, is_over = batches.resume(state, len(batches))
                assert not is_over
            else:
                start = 0
            stop = start + 2 if world_size < 5 else None
            for batch in rows_of(batches, 1, start)[: None if stop is None else 2]:
                for row in batch:
                    left.remove(row)
        if world_size < 5:
            source = batches.fingerprint
            state = {"epoch": 1, "source": source, **batches.state(1, start + 2)}
    assert left == []


def test_a_billion_rows_are_bound_without_memory() -> None:
    order = mixed({"a": 10**9, "b": 10**8}, {"a": 0.7, "b": 0.3}, until="all")
    rows = order.bind(11 * 10**8, 3)(np.arange(10**9, 10**9 + 1000))
    assert len(np.unique(rows)) == 1000
    assert order.length(11 * 10**8) == pytest.approx(10**9 / 0.7, abs=2)


def test_equal_arguments_are_equal_mixtures() -> None:
    def make(weight: float) -> Any:
        return mixed({"a": np.zeros(5), "b": 7}, {"a": weight, "b": 0.3})

    assert make(0.7) == make(0.7) != make(0.6)
    assert hash(make(0.7)) == hash(make(0.7))
    assert pickle.loads(pickle.dumps(make(0.7))) == make(0.7)
    assert repr(make(0.7)) == (
        "Mixed(names=('a', 'b'), sizes=(5, 7), orders=(Shuffled(seed=0), Shuffled(seed=1)), "
        "n_draws=(5, 7), turns=Interleaving(table=((0, (7, 3)),)), until='first', batch_size=1, "
        "seed=None)"
    )


def test_a_subclass_of_an_order_may_repeat_rows() -> None:
    class Twice(type(sequential())):  # type: ignore[misc]
        def length(self, n_rows: int) -> int:
            return 2 * n_rows

    order = mixed({"a": 5}, order=Twice())
    assert order.most_copies is None
    with pytest.raises(RowIndexError, match="out of range"):
        whole(order, 5)


def test_the_order_of_a_mixture_stays_the_same() -> None:
    order = mixed({"a": 60, "b": 31}, {"a": 0.6, "b": 0.4})
    assert whole(order, 91)[:8].tolist() == GOLDEN
    assert whole(per_rank(order, rank=0, world_size=1), 91)[:8].tolist() == GOLDEN


GOLDEN = [59, 73, 12, 78, 11, 57, 60, 29]

SIZES = {"a": 10, "b": 20}
REFUSED: list[tuple[str, Any]] = [
    ("expected {name: source", lambda: mixed([10, 20])),  # type: ignore[arg-type]
    ("expected {name: source", lambda: mixed({})),
    ("open the file", lambda: mixed({"a": "x.npy"})),
    ("at least 1", lambda: mixed({"a": 0})),
    ("one weight for each source", lambda: mixed(SIZES, {"a": 1})),
    ("one weight for each source", lambda: mixed(SIZES, {"a": 1, "b": 1, "c": 1})),
    ("at least 0", lambda: mixed(SIZES, {"a": 1, "b": -1})),
    ("at least 0", lambda: mixed(SIZES, {"a": 1, "b": math.nan})),
    ("finite", lambda: mixed(SIZES, {"a": 1, "b": math.inf})),
    ("all are 0", lambda: mixed(SIZES, {"a": 0, "b": 0})),
    ("ascending positions", lambda: mixed(SIZES, [(5, SIZES)])),
    ("ascending positions", lambda: mixed(SIZES, [(0, SIZES), (0, SIZES)])),
    ("multiples of batch_size", lambda: mixed(SIZES, [(0, SIZES), (5, SIZES)], batch_size=2)),
    ("not end", lambda: mixed(SIZES, {"a": 0, "b": 1}, until="all")),
    ("'first', 'all' or", lambda: mixed(SIZES, until="last")),  # type: ignore[arg-type]
    ("at least 1", lambda: mixed(SIZES, until=0)),
    ("give 8", lambda: mixed(SIZES, until=10, batch_size=4)),
    ("fewer than batch_size=16", lambda: mixed(SIZES, batch_size=16)),
    ("whole number", lambda: mixed(SIZES, seed=0.5)),  # type: ignore[arg-type]
    ("True or False", lambda: mixed(SIZES, randomly=1)),  # type: ignore[arg-type]
    ("expected an order", lambda: mixed(SIZES, order="shuffled")),  # type: ignore[arg-type]
    ("an order for each", lambda: mixed(SIZES, order={"a": sequential()})),
    ("share of one rank", lambda: mixed(SIZES, order=per_rank(sequential(), rank=0, world_size=2))),
    ("is used for 31 rows", lambda: mixed(SIZES).length(31)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_bad_arguments_of_mixtures_are_refused(message: str, call: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
