"""wrap_loader(threads=n): batches equal those of the loader without worker processes."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import Numbers, Stream, all_same
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from pinfeed import ArgumentError, RowDataset, wrap_loader


class Pairs(Numbers):
    """Data set that makes the samples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self[i], str(i)) for i in indices]


def collate(samples: list[Any]) -> Any:
    return {"sum": sum(samples), "all": torch.stack(samples)}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "drop_last": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True, generator=generator()),
    "sampler": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 14, 9)
    ),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(14)), 5, False)
    ),
    "lists": lambda: DataLoader(Numbers(), batch_sampler=[[3, 1], [2], [0, 0, 5]]),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None),
    "collate_fn": lambda: DataLoader(Numbers(), batch_size=4, collate_fn=collate),
    "__getitems__": lambda: DataLoader(Pairs(), batch_size=4, shuffle=True),
    "rows": lambda: DataLoader(
        RowDataset(np.arange(28.0).reshape(14, 2)), batch_size=4, shuffle=True
    ),
    "subset": lambda: DataLoader(Subset(Numbers(), [5, 1, 9]), batch_size=2),
    "subset of batches": lambda: DataLoader(Subset(Pairs(), [5, 1, 9]), batch_size=2),
    "concatenated": lambda: DataLoader(ConcatDataset([Numbers(), Numbers()]), batch_size=5),
    "structures": lambda: DataLoader(Numbers(lambda x: (x, (str(x), {"y": x}))), batch_size=4),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_the_loader(name: str, threads: int, depth: int) -> None:
    torch.manual_seed(5)
    loader = LOADERS[name]()
    wanted = [list(loader) for _ in range(2)]
    torch.manual_seed(5)
    feeder = wrap_loader(LOADERS[name](), threads=threads, depth=depth, device="cpu")
    for epoch in wanted:
        assert all_same(feeder, epoch)


@pytest.mark.parametrize("depth", [0, 3])
def test_functions_take_batches_in_order(depth: int) -> None:
    """The samples of each even batch are slower, and so is its function."""
    seen: list[int] = []
    asked: list[int] = []
    running = threading.Lock()

    def host(batch: torch.Tensor) -> torch.Tensor:
        assert running.acquire(blocking=False)
        seen.append(int(batch[0]))
        running.release()
        return batch + 1

    def ids(batch: torch.Tensor) -> torch.Tensor:
        asked.append(int(batch[0]))
        return batch.long()

    feeder = wrap_loader(
        DataLoader(Numbers(), batch_size=2),
        threads=4,
        depth=depth,
        device="cpu",
        host_transform=host,
        fetch={"x": (np.arange(20.0), ids)},
    )
    found = [(batch.tolist(), rows["x"].tolist()) for batch, rows in feeder]
    assert found == [([i + 1.0, i + 2.0], [i + 1.0, i + 2.0]) for i in range(0, 14, 2)]
    assert seen == list(range(0, 14, 2))
    assert asked == list(range(1, 15, 2))


@pytest.mark.parametrize("transform", [None, lambda batch: batch * 2])
def test_errors_with_functions_do_not_hang(transform: Any) -> None:
    def bad(x: float) -> torch.Tensor:
        if x in (3, 9):
            raise KeyError(x)
        return torch.tensor(x)

    def loader(on_error: Any) -> Any:
        return wrap_loader(
            DataLoader(Numbers(bad), batch_size=2),
            threads=2,
            device="cpu",
            host_transform=transform,
            on_error=on_error,
        )

    loop = iter(loader("next"))
    found: list[Any] = []
    for _ in range(7):
        try:
            found.append(len(next(loop)))
        except KeyError:
            found.append("error")
    assert found == [2, "error", 2, 2, "error", 2, 2]
    feeder = loader("skip")
    assert [len(batch) for batch in feeder] == [2, 1, 2, 2, 1, 2, 2]
    assert [index for _, index, _ in feeder.skipped] == [3, 9]
    with pytest.raises(KeyError):
        list(loader("raise"))


def test_samples_of_a_subset_are_skipped_one_by_one() -> None:
    def bad(x: float) -> float:
        if x == 3:
            raise ValueError(x)
        return x

    feeder = wrap_loader(
        DataLoader(Subset(Numbers(bad), [1, 3, 5]), batch_size=3),
        threads=2,
        device="cpu",
        on_error="skip",
    )
    assert [batch.tolist() for batch in feeder] == [[1, 5]]
    assert [index for _, index, _ in feeder.skipped] == [1]


@pytest.mark.parametrize("kind", ["samples", "collate_fn"])
def test_random_numbers_depend_on_the_seed_alone(kind: str) -> None:
    def noisy(x: float) -> torch.Tensor:
        return torch.rand(2) + x

    def mix(samples: list[Any]) -> torch.Tensor:
        return torch.stack(samples) * torch.rand(1)

    def run(threads: int, seed: int = 1) -> list[Any]:
        torch.manual_seed(seed)
        collate_fn = mix if kind == "collate_fn" else None
        loader = DataLoader(Numbers(noisy), batch_size=4, shuffle=True, collate_fn=collate_fn)
        return [batch.tolist() for batch in wrap_loader(loader, threads=threads, device="cpu")]

    assert run(1) == run(2) == run(8)
    assert run(1) != run(1, seed=2)


def test_an_empty_list_of_indices_fails_as_in_the_loader() -> None:
    loader = DataLoader(Numbers(), batch_sampler=[[]])
    with pytest.raises(IndexError):
        list(loader)
    with pytest.raises(IndexError):
        list(wrap_loader(loader, threads=2, device="cpu"))


def test_other_loaders_are_refused() -> None:
    for loader, message in (
        ([torch.zeros(1)], "threads was given with a list"),
        (DataLoader(Stream()), "iterable and has no items by index"),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrap_loader(loader, threads=2)
    for threads in (0, 1.5, 2000):
        with pytest.raises(ArgumentError, match="threads"):
            wrap_loader(DataLoader(Numbers()), threads=threads)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="without threads"):
        wrap_loader(DataLoader(Numbers()), on_error="skip")
