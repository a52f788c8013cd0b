"""Frames of pandas and polars as sources: a dict of their columns, bit for bit, or refused."""

import decimal
import sys
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pinfeed import Feeder, errors

pl = pytest.importorskip("polars")

N = 50
VALUES = {
    "float": np.linspace(0, 1, N, dtype=np.float32),
    "int": np.arange(N, dtype=np.int16),
    "flag": np.arange(N) % 3 == 0,
    "big": np.arange(N, dtype=np.uint64) + 2**63,
}


def batches(source: Any, depth: int | None) -> list[Any]:
    with Feeder(source, batch_size=7, shuffle=True, depth=depth, device="cpu") as feeder:
        return [{name: x.clone() for name, x in batch.items()} for batch in feeder]


def assert_equal(source: Any, values: dict[Any, np.ndarray]) -> None:
    """Check that a source gives what a dict of arrays gives, with and without prefetching."""
    expected = batches(values, 0)
    for depth in (None, 0, 2):
        got = batches(source, depth)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert list(one) == list(other)
            for name in one:
                assert one[name].dtype == other[name].dtype
                np.testing.assert_array_equal(one[name].numpy(), other[name].numpy())


def test_a_pandas_frame() -> None:
    assert_equal(pd.DataFrame(VALUES), VALUES)
    # The columns of this frame are strided, and their names are numbers.
    square = np.arange(4.0 * N).reshape(N, 4)
    assert_equal(pd.DataFrame(square), {i: square[:, i].copy() for i in range(4)})


def test_pandas_columns_that_may_have_nulls() -> None:
    lists = np.arange(2 * N).reshape(N, 2)
    frame = pd.DataFrame(
        {
            "masked": pd.array(VALUES["int"], dtype="Int16"),
            "flag": pd.array(VALUES["flag"], dtype="boolean"),
            "arrow": pd.Series(VALUES["float"], dtype=pd.ArrowDtype(pa.float32())),
            "lists": pd.Series(lists.tolist(), dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
            "nan": np.where(VALUES["flag"], np.nan, 1.0),
        }
    )
    expected = {
        "masked": VALUES["int"],
        "flag": VALUES["flag"],
        "arrow": VALUES["float"],
        "lists": lists,
        "nan": frame["nan"].to_numpy().copy(),
    }
    assert_equal(frame, expected)


def test_a_polars_frame() -> None:
    lists = np.arange(2 * N).reshape(N, 2)
    frame = pl.DataFrame(VALUES).with_columns(
        lists=pl.Series(lists.tolist()),
        array=pl.Series(lists.tolist(), dtype=pl.Array(pl.Int64, 2)),
    )
    values = {**VALUES, "lists": lists, "array": lists}
    assert_equal(frame, values)
    # A column in several chunks is not joined.
    assert_equal(pl.concat([frame[:20], frame[20:]], rechunk=False), values)


def test_frames_within_a_structure() -> None:
    source = (pd.DataFrame(VALUES), {"x": VALUES["int"], "frame": pl.DataFrame(VALUES)})
    with Feeder(source, batch_size=N, device="cpu") as feeder:
        one, two = next(iter(feeder))
    for name, values in VALUES.items():
        np.testing.assert_array_equal(one[name].numpy(), values)
        np.testing.assert_array_equal(two["frame"][name].numpy(), values)


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_columns_are_read_only(kind: str) -> None:
    """A row that is written back to a copy of a column would be lost."""
    frame = pd.DataFrame(VALUES) if kind == "pandas" else pl.DataFrame(VALUES)
    with Feeder(frame, batch_size=7, device="cpu") as feeder:
        batch = next(feeder.batches())
        with pytest.raises(errors.WriteBackError):
            batch.write_back(batch.data)


def pandas_column(values: Any, **options: Any) -> pd.DataFrame:
    return pd.DataFrame({"x": pd.Series(values, **options)})


@pytest.mark.parametrize(
    ("frame", "hint"),
    [
        (pandas_column([1, None], dtype="Int64"), r"'x'\] has nulls.*fillna.*dropna"),
        (pandas_column([1, None], dtype=pd.ArrowDtype(pa.int64())), "has nulls.*fillna"),
        (pandas_column(["a", "b"]), r"pandas.factorize\(df\[name\]\)"),
        (pandas_column(["a", "b"], dtype="category"), r"df\[name\].cat.codes"),
        (pandas_column(pd.date_range("2020", periods=2)), r'df\[name\].astype\("int64"\)'),
        (pandas_column([[1], [1, 2]]), r"RaggedStore\(values, offsets\)"),
        (pandas_column([0, 1], dtype="Sparse[int]"), "sparse.to_dense"),
        (pandas_column(["2020-01-01"], dtype="period[D]"), r'astype\("int64"\)'),
        (pd.DataFrame(), "has no columns"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "columns have the same name: x, x"),
        (pd.DataFrame({"x": []}, dtype="f4"), "no rows"),
        (pl.DataFrame({"x": [1, None]}), r"has nulls.*fill_null.*drop_nulls"),
        (pl.DataFrame({"x": [[1], [1, 2]]}), r"RaggedStore\(values, offsets\)"),
        (pl.DataFrame({"x": [[1], [None]]}), "has nulls"),
        (pl.DataFrame({"x": ["a", "b"]}), "number the texts"),
        (pl.DataFrame({"x": ["a"]}, schema={"x": pl.Categorical}), r"df\[name\].to_physical\(\)"),
        (pl.DataFrame({"x": ["a"]}, schema={"x": pl.Enum(["a"])}), r"df\[name\].to_physical\(\)"),
        (pl.DataFrame({"x": [decimal.Decimal("1.5")]}), r"cast\(polars.Float64\)"),
        (pl.DataFrame({"x": pl.date_range(pl.date(2020, 1, 1), pl.date(2020, 1, 2), eager=True)}),
         r"df\[name\].to_physical\(\)"),
        (pl.DataFrame({"x": [{"a": 1}]}), r"df.unnest\(name\)"),
        (pl.DataFrame(), "has no columns"),
        (pl.DataFrame({"x": [1]}).lazy(), r"give frame.collect\(\)"),
    ],
    ids=lambda value: type(value).__module__ if not isinstance(value, str) else value,
)  # fmt: skip
def test_sources_that_cannot_be_served(frame: Any, hint: str) -> None:
    with pytest.raises(errors.StoreError, match=hint):
        Feeder(frame, batch_size=1, device="cpu")


def test_advice_gives_what_can_be_served() -> None:
    frame = pl.DataFrame({"x": ["b", "a", "b"]})
    numbers = frame.select(pl.col("x").cast(pl.Categorical).to_physical())
    with Feeder(numbers, batch_size=3, device="cpu") as feeder:
        first, second, third = next(iter(feeder))["x"].tolist()
    assert first == third != second


def test_lists_need_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pl.DataFrame({"x": [[1], [2]]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.MissingDependency, match="pyarrow is needed"):
        Feeder(frame, batch_size=1, device="cpu")
