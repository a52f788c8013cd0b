"""Advice in errors of feeders, loaders, orders, ranks and transforms is right."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.advice import Case, Cases, equal, follow, joined, read
from support.command import run
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import pinfeed
from pinfeed import Feeder, TarDataset, rows, wrap_dataset, wrap_loader

advised = Cases()
X = np.arange(24, dtype="float32").reshape(8, 3)
T = torch.from_numpy(X)
DATA = list(T)


def loaded(loader: Any, **options: Any) -> Any:
    with wrap_loader(loader, device="cpu", **options) as feeder:
        return joined(feeder)


def sampled(dataset: Any, **options: Any) -> Any:
    with wrap_dataset(dataset, **{"batch_size": 4, "device": "cpu", **options}) as feeder:
        return joined(feeder)


def order(rows_of: Any, **options: Any) -> list[int]:
    return [int(row) for row in read(np.arange(8), rows=rows_of, **options)]


# ---- batches and orders --------------------------------------------------------------------------


@advised("seed=3 was given without shuffle.*give shuffle=True, or leave seed out")
def seed_without_shuffle(path: Path) -> Iterator[Any]:
    yield lambda: read(X, seed=3)
    yield equal(np.sort(read(X, seed=3, shuffle=True), 0), X)
    yield equal(read(X), X)


@advised("leave out shuffle, or give rows=pinfeed.rows.shuffled\\(seed\\)")
def rows_and_shuffle(path: Path) -> Iterator[Any]:
    yield lambda: order(rows.sequential(), shuffle=True)
    yield order(rows.sequential()) == list(range(8))
    yield sorted(order(rows.shuffled(3))) == list(range(8)) != order(rows.shuffled(3))


@advised("rows yields whole batches; leave out batch_size")
def batches_and_batch_size(path: Path) -> Iterator[Any]:
    batches = [[3, 1], [2]]
    yield lambda: order(batches)
    yield order(batches, batch_size=None) == [3, 1, 2]


@advised("expected a batch size as well; give batch_size= or config=")
def rows_without_batch_size(path: Path) -> Iterator[Any]:
    yield lambda: order([3, 1, 2], batch_size=None)
    yield order([3, 1, 2], batch_size=2) == [3, 1, 2]
    config = pinfeed.Config(preferred_batch_size=2)
    yield order([3, 1, 2], batch_size=None, config=config) == [3, 1, 2]


@advised("neither batch_size nor config was given; give one of them, or give rows= that yields")
def no_batch_size(path: Path) -> Iterator[Any]:
    yield lambda: Feeder(X)
    yield equal(read(X, 3), X)
    yield equal(read(X, None, config=pinfeed.Config(preferred_batch_size=3)), X)
    yield equal(read(X, None, rows=[[0, 1], [2]]), X[:3])


@advised("both batch_size and config were given; give one of them")
def two_batch_sizes(path: Path) -> Iterator[Any]:
    config = pinfeed.Config(preferred_batch_size=3)
    yield lambda: Feeder(X, batch_size=4, config=config)
    with Feeder(X, config=config, device="cpu") as feeder:
        yield [len(batch) for batch in feeder] == [3, 3, 2]


@advised(r"drop_last=True was given.*give element_batches\(..., drop_last=True\)")
def drop_last_of_element_batches(path: Path) -> Iterator[Any]:
    def batches(**options: Any) -> Any:
        return rows.element_batches([3] * 8, max_elements=9, **options)

    yield lambda: order(batches(), batch_size=None, drop_last=True)
    yield len(order(batches(drop_last=True), batch_size=None)) == 6


@advised(r"for a mask, give np.flatnonzero\(mask\)")
def mask_as_rows(path: Path) -> Iterator[Any]:
    mask = np.arange(8) % 3 == 0
    yield lambda: order(mask)
    yield order(np.flatnonzero(mask)) == [0, 3, 6]


@advised("is exhausted after one epoch; give a list, or an object that can be iterated again")
def rows_from_an_iterator(path: Path) -> Iterator[Any]:
    def twice(indices: Any) -> list[Any]:
        with Feeder(np.arange(8), batch_size=2, rows=indices, device="cpu") as feeder:
            return [joined(feeder).tolist() for _ in range(2)]

    yield lambda: twice(iter([3, 1]))
    yield twice([3, 1]) == [[3, 1]] * 2
    yield twice(range(2)) == [[0, 1]] * 2


@advised(r"row 1 occurs twice.*give np.unique\(subset\), or give the indices themselves as rows=")
def subset_with_repeated_rows(path: Path) -> Iterator[Any]:
    subset = np.array([1, 5, 1])
    yield lambda: order(rows.where(subset, rows.sequential()))
    yield order(rows.where(np.unique(subset), rows.sequential())) == [1, 5]
    yield order(subset) == [1, 5, 1]


@advised(r"for other sources, give block_shuffled\(seed, block_rows=...\)")
def chunks_of_an_array(path: Path) -> Iterator[Any]:
    yield lambda: rows.chunk_shuffled(X, 0)
    found = order(rows.block_shuffled(0, block_rows=2))
    yield sorted(found) == list(range(8))


@advised("until='first': source 'b' has 3 rows.*give a smaller batch_size, or until='all'")
def mixture_of_a_short_source(path: Path) -> Iterator[Any]:
    def mixed(**options: Any) -> list[int]:
        given = {"until": "first", "batch_size": 4, **options}
        return order(rows.mixed({"a": 5, "b": 3}, {"a": 1, "b": 1}, **given))

    yield lambda: mixed()
    yield set(mixed(batch_size=2)) <= set(range(8))
    yield set(mixed(until="all")) == set(range(8))


@advised("weights are 0 for source 'b' before all of its rows were seen.*give one, or leave out")
def mixture_with_weight_zero(path: Path) -> Iterator[Any]:
    def mixed(sizes: Any, weights: Any) -> set[int]:
        made = rows.mixed(sizes, weights, until="all", order=rows.sequential())
        with Feeder(
            np.arange(sum(sizes.values())), batch_size=4, rows=made, device="cpu"
        ) as feeder:
            return set(joined(feeder).tolist())

    yield lambda: mixed({"a": 5, "b": 3}, {"a": 1, "b": 0})
    yield mixed({"a": 5, "b": 3}, {"a": 1, "b": 0.5}) == set(range(8))
    yield mixed({"a": 5}, {"a": 1}) == set(range(5))


@advised(r"expected the same sources; give pinfeed.concat\(sources\) to the feeder")
def mixture_of_one_source(path: Path) -> Iterator[Any]:
    made = rows.mixed({"a": 8, "b": 8}, {"a": 1, "b": 1}, until="all", order=rows.sequential())
    yield lambda: read(X, rows=made)
    found = read(pinfeed.concat({"a": X, "b": -X}), rows=made)
    yield equal(np.sort(found.ravel()), np.sort(np.concatenate([X, -X]).ravel()))


@advised("share the whole order: give ranks= to the feeder, or per_rank\\(mixed\\(...\\), ...\\)")
def mixture_of_a_share(path: Path) -> Iterator[Any]:
    def mixed(of: Any) -> Any:
        return rows.mixed({"a": 4, "b": 4}, {"a": 1, "b": 1}, until="all", order=of)

    def share(of: Any) -> Any:
        return rows.per_rank(of, rank=1, world_size=2)

    def halves(rank: int) -> list[int]:
        return order(rows.per_rank(mixed(rows.sequential()), rank=rank, world_size=2))

    yield lambda: order(mixed(share(rows.sequential())))
    ranked = [
        order(mixed(rows.sequential()), batch_size=2, ranks=pinfeed.Ranks(rank=i, world_size=2))
        for i in range(2)
    ]
    yield sorted(ranked[0] + ranked[1]) == list(range(8))
    yield sorted(halves(0) + halves(1)) == list(range(8))


@advised(
    "max_elements=3; expected rows that fit.*give split='long' to cut longer rows, or raise max"
)
def row_longer_than_a_sequence(path: Path) -> Iterator[Any]:
    store = pinfeed.RaggedStore(np.arange(9), [0, 2, 7, 9], layout="packed")

    def packed(n: int, **options: Any) -> Any:
        return rows.packed(store.lengths, max_elements=n, **options)

    def elements(made: Any) -> list[int]:
        with Feeder(store, rows=made, device="cpu") as feeder:
            # Padding is 0, as is the first element.
            return sorted({0, *torch.cat([batch[0].ravel() for batch in feeder]).tolist()})

    yield lambda: elements(packed(3))
    yield elements(packed(3, split="long")) == list(range(9))
    yield elements(packed(5)) == list(range(9))


@advised(r"give packed the lengths of this store \(store.lengths\)")
def lengths_of_another_store(path: Path) -> Iterator[Any]:
    store = pinfeed.RaggedStore(np.arange(9), [0, 2, 7, 9], layout="packed")

    def elements(lengths: Any) -> list[int]:
        made = rows.packed(lengths, max_elements=6)
        with Feeder(store, rows=made, device="cpu") as feeder:
            return sorted({0, *torch.cat([batch[0].ravel() for batch in feeder]).tolist()})

    yield lambda: elements([2, 5, 1])
    yield elements(store.lengths) == list(range(9))


@advised("until=7 is not a multiple of batch_size=4.*give 4")
def epoch_that_ends_within_a_batch(path: Path) -> Iterator[Any]:
    def mixed(until: int) -> Any:
        return rows.mixed({"a": 4, "b": 4}, {"a": 1, "b": 1}, until=until, batch_size=4)

    yield lambda: mixed(7)
    yield len(order(mixed(4))) == 4


@advised(r"has no len\(\).* has count\(epoch\) instead")
def number_of_batches(path: Path) -> Iterator[Any]:
    batches = rows.element_batches([1, 2, 3, 4, 5, 6, 7, 8], max_elements=8)
    with Feeder(np.arange(8), rows=batches, device="cpu") as feeder:
        yield lambda: len(feeder)
        yield batches.count(0) == len(list(feeder))


# ---- ranks ---------------------------------------------------------------------------------------


@advised("Ranks\\(rank=1, world_size=None\\): give both, or neither for those of the job")
def rank_without_world_size(path: Path) -> Iterator[Any]:
    yield lambda: pinfeed.Ranks(rank=1)
    yield order(rows.sequential(), ranks=pinfeed.Ranks(rank=1, world_size=2)) == [4, 5, 6, 7]
    yield order(rows.sequential(), ranks=pinfeed.Ranks()) == list(range(8))


@advised("for all rows on every rank, give ranks='all' to the Feeder")
def ranks_with_all_rows(path: Path) -> Iterator[Any]:
    yield lambda: pinfeed.Ranks("all")  # type: ignore[arg-type]
    yield order(rows.sequential(), ranks="all") == list(range(8))


@advised("ranks='join' reads every row once.*give one of them, or ranks='drop'")
def joined_ranks_that_drop(path: Path) -> Iterator[Any]:
    def share(uneven: Any, **options: Any) -> list[int]:
        ranks = pinfeed.Ranks(uneven, rank=0, world_size=2)
        return order(rows.sequential(), ranks=ranks, batch_size=3, **options)

    yield lambda: share("join", drop_last=True)
    yield share("join") == [0, 1, 2, 6]
    yield share("drop", drop_last=True) == [0, 1, 2]


@advised(r"per_rank\(...\) is already the share of one rank.*give one of them")
def ranks_given_twice(path: Path) -> Iterator[Any]:
    ranks = pinfeed.Ranks(rank=1, world_size=2)
    share = rows.per_rank(rows.sequential(), rank=1, world_size=2)
    yield lambda: order(share, ranks=ranks)
    yield order(share) == [1, 3, 5, 7]
    yield sorted(order(rows.sequential(), ranks=ranks)) == [4, 5, 6, 7]


@advised("leave out split_batches, and give max_elements for the batch of one rank")
def split_batches_of_elements(path: Path) -> Iterator[Any]:
    def share(rank: int, max_elements: int, **options: Any) -> list[int]:
        batches = rows.element_batches([1] * 8, max_elements=max_elements)
        ranks = pinfeed.Ranks("drop", rank=rank, world_size=2, **options)
        return order(batches, batch_size=None, ranks=ranks)

    yield lambda: share(0, 4, split_batches=True)
    yield sorted(share(0, 2) + share(1, 2)) == list(range(8))


@advised("decides on its own what a process reads; leave ranks= out")
def ranks_of_a_sampler(path: Path) -> Iterator[Any]:
    sampler: Any = DistributedSampler(range(8), 2, 1, shuffle=False)  # type: ignore[arg-type]
    yield lambda: order(sampler, ranks=pinfeed.Ranks(rank=1, world_size=2))
    yield order(sampler) == [1, 3, 5, 7]


# ---- loaders and datasets ------------------------------------------------------------------------


@advised(r"give DataLoader\(dataset, batch_size=...\), or use pinfeed.Feeder\(source")
def dataset_as_a_loader(path: Path) -> Iterator[Any]:
    dataset = TensorDataset(T)
    yield lambda: loaded(dataset)
    yield equal(loaded(DataLoader(dataset, batch_size=3))[0], X)


@advised(
    r"give DataLoader\(dataset, batch_size=...\), or use pinfeed.Feeder\(source, batch_size=...\)"
)
def array_as_a_loader(path: Path) -> Iterator[Any]:
    yield lambda: loaded(X)
    yield equal(loaded(DataLoader(DATA, batch_size=3)), X)  # type: ignore[arg-type]
    yield equal(read(X, batch_size=3), X)


@advised("yields its batches only once; for a second epoch, give an iterable")
def loader_that_is_an_iterator(path: Path) -> Iterator[Any]:
    def twice(loader: Any) -> list[Any]:
        with wrap_loader(loader, device="cpu") as feeder:
            return [joined(feeder) for _ in range(2)]

    yield lambda: twice(iter(T.split(3)))
    yield equal(twice(T.split(3)), [X, X])


@advised(r"leave out threads, or use pinfeed.wrap_dataset\(dataset, threads=...\)")
def threads_of_a_list(path: Path) -> Iterator[Any]:
    yield lambda: loaded(list(T.split(3)), threads=2)
    yield equal(loaded(list(T.split(3))), X)
    yield equal(sampled(DATA, threads=2), X)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(T)


@advised("is iterable and has no items by index; leave out threads, or give a map-style dataset")
def threads_of_a_stream(path: Path) -> Iterator[Any]:
    yield lambda: loaded(DataLoader(Stream(), batch_size=3), threads=2)
    yield equal(loaded(DataLoader(Stream(), batch_size=3)), X)
    yield equal(loaded(DataLoader(DATA, batch_size=3), threads=2), X)  # type: ignore[arg-type]


@advised("on_error='skip' was given without threads; expected threads=...")
def skipped_samples_without_threads(path: Path) -> Iterator[Any]:
    loader: Any = DataLoader(DATA, batch_size=3)  # type: ignore[arg-type]
    yield lambda: loaded(loader, on_error="skip")
    yield equal(loaded(loader, on_error="skip", threads=1), X)


@advised("config was given without fetch.*leave out config")
def config_without_fetch(path: Path) -> Iterator[Any]:
    loader = T.split(3)
    yield lambda: loaded(loader, config=pinfeed.Config())
    yield equal(loaded(loader), X)


@advised(
    r"for a sampler, use pinfeed.wrap_loader\(DataLoader\(dataset, sampler=...\), threads=...\)"
)
def sampler_of_a_dataset(path: Path) -> Iterator[Any]:
    backwards: Any = range(7, -1, -1)
    yield lambda: sampled(DATA, rows=backwards)
    loader: Any = DataLoader(DATA, batch_size=4, sampler=backwards)  # type: ignore[arg-type]
    yield equal(loaded(loader, threads=2), X[::-1])


@advised(
    r"give a list of paths and a transform that reads one, pinfeed.TarDataset\(path\) for an "
    r"archive, or use pinfeed.Feeder\(path\)"
)
def path_as_a_dataset(path: Path) -> Iterator[Any]:
    np.save(path / "x.npy", X)
    for i, row in enumerate(X):
        np.save(path / f"row{i}.npy", row)
    yield lambda: sampled(str(path / "x.npy"))
    names = [str(path / f"row{i}.npy") for i in range(8)]
    yield equal(sampled(names, transform=np.load), X)
    yield equal(sampled(archive_of(path), transform=lambda one: np.load(BytesIO(one["npy"]))), X)
    yield equal(read(path / "x.npy"), X)


def archive_of(path: Path) -> TarDataset:
    """Return the files of the rows in an archive."""
    with tarfile.open(path / "x.tar", "w") as archive:
        for i in range(8):
            archive.add(path / f"row{i}.npy", f"{i}.npy")
    TarDataset.write_index(path / "x.tar")
    return TarDataset(path / "x.tar")


@advised("x.tar has no index, .*; run: pinfeed index /")
def archive_without_an_index(path: Path) -> Iterator[Any]:
    with tarfile.open(path / "x.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("0.txt"))
    yield lambda: TarDataset(path / "x.tar")
    yield run("index", str(path / "x.tar")).exit_code == 0
    yield TarDataset(path / "x.tar")[0] == {"__key__": "0", "txt": b""}


@advised(r"for a loader, use pinfeed.wrap_loader\(loader, threads=...\)")
def loader_as_a_dataset(path: Path) -> Iterator[Any]:
    loader: Any = DataLoader(DATA, batch_size=3)  # type: ignore[arg-type]
    yield lambda: sampled(loader)
    yield equal(loaded(loader, threads=2), X)


@advised("its items have keys; give a list of its values")
def dict_as_a_dataset(path: Path) -> Iterator[Any]:
    items = {f"row {i}": row for i, row in enumerate(DATA)}
    yield lambda: sampled(items)
    yield equal(sampled(list(items.values())), X)


@advised(
    "expected a dataset with items by index and a length; for an iterable of batches, use .*wrap_l"
)
def stream_as_a_dataset(path: Path) -> Iterator[Any]:
    yield lambda: sampled(iter(T.split(3)))
    yield equal(loaded(iter(T.split(3))), X)


@advised("from a parameter of transform named generator .*give reproducible=False for numbers")
def random_samples(path: Path) -> Iterator[Any]:
    def plain(sample: Any) -> Any:
        return sample + np.random.rand()  # noqa: NPY002

    def with_torch(sample: Any, generator: torch.Generator) -> Any:
        return sample + torch.rand((), generator=generator)

    def with_numpy(sample: Any, rng: np.random.Generator) -> Any:
        return sample + rng.random(dtype="float32")

    def with_functions(sample: Any) -> Any:
        return sample + torch.rand(())

    yield lambda: sampled(DATA, transform=plain, threads=2)
    for transform in (with_torch, with_numpy, with_functions):
        one, two = (sampled(DATA, transform=transform, threads=n, seed=3) for n in (1, 3))
        yield equal(one, two) and 0 < np.abs(one - X).max() < 1
    found = sampled(DATA, transform=plain, threads=2, reproducible=False)
    yield 0 < np.abs(found - X).max() < 1


@advised(r"cannot be resumed; give a loader that has it .*StatefulDataLoader.*, or use a Feeder")
def resumed_list(path: Path) -> Iterator[Any]:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def rest(make: Any) -> Any:
        with make() as feeder:
            next(iter(feeder))
            state = feeder.state_dict()
        with make() as feeder:
            feeder.load_state_dict(state)
            return joined(feeder)

    yield lambda: rest(lambda: wrap_loader(T.split(2), device="cpu"))
    found = rest(lambda: wrap_loader(stateful(DATA, batch_size=2), device="cpu"))
    yield equal(found, X[2:])
    yield equal(rest(lambda: Feeder(X, batch_size=2, device="cpu")), X[2:])


@advised(r"expected the return value of this feeder's state_dict\(\), because that number seeds")
def state_of_the_loader_itself(path: Path) -> Iterator[Any]:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def noise(batch: Any, generator: torch.Generator) -> Any:
        return batch + torch.rand(batch.shape, generator=generator)

    def rest(state_of: Any) -> Any:
        loader = stateful(DATA, batch_size=2)
        with wrap_loader(loader, host_transform=noise, device="cpu") as feeder:
            next(iter(feeder))
            state = state_of(loader, feeder)
        options: Any = {"host_transform": noise, "device": "cpu"}
        with wrap_loader(stateful(DATA, batch_size=2), **options) as feeder:
            feeder.load_state_dict(state)
            return joined(feeder)

    yield lambda: rest(lambda loader, feeder: loader.state_dict())
    whole = loaded(stateful(DATA, batch_size=2), host_transform=noise)
    yield equal(rest(lambda loader, feeder: feeder.state_dict()), whole[2:])


@advised(r"if you need a DataLoader, give it pinfeed.RowDataset\(source\)")
def feeder_in_a_loader(path: Path) -> Iterator[Any]:
    def batches(dataset: Any) -> Any:
        return joined(DataLoader(dataset, batch_size=3))

    yield lambda: batches(Feeder(X, batch_size=3, device="cpu"))
    yield equal(batches(pinfeed.RowDataset(X)), X)
    yield equal(read(X, batch_size=3), X)


@advised("cannot be pickled or copied.*make the feeder in the process that uses it .its state_dict")
def pickled_feeder(path: Path) -> Iterator[Any]:
    def feeder() -> Feeder:
        return Feeder(X, batch_size=3, device="cpu")

    yield lambda: pickle.dumps(feeder())
    with feeder() as one:
        next(iter(one))
        state = pickle.loads(pickle.dumps(one.state_dict()))
    with feeder() as other:
        other.load_state_dict(state)
        yield equal(joined(other), X[3:])


# StatefulDataLoader calls this deprecated function.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@advised.each
def test_advice_is_right(says: str, case: Case, tmp_path: Path) -> None:
    follow(says, case, tmp_path)
