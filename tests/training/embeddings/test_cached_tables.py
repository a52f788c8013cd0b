"""Loops over tables with a cache on the device equal the synchronous loop without one."""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.resumable_training import Training
from support.schedules import corners, randomly
from support.simtorch import SimTorchDevice
from support.table_runs import MIXED, OPTIMIZERS, Ids, check, looked_up

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    HostEmbeddingBag,
    NpyStore,
    RowOptimizer,
    checkpoint,
    train_rows,
)
from pinfeed.devices.row_copies import MAX_COPIES
from pinfeed.errors import BudgetError
from pinfeed.native import library as native
from pinfeed.pipeline import row_cache
from pinfeed.testing import lazy

needs_native = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

ACTIONS = (*MIXED, "look")
SIZES = [1 / 12, 0.3, 0.7, 1.0]
DENSE = [name for name in OPTIMIZERS if name != "SparseAdam"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread, because more of them slow down work on small tensors."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def some_run(rng: random.Random) -> dict[str, Any]:
    """Return options of ``Run`` with caches."""
    batches = [
        tuple([rng.randrange(below) for _ in range(n)] for below in (12, 9, 9))
        for n in (rng.randint(1, 6) for _ in range(rng.randint(1, 7)))
    ]
    return {
        "batches": batches,
        "does": [rng.choice(ACTIONS) for _ in range(rng.randint(1, 4))],
        "stop_after": rng.choice([None, None, 3]),
        "caches": (rng.choice(SIZES), rng.choice([None, *SIZES])),
        "policy": rng.choice([None, rng.randrange(1000)]),
    }


@pytest.mark.sweep(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str) -> None:
    rng = random.Random(optimizer)
    check(
        "cpu",
        rng.randint(0, 5),
        optimizer,
        does=MIXED,
        caches=(rng.choice(SIZES), rng.choice(SIZES)),
        policy=rng.choice([None, 1]),
        n_epochs=2,
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(12))
def test_random_runs(seed: int) -> None:
    rng = random.Random(seed)
    options = some_run(rng)
    depth = rng.randint(0, 5)
    check(
        "cpu",
        depth,
        rng.choice(list(OPTIMIZERS)),
        n_epochs=rng.randint(1, 3),
        verify=rng.random() < 0.3,
        **options,
    )


@given(
    st.lists(st.integers(1, 5).flatmap(looked_up), min_size=1, max_size=6),
    st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=4),
    st.tuples(st.sampled_from(SIZES), st.sampled_from([None, *SIZES])),
    st.tuples(st.integers(0, 3), st.integers(0, 99)),
)
@settings(max_examples=10)
def test_any_run(
    batches: list[tuple[Ids, Ids, Ids]],
    does: list[str],
    caches: tuple[Any, Any],
    numbers: tuple[int, int],
) -> None:
    depth, policy = numbers
    check("cpu", depth, "Adam", batches, does=does, caches=caches, policy=policy)


CORNERS = corners({"compute": (20, 150), "read": (9, 60)})


@pytest.mark.parametrize("seed", range(5))
def test_random_runs_on_the_simulated_device(seed: int) -> None:
    rng = random.Random(seed)
    choose = rng.choice([randomly(seed), rng.choice(list(CORNERS.values()))()])
    device = SimTorchDevice(choose, direct=rng.random() < 0.5)
    options = some_run(rng)
    options["switch_after"] = rng.choice([None, 1])
    options["switch_once"] = rng.choice([None, 1, 2])
    options["switch_in"] = rng.choice([None, 0, 2])
    check(device, rng.randint(0, 3), rng.choice(DENSE), verify=rng.random() < 0.2, **options)


@pytest.mark.stress
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_many_random_runs_on_the_simulated_device(start: int) -> None:
    for seed in range(start, start + 100):
        test_random_runs_on_the_simulated_device(seed)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("in_step", [True, False])
def test_a_resumed_run(tmp_path: Path, in_step: bool, depth: int) -> None:
    """A checkpoint in a step, and one between loops, have all rows of the cache."""
    whole = Training(depth=depth).run(3)
    saved = Training(depth=depth, device_cache=0.3)
    save_at = 5 if in_step else 9
    if in_step:
        saved.run(3, save_at=save_at, path=tmp_path, stop=True)
    else:
        checkpoint.save(tmp_path, step=save_at, **saved.run(1).parts)
    assert saved.losses == whole.losses[:save_at]
    resumed = Training(depth=depth, device_cache=0.7)
    torch.manual_seed(99)
    checkpoint.resume(tmp_path, **resumed.parts)
    resumed.run(3)
    assert resumed.losses == whole.losses[save_at:]
    for one, other in zip(resumed.result, whole.result, strict=True):
        np.testing.assert_array_equal(one, other)


N, DIM = 12, 3
IDS = [[0, 1, 2], [4, 4], [], [1, 2, 7], [0, 9], [1, 1, 2], [4, 7, 9, 0]]


def loader() -> list[torch.Tensor]:
    return [torch.tensor(ids, dtype=torch.int64) for ids in IDS]


def same(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("size", [0.3, 1.0])
def test_tables_and_state_in_files(tmp_path: Path, size: float, depth: int) -> None:
    found = []
    for cache in (None, size):
        path = tmp_path / f"{cache}.npy"
        table = HostEmbedding(N, DIM, store=path, init="ones", device_cache=cache)
        optimizer = RowOptimizer(torch.optim.Adam, [table], lr=0.1)
        loop = train_rows(
            loader(), {table: same}, optimizer=optimizer, depth=depth if cache else 0, device="cpu"
        )
        for i, ids in enumerate(loop):
            table(ids).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 3:
                table.export(tmp_path / f"exported {cache}.npy")
        optimizer.close()
        table.close()
        pattern = f"{cache}*.npy"
        found.append([np.load(file) for file in sorted(tmp_path.glob(pattern))])
        found[-1].append(np.load(tmp_path / f"exported {cache}.npy"))
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("size", [0.3, 1.0])
def test_frozen_tables(tmp_path: Path, size: float, depth: int) -> None:
    """Rows that stay unchanged are not written, and a file may be read-only."""

    class Unwritten(ArrayStore):
        def scatter(self, rows: Any, values: Any) -> None:
            raise AssertionError("a frozen row is written")

    rows = np.arange(N * DIM, dtype=np.float32).reshape(N, DIM)
    np.save(tmp_path / "table.npy", rows)
    with NpyStore(tmp_path / "table.npy") as file:
        for store in (Unwritten(rows.copy()), file):
            table = HostEmbedding.from_pretrained(store, device_cache=size)
            for _ in range(2):
                for ids in train_rows(loader(), {table: same}, depth=depth, device="cpu"):
                    assert table(ids).tolist() == rows[ids].tolist()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("size", [0.3, 1.0])
def test_a_frozen_table_that_is_renormalised(size: float, writable: bool, depth: int) -> None:
    rows = np.arange(1, 1 + N * DIM, dtype=np.float32).reshape(N, DIM)
    dense = torch.nn.Embedding.from_pretrained(torch.from_numpy(rows.copy()), max_norm=1.0)
    start = rows.copy()
    rows.flags.writeable = writable
    table = HostEmbedding.from_pretrained(ArrayStore(rows), max_norm=1.0, device_cache=size)
    for ids in train_rows(loader(), {table: same}, depth=depth, device="cpu"):
        assert torch.equal(table(ids), dense(ids))
    np.testing.assert_array_equal(rows, dense.weight.numpy() if writable else start)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("size", [0.3, 1.0])
def test_steps_without_training_between_steps_with(size: float, depth: int) -> None:
    """Some steps evaluate, and some of these after they have flushed a change."""
    found = []
    for cache in (None, size):
        arrays = [np.ones((N, DIM), np.float32) for _ in range(2)]
        table, other = (
            HostEmbedding(N, DIM, store=ArrayStore(array), name=name, device_cache=cache)
            for array, name in zip(arrays, ("table", "other"), strict=True)
        )
        optimizer = RowOptimizer(torch.optim.Adagrad, [table, other], lr=0.1)
        loop = train_rows(
            3 * loader(),
            {table: same, other: same},
            optimizer=optimizer,
            depth=depth if cache else 0,
            device="cpu",
        )
        for i, ids in enumerate(loop):
            if i % 3 == 2:
                # torch does not count this change, so the second write is without values.
                table.train()
                table.weight.data.mul_(0.5)
                loop.flush_writes()
            table.train(i % 3 == 0)
            (table(ids).pow(2).sum() * table.training + other(ids).pow(2).sum()).backward()
            if not table.training:
                table.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        states = [stores.stores[0].array for stores in optimizer.tables.values()]
        found.append([array.tolist() for array in (*arrays, *states)])
    assert found[0] == found[1]


class Full(SimTorchDevice):
    """A device with little memory."""

    limit = 1 << 12

    def empty(self, nbytes: int, stream: Any) -> Any:
        if nbytes > self.limit:
            raise MemoryError("the device is full")
        return super().empty(nbytes, stream)


@needs_native
def test_a_cache_without_memory_is_refused_with_what_to_lower() -> None:
    device = Full()
    table = HostEmbedding(1000, DIM, name="words", init="zeros", device_cache=1.0)
    with device.factories():
        loop = train_rows(loader(), {table: same}, device=device, depth=2)
        match = "device_cache of words .* for 1,000 rows .* cannot allocate .* smaller device_cache"
        with pytest.raises(BudgetError, match=match):
            next(iter(loop))
        table.require_idle()
        device.limit = 1 << 20
        assert len(list(loop)) == len(IDS)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad"])
def test_a_loop_that_changes_its_stream_once(optimizer: str) -> None:
    """The values of a batch are lent in one stream, and put into the cache in another one."""
    for depth, after, policy in itertools.product((1, 2), (1, 2, 3), (None, 1)):
        check(
            SimTorchDevice(lazy),
            depth,
            optimizer,
            caches=(0.7, 0.7),
            policy=policy,
            switch_once=after,
        )


class Counting(SimTorchDevice):
    """Device that counts launches that copy rows by their caller, and allocations of caches.

    It also has the largest number of copies in a launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n: Counter[tuple[str, str]] = Counter()
        self.most_copies = 0

    def copy_rows(self, *args: Any) -> None:
        self.most_copies = max(self.most_copies, len(args[0]))
        self.n["launches", sys._getframe(1).f_code.co_name] += 1
        super().copy_rows(*args)

    def empty(self, *args: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == row_cache.__file__:
            self.n["allocations", "of the cache"] += 1
        return super().empty(*args)


@needs_native
def test_a_step_of_a_cached_table_takes_two_launches() -> None:
    """One launch reads all rows of a batch, and one takes them back, for weights and state."""
    steps = 20
    device = Counting()
    table = HostEmbedding(100, 3, store=ArrayStore(np.zeros((100, 3), np.float32)), name="users")
    table.device_cache = 0.2
    optimizer = RowOptimizer(torch.optim.Adam, [table], lr=0.1)
    rng = np.random.default_rng(0)
    loader = [torch.from_numpy(rng.integers(100, size=30)) for _ in range(steps)]
    with (
        device.factories(),
        train_rows(
            loader, {table: lambda ids: ids}, optimizer=optimizer, device=device, depth=0
        ) as batches,
    ):
        for ids in batches:
            table(device.host(ids)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert batches.stats.cache_lookups > batches.stats.cache_hits > 0
    assert {name for what, name in device.n if what == "launches"} == {"lend", "put", "_copied"}
    n_stores = 3
    assert device.most_copies == 2 * n_stores <= MAX_COPIES
    assert device.n["launches", "lend"] == device.n["launches", "put"] == steps
    # The cache, the rows of each batch, those of them that are written and those of the last flush
    # take an allocation for each of the three stores, and the slots of the last flush one.
    assert device.n["allocations", "of the cache"] <= 3 * (2 * steps + 2) + 1


def trained_beside_a_bag(device: Any, depth: int) -> list[np.ndarray]:
    """Train a table beside one whose rows are summed, and return both."""
    stores = [ArrayStore(np.ones(shape, np.float32)) for shape in ((12, 4), (9, 2))]
    table = HostEmbedding(12, 4, store=stores[0], device_cache=1.0)
    bag = HostEmbeddingBag(9, 2, store=stores[1], mode="sum", device_cache=0.5)
    optimizer = RowOptimizer(torch.optim.Adam, [table, bag], lr=0.1)
    generator = torch.Generator().manual_seed(2)
    batches = list(torch.randint(9, (6, 5, 3), generator=generator))
    ids: Any = {table: lambda batch: batch, bag: lambda batch: batch}
    for batch in train_rows(batches, ids, optimizer=optimizer, device=device, depth=depth):
        loss = table(batch).square().sum() + bag(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [store.array for store in stores]


@pytest.mark.parametrize("has_engine", [False, True], ids=["one call each", "engine"])
def test_a_bag_beside_a_table_on_the_simulated_device(has_engine: bool) -> None:
    device = SimTorchDevice(lazy, has_engine=has_engine)
    with device.factories():
        found = trained_beside_a_bag(device, 2)
    expected = trained_beside_a_bag("cpu", 0)
    assert all(map(np.array_equal, found, expected))
