"""HDF5Store: rows of HDF5 datasets, bit for bit; files and types that cannot be served."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed import Feeder, HDF5Store, errors
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ReadOnlyStoreTests

h5py = pytest.importorskip("h5py")

X = np.arange(1200, dtype=np.float32).reshape(200, 6)


def written(path: Path, array: np.ndarray, **options: Any) -> Path:
    """Write a file with one dataset."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, **options)
    return path


def gathered(store: HDF5Store, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


class HDF5Tests(ReadOnlyStoreTests):
    @pytest.fixture(params=["bool", "complex64", "uint8", "float64"])
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return DTYPES[request.param]


class TestCompressedChunks(HDF5Tests):
    row_shapes = ((), (7,), (2, 1, 3, 2))

    @pytest.fixture(params=sorted(set(DTYPES) - {"bfloat16"}))
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return DTYPES[request.param]

    def make(self, array: np.ndarray, tmp_path: Path) -> HDF5Store:
        chunks = (4, *(max(1, n // 2) for n in array.shape[1:]))
        options = {"compression": "gzip", "shuffle": True}
        return HDF5Store(written(tmp_path / "x.h5", array, chunks=chunks, **options))


class TestContiguous(HDF5Tests):
    """The bytes of the file are read without h5py."""

    def make(self, array: np.ndarray, tmp_path: Path) -> HDF5Store:
        with h5py.File(tmp_path / "x.h5", "w", userblock_size=512) as file:
            file["other"] = np.arange(7, dtype=np.uint8)
            file["group/x"] = array
        store = HDF5Store(tmp_path / "x.h5", "group/x")
        assert store.native is not None
        return store


def test_a_contiguous_dataset_that_is_open_for_writing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(200_000)
        store = HDF5Store(file["x"])
        assert store.native is None
        assert len(store.bounds) == 8
        wanted = [199_999, 5, 40_000, 5]
        assert gathered(store, wanted).tolist() == wanted
        assert gathered(store, range(1000, 150_000)).tolist() == list(range(1000, 150_000))


@pytest.mark.parametrize("options", [{}, {"chunks": (7, 6)}])
def test_the_other_byte_order(tmp_path: Path, options: dict[str, Any]) -> None:
    store = HDF5Store(written(tmp_path / "x.h5", X.astype(">f4"), **options))
    assert store.dtype == np.dtype(np.float32)
    np.testing.assert_array_equal(gathered(store, [199, 0, 3]), X[[199, 0, 3]])
    store.close()


def test_unwritten_rows_have_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("whole", (10, 3), "f4", fillvalue=7)
        file.create_dataset("chunks", (10, 3), "f4", fillvalue=7, chunks=(2, 3))[2:4] = 1
    for name in ("whole", "chunks"):
        store = HDF5Store(tmp_path / "x.h5", name)
        assert store.native is None
        expected = np.full((10, 3), 7, np.float32)
        expected[2:4] = 1 if name == "chunks" else 7
        np.testing.assert_array_equal(gathered(store, range(10)), expected)
        store.close()


def test_a_dataset_of_the_user_stays_open(tmp_path: Path) -> None:
    written(tmp_path / "x.h5", X, chunks=(7, 6))
    with h5py.File(tmp_path / "x.h5") as file:
        with Feeder(file["x"], batch_size=200, device="cpu") as feeder:
            np.testing.assert_array_equal(next(iter(feeder)).numpy(), X)
        store = HDF5Store(file["x"])
        store.close()
        assert file["x"].shape == X.shape
        with pytest.raises(errors.ClosedError, match="open it again"):
            gathered(store, [1])
        store = HDF5Store(file["x"])
        dataset = file["x"]
    with pytest.raises(errors.ClosedError, match="the HDF5 file of the dataset is closed"):
        gathered(store, [1])
    with pytest.raises(errors.ClosedError, match="the HDF5 file of the dataset is closed"):
        HDF5Store(dataset)


def test_rows_that_are_not_flushed_yet(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(50, 6), compression="gzip")
        np.testing.assert_array_equal(gathered(HDF5Store(file["x"]), range(200)), X)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "gzip"},
        {"compression": "lzf", "shuffle": True},
        {"compression": "gzip", "fletcher32": True},
        {"scaleoffset": 2},
    ],
    ids=str,
)
def test_filters(tmp_path: Path, options: dict[str, Any]) -> None:
    """The HDF5 library decodes the filters that pinfeed does not decode."""
    path = written(tmp_path / "x.h5", X, chunks=(30, 4), **options)
    store = HDF5Store(path)
    np.testing.assert_array_equal(gathered(store, [199, 0, 30, 30]), X[[199, 0, 30, 30]])
    np.testing.assert_array_equal(gathered(store, range(200)), X)
    store.close()


def test_a_moved_file_of_the_user_is_read_by_h5py(tmp_path: Path) -> None:
    written(tmp_path / "x.h5", X)
    with h5py.File(tmp_path / "x.h5") as file:
        assert HDF5Store(file["x"]).native is not None
        os.rename(tmp_path / "x.h5", tmp_path / "y.h5")
        written(tmp_path / "x.h5", X + 1)
        store = HDF5Store(file["x"])
        assert store.native is None
        np.testing.assert_array_equal(gathered(store, [3]), X[[3]])


def test_other_layouts_are_read_by_h5py(tmp_path: Path) -> None:
    written(tmp_path / "a.h5", X)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        layout = h5py.VirtualLayout(X.shape, X.dtype)
        layout[:] = h5py.VirtualSource(tmp_path / "a.h5", "x", X.shape)
        file.create_virtual_dataset("virtual", layout)
        X.tofile(tmp_path / "raw.bin")
        external = [(str(tmp_path / "raw.bin"), 0, X.nbytes)]
        file.create_dataset("external", X.shape, X.dtype, external=external)
    for name in ("virtual", "external"):
        store = HDF5Store(tmp_path / "x.h5", name)
        assert store.native is None
        np.testing.assert_array_equal(gathered(store, [199, 0]), X[[199, 0]])
        store.close()


@pytest.mark.parametrize("is_stacked", [True, False])
def test_virtual_datasets_are_read_by_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stacked: bool
) -> None:
    """HDF5 needs long to find several rows of datasets that are stacked."""
    array = np.arange(60 * 3 * 300).reshape(60, 3, 300)
    layout = h5py.VirtualLayout(array.shape, array.dtype)
    for i in range(3):
        part = array[:, i] if is_stacked else array[20 * i : 20 * i + 20]
        written(tmp_path / f"{i}.h5", part, chunks=(5, *part.shape[1:]))
        source = h5py.VirtualSource(tmp_path / f"{i}.h5", "x", part.shape)
        layout[(slice(None), i) if is_stacked else slice(20 * i, 20 * i + 20)] = source
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    read: list[int] = []
    read_box = HDF5Store.read_box

    def counted(self: HDF5Store, box: Any, out: Any) -> None:
        read.append(box[0].stop - box[0].start)
        read_box(self, box, out)

    monkeypatch.setattr(HDF5Store, "read_box", counted)
    with HDF5Store(tmp_path / "all.h5") as store:
        wanted = [59, 3, 41, 3]
        np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
        assert read == [1, 1, 1]
        read.clear()
        np.testing.assert_array_equal(gathered(store, range(60)), array)
        assert read == ([1] * 60 if is_stacked else [60])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"chunks": (7, 6)}])
def test_other_processes_open_the_path_again(tmp_path: Path, options: dict[str, Any]) -> None:
    store = HDF5Store(written(tmp_path / "x.h5", X, **options))
    copied = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(gathered(copied, [3, 199]), X[[3, 199]])
    copied.close()
    gathered(store, [1])
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(gathered(store, [3, 199]), X[[3, 199]]) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    state = pickle.dumps(store)
    store.close()
    if options:
        written(tmp_path / "x.h5", X[:100], **options)
        with pytest.raises(errors.StoreError, match="the file was replaced"):
            gathered(pickle.loads(state), [3])


def test_an_open_dataset_is_not_pickled(tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "x.h5", X)) as file:
        store = HDF5Store(file["x"])
        with pytest.raises(TypeError, match="give HDF5Store the path"):
            pickle.dumps(store)
        store.close()


def test_damaged_chunks(tmp_path: Path) -> None:
    path = written(tmp_path / "x.h5", X, chunks=(50, 6), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info_by_coord((50, 0))
    with open(path, "r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    store = HDF5Store(path)
    with pytest.raises(errors.ReadError, match=r"rows \[50, 100\) cannot be read"):
        gathered(store, [60])
    np.testing.assert_array_equal(gathered(store, [10]), X[[10]])
    store.close()


def test_the_name_of_the_dataset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train/x"] = X
    store = HDF5Store(tmp_path / "x.h5")
    assert repr(store) == "HDF5Store(x.h5:/train/x)"
    store.close()
    with h5py.File(tmp_path / "x.h5", "a") as file:
        file["train/y"] = X
        dataset = file["train/y"]
        with pytest.raises(errors.ArgumentError, match="leave name out"):
            HDF5Store(dataset, "train/x")
    for name, problem in ((None, "has 2 datasets"), ("x", "no dataset 'x'"), ("train", "no data")):
        with pytest.raises(errors.StoreError, match=f"{problem}.*'train/x', 'train/y'"):
            HDF5Store(tmp_path / "x.h5", name)


def dataset(file: Any, kind: str) -> None:
    """Make a dataset that cannot be served."""
    if kind == "enumerated":
        colors = h5py.enum_dtype({"red": 0, "blue": 1}, basetype="i1")
        file.create_dataset("x", data=np.zeros(3, "i1"), dtype=colors)
    elif kind == "text":
        file["x"] = ["a", "b"]
    elif kind == "ragged":
        file.create_dataset("x", (3,), h5py.vlen_dtype("f4"))
    elif kind == "references":
        file.create_dataset("x", (3,), h5py.ref_dtype)
    elif kind == "arrays":
        file.create_dataset("x", (3,), np.dtype(("f4", (2,))))
    elif kind == "compound":
        file["x"] = np.zeros(3, [("a", "f4"), ("b", "i4")])
    elif kind == "bytes":
        file["x"] = np.array([b"ab", b"cd"])
    elif kind == "scalar":
        file["x"] = 3.5
    elif kind == "null":
        file["x"] = h5py.Empty("f4")
    elif kind == "empty":
        file["x"] = np.zeros((0, 3))


@pytest.mark.parametrize(
    ("kind", "hint"),
    {
        "enumerated": "enumerated type",
        "text": "text; convert it",
        "ragged": r"give pinfeed.RaggedStore\(values, offsets\)",
        "references": "Python objects are never unpickled",
        "arrays": "has no torch counterpart",
        "compound": "save each field as a separate array",
        "bytes": "text",
        "scalar": "has no rows",
        "null": "has no rows",
        "empty": "has no rows",
    }.items(),
)
def test_sources_that_cannot_be_served(tmp_path: Path, kind: str, hint: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset(file, kind)
        with pytest.raises(errors.StoreError, match=hint):
            Feeder(file["x"], batch_size=1, device="cpu")
    with pytest.raises(errors.StoreError, match=hint):
        HDF5Store(tmp_path / "x.h5")


def test_paths_without_an_hdf5_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.FileMissing, match="no such file"):
        HDF5Store(tmp_path / "x.h5")
    (tmp_path / "x.h5").write_bytes(bytes(1000))
    with pytest.raises(errors.StoreError, match="expected an HDF5 file"):
        HDF5Store(tmp_path / "x.h5")
    with pytest.raises(errors.ArgumentError, match="got list; expected a path"):
        HDF5Store([1])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(errors.MissingDependency, match=r'pip install "h5py>=3\.10"'):
        HDF5Store(tmp_path / "x.h5")


def test_a_file_that_another_process_writes(tmp_path: Path) -> None:
    """The advice of the error is followed."""
    path = tmp_path / "x.h5"
    program = (
        "import h5py, numpy, sys; file = h5py.File(sys.argv[1], 'w', libver='latest'); "
        "file.create_dataset('x', data=numpy.arange(6.0), maxshape=(None,)); "
        "file.swmr_mode = True; print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(errors.StoreError, match=r"h5py.File\(path, 'r', swmr=True\)\[name\]"):
            HDF5Store(path, "x")
        with (
            h5py.File(path, "r", swmr=True) as file,
            Feeder(file["x"], batch_size=6, device="cpu") as feeder,
        ):
            assert next(iter(feeder)).tolist() == list(range(6))
        writer.communicate()


def test_a_group_is_a_structure_of_its_datasets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
        file["labels/y"] = np.arange(200)
        with Feeder(file, batch_size=200, device="cpu") as feeder:
            batch = next(iter(feeder))
    np.testing.assert_array_equal(batch["x"].numpy(), X)
    assert batch["labels"]["y"].tolist() == list(range(200))


def test_a_gather_during_close_does_not_open_the_file_again(
    tmp_path: Path,
) -> None:
    store = HDF5Store(written(tmp_path / "x.h5", X, chunks=(50, 6), compression="gzip"))
    store.close()
    with pytest.raises(errors.ClosedError, match="open it again"):
        store._read_chunks(0, 50, np.empty((50, *X.shape[1:]), X.dtype))


def test_chunks_of_a_file_replaced_by_one_of_smaller_chunks(tmp_path: Path) -> None:
    """The rows of a chunk are in as many chunks as the file has when it is opened again."""
    path = written(tmp_path / "x.h5", X, chunks=(50, 6), compression="gzip")
    store = HDF5Store(path)
    state = pickle.dumps(store)
    store.close()
    written(path, X, chunks=(50, 2), compression="gzip")
    store = pickle.loads(state)
    np.testing.assert_array_equal(gathered(store, np.arange(200)), X)
    store.close()


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (7, 6)},
        {"chunks": (7, 2), "compression": "gzip", "shuffle": True},
        {"chunks": (7, 6), "compression": "lzf"},
        {},
    ],
)
def test_a_dataset_without_a_written_chunk_has_fill_values(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (20, 6), "f4", fillvalue=7, **options)
    with HDF5Store(tmp_path / "x.h5") as store:
        assert (gathered(store, [19, 0, 3]) == 7).all()
        with Feeder(store, batch_size=8, device="cpu") as feeder:
            assert all(bool((batch == 7).all()) for batch in feeder)
