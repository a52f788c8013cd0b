"""Types of batches: mypy checks every ``assert_type``, and the tests check what loops yield."""

import inspect
import typing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

from pinfeed import (
    ArrayStore,
    Batch,
    Feeder,
    HostEmbedding,
    read_rows,
    train_rows,
    wrap_loader,
    wrap_readers,
)
from pinfeed.feeders import typed
from pinfeed.feeders.loader_feeder import LoaderFeeder

ROWS = np.zeros((4, 2), np.float32)
BATCHES = [(torch.zeros(2, dtype=torch.int64), "name")]


class Pair(NamedTuple):
    x: Any
    y: Any


def test_batches_of_a_feeder_have_the_structure_of_its_source() -> None:
    x = next(iter(Feeder(ROWS, batch_size=4, shuffle=True, device="cpu")))
    y = next(iter(Feeder(ArrayStore(ROWS), batch_size=4, device="cpu")))
    of_tuple = next(iter(Feeder((ROWS, torch.zeros(4)), batch_size=4, device="cpu")))
    of_list = next(iter(Feeder([ROWS, ROWS], batch_size=4, device="cpu")))
    of_dict = next(iter(Feeder({"x": ROWS, "y": ROWS}, batch_size=4, device="cpu")))
    assert_type(x, Tensor)
    assert_type(y, Tensor)
    assert_type(of_tuple, tuple[Tensor, ...])
    assert_type(of_list, list[Tensor])
    assert_type(of_dict, dict[str, Tensor])
    assert (type(of_tuple), type(of_list), type(of_dict)) == (tuple, list, dict)
    tensors = [x, y, *of_tuple, *of_list, *of_dict.values()]
    assert all(type(tensor) is Tensor for tensor in tensors)


def test_other_structures_have_the_type_that_the_user_says() -> None:
    pair = next(iter(Feeder(Pair(ROWS, ROWS), batch_size=4, device="cpu")))
    assert_type(pair, Any)
    assert type(pair) is Pair
    nested: Feeder[dict[str, tuple[Tensor, Tensor]]]
    nested = Feeder({"x": (ROWS, ROWS)}, batch_size=4, device="cpu")
    x, _ = next(iter(nested))["x"]
    assert_type(x, Tensor)
    assert type(x) is Tensor


def test_the_type_of_a_feeder_may_be_named_when_it_is_made() -> None:
    with Feeder[Tensor](ROWS, batch_size=4, device="cpu") as feeder:
        batch = next(feeder.batches())
        x = next(iter(feeder))
    assert_type(batch, Batch[Tensor])
    assert_type(batch.data, Tensor)
    assert_type(x, Tensor)
    assert type(x) is type(batch.data) is Tensor


def test_wrapped_loaders_keep_the_type_of_their_batches() -> None:
    loader = wrap_loader(BATCHES, device="cpu")
    table = HostEmbedding(4, 2)
    of_table = next(iter(train_rows(BATCHES, {table: 0}, device="cpu")))
    assert_type(loader, LoaderFeeder[tuple[Tensor, str]])
    assert_type(next(iter(loader)), tuple[Tensor, str])
    assert_type(of_table, tuple[Tensor, str])
    assert type(of_table) is tuple
    assert_type(next(iter(read_rows(BATCHES, {table: 0}, device="cpu"))), tuple[Tensor, str])
    # A DataLoader is typed by its samples, which say nothing about what collate_fn makes of them.
    data = DataLoader(TensorDataset(torch.zeros(4)))
    assert_type(next(iter(wrap_loader(data, device="cpu"))), Any)


def test_batches_of_readers_are_pairs() -> None:
    feeder = wrap_readers(
        [1], [2], read_input=lambda i: [i], get_output=lambda i: [i], batch_size=1, device="cpu"
    )
    pair = next(iter(feeder))
    assert_type(pair, tuple[Any, Any])
    assert type(pair) is tuple


def double(batch: Any) -> Any:
    return 2 * (batch if isinstance(batch, Tensor) else batch[0])


def test_batches_of_functions_have_any_type() -> None:
    table = HostEmbedding(4, 2)
    x = next(iter(Feeder(ROWS, batch_size=4, device="cpu", host_transform=double)))
    y = next(iter(wrap_loader(BATCHES, device="cpu", device_transform=double)))
    _, rows = next(iter(wrap_loader(BATCHES, device="cpu", fetch={"x": (ROWS, 0)})))
    z = next(iter(train_rows(BATCHES, {table: 0}, device="cpu", device_transform=double)))
    assert_type(x, Any)
    assert_type(y, Any)
    assert_type(rows, Any)
    assert_type(z, Any)
    assert [tensor.shape for tensor in (x, y, rows["x"], z)] == [(4, 2), (2,), (2, 2), (2,)]


@pytest.mark.parametrize(
    ("function", "arguments", "others"),
    [
        (Feeder, typed.FeederArguments, {"source"}),
        (wrap_loader, typed.LoaderArguments, {"loader", "fetch"}),
        (read_rows, typed.TableLoopArguments, {"loader", "tables"}),
        (train_rows, typed.TrainArguments, {"loader", "tables"}),
    ],
)
def test_type_checkers_know_every_argument(function: Any, arguments: Any, others: set[str]) -> None:
    names = set(inspect.signature(function).parameters) - {"host_transform", "device_transform"}
    assert names == typing.get_type_hints(arguments).keys() | others
