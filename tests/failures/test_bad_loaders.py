"""Objects that are not loaders of batches: the error says what to give instead."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from pinfeed import (
    HostEmbedding,
    errors,
    train_rows,
    wrap_loader,
)


def test_a_path_is_no_loader() -> None:
    with pytest.raises(errors.ArgumentError, match=r"use pinfeed\.Feeder\(source"):
        wrap_loader("x.npy")


class _Items(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return torch.zeros(2)


NO_LOADERS: list[Any] = [
    (
        {"x": torch.zeros(2, 3)},
        "loader is a dict, and iterating over it yields its keys or columns; expected a DataLoader",
    ),
    (
        pyarrow.table({"x": [1, 2]}),
        "a Table, and iterating over it yields its keys or columns; expected a DataLoader",
    ),
    (
        torch.zeros(2, 3),
        "loader is a Tensor, and it yields single samples; expected a DataLoader",
    ),
    (
        np.zeros((2, 3)),
        (
            r"single samples; expected a DataLoader .*; "
            r"give DataLoader\(dataset, batch_size=\.\.\.\), or use pinfeed.Feeder"
        ),
    ),
    (
        TensorDataset(torch.zeros(2, 3)),
        "loader is a TensorDataset, and it yields single samples; expected a DataLoader",
    ),
    (
        _Items(),
        (r"loader is a _Items, and it yields .*; give DataLoader\(dataset, batch_size=\.\.\.\)"),
    ),
]


@pytest.mark.parametrize(("loader", "message"), NO_LOADERS, ids=lambda value: type(value).__name__)
def test_objects_without_batches_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        wrap_loader(loader, device="cpu")
    with pytest.raises(errors.ArgumentError, match=message):
        train_rows(loader, {HostEmbedding(4, 2): lambda batch: batch}, device="cpu")


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(2)


class _Own(_Items):
    shape = (1, 2)

    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(2)


@pytest.mark.parametrize(
    "make",
    [lambda: [torch.ones(2)], lambda: iter([torch.ones(2)]), _Stream, _Own],
    ids=["list", "iterator", "stream", "its own iteration"],
)
def test_other_iterables_are_loaders(make: Any) -> None:
    with wrap_loader(make(), device="cpu") as loader:
        assert [batch.tolist() for batch in loader] == [[1, 1]]
