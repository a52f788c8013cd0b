"""Loops over train_rows: who may use a table's rows, what is written back, how a loop ends."""

import copy
import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    HostEmbeddingBag,
    NpyStore,
    RowOptimizer,
    checkpoint,
    read_rows,
    train_rows,
)
from pinfeed.devices.cpu import HostDevice
from pinfeed.errors import ArgumentError, ClosedError, StoreError
from pinfeed.training.row_loop.synchronous_rows import SynchronousRows

N = 9


def table_of_zeros(**options: Any) -> HostEmbedding:
    return HostEmbedding(N, 2, init="zeros", name="table", **options)


def sgd(table: HostEmbedding) -> RowOptimizer:
    return RowOptimizer(torch.optim.SGD, [table], lr=1.0)


def step(table: HostEmbedding, optimizer: RowOptimizer, ids: torch.Tensor) -> None:
    table(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def ids_of(*batches: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(batch) for batch in batches]


def same(batch: Any) -> Any:
    return batch


class CallOrder(HostDevice):
    """Device that records the calls of ``choose_route`` and ``stream``."""

    unified = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def choose_route(self, stores: Any, wanted: str | None, default: str) -> str:
        self.calls.append(f"route of {len(stores)} stores")
        return super().choose_route(stores, wanted, default)

    def stream(self, name: str) -> Any:
        self.calls.append(name)
        return super().stream(name)


def test_the_route_is_chosen_before_the_streams() -> None:
    device = CallOrder()
    table = table_of_zeros()
    with train_rows(ids_of([0, 1]), {table: same}, optimizer=sgd(table), device=device):
        assert device.calls == ["route of 1 stores", "read", "write"]


def test_rows_of_files_have_several_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    in_memory, in_file = table_of_zeros(), table_of_zeros(store=tmp_path / "table.npy")
    for loop, n_readers in (
        (train_rows([], {in_memory: same}, optimizer=sgd(in_memory), depth=2), 1),
        (train_rows([], {in_file: same}, optimizer=sgd(in_file), depth=2), 3),
        (read_rows([], {in_memory: same}, depth=2), 3),
    ):
        with loop:
            list(loop)
            assert loop.stats.n_readers == n_readers


def test_two_loops_made_before_either_begins() -> None:
    table = table_of_zeros()
    optimizer = sgd(table)
    loops = [
        train_rows(ids_of([0, 1], [2, 3]), {table: same}, optimizer=optimizer, device="cpu")
        for _ in range(2)
    ]
    one, other = map(iter, loops)
    step(table, optimizer, next(one))
    with pytest.raises(ClosedError, match="a loop over rows of table is running"):
        next(other)
    step(table, optimizer, next(one))
    assert next(one, None) is None
    assert table.read(range(4)).tolist() == [[-1, -1]] * 4
    for batch in loops[1]:
        step(table, optimizer, batch)
    assert table.read(range(4)).tolist() == [[-2, -2]] * 4


def test_freezing_in_a_step_counts_from_the_next_loop_on() -> None:
    table = table_of_zeros()
    optimizer = sgd(table)
    loop = train_rows(ids_of([0], [1], [2]), {table: same}, optimizer=optimizer, device="cpu")
    for batch in loop:
        step(table, optimizer, batch)
        table.requires_grad_(False)
    assert table.read(range(3)).tolist() == [[-1, -1]] * 3
    for batch in loop:
        assert not table(batch).requires_grad


def test_a_table_is_not_filled_anew_in_a_loop() -> None:
    table = table_of_zeros()
    for _ in train_rows(ids_of([0]), {table: same}, device="cpu"):
        with pytest.raises(ClosedError, match="is running"):
            table.reset_parameters()
    table.reset_parameters("ones")
    assert table.read([0]).tolist() == [[1, 1]]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_loop_that_is_collected_in_the_writers_thread(depth: int) -> None:
    class Collecting(ArrayStore):
        def scatter(self, rows: Any, values: Any) -> None:
            super().scatter(rows, values)
            dropped.wait(10)
            gc.collect()

    store, dropped = Collecting(np.zeros((N, 2), np.float32)), threading.Event()
    table = HostEmbedding(N, 2, store=store, name="table")
    optimizer = sgd(table)
    cycle: list[Any] = []
    loop = train_rows(
        ids_of(*([i % N] for i in range(20))),
        {table: same},
        optimizer=optimizer,
        depth=depth,
        device="cpu",
    )
    cycle.append((cycle, iter(loop)))
    del loop
    gc.collect()
    gc.disable()
    try:
        for _ in range(depth + 1):
            # The queue of write-backs is full then, and one more follows.
            step(table, optimizer, next(cycle[0][1]))
        del cycle
        dropped.set()
        while left := [
            thread for thread in threading.enumerate() if thread.name.startswith("pinfeed")
        ]:
            left[0].join(10)
            assert not left[0].is_alive(), "a thread waits for itself"
    finally:
        gc.enable()
    table.require_idle()
    assert store.array[: depth + 1].tolist() == [[-1, -1]] * (depth + 1)


def test_an_interrupt_while_rows_are_bound() -> None:
    table = table_of_zeros()
    optimizer = sgd(table)
    bind = optimizer.bind
    optimizer.bind = interrupted
    loop = train_rows(ids_of([0], [1]), {table: same}, optimizer=optimizer, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        next(iter(loop))
    optimizer.bind = bind
    for batch in loop:
        step(table, optimizer, batch)
    assert table.read([0, 1]).tolist() == [[-1, -1]] * 2


def test_a_model_is_copied_in_a_training_step() -> None:
    """Programs that average weights copy the model there."""
    table = table_of_zeros()
    optimizer = sgd(table)
    for batch in train_rows(ids_of([0], [1]), {table: same}, optimizer=optimizer, device="cpu"):
        copied = copy.deepcopy(torch.nn.ModuleList([table]))[0]
        step(table, optimizer, batch)
    assert table.read([0, 1]).tolist() == [[-1, -1]] * 2
    copied.require_idle()
    for batch in train_rows(ids_of([2]), {copied: same}, device="cpu"):
        assert copied(batch).tolist() == [[0, 0]]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_closed_before_it_began_or_by_another_thread(depth: int) -> None:
    table = table_of_zeros()
    optimizer = sgd(table)

    def make() -> Any:
        return train_rows(
            ids_of([0], [1], [2]), {table: same}, optimizer=optimizer, depth=depth, device="cpu"
        )

    loop = make()
    batches = iter(loop)
    loop.close()
    with pytest.raises(ClosedError, match="is closed"):
        next(batches)
    loop = make()
    batches = iter(loop)
    step(table, optimizer, next(batches))
    thread = threading.Thread(target=loop.close)
    thread.start()
    thread.join()
    with pytest.raises(ClosedError, match="another thread closed"):
        next(batches)
    table.require_idle()


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("next_loop", ["the same", "another", "none"])
def test_interrupts_while_a_loop_ends_leave_its_tables_free(next_loop: str) -> None:
    """The second one hits the release of the rows. Earlier write-backs are in the stores."""
    table, other = table_of_zeros(), table_of_zeros()
    optimizer = sgd(table)
    loop = train_rows(
        ids_of([0], [1]), {table: same, other: same}, optimizer=optimizer, device="cpu"
    )
    batches = iter(loop)
    step(table, optimizer, next(batches))
    release = optimizer.release
    optimizer.release = interrupted
    with pytest.raises(KeyboardInterrupt):
        batches.throw(KeyboardInterrupt)
    optimizer.release = release
    if next_loop != "none":
        # The new loop reserves the first table before the second one finds that the old loop
        # has ended.
        tables = {other: same, table: same}
        again = (
            loop
            if next_loop == "the same"
            else train_rows(ids_of([0], [1]), tables, optimizer=optimizer, device="cpu")
        )
        for batch in again:
            step(table, optimizer, batch)
    table.require_idle()
    other.require_idle()
    assert table.read([0, 1]).tolist() == (
        [[-1, -1], [0, 0]] if next_loop == "none" else [[-2, -2], [-1, -1]]
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_are_not_read_in_another_thread(depth: int) -> None:
    table = table_of_zeros()

    def mined(batch: Any) -> Any:
        table.read([0])
        return batch

    with pytest.raises(ClosedError, match="in another thread than that of their loop"):
        list(train_rows(ids_of([0], [1]), {table: mined}, depth=depth, device="cpu"))
    assert len(list(train_rows(ids_of([0], [1]), {table: mined}, depth=0, device="cpu"))) == 2


def test_an_optimizer_that_the_loop_was_not_given() -> None:
    table = table_of_zeros()
    optimizer = sgd(table)
    for batch in train_rows(ids_of([0]), {table: same}, device="cpu"):
        table(batch).sum().backward()
        with pytest.raises(
            ArgumentError,
            match=("the loop over rows of table was made without this optimizer; give train_rows"),
        ):
            optimizer.step()


class Counting(HostDevice):
    """Tensors that count one change when they are lent, like those of CUDA."""

    def tensor(self, *args: Any) -> torch.Tensor:
        return super().tensor(*args).add_(0)


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_unchanged_rows_are_not_written(writable: bool, training: bool) -> None:
    class Watched(ArrayStore):
        written = 0

        def scatter(self, rows: Any, values: Any) -> None:
            self.written += 1
            super().scatter(rows, values)

    array = np.zeros((N, 2), np.float32)
    array.flags.writeable = writable
    store = Watched(array)
    table = HostEmbedding(N, 2, store=store, name="table").train(training)
    for batch in train_rows(ids_of([0], [1]), {table: same}, device=Counting()):
        table(batch).sum()
    assert store.written == (2 if writable and training else 0), (
        "in training, weight.data may have been changed"
    )


@pytest.mark.parametrize("writable", [True, False])
def test_a_frozen_table_is_renormalised(writable: bool) -> None:
    array = np.full((N, 2), 3, np.float32)
    array.flags.writeable = writable
    table = HostEmbedding.from_pretrained(ArrayStore(array), max_norm=1.0)
    dense = torch.nn.Embedding.from_pretrained(torch.full((N, 2), 3.0), max_norm=1.0)
    for batch in train_rows(ids_of([0, 2], [2, 5]), {table: same}, device="cpu"):
        assert torch.equal(table(batch), dense(batch))
    assert array.tolist() == (dense.weight.tolist() if writable else np.full((N, 2), 3).tolist())


def test_the_data_of_verification_is_released_with_the_loop() -> None:
    def n_copies() -> int:
        return sum(type(each) is SynchronousRows for each in gc.get_objects())

    table = table_of_zeros()
    n_before = n_copies()
    loop = train_rows(ids_of([0], [1]), {table: same}, device="cpu", verify=True)
    for _ in loop:
        assert n_copies() == n_before + 1
    assert n_copies() == n_before
    assert not loop.is_running


def test_changes_can_be_flushed_in_the_loop() -> None:
    array = np.zeros((N, 2), np.float32)
    table = HostEmbedding(N, 2, store=ArrayStore(array), name="table")
    loop = train_rows(ids_of([0, 1], [1, 2]), {table: same}, device="cpu")
    for i, _ in enumerate(loop, 1):
        with torch.no_grad():
            table.weight.add_(1)
        loop.flush_writes()
        assert array[1].tolist() == [i, i]
    assert array[:3, 0].tolist() == [1, 2, 1]


@pytest.mark.parametrize("names", [("a", "b"), (None, None)])
def test_tables_that_share_rows_are_refused(names: tuple[str | None, str | None]) -> None:
    """Tables of one shape have the same name unless they are given another one."""
    array = np.zeros((N, 2), np.float32)
    tables = [HostEmbedding(N, 2, store=ArrayStore(array), name=name) for name in names]
    with pytest.raises(ArgumentError, match="have rows in common"):
        train_rows(ids_of([0]), dict.fromkeys(tables, same), device="cpu")


def test_a_wrong_mode_makes_no_file(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match="mode='median'"):
            HostEmbeddingBag(N, 2, mode="median", store=tmp_path / "bag.npy")
    assert not list(tmp_path.iterdir())


def test_export_to_the_tables_own_file(tmp_path: Path) -> None:
    table = table_of_zeros(store=tmp_path / "table.npy")
    with pytest.raises(
        StoreError, match="the file of table and already has its rows; expected another path"
    ):
        table.export(tmp_path / "table.npy")
    optimizer = sgd(table)
    for batch in train_rows(ids_of([0]), {table: same}, optimizer=optimizer, device="cpu"):
        step(table, optimizer, batch)
    table.export(tmp_path / "other.npy")
    table.close()
    assert (
        np.load(tmp_path / "table.npy")[0].tolist()
        == np.load(tmp_path / "other.npy")[0].tolist()
        == [-1, -1]
    )


@pytest.mark.parametrize("kind", ["feeder", "store of a table"])
def test_a_checkpoint_in_a_loop_has_all_completed_batches(kind: str, tmp_path: Path) -> None:
    """The checkpoint has the rows of every completed batch, however late they are written."""
    late = threading.Event()

    class Slow(ArrayStore):
        def scatter(self, rows: Any, values: Any) -> None:
            late.wait(0.05)
            super().scatter(rows, values)

    array = np.zeros((8, 1), np.float32)
    store, loader = Slow(array), ids_of([0, 1], [2, 3], [4, 5], [6, 7])
    if kind == "feeder":
        loop: Any = Feeder(store, batch_size=2, depth=2, device="cpu")
        for i, batch in enumerate(loop.batches()):
            batch.write_back(batch.data - 1)
            if i == 2:
                checkpoint.save(tmp_path / "c", store=store, loop=loop)
                break
    else:
        table = HostEmbedding(8, 1, store=store, name="table")
        optimizer = sgd(table)
        loop = train_rows(loader, {table: same}, optimizer=optimizer, device="cpu")
        for i, batch in enumerate(loop):
            step(table, optimizer, batch)
            if i == 2:
                checkpoint.save(tmp_path / "c", store=store, loop=loop, optimizer=optimizer)
                break
    loop.close()
    array[...] = 5
    with NpyStore(tmp_path / "c" / "00000001" / "store.npy") as saved:
        rows = np.empty((8, 1), np.float32)
        saved.gather(np.arange(8), rows)
    assert rows[:, 0].tolist() == [-1] * 6 + [0] * 2


def test_state_of_the_table_as_a_whole_follows_the_weight() -> None:
    """A checkpoint gives this state on the CPU. The meta device stands for a GPU."""

    class Whole(torch.optim.Optimizer):
        def __init__(self, params: Any, capturable: bool = False) -> None:
            super().__init__(params, {"capturable": capturable})

        def step(self, closure: Any = None) -> None:
            for p in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
                self.state[p].setdefault("step", torch.tensor(0.0))
                self.state[p].setdefault("column", torch.zeros(p.shape[1]))

    for capturable in (False, True):
        table = table_of_zeros()
        optimizer = RowOptimizer(Whole, [table], capturable=capturable)
        optimizer.load_state_dict(
            {
                **optimizer.state_dict(),
                "tables": [
                    {"begun": True, "state": {"step": torch.tensor(2.0), "column": torch.ones(2)}}
                ],
            }
        )
        weight = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
        optimizer.bind(table, weight, [])
        state = optimizer.inner.state[weight]
        assert (state["column"].device.type, state["step"].device.type) == (
            "meta",
            "meta" if capturable else "cpu",
        )


def test_unused_gradients_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    table = HostEmbedding(10, 2, name="users")
    for ids in train_rows([torch.arange(4)] * 3, {table: lambda batch: batch}):
        table(ids).sum().backward()
    assert caplog.text.count("users has gradients, but train_rows has no optimizer for it") == 1


@pytest.mark.parametrize("dropped", [False, True])
def test_a_forgotten_step_causes_one_warning(
    dropped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    table = HostEmbedding(10, 2, name="users", init="zeros")
    optimizer = sgd(table)
    loop = train_rows([torch.arange(4)] * 3, {table: same}, optimizer=optimizer)
    for ids in loop:
        step(table, optimizer, ids)
    for ids in loop:
        with torch.no_grad():
            table(ids).sum()
    for ids in loop:
        table(ids).sum().backward()
        break
    optimizer.zero_grad()
    assert not caplog.records, "stepped; without gradients; left in the middle of the step"
    for ids in loop:
        table(ids).sum().backward()
        if dropped:
            optimizer.zero_grad()
    assert caplog.text.count("users has gradients, but the training step ended without a step") == 1
    assert table.read(range(4))[:, 0].tolist() == [-3] * 4
