"""Tables that share rows, in memory or in a file: a write of one is never lost to the other."""

import copy
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.row_optimizers import itself, train_rows

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    NpyStore,
    PinnedStore,
    RowOptimizer,
    Store,
    errors,
    read_rows,
)
from pinfeed.training.embeddings.batch_rows import loops_over, register, unregister

N, DIM = 8, 4
Pair = tuple[Any, Any]


def written(path: Path) -> Path:
    np.save(path, np.ones((N, DIM), np.float32))
    return path


def raw(path: Path) -> Path:
    np.ones((N, DIM), np.float32).tofile(path)
    return path


def mapped(path: Path) -> np.ndarray:
    """Return rows of a raw file through Python's mmap, whose file numpy does not know."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.float32).reshape(N, DIM)


def opened(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r+")


def hard_link(path: Path) -> Path:
    link = path.with_suffix(".link.npy")
    os.link(path, link)
    return link


def from_file(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=N * DIM).view(N, DIM)


def ones() -> np.ndarray:
    return np.ones((N, DIM), np.float32)


SHARED: dict[str, Callable[[Path], Pair]] = {
    "array": lambda _: (a := ones(), a),
    "array and tensor": lambda _: (a := ones(), torch.from_numpy(a)),
    "ranges": lambda _: ((a := ones())[:5], a[4:]),
    "store": lambda _: (a := ArrayStore(ones()), a),
    "pinned": lambda _: (a := PinnedStore(ones(), pin=False), copy.copy(a)),
    "shared tensor": lambda _: (a := torch.ones(N, DIM).share_memory_(), a.numpy()),
    "path": lambda path: (written(path), NpyStore(path, mode="r+")),
    "hard link": lambda path: (written(path), hard_link(path)),
    "path and map": lambda path: (opened(written(path)), path),
    "path and tensor of a map": lambda path: (torch.from_numpy(opened(written(path))), path),
    "maps": lambda path: (opened(written(path)), opened(path)),
    "maps of Python": lambda path: (mapped(raw(path)), mapped(path)),
    "maps of torch": lambda path: (from_file(raw(path)), mapped(path)),
    "ranges of maps": lambda path: (opened(written(path))[:5], opened(path)[4:]),
}
"""Rows that two tables share."""
SEPARATE: dict[str, Callable[[Path], Pair]] = {
    "ranges": lambda _: ((a := ones())[:4], a[4:]),
    "columns": lambda _: ((a := ones())[:, :2], a[:, 2:]),
    "columns of maps": lambda path: (opened(written(path))[:, :2], opened(path)[:, 2:]),
    "rows of maps": lambda path: (opened(written(path))[::2], opened(path)[1::2]),
    "private map": lambda path: (np.load(written(path), mmap_mode="c"), path),
    "files": lambda path: (written(path), written(path.with_suffix(".other.npy"))),
}
"""Rows that have no byte in common."""


def tables_of(pair: Pair, *freeze: bool) -> list[HostEmbedding]:
    """Return tables of one name."""
    return [
        HostEmbedding.from_pretrained(rows, freeze=frozen, name="users")
        for rows, frozen in zip(pair, freeze, strict=True)
    ]


def loop_over(*tables: HostEmbedding, **options: Any) -> Any:
    loader = [torch.tensor([3, 1])] * 4
    return train_rows(loader, dict.fromkeys(tables, itself), **{"depth": 0, **options})


def step(table: HostEmbedding, ids: torch.Tensor) -> None:
    """Subtract 1 from rows of a table."""
    with torch.no_grad():
        table.weight.sub_(1)


@pytest.mark.parametrize("kind", SHARED)
def test_shared_rows_are_trained_by_one_loop_at_a_time(kind: str, tmp_path: Path) -> None:
    shared = SHARED[kind](tmp_path / "rows.npy")
    one, other = tables_of(shared, False, False)
    frozen, also = tables_of(shared, True, True)
    third = tables_of(shared[:1], True)[0]
    for tables in ((one, other), (one, also), (frozen, other)):
        with pytest.raises(errors.ArgumentError, match=r"users.weight have rows in common"):
            loop_over(*tables)
    # Frozen tables may share rows, in one loop and in two.
    for ids in loop_over(frozen, also):
        for inner in loop_over(third):
            assert torch.equal(frozen(ids), third(inner))
    for first, second in ((one, other), (one, also), (frozen, other)):
        older = iter(loop_over(first))
        next(older)
        next(iter(loop_over(second)))
        with pytest.raises(errors.ClosedError, match="another loop over one of its tables began"):
            next(older)
    assert torch.equal(one.read(range(4)), torch.ones(4, DIM))
    # Both tables are free again, and see the rows that the other one has trained.
    assert len([step(one, ids) for ids in loop_over(one)]) == 4
    assert len([step(other, ids) for ids in loop_over(other)]) == 4
    is_whole = one.num_embeddings == other.num_embeddings
    assert one.read([1])[0, 0] == (-7 if is_whole else -3)
    for part in (one, other, frozen, also, third, *shared):
        if hasattr(part, "close"):
            part.close()


@pytest.mark.parametrize("kind", SEPARATE)
def test_separate_rows_are_trained_together(kind: str, tmp_path: Path) -> None:
    one, other = tables_of(SEPARATE[kind](tmp_path / "rows.npy"), False, False)
    for ids in loop_over(one, other):
        step(one, ids)
        step(other, ids)
    for ids in loop_over(one):
        for inner in loop_over(other):
            step(other, inner)
        step(one, ids)
    assert one.read([0, 1, 2, 3])[:, 0].tolist() == [1, -7, 1, -7]
    assert other.read([0, 1, 2, 3])[:, 0].tolist() == [1, -19, 1, -19]
    for table in (one, other):
        table.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_table_that_shares_trained_rows_reads_their_values(depth: int) -> None:
    array = ones()
    trained, frozen = tables_of((array, array), False, True)
    unrelated = HostEmbedding(N, DIM)
    reads = read_rows([torch.tensor([1, 3])], {frozen: itself}, device="cpu")
    loop = loop_over(trained, depth=depth)
    failures: list[Exception] = []

    def elsewhere() -> None:
        for act in (lambda: frozen.read([1]), lambda: next(iter(loop_over(frozen)))):
            try:
                act()
            except errors.ClosedError as error:
                failures.append(error)

    for number, ids in enumerate(loop, 1):
        step(trained, ids)
        assert frozen.read([1, 0])[:, 0].tolist() == [1 - number, 1]
        assert frozen(torch.tensor([3]))[0, 0] == 1 - number
        with pytest.raises(errors.ClosedError, match="have rows in common"):
            next(iter(reads))
        with pytest.raises(errors.ClosedError, match="a loop over rows of users is running"):
            frozen.reset_parameters()
        with loop.evaluating():
            for test in reads:
                assert frozen(test)[:, 0].tolist() == [1 - number] * 2
        next(iter(loop_over(unrelated)))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(failures) == 8
    older = iter(reads)
    next(older)
    next(iter(loop_over(trained)))
    with pytest.raises(errors.ClosedError, match="another loop over one of its tables began"):
        next(older)
    assert array[:4, 0].tolist() == [1, -3, 1, -3]


def test_frozen_tables_that_share_rows_are_not_changed() -> None:
    array = ones()
    one, other = tables_of((array, array), True, True)
    with pytest.raises(errors.ArgumentError, match="changed rows of users, which is frozen"):
        for ids in loop_over(one, other):
            step(one, ids)
    assert (array == 1).all()
    # A frozen table alone may be changed.
    for ids in loop_over(one):
        step(one, ids)
    assert array[1, 0] == -3
    with pytest.raises(errors.ArgumentError, match=r"users.weight have rows in common"):
        train_rows([], {HostEmbedding.from_pretrained(array, max_norm=1.0): itself, other: itself})
    both = loop_over(one, other)
    other.requires_grad_()
    with pytest.raises(errors.ArgumentError, match=r"users.weight and users.weight have rows in"):
        next(iter(both))
    other.requires_grad_(False)
    assert len(list(both)) == 4


def test_state_has_rows_of_its_own() -> None:
    one, other = HostEmbedding(N, DIM, name="one"), HostEmbedding(N, DIM, name="other")
    before = [table.read(range(N)) for table in (one, other)]
    common = ArrayStore(ones())
    wrong: Any
    for wrong, match in [
        (lambda table, *_: table.store, "'exp_avg' of one: its store .* the rows of one; expected"),
        (lambda *_: other.store, "state 'exp_avg' of one: .* in common with the rows of other"),
        (lambda *_: common, "state 'exp_avg_sq' of one: .* with state 'exp_avg' of one"),
    ]:
        with pytest.raises(errors.StoreError, match=match):
            RowOptimizer(torch.optim.Adam, [one, other], state=wrong)
    assert all(map(torch.equal, before, [table.read(range(N)) for table in (one, other)]))


def test_rows_that_overlap_themselves_are_not_trained(tmp_path: Path) -> None:
    numbers = np.arange(20, dtype=np.float32)
    np.save(tmp_path / "numbers.npy", numbers)
    windows = NpyStore.windows(tmp_path / "numbers.npy", length=4)
    rows: Any
    for rows in (
        np.lib.stride_tricks.sliding_window_view(numbers, 4, writeable=True),
        torch.from_numpy(numbers).unfold(0, 4, 1),
        torch.from_numpy(numbers).as_strided((8, 4), (1, 1)),
        torch.from_numpy(numbers[:4]).expand(8, 4),
        windows,
    ):
        table = HostEmbedding.from_pretrained(rows, freeze=False)
        with pytest.raises(errors.ArgumentError, match="is in a read-only store"):
            RowOptimizer(torch.optim.SGD, [table])
        with pytest.raises(errors.WriteBackError):
            for ids in train_rows([torch.tensor([1])], {table: itself}):
                step(table, ids)
    windows.close()
    assert numbers.tolist() == list(range(20))
    assert np.load(tmp_path / "numbers.npy").tolist() == list(range(20))


def test_evaluating_ends_no_loop_over_a_frozen_table() -> None:
    rows = np.arange(N * DIM, dtype=np.float32).reshape(N, DIM)
    frozen, other = (HostEmbedding.from_pretrained(rows, name=name) for name in ("one", "other"))
    trained = HostEmbedding(N, DIM, name="trained")
    reading = iter(read_rows([{"id": torch.tensor([i])} for i in range(3)], {other: "id"}))
    next(reading)
    optimizer = RowOptimizer(torch.optim.SGD, [trained], lr=0.1)
    loop = train_rows(
        [{"id": torch.tensor([1])}], {frozen: "id", trained: "id"}, optimizer=optimizer
    )
    for _ in loop:
        with loop.evaluating():
            pass
    assert [batch["id"].item() for batch in reading] == [1, 2]


@dataclasses.dataclass
class Rows(Store):
    """A store without a hash."""

    values: np.ndarray
    row_shape: tuple[int, ...] = (DIM,)
    writable: bool = True

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def n_rows(self) -> int:
        return len(self.values)

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        out[...] = self.values[rows]

    def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
        self.values[rows] = values


def test_stores_that_are_dataclasses_are_trained_together() -> None:
    tables = [HostEmbedding(N, DIM, store=Rows(np.ones((N, DIM), np.float32))) for _ in range(2)]
    optimizer = RowOptimizer(torch.optim.SGD, tables, lr=1.0)
    for ids in train_rows([torch.tensor([2])], dict.fromkeys(tables, itself), optimizer=optimizer):
        sum(table(ids).sum() for table in tables).backward()
        optimizer.step()
    for table in tables:
        assert table.read([1, 2]).tolist() == [[1] * DIM, [0] * DIM]


def test_a_loop_may_be_collected_while_tables_are_compared() -> None:
    """The collector may run anywhere, so no lock may be held there."""
    table = HostEmbedding(N, DIM, name="table")
    has_waited = []

    class Collected:
        """Rows that another thread drops while they are compared."""

        stores: tuple[Any, ...] = ()
        writes = True

        @property
        def table(self) -> HostEmbedding:
            thread = threading.Thread(target=unregister, args=(self,))
            thread.start()
            thread.join(0.5)
            has_waited.append(thread.is_alive())
            return table

    rows = Collected()
    register(rows)
    assert loops_over(table, [table.store], writes=True) == []
    assert has_waited == [False]
