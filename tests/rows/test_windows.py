"""Windows of orders: they have the rows of their positions, and are as few as they say."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import rows
from pinfeed.rows.order_batches import RankBatches
from pinfeed.rows.orders import Order, known
from pinfeed.rows.ranks import PerRank, Ranks, StridedSlice, per_rank, positions_of, shared_windows
from pinfeed.rows.row_lengths import most_in_blocks
from pinfeed.rows.windows import Windows

Draw = Callable[..., int]


def block_shuffled(draw: Draw, seed: int = 7) -> Order:
    return rows.block_shuffled(seed, block_rows=draw(1, 40), window_blocks=draw(1, 6))


def chunk_shuffled(draw: Draw, n_rows: int) -> Order:
    """Return an order of chunks of unequal sizes, some much larger than others."""
    sizes = np.random.default_rng(draw(0, 9)).integers(1, draw(2, 9), n_rows) ** draw(1, 3)
    bounds = np.append(0, sizes.cumsum().clip(max=n_rows))
    store = SimpleNamespace(bounds=bounds)
    return rows.chunk_shuffled(store, seed=draw(0, 9), window_chunks=draw(1, 6))


def bucketed(draw: Draw, n_rows: int) -> Order:
    lengths = np.random.default_rng(n_rows).integers(1, 9, n_rows)
    return rows.bucketed(
        lengths,
        batch_size=draw(1, 9),
        window_batches=draw(1, 5),
        order=block_shuffled(draw),
    )


def mixed(draw: Draw, n_rows: int) -> Order:
    size = 1 + n_rows // 3
    sources = {"a": size, "b": n_rows + 1 - 2 * size, "c": size - 1}
    orders = [block_shuffled(draw, 1), rows.shuffled(2), block_shuffled(draw, 3)]
    if draw(0, 1):
        orders[2] = bucketed(draw, sources.get("c", 1))
    if draw(0, 1):
        orders[1] = rows.where(np.arange(sources["b"]) % 3 < 2, block_shuffled(draw, 2))
    if draw(0, 1):
        orders[0] = chunk_shuffled(draw, size)
    until = draw(0, 2)
    run = draw(1, 3)
    return rows.mixed(
        sources,
        weights={name: draw(1, 5) for name in sources},
        order=dict(zip(sources, orders, strict=False)),
        until=("first" if min(sources.values()) >= 9 else "all", "all", run * draw(1, 60))[until],
        batch_size=run,
        randomly=bool(draw(0, 1)),
    )


def part(draw: Draw, n_rows: int) -> Order:
    if draw(0, 1):
        mask = np.random.default_rng(n_rows).random(n_rows) < 0.7
        mask[0] = True
        return rows.where(mask, block_shuffled(draw))
    parts = rows.split([0.6, 0.4], block_rows=draw(1, 9), order=block_shuffled(draw))
    return parts[0] if parts[0].length(n_rows) else parts[1]


KINDS = {
    "chunk_shuffled": chunk_shuffled,
    "block_shuffled": lambda draw, n_rows: block_shuffled(draw),
    "bucketed": bucketed,
    "mixed": mixed,
    "part": part,
    "bucketed mixture": lambda draw, n_rows: rows.bucketed(
        np.arange(n_rows) % 7, batch_size=draw(1, 9), window_batches=3, order=mixed(draw, n_rows)
    ),
}


def share(order: Order, draw: Draw, n_rows: int) -> Order:
    """Return the order, or a share of it that some ranks have begun to read."""
    world_size = draw(1, 4)
    if draw(0, 1) or world_size == 1:
        return order
    rank = draw(0, world_size - 1)
    if draw(0, 1):
        return per_rank(order, rank=rank, world_size=world_size)
    size = draw(1, 9) * world_size
    uneven = ("pad", "drop", "join")[draw(0, 2)]
    ranks = Ranks(uneven, split_batches=bool(draw(0, 1)))  # type: ignore[arg-type]
    batches = RankBatches(order, n_rows, size, False, ranks, rank, world_size)
    done = ((3, 2 * size),) if draw(0, 1) and not ranks.split_batches else ()
    return batches.rows(done)


def needed_rows(found: Windows, position: int) -> set[int]:
    """Return the rows of the windows that a position needs."""
    windows = [w for w in found.needed(position, position + 1) if w.begin <= position < w.end]
    return {row for window in windows for run in window.runs for row in range(*run)}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_the_windows_of_positions_have_their_rows(kind: str, data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    n_rows = draw(4, 300)
    order = share(KINDS[kind](draw, n_rows), draw, n_rows)
    epoch = draw(0, 3)
    found = known(order).windows(n_rows, epoch)
    n = order.length(n_rows)
    # Memory for the windows of all epochs is planned with those of the first one.
    usual = known(order).windows(n_rows, 0)
    assert found is not None
    assert usual is not None
    start = draw(0, n)
    stop = draw(start, n)
    numbers = order.bind(n_rows, epoch)(np.arange(start, stop))
    of_epoch = list(found.needed(start, stop))
    begins = [window.begin for window in of_epoch]
    whole = order.order if isinstance(order, PerRank) else order
    if not isinstance(order, PerRank) or len(order.pieces(n_rows)) == 1:
        assert begins == sorted(begins)
    assert all(window.begin < window.end for window in of_epoch)
    for window in of_epoch:
        assert list(window.runs) == sorted(window.runs)
        count = sum(b - a for a, b in window.runs)
        assert count == len({row for run in window.runs for row in range(*run)})
        assert count <= usual.window_rows
    if found.n_blocks:
        offsets = np.cumsum([0, *np.random.default_rng(n_rows).integers(0, 9, n_rows) ** 2])
        most = most_in_blocks(offsets, found.n_blocks, found.block_rows)
        items = [sum(offsets[b] - offsets[a] for a, b in window.runs) for window in of_epoch]
        assert max(items, default=0) <= most <= offsets[-1]
    has_all = "mixed" not in repr(whole).lower()
    for i, row in enumerate(numbers.tolist(), start):
        covering = {
            one
            for window in of_epoch
            if window.begin <= i < window.end
            for run in window.runs
            for one in range(*run)
        }
        assert row in covering or not has_all
    spans = [(window.begin, window.end) for window in of_epoch]
    size = draw(1, 50)
    for i in range(start, max(start, stop - size)):
        touched = sum(begin < i + size and i < end for begin, end in spans)
        # A rank's share may jump to other windows; their memory is that of windows read ahead.
        slack = found.n_ahead if isinstance(order, PerRank) else 0
        assert touched <= usual.most(size) + slack, (i, size)


@given(data=st.data())
@settings(max_examples=60)
def test_a_mixture_has_windows_of_its_sources(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    n_rows = draw(4, 300)
    order = mixed(draw, n_rows)
    epoch = draw(0, 3)
    found = known(order).windows(n_rows, epoch)
    assert found is not None
    names = [i for i, one in enumerate(order.orders) if known(one).windows(order.sizes[i], 0)]
    n = order.length(n_rows)
    numbers = order.bind(n_rows, epoch)(np.arange(n))
    sources = order.source_of(numbers)
    places = np.flatnonzero(np.isin(sources, names))
    for i in places[:: len(places) // 25 + 1].tolist():
        assert numbers[i] in needed_rows(found, i)


@pytest.mark.parametrize("until", [4, 30, "all"])
def test_a_mixture_of_mixtures_has_the_windows_of_every_pass(until: Any) -> None:
    inner_orders = {
        "a": rows.block_shuffled(1, block_rows=2, window_blocks=2),
        "b": rows.shuffled(2),
    }
    inner = rows.mixed({"b": 20, "a": 20}, order=inner_orders, until=until)
    order = rows.mixed({"x": 40, "y": 90}, order={"x": inner, "y": rows.shuffled(3)}, until="all")
    for epoch in range(3):
        found = order.windows(130, epoch)
        assert found is not None
        numbers = order.bind(130, epoch)(np.arange(order.length(130)))
        places = np.flatnonzero((numbers >= 20) & (numbers < 40))
        assert len(places)
        for i in places.tolist():
            assert numbers[i] in needed_rows(found, i)


def scarce_source(window_blocks: int) -> tuple[Order, int]:
    """Return a mixture, mostly of rows without windows, and its number of rows."""
    sizes = {"many": 2000, "few": 20}
    orders = {
        "many": rows.shuffled(1),
        "few": rows.block_shuffled(1, block_rows=5, window_blocks=window_blocks),
    }
    return rows.mixed(sizes, weights={"many": 100, "few": 1}, order=orders), 2020


@pytest.mark.parametrize("window_blocks", [2, 4], ids=["part", "whole"])
def test_a_share_needs_each_window_once(window_blocks: int) -> None:
    order, n_rows = scarce_source(window_blocks)
    found = known(order).windows(n_rows, 0)
    assert found is not None
    epoch = order.bind(n_rows, 0)(np.arange(order.length(n_rows)))
    places = np.flatnonzero(epoch >= 2000)
    # The first piece has no row of the scarce source; the others have one each, of one window.
    spans = [(places[0] + 10, 50), (places[1], 50), (places[2], 50)]
    pieces = tuple(StridedSlice(int(begin), n, n, n) for begin, n in spans)
    needed = list(shared_windows(found, pieces).needed(0, 150))
    numbers = epoch[positions_of(pieces, np.arange(150))]
    assert len(needed) == 1
    for i in np.flatnonzero(numbers >= 2000).tolist():
        assert needed[0].begin <= i < needed[0].end
        assert any(start <= numbers[i] < stop for start, stop in needed[0].runs)


def test_ranks_skip_the_windows_of_other_ranks() -> None:
    order = rows.block_shuffled(7, block_rows=1, window_blocks=2)
    batches = RankBatches(order, 400, 40, False, Ranks(split_batches=True), 1, 4)
    found = known(batches.rows()).windows(400, 0)
    assert found is not None
    # Each of ten batches has ten consecutive positions, in five windows.
    assert len(list(found.needed(0, 100))) == 50


def test_orders_without_windows() -> None:
    shuffled = rows.shuffled()
    for order in (
        rows.sequential(),
        shuffled,
        per_rank(shuffled, rank=0, world_size=2),
        rows.mixed({"a": 5, "b": 5}),
        rows.bucketed(np.arange(10), batch_size=2),
        rows.where(np.arange(4), shuffled),
    ):
        assert known(order).windows(10, 0) is None


def test_ranks_read_a_window_once_however_many_batches_lie_on_it() -> None:
    order = rows.block_shuffled(7, block_rows=5, window_blocks=3)
    for rank in range(3):
        batches = RankBatches(order, 100, 6, False, Ranks(split_batches=True), rank, 3)
        found = known(batches.rows()).windows(100, 0)
        assert found is not None
        runs = [tuple(window.runs) for window in found.needed(0, 1000)]
        # Padding repeats the rows of the first window.
        assert len(set(runs)) >= len(runs) - 1
