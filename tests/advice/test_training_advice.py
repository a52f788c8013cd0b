"""Advice in errors of replay buffers, tables, optimizers and checkpoints is right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.advice import Case, Cases, equal, follow, read

import pinfeed
from pinfeed import HostEmbedding, ReplayBuffer, RowOptimizer, checkpoint

advised = Cases()
X = np.arange(24, dtype="float32").reshape(8, 3)
SGD = torch.optim.SGD


# ---- replay buffers ------------------------------------------------------------------------------

PARTS: dict[str, Any] = {"obs": ((2,), "float32"), "next_obs": ((2,), "float32")}


def drawn(buffer: ReplayBuffer, n: int = 50) -> Any:
    (batch,) = buffer.batches(n, n=1, device="cpu")
    return batch


def filled(buffer: ReplayBuffer, n: int = 4) -> ReplayBuffer:
    for i in range(n):
        buffer.add(obs=np.full(2, i, "f4"), next_obs=np.full(2, i + 1, "f4"))
    return buffer


def is_right(buffer: ReplayBuffer, n: int = 4) -> bool:
    batch = drawn(filled(buffer, n))
    return torch.equal(batch["next_obs"], batch["obs"] + 1)


@advised("beta=0.6 .*without alpha.*; give alpha=0.6, or leave them out")
def beta_without_alpha(path: Path) -> Iterator[Any]:
    yield lambda: ReplayBuffer(4, PARTS, beta=0.6)
    yield filled(ReplayBuffer(4, PARTS, alpha=0.6, beta=0.6)).beta == 0.6
    yield is_right(ReplayBuffer(4, PARTS))


@advised(r"give np.random.default_rng\(seed\), or np.random.RandomState\(seed\)")
def no_generator(path: Path) -> Iterator[Any]:
    yield lambda: ReplayBuffer(4, PARTS, generator=3)  # type: ignore[arg-type]
    yield is_right(ReplayBuffer(4, PARTS, generator=np.random.default_rng(3)))
    yield is_right(ReplayBuffer(4, PARTS, generator=np.random.RandomState(3)))


@advised("seed=3 with a generator.*leave seed out")
def seed_and_generator(path: Path) -> Iterator[Any]:
    generator = np.random.default_rng(3)
    yield lambda: ReplayBuffer(4, PARTS, generator=generator, seed=3)
    yield is_right(ReplayBuffer(4, PARTS, generator=generator))


@advised(r"has nothing to draw.*call add\(\) first")
def empty_buffer(path: Path) -> Iterator[Any]:
    buffer = ReplayBuffer(4, PARTS)
    yield lambda: drawn(buffer)
    yield is_right(buffer)


@advised("expected a buffer with prioritized draws; give alpha=0.6")
def priorities_of_uniform_draws(path: Path) -> Iterator[Any]:
    yield lambda: filled(ReplayBuffer(4, PARTS)).update_priorities([0], [1.0])
    buffer = filled(ReplayBuffer(4, PARTS, alpha=0.6))
    buffer.update_priorities([0, 1, 2, 3], [0.0, 0.0, 1e9, 0.0])
    yield (drawn(buffer)["obs"] == 2).all()


@advised("all transitions have priority 0.*give epsilon=1e-6")
def zero_priorities(path: Path) -> Iterator[Any]:
    def zeros(epsilon: float) -> ReplayBuffer:
        buffer = filled(ReplayBuffer(4, PARTS, alpha=0.6, epsilon=epsilon))
        buffer.update_priorities(range(4), np.zeros(4))
        return buffer

    yield lambda: drawn(zeros(0.0))
    yield len(drawn(zeros(1e-6))["obs"]) == 50


@advised(r"remove the folder, or give another path; to continue a run, use load_state_dict\(\)")
def folder_with_files(path: Path) -> Iterator[Any]:
    older = filled(ReplayBuffer(4, PARTS, path=path / "replay"))
    yield lambda: ReplayBuffer(4, PARTS, path=path / "replay")
    newer = ReplayBuffer(4, PARTS, path=path / "other")
    yield len(newer) == 0
    newer.load_state_dict(older.state_dict())
    yield torch.equal(drawn(newer)["obs"], drawn(older)["obs"])
    shutil.rmtree(path / "replay")
    yield is_right(ReplayBuffer(4, PARTS, path=path / "replay"))


@advised("is swapped.*give next_of={'next_obs': 'obs'}")
def swapped_observations(path: Path) -> Iterator[Any]:
    yield lambda: ReplayBuffer(4, PARTS, next_of={"obs": "next_obs"})
    yield is_right(ReplayBuffer(4, PARTS, next_of={"next_obs": "obs"}), 9)


@advised("stacked='obs'.*give next_of={'next_obs': 'obs'}")
def stacked_alone(path: Path) -> Iterator[Any]:
    yield lambda: ReplayBuffer(4, PARTS, stacked="obs")
    yield is_right(ReplayBuffer(4, PARTS, stacked="obs", next_of={"next_obs": "obs"}), 9)


@advised(r"convert it with .astype\('int64'\)")
def part_of_another_dtype(path: Path) -> Iterator[Any]:
    buffer = ReplayBuffer(4, {"x": ((), "int64")})
    yield lambda: buffer.add(x=np.float32(3.0))
    buffer.add(x=np.float32(3.0).astype("int64"))
    yield (drawn(buffer)["x"] == 3).all()


@advised("got 300; expected the numbers of uint8.*give a wider one in parts")
def part_of_a_narrow_dtype(path: Path) -> Iterator[Any]:
    yield lambda: ReplayBuffer(4, {"x": ((), "uint8")}).add(x=300)
    buffer = ReplayBuffer(4, {"x": ((), "int16")})
    buffer.add(x=300)
    yield (drawn(buffer)["x"] == 300).all()


@advised(r"give tensor.cpu\(\) for a tensor on a GPU, or tensor.to_dense\(\) for a sparse one")
def part_that_is_sparse(path: Path) -> Iterator[Any]:
    buffer = ReplayBuffer(4, {"x": ((2,), "float32")})
    tensor = torch.tensor([0.0, 2.5]).to_sparse()
    yield lambda: buffer.add(x=tensor)
    buffer.add(x=tensor.to_dense())
    yield (drawn(buffer)["x"] == torch.tensor([0.0, 2.5])).all()


@advised("expected one number per transition; give the shape ()")
def done_of_two_numbers(path: Path) -> Iterator[Any]:
    def windows(shape: Any) -> ReplayBuffer:
        parts = {"reward": ((), "float32"), "done": (shape, "bool")}
        return ReplayBuffer(4, parts, n_steps=2, gamma=1.0)

    yield lambda: windows((2,))
    buffer = windows(())
    buffer.add(reward=1.0, done=False)
    buffer.add(reward=2.0, done=True)
    yield set(drawn(buffer)["reward"].tolist()) == {3.0, 2.0}


# ---- embedding tables ----------------------------------------------------------------------------

IDS = torch.tensor([1, 3])


def table_of(**options: Any) -> HostEmbedding:
    return HostEmbedding(8, 3, **{"name": "users", "init": "ones", **options})


def trained(table: Any, optimizer: Any = None, n: int = 1) -> bool:
    """Train rows 1 and 3, and return whether these rows alone have changed as by SGD."""
    before = torch.from_numpy(read(table.store))
    optimizer = optimizer or RowOptimizer(SGD, [table], lr=1.0)
    for batch in pinfeed.train_rows([IDS] * n, {table: lambda ids: ids}, optimizer=optimizer):
        table(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before[IDS] -= n
    return equal(read(table.store), before)


@advised(r"id 7 was not announced.*use `with batches.evaluating\(\):`, or eval mode and .*no_grad")
def id_not_announced(path: Path) -> Iterator[Any]:
    table = table_of()
    optimizer = RowOptimizer(SGD, [table], lr=1.0)
    seven = torch.tensor([7])

    def loop(ids: Any) -> Any:
        return pinfeed.train_rows([IDS], {table: lambda batch: ids}, optimizer=optimizer)

    yield lambda: [table(seven) for _ in loop(IDS)]
    yield [table(seven).tolist() for _ in loop((IDS, seven))] == [[[1.0] * 3]]
    batches = loop(IDS)
    for _ in batches:
        with batches.evaluating(), torch.no_grad():
            table.eval()
            yield table(seven).tolist() == [[1.0] * 3]
            table.train()
    for _ in loop(IDS):
        table.eval()
        with torch.no_grad():
            yield table(seven).tolist() == [[1.0] * 3]
        table.train()


@advised(
    r"loop over pinfeed.train_rows\(loader, .*optimizer=...\), or use torch.no_grad\(\) or eval"
)
def lookup_outside_a_loop(path: Path) -> Iterator[Any]:
    table = table_of()
    yield lambda: table(IDS)
    with torch.no_grad():
        yield table(IDS).tolist() == [[1.0] * 3] * 2
    yield table.eval()(IDS).tolist() == [[1.0] * 3] * 2
    yield trained(table.train())


@advised(r"outside, use read\(ids\) or store")
def weight_outside_a_loop(path: Path) -> Iterator[Any]:
    table = table_of()
    yield lambda: table.weight
    yield table.read(IDS).tolist() == [[1.0] * 3] * 2
    yield equal(read(table.store), np.ones((8, 3)))


@advised(
    r"give lambda tensor: tensor.copy_\(values\), or use HostEmbedding.from_pretrained\(values"
)
def init_returns_a_tensor(path: Path) -> Iterator[Any]:
    values = torch.from_numpy(X)
    yield lambda: table_of(init=lambda tensor: values)
    yield equal(read(table_of(init=lambda tensor: tensor.copy_(values)).store), X)
    yield trained(HostEmbedding.from_pretrained(values.clone(), freeze=False))


@advised(
    r"give store=pinfeed.ArrayStore\(array\), or use HostEmbedding.from_pretrained\(array, free"
)
def store_is_an_array(path: Path) -> Iterator[Any]:
    yield lambda: HostEmbedding(8, 3, store=X.copy())  # type: ignore[arg-type]
    yield trained(HostEmbedding(8, 3, store=pinfeed.ArrayStore(X.copy())))
    yield trained(HostEmbedding.from_pretrained(X.copy(), freeze=False))


@advised(
    "expected checkpoint.resume.*give overwrite=True or another path; to train the existing rows, "
    r"use HostEmbedding.from_pretrained\('.*', freeze=False\)"
)
def table_file_exists(path: Path) -> Iterator[Any]:
    file = path / "users.npy"
    table = table_of(store=file)
    checkpoint.save(path / "checkpoint", users=table)
    trained(table)
    table.close()
    again = table_of(store=file)
    yield lambda: again.read(IDS)
    checkpoint.resume(path / "checkpoint", users=again)
    yield trained(again)
    again.close()
    yield trained(HostEmbedding.from_pretrained(file, freeze=False))
    yield trained(table_of(store=path / "other.npy"))
    yield equal(read(table_of(store=file, overwrite=True).store), np.ones((8, 3)))


@advised("init cannot fill a NpyStore as one array; fill the store first, and leave init out")
def init_of_a_joined_store(path: Path) -> Iterator[Any]:
    for i in range(2):
        np.save(path / f"{i}.npy", X[4 * i : 4 * i + 4])

    def shards() -> pinfeed.NpyStore:
        return pinfeed.NpyStore(path / "?.npy", mode="r+")

    yield lambda: HostEmbedding(8, 3, store=shards(), init="ones")
    store = shards()
    store.scatter(np.arange(8), np.ones((8, 3), "f4"))
    yield trained(HostEmbedding(8, 3, store=store))


@advised(r"is frozen.*use from_pretrained\(..., freeze=False\), or requires_grad_\(\)")
def frozen_table(path: Path) -> Iterator[Any]:
    frozen = HostEmbedding.from_pretrained(X.copy())
    yield lambda: RowOptimizer(SGD, [frozen], lr=1.0)
    yield trained(HostEmbedding.from_pretrained(X.copy(), freeze=False))
    yield trained(frozen.requires_grad_())


@advised("tables has the same table twice; give each table once")
def table_twice(path: Path) -> Iterator[Any]:
    table = table_of()
    yield lambda: RowOptimizer(SGD, [table, table], lr=1.0)
    yield trained(table, RowOptimizer(SGD, [table], lr=1.0))


@advised(r"give the tables themselves, such as \[users\]")
def parameters_of_a_table(path: Path) -> Iterator[Any]:
    users = table_of()
    yield lambda: RowOptimizer(SGD, users.parameters(), lr=1.0)
    yield trained(users, RowOptimizer(SGD, [users], lr=1.0))


@advised("give a RowOptimizer all its tables at construction, or make a second one")
def table_added_later(path: Path) -> Iterator[Any]:
    one, two = table_of(), table_of()
    optimizer = RowOptimizer(SGD, [one], lr=1.0)
    yield lambda: optimizer.add_param_group({"params": [two]})
    both = RowOptimizer(SGD, [one, two], lr=1.0)
    yield trained(one, both) and trained(two, both)
    yield trained(two, RowOptimizer(SGD, [two], lr=1.0))


@advised(
    "expected checkpoint.resume.*to start with new state, give the table overwrite=True or remove "
    "the file$"
)
def state_file_exists(path: Path) -> Iterator[Any]:
    def train(optimizer: Any, table: Any) -> bool:
        for batch in pinfeed.train_rows([IDS], {table: lambda ids: ids}, optimizer=optimizer):
            table(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return True

    def make(**options: Any) -> tuple[Any, Any]:
        table = HostEmbedding.from_pretrained(file, freeze=False, **options)
        return RowOptimizer(torch.optim.Adagrad, [table], lr=1.0), table

    file = path / "users.npy"
    np.save(file, X)
    optimizer, table = make()
    train(optimizer, table)
    checkpoint.save(path / "checkpoint", users=table, optimizer=optimizer)
    (state,) = path.glob("users.*.npy")
    table.close()
    optimizer.close()
    again = make()
    yield lambda: train(*again)
    checkpoint.resume(path / "checkpoint", users=again[1], optimizer=again[0])
    yield train(*again) and np.load(state)[1].tolist() == [2.0] * 3
    for one in again:
        one.close()
    yield train(*make(overwrite=True)) and np.load(state)[1].tolist() == [1.0] * 3
    state.unlink()
    yield train(*make()) and np.load(state)[1].tolist() == [1.0] * 3


@advised(r"was made without this optimizer; give train_rows\(..., optimizer=...\)")
def loop_without_the_optimizer(path: Path) -> Iterator[Any]:
    table = table_of()
    optimizer = RowOptimizer(SGD, [table], lr=1.0)

    def train(**options: Any) -> None:
        for batch in pinfeed.train_rows([IDS], {table: lambda ids: ids}, **options):
            table(batch).sum().backward()
            optimizer.step()

    yield lambda: train()
    yield trained(table, optimizer)


@advised(
    r"call backward\(\) and step\(\), or zero_grad\(\), before the loop requests the next batch"
)
def gradients_of_an_earlier_batch(path: Path) -> Iterator[Any]:
    def train(does_clear: bool) -> HostEmbedding:
        table = table_of()
        optimizer = RowOptimizer(SGD, [table], lr=1.0)
        loop = pinfeed.train_rows([IDS] * 2, {table: lambda ids: ids}, optimizer=optimizer)
        for i, batch in enumerate(loop):
            table(batch).sum().backward()
            if i == 1:
                optimizer.step()
            elif does_clear:
                optimizer.zero_grad()
        return table

    yield lambda: train(False)
    yield train(True).read(IDS).tolist() == [[0.0] * 3] * 2
    yield trained(table_of(), n=2)


@advised("have rows in common; pass a shared table once, as a single HostEmbedding")
def shared_tables(path: Path) -> Iterator[Any]:
    rows_of = X.copy()
    one, two = (HostEmbedding.from_pretrained(rows_of, freeze=False) for _ in range(2))

    def loop(*tables: Any) -> Any:
        optimizer = RowOptimizer(SGD, list(tables), lr=1.0)
        functions: Any = {table: lambda ids: (ids, ids + 1) for table in tables}
        for batch in pinfeed.train_rows([IDS], functions, optimizer=optimizer):
            sum(table(batch).sum() + table(batch + 1).sum() for table in tables).backward()
            optimizer.step()

    yield lambda: loop(one, two)
    loop(one)
    yield equal(rows_of[1:5], X[1:5] - 1)


@advised(r"evaluating\(\) inside evaluating\(\).*leave the outer context first")
def evaluating_twice(path: Path) -> Iterator[Any]:
    table = table_of()
    optimizer = RowOptimizer(SGD, [table], lr=1.0)
    batches = pinfeed.train_rows([IDS], {table: lambda ids: ids}, optimizer=optimizer)

    def evaluate(is_nested: bool) -> int:
        n = 0
        for _ in batches:
            with batches.evaluating():
                if is_nested:
                    with batches.evaluating():
                        pass
            with batches.evaluating():
                n += 1
        return n

    yield lambda: evaluate(True)
    yield evaluate(False) == 1


@advised(r"leave evaluating\(\) first")
def training_inside_evaluating(path: Path) -> Iterator[Any]:
    table = table_of()
    optimizer = RowOptimizer(SGD, [table], lr=1.0)
    batches = pinfeed.train_rows([IDS], {table: lambda ids: ids}, optimizer=optimizer)

    def weights() -> None:
        for _ in batches:
            with batches.evaluating():
                _ = table.weight

    yield weights
    for _ in batches:
        with batches.evaluating():
            pass
        yield table.weight.tolist() == [[1.0] * 3] * 2


@advised("give gradients='dense', or an optimizer that takes dense gradients")
def bag_of_maxima(path: Path) -> Iterator[Any]:
    def train(optimizer_class: Any, **options: Any) -> list[float]:
        table = pinfeed.HostEmbeddingBag(8, 3, mode="max", init="ones")
        optimizer = RowOptimizer(optimizer_class, [table], lr=1.0, **options)
        for ids in pinfeed.train_rows([IDS], {table: lambda ids: ids}, optimizer=optimizer):
            table(ids[:, None]).sum().backward()
            optimizer.step()
        return table.read(range(8))[:, 0].tolist()

    expected = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    yield lambda: train(torch.optim.SparseAdam)
    yield np.allclose(train(torch.optim.Adam), expected, atol=1e-6)
    yield train(SGD, gradients="dense") == expected


@advised("max_norm=1.0 of a sharded table.*omit it, or use a HostEmbedding")
def sharded_table_with_a_limit(path: Path) -> Iterator[Any]:
    yield lambda: pinfeed.ShardedEmbedding(8, 3, max_norm=1.0)
    table = table_of(max_norm=1.0)
    yield np.allclose(table.eval()(IDS).detach().norm(dim=1), 1)


# ---- checkpoints ---------------------------------------------------------------------------------


@advised(r"model: Linear is a class; expected an instance; give model=Linear\(...\)")
def class_in_a_checkpoint(path: Path) -> Iterator[Any]:
    yield lambda: checkpoint.save(path / "run", model=torch.nn.Linear)
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    checkpoint.save(path / "run", model=models[0])
    checkpoint.resume(path / "run", model=models[1])
    yield torch.equal(models[0].weight, models[1].weight)


@advised("is in a read-only store, whose rows do not change; leave it out")
def read_only_table_in_a_checkpoint(path: Path) -> Iterator[Any]:
    np.save(path / "x.npy", X)
    table = HostEmbedding.from_pretrained(path / "x.npy")
    yield lambda: checkpoint.save(path / "run", table=table, step=1)
    checkpoint.save(path / "run", step=1)
    yield checkpoint.resume(path / "run") == {"step": 1}


@advised("is a single save; expected the directory that checkpoint.save was given; give '.*run'")
def one_save_of_a_checkpoint(path: Path) -> Iterator[Any]:
    saved = checkpoint.save(path / "run", step=1)
    yield lambda: checkpoint.resume(saved)
    yield checkpoint.resume(path / "run") == {"step": 1}


@advised("remove .*00000002 to return to the previous save")
def damaged_manifest(path: Path) -> Iterator[Any]:
    checkpoint.save(path / "run", step=1)
    saved = checkpoint.save(path / "run", keep=2, step=2)
    (saved / "manifest.json").write_text("{")
    yield lambda: checkpoint.resume(path / "run")
    shutil.rmtree(saved)
    yield checkpoint.resume(path / "run") == {"step": 1}


@advised("create it in the same way as for save")
def other_table_in_a_checkpoint(path: Path) -> Iterator[Any]:
    table = table_of()
    checkpoint.save(path / "run", part=table)
    yield lambda: checkpoint.resume(path / "run", part=torch.nn.Linear(2, 1))
    other = table_of(init="zeros")
    checkpoint.resume(path / "run", part=other)
    yield other.read(IDS).tolist() == [[1.0] * 3] * 2


@advised.each
def test_advice_is_right(says: str, case: Case, tmp_path: Path) -> None:
    follow(says, case, tmp_path)
