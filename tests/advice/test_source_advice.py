"""Advice in errors of sources, stores, configs, large batches and compatible APIs is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.advice import Case, Cases, equal, follow, read
from torch import nn
from torch.utils.data import DataLoader

import pinfeed
from pinfeed import BigBatch, Config, Feeder, NpyStore, RaggedStore, concat, wrap_loader
from pinfeed.compat import speedtorch

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
zarr = pytest.importorskip("zarr")
# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

advised = Cases()
X = np.arange(24, dtype="float32").reshape(8, 3)
T = torch.from_numpy(X)


def saved(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


# ---- arrays and files ----------------------------------------------------------------------------


@advised(r"if each array is a row, give np.stack\(source\); if you mean 99 sources, give a tuple")
def list_of_arrays(path: Path) -> Iterator[Any]:
    arrays = [X] * 99
    yield lambda: read(arrays)
    yield equal(read(np.stack(arrays)), arrays)
    yield equal(read(tuple(arrays)), arrays)


@advised(r"give .filled\(value\), or the data and the mask in a dict")
def masked_array(path: Path) -> Iterator[Any]:
    masked = np.ma.masked_array(X, X > 20)
    yield lambda: read(masked)
    yield equal(read(masked.filled(-1)), np.where(X > 20, -1, X))
    source = {"data": masked.data, "mask": masked.mask}
    with Feeder(source, batch_size=8, device="cpu") as feeder:
        (batch,) = feeder
    yield equal(batch["data"], X) and equal(batch["mask"], X > 20)


@advised(r"expected C order; save np.ascontiguousarray\(array\)")
def fortran_order(path: Path) -> Iterator[Any]:
    array = np.asfortranarray(X)
    yield lambda: read(saved(path / "x.npy", array))
    yield equal(read(saved(path / "x.npy", np.ascontiguousarray(array))), X)


@advised(r'if they are bfloat16, give NpyStore\(path, dtype="bfloat16"\)')
def bfloat16_file(path: Path) -> Iterator[Any]:
    import ml_dtypes

    file = saved(path / "x.npy", X.astype(ml_dtypes.bfloat16))
    yield lambda: read(file)
    with Feeder(NpyStore(file, dtype="bfloat16"), batch_size=8, device="cpu") as feeder:
        (batch,) = feeder
    yield torch.equal(batch, T.bfloat16())


@advised(
    "dtype= converts nothing; to convert batches, give device_transform=lambda batch: batch.to"
)
def file_of_another_dtype(path: Path) -> Iterator[Any]:
    file = saved(path / "x.npy", X)
    yield lambda: NpyStore(file, dtype="float16")
    yield read(file, device_transform=lambda batch: batch.to(torch.float16)).dtype == np.float16


@advised(r"exists; open it \(NpyStore, from_pretrained\), remove it, or give overwrite=True")
def file_that_exists(path: Path) -> Iterator[Any]:
    file = saved(path / "x.npy", X)
    yield lambda: NpyStore.create(file, (8, 3))
    yield equal(read(NpyStore(file)), X)
    yield equal(read(pinfeed.HostEmbedding.from_pretrained(file).store), X)
    yield not read(NpyStore.create(file, (8, 3), overwrite=True)).any()
    file.unlink()
    yield not read(NpyStore.create(file, (8, 3))).any()


@advised('is read-only; open it with NpyStore\\(path, mode="r\\+"\\)')
def read_only_file(path: Path) -> Iterator[Any]:
    file = saved(path / "x.npy", X)
    yield lambda: NpyStore(file).scatter(np.array([1]), -X[:1])
    with NpyStore(file, mode="r+") as store:
        store.scatter(np.array([1]), -X[:1])
    yield equal(read(file)[1], -X[0])


@advised(r"give pinfeed\.RemoteStore\('https?://")
def url_as_a_path(path: Path) -> Iterator[Any]:
    yield lambda: NpyStore("http://127.0.0.1:1/x.npy")
    store = pinfeed.RemoteStore(f"file://{saved(path / 'x.npy', X)}")
    yield equal(read(store), X)


@advised(
    "offset=128: the header of a .npy file.*leave offset out, and give start= to begin at a lat"
)
def windows_with_an_offset(path: Path) -> Iterator[Any]:
    file = saved(path / "x.npy", np.arange(20))
    yield lambda: NpyStore.windows(file, length=4, offset=128)
    yield equal(read(NpyStore.windows(file, length=4, start=3))[0], [3, 4, 5, 6])


@advised("give a smaller length, .* longer file, or across_files=True if all files are one seq")
def windows_longer_than_files(path: Path) -> Iterator[Any]:
    files = [saved(path / f"{i}.npy", np.arange(5) + 5 * i) for i in range(2)]

    def windows(length: int, **options: Any) -> Any:
        return read(NpyStore.windows(files, length=length, step=length, **options))

    yield lambda: windows(6)
    yield equal(windows(5), [range(5), range(5, 10)])
    yield equal(windows(6, across_files=True), [range(6)])
    saved(files[0], np.arange(7))
    yield equal(windows(6), [range(6)])


@advised("is a directory; expected the path of a new .npy file; give a file name in it")
def directory_in_place_of_a_file(path: Path) -> Iterator[Any]:
    yield lambda: NpyStore.create(path, (8, 3))
    yield not read(NpyStore.create(path / "x.npy", (8, 3))).any()


@advised("a file occurs twice.*give each file once")
def file_given_twice(path: Path) -> Iterator[Any]:
    file = saved(path / "x.npy", X)
    yield lambda: NpyStore([file, file], mode="r+")
    with NpyStore([file], mode="r+") as store:
        yield equal(read(store), X)


@advised("write to its sources themselves")
def write_to_a_concat(path: Path) -> Iterator[Any]:
    one, two = X.copy(), X.copy()
    yield lambda: concat([one, two]).scatter(np.array([1]), -X[:1])
    one[1] = -X[0]
    yield equal(read(concat([one, two]))[1], -X[0])


@advised("read-only|cannot be written.*give a copy of the array")
def write_to_a_read_only_array(path: Path) -> Iterator[Any]:
    array = X.copy()
    array.flags.writeable = False

    def write(of: Any) -> Any:
        with Feeder(of, batch_size=4, device="cpu") as feeder:
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
        return of

    yield lambda: pinfeed.ArrayStore(array).scatter(np.array([1]), -X[:1])
    yield equal(write(array.copy()), X + 1)


# ---- ragged rows ---------------------------------------------------------------------------------


def texts(column: Any) -> list[Any]:
    with Feeder({"text": column}, batch_size=3, device="cpu") as feeder:
        return [text for batch in feeder for text in batch["text"]]


@advised(
    r"a column of string; .*give .*pinfeed.ParquetStore.text\(path, name\), or leave the column"
)
def text_of_a_parquet_file(path: Path) -> Iterator[Any]:
    file = str(path / "x.parquet")
    pa.parquet.write_table(pa.table({"text": ["a", None, "b"], "y": [0, 1, 2]}), file)
    yield lambda: read(file)
    yield texts(pinfeed.ParquetStore.text(file, "text")) == ["a", None, "b"]
    yield equal(read(pinfeed.ParquetStore(file, "y")), [0, 1, 2])


@advised(r"give pyarrow.array\(strings\) for a list")
def list_of_strings(path: Path) -> Iterator[Any]:
    yield lambda: pinfeed.TextStore(["a", "b"])
    yield texts(pa.array(["a", "b"])) == ["a", "b"]


@advised(r"pyarrow.concat_tables\(tables\), or give all files as one column")
def text_to_join(path: Path) -> Iterator[Any]:
    tables = [pa.table({"text": ["a", "b"]}), pa.table({"text": ["c"]})]
    files = [str(path / f"{i}.parquet") for i in range(2)]
    for table, file in zip(tables, files, strict=True):
        pa.parquet.write_table(table, file)
    yield lambda: concat([pinfeed.ParquetStore.text(file, "text") for file in files])
    yield texts(pa.concat_tables(tables)["text"]) == ["a", "b", "c"]
    yield texts(pinfeed.ParquetStore.text(files, "text")) == ["a", "b", "c"]


@advised("has a TextStore; .*give the TextStore to a Feeder")
def fetch_of_text(path: Path) -> Iterator[Any]:
    store = pinfeed.TextStore(np.array(["a", "b"]))
    yield lambda: wrap_loader([torch.arange(2)], fetch={"t": (store, lambda ids: ids)})
    yield texts(store) == ["a", "b"]


LISTS = [[1, 2], [], [3, 4, 5]]


def lists(store: RaggedStore) -> list[list[int]]:
    with Feeder(store, batch_size=3, device="cpu") as feeder:
        (batch,) = feeder
    values, offsets = (part.numpy() for part in batch)
    return [part.tolist() for part in np.split(values, offsets[1:-1])]


@advised(
    r"give np.concatenate\(rows\), and the offsets np.concatenate\(\(\[0\], np.cumsum\(\[len\(row"
)
def list_of_rows(path: Path) -> Iterator[Any]:
    rows = [np.array(row, "int64") for row in LISTS]
    yield lambda: RaggedStore(rows, [0, 2, 2, 5])
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    yield lists(RaggedStore(np.concatenate(rows), offsets)) == LISTS


@advised(r"for lengths, give np.concatenate\(\(\[0\], np.cumsum\(lengths\)\)\)")
def lengths_as_offsets(path: Path) -> Iterator[Any]:
    lengths = [0, 2, 0, 3]
    yield lambda: RaggedStore(np.arange(1, 6), lengths)
    store = RaggedStore(np.arange(1, 6), np.concatenate(([0], np.cumsum(lengths))))
    with Feeder(store, batch_size=4, device="cpu") as feeder:
        yield next(iter(feeder))[1].tolist() == [0, 0, 2, 2, 5]


@advised("expected the items of its rows; give store.items")
def ragged_store_as_items(path: Path) -> Iterator[Any]:
    store = RaggedStore(np.arange(1, 6), [0, 2, 2, 5])
    yield lambda: RaggedStore(store, [0, 2, 2, 5])
    yield lists(RaggedStore(store.items, [0, 2, 2, 5])) == LISTS


@advised("have unequal numbers of items.*give parts of other lengths as a RaggedStore each")
def parts_of_other_lengths(path: Path) -> Iterator[Any]:
    values = {"a": np.arange(1, 6), "b": np.arange(4)}
    offsets = {"a": [0, 2, 2, 5], "b": [0, 1, 2, 4]}
    yield lambda: RaggedStore(values, offsets["a"])
    stores = {name: RaggedStore(values[name], offsets[name]) for name in values}
    with Feeder(stores, batch_size=3, device="cpu") as feeder:
        (batch,) = feeder
    yield all(equal(batch[name][1], offsets[name]) for name in stores)


@advised(
    r"nested tensor.*give pinfeed.RaggedStore\(tensor.values\(\), tensor.offsets\(\)\), or pad"
)
def nested_tensor(path: Path) -> Iterator[Any]:
    tensors = [torch.tensor(row) for row in ([1, 2], [3], [3, 4, 5])]
    nested = torch.nested.nested_tensor(tensors, layout=torch.jagged)
    yield lambda: read(nested)
    yield lists(RaggedStore(nested.values(), nested.offsets())) == [[1, 2], [3], [3, 4, 5]]
    yield equal(read(nested.to_padded_tensor(0)), [[1, 2, 0], [3, 0, 0], [3, 4, 5]])


@advised(
    "expected rows of one shape; pad the rows to one length, or give the RaggedStore to a Feed"
)
def fetch_of_ragged_rows(path: Path) -> Iterator[Any]:
    store = RaggedStore(np.arange(1, 6), [0, 2, 2, 5])
    ids = [{"id": torch.tensor([0, 2])}]

    def fetched(rows: Any) -> Any:
        with wrap_loader(ids, fetch={"rows": (rows, "id")}, device="cpu") as feeder:
            ((_, rows_of),) = feeder
        return rows_of["rows"]

    yield lambda: fetched(store)
    padded = np.array([[1, 2, 0], [0, 0, 0], [3, 4, 5]])
    yield equal(fetched(padded), padded[[0, 2]])
    yield lists(store) == LISTS


@advised(
    r"fill them with empty lists \(pyarrow.compute.fill_null\), or leave them out \(drop_null\)"
)
def null_lists(path: Path) -> Iterator[Any]:
    column = pa.array([[1, 2], None, [3, 4, 5]])
    yield lambda: RaggedStore.from_arrow(column)
    yield lists(RaggedStore.from_arrow(pa.compute.fill_null(column, []))) == LISTS
    yield lists(RaggedStore.from_arrow(column.drop_null())) == [[1, 2], [3, 4, 5]]


# ---- tensors -------------------------------------------------------------------------------------


@advised(r"give pinfeed.SparseStore\(tensor.to_sparse_csr\(\)\), or tensor.to_dense\(\)")
def sparse_tensor(path: Path) -> Iterator[Any]:
    tensor = T.to_sparse()
    yield lambda: read(tensor)
    with Feeder(pinfeed.SparseStore(tensor.to_sparse_csr()), batch_size=8, device="cpu") as feeder:
        (batch,) = feeder
    yield torch.equal(batch.to_dense() if batch.layout != torch.strided else batch, T)
    yield equal(read(tensor.to_dense()), X)


@advised(r"give .resolve_conj\(\).resolve_neg\(\)")
def conjugated_tensor(path: Path) -> Iterator[Any]:
    tensor = torch.complex(T, T).conj()
    yield lambda: read(tensor)
    yield equal(read(tensor.resolve_conj().resolve_neg()), X - 1j * X)


# ---- columns and files of other formats ----------------------------------------------------------


@advised(r"give missing=, such as missing=float\(\"nan\"\) or missing=0, or leave the column out")
def column_with_missing_values(path: Path) -> Iterator[Any]:
    table = pa.table({"a": [1.0, None, 3.0], "b": [4.0, 5.0, 6.0]})
    yield lambda: read(pinfeed.MatrixStore(table))
    yield read(pinfeed.MatrixStore(table, missing=0)).tolist() == [[1, 4], [0, 5], [3, 6]]
    nan = read(pinfeed.MatrixStore(table, missing=float("nan")))
    yield np.isnan(nan).tolist() == [[False, False], [True, False], [False, False]]
    yield read(pinfeed.MatrixStore(table.drop_columns(["a"]))).tolist() == [[4], [5], [6]]


@advised(r'give a wider one, such as "float32" or "int64"')
def column_of_a_wide_dtype(path: Path) -> Iterator[Any]:
    columns = {"a": np.arange(3), "b": np.arange(3)}
    yield lambda: pinfeed.MatrixStore(columns, dtype="int8")
    for dtype in ("float32", "int64"):
        yield equal(read(pinfeed.MatrixStore(columns, dtype=dtype)), [[0, 0], [1, 1], [2, 2]])


@advised(r"expected the name of one of its datasets: .*; give HDF5Store\(path, name\)")
def file_of_datasets(path: Path) -> Iterator[Any]:
    with h5py.File(path / "x.h5", "w") as file:
        file["x"] = X
        file["y"] = X + 1
    yield lambda: pinfeed.HDF5Store(path / "x.h5")
    yield equal(read(pinfeed.HDF5Store(path / "x.h5", "y")), X + 1)


@advised(r"for an open file or group, give file\[name\]")
def open_hdf5_file(path: Path) -> Iterator[Any]:
    with h5py.File(path / "x.h5", "w") as file:
        file["x"] = X
        yield lambda: pinfeed.HDF5Store(file)
        yield equal(read(pinfeed.HDF5Store(file["x"])), X)


@advised(r"expected one of its arrays.*give ZarrStore\(path, name\)")
def group_of_arrays(path: Path) -> Iterator[Any]:
    group = zarr.open_group(path / "x.zarr", mode="w")
    group.create_array("y", data=X)
    yield lambda: pinfeed.ZarrStore(path / "x.zarr")
    yield equal(read(pinfeed.ZarrStore(path / "x.zarr", "y")), X)


@advised("expected csr, in which rows are contiguous; give ")
def matrix_of_columns(path: Path) -> Iterator[Any]:
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csc_matrix(X)
    yield lambda: pinfeed.SparseStore(matrix)
    with Feeder(pinfeed.SparseStore(matrix.tocsr()), batch_size=8, device="cpu") as feeder:
        (batch,) = feeder
    yield torch.equal(batch.to_dense(), T)


@advised(r"is a dense array.*give pinfeed.HDF5Store\('.*', 'X'\)|give HDF5Store\(.*'X'\)")
def dense_matrix_in_a_file(path: Path) -> Iterator[Any]:
    with h5py.File(path / "x.h5ad", "w") as file:
        file["X"] = X
    yield lambda: pinfeed.SparseStore(path / "x.h5ad")
    yield equal(read(pinfeed.HDF5Store(path / "x.h5ad", "X")), X)


@advised(r"convert it with .to\(\), or save its bytes with .view\(torch.uint8\)")
def tensor_of_float8(path: Path) -> Iterator[Any]:
    torch_files = pytest.importorskip("safetensors.torch")
    small = T.to(torch.float8_e4m3fn)

    def stored(tensor: Any) -> Any:
        torch_files.save_file({"x": tensor}, path / "x.safetensors")
        return torch.from_numpy(read(NpyStore.safetensors(path / "x.safetensors", "x")))

    yield lambda: stored(small)
    yield torch.equal(stored(small.to(torch.float32)), small.float())
    found = stored(small.view(torch.uint8)).view(torch.float8_e4m3fn)
    yield torch.equal(found.float(), small.float())


@advised(
    r"remove it with dataset.reset_format\(\), or give pinfeed.wrap_loader\(DataLoader\(dataset\)\)"
)
def dataset_with_a_transform(path: Path) -> Iterator[Any]:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": list(range(8))})
    dataset.set_transform(lambda batch: {"x": torch.tensor(batch["x"]) * 2})
    yield lambda: Feeder(dataset, batch_size=4)
    with wrap_loader(DataLoader(dataset, batch_size=8), device="cpu") as feeder:
        (batch,) = feeder
    yield batch["x"].tolist() == list(range(0, 16, 2))
    dataset.reset_format()
    with Feeder(dataset, batch_size=8, device="cpu") as feeder:
        (batch,) = feeder
    yield batch["x"].tolist() == list(range(8))


# ---- configs and large batches -------------------------------------------------------------------


@advised("model= needs input_shape=; give the shape of a sample, without the batch dimension")
def model_without_a_shape(path: Path) -> Iterator[Any]:
    limits: Any = {"device": "cpu", "cpu_memory_limit": pinfeed.MiB(64)}
    yield lambda: Config(model=nn.Linear(3, 2), **limits)
    yield Config(model=nn.Linear(3, 2), input_shape=(3,), **limits).batch_size > 1


@advised("batch_count is unknown without total_sample_count; give total_sample_count=")
def batches_of_unknown_samples(path: Path) -> Iterator[Any]:
    options: Any = {"model": nn.Linear(3, 2), "input_shape": (3,), "device": "cpu"}
    options |= {"preferred_batch_size": 4, "cpu_memory_limit": pinfeed.MiB(64)}
    yield lambda: Config(**options).batch_count
    yield Config(total_sample_count=8, **options).batch_count == 2


@advised(r"loss=MSELoss is a class; .*give loss=MSELoss\(\)")
def loss_that_is_a_class(path: Path) -> Iterator[Any]:
    def gradient(loss: Any) -> Any:
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        if loss is None:
            nn.MSELoss()(model(T), T[:, :1]).backward()
        else:
            with BigBatch(model, loss=loss, strategy="accumulate", chunk_size=3) as step:
                step.backward(T, T[:, :1])
        return model.weight.grad

    yield lambda: gradient(nn.MSELoss)
    yield torch.allclose(gradient(nn.MSELoss()), gradient(None))


@advised(
    "the model has uninitialized parameters.*call the model with one batch first, or use modul"
)
def lazy_model(path: Path) -> Iterator[Any]:
    limits: Any = {"device": "cpu", "input_shape": (3,), "cpu_memory_limit": pinfeed.MiB(64)}
    lazy = nn.LazyLinear(2)
    yield lambda: Config(model=lazy, **limits).batch_size
    lazy(T)
    yield Config(model=lazy, **limits).batch_size == (
        Config(model=nn.Linear(3, 2), **limits).batch_size
    )


# ---- compatible APIs -----------------------------------------------------------------------------


@advised(
    "expected one file in this machine's byte order; use DataGadget, which makes a copy in mem"
)
def gadget_of_swapped_rows(path: Path) -> Iterator[Any]:
    file = str(saved(path / "x.npy", X.astype(">f4")))

    def rows_of(gadget: Any) -> Any:
        gadget.gadgetInit()
        return gadget.getNumpyVersion()

    yield lambda: rows_of(speedtorch.DataGadgetMM(file))
    yield equal(rows_of(speedtorch.DataGadget(file)), X)


@advised(r"has no table yet; call .*zerosInit\(\) first|random rows|call zerosInit")
def random_rows_of_integers(path: Path) -> Iterator[Any]:
    def factory(dtype: str) -> Any:
        layer = nn.Embedding(4, 3)
        return speedtorch.ModelFactory(layer, 8, 3, datatype=dtype)

    integers = factory("int64")
    yield lambda: integers.uniformDistributionInit(-1, 1)
    integers.zerosInit()
    yield not integers.getNumpyVersion().any()
    floats = factory("float32")
    floats.uniformDistributionInit(-1, 1)
    yield 0 < np.abs(floats.getNumpyVersion()).max() <= 1


@advised("slots of one row differ.*use an OptimizerFactory .*, or give each id once")
def slots_of_one_row(path: Path) -> Iterator[Any]:
    def step(ids: list[int]) -> Any:
        layer = nn.Embedding(2, 3)
        factory = speedtorch.ModelFactory(layer, 8, 3)
        factory.zerosInit()
        factory.beforeForwardPass(np.array(ids))
        layer.weight.data += torch.arange(2.0)[:, None] + 1
        factory.afterOptimizerStep(np.array(ids))
        return factory.getNumpyVersion()[:, 0].tolist()

    yield lambda: step([5, 5])
    yield step([5, 6]) == [0, 0, 0, 0, 0, 1, 2, 0]


@advised("is the file of the table itself; save the table under another name")
def table_saved_over_itself(path: Path) -> Iterator[Any]:
    file = str(saved(path / "x.npy", X))
    gadget = speedtorch.DataGadgetMM(file)
    gadget.gadgetInit()
    yield lambda: gadget.saveTorch(file)
    gadget.saveTorch(path / "x.pt")
    yield torch.equal(torch.load(path / "x.pt"), T)
    gadget.close()


@advised.each
def test_advice_is_right(says: str, case: Case, tmp_path: Path) -> None:
    follow(says, case, tmp_path)
