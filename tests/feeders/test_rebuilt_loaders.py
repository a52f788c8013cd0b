"""Feeders that are given to functions of other libraries, which make a DataLoader of a loader."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pinfeed import Feeder, HostEmbedding, errors, read_rows, wrap_dataset, wrap_loader

X = torch.arange(12.0).reshape(12, 1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X), batch_size=2)


def rebuilt(source: Any) -> DataLoader[Any]:
    """Return a DataLoader with the attributes of another one, as Accelerate does."""
    names = ("num_workers", "collate_fn", "multiprocessing_context", "generator")
    options = {name: getattr(source, name, None) for name in names}
    return DataLoader(source.dataset, batch_sampler=source.batch_sampler, **options)


def rows() -> Any:
    return read_rows(loader(), {HostEmbedding(12, 1, name="t"): lambda x: x[0]}, device="cpu")


FEEDERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "wrap_loader": (lambda: wrap_loader(loader(), device="cpu"), errors.ArgumentError, "wrap the"),
    "read_rows": (rows, errors.ArgumentError, "wrap the result"),
    "Feeder": (lambda: Feeder(X, batch_size=2, device="cpu"), AttributeError, "load_state_dict"),
    "wrap_dataset": (
        lambda: wrap_dataset(TensorDataset(X), batch_size=2, device="cpu"),
        AttributeError,
        "load_state_dict",
    ),
}


@pytest.mark.parametrize(("make", "kind", "advice"), FEEDERS.values(), ids=FEEDERS)
def test_no_loader_is_made_of_the_parts_of_a_feeder(
    make: Callable[[], Any], kind: type[Exception], advice: str
) -> None:
    assert len(list(rebuilt(loader()))) == 6
    with make() as feeder:
        with pytest.raises(kind, match=advice):
            rebuilt(feeder)
        with pytest.raises(AttributeError, match="no_such_name"):
            feeder.no_such_name  # noqa: B018


def test_accelerate_skips_batches_before_a_loader_is_wrapped() -> None:
    accelerate = pytest.importorskip("accelerate")
    with wrap_loader(loader(), device="cpu") as feeder, pytest.raises(errors.ArgumentError):
        accelerate.skip_first_batches(feeder, 2)
    skipping = accelerate.skip_first_batches(loader(), 2)
    with wrap_loader(skipping, device="cpu") as feeder:
        assert [float(x[0]) for (x,) in feeder] == [4, 6, 8, 10]
