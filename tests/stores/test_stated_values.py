"""Statements of files about their numbers are applied or refused, never dropped."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.stores import gathered

from pinfeed import (
    Feeder,
    HDF5Store,
    NpyStore,
    ParquetStore,
    ZarrStore,
    errors,
)

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")
pytest.importorskip("zarr.buffer")

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

INTEGERS = np.arange(6, dtype=np.int16)
FLOATS = np.arange(6, dtype=np.float32)

Make = Callable[..., Any]
"""Saves an array with attributes; returns the class of its store, and its arguments."""


def save_hdf5(folder: Path, array: np.ndarray, **attributes: Any) -> tuple[Any, ...]:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("a/x", data=array, chunks=(2,)).attrs.update(attributes)
    return HDF5Store, folder / "x.h5", "a/x"


def save_contiguous(folder: Path, array: np.ndarray, **attributes: Any) -> tuple[Any, ...]:
    with h5py.File(folder / "x.h5", "w") as file:
        file["a/x"] = array
        file["a/x"].attrs.update(attributes)
    return HDF5Store, folder / "x.h5", "a/x"


def save_zarr(folder: Path, array: np.ndarray, **attributes: Any) -> tuple[Any, ...]:
    plain = {
        name: one.item() if isinstance(one, np.generic) else one for name, one in attributes.items()
    }
    zarr.create_array(folder / "x.zarr", name="a/x", data=array, chunks=(2,)).attrs.update(plain)
    return ZarrStore, folder / "x.zarr", "a/x"


FORMATS = {"chunks": save_hdf5, "contiguous": save_contiguous, "zarr": save_zarr}

CHANGING: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "scale": (INTEGERS, {"scale_factor": 0.1}),
    "offset": (INTEGERS, {"add_offset": 273.15}),
    "fill value": (INTEGERS, {"_FillValue": np.int16(5)}),
    "fill value of floats": (FLOATS, {"_FillValue": np.float32(5)}),
    "missing value": (INTEGERS, {"missing_value": np.int16(5)}),
    "range": (FLOATS, {"valid_range": [0.0, 4.0]}),
    "minimum": (FLOATS, {"valid_min": 1.0}),
    "maximum": (FLOATS, {"valid_max": 4.0}),
    "unsigned": (INTEGERS, {"_Unsigned": "true"}),
    "empty of MATLAB": (INTEGERS, {"MATLAB_empty": 1}),
}
NEUTRAL: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "none": (INTEGERS, {}),
    "no scale": (FLOATS, {"scale_factor": 1.0, "add_offset": 0.0}),
    "NaN is NaN": (FLOATS, {"_FillValue": np.float32("nan"), "missing_value": float("nan")}),
    "NaN as text": (FLOATS, {"_FillValue": "AAAAAAAA+H8="}),
    "signed": (INTEGERS, {"_Unsigned": "false"}),
    "names": (INTEGERS, {"units": "K", "calendar": "noleap", "flag_values": [0, 1]}),
}


@pytest.mark.parametrize("save", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", CHANGING)
def test_attributes_that_change_numbers_are_refused(tmp_path: Path, save: Make, name: str) -> None:
    """The advice of the error is followed, and gives the stored numbers."""
    array, attributes = CHANGING[name]
    store, *arguments = save(tmp_path, array, **attributes)
    (first,) = attributes
    with pytest.raises(errors.StoreError, match=f"x: .*{first}=.*; give as_stored=True"):
        store(*arguments)
    with store(*arguments, as_stored=True) as opened:
        np.testing.assert_array_equal(gathered(opened, range(6)), array)


@pytest.mark.parametrize("save", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", NEUTRAL)
def test_attributes_that_change_nothing(tmp_path: Path, save: Make, name: str) -> None:
    array, attributes = NEUTRAL[name]
    store, *arguments = save(tmp_path, array, **attributes)
    with store(*arguments) as opened:
        np.testing.assert_array_equal(gathered(opened, range(6)), array)


def test_attributes_of_given_objects_and_flags(tmp_path: Path) -> None:
    _, path, name = save_hdf5(tmp_path, INTEGERS, scale_factor=2.0)
    with h5py.File(path) as file, pytest.raises(errors.StoreError, match="scale_factor=2"):
        Feeder(file[name], batch_size=3, device="cpu")
    with pytest.raises(errors.ArgumentError, match="as_stored='yes': expected True or False"):
        HDF5Store(path, name, as_stored="yes")
    with pytest.raises(errors.UnknownArgument, match="as_stored"):
        HDF5Store(path, name, mask_and_scale=False)


def test_the_fill_value_by_which_xarray_masks_format_2(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": INTEGERS, "chunks": (2,), "zarr_format": 2}
    array = zarr.create_array(tmp_path / "x.zarr", fill_value=5, **options)
    with ZarrStore(tmp_path / "x.zarr") as store:
        np.testing.assert_array_equal(gathered(store, range(6)), INTEGERS)
    array.attrs["_ARRAY_DIMENSIONS"] = ["time"]
    with pytest.raises(errors.StoreError, match="_FillValue=5"):
        ZarrStore(tmp_path / "x.zarr")


def write_columns(root: Any) -> None:
    """Write two nullable columns as AnnData does, one with a missing value."""
    for name, mask in {"gaps": [False, True, False], "full": [False] * 3}.items():
        column = root.create_group(f"obs/{name}")
        column.attrs["encoding-type"] = "nullable-integer"
        values = {"values": np.array([3, 1, 5]), "mask": np.array(mask)}
        for part, array in values.items():
            if hasattr(column, "create_array"):
                column.create_array(part, data=array)
            else:
                column[part] = array


@pytest.fixture(params=["hdf5", "zarr"])
def cells(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    if request.param == "hdf5":
        with h5py.File(tmp_path / "x.h5ad", "w") as file:
            write_columns(file)
        yield HDF5Store, tmp_path / "x.h5ad"
    else:
        write_columns(zarr.create_group(tmp_path / "x.zarr"))
        yield ZarrStore, tmp_path / "x.zarr"


def test_nullable_columns_of_anndata(cells: tuple[Any, Path]) -> None:
    open_store, path = cells
    with open_store(path, "obs/full") as store:
        assert gathered(store, [0, 1, 2]).tolist() == [3, 1, 5]
    for name in ("obs/gaps", "obs/gaps/values"):
        with pytest.raises(errors.StoreError, match="obs/gaps/values: its mask of AnnData"):
            open_store(path, name)
    values = open_store(path, "obs/gaps", as_stored=True)
    mask = open_store(path, "obs/gaps/mask")
    with values, mask, Feeder((values, mask), batch_size=3, device="cpu") as feeder:
        numbers, is_missing = next(iter(feeder))
    assert numbers[~is_missing].tolist() == [3, 5]


def test_a_nullable_column_by_its_own_path(tmp_path: Path) -> None:
    write_columns(zarr.create_group(tmp_path / "x.zarr"))
    with pytest.raises(errors.StoreError, match="mask of AnnData marks missing values"):
        ZarrStore(tmp_path / "x.zarr/obs/gaps/values")
    zarr.create_array(tmp_path / "values", data=INTEGERS)
    with ZarrStore(tmp_path / "values") as store:
        assert store.n_rows == 6


def virtual(path: Path, sources: list[str]) -> None:
    layout = h5py.VirtualLayout((6 * len(sources),), np.int16)
    for i, source in enumerate(sources):
        layout[6 * i : 6 * i + 6] = h5py.VirtualSource(source, "a/x", (6,))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("a/x", layout, fillvalue=-1)


def test_virtual_datasets_without_a_source(tmp_path: Path) -> None:
    """HDF5 returns the fill value for a source that does not exist, at any depth."""
    _, one, name = save_hdf5(tmp_path, INTEGERS)
    virtual(tmp_path / "inner.h5", ["x.h5"])
    virtual(tmp_path / "outer.h5", ["x.h5", str(tmp_path / "inner.h5")])
    with HDF5Store(tmp_path / "outer.h5", name) as store:
        np.testing.assert_array_equal(gathered(store, range(12)), np.tile(INTEGERS, 2))
    os.rename(one, tmp_path / "moved.h5")
    for path in ("inner.h5", "outer.h5"):
        with pytest.raises(errors.StoreError, match=r"place of the source .*\.h5:a/x"):
            HDF5Store(tmp_path / path, name)
    with HDF5Store(tmp_path / "inner.h5", name, as_stored=True) as store:
        assert set(gathered(store, range(6))) == {-1}


@pytest.mark.parametrize("prefixes", ["", "{0}/none:{0}/other"])
def test_virtual_datasets_whose_folder_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefixes: str
) -> None:
    """HDF5 looks for the name of an absolute path in the folder of the file and in each prefix."""
    for name in ("old", "other"):
        (tmp_path / name).mkdir()
    _, source, name = save_hdf5(tmp_path / "old", INTEGERS)
    virtual(tmp_path / "old" / "virtual.h5", [str(source)])
    (tmp_path / "old").rename(tmp_path / "new")
    if prefixes:
        monkeypatch.setenv("HDF5_VDS_PREFIX", prefixes.format(tmp_path))
        (tmp_path / "new" / "x.h5").rename(tmp_path / "other" / "x.h5")
    with HDF5Store(tmp_path / "new" / "virtual.h5", name) as store:
        np.testing.assert_array_equal(gathered(store, range(6)), INTEGERS)


def test_virtual_datasets_of_their_own_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/x"] = INTEGERS
        layout = h5py.VirtualLayout((6,), np.int16)
        layout[:] = h5py.VirtualSource(file["a/x"])
        file.create_virtual_dataset("view", layout)
        with HDF5Store(file["view"]) as store:
            np.testing.assert_array_equal(gathered(store, range(6)), INTEGERS)


def test_external_files_that_are_too_short(tmp_path: Path) -> None:
    """HDF5 returns zeros after the end."""
    raw = tmp_path / "x.bin"
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=INTEGERS, external=[(str(raw), 0, h5py.h5f.UNLIMITED)])
    with HDF5Store(tmp_path / "x.h5") as store:
        np.testing.assert_array_equal(gathered(store, range(6)), INTEGERS)
    os.truncate(raw, 8)
    with pytest.raises(errors.StoreError, match=r"the end of the external file .*x\.bin"):
        HDF5Store(tmp_path / "x.h5")


@pytest.mark.parametrize("chunks", [None, (2,)])
def test_datasets_that_hdf5_does_not_fill(tmp_path: Path, chunks: Any) -> None:
    """HDF5 leaves the memory as it is, so rows of other batches would appear."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        options: dict[str, Any] = {"shape": (6,), "dtype": "f4", "fill_time": "never"}
        file.create_dataset("gaps", chunks=chunks, **options)
        file.create_dataset("full", chunks=chunks, **options)[:] = FLOATS
    with pytest.raises(errors.StoreError, match="chunks that were never written"):
        HDF5Store(tmp_path / "x.h5", "gaps")
    with HDF5Store(tmp_path / "x.h5", "full") as store:
        np.testing.assert_array_equal(gathered(store, range(6)), FLOATS)


def test_chunks_of_netcdf_that_were_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file.attrs["_NCProperties"] = "version=2,netcdf=4.9.2,hdf5=1.14.0"
        options: dict[str, Any] = {"shape": (6,), "dtype": "f4", "chunks": (2,)}
        file.create_dataset("gaps", fillvalue=9.96921e36, **options)[:2] = FLOATS[:2]
        file.create_dataset("full", fillvalue=9.96921e36, **options)[:] = FLOATS
    with pytest.raises(errors.StoreError, match="chunks that were never written"):
        HDF5Store(tmp_path / "x.nc", "gaps")
    with HDF5Store(tmp_path / "x.nc", "full") as store:
        np.testing.assert_array_equal(gathered(store, range(6)), FLOATS)


def test_zarr_arrays_without_a_fill_value(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shape": (6,), "chunks": (2,), "dtype": "i2", "zarr_format": 2}
    array = zarr.create_array(tmp_path / "x.zarr", fill_value=None, **options)
    array[:4] = INTEGERS[:4]
    with pytest.raises(errors.StoreError, match="place of 1 chunks that were never written"):
        ZarrStore(tmp_path / "x.zarr")
    array[4:] = INTEGERS[4:]
    with ZarrStore(tmp_path / "x.zarr") as store:
        np.testing.assert_array_equal(gathered(store, range(6)), INTEGERS)


@pytest.mark.parametrize("columns", [{"column": "x"}, {"columns": ["x"]}])
def test_page_checksums_of_parquet(tmp_path: Path, columns: dict[str, Any]) -> None:
    path = tmp_path / "x.parquet"
    x = np.arange(4000.0)
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"x": x}), path, write_page_checksum=True, **options)
    with ParquetStore(path, **columns) as store:
        np.testing.assert_array_equal(gathered(store, range(4000)).ravel(), x)
    content = bytearray(path.read_bytes())
    content[9000] ^= 255
    path.write_bytes(content)
    with pytest.raises(errors.PinfeedError, match="checksum"):
        gathered(ParquetStore(path, **columns), range(4000))


NUMBERS = {"5": 5, "-05": -5, "+7": 7, "2.5": 2.5, ".5": 0.5, "1e3": 1000.0}


@pytest.mark.parametrize("text", [*NUMBERS, "1_0", "nan", "inf", "1e999", "9" * 20, "٣", "", "."])
def test_keys_of_folders_that_are_numbers(tmp_path: Path, text: str) -> None:
    folder = tmp_path / f"key={text}"
    folder.mkdir()
    pq.write_table(pa.table({"x": [1]}), folder / "0.parquet")
    if text in NUMBERS:
        with ParquetStore(tmp_path, "key") as store:
            assert gathered(store, [0]).tolist() == [NUMBERS[text]]
    else:
        with pytest.raises(errors.StoreError, match="; expected a number"):
            ParquetStore(tmp_path, "key")


def test_numbers_that_a_npy_file_cannot_name(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([0.5, 1, -2, 448], ml_dtypes.float8_e4m3fn)
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(errors.StoreError, match=r'dtype="uint8".*view\(torch.float8_e4m3fn\)'):
        NpyStore(tmp_path / "x.npy")
    store = NpyStore(tmp_path / "x.npy", dtype="uint8")
    with (
        store,
        Feeder(
            store,
            batch_size=4,
            device="cpu",
            device_transform=lambda x: x.view(torch.float8_e4m3fn),
        ) as feeder,
    ):
        assert next(iter(feeder)).float().tolist() == array.astype(float).tolist()
    np.save(tmp_path / "y.npy", np.zeros(3, "V3"))
    with pytest.raises(errors.StoreError, match="save the array with another dtype"):
        NpyStore(tmp_path / "y.npy")
