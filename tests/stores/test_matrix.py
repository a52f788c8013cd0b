"""Matrices of the columns of frames, tables, datasets and dicts: equal to those of numpy."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

import pinfeed
from pinfeed import Feeder, MatrixStore, NpyStore, errors
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ReadOnlyStoreTests

pl = pytest.importorskip("polars")

N = 60
RNG = np.random.default_rng(0)
NO_NULLS = {
    "float": RNG.normal(size=N),
    "half": RNG.normal(size=N).astype("float16"),
    "int": RNG.integers(-(2**40), 2**40, N),
    "byte": RNG.integers(0, 256, N, dtype="uint8"),
    "flag": RNG.integers(2, size=N).astype(bool),
}
IS_NULL = RNG.random(N) < 0.3


def matrix(columns: dict[str, np.ndarray], dtype: Any) -> np.ndarray:
    return np.stack([values.astype(dtype) for values in columns.values()], 1)


def filled(missing: float, dtype: Any) -> np.ndarray:
    """Return the matrix of columns of which ``IS_NULL`` are missing."""
    found = matrix(NO_NULLS, dtype)
    found[IS_NULL] = missing
    return found


def gathered(store: pinfeed.Store, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


def same(found: np.ndarray, want: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    # numpy does not know the NaN of bfloat16.
    np.testing.assert_array_equal(found.astype(np.float64), want.astype(np.float64))


class TestDictOfArrays(ReadOnlyStoreTests):
    row_shapes = ((1,), (7,))

    def make(self, array: np.ndarray, tmp_path: Path) -> MatrixStore:
        # The columns are strided.
        return MatrixStore({number: array[:, number] for number in range(array.shape[1])})


class TestShuffledDataset(ReadOnlyStoreTests):
    row_shapes = ((3,),)

    @pytest.fixture(params=["int16", "float32", "bool"])
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return np.dtype(request.param)

    def make(self, array: np.ndarray, tmp_path: Path) -> MatrixStore:
        order = np.random.default_rng(0).permutation(len(array))
        stored = array[np.argsort(order)]
        table = pa.table({f"c{j}": pa.array(stored[:, j].copy()) for j in range(array.shape[1])})
        return MatrixStore(Dataset(table).select(order))


def arrow(with_nulls: bool) -> pa.Table:
    """Return a table of several chunks, which begin in the middle of their buffers."""
    mask = IS_NULL if with_nulls else np.zeros(N, bool)
    whole = pa.table({name: pa.array(values, mask=mask) for name, values in NO_NULLS.items()})
    return pa.concat_tables([whole[:7], whole[7:7], whole[7:50], whole[50:]])


def pandas(with_nulls: bool) -> pd.DataFrame:
    frame = pd.DataFrame(NO_NULLS)
    if not with_nulls:
        return frame
    masked = {"int": "Int64", "byte": "UInt8", "flag": "boolean"}
    frame = frame.astype(masked)
    frame.loc[IS_NULL] = pd.NA
    assert str(frame.dtypes["float"]) == "float64"
    return frame


SOURCES: dict[str, Callable[[bool], Any]] = {
    "pandas": pandas,
    "pandas of Arrow": lambda with_nulls: arrow(with_nulls).to_pandas(types_mapper=pd.ArrowDtype),
    "polars": lambda with_nulls: pl.from_arrow(arrow(with_nulls), rechunk=True),
    "polars in chunks": lambda with_nulls: pl.concat(
        [pl.from_arrow(arrow(with_nulls)[:9]), pl.from_arrow(arrow(with_nulls)[9:])], rechunk=False
    ),
    "table": arrow,
    "dataset": lambda with_nulls: Dataset(arrow(with_nulls)),
    "dataset as torch": lambda with_nulls: Dataset(arrow(with_nulls)).with_format("torch"),
    "dict of columns": lambda with_nulls: dict(
        zip(NO_NULLS, arrow(with_nulls).columns, strict=True)
    ),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_columns_of_a_source(make: Callable[[bool], Any], dtype: str) -> None:
    kind = DTYPES[dtype]
    rows = [N - 1, 0, 3, 3, 50, 7]
    store = MatrixStore(make(False), dtype=dtype)
    same(gathered(store, range(N)), matrix(NO_NULLS, kind))
    same(gathered(store, rows), matrix(NO_NULLS, kind)[rows])
    for missing in (math.nan, -2):
        store = MatrixStore(make(True), dtype=dtype, missing=missing)
        same(gathered(store, range(N)), filled(missing, kind))
        same(gathered(store, rows), filled(missing, kind)[rows])
    names = ["flag", "float"]
    store = MatrixStore(make(False), names, dtype=dtype)
    same(gathered(store, rows), matrix({name: NO_NULLS[name] for name in names}, kind)[rows])
    with pytest.raises(errors.StoreError, match=r"has \d+ missing values.*missing=0"):
        MatrixStore(make(True), dtype=dtype)


ORDERS = {
    "sequential": pinfeed.rows.sequential(),
    "shuffled": pinfeed.rows.shuffled(3),
    "block_shuffled": pinfeed.rows.block_shuffled(3, block_rows=1000, window_blocks=2),
}


@pytest.mark.parametrize("limit", [None, 9])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("depth", [0, 2])
def test_epochs(limit: int | None, order: str, depth: int) -> None:
    """The matrix is copied if that fits in the limit; the batches are the same."""
    array = np.random.default_rng(0).normal(size=(50_000, 20))
    table = pa.table({f"c{j}": pa.array(array[:, j].copy()) for j in range(20)})
    rows = ORDERS[order]
    config = pinfeed.Config(
        preferred_batch_size=500,
        cpu_memory_limit=None if limit is None else pinfeed.MiB(limit),
    )
    store = MatrixStore(table, dtype="float32")
    options = {"config": config, "rows": rows, "depth": depth, "device": "cpu"}
    with Feeder(store, **options) as feeder, Feeder(store, **options) as other:
        plan = " ".join(str(feeder.plan).split())
        assert ("converted into RAM" in plan) == (limit is None and order != "sequential")
        if limit is not None:
            assert feeder.plan.host_bytes <= pinfeed.MiB(limit)
            assert ("read ahead into buffers" in plan) == (order == "block_shuffled")
        batches = feeder.batches()
        for _ in range(30):
            batch = next(batches)
            same(batch.data.numpy(), array[batch.rows].astype("float32"))
        other.load_state_dict(feeder.state_dict())
        for batch, again in zip(batches, list(other.batches()), strict=True):
            assert torch.equal(batch.data, again.data)
            same(again.data.numpy(), array[again.rows].astype("float32"))
        for batch in feeder.batches():
            same(batch.data.numpy(), array[batch.rows].astype("float32"))


def test_nan_is_missing_in_pandas_only() -> None:
    values = np.array([1.0, np.nan])
    assert gathered(MatrixStore(pd.DataFrame({"x": values}), missing=0), [0, 1]).tolist() == [
        [1],
        [0],
    ]
    with pytest.raises(errors.StoreError, match="'x' has 1 missing"):
        MatrixStore(pd.DataFrame({"x": values}))
    for source in ({"x": values}, pa.table({"x": values}), pl.DataFrame({"x": values})):
        same(gathered(MatrixStore(source, missing=0), [0, 1]), values[:, None])


def test_a_column_without_any_value() -> None:
    table = pa.table({"x": pa.nulls(3), "y": [1, 2, 3]})
    found = gathered(MatrixStore(table, dtype="float32", missing=math.nan), [2, 0])
    same(found, np.array([[np.nan, 3], [np.nan, 1]], "float32"))
    assert MatrixStore(table, ["x"], missing=5).dtype == np.float64


def test_the_smallest_dtype_that_holds_all_columns() -> None:
    table = pa.table({name: pa.array(values) for name, values in NO_NULLS.items()})
    for names, dtype in (
        (["byte"], "uint8"),
        (["byte", "half"], "float16"),
        (["byte", "int"], "int64"),
        (["flag"], "bool"),
        (["half", "int"], "float64"),
    ):
        assert MatrixStore(table, names).dtype == np.dtype(dtype)


def test_sources_in_a_dict(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", NO_NULLS["int"])
    given = NpyStore(tmp_path / "x.npy")
    source = {
        "path": tmp_path / "x.npy",
        "store": given,
        "tensor": torch.from_numpy(NO_NULLS["float"]),
    }
    want = np.stack([NO_NULLS["int"], NO_NULLS["int"], NO_NULLS["float"]], 1)
    with MatrixStore(source) as store:
        same(gathered(store, range(N)), want)
    with pytest.raises(errors.ClosedError):
        gathered(store, [0])
    # The store was given, so it stays open.
    same(gathered(given, range(N)), NO_NULLS["int"])


def test_a_matrix_is_pickled_with_its_table() -> None:
    store = MatrixStore(arrow(True), missing=0, dtype="float32")
    same(gathered(pickle.loads(pickle.dumps(store)), [3, 50]), gathered(store, [3, 50]))


TEXT = {"x": ["a", "b"], "y": [1, 2]}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "pandas text": (pd.DataFrame(TEXT), {}, r"pandas.factorize\(df\[name\]\)"),
    "polars text": (pl.DataFrame(TEXT), {}, "number the texts"),
    "Arrow text": (pa.table(TEXT), {}, "'x'.*: a column of string; expected numbers"),
    "Arrow lists": (pa.table({"x": [[1], [2]]}), {}, "expected one number in each row"),
    "polars lists": (pl.DataFrame({"x": [[1], [2]]}), {}, "expected one number in each row"),
    "dict of rows": ({"x": np.zeros((3, 2))}, {}, r"rows of shape \(2,\); expected one number"),
    "unknown": (pd.DataFrame(TEXT), {"columns": ["z"]}, "no column 'z'; expected one of 'x', 'y'"),
    "lengths": ({"x": np.zeros(3), "y": np.zeros(2)}, {}, "'x' has 3, 'y' 2; expected equal"),
    "no rows": (pd.DataFrame({"x": np.zeros(0)}), {}, "has no rows"),
    "no columns": ({}, {}, "has no columns"),
    "path": ("x.parquet", {}, r"give ParquetStore\(path, columns=\[...\]\)"),
    "array": (np.zeros((3, 2)), {}, "got ndarray; expected a pandas.*straight to the Feeder"),
    "integers": (pa.table({"x": [1]}), {"dtype": "int8"}, "'x' of int64 does not fit"),
    "transform": (Dataset(pa.table({"x": [1]})).with_transform(dict), {}, "reset_format"),
}


@pytest.mark.parametrize(("source", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_sources_that_are_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.StoreError, match=message):
        MatrixStore(source, **options)


def test_nothing_is_written() -> None:
    with pytest.raises(errors.WriteBackError, match="read-only"):
        MatrixStore({"x": np.zeros(3)}).scatter(np.array([0]), np.zeros((1, 1)))
