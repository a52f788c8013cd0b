"""Bad values for ``write_back``: they are refused before any row is changed."""

import dataclasses
import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from pinfeed import (
    ArrayStore,
    Feeder,
    HDF5Store,
    NpyStore,
    RaggedStore,
    errors,
)
from pinfeed.stores.store import checked_gather, checked_scatter


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(2, 3), r"shape is \(2, 3\), expected \(4, 3\)"),
        (
            torch.zeros(4, 3, dtype=torch.float64),
            r"dtype is float64, expected float32; convert with \.to\(torch\.float32\)",
        ),
        (torch.zeros(4, 3, device="meta"), "device is meta, expected cpu"),
        (
            np.zeros((4, 3), np.float32),
            (
                r"got ndarray; expected .* dtype float32 on cpu; "
                r"give torch\.as_tensor\(array, device='cpu'\)"
            ),
        ),
        (
            torch.eye(4, 3).to_sparse(),
            r"got Tensor of layout torch\.sparse_coo; expected a dense tensor of shape \(4, 3\)",
        ),
        (
            torch.nested.as_nested_tensor([torch.zeros(3)] * 4, layout=torch.jagged),
            "got NestedTensor of layout torch.jagged; expected a dense",
        ),
        (
            5,
            (
                r"write_back of source: got int; "
                r"expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu"
            ),
        ),
        (
            (torch.zeros(4, 3),),
            (
                r"write_back of a tuple; "
                r"expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu$"
            ),
        ),
        (
            {"x": torch.zeros(4, 3)},
            (
                r"write_back of a dict; "
                r"expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu$"
            ),
        ),
        (
            None,
            (
                r"write_back of None; "
                r"expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu; "
                "do not call it for unchanged rows"
            ),
        ),
    ],
    ids=str,
)
def test_values_that_do_not_fit(x: np.ndarray, values: Any, message: str) -> None:
    kept = x.copy()
    with Feeder(x, batch_size=4, device="cpu") as feeder:
        loop = feeder.batches()
        batch = next(loop)
        with pytest.raises(errors.WriteBackError, match=message):
            batch.write_back(values)
        # Nothing was written, so the batch can still be written back.
        batch.write_back(batch.data)
        del loop
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"x": None},
            (
                r"write_back of a dict without \['y'\]; "
                r"expected a dense tensor of shape \(4, 3\) .* for source\['x'\] and"
            ),
        ),
        (
            {"x": None, "z": None},
            r"a dict without \['y'\] and with \['z'\], which the source does not have; expected",
        ),
        (
            (None, None),
            (
                r"a tuple without \['x'\], \['y'\] and with \[0\], \[1\], "
                "which the source does not have; expected"
            ),
        ),
        (torch.zeros(4, 3), r"write_back of a Tensor without \['x'\], \['y'\]; expected"),
        (
            None,
            (
                r"write_back of None; "
                r"expected .*float32 on cpu for source\['x'\] and a dense tensor of shape \(4,\) "
                "and dtype int64"
            ),
        ),
        (
            {"x": None, "y": torch.zeros(4)},
            r"source\['y'\]: dtype is float32, expected int64; convert with \.to\(torch\.int64\)",
        ),
    ],
    ids=str,
)
def test_values_of_another_structure(x: np.ndarray, values: Any, message: str) -> None:
    with Feeder({"x": x, "y": np.zeros(100, np.int64)}, batch_size=4, device="cpu") as feeder:
        batch = next(loop := feeder.batches())
        with pytest.raises(errors.WriteBackError, match=message):
            batch.write_back(values)
        # Nothing was written, so the batch can still be written back.
        batch.write_back({"x": batch.data["x"] + 1, "y": None})
        del loop
    assert x[3, 2] == 12


def test_a_list_is_written_in_the_place_of_a_tuple(x: np.ndarray) -> None:
    with Feeder((x, np.zeros(100)), batch_size=50, device="cpu") as feeder:
        for batch in feeder.batches():
            batch.write_back([batch.data[0] + 1, None])
    assert x[99, 2] == 300


def test_write_back_to_a_read_only_store(x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    x.flags.writeable = False
    for source in (x, tmp_path / "x.npy", NpyStore(tmp_path / "x.npy")):
        with Feeder(source, batch_size=4) as feeder:
            loop = feeder.batches()
            batch = next(loop)
            with pytest.raises(
                errors.WriteBackError,
                match=r'read-only; .* opened with NpyStore\(path, mode="r\+"\)',
            ):
                batch.write_back(batch.data)
            del loop


def test_write_back_of_repeated_rows(x: np.ndarray) -> None:
    kept = x.copy()
    with Feeder(x, rows=[[3, 5, 3]]) as feeder:
        loop = feeder.batches()
        batch = next(loop)
        with pytest.raises(errors.WriteBackError, match="row 3 appears more than once"):
            batch.write_back(batch.data + 1)
        del loop
    np.testing.assert_array_equal(x, kept)


def test_write_back_too_late_or_twice(x: np.ndarray) -> None:
    with Feeder(x, batch_size=4) as feeder:
        loop = feeder.batches()
        one, two = next(loop), next(loop)
        with pytest.raises(errors.WriteBackError, match="after the loop requested the next batch"):
            one.write_back(one.data)
        two.write_back(two.data)
        with pytest.raises(errors.WriteBackError, match="called twice for this batch"):
            two.write_back(two.data)
        del loop
        with pytest.raises(errors.WriteBackError, match="after the loop"):
            two.write_back(two.data)


def test_write_back_to_rows_that_are_given_twice(x: np.ndarray, tmp_path: Path) -> None:
    """The other source, which was prefetched, would not see a write to the first one."""
    np.save(tmp_path / "x.npy", x)
    file = NpyStore(tmp_path / "x.npy", mode="r+")
    for source in ((x, x), (x, ArrayStore(x[:, 1:])), (file, NpyStore(tmp_path / "x.npy"))):
        with Feeder(source, batch_size=4) as feeder:
            loop = feeder.batches()
            batch = next(loop)
            with pytest.raises(
                errors.WriteBackError, match=r"source\[0\] and source\[1\] have rows in common"
            ):
                batch.write_back((batch.data[0], None))
            del loop
    with Feeder((x[:, :1], x[:, 1:]), batch_size=4) as feeder:
        # Columns of one array have no memory in common.
        for batch in feeder.batches():
            batch.write_back((batch.data[0] + 1, batch.data[1]))
    file.close()
    with pytest.raises(errors.ArgumentError, match="occurs twice"):
        NpyStore([tmp_path / "x.npy"] * 2, mode="r+")


@dataclasses.dataclass
class Own:
    """A store of the user, which has no hash because it is compared by its values."""

    array: np.ndarray
    writable: bool = True
    resident_bytes: int = 0

    @property
    def n_rows(self) -> int:
        return len(self.array)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        out[...] = self.array[checked_gather(self, rows, out)]

    def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
        self.array[checked_scatter(self, rows, values)] = values

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_write_back_to_stores_without_a_hash(x: np.ndarray) -> None:
    one, other = x.copy(), x.copy()
    with Feeder((Own(one), Own(other)), batch_size=4, device="cpu") as feeder:
        for batch in feeder.batches():
            batch.write_back((batch.data[0] + 1, batch.data[1] + 2))
    assert np.array_equal(one, x + 1)
    assert np.array_equal(other, x + 2)


def test_stores_that_were_written_are_freed(x: np.ndarray) -> None:
    class Owned(np.ndarray):
        """An array that refers to its store."""

    stores = [ArrayStore(x.copy().view(Owned)) for _ in range(2)]
    for store in stores:
        store.array.store = store
    with Feeder(tuple(stores), batch_size=4, device="cpu") as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
    found = weakref.ref(store)
    del store, stores, feeder, batch
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("kind", ["windows", "windows of a map", "rows", "HDF5", "Arrow"])
def test_write_back_to_rows_that_another_source_reads_otherwise(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    x = np.arange(60, dtype=np.float32)
    np.save(path, x)
    mapped = np.load(path, mmap_mode="r+")
    written: Any = mapped[:56]
    other: Any = NpyStore.windows(path, length=5)
    if kind == "windows of a map":
        other = np.lib.stride_tricks.sliding_window_view(mapped, 5)
    elif kind == "rows":
        other = RaggedStore(path, np.arange(57))
    elif kind == "HDF5":
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["x"] = x
            offset = file["x"].id.get_offset()
        written = NpyStore.raw(
            tmp_path / "x.h5", shape=(60,), dtype="float32", offset=offset, mode="r+"
        )
        other = HDF5Store(tmp_path / "x.h5", "x")
    elif kind == "Arrow":
        written = x
        other = pyarrow.array(x)
    with Feeder((written, other), batch_size=4, device="cpu") as feeder:
        loop = feeder.batches()
        batch = next(loop)
        with pytest.raises(errors.WriteBackError, match="have rows in common"):
            batch.write_back((batch.data[0], None))
        del loop
    for store in (written, other):
        if isinstance(store, (NpyStore, HDF5Store)):
            store.close()


def test_write_back_to_separate_parts_of_one_map(tmp_path: Path) -> None:
    """Parts of one map that have no bytes in common are separate sources."""
    np.save(tmp_path / "x.npy", np.zeros(8))
    x = np.load(tmp_path / "x.npy", mmap_mode="r+")
    with Feeder((x[:4], x[4:]), batch_size=2, device="cpu") as feeder:
        for batch in feeder.batches():
            batch.write_back((batch.data[0] + 1, batch.data[1] + 2))
    assert x.tolist() == [1.0] * 4 + [2.0] * 4


def test_write_back_of_a_dict_in_another_order(x: np.ndarray) -> None:
    y = x * 2
    with Feeder({"x": x, "y": y}, batch_size=50) as feeder:
        for batch in feeder.batches():
            batch.write_back({"y": batch.data["y"] + 1, "x": None})
    np.testing.assert_array_equal(y, x * 2 + 1)


class _Writing(IterableDataset[Any]):
    """Dataset that adds 1 to all rows of a source, and logs to a file."""

    def __init__(self, log: Path, source: Any) -> None:
        self._log = log
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        logging.getLogger("pinfeed").addHandler(logging.FileHandler(self._log))
        with Feeder(self._source, batch_size=2, device="cpu") as feeder:
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
                yield len(batch.rows)


@pytest.mark.parametrize(
    ("kind", "is_changed"),
    [("array", False), ("tensor", False), ("shared", True), ("memmap", True)],
)
def test_write_back_to_the_copy_of_a_worker_process_is_warned_of(
    kind: str, is_changed: bool, tmp_path: Path
) -> None:
    source: Any = np.zeros((4, 2)) if kind == "array" else torch.zeros(4, 2)
    if kind == "shared":
        source.share_memory_()
    elif kind == "memmap":
        source = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", shape=(4, 2))
    loader = DataLoader(
        _Writing(tmp_path / "log", source),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert list(loader) == [2, 2]
    assert bool((source == 1).all()) == is_changed
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) == (not is_changed)
    assert all(
        "changes that process's copy of an array, and the array of the main process stays unchanged"
        in line
        for line in said
    )


class Drawing(NamedTuple):
    shape: Any
    colour: Any


def test_a_field_may_have_the_name_of_an_attribute_of_tensors() -> None:
    shape = np.zeros((6, 2))
    colour = np.zeros((6, 3))
    with Feeder(Drawing(shape, colour), batch_size=3, device="cpu") as feeder:
        for batch in feeder.batches():
            batch.write_back(Drawing(batch.data.shape + 1, batch.data.colour + 2))
    assert (shape == 1).all()
    assert (colour == 2).all()
