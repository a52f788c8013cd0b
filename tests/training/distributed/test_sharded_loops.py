"""Loops over sharded tables equal the loop of one process with the batches of all ranks."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.row_wise_adagrad import RowWiseAdagrad
from support.sharded_programs import ADAM, SGD, SHAPES, Batch, joined, trained
from support.simranks import RankThreads
from torch import nn

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    RowOptimizer,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    train_rows,
)
from pinfeed.errors import (
    VerificationError,
)
from pinfeed.training.distributed import row_exchange
from pinfeed.training.distributed.rank_loop import Exchanged

ADAGRAD = torch.optim.Adagrad


def whole_tables() -> list[np.ndarray[Any, Any]]:
    """Return tables of small whole numbers.

    With SGD and a loss whose gradient is linear in them, every sum in these tests is exact.
    """
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, shape).astype("f8") for shape in SHAPES]


def loss_of(
    tables: Sequence[Callable[[torch.Tensor], torch.Tensor]], ids: Sequence[torch.Tensor]
) -> torch.Tensor:
    return sum((0.5 * table(i).sum(1) ** 2).sum() for table, i in zip(tables, ids, strict=True))  # type: ignore[return-value]


def dense(
    batches: Sequence[Batch], does: Sequence[str], made: Any, lr: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train in one process with torch alone; return the final tables and the rows it read."""
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
    device_cache: float | None = None,
    **options: Any,
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Train on ranks; return the whole tables as each rank reads them, and the rows it read."""
    ranks, options = RankThreads(size), {"device": "cpu", **options}

    def program(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tables = [
            ShardedEmbedding.from_pretrained(
                array,
                freeze=False,
                process_group=ranks.groups[rank],
                gradients="sum",
                name=f"table {i}",
                device_cache=device_cache,
            )
            for i, array in enumerate(whole_tables())
        ]
        for table in tables:
            assert table.store.n_rows == len(range(rank, table.num_embeddings, size)), (
                "more than its share"
            )
        # Its rule for dense gradients is another one.
        gradients: Any = "sparse" if made is RowWiseAdagrad else None
        optimizer, seen = RowOptimizer(made, tables, lr=lr, gradients=gradients), []
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


@given(programs(), st.integers(0, 3), st.sampled_from([None, 0.3, 0.7, 1.0]))
@settings(max_examples=8)
def test_any_ids_at_any_depth_on_any_number_of_ranks(
    program: tuple[int, list[Batch], list[str]], depth: int, device_cache: float | None
) -> None:
    size, batches, does = program
    want = dense(batches, does, SGD, 0.5)
    options: Any = {"size": size, "depth": depth, "device_cache": device_cache}
    for got in sharded(batches, does, SGD, 0.5, **options):
        assert_equal(got, want)


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_that_a_rank_caches_are_sent_from_its_device(depth: int) -> None:
    """Other ranks do not get a cached row from its store, which is out of date."""
    batches = [*FIXED, *FIXED[::-1]]
    does = ["step"] * len(batches)
    want = sharded(batches, does, ADAGRAD, 0.1, size=2, depth=0)
    options: Any = {"size": 2, "depth": depth, "device_cache": 0.5, "verify": True}
    for got, expected in zip(sharded(batches, does, ADAGRAD, 0.1, **options), want, strict=True):
        assert_equal(got, expected)


class Late(ArrayStore):
    """The first write of row 0 waits until a later batch gathers it, or nothing else runs."""

    def __init__(self, n_rows: int) -> None:
        super().__init__(np.zeros((n_rows, 1)))
        self.n_gathers = 0
        self.wrote = False
        self.gathered = threading.Event()

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        self.n_gathers += 0 in rows
        if self.n_gathers > 2:
            # Rows are gathered for all ranks, for this rank, and for the next batch.
            self.gathered.set()

    def scatter(self, rows: Any, values: Any) -> None:
        if 0 in rows and not self.wrote:
            self.wrote = True
            self.gathered.wait(0.5)
        super().scatter(rows, values)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("later", ["step", "nothing"])
def test_writes_that_are_as_late_as_can_be(depth: int, later: str) -> None:
    """Row 0 changes in batch 0, and is looked up again when that write may just have finished."""
    for again in (2 * depth, 2 * depth + 1):
        ranks = RankThreads(1)
        table = ShardedEmbedding(
            2, 1, store=Late(2), process_group=ranks.groups[0], gradients="sum"
        )
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
            # Rows that are not trained are not written back.
            table.train(later == "step")
        assert seen[-1] == -1


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
    """Optimizers that do not change a row without a gradient give the tables of the dense loop.

    The sums differ by the order of additions only.
    """
    tables, _ = dense(FIXED, STEPS, made, 0.1)
    for got, _ in sharded(FIXED, STEPS, made, 0.1, size=2, depth=2):
        for one, other in zip(got, tables, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("verify", [False, True])
def test_every_row_crosses_once_in_each_direction(verify: bool) -> None:
    """Rows are sent in the background or late, gradients are sent back; an id has 8 bytes."""
    ranks, size = RankThreads(3), 3
    batches = [[torch.tensor([rank, i, 2 * i, 8]) for rank in range(size)] for i in range(4)]

    def program(rank: int) -> Any:
        table = ShardedEmbedding(9, 5, process_group=ranks.groups[rank])
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
    assert (
        four.control_bytes - three.control_bytes
        == size * (size - 1) * 4 * 8 * (4 + 1) + n_elsewhere[3]
    )


def test_verify_finds_rows_that_arrived_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_exchange, "exchange_deferred", lambda tables: None)
    with pytest.raises(
        VerificationError,
        match=r"table 0 of the loop, row \d+ differs from the row on its own rank",
    ):
        sharded(FIXED, STEPS, SGD, 0.5, size=2, depth=2, verify=True)


def test_tables_of_different_dtypes_in_one_exchange() -> None:
    """Rows of two bytes precede rows of eight in an exchange."""
    ranks = RankThreads(3)

    def program(rank: int) -> Any:
        wholes = [
            torch.arange(7 * n, dtype=dtype).reshape(7, n)
            for n, dtype in ((3, torch.bfloat16), (1, torch.float64))
        ]
        tables = [
            ShardedEmbedding.from_pretrained(
                whole, process_group=ranks.groups[rank], name=str(whole.dtype)
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


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "made",
    [SGD, ADAM, ADAGRAD, torch.optim.SparseAdam, RowWiseAdagrad],
    ids=lambda made: made.__name__,
)
def test_every_depth_is_the_synchronous_loop(made: Any) -> None:
    """Results agree bit for bit, however sums are rounded."""
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


def test_means_are_averaged_and_the_padding_stays() -> None:
    """Ranks with Adam equal one process with a HostEmbedding, both with the same seed."""
    size, n = 4, 13
    rng = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, n, (size, 3), generator=rng) for _ in range(8)]
    options: dict[str, Any] = {"padding_idx": 5, "dtype": torch.float64}
    torch.manual_seed(0)
    one = HostEmbedding(n, 4, **options)
    state = torch.get_rng_state()
    losses = trained(one, [batch.flatten() for batch in batches])
    ranks, tables = RankThreads(size), []
    for group in ranks.groups:
        torch.manual_seed(0)
        tables.append(ShardedEmbedding(n, 4, process_group=group, **options))
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
            whole, freeze=False, mode="sum", process_group=ranks.groups[rank]
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

    # Sums 12 and 16; a step subtracts 1 from row 0, and a half from rows 1 and 2.
    assert ranks.run(program) == [([[2, 4]], [[10, 14]]), ([[4, 6]], [[10, 14]])]


def test_a_frozen_table_and_a_loop_without_optimizer() -> None:
    ranks = RankThreads(2)

    def program(rank: int) -> list[Any]:
        table = ShardedEmbedding.from_pretrained(
            torch.arange(6.0)[:, None], process_group=ranks.groups[rank]
        )
        with train_rows(
            [torch.tensor([rank, 5])] * 3, {table: lambda ids: ids}, device="cpu"
        ) as loop:
            found = [table(ids).flatten().tolist() for ids in loop]
        return [found, loop.exchanged.late_rows]

    assert ranks.run(program) == [[[[0, 5]] * 3, 0], [[[1, 5]] * 3, 0]]


@pytest.mark.stress
@given(programs(), st.integers(0, 4))
@settings(max_examples=500)
def test_many_programs(program: tuple[int, list[Batch], list[str]], depth: int) -> None:
    test_any_ids_at_any_depth_on_any_number_of_ranks.hypothesis.inner_test(program, depth)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_ranks_that_share_a_gpu(depth: int) -> None:
    """The ranks are threads, and exchange tensors on the device.

    Sums of these whole numbers are exact in any order, so the tables equal those of the CPU.
    """
    want = dense(FIXED, STEPS, SGD, 0.5)
    for got in sharded(FIXED, STEPS, SGD, 0.5, size=2, depth=depth, device="cuda"):
        assert_equal(got, want)
