"""wrap_dataset() and wrap_loader(threads=): batches as a DataLoader makes them from the samples."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.loaders import DEVICES, all_same
from torch.utils.data import DataLoader, Subset

from pinfeed import ArgumentError, wrap_dataset, wrap_loader


class Point(NamedTuple):
    x: Any
    y: Any


MIXED: dict[str, list[Any]] = {
    "int and float": [1, 2, 55.5, 3],
    "float and int": [55.5, 1, 2, 3],
    "bool and int": [True, 3, False, 2],
    "numpy number and int": [np.int64(1), 2, np.int64(3), 4],
    "int and numpy number": [1, np.float32(2.5), 3, 4],
    "float32 and float64": [np.ones(2, "f4"), np.full(2, 0.1), np.ones(2, "f4"), np.ones(2, "f4")],
    "array and tensor": [np.ones(2, "f4"), torch.zeros(2), np.ones(2, "f4"), np.ones(2, "f4")],
    "tensors": [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2), torch.ones(2)],
    "array without axes": [np.asarray(1), np.asarray(2.5), np.asarray(3), np.asarray(4)],
    "other keys": [{"a": 1}, {"a": 2, "b": 3}, {"a": 4}, {"c": 1, "a": 5}],
    "nested": [(1, {"s": "a", "x": 1}), (2, {"s": "b", "x": 0.5})] * 2,
    "named tuples": [Point(1, 2), Point(0.5, 2), Point(1, 2), Point(1, 2)],
    "bfloat16": [
        (torch.ones(2, dtype=torch.bfloat16), 1),
        (torch.zeros(2, dtype=torch.bfloat16), 0.5),
    ]
    * 2,
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_samples_are_converted_as_by_a_data_loader(name: str, depth: int) -> None:
    samples = MIXED[name] + MIXED[name][:2]
    loader = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    for device in DEVICES.values():
        given: dict[str, Any] = {"threads": 2, "depth": depth, "device": device()}
        with wrap_dataset(samples, batch_size=4, **given) as feeder:
            assert all_same(feeder, loader)
        with wrap_loader(loader, **given) as feeder:
            assert all_same(feeder, loader)


@pytest.mark.parametrize(
    "samples",
    [
        [np.zeros(2), np.zeros(3)],
        [{"a": 1, "b": 2}, {"a": 1}],
        [(1, 2), (1, 2, 3)],
        [1, "one"],
    ],
    ids=["shapes", "a missing key", "lengths", "text"],
)
def test_samples_that_a_data_loader_refuses_are_refused(samples: list[Any]) -> None:
    with pytest.raises(ArgumentError, match="as of another sample of the batch"):
        list(wrap_dataset(samples, batch_size=2, device="cpu"))
    with wrap_dataset(samples, batch_size=2, device="cpu", on_error="skip") as feeder:
        assert len(list(feeder)) == 1
        assert [index for _, index, _ in feeder.skipped] == [1]


def test_a_loop_continues_after_an_error_with_mixed_samples() -> None:
    samples = [1, 2.5, 3, 4, 5, None, 7, 8.5]
    with wrap_dataset(samples, batch_size=2, device="cpu", on_error="next") as feeder:
        batches = iter(feeder)
        assert [next(batches).tolist() for _ in range(2)] == [[1, 2.5], [3, 4]]
        with pytest.raises(ArgumentError, match="NoneType"):
            next(batches)
        assert next(batches).tolist() == [7, 8.5]


class Together(torch.utils.data.Dataset[Any]):
    """Data set that makes the samples of a batch in one call, and notes these calls."""

    def __init__(self, n: int = 12) -> None:
        self.calls: list[list[int]] = []
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(list(indices))
        if 7 in indices:
            raise ValueError("seven is bad")
        most = max(indices)
        return [(torch.rand(2), i, most) for i in indices]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_data_set_makes_each_batch_in_one_call(threads: int, depth: int) -> None:
    loops = []
    for _ in range(2):
        dataset = Together(7)
        # A continuous loop would also make batches of the next epoch.
        with wrap_dataset(
            dataset,
            batch_size=3,
            threads=threads,
            depth=depth,
            seed=5,
            device="cpu",
            continuous=False,
        ) as feeder:
            loops.append(list(feeder))
        # The first call checks the first sample.
        assert sorted(dataset.calls[1:4]) == [[0, 1, 2], [3, 4, 5], [6]]
    for (x, i, most), (other, *_), indices in zip(*loops, ([0, 1, 2], [3, 4, 5], [6]), strict=True):
        assert i.tolist() == indices
        assert most.tolist() == [max(indices)] * len(indices)
        # torch.rand draws from a generator of the batch.
        assert torch.equal(x, other)
        assert len(x.unique()) == x.numel()


def test_items_of_one_call_are_transformed_one_by_one() -> None:
    def transform(item: Any, generator: torch.Generator) -> torch.Tensor:
        return item[1] + torch.rand((), generator=generator)

    found = []
    for size in (3, 7):
        with wrap_dataset(Together(7), transform, batch_size=size, device="cpu") as feeder:
            found.append(torch.cat(list(feeder)))
    assert torch.equal(*found)
    assert found[0].long().tolist() == list(range(7))


def test_a_subset_of_such_a_data_set_is_read_in_whole_batches() -> None:
    dataset = Together()
    subset = Subset(dataset, [5, 1, 3, 2])
    with wrap_dataset(subset, batch_size=4, depth=0, device="cpu") as feeder:
        ((_, i, _),) = feeder
    assert i.tolist() == [5, 1, 3, 2]
    assert dataset.calls == [[5], [5, 1, 3, 2]]


def test_the_error_of_a_whole_batch_says_which_samples_it_has() -> None:
    with (
        wrap_dataset(Together(), batch_size=3, depth=0, device="cpu") as feeder,
        pytest.raises(ValueError, match="seven is bad") as info,
    ):
        list(feeder)
    assert info.value.__notes__ == ["in dataset.__getitems__([6, 7, 8]), epoch 0"]


def test_bad_samples_of_such_a_data_set_are_skipped_alone() -> None:
    with wrap_dataset(Together(), batch_size=3, on_error="skip", threads=2, device="cpu") as feeder:
        indices = [i.tolist() for _, i, _ in feeder]
        assert indices == [[0, 1, 2], [3, 4, 5], [6, 8], [9, 10, 11]]
        assert [index for _, index, _ in feeder.skipped] == [7]


def test_a_call_returns_an_item_for_each_index() -> None:
    class Short(Together):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [0]

    with (
        wrap_dataset(Short(), batch_size=4, device="cpu") as feeder,
        pytest.raises(ArgumentError, match="returned 1 items for 4 indices"),
    ):
        list(feeder)
