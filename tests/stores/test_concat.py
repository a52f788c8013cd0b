"""concat(): the rows of several sources, one after the other."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pinfeed
from pinfeed.errors import PinfeedError, StoreError
from pinfeed.rows import block_shuffled, mixed, shuffled
from pinfeed.stores.array import ConcatStore
from pinfeed.testing.suites import ReadOnlyStoreTests


class TestConcatOfArrays(ReadOnlyStoreTests):
    def make(self, array: Any, tmp_path: Path) -> Any:
        # A part of the first array is a view, so its rows have gaps.
        third = len(array) // 3
        parts = [array[:third], array[third : third + 1], array[third + 1 :]]
        return pinfeed.concat(parts)


class TestConcatOfFilesAndArrays(ReadOnlyStoreTests):
    def make(self, array: Any, tmp_path: Path) -> Any:
        third = len(array) // 3
        store = pinfeed.NpyStore.create(tmp_path / "a.npy", array[:third].shape, array.dtype)
        store.scatter(np.arange(third), array[:third].copy())
        store.close()
        file = pinfeed.NpyStore(tmp_path / "a.npy", dtype=array.dtype)
        return ConcatStore([file, pinfeed.ArrayStore(array[third:])], owned=[file])


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.chdir(tmp_path)
    first = np.arange(140, dtype="float32").reshape(70, 2)
    second = np.arange(1000, 1060, dtype="float32").reshape(30, 2)
    np.save("first.npy", first)
    np.save("second.npy", second)
    return first, second


def rows_of(source: Any, **options: Any) -> Any:
    """Return all rows of an epoch."""
    with pinfeed.Feeder(source, batch_size=16, device="cpu", **options) as feeder:
        return np.concatenate([batch.numpy() for batch in feeder])


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("rows", [None, shuffled(1), block_shuffled(1, block_rows=8)], ids=repr)
def test_all_kinds_of_parts_give_the_rows_of_one_array(
    arrays: tuple[Any, Any], rows: Any, depth: int
) -> None:
    first, second = arrays
    expected = rows_of(np.concatenate(arrays), rows=rows, depth=depth)
    files = pinfeed.concat(["first.npy", "second.npy"])
    with files:
        assert isinstance(files, pinfeed.NpyStore)
        assert np.array_equal(rows_of(files, rows=rows, depth=depth), expected)
    for parts in ([first, second], ["first.npy", second], [first, "second.npy"]):
        store = pinfeed.concat(parts)
        assert isinstance(store, ConcatStore)
        assert np.array_equal(rows_of(store, rows=rows, depth=depth), expected)
        store.close()


@pytest.mark.usefixtures("without_native")
def test_arrays_are_joined_without_compiled_functions(arrays: tuple[Any, Any]) -> None:
    expected = rows_of(np.concatenate(arrays), rows=shuffled(1))
    assert np.array_equal(rows_of(pinfeed.concat(arrays), rows=shuffled(1)), expected)


def test_structures_are_joined_part_by_part(arrays: tuple[Any, Any]) -> None:
    first, second = arrays
    sources = {
        "a": {"file": "first.npy", "array": first},
        "b": {"file": "second.npy", "array": second},
    }
    joined = pinfeed.concat(sources)
    order = mixed({"a": first, "b": second}, {"a": 1, "b": 1})
    with pinfeed.Feeder(joined, batch_size=8, rows=order, device="cpu") as feeder:
        for batch in feeder:
            assert (batch["file"] == batch["array"]).all()
            assert (batch["file"][:, 0] >= 1000).sum() == len(batch["file"]) // 2
    joined["file"].close()


def test_source_ids_are_parts_of_batches(arrays: tuple[Any, Any]) -> None:
    sources = dict(zip("ab", arrays, strict=True))
    parts = {"x": pinfeed.concat(sources), "id": pinfeed.source_ids(sources)}
    order = mixed(sources, {"a": 1, "b": 3}, randomly=True)
    with pinfeed.Feeder(parts, batch_size=8, rows=order, device="cpu") as feeder:
        for batch in feeder.batches():
            assert batch.data["id"].tolist() == order.source_of(batch.rows).tolist()
            assert ((batch.data["x"][:, 0] >= 1000) == (batch.data["id"] == 1)).all()


def test_a_mixture_resumes_in_a_new_feeder(arrays: tuple[Any, Any]) -> None:
    def feeder() -> Any:
        order = mixed(dict(zip("ab", arrays, strict=True)), {"a": 0.7, "b": 0.3}, until=48)
        return pinfeed.Feeder(pinfeed.concat(arrays), batch_size=8, rows=order, device="cpu")

    with feeder() as whole:
        expected = [batch for _ in range(2) for batch in whole]
    for stop in range(1, 12):
        with feeder() as one:
            taken = 0
            for _ in range(2):
                for _ in one:
                    taken += 1
                    if taken == stop:
                        state = one.state_dict()
                        break
                if taken == stop:
                    break
        with feeder() as other:
            other.load_state_dict(state)
            left = list(other)
            if stop < 6:
                left += list(other)
        assert len(left) == len(expected) - stop
        for batch, same in zip(left, expected[stop:], strict=True):
            assert (batch == same).all()


def test_ragged_rows_are_joined() -> None:
    first = pinfeed.RaggedStore(np.arange(10), [0, 3, 3, 10])
    second = pinfeed.RaggedStore(np.arange(100, 105), [0, 4, 5])
    store = pinfeed.concat([first, second])
    items, offsets = store.read(np.array([3, 0, 1, 4, 2]))
    assert items.tolist() == [100, 101, 102, 103, 0, 1, 2, 104, *range(3, 10)]
    assert offsets.tolist() == [0, 4, 7, 7, 8, 15]


def test_row_datasets_read_joined_rows(arrays: tuple[Any, Any]) -> None:
    dataset = pinfeed.RowDataset(pinfeed.concat(arrays))
    wanted = [99, 0, 69, 70]
    assert np.array_equal(dataset[wanted].numpy(), np.concatenate(arrays)[wanted])


def test_joined_rows_can_be_pickled(arrays: tuple[Any, Any]) -> None:
    store = pickle.loads(pickle.dumps(pinfeed.concat(["first.npy", arrays[1]])))
    assert np.array_equal(rows_of(store), np.concatenate(arrays))
    store.close()


def test_writes_to_a_part_are_refused_while_it_is_read(arrays: tuple[Any, Any]) -> None:
    first, second = arrays
    source = {"joined": pinfeed.concat([first[:50], second]), "table": np.zeros((80, 2), "f4")}
    source["table"][:70] = first
    alias = {"joined": pinfeed.concat([source["table"][:50], second]), "table": source["table"]}
    with pinfeed.Feeder(alias, batch_size=8, device="cpu") as feeder:
        for batch in feeder.batches():
            with pytest.raises(pinfeed.WriteBackError):
                batch.write_back({"joined": None, "table": batch.data["table"]})
            break


REFUSED: list[tuple[str, Any]] = [
    ("at least one source", lambda a, b: pinfeed.concat([])),
    ("at least one source", lambda a, b: pinfeed.concat(a)),
    ("expected equal shapes", lambda a, b: pinfeed.concat([a, b[:, :1]])),
    ("expected equal shapes", lambda a, b: pinfeed.concat([a, b.astype("f8")])),
    ("same structure", lambda a, b: pinfeed.concat([{"x": a}, {"y": b}])),
    ("same structure", lambda a, b: pinfeed.concat([{"x": a}, b])),
    ("missing.npy", lambda a, b: pinfeed.concat([a, "missing.npy"])),
    (
        "not a RaggedStore",
        lambda a, b: pinfeed.concat([pinfeed.RaggedStore(np.arange(3), [0, 3]), a]),
    ),
    (
        "in no row",
        lambda a, b: pinfeed.concat([pinfeed.RaggedStore(np.arange(3), [0, 2])] * 2),
    ),
    ("open the file", lambda a, b: pinfeed.source_ids(["first.npy", b])),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_sources_that_do_not_match_are_refused(
    arrays: tuple[Any, Any], message: str, call: Any
) -> None:
    with pytest.raises(PinfeedError, match=message):
        call(*arrays)


def test_an_unequal_dtype_is_a_store_error(arrays: tuple[Any, Any]) -> None:
    with pytest.raises(StoreError, match="float64"):
        pinfeed.concat([arrays[0], arrays[1].astype("f8")])
