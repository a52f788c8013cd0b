"""The depth of loops without a depth from the user: one rule, the same in every loop."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.simranks import RankThreads
from support.simulated_loops import simulated
from torch.utils.data import DataLoader

from pinfeed import (
    ArrayStore,
    Config,
    Feeder,
    HostEmbedding,
    RowOptimizer,
    ShardedEmbedding,
    train_rows,
    wrap_dataset,
    wrap_loader,
    wrap_readers,
)
from pinfeed.errors import ArgumentError

N = 3000
SIZE = 4


def rows_of(n: int = N, *, writable: bool = True) -> np.ndarray:
    rows = np.random.default_rng(1).standard_normal((n, 3)).astype(np.float32)
    rows.flags.writeable = writable
    return rows


def depth_of(loop: Any) -> int:
    """Return the depth of a loop that has begun and ended."""
    with loop:
        next(iter(loop))
        return int(loop.stats.depth)


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_a_loader_for_the_cpu_prefetches_only_its_own_work(threads: Any, transform: Any) -> None:
    loader = DataLoader(rows_of(100), batch_size=SIZE)
    options = {"threads": threads, "host_transform": transform, "device": "cpu"}
    has_work = threads is not None or transform is not None
    assert depth_of(wrap_loader(loader, **options)) == (2 if has_work else 0)
    assert depth_of(wrap_loader(loader, depth=1, **options)) == 1


def test_a_loader_with_fetch_prefetches() -> None:
    fetch = {"x": (rows_of(), lambda ids: ids)}
    loader = DataLoader(torch.arange(100), batch_size=SIZE)
    assert depth_of(wrap_loader(loader, fetch=fetch, device="cpu")) == 2
    config = Config(depth=1)
    assert depth_of(wrap_loader(loader, fetch=fetch, config=config, device="cpu")) == 1


def test_loaders_and_tables_prefetch_to_a_gpu() -> None:
    feeder, _, device = simulated(depth=None)
    feeder.close()
    assert depth_of(wrap_loader([torch.zeros(2)], device=device)) == 1
    with table_loop(device=device) as loop:
        assert "depth=2" in repr(loop)


def table_loop(**options: Any) -> Any:
    table = HostEmbedding(N, 3, store=ArrayStore(rows_of()), name="table")
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1)
    batches = [torch.tensor([1, 2]), torch.tensor([2, 3])]
    return train_rows(batches, {table: lambda ids: ids}, optimizer=optimizer, **options)


def test_tables_on_the_cpu_are_trained_in_the_synchronous_loop() -> None:
    with table_loop(device="cpu") as loop:
        assert "depth=0" in repr(loop)
        assert loop.plan.depth == 0
        for _ in loop:
            assert not [one for one in threading.enumerate() if one.name.startswith("pinfeed")]
    for options in ({"depth": 2}, {"host_transform": lambda batch: batch}):
        with table_loop(device="cpu", **options) as loop:
            assert loop.plan.depth == 2


def test_sharded_tables_exchange_rows_ahead() -> None:
    ranks = RankThreads(1)
    table = ShardedEmbedding(N, 3, process_group=ranks.groups[0], name="sharded")
    with train_rows([torch.tensor([1])], {table: lambda ids: ids}, device="cpu") as loop:
        assert "depth=2" in repr(loop)


@pytest.mark.usefixtures("without_native")
def test_a_feeder_prefetches_unless_it_writes_on_the_cpu() -> None:
    with Feeder(rows_of(), batch_size=SIZE, device="cpu") as feeder:
        assert "depth=31, rows are copied" in str(feeder.plan)
        next(iter(feeder))
        assert feeder.stats.depth == 31
        for batch in feeder.batches():
            batch.write_back(torch.zeros(SIZE, 3))
        assert feeder.stats.depth == 0
    with Feeder(rows_of(writable=False), batch_size=SIZE, device="cpu") as feeder:
        next(feeder.batches())
        assert feeder.stats.depth == 31


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 0}, {"config": Config(depth=3)}])
def test_a_given_depth_is_kept(options: Any) -> None:
    if "config" not in options:
        options = {"batch_size": SIZE, **options}
    with Feeder(rows_of(), device="cpu", **options) as feeder:
        depth = options.get("depth", 3)
        for begin in (feeder.__iter__, feeder.batches):
            next(begin())
            assert feeder.stats.depth == feeder.plan.depth == depth


def test_samples_are_prefetched() -> None:
    samples: list[Any] = list(rows_of(40))
    assert depth_of(wrap_dataset(samples, batch_size=SIZE, device="cpu")) == 2


def test_the_loop_itself_asks_a_loader_without_depth() -> None:
    asked_by = []

    def batches() -> Iterator[torch.Tensor]:
        for i in range(9):
            asked_by.append(threading.current_thread())
            yield torch.tensor([i])

    with wrap_loader(batches(), device="cpu") as loop:
        assert [int(batch) for batch in loop] == list(range(9))
    assert set(asked_by) == {threading.main_thread()}


def test_readers_need_a_depth() -> None:
    with pytest.raises(ArgumentError, match="depth=None: expected a whole number"):
        wrap_readers([1], [1], read_input=list, get_output=list, batch_size=1, depth=None)
