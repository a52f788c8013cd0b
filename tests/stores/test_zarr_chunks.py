"""ZarrChunks: chunks are decoded as zarr decodes them, and only those that are known."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import ZarrStore, concat, errors
from pinfeed.stores.raw_chunks import ZarrChunks

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")
google_crc32c = pytest.importorskip("google_crc32c")
codecs = pytest.importorskip("zarr.codecs")

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

KNOWN_3 = [
    None,
    codecs.ZstdCodec(level=3),
    codecs.GzipCodec(),
    codecs.BloscCodec(cname="lz4", shuffle="shuffle"),
    codecs.BloscCodec(cname="zstd", shuffle="bitshuffle"),
]
KNOWN_2 = [
    None,
    numcodecs.Blosc(),
    numcodecs.Zstd(),
    numcodecs.Zlib(),
    numcodecs.GZip(),
    numcodecs.LZ4(),
]


def gathered(store: Any, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


def without_zarr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each read by zarr fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("zarr has read")

    monkeypatch.setattr(zarr.Array, "get_basic_selection", refuse)
    monkeypatch.setattr(zarr.Array, "__getitem__", refuse)


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Draw options of an array whose chunks are known."""
    n_axes = draw(st.integers(1, 3))
    sizes = st.integers(1, 7)
    chunks = draw(st.tuples(*[sizes] * n_axes))
    options: dict[str, Any] = {
        "shape": draw(st.tuples(*[st.integers(1, 20)] * n_axes)),
        "chunks": chunks,
        "dtype": draw(st.sampled_from(["u1", "i2", "f4", "f8", "bool"])),
        "fill_value": draw(st.sampled_from([0, 1])),
        "zarr_format": draw(st.sampled_from([2, 3])),
    }
    known = KNOWN_3 if options["zarr_format"] == 3 else KNOWN_2
    options["compressors"] = draw(st.sampled_from(known))
    if options["zarr_format"] == 3 and draw(st.booleans()):
        options["shards"] = tuple(size * draw(st.integers(1, 3)) for size in chunks)
    if draw(st.booleans()):
        kind = {2: "v2", 3: draw(st.sampled_from(["default", "v2"]))}[options["zarr_format"]]
        separator = draw(st.sampled_from([".", "/"]))
        options["chunk_key_encoding"] = {"name": kind, "separator": separator}
    return options


@settings(max_examples=40)
@given(options=arrays(), data=st.data())
def test_chunks_equal_those_of_zarr(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("zarr")
    made = zarr.create_array(str(path), name="group/x", **options)
    values = np.random.default_rng(0).integers(0, 4, made.shape).astype(made.dtype)
    # Chunks that are not written have the fill value.
    begin = data.draw(st.integers(0, made.shape[0]))
    made[begin:] = values[begin:]
    want = made[...]
    with pytest.MonkeyPatch.context() as patch, ZarrStore(path, "group/x") as store:
        without_zarr(patch)
        rows = data.draw(st.lists(st.integers(0, len(want) - 1), max_size=20))
        np.testing.assert_array_equal(gathered(store, np.arange(len(want))), want)
        np.testing.assert_array_equal(gathered(store, rows), want[rows])


@pytest.mark.parametrize("size", [10, 100, 300, 70_000, 1_000_000])
@pytest.mark.parametrize("level", [0, 9])
def test_zstd_frames_of_all_sizes(
    tmp_path: Path, size: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(0, 4, 2 * size).astype("u1")
    compressor = codecs.ZstdCodec(level=level)
    made = zarr.create_array(
        str(tmp_path), shape=values.shape, chunks=(size,), dtype="u1", compressors=compressor
    )
    made[...] = values
    without_zarr(monkeypatch)
    with ZarrStore(tmp_path) as store:
        np.testing.assert_array_equal(gathered(store, np.arange(2 * size)), values)


@pytest.mark.parametrize(
    "options",
    [
        {"filters": codecs.TransposeCodec(order=(1, 0))},
        {"zarr_format": 2, "order": "F"},
        {"zarr_format": 2, "filters": [numcodecs.Delta(dtype="f4")]},
        {"zarr_format": 2, "fill_value": None},
        {"zarr_format": 2, "dtype": ">f4"},
        {"compressors": [codecs.ZstdCodec(), codecs.GzipCodec()]},
        {"serializer": codecs.BytesCodec(endian="big")},
    ],
    ids=str,
)
def test_other_arrays_are_read_by_zarr(tmp_path: Path, options: dict[str, Any]) -> None:
    values = np.arange(120, dtype="f4").reshape(30, 4)
    made = zarr.create_array(
        str(tmp_path), **{"shape": (30, 4), "chunks": (7, 3), "dtype": "f4", **options}
    )
    made[...] = values
    assert ZarrChunks.of(zarr.open_array(str(tmp_path))) is None
    with ZarrStore(tmp_path) as store:
        np.testing.assert_array_equal(gathered(store, np.arange(30)), values)


def test_arrays_elsewhere_are_read_by_zarr() -> None:
    made = zarr.create_array({}, shape=(10,), chunks=(3,), dtype="f4")
    assert ZarrChunks.of(made) is None


def test_a_store_that_changes_bytes_is_read_by_zarr(tmp_path: Path) -> None:
    class Other(zarr.storage.LocalStore):
        pass

    shard(tmp_path)
    assert ZarrChunks.of(zarr.open_array(str(tmp_path))) is not None
    assert ZarrChunks.of(zarr.open_array(Other(tmp_path), mode="r")) is None


def shard(path: Path) -> Path:
    """Write an array with two shards, and return the path of the first."""
    made = zarr.create_array(
        str(path), shape=(40, 3), chunks=(5, 3), shards=(20, 3), dtype="f4", compressors=None
    )
    made[...] = np.arange(120).reshape(40, 3)
    return path / "c" / "0" / "0"


@pytest.mark.parametrize("damage", ["shorter", "index", "chunk"])
def test_damage_is_explained_by_zarr(tmp_path: Path, damage: str) -> None:
    if damage == "chunk":
        made = zarr.create_array(str(tmp_path), shape=(40, 3), chunks=(20, 3), dtype="f4")
        made[...] = np.arange(120).reshape(40, 3)
        file = tmp_path / "c" / "0" / "0"
        file.write_bytes(file.read_bytes()[:-7])
    else:
        file = shard(tmp_path)
        raw = file.read_bytes()
        file.write_bytes(raw[:30] if damage == "shorter" else raw[:-9] + b"\1" + raw[-8:])
    with ZarrStore(tmp_path) as store:
        with pytest.raises(errors.ReadError, match=r"rows \[0, \d+\) cannot be read"):
            gathered(store, np.arange(5))
        np.testing.assert_array_equal(
            gathered(store, np.arange(20, 40)).ravel(), np.arange(60, 120)
        )


@pytest.mark.parametrize("is_known", [True, False])
def test_random_rows_decode_only_their_chunks_of_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A shard is decoded as a whole for rows of most of its chunks."""
    array = np.arange(203 * 6).reshape(203, 6)
    filters = None if is_known else [codecs.TransposeCodec(order=(1, 0))]
    options: Any = {"chunks": (2, 3), "shards": (80, 6), "filters": filters}
    zarr.create_array(str(tmp_path / "x"), data=array, **options)
    decoded: list[int] = []
    read = ZarrStore.read_box

    def counted(self: ZarrStore, box: Any, out: Any) -> None:
        decoded.append(box[0].stop - box[0].start)
        read(self, box, out)

    monkeypatch.setattr(ZarrStore, "read_box", counted)
    with ZarrStore(tmp_path / "x") as store, concat([store, store]) as twice:
        assert (store._raw is not None) == is_known
        for source in (store, twice):
            decoded.clear()
            wanted = [202, 7, 6, 90, 7, 100, 3, 159]
            np.testing.assert_array_equal(gathered(source, wanted), array[wanted])
            assert sorted(decoded) == [1, 2, 2, 2, 2, 2]
            decoded.clear()
            wanted = list(range(1, 80, 2))
            np.testing.assert_array_equal(gathered(source, wanted), array[wanted])
            assert decoded == [80]


def test_few_indices_of_shards_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path)
    monkeypatch.setattr("pinfeed.stores.raw_chunks._INDEX_BYTES", 64)
    chunks = ZarrChunks.of(zarr.open_array(str(tmp_path)))
    assert chunks is not None
    out = np.empty((40, 3), np.float32)
    for _ in range(2):
        assert chunks.read((slice(0, 40), slice(0, 3)), out)
        np.testing.assert_array_equal(out.ravel(), np.arange(120))
        assert len(chunks._indices) == 1


def test_memory_for_bytes_of_chunks_belongs_to_the_store(tmp_path: Path) -> None:
    shard(tmp_path)
    with ZarrStore(tmp_path) as store:
        chunks = store._raw
        assert chunks is not None
        gathered(store, np.arange(40))
        gathered(store, np.arange(40))
        assert len(chunks._spare) == 1
        copy = pickle.loads(pickle.dumps(chunks))
        assert not copy._spare
        assert not copy._indices
    assert not chunks._spare


def test_a_size_beyond_the_shard_takes_no_memory(tmp_path: Path) -> None:
    file = shard(tmp_path)
    raw = bytearray(file.read_bytes())
    index = np.frombuffer(raw[-4 * 16 - 4 : -4], np.uint64).copy()
    index[1] = 1 << 36
    raw[-4 * 16 - 4 : -4] = index.tobytes()
    raw[-4:] = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    file.write_bytes(raw)
    with ZarrStore(tmp_path) as store:
        with pytest.raises(errors.ReadError, match="cannot be read"):
            gathered(store, np.arange(5))
        assert store._raw is not None
        (scratch,) = store._raw._spare
        assert len(scratch._memory) <= 64 << 10


def test_a_relative_directory_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(tmp_path / "x.zarr")
    monkeypatch.chdir(tmp_path)
    array = zarr.open_array("x.zarr")
    store = ZarrStore(array)
    monkeypatch.chdir(os.path.dirname(tmp_path))
    without_zarr(monkeypatch)
    np.testing.assert_array_equal(gathered(store, np.arange(40)).ravel(), np.arange(120))
