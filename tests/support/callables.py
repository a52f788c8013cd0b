"""Public callables, called with few arguments, for the tests of arguments."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from pinfeed import (
    Feeder,
    HostEmbedding,
    train_rows,
    wrap_loader,
    wrap_readers,
)


def fed(**arguments: Any) -> Feeder:
    return Feeder(np.zeros((8, 2)), **{"batch_size": 2, "device": "cpu", **arguments})


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)


def wrapped(**arguments: Any) -> Any:
    return wrap_loader(loader(), device="cpu", **arguments)


def read(**arguments: Any) -> Any:
    functions = {"read_input": lambda i: [i], "get_output": lambda i: [i]}
    return wrap_readers(
        range(4), range(4), **{**functions, "batch_size": 2, "device": "cpu", **arguments}
    )  # type: ignore[arg-type]


def trained(**arguments: Any) -> Any:
    return train_rows(
        loader(), {HostEmbedding(4, 2): lambda batch: batch}, device="cpu", **arguments
    )


def table(**arguments: Any) -> HostEmbedding:
    return HostEmbedding(4, 2, **arguments)
