"""Code that takes a feeder for a data set or a sequence gets a helpful error."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pinfeed import Feeder, wrap_loader, wrap_readers

MAKE: list[Callable[[], Any]] = [
    lambda: Feeder(np.zeros((8, 2)), batch_size=2, device="cpu"),
    lambda: wrap_loader(DataLoader(TensorDataset(torch.zeros(4, 2))), device="cpu"),
    lambda: wrap_readers(
        range(4),
        range(4),
        read_input=lambda i: [i],
        get_output=lambda i: [i],
        batch_size=1,
        device="cpu",
    ),
]


class Endless(IterableDataset[int]):
    """It has no len()."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_dataloader_around_a_feeder(make: Callable[[], Any], batch_size: int) -> None:
    message = (
        r"a DataLoader asked a \w+ for samples; expected a loop over the feeder itself, .* give "
        r"it pinfeed\.RowDataset\(source\)"
    )
    with pytest.raises(TypeError, match=message):
        list(DataLoader(make(), batch_size=batch_size))


@pytest.mark.parametrize("make", MAKE)
def test_a_feeder_is_no_sequence_and_no_iterator(make: Callable[[], Any]) -> None:
    feeder = make()
    assert not isinstance(feeder, (Sequence, Iterator))
    assert np.asarray([feeder, feeder]).dtype == object, "numpy does not iterate it"
    assert len(list(feeder)) == len(feeder) == 4


def test_len_of_a_wrapped_loader_that_does_not_know() -> None:
    for loader in (DataLoader(Endless()), (i for i in range(3))):
        with wrap_loader(loader, device="cpu") as feeder:
            with pytest.raises(
                TypeError,
                match=(
                    r"len\(\) fails \(object of type '\w+' has no len\(\)\), so the number of "
                    r"batches is unknown"
                ),
            ):
                len(feeder)
            assert len(list(feeder)) == 3
