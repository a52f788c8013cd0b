"""Tables sharded by row: what the ranks do together is what one process does with their batches joined."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sharded_ranks
from support.simranks import RankThreads
from torch import distributed, nn

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    RowOptimizer,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    checkpoint,
    train_rows,
)
from pinfeed.errors import (
    ArgumentError,
    ClosedError,
    RankError,
    RowIndexError,
    StoreError,
    VerificationError,
)
from pinfeed.training.distributed import batch_rows, initialization, process_groups
from pinfeed.training.distributed.row_partition import RowPartition
from pinfeed.training.embeddings.source import Exchanged

SHAPES = (11, 2), (7, 3)
SGD = torch.optim.SGD
ADAM = torch.optim.Adam
ADAGRAD = torch.optim.Adagrad

Ids = list[int]
Batch = list[tuple[Ids, Ids]]
"""What each rank looks up in each table."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's own threads only wait for each other over tensors as small as these."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def whole_tables() -> list[np.ndarray[Any, Any]]:
    """Small whole numbers: with SGD and a loss whose gradient is linear in them, every sum below is exact."""
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, shape).astype("f8") for shape in SHAPES]


def loss_of(
    tables: Sequence[Callable[[torch.Tensor], torch.Tensor]], ids: Sequence[torch.Tensor]
) -> torch.Tensor:
    return sum((0.5 * table(i).sum(1) ** 2).sum() for table, i in zip(tables, ids, strict=True))  # type: ignore[return-value]


def joined(batch: Batch) -> list[torch.Tensor]:
    return [
        torch.tensor([i for of_rank in batch for i in of_rank[t]], dtype=torch.int64)
        for t in range(len(SHAPES))
    ]


def dense(
    batches: Sequence[Batch], does: Sequence[str], made: Any, lr: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One process, nothing of pinfeed's: the tables at the end, and what was looked at on the way."""
    tables = [
        nn.Embedding.from_pretrained(torch.from_numpy(array), freeze=False)
        for array in whole_tables()
    ]
    optimizer, seen = made([table.weight for table in tables], lr=lr), []
    for batch, action in zip(batches, does, strict=True):
        if action == "look":
            seen += [table.weight.detach().clone() for table in tables]
        for _ in range({"nothing": 0, "twice": 2}.get(action, 1)):
            loss_of(tables, joined(batch)).backward()
        if action not in ("nothing", "drop"):
            optimizer.step()
        optimizer.zero_grad()
    return [table.weight.detach() for table in tables], seen


def sharded(
    batches: Sequence[Batch],
    does: Sequence[str],
    made: Any,
    lr: float,
    *,
    size: int,
    depth: int,
    **options: Any,
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The same on so many ranks: the whole tables as each of them reads them, and what was looked at on the way."""
    ranks, options = RankThreads(size), {"device": "cpu", **options}

    def program(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tables = [
            ShardedEmbedding.from_pretrained(
                array,
                freeze=False,
                process_group=ranks.peers[rank],
                gradients="sum",
                name=f"table {i}",
            )
            for i, array in enumerate(whole_tables())
        ]
        for table in tables:
            assert table.store.n_rows == len(range(rank, table.num_embeddings, size)), (
                "more than its share"
            )
        optimizer, seen = RowOptimizer(made, tables, lr=lr), []
        for table, state in optimizer.tables.items():
            assert all(store.n_rows == table.store.n_rows for store in state.stores)
        mine = [[torch.tensor(ids, dtype=torch.int64) for ids in batch[rank]] for batch in batches]
        with train_rows(
            mine,
            {table: i for i, table in enumerate(tables)},
            optimizer=optimizer,
            depth=depth,
            **options,
        ) as loop:
            for batch, action in zip(loop, does, strict=True):
                if action == "look":
                    seen += [table.read(range(table.num_embeddings)) for table in tables]
                for _ in range({"nothing": 0, "twice": 2}.get(action, 1)):
                    loss_of(tables, batch).backward()
                if action not in ("nothing", "drop"):
                    optimizer.step()
                optimizer.zero_grad()
        return [table.read(range(table.num_embeddings)) for table in tables], seen

    results = ranks.run(program)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def assert_equal(
    got: tuple[list[torch.Tensor], list[torch.Tensor]],
    want: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> None:
    for one, other in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_array_equal(one, other)


ACTIONS = ("step", "step", "step", "look", "twice", "nothing", "drop")


@st.composite
def programs(draw: Any) -> tuple[int, list[Batch], list[str]]:
    size = draw(st.integers(1, 5))
    ids = [st.lists(st.integers(0, n - 1), max_size=4) for n, _ in SHAPES]
    batches = draw(st.lists(st.lists(st.tuples(*ids), min_size=size, max_size=size), max_size=6))
    return size, batches, [draw(st.sampled_from(ACTIONS)) for _ in batches]


@given(programs(), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_any_ids_at_any_depth_on_any_number_of_ranks(
    program: tuple[int, list[Batch], list[str]], depth: int
) -> None:
    size, batches, does = program
    want = dense(batches, does, SGD, 0.5)
    for got in sharded(batches, does, SGD, 0.5, size=size, depth=depth):
        assert_equal(got, want)


class Late(ArrayStore):
    """The first write of row 0 waits until row 0 is gathered for a later batch, or for as long as nothing else goes on."""

    def __init__(self, n_rows: int) -> None:
        super().__init__(np.zeros((n_rows, 1)))
        self.n_gathers = 0
        self.wrote = False
        self.gathered = threading.Event()

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        self.n_gathers += 0 in rows
        if self.n_gathers > 2:
            # For the ranks, for this rank, and again.
            self.gathered.set()

    def scatter(self, rows: Any, values: Any) -> None:
        if 0 in rows and not self.wrote:
            self.wrote = True
            self.gathered.wait(0.5)
        super().scatter(rows, values)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("later", ["step", "nothing"])
def test_writes_that_are_as_late_as_can_be(depth: int, later: str) -> None:
    """Row 0 is changed in batch 0, and looked up again when that may have landed at last."""
    for again in (2 * depth, 2 * depth + 1):
        ranks = RankThreads(1)
        table = ShardedEmbedding(2, 1, store=Late(2), process_group=ranks.peers[0], gradients="sum")
        optimizer = RowOptimizer(SGD, [table], lr=1.0)
        seen = []
        for i, batch in enumerate(
            train_rows(
                [torch.tensor([int(i not in (0, again))]) for i in range(again + 1)],
                {table: lambda b: b},
                optimizer=optimizer,
                depth=depth,
            )
        ):
            seen.append(table(batch).item())
            if i == 0 or later == "step":
                table(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            # What is not trained, and not in training, is not written.
            table.train(later == "step")
        assert seen[-1] == -1


# ---- other optimizers, losses, kinds of tables ---------------------------------------------------
FIXED: list[Batch] = [
    [([0, 1, 2, 1, 3], [0, 1]), ([3, 3], [6, 2])],
    [([4, 5, 6, 7, 8], [4]), ([], [])],
    [([2, 1, 2], [3, 1]), ([2, 10], [3, 3])],
    [([9, 9], []), ([9, 0], [0, 0])],
    [([0], [1, 6]), ([1, 2], [6])],
    [([0, 3], [5, 5]), ([10, 3], [5, 1])],
]
STEPS = ["step"] * len(FIXED)


@pytest.mark.parametrize("made", [SGD, ADAGRAD], ids=["SGD", "Adagrad"])
def test_the_dense_loop_of_one_process(made: Any) -> None:
    """Where the optimizer leaves a row alone whose gradient is zero.

    The sums are the same, but for the order of additions.
    """
    tables, _ = dense(FIXED, STEPS, made, 0.1)
    for got, _ in sharded(FIXED, STEPS, made, 0.1, size=2, depth=2):
        for one, other in zip(got, tables, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("verify", [False, True])
def test_every_row_crosses_once_in_each_direction(verify: bool) -> None:
    """In the background or late; its gradient comes back. 8 bytes for each id."""
    ranks, size = RankThreads(3), 3
    batches = [[torch.tensor([rank, i, 2 * i, 8]) for rank in range(size)] for i in range(4)]

    def program(rank: int) -> Any:
        table = ShardedEmbedding(9, 5, process_group=ranks.peers[rank])
        optimizer, found = RowOptimizer(SGD, [table], lr=1.0), []
        for n in (4, 3):
            mine = [batch[rank] for batch in batches[:n]]
            loop = train_rows(
                mine, {table: lambda ids: ids}, optimizer=optimizer, device="cpu", verify=verify
            )
            for ids in loop:
                table(ids).sum().backward()
                optimizer.step()
            found.append(loop.exchanged)
        return found

    results = ranks.run(program)
    four, three = (
        Exchanged(*np.sum(of_ranks, axis=0).tolist()) for of_ranks in zip(*results, strict=True)
    )
    n_elsewhere = [
        sum(i % size != rank for rank, ids in enumerate(batch) for i in set(ids.tolist()))
        for batch in batches
    ]
    assert four.ids == 8 * sum(n_elsewhere)
    assert four.gradients == four.rows + four.late_rows == 5 * 4 * sum(n_elsewhere)
    assert four.rows
    assert four.late_rows
    assert four.words - three.words == size * (size - 1) * (4 * 40 + 2 * 8) + n_elsewhere[3]


def test_verify_finds_rows_that_came_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rows, "exchange_deferred", lambda tables: None)
    with pytest.raises(
        VerificationError,
        match=r"table 0 of the loop, row \d+ differs from what the rank has that owns it",
    ):
        sharded(FIXED, STEPS, SGD, 0.5, size=2, depth=2, verify=True)


def test_more_tables_than_there_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rows, "MAX_FLAGS", 1)
    want = dense(FIXED, STEPS, SGD, 0.5)
    for got in sharded(FIXED, STEPS, SGD, 0.5, size=2, depth=1):
        assert_equal(got, want)


def test_tables_of_different_dtypes_in_one_exchange() -> None:
    """Where rows of two bytes stand before rows of eight."""
    ranks = RankThreads(3)

    def program(rank: int) -> Any:
        wholes = [
            torch.arange(7 * n, dtype=dtype).reshape(7, n)
            for n, dtype in ((3, torch.bfloat16), (1, torch.float64))
        ]
        tables = [
            ShardedEmbedding.from_pretrained(
                whole, process_group=ranks.peers[rank], name=str(whole.dtype)
            )
            for whole in wholes
        ]
        ids = torch.tensor([rank, 2 * rank, 6])
        with train_rows([ids], {table: lambda ids: ids for table in tables}, device="cpu") as loop:
            found = [[table(batch) for table in tables] for batch in loop]
        return [
            bool((rows == whole[ids]).all()) for rows, whole in zip(found[0], wholes, strict=True)
        ]

    assert ranks.run(program) == [[True, True]] * 3


@pytest.mark.parametrize(
    "made", [SGD, ADAM, ADAGRAD, torch.optim.SparseAdam], ids=lambda made: made.__name__
)
def test_every_depth_is_the_synchronous_loop(made: Any) -> None:
    """Bit for bit, whatever the sums round to."""
    does = ["step", "twice", "look", "step", "nothing", "step"]
    want, *others = sharded(FIXED, does, made, 0.1, size=2, depth=0)
    for got in (
        *others,
        *(
            result
            for depth in (1, 2, 3)
            for result in sharded(FIXED, does, made, 0.1, size=2, depth=depth)
        ),
    ):
        assert_equal(got, want)


def trained(
    table: HostEmbedding, batches: Sequence[torch.Tensor], made: Any = ADAM, **options: Any
) -> list[float]:
    """A mean over the batch; losses."""
    optimizer, losses = RowOptimizer(made, [table], lr=0.1), []
    for ids in train_rows(
        batches, {table: lambda ids: ids}, optimizer=optimizer, device="cpu", **options
    ):
        loss = table(ids).pow(2).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_means_are_averaged_and_the_padding_stays() -> None:
    """Adam, lazily, is one process with a HostEmbedding; both begin as the seed says."""
    size, n = 4, 13
    rng = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, n, (size, 3), generator=rng) for _ in range(8)]
    options: dict[str, Any] = {"padding_idx": 5, "dtype": torch.float64}
    torch.manual_seed(0)
    one = HostEmbedding(n, 4, **options)
    state = torch.get_rng_state()
    losses = trained(one, [batch.flatten() for batch in batches])
    ranks, tables = RankThreads(size), []
    for peers in ranks.peers:
        torch.manual_seed(0)
        tables.append(ShardedEmbedding(n, 4, process_group=peers, **options))
        assert torch.equal(torch.get_rng_state(), state)
    first = ranks.run(lambda rank: tables[rank].read(5))
    got = ranks.run(lambda rank: trained(tables[rank], [batch[rank] for batch in batches]))
    np.testing.assert_allclose(np.mean(got, axis=0), losses, rtol=1e-9)
    for table, padding in zip(
        ranks.run(lambda rank: tables[rank].read(range(n))), first, strict=True
    ):
        np.testing.assert_allclose(table, one.read(range(n)), rtol=1e-6, atol=1e-9)
        assert padding.tolist() == table[5].tolist() == [0] * 4
    assert [table.store.n_rows for table in tables] == [4, 3, 3, 3]


def test_bags() -> None:
    ranks = RankThreads(2)
    whole = torch.arange(8.0).reshape(4, 2)

    def program(rank: int) -> tuple[list[Any], list[Any]]:
        bag = ShardedEmbeddingBag.from_pretrained(
            whole, freeze=False, mode="sum", process_group=ranks.peers[rank]
        )
        optimizer = RowOptimizer(SGD, [bag], lr=1.0)
        for ids in train_rows(
            [torch.tensor([[0, 1 + rank]])],
            {bag: lambda ids: ids},
            optimizer=optimizer,
            device="cpu",
        ):
            out = bag(ids)
            out.sum().backward()
            optimizer.step()
        with torch.no_grad():
            return out.tolist(), bag(torch.tensor([[0, 1, 2, 3]])).tolist()

    # 12 and 16, less 1 for row 0 and a half for 1 and 2.
    assert ranks.run(program) == [([[2, 4]], [[10, 14]]), ([[4, 6]], [[10, 14]])]


def test_a_frozen_table_and_a_loop_without_optimizer() -> None:
    ranks = RankThreads(2)

    def program(rank: int) -> list[Any]:
        table = ShardedEmbedding.from_pretrained(
            torch.arange(6.0)[:, None], process_group=ranks.peers[rank]
        )
        with train_rows(
            [torch.tensor([rank, 5])] * 3, {table: lambda ids: ids}, device="cpu"
        ) as loop:
            found = [table(ids).flatten().tolist() for ids in loop]
        return [found, loop.exchanged.late_rows]

    assert ranks.run(program) == [[[[0, 5]] * 3, 0], [[[1, 5]] * 3, 0]]


# ---- how it begins, and what it is made of -------------------------------------------------------
@given(st.integers(1, 40), st.integers(1, 6), st.data())
@settings(max_examples=30, deadline=None)
def test_every_row_has_one_owner(n_rows: int, size: int, data: Any) -> None:
    owners = RowPartition(n_rows, size)
    rows = np.array(data.draw(st.lists(st.integers(0, n_rows - 1))), np.int64)
    start = data.draw(st.integers(0, n_rows))
    stop = data.draw(st.integers(start, n_rows))
    order, counts = owners.by_owner(rows)
    for rank, of_rank in enumerate(np.split(rows[order], np.cumsum(counts)[:-1])):
        own = owners.own(rank, 0, n_rows)
        assert owners.local(own).tolist() == list(range(owners.n_own(rank)))
        assert set(of_rank) <= set(own)
        assert owners.own(rank, start, stop).tolist() == [row for row in own if start <= row < stop]
    assert sorted(order) == list(range(len(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("init", ["normal", "uniform", "xavier_uniform", "kaiming_normal", "ones"])
def test_pieces_are_those_of_the_whole(
    init: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialization, "_CHUNK_BYTES", 400)
    fill = getattr(nn.init, f"{init}_")
    for shape in ((1, 1), (37, 1), (100, 3), (64, 5)):
        torch.manual_seed(0)
        whole, state = torch.empty(shape, dtype=dtype), None
        fill(whole)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        pieces = list(initialization.draw_chunks(fill, shape, dtype))
        assert torch.equal(torch.cat([piece for _, piece in pieces]), whole)
        assert [start for start, _ in pieces] == np.cumsum(
            [0, *(len(piece) for _, piece in pieces)]
        )[:-1].tolist()
        assert torch.equal(torch.get_rng_state(), state)
    assert len(pieces) > 1


def test_what_cannot_be_made() -> None:
    peers = RankThreads(4).peers[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        # Depends on torch's version.
        (
            {"init": "orthogonal"},
            "init does nothing to a tensor without data|init calls aten.new_empty.default",
        ),
        ({"init": "eye"}, "init calls aten.eye.*, which needs the whole table at once"),
        ({"init": lambda t: t.copy_(torch.zeros(9, 2, device="meta"))}, "init calls aten"),
        (
            {"init": lambda t: t.copy_(torch.zeros(9, 2)).numpy()},
            "init failed on a tensor without data",
        ),
        ({"init": lambda t: t.normal_().uniform_()}, "init draws 2 times"),
        ({"max_norm": 1.0}, "max_norm=1.0 of a sharded table: it changes rows"),
        ({"scale_grad_by_freq": True}, "counts ids in the batches of all ranks"),
        ({"gradients": "max"}, "gradients='max': expected 'mean' or 'sum'"),
        ({"num_embeddings": 3}, "3 rows over 4 ranks"),
        ({"process_group": None}, "expected torch.distributed.init_process_group"),
    ]
    for options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            ShardedEmbedding(
                **{"num_embeddings": 9, "embedding_dim": 2, "process_group": peers, **options}
            )
    with pytest.raises(StoreError, match=r"a store of shape \(9, 2\); expected \(3, 2\)"):
        ShardedEmbedding(9, 2, process_group=peers, store=ArrayStore(np.zeros((9, 2), "f4")))
    one, other = (
        ShardedEmbedding(9, 2, process_group=peers, name="one"),
        HostEmbedding(9, 2, name="other"),
    )
    with pytest.raises(
        ArgumentError, match=r"one \(sharded\), other \(not sharded\); expected all of them sharded"
    ):
        train_rows([[]], {one: 0, other: 0}, device="cpu")


def test_files_and_another_number_of_ranks(tmp_path: Path) -> None:
    """A table in files of the ranks is exported as one, with which others begin."""
    ranks = RankThreads(3)

    def program(rank: int) -> Any:
        table = ShardedEmbedding(
            10, 2, store=tmp_path / "users.npy", process_group=ranks.peers[rank]
        )
        trained(table, [torch.tensor([rank, 9])])
        table.export(tmp_path / "whole.npy")
        whole = table.to_embedding().weight.detach()
        table.close()
        return whole

    wholes = ranks.run(program)
    exported = torch.from_numpy(np.load(tmp_path / "whole.npy"))
    assert all(torch.equal(exported, whole) for whole in wholes)
    assert {path.name for path in tmp_path.glob("users.*")} >= {
        f"users.{rank}-of-3.npy" for rank in range(3)
    }
    four = RankThreads(4)
    tables = [
        ShardedEmbedding.from_pretrained(tmp_path / "whole.npy", process_group=peers)
        for peers in four.peers
    ]
    assert all(
        torch.equal(exported, whole)
        for whole in four.run(lambda rank: tables[rank].read(range(10)))
    )


# ---- ranks that fail, leave, or do something else ------------------------------------------------
N = 8
BATCHES = [[torch.tensor([rank, i, 7]) for rank in range(2)] for i in range(6)]


class Failing(ArrayStore):
    """Row 3 of rank 0, the table's row 6 on two ranks, cannot be read or written."""

    def __init__(self, n_rows: int, what: str) -> None:
        super().__init__(np.zeros((n_rows, 2), "f4"))
        self.what = what

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        if self.what == "gather" and 2 in rows:
            raise OSError("cannot read row 4")

    def scatter(self, rows: Any, values: Any) -> None:
        if self.what == "scatter" and 2 in rows:
            raise OSError("cannot write row 4")
        super().scatter(rows, values)


class Body:
    """A loop on two ranks in which rank 0 does something of its own."""

    def __init__(self, ranks: RankThreads, rank: int, *, store: str = "", **options: Any) -> None:
        self.rank = rank
        self.peers = ranks.peers[rank]
        self.table = ShardedEmbedding(
            N,
            2,
            process_group=self.peers,
            name="table",
            store=Failing(4, store if rank == 0 else ""),
        )
        self.optimizer = RowOptimizer(SGD, [self.table], lr=1.0)
        self.options: dict[str, Any] = {"depth": 2, "device": "cpu", **options}

    def run(self, loader: Any = None, ids_of: Any = lambda ids: ids) -> int:
        """Batches done."""
        n = 0
        mine = [batch[self.rank] for batch in BATCHES]
        for i, ids in enumerate(
            train_rows(
                loader or mine, {self.table: ids_of}, optimizer=self.optimizer, **self.options
            )
        ):
            self.table(ids).sum().backward()
            if self.body(i):
                break
            self.optimizer.step()
            self.optimizer.zero_grad()
            n += 1
        return n

    def body(self, i: int) -> bool:
        return False


def fails(i: int) -> None:
    if i == 3:
        raise KeyError("number three")


def failing(batches: Sequence[Any]) -> Iterator[Any]:
    for i, batch in enumerate(batches):
        fails(i)
        yield batch


class Raises(Body):
    def body(self, i: int) -> bool:
        if self.rank == 0:
            fails(i)
        return False


class Breaks(Body):
    def body(self, i: int) -> bool:
        return self.rank == 0 and i == 3


class StepsNot(Body):
    def body(self, i: int) -> bool:
        if self.rank == 0 and i == 3:
            self.optimizer.step = lambda: None
        return False


class Reads(Body):
    def body(self, i: int) -> bool:
        if self.rank == 0 and i == 3:
            self.table.read([0])
        return False


class ReadsWrongly(Body):
    def body(self, i: int) -> bool:
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
    # What rank 0 does; the error there, or batches done; what both are told; what rank 1 is told.
    "a loader that ends": (
        Body,
        {},
        on_rank_0(loader=lambda b: b[:3]),
        RankError,
        "rank 0: has no batch 3; rank 1: has a batch 3",
        "equally many",
    ),
    "a loader that raises": (
        Body,
        {},
        on_rank_0(loader=failing),
        KeyError,
        "number three",
        "rank 0: failed at batch 3 .KeyError.'number three'",
    ),
    "ids out of range": (
        Body,
        {},
        on_rank_0(ids_of=wrong_id),
        RowIndexError,
        "row 8 is out of range",
        "rank 0: failed at batch 3 .RowIndexError",
    ),
    "a body that raises": (
        Raises,
        {},
        everywhere,
        KeyError,
        "number three",
        "rank 0: left its loop at batch 3 .break, or an error in its body",
    ),
    "a body that breaks": (
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
        "expected all ranks to do the same",
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
        Body,
        {"store": "gather"},
        everywhere,
        OSError,
        "cannot read row 4",
        "rank 0: failed at batch 4 .OSError",
    ),
    "a store that cannot be written": (
        Body,
        {"store": "scatter"},
        everywhere,
        OSError,
        "cannot write row 4",
        "rank 0: left its loop at batch",
    ),
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("scene", SCENES)
def test_nobody_waits_for_a_rank_that_does_not_come(scene: str, depth: int) -> None:
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
    assert ranks.run(lambda rank: Body(ranks, rank, depth=depth).run()) == [6, 6], "the next loop"


def test_loops_that_differ() -> None:
    ranks = RankThreads(2)
    for error in ranks.run(lambda rank: Body(ranks, rank, depth=rank).run()):
        assert re.search(
            "rank 0: begins a loop .*depth=0.*rank 1: begins a loop .*depth=1.*; expected the same tables",
            str(error),
        )
    assert ranks.run(lambda rank: Body(ranks, rank).run()) == [6, 6]


class Misused(Body):
    """What a rank can find out alone."""

    def body(self, i: int) -> bool:
        other = ShardedEmbedding(N, 2, process_group=self.peers)
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


def test_what_a_rank_must_not_do() -> None:
    ranks = RankThreads(2)
    for error in ranks.run(lambda rank: Misused(ranks, rank).run()):
        assert re.search("were changed by hand", str(error))
    assert ranks.run(lambda rank: Body(ranks, rank).run()) == [6, 6]


def test_rows_are_not_read_by_a_reader() -> None:
    ranks = RankThreads(2)

    def program(rank: int) -> None:
        body = Body(ranks, rank)
        body.run(ids_of=lambda ids: body.table.read(ids).sum() and ids)

    for error in ranks.run(program):
        assert isinstance(error, ClosedError)
        assert "in a thread that is not the one of the loop" in str(error)


# ---- checkpoints ---------------------------------------------------------------------------------
def saved(
    ranks: RankThreads,
    rank: int,
    path: Path,
    stop: int,
    *,
    going_on: bool = False,
    keep: int = 1,
    store: Path | None = None,
) -> torch.Tensor:
    """Train up to batch ``stop``, save in its body, and leave; the whole table."""
    table = ShardedEmbedding(
        N, 2, process_group=ranks.peers[rank], init="ones", name="table", store=store
    )
    optimizer = RowOptimizer(ADAM, [table], lr=0.1)
    loop = train_rows(
        [batch[rank] for batch in BATCHES],
        {table: lambda ids: ids},
        optimizer=optimizer,
        device="cpu",
    )
    things = {"table": table, "optimizer": optimizer, "loop": loop}
    with contextlib.closing(table), contextlib.closing(optimizer):
        if going_on:
            checkpoint.resume(path, **things)
        with contextlib.closing(loop):
            for ids in loop:
                table(ids).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if loop.state_dict()["batch"] == stop:
                    checkpoint.save(path, keep=keep, **things)
                    break
        return table.read(range(N))


def test_a_run_goes_on_where_all_ranks_were(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    want = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "whole", 6))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 2))
    assert checkpoint.exists(tmp_path / "parts")
    got = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 6, going_on=True))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("parts/*/*")) == [
        f"parts/{rank}-of-2/00000002" for rank in (0, 1)
    ]


def test_a_table_in_files_of_the_ranks_is_resumed_by_the_program_that_began(tmp_path: Path) -> None:
    ranks, store = RankThreads(2), tmp_path / "users.npy"
    want = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "whole", 6))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 2, store=store))
    for path in tmp_path.glob("users.1-of-2.*"):
        # Rank 1 has lost its files.
        path.unlink()
    first, second = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 6, store=store))
    assert isinstance(first, StoreError)
    assert "users.0-of-2.npy was there already when table was made" in str(first)
    assert isinstance(second, RankError)
    assert "rank 0: failed (StoreError" in str(second)
    got = ranks.run(
        lambda rank: saved(ranks, rank, tmp_path / "parts", 6, going_on=True, store=store)
    )
    assert torch.equal(got[0], want[0])


def test_a_file_that_was_there_is_not_filled_from_a_whole_table(tmp_path: Path) -> None:
    ranks, store = RankThreads(1), tmp_path / "users.npy"
    for value in (1, 2):
        whole = torch.full((N, 2), float(value))
        table = ShardedEmbedding.from_pretrained(whole, process_group=ranks.peers[0], store=store)
        assert table.awaits_resume == (value == 2)
        table.close()
    assert (np.load(tmp_path / "users.0-of-1.npy") == 1).all()


def test_a_save_that_one_rank_has_not(tmp_path: Path) -> None:
    """It is not gone on with, though others have it, and its number is not used again."""
    ranks = RankThreads(2)
    assert not checkpoint.exists(tmp_path)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2, keep=2))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, going_on=True, keep=2))
    # Killed before it was there.
    shutil.rmtree(tmp_path / "1-of-2" / "00000002")
    want = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "other", 4))
    got = ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, going_on=True))
    assert torch.equal(got[0], want[0])
    assert [sorted(os.listdir(tmp_path / f"{rank}-of-2")) for rank in (0, 1)] == [
        ["00000003"],
        ["00000003"],
    ]


def test_saves_that_stay_are_those_that_all_ranks_have(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2, keep=2))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, keep=2))
    # Killed before it was there.
    shutil.rmtree(tmp_path / "1-of-2" / "00000002")
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, keep=2))
    assert [sorted(os.listdir(tmp_path / f"{rank}-of-2")) for rank in (0, 1)] == [
        ["00000001", "00000003"]
    ] * 2


def test_a_folder_that_is_named_as_if_there_were_many_ranks(tmp_path: Path) -> None:
    (tmp_path / f"0-of-{10**12}").mkdir()
    assert not checkpoint.exists(tmp_path)


def test_a_save_that_fails_on_one_rank(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2))
    (tmp_path / "1-of-2" / f".writing-{os.getpid()}").write_text("in the way")
    first, second = ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, going_on=True))
    assert isinstance(second, FileExistsError)
    assert "rank 1: failed (FileExistsError" in str(first)
    assert checkpoint.exists(tmp_path)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    ranks, three = RankThreads(2), RankThreads(3)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2))
    for error in three.run(
        lambda rank: checkpoint.resume(
            tmp_path, table=ShardedEmbedding(N, 2, process_group=three.peers[rank])
        )
    ):
        assert "was saved by 2 ranks and is resumed by 3" in str(error)
    for error in ranks.run(
        lambda rank: checkpoint.resume(
            tmp_path / "no", table=ShardedEmbedding(N, 2, process_group=ranks.peers[rank])
        )
    ):
        assert "has no complete checkpoint that all of 2 ranks have" in str(error)


def test_rank_0_cannot_export(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    first, second = ranks.run(
        lambda rank: Body(ranks, rank).table.export(tmp_path / "no" / "whole.npy")
    )
    assert isinstance(first, FileNotFoundError)
    assert "rank 0: failed (FileMissing" in str(second)


# ---- processes -----------------------------------------------------------------------------------
ROOT = Path(__file__).parents[3]


def in_time(*command: str, seconds: float = 60) -> str:
    """Run a program with its children; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"not done after {seconds} s: {process.communicate()[0]}") from None
    assert process.returncode == 0, out
    return out


def test_groups_go_with_the_one_that_they_were_made_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, which is all ranks."""
    monkeypatch.setattr(process_groups, "_rank_groups", {})
    n_open = []
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(4):
            group = distributed.new_group([0])
            table = ShardedEmbedding(N, 2, init="ones", process_group=group)
            assert table.read([N - 1]).tolist() == [[1, 1]]
            distributed.destroy_process_group(group)
            n_open.append(len(os.listdir("/proc/self/task")))
    finally:
        distributed.destroy_process_group()
        process_groups._rank_groups.clear()
    assert len(set(n_open[1:])) == 1, "threads of groups that are gone"


def test_groups_wait_as_long_as_the_one_that_they_were_made_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_groups, "_rank_groups", {})
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=100)
    )
    try:
        ShardedEmbedding(N, 2)
        ShardedEmbedding(
            N, 2, process_group=distributed.new_group([0], timeout=timedelta(seconds=7))
        )
        ShardedEmbedding(N, 2, process_group=distributed.new_group([0]))
        made = [group for _, groups in process_groups._rank_groups.values() for group in groups]
        timeouts = [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in made
        ]
    finally:
        distributed.destroy_process_group()
        process_groups._rank_groups.clear()
    assert timeouts == [100, 100, 7, 7, 1800, 1800]


def test_processes(tmp_path: Path) -> None:
    """2 and 4 of them over gloo, with DistributedDataParallel for the dense part; the example; and a rank that hangs."""
    out = in_time(
        str(ROOT / "tests" / "support" / "sharded_ranks.py"),
        str(tmp_path),
        "2",
        "4",
        "example",
        "absent",
    )
    lonely = torch.load(tmp_path / "absent" / "0.pt")
    assert "RankError('rank 0 of 2 lost the others while they exchanged words: " in lonely["read"]
    assert (
        "RankError('rank 0 of 2 made a sharded table, and not all others did so within the timeout"
        in lonely["made"]
    )
    assert "(0:00:02)" in lonely["made"]
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+), \d+ steps/s", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "100 of 200 people are here; bytes sent in a step: ids" in out
    for size in (2, 4):
        joined = [batch.flatten() for batch in sharded_ranks.batches_of(size)]
        torch.manual_seed(0)
        one = HostEmbedding(sharded_ranks.N, sharded_ranks.DIM, dtype=torch.float64)
        scores, initial_rows = sharded_ranks.Scores(), one.read(range(sharded_ranks.N))
        losses = sharded_ranks.train(one, scores, joined, depth=2)
        whole = HostEmbedding.from_pretrained(sharded_ranks.whole_numbers(), freeze=False)
        sharded_ranks.exact(whole, joined, depth=0)
        seen = [torch.load(tmp_path / str(size) / f"{rank}.pt") for rank in range(size)]
        for rank, of_rank in enumerate(seen):
            assert of_rank["n own rows"] == len(range(rank, sharded_ranks.N, size))
            for depth in (0, 2):
                assert torch.equal(of_rank[f"initial {depth}"], initial_rows), (
                    "the seed gives the same table"
                )
                torch.testing.assert_close(
                    of_rank[f"table {depth}"],
                    one.read(range(sharded_ranks.N)),
                    rtol=1e-7,
                    atol=1e-9,
                )
                torch.testing.assert_close(
                    of_rank[f"layer {depth}"], scores.layer.weight.detach(), rtol=1e-9, atol=1e-12
                )
            np.testing.assert_allclose(
                np.mean([other["losses 2"] for other in seen], axis=0), losses, rtol=1e-9
            )
            assert of_rank["losses 0"] == of_rank["losses 2"], "bit for bit, at any depth"
            for name in ("table 0", "exported"):
                assert torch.equal(of_rank[name], seen[0]["table 2"])
            for name in ("exact 0", "exact 3", "resumed"):
                assert torch.equal(of_rank[name], whole.read(range(sharded_ranks.N))), (
                    "bit for bit, where sums are exact"
                )
            assert of_rank["of a group"].tolist() == [[1] * sharded_ranks.DIM] * 2
            assert of_rank["n rows of a group"] == len(range(rank // 2, sharded_ranks.N, size // 2))
            assert f"rank {rank} is not in the process_group" in of_rank["of another group"]
            assert "a bad record" in of_rank["error"]
            assert of_rank["error"].startswith("ValueError" if rank == 1 else "RankError")
            assert "rank 0: has no batch 2; rank" in of_rank["uneven"]
            if rank != 1:
                assert "lost the others" in of_rank["lost"] or "left its loop" in of_rank["lost"], (
                    of_rank["lost"]
                )


@pytest.mark.stress
def test_the_example_under_torchrun() -> None:
    arguments = (
        "--standalone",
        "--nproc-per-node=2",
        str(ROOT / "examples" / "sharded_tables.py"),
        "--ratings=4000",
    )
    assert "epoch 2: loss" in in_time("-m", "torch.distributed.run", *arguments, seconds=110)


@pytest.mark.stress
@given(programs(), st.integers(0, 4))
@settings(max_examples=500, deadline=None)
def test_many_programs(program: tuple[int, list[Batch], list[str]], depth: int) -> None:
    test_any_ids_at_any_depth_on_any_number_of_ranks.hypothesis.inner_test(program, depth)  # type: ignore[attr-defined]


# ---- CUDA ----------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_ranks_that_share_a_gpu(depth: int) -> None:
    """As threads: what they exchange stays on the device."""
    want = dense(FIXED, STEPS, SGD, 0.5)
    for got in sharded(FIXED, STEPS, SGD, 0.5, size=2, depth=depth, device="cuda"):
        assert_equal(got, want)


@pytest.mark.gpu
def test_a_rank_on_each_gpu(tmp_path: Path) -> None:
    job = f"cuda-{torch.cuda.device_count()}"
    in_time(str(ROOT / "tests" / "support" / "sharded_ranks.py"), str(tmp_path), job)
    results = sorted((tmp_path / job).glob("*.pt"))
    assert len(results) == torch.cuda.device_count()
    whole = HostEmbedding.from_pretrained(sharded_ranks.whole_numbers(), freeze=False)
    sharded_ranks.exact(
        whole, [batch.flatten() for batch in sharded_ranks.batches_of(len(results))], depth=0
    )
    for path in results:
        assert all(
            torch.equal(seen, whole.read(range(sharded_ranks.N)))
            for seen in torch.load(path).values()
        )
