"""ZarrStore: rows of Zarr arrays, bit for bit; arrays that cannot be served."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed import Feeder, RaggedStore, ZarrStore, errors
from pinfeed.stores.raw_chunks import ZarrChunks
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ReadOnlyStoreTests

zarr = pytest.importorskip("zarr")

X = np.arange(1200, dtype=np.float32).reshape(200, 6)

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})


def written(store: Any, array: np.ndarray, chunk_rows: int, **options: Any) -> Any:
    """Write an array and return it."""
    made = zarr.create_array(
        store,
        shape=array.shape,
        dtype=array.dtype,
        chunks=(chunk_rows, *array.shape[1:]),
        **options,
    )
    made[...] = array
    return made


def gathered(store: ZarrStore, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


class TestChunks(ReadOnlyStoreTests):
    row_shapes = ((), (3, 5))

    @pytest.fixture(params=sorted(set(DTYPES) - {"bfloat16"}))
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return DTYPES[request.param]

    def make(self, array: np.ndarray, tmp_path: Path) -> ZarrStore:
        return ZarrStore(written({}, array, 4, compressors=None))


@pytest.mark.parametrize(
    "options", [{}, {"shards": (50, 6)}, {"zarr_format": 2}, {"order": "F", "zarr_format": 2}]
)
def test_formats_by_path(tmp_path: Path, options: dict[str, Any]) -> None:
    written(str(tmp_path / "x.zarr"), X, 10, **options)
    store = ZarrStore(tmp_path / "x.zarr")
    assert store.chunk_rows == (50 if "shards" in options else 10)
    np.testing.assert_array_equal(gathered(store, [199, 0, 3, 3]), X[[199, 0, 3, 3]])
    np.testing.assert_array_equal(gathered(store, range(200)), X)
    store.close()
    with pytest.raises(errors.ClosedError, match="open it again"):
        gathered(store, [1])


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_the_other_byte_order(zarr_format: int) -> None:
    store = ZarrStore(written({}, X.astype(">f4"), 7, zarr_format=zarr_format))
    assert store.dtype == np.dtype(np.float32)
    np.testing.assert_array_equal(gathered(store, [199, 0, 3]), X[[199, 0, 3]])


def test_unwritten_rows_have_the_fill_value() -> None:
    array = zarr.create_array({}, shape=(10, 3), chunks=(2, 2), dtype="f4", fill_value=7)
    array[2:4] = 1
    np.testing.assert_array_equal(gathered(ZarrStore(array), range(10)), array[:])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_other_processes_open_the_path_again(tmp_path: Path) -> None:
    written(str(tmp_path / "x.zarr"), X, 10)
    store = ZarrStore(tmp_path / "x.zarr")
    copied = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(gathered(copied, [3, 199]), X[[3, 199]])
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(gathered(store, [3, 199]), X[[3, 199]]) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(TypeError, match="give ZarrStore the path"):
        pickle.dumps(ZarrStore(zarr.open(tmp_path / "x.zarr", mode="r")))
    state = pickle.dumps(store)
    written(str(tmp_path / "x.zarr"), X[:100], 10, overwrite=True)
    with pytest.raises(errors.StoreError, match="was replaced, and has other rows"):
        gathered(pickle.loads(state), [3])


def test_damaged_chunks(tmp_path: Path) -> None:
    written(str(tmp_path / "x.zarr"), X, 50)
    (tmp_path / "x.zarr" / "c" / "1" / "0").write_bytes(b"\xff" * 100)
    store = ZarrStore(tmp_path / "x.zarr")
    with pytest.raises(errors.ReadError, match=r"rows \[50, 100\) cannot be read"):
        gathered(store, [60])
    np.testing.assert_array_equal(gathered(store, [10]), X[[10]])


def test_an_open_array_is_not_pickled() -> None:
    with (
        ZarrStore(written({}, X, 50)) as store,
        pytest.raises(TypeError, match="give ZarrStore the path"),
    ):
        pickle.dumps(store)


def test_the_name_of_the_array(tmp_path: Path) -> None:
    group = zarr.create_group(str(tmp_path / "g.zarr"))
    group.create_array("x", data=X)
    group.create_group("inner").create_array("y", data=X)
    store = ZarrStore(tmp_path / "g.zarr", "inner/y")
    assert repr(store) == "ZarrStore(g.zarr/inner/y)"
    with pytest.raises(
        errors.StoreError, match=r"is a Zarr group; expected one of its arrays: 'x'"
    ):
        ZarrStore(tmp_path / "g.zarr")
    with pytest.raises(errors.StoreError, match="zarr cannot open it"):
        ZarrStore(tmp_path / "g.zarr", "z")
    with pytest.raises(errors.ArgumentError, match="leave name out"):
        ZarrStore(group["x"], "x")
    with pytest.raises(errors.StoreError, match=r"give a dict of its arrays, dict\(group.arrays"):
        Feeder(group, batch_size=1, device="cpu")
    with Feeder(dict(group.arrays()), batch_size=200, device="cpu") as feeder:
        np.testing.assert_array_equal(next(iter(feeder))["x"].numpy(), X)


def test_sources_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dates = zarr.create_array({}, shape=(3,), dtype="datetime64[s]", zarr_format=2)
    with pytest.raises(errors.StoreError, match="dates: convert"):
        Feeder(dates, batch_size=1, device="cpu")
    with pytest.raises(errors.StoreError, match="has no rows"):
        ZarrStore(zarr.create_array({}, shape=(), dtype="f4"))
    with pytest.raises(errors.StoreError, match="has no rows"):
        ZarrStore(zarr.create_array({}, shape=(0, 3), dtype="f4", chunks=(1, 3)))
    with pytest.raises(errors.FileMissing, match="no such Zarr array"):
        ZarrStore(tmp_path / "x.zarr")
    (tmp_path / "x.zarr").mkdir()
    with pytest.raises(errors.StoreError, match="zarr cannot open it"):
        ZarrStore(tmp_path / "x.zarr")
    with pytest.raises(errors.ArgumentError, match="got int; expected a path"):
        ZarrStore(3)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(errors.MissingDependency, match=r'pip install "zarr>=3\.1"'):
        ZarrStore(tmp_path / "x.zarr")


def test_a_gather_during_close_does_not_open_the_array_again(
    tmp_path: Path,
) -> None:
    written(str(tmp_path / "x.zarr"), X, 50)
    store = ZarrStore(tmp_path / "x.zarr")
    store.close()
    with pytest.raises(errors.ClosedError, match="open it again"):
        store._read_chunks(0, 50, np.empty((50, *X.shape[1:]), X.dtype))


def test_offsets_of_ragged_rows() -> None:
    offsets = np.array([0, 3, 3, 9])
    array = zarr.create_array({}, data=offsets, chunks=(2,))
    with RaggedStore(np.arange(9.0), array) as store:
        np.testing.assert_array_equal(store.offsets, offsets)


@pytest.mark.parametrize("is_raw", [True, False])
def test_large_shards_are_decoded_in_pieces(
    tmp_path: Path, is_raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_raw:
        monkeypatch.setattr(ZarrChunks, "of", lambda array: None)
    array = np.arange(6 << 20, dtype=np.uint8)
    path = str(tmp_path / "x.zarr")
    made = zarr.create_array(
        path, shape=array.shape, dtype="u1", chunks=(100_000,), shards=(6_000_000,)
    )
    made[...] = array
    store = ZarrStore(path)
    # zarr decodes ten chunks in a call, of about 1 MiB.
    assert store.chunk_rows == (100_000 if is_raw else 1_000_000)
    wanted = np.array([0, 4_099_999, 4_100_000, 5_999_999, 6_000_000, len(array) - 1])
    np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
    store.close()
