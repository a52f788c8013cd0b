"""Rows by index: single, several, and in the worker processes of a DataLoader."""

import pickle
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import queues_closed, same
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from pinfeed import ArrayStore, Feeder, PinnedStore, RowDataset, errors

__all__ = ["queues_closed"]
N = 50


@pytest.fixture
def source(tmp_path: Path) -> dict[str, Any]:
    """Rows in files and in memory."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x-0.npy", rng.normal(size=(30, 2, 3)).astype("float32"))
    np.save(tmp_path / "x-1.npy", rng.normal(size=(20, 2, 3)).astype("float32"))
    pair = (torch.arange(N).to(torch.bfloat16), PinnedStore(rng.normal(size=(N, 4)), pin=False))
    return {"x": str(tmp_path / "x-*.npy"), "pair": pair, "y": rng.integers(10, size=N)}


def of_feeder(source: Any, rows: Any) -> Any:
    with Feeder(source, rows=[rows], device="cpu") as feeder:
        (batch,) = feeder
    return batch


def test_rows_and_batches_are_those_of_the_feeder(source: dict[str, Any]) -> None:
    with RowDataset(source) as dataset:
        assert isinstance(dataset, Dataset)
        assert len(dataset) == N
        for rows in ([3, 1, 49, 1], np.array([7]), range(5, 9), torch.tensor([2, 40])):
            assert same(dataset[rows], of_feeder(source, list(rows)))
        assert same(dataset[10:40:7], of_feeder(source, range(10, 40, 7)))
        assert same(dataset[-2:], of_feeder(source, [48, 49]))
        for i in (0, np.int64(31), torch.tensor(7)):
            row, batch = dataset[i], of_feeder(source, [int(i)])
            assert same(
                [row["x"], *row["pair"], row["y"]],
                [batch["x"][0], batch["pair"][0][0], batch["pair"][1][0], batch["y"][0]],
            )
        assert same([dataset[i] for i in (4, 2)], dataset.__getitems__([4, 2]))


@pytest.mark.parametrize("index", [N, -1, [0, N], [0.5], np.zeros(N, bool), [[1]], "x"], ids=str)
def test_invalid_row_indices_are_refused(index: Any, source: dict[str, Any]) -> None:
    with RowDataset(source) as dataset, pytest.raises(errors.RowIndexError):
        dataset[index]


def test_rows_are_the_callers() -> None:
    array = np.arange(6.0)
    dataset = RowDataset(array)
    dataset[2].fill_(9)
    dataset[:3].fill_(9)
    assert array.tolist() == list(range(6))
    # Python iterates it as a sequence, until IndexError.
    assert [float(row) for row in dataset] == list(range(6))


class Counting(ArrayStore):
    """Store that records the number of rows of each gather."""

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        self.gathers: list[int] = []

    def gather(self, rows: Any, out: Any) -> None:
        self.gathers.append(len(rows))
        super().gather(rows, out)


def test_a_batch_of_a_dataloader_is_one_gather() -> None:
    store = Counting(np.arange(10.0))
    found = list(DataLoader(RowDataset(store), batch_size=4))
    assert [batch.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampler = BatchSampler(range(10), 4, drop_last=False)
    # A whole batch of indices is one gather, too, and is not collated.
    assert all(
        map(torch.equal, DataLoader(RowDataset(store), sampler=sampler, batch_size=None), found)
    )
    assert store.gathers == [4, 4, 2] * 2


@pytest.fixture(scope="module")
def tracker() -> None:
    """Start the process that Python starts with the first spawned process, and keeps."""
    resource_tracker.ensure_running()


@pytest.mark.usefixtures("tracker")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.stress)])
def test_worker_processes(start: str, tmp_path: Path) -> None:
    """Every worker process opens the files itself."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(N, 3)))
    source = (tmp_path / "x.npy", np.arange(N))
    with RowDataset(source) as dataset:
        # This process opens the files first; worker processes must not use its handles.
        _ = dataset[[9, 3, 7]]
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(
            dataset,
            batch_size=16,
            sampler=sampler,
            num_workers=1 if start == "spawn" else 2,
            multiprocessing_context=start,
        )
        rows = torch.randperm(N, generator=torch.Generator().manual_seed(0)).split(16)
        assert same(list(loader), [list(of_feeder(source, part.tolist())) for part in rows])


def test_pickled(source: dict[str, Any]) -> None:
    """Paths are pickled as paths. Stores are pickled if they can be; stores of files cannot."""
    source = {"x": source["x"], "y": source["y"]}
    with RowDataset(source) as dataset:
        data = pickle.dumps(dataset)
        assert len(data) < 1500
        with pickle.loads(data) as again:
            assert same(again[[3, 45]], dataset[[3, 45]])


def test_sources_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreError, match="unequal numbers of rows"):
        RowDataset((np.zeros(3), np.zeros(4)))
    with pytest.raises(errors.FileMissing):
        RowDataset(tmp_path / "none.npy")
