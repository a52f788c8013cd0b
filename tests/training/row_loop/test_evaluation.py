"""Evaluation in training steps and elsewhere: lookups of any rows, evaluating() and read_rows."""

import contextlib
import copy
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.schedules import randomly
from support.simranks import RankThreads
from support.simtorch import SimTorchDevice
from support.table_loops import SGD, itself, step_ones, train_rows
from support.table_runs import EVALUATING, Run, assert_same, check
from torch import nn

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    HostEmbeddingBag,
    NpyStore,
    RowOptimizer,
    ShardedEmbedding,
    checkpoint,
    read_rows,
)
from pinfeed.errors import (
    ClosedError,
    RowIndexError,
    UnknownArgument,
    WriteBackError,
)
from pinfeed.native import library as native
from pinfeed.testing import lazy

needs_native = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

N, DIM = 12, 3
TRAINING = [torch.tensor(ids) for ids in ([0, 1, 2], [1, 4], [4, 2, 9], [0, 9], [3, 4])]
TESTS = [torch.tensor(ids) for ids in ([1, 5, 0], [4, 6, 4], [11, 2])]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread, because more of them slow down work on small tensors."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def ones(**options: Any) -> HostEmbedding:
    return HostEmbedding(N, DIM, **{"init": "ones", "name": "table", **options})


def looked_up(table: HostEmbedding, loop: Any) -> list[torch.Tensor]:
    return [table(ids).clone() for ids in loop]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("caches", [(None, None), (0.3, 1.0)], ids=["no caches", "caches"])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_evaluations_are_those_of_the_synchronous_loop(depth: int, caches: Any) -> None:
    check("cpu", depth, "Adam", does=EVALUATING, caches=caches, verify=depth == 1)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(4))
def test_evaluations_on_the_simulated_device(seed: int) -> None:
    rng = random.Random(seed)
    device = SimTorchDevice(lazy if seed % 2 else randomly(seed), direct=seed > 1)
    caches = rng.choice([(None, None), (0.3, 0.7), (1.0, None)])
    check(device, 2, rng.choice(["Adam", "momentum"]), does=EVALUATING, caches=caches)


@pytest.mark.gpu
@pytest.mark.parametrize("caches", [(None, None), (0.3, 1.0)], ids=["no caches", "caches"])
@pytest.mark.parametrize("optimizer", ["Adam", "momentum"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_evaluations_on_cuda(depth: int, optimizer: str, caches: Any) -> None:
    """Compare with depth 0 on the GPU, because a GPU adds in an order of its own.

    The kernels for such small batches add in the same order in every run.
    """
    got, want = (Run(optimizer, does=EVALUATING, caches=caches).fed("cuda", d) for d in (depth, 0))
    assert_same(got, want)


class Model(nn.Module):
    """Two tables and a dense part."""

    def __init__(self, table: Any, bag: Any) -> None:
        super().__init__()
        self.table = table
        self.bag = bag
        self.dense = nn.Sequential(nn.Dropout(0.5), nn.Linear(DIM, 1, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.table(ids).mean(0) * self.bag(ids[None])[0]).sum()


def evaluated(model: Model, tests: Any, how: str) -> list[float]:
    """Return what a model gives for each test, in eval mode or, as some programs do, in training.

    The dense part draws no random numbers.
    """
    model.train(how == "training mode")
    model.dense.eval()
    mode: Any = torch.inference_mode if how == "inference mode" else torch.no_grad
    with contextlib.nullcontext() if how == "training mode" else mode():
        found = [model(ids).item() for ids in tests]
    model.train()
    return found


@pytest.mark.parametrize("how", ["no_grad", "inference mode", "training mode"])
@pytest.mark.parametrize("reads", [False, True], ids=["lookups", "read_rows"])
def test_losses_and_evaluations_are_those_of_torch(reads: bool, how: str) -> None:
    if how == "training mode" and not reads:
        return
    rng = np.random.default_rng(0)
    rows, bags = rng.random((N, DIM)), rng.random((N, DIM))
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        options: dict[str, Any] = {"padding_idx": 4, "freeze": False}
        arrays: list[Any] = [rows.copy(), bags.copy()]
        kinds: Any = (HostEmbedding, HostEmbeddingBag) if ours else (nn.Embedding, nn.EmbeddingBag)
        if not ours:
            arrays = [torch.from_numpy(array) for array in arrays]
        tables = [
            kind.from_pretrained(array, **options, **({"name": str(kind)} if ours else {}))
            for kind, array in zip(kinds, arrays, strict=True)
        ]
        model = Model(*tables)
        weights = model.dense.parameters() if ours else model.parameters()
        optimizers: list[Any] = [torch.optim.SGD(weights, lr=0.1)]
        loop: Any = TRAINING
        tests: Any = TESTS
        if ours:
            optimizers.append(RowOptimizer(torch.optim.SGD, tables, lr=0.1))
            ids_of = dict.fromkeys(tables, itself)
            loop = train_rows(TRAINING, ids_of, optimizer=optimizers[1], depth=2)
            tests = read_rows(TESTS, ids_of, device="cpu") if reads else TESTS
        results = []
        for ids in loop:
            loss = model(ids)
            loss.backward()
            results.append(loss.item())
            with loop.evaluating() if ours and reads else contextlib.nullcontext():
                results += evaluated(model, tests, how)
            # The gradients of before the evaluation are used after it.
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with loop.evaluating() if ours and reads else contextlib.nullcontext():
                results += evaluated(model, tests, how)
        found.append((results, *map(np.asarray, arrays)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_files_of_tables_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes a line for each mapped part of a process whenever its maps are read."""
    tables = [
        HostEmbedding.from_pretrained(torch.ones(N, DIM), freeze=False, name=name)
        for name in ("words", "others")
    ]
    ids: Any = dict.fromkeys(tables, itself)
    optimizer = SGD(tables)
    reads: list[str] = []
    original = open

    def counted(path: Any, *args: Any, **options: Any) -> Any:
        if str(path) == "/proc/self/maps":
            reads.append(path)
        return original(path, *args, **options)

    n_reads = []
    monkeypatch.setattr("builtins.open", counted)
    loop = train_rows([torch.arange(3)] * 4, ids, optimizer=optimizer)
    for _ in loop:
        with loop.evaluating():
            assert len(list(read_rows([torch.arange(3)] * 2, ids, device="cpu"))) == 2
        n_reads.append(len(reads))
    assert n_reads[0] == n_reads[-1]


def test_the_step_continues_with_the_same_rows() -> None:
    """An evaluation that fails, is left, or has a loader that fails changes nothing."""
    table = ones()
    optimizer = RowOptimizer(torch.optim.Adam, [table], lr=0.1)
    loop = train_rows(TRAINING, {table: itself}, optimizer=optimizer, depth=2)

    def failing() -> Iterator[Any]:
        yield TESTS[0]
        raise OSError("no test")

    for i, ids in enumerate(loop):
        table(ids).sum().backward()
        weight, grad = table.weight, table.weight.grad
        state = optimizer.state[weight] if i else None
        with pytest.raises(KeyError), loop.evaluating():
            for _ in read_rows(TESTS, {table: itself}, device="cpu"):
                raise KeyError
        with pytest.raises(OSError, match="no test"), loop.evaluating():
            looked_up(table, read_rows(failing(), {table: itself}, device="cpu"))
        with loop.evaluating():
            for _ in read_rows(TESTS, {table: itself}, device="cpu"):
                break
            assert loop.is_evaluating
        assert not loop.is_evaluating
        assert table.weight is weight
        assert weight.grad is grad
        assert optimizer.parameters()[0] is weight
        assert not i or optimizer.state[weight] is state
        optimizer.step()
        optimizer.zero_grad()
    want = ones()
    optimizer = RowOptimizer(torch.optim.Adam, [want], lr=0.1)
    for ids in train_rows(TRAINING, {want: itself}, optimizer=optimizer, depth=0):
        step_ones(optimizer, want(ids))
    assert torch.equal(table.read(range(N)), want.read(range(N)))


def test_training_is_refused_inside_evaluating() -> None:
    table, frozen = ones(), ones(name="frozen")
    optimizer = SGD([table])
    ids = {table: itself, frozen.requires_grad_(False): itself}
    loop = train_rows(TRAINING[:2], ids, optimizer=optimizer, depth=2)
    with pytest.raises(ClosedError, match=r"evaluating\(\) outside a training step"):
        loop.evaluating().__enter__()
    for batch in loop:
        table(batch).sum().backward()
        with loop.evaluating():
            with pytest.raises(ClosedError, match=r"step\(\) of table was requested inside"):
                optimizer.step()
            with pytest.raises(ClosedError, match="weight of table was requested inside"):
                _ = table.weight
            with pytest.raises(ClosedError, match="a lookup in training mode with gradients of"):
                table(batch)
            assert not frozen(TESTS[0]).requires_grad
            with pytest.raises(ClosedError, match="expected one at a time"):
                loop.evaluating().__enter__()
            with pytest.raises(ClosedError, match="a loop over rows of table is running"):
                next(iter(train_rows(TRAINING, {table: itself})))
        step_ones(optimizer, table(batch))
    with pytest.raises(ClosedError, match=r"evaluating\(\) outside a training step"):
        loop.evaluating().__enter__()
    reads = read_rows(TESTS, {table: itself})
    for _ in reads:
        with pytest.raises(ClosedError, match=r"evaluating\(\) outside a training step"):
            reads.evaluating().__enter__()


def test_the_end_of_an_evaluation() -> None:
    """Loops over ``read_rows`` end there, because they would give rows that are out of date."""
    table = ones()
    loop = train_rows(TRAINING, {table: itself}, depth=2)
    batches = iter(loop)
    next(batches)
    weight = table.weight
    with (
        pytest.raises(ClosedError, match=r"rows of table were changed inside evaluating\(\)"),
        loop.evaluating(),
        torch.no_grad(),
    ):
        weight.mul_(2)
    frozen = HostEmbedding.from_pretrained(table.store)
    for read in (table, frozen):
        reads = read_rows(TESTS, {read: itself}, device="cpu", depth=2)
        with loop.evaluating():
            held = iter(reads)
            next(held)
        assert table.weight is weight
        with pytest.raises(ClosedError, match="was ended at the end of evaluating"):
            next(held)
        with loop.evaluating():
            assert looked_up(read, reads)[0].tolist() == [[2] * DIM, [1] * DIM, [2] * DIM]
    with loop.evaluating():
        held = iter(reads)
        next(held)
        loop.close()
        with pytest.raises(ClosedError, match="was ended at the end of evaluating"):
            next(held)
    table.require_idle()
    assert table.read([0, 1, 2]).tolist() == [[2] * DIM] * 3
    batches = iter(loop := train_rows(TRAINING, {table: itself}, depth=2))
    next(batches)
    with loop.evaluating(), pytest.raises(ClosedError, match="requested inside evaluating"):
        next(batches)
    table.require_idle()


def test_other_threads_do_not_read_while_rows_are_trained() -> None:
    table = ones()
    loop = train_rows(TRAINING, {table: itself}, depth=2)
    errors: list[Any] = []

    def run(program: Any) -> None:
        thread = threading.Thread(target=lambda: errors.append(error_of(program)))
        thread.start()
        thread.join()

    for _ in loop:
        with pytest.raises(ClosedError, match=r"expected `with batches.evaluating\(\):` around"):
            next(iter(read_rows(TESTS, {table: itself})))
        run(lambda: loop.evaluating().__enter__())
        with loop.evaluating():
            run(lambda: next(iter(read_rows(TESTS, {table: itself}))))
            run(lambda: table.read([0]))
        table.eval()
        with torch.no_grad():
            run(lambda: table(TESTS[1]))
        break
    run(lambda: table(TESTS[1]))
    assert [type(error) for error in errors] == [ClosedError] * 4 + [type(None)]


def error_of(program: Any) -> Exception | None:
    with torch.no_grad():
        try:
            program()
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize(("depth", "max_norm"), [(0, None), (2, None), (2, 1.0)])
def test_lookups_of_other_rows_in_a_step(depth: int, max_norm: float | None) -> None:
    """They write nothing that the step may still change, and see changes that torch does not."""

    class Counting(ArrayStore):
        written = 0

        def scatter(self, rows: Any, values: Any) -> None:
            self.written += 1
            super().scatter(rows, values)

    store = Counting(np.ones((N, DIM), np.float16))
    table = HostEmbedding(N, DIM, store=store, name="table", max_norm=max_norm)
    for i, batch in enumerate(train_rows(TRAINING, {table: itself}, depth=depth)):
        table.train()(batch)
        table.weight.data.mul_(0.5)
        with pytest.raises(RowIndexError, match=r"id 10 was not announced .* batches.evaluating"):
            table(torch.tensor([10]))
        copied = copy.deepcopy(table)
        table.eval()
        with pytest.raises(RowIndexError, match=r"id 10 was not announced"):
            table(torch.tensor([10]))
        with torch.no_grad():
            for _ in range(2):
                every = table(torch.arange(N)[None].to(torch.int32))
                assert (every.shape, every.dtype) == ((1, N, DIM), torch.float16)
                assert torch.equal(every[0][batch.sort()[0]], table.weight.detach())
                assert max_norm is None or every.norm(dim=-1).max() < 1.01
            with pytest.raises(RowIndexError):
                table(torch.tensor([N]))
            # A copy does not know of pending writes.
            with pytest.raises(RowIndexError, match=r"id 10 was not announced"):
                copied.eval()(torch.tensor([10]))
        # The step ends in eval mode, and its changes count.
        assert store.written <= i if depth else store.written == i
        table.weight.data.fill_(i)
    assert store.array[9].tolist() == [3] * DIM


@pytest.mark.parametrize("kind", [HostEmbedding, HostEmbeddingBag])
@pytest.mark.parametrize(
    ("mode", "ids"),
    [("eval", [0, 1]), ("no_grad", [0, 1]), ("both", [0, 1]), ("both", [0, 10])],
)
def test_max_norm_changes_the_table_in_training_alone(kind: Any, mode: str, ids: Any) -> None:
    """The ids are announced, or some of them are not."""
    table = kind(N, DIM, init="ones", max_norm=1.0)
    for _ in train_rows([torch.tensor([0, 1])], {table: itself}):
        table.train(mode == "no_grad")
        with torch.set_grad_enabled(mode == "eval"):
            found = table(torch.tensor([ids]))
        assert found.norm(dim=-1).max() < 1.01
        assert table.weight.tolist() == [[1] * DIM] * 2
        if mode == "eval":
            found.sum().backward()
            assert table.weight.grad is not None
    assert table.read(np.arange(N)).tolist() == [[1] * DIM] * N


@pytest.mark.parametrize("cache", [None, pytest.param(0.5, marks=needs_native)])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_rows_that_are_read_at_any_depth(tmp_path: Path, depth: int, cache: Any) -> None:
    """The table is in a read-only file."""
    rows = np.random.default_rng(0).random((N, DIM))
    np.save(tmp_path / "rows.npy", rows)
    table = HostEmbedding.from_pretrained(tmp_path / "rows.npy", device_cache=cache, name="table")
    loop = read_rows(
        [ids.tolist() for ids in TESTS],
        {table: itself},
        depth=depth,
        device="cpu",
        verify=True,
        host_transform=lambda ids: torch.tensor(ids),
    )
    for _ in range(2):
        for got, ids in zip(looked_up(table, loop), TESTS, strict=True):
            assert got.numpy().tobytes() == rows[ids].tobytes()
            assert not got.requires_grad
    with torch.inference_mode():
        assert torch.equal(looked_up(table, loop)[0], torch.from_numpy(rows[TESTS[0]]))
    of_caches = [item for item in loop.plan.items if "host_transform" not in item.what]
    assert len(of_caches) == (2 if cache else 0)
    table.close()


def test_several_loops_read_a_table() -> None:
    """Their tables may share rows. Training ends them."""
    array = np.random.default_rng(0).random((N, DIM))
    tables = [HostEmbedding.from_pretrained(array, freeze=False, name="same") for _ in range(2)]
    table = tables[0]
    loops = [
        read_rows(batches, dict.fromkeys(tables, itself), depth=2, device="cpu")
        for batches in (TRAINING[:3], TESTS)
    ]
    for one, other in zip(*loops, strict=True):
        # Ids of either batch, and of none, in training mode.
        for ids in (one, other, torch.cat([one, other]), torch.tensor([[7, 8]])):
            for each in tables:
                assert not each(ids).requires_grad
                assert each(ids).detach().numpy().tobytes() == array[ids].tobytes()
        assert len(table.weight) == len(other.unique())
        if one is not TRAINING[0]:
            continue
        with pytest.raises(ClosedError, match="a loop over read_rows of same is running"):
            table.reset_parameters()
        copy.deepcopy(table).require_idle()
        assert table.read([0]).tolist() == [array[0].tolist()]
    with pytest.raises(ClosedError, match="has rows on the device only inside a loop"):
        _ = table.weight
    older = iter(loops[0])
    next(older)
    assert len(list(train_rows(TRAINING, {table: itself}))) == len(TRAINING)
    with pytest.raises(ClosedError, match="when another loop over one of its tables began"):
        next(older)


def test_loops_in_several_threads_read_a_table() -> None:
    table = HostEmbedding(N, DIM, name="table")
    want = table.read(range(N))
    failed: list[Any] = []

    def run() -> None:
        for _ in range(3):
            for ids in read_rows(TESTS, {table: itself}, depth=2, device="cpu"):
                failed.extend([ids] * (not torch.equal(table(ids), want[ids])))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    table.require_idle()


def test_invalid_uses_of_read_rows_are_refused() -> None:
    table = ones()
    with pytest.raises(UnknownArgument, match="give the optimizer to train_rows"):
        read_rows(TESTS, {table: itself}, optimizer=SGD([table]))
    with (
        pytest.raises(WriteBackError, match="rows of table were changed in a loop over read_rows"),
        torch.no_grad(),
    ):
        for _ in read_rows(TESTS, {table: itself}, device="cpu"):
            table.weight.add_(1)
    longer = ones(max_norm=1.0)
    for ids in read_rows(TESTS, {longer: itself}, device="cpu"):
        assert longer(ids).norm(dim=1).max() < 1.001
        assert longer.weight.max() == 1
    assert longer.read([1]).tolist() == [[1] * DIM]


@needs_native
def test_no_cache_is_made_inside_evaluating(tmp_path: Path) -> None:
    """A checkpoint that is saved there has all changes."""
    table = ones(device_cache=1.0)
    optimizer = SGD([table])
    loop = train_rows(TRAINING, {table: itself}, optimizer=optimizer, depth=2)
    reads = read_rows(TESTS, {table: itself}, device="cpu")
    for i, batch in enumerate(loop):
        step_ones(optimizer, table(batch))
        with loop.evaluating():
            looked_up(table, reads)
            assert reads.stats.cache_lookups == 0
            if i == 2:
                checkpoint.save(tmp_path, table=table, loop=loop, optimizer=optimizer)
    looked_up(table, reads)
    assert reads.stats.cache_lookups > 0
    with NpyStore(next(tmp_path.rglob("table.npy"))) as saved:
        rows = np.empty((N, DIM), np.float32)
        saved.gather(np.arange(N), rows)
    np.testing.assert_allclose(rows[:5, 0], [0.9, 0.8, 0.8, 1, 0.8], rtol=1e-6)


@pytest.mark.parametrize("depth", [0, 2])
def test_sharded_tables(depth: int) -> None:
    """All ranks evaluate together, without read_rows inside a training step."""
    ranks = RankThreads(2)

    def program(rank: int) -> Any:
        table = ShardedEmbedding(
            N, DIM, process_group=ranks.groups[rank], init="ones", name="table"
        )
        optimizer = SGD([table])
        loop = train_rows(
            [ids + rank for ids in TRAINING], {table: itself}, optimizer=optimizer, depth=depth
        )
        mine = [ids - rank for ids in TESTS[1:]]
        found = []
        for batch in loop:
            step_ones(optimizer, table(batch))
            table.eval()
            with torch.no_grad(), loop.evaluating():
                found += [table(ids) for ids in mine]
                with pytest.raises(ClosedError, match="which is sharded, inside evaluating"):
                    next(iter(read_rows(mine, {table: itself}, depth=depth)))
            table.train()
        found += looked_up(table, read_rows(mine, {table: itself}, depth=depth, device="cpu"))
        found.append(table.read(range(N)))
        return found

    got = ranks.run(program)
    whole = np.ones((N, DIM), "f4")
    want: list[list[Any]] = [[], []]
    for batch in TRAINING:
        for rank in range(2):
            np.subtract.at(whole, (batch + rank).numpy(), np.float32(0.05))
        for rank in range(2):
            want[rank] += [whole[ids - rank] for ids in TESTS[1:]]
    for rank in range(2):
        want[rank] += [*want[rank][-2:], whole]
        assert len(got[rank]) == len(want[rank])
        for one, other in zip(got[rank], want[rank], strict=True):
            np.testing.assert_allclose(one.detach(), other, rtol=1e-5)
