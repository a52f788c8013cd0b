"""Damaged HDF5 and Parquet files: a store serves rows, or its error names the file and the cause.

The examples are the same in every run, because pyarrow ends the process for a few damaged files.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzzing import N_STRESS, QUIET, mutated, mutations

from pinfeed import HDF5Store, ParquetStore, errors
from pinfeed.stores.chunked import ChunkedStore

h5py = pytest.importorskip("h5py")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

X = np.arange(240, dtype=np.float32).reshape(60, 4)
HDF5_OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunks": (10, 4)},
    {"chunks": (10, 4), "compression": "gzip"},
    {"chunks": (10, 2), "compression": "lzf", "fletcher32": True},
]
PARQUET_OPTIONS: list[dict[str, Any]] = [{}, {"compression": "none", "use_dictionary": False}]
MOST_BYTES = 1 << 20


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def hdf5_files(scratch: Path) -> list[bytes]:
    found = []
    for options in HDF5_OPTIONS:
        with h5py.File(scratch / "x.h5", "w") as file:
            file.create_dataset("inner/x", data=X, **options)
        found.append((scratch / "x.h5").read_bytes())
    return found


@pytest.fixture(scope="module")
def parquet_files(scratch: Path) -> list[bytes]:
    found = []
    table = pyarrow.table({"x": np.arange(60.0)})
    for options in PARQUET_OPTIONS:
        parquet.write_table(table, scratch / "x.parquet", row_group_size=20, **options)
        found.append((scratch / "x.parquet").read_bytes())
    return found


_numbers: Iterator[int] = iter(range(10**9))


def require_rows_or_refusal(path: Path, content: bytes, open_it: Callable[[Path], Any]) -> None:
    """Read a file with this content; any error must be one of pinfeed that names the file.

    HDF5 identifies open files by their inode, so each file has its own name.
    """
    path = path.with_stem(f"damaged{next(_numbers)}")
    path.write_bytes(content)
    try:
        stores = open_it(path)
        for store in stores if isinstance(stores, list) else [stores]:
            read(store)
    except (errors.StoreError, errors.ReadError) as error:
        if path.stem not in str(error) or len(str(error)) > 1000:
            pytest.fail(f"the error does not name the file, or is too long: {error}")
    finally:
        path.unlink()


def read(store: ChunkedStore) -> None:
    with store:
        if store.nbytes <= MOST_BYTES:
            out = np.empty((store.n_rows, *store.row_shape), store.dtype)
            store.gather(np.arange(store.n_rows), out)


def hdf5_example(scratch: Path, content: bytes, changes: Any, name: str | None) -> None:
    def open_it(path: Path) -> HDF5Store:
        return HDF5Store(path, name)

    require_rows_or_refusal(scratch / "x.h5", mutated(content, changes), open_it)


@settings(max_examples=150, derandomize=True, **QUIET)
@given(number=st.integers(0, 3), changes=mutations, name=st.sampled_from([None, "inner/x"]))
def test_any_hdf5_file(
    scratch: Path, hdf5_files: list[bytes], number: int, changes: Any, name: str | None
) -> None:
    hdf5_example(scratch, hdf5_files[number], changes, name)


@pytest.mark.stress
@settings(max_examples=N_STRESS, **QUIET)
@given(number=st.integers(0, 3), changes=mutations, name=st.sampled_from([None, "inner/x"]))
def test_any_hdf5_file_for_long(
    scratch: Path, hdf5_files: list[bytes], number: int, changes: Any, name: str | None
) -> None:
    hdf5_example(scratch, hdf5_files[number], changes, name)


@settings(max_examples=100, derandomize=True, **QUIET)
@given(
    number=st.integers(0, 1),
    changes=mutations,
    kind=st.sampled_from(["column", "matrix", "columns"]),
)
def test_any_parquet_file(
    scratch: Path, parquet_files: list[bytes], number: int, changes: Any, kind: str
) -> None:
    def open_it(path: Path) -> Any:
        if kind == "column":
            return ParquetStore(path, "x")
        if kind == "matrix":
            return ParquetStore(path, columns=["x"], dtype="float32", missing=0)
        return list(ParquetStore.columns(path).values())

    content = mutated(parquet_files[number], changes)
    require_rows_or_refusal(scratch / "x.parquet", content, open_it)


def test_a_damaged_group_of_an_hdf5_file(scratch: Path, hdf5_files: list[bytes]) -> None:
    path = scratch / "group.h5"
    path.write_bytes(hdf5_files[0].replace(b"SNOD", b"XXXX"))
    with pytest.raises(errors.StoreError, match=r"group\.h5: h5py cannot open it") as caught:
        HDF5Store(path)
    assert isinstance(caught.value.__cause__, Exception)
    with pytest.raises(errors.StoreError, match=r"group\.h5"):
        HDF5Store(path, "inner/x")


def test_a_damaged_page_of_a_parquet_file(scratch: Path, parquet_files: list[bytes]) -> None:
    path = scratch / "page.parquet"
    content = parquet_files[1]
    # The header of the first page follows the four bytes at the beginning of the file.
    path.write_bytes(content[:4] + b"\xff" * 16 + content[20:])
    with pytest.raises(errors.StoreError, match=r"page\.parquet, column 'x': pyarrow") as caught:
        ParquetStore(path, "x")
    assert isinstance(caught.value.__cause__, Exception)
