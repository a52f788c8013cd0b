"""Rows of other files than a local .npy: raw, safetensors, and files that are elsewhere."""

import asyncio
import collections
import io
import itertools
import json
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec.core
import numpy as np
import pytest
import torch
from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pinfeed import Feeder, MmapStore, PinnedStore, RemoteStore, errors, rows
from pinfeed.stores import byte_ranges
from pinfeed.stores.disk import linux_aio
from pinfeed.stores.paths import has_protocol
from pinfeed.tensors.dtypes import BFLOAT16, DTYPES
from pinfeed.testing.suites import ROW_SHAPES, StoreTests, sample

# fsspec's thread stays, and is nobody's leak.
get_loop()


def gathered(store: Any, wanted: Any) -> np.ndarray:
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(np.asarray(wanted, np.int64), out)
    return out


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # numpy's, of versions that old numpys cannot read.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(file, array, version)
    return file.getvalue()


class FileTests(StoreTests):
    """Without native AIO, which test_stores.py has: the system takes 30 ms to give it back, every time."""

    @pytest.fixture(autouse=True)
    def forbid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linux_aio.AioContext, "create", lambda: None)

    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        raise NotImplementedError


# ---- raw files -----------------------------------------------------------------------------------


class TestRaw(FileTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        (tmp_path / "x.bin").write_bytes(b"head!" + array.tobytes() + b"tail")
        return MmapStore.raw(
            tmp_path / "x.bin", shape=array.shape, dtype=array.dtype, offset=5, mode="r+"
        )


class TestRawShardsOfTheOtherByteOrder(FileTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        if array.dtype == BFLOAT16:
            pytest.skip("numpy has no byte order for bfloat16")
        dtype = array.dtype.newbyteorder(">")
        for i, (start, stop) in enumerate(itertools.pairwise([0, 1, 1, 5, 6, len(array)])):
            (tmp_path / f"x-{i}.bin").write_bytes(
                b"odd" + array[start:stop].astype(dtype).tobytes()
            )
        return MmapStore.raw(
            tmp_path / "x-*.bin", shape=(-1, *array.shape[1:]), dtype=dtype, offset=3, mode="r+"
        )


def raw(tmp_path: Path, nbytes: int, **how: Any) -> MmapStore:
    (tmp_path / "x.bin").write_bytes(bytes(nbytes))
    return MmapStore.raw(tmp_path / "x.bin", **how)


def test_raw_finds_out_how_many_rows_there_are(tmp_path: Path) -> None:
    with raw(tmp_path, 26, shape=(-1, 3), dtype="bfloat16", offset=2) as store:
        assert (store.n_rows, store.row_shape, store.dtype) == (4, (3,), BFLOAT16)
    with raw(tmp_path, 26, shape=[-1, np.int64(3)], dtype="i2", offset=np.int64(2)) as store:
        assert (store.n_rows, store.row_shape) == (4, (3,))
    with raw(tmp_path, 24, shape=(2, 3), dtype="<i2") as store:
        # What is left over is somebody else's.
        assert store.n_rows == 2


@pytest.mark.parametrize(
    ("nbytes", "how", "message"),
    [
        (
            23,
            {"shape": (4, 3), "dtype": "i2"},
            "4 rows of 6 bytes from byte 0 on need 24 bytes in all; the file has 23",
        ),
        (24, {"shape": (4, 3), "dtype": "i2", "offset": 1}, "from byte 1 on need 25 bytes"),
        (25, {"shape": (-1, 3), "dtype": "i2"}, "4 rows of 6 bytes and 1 bytes more"),
        (24, {"shape": (-1, 3), "dtype": "i2", "offset": 2}, "3 rows of 6 bytes and 4 bytes more"),
        (
            24,
            {"shape": (-1, 3), "dtype": "i2", "offset": 30},
            "from byte 30 on need 30 bytes in all; the file has 24",
        ),
        (24, {"shape": (-1, 0), "dtype": "i2"}, "rows of no bytes"),
        (24, {"shape": (), "dtype": "i2"}, r"expected \(n_rows, \.\.\.\)"),
        (24, {"shape": (-2, 3), "dtype": "i2"}, "expected"),
        (24, {"shape": (2, -1), "dtype": "i2"}, "expected"),
        (24, {"shape": (2, 2), "dtype": "i2", "offset": -4}, "offset=-4"),
        (24, {"shape": (2, 0), "dtype": "i2"}, "rows of no bytes"),
        (24, {"shape": (1.5, 2), "dtype": "i2"}, r"shape=\(1.5, 2\); expected .*, whole numbers"),
        (24, {"shape": (True, 2), "dtype": "i2"}, "expected .*, whole numbers"),
        (24, {"shape": (2, np.True_), "dtype": "i2"}, "expected .*, whole numbers"),
        (24, {"shape": ("2", 2), "dtype": "i2"}, "expected .*, whole numbers"),
        (24, {"shape": "22", "dtype": "i2"}, "shape='22'; expected .*, whole numbers"),
        (24, {"shape": 12, "dtype": "i2"}, "shape=12; expected .*, whole numbers"),
        (
            24,
            {"shape": (2, 2), "dtype": "i2", "offset": 1.5},
            "offset=1.5; expected a whole number of bytes",
        ),
        (
            24,
            {"shape": (2, 2), "dtype": "i2", "offset": True},
            "offset=True; expected a whole number of bytes",
        ),
        (24, {"shape": (0, 3), "dtype": "i2"}, "no rows"),
        (0, {"shape": (-1, 3), "dtype": "i2"}, "no rows"),
        (24, {"shape": (3,), "dtype": "O"}, "never unpickled"),
        (24, {"shape": (3,), "dtype": "M8[s]"}, "dates"),
        (24, {"shape": (3,), "dtype": [("a", "f4")]}, "structured"),
    ],
    ids=str,
)
def test_raw_refuses(tmp_path: Path, nbytes: int, how: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.StoreError, match=rf"x\.bin.*{message}"):
        raw(tmp_path, nbytes, **how)


def test_raw_of_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(errors.FileMissing, match=r"x\.bin: no such file"):
        MmapStore.raw(tmp_path / "x.bin", shape=(-1,), dtype="f4")
    with pytest.raises(errors.StoreError, match="is a directory"):
        MmapStore.raw(tmp_path, shape=(-1,), dtype="u1")


def test_shards_that_hold_more_than_the_limit_of_descriptors(tmp_path: Path) -> None:
    for i in range(1000):
        (tmp_path / f"{i:04}.bin").write_bytes(np.array([i, i + 0.5]).tobytes())
    code = f"""
import resource
import numpy as np
from pinfeed import MmapStore
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
with MmapStore.raw({str(tmp_path / "*.bin")!r}, shape=(2,), dtype="f8", mode="r+") as store:
    rows = np.random.default_rng(0).permutation(2000)
    out = np.empty(2000)
    store.gather(rows, out)
    assert (out == rows / 2).all()
    store.scatter(rows, -out)
    store.gather(np.arange(2000), out)
    assert (out == -np.arange(2000) / 2).all()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100)


# ---- safetensors ---------------------------------------------------------------------------------


def torch_of(array: np.ndarray) -> torch.Tensor:
    return (
        torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        if array.dtype == BFLOAT16
        else torch.from_numpy(array)
    )


class TestSafetensors(FileTests):
    """Between tensors of other dtypes, and at addresses that are no multiple of anything."""

    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        if array.dtype == np.complex128:
            pytest.skip("the format has no complex128")
        before, behind = torch.zeros(5, dtype=torch.float64), torch.arange(13, dtype=torch.uint8)
        tensors = {
            "a": before,
            "x": torch_of(array),
            "empty": torch.zeros(0, 3),
            "z": behind,
            "scalar": torch.tensor(True),
        }
        save_file(
            tensors,
            tmp_path / "x.safetensors",
            metadata={"format": "pt", "odd": "é" * len(array.shape)},
        )
        return MmapStore.safetensors(tmp_path / "x.safetensors", "x", mode="r+")


def test_a_tensor_in_shards(tmp_path: Path) -> None:
    array = sample(13, (3, 5), BFLOAT16)
    for i, (start, stop) in enumerate(itertools.pairwise([0, 1, 1, 5, 6, 13])):
        save_file(
            {"x": torch_of(array[start:stop]), "y": torch.zeros(i)}, tmp_path / f"x-{i}.safetensors"
        )
    with MmapStore.safetensors(tmp_path / "x-*.safetensors", "x") as store:
        wanted = np.random.default_rng(0).integers(0, 13, 50)
        np.testing.assert_array_equal(gathered(store, wanted), array[wanted])


def odd_file(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """As the format allows and no library writes: tensors one after another at any address."""
    names = {np.dtype(np.uint8): "U8", np.dtype("<i8"): "I64", np.dtype("<f4"): "F32"}
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": array.shape,
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(dict(reversed(header.items()))).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little")
        + text
        + b"".join(array.tobytes() for array in tensors.values())
    )
    return path


def test_tensors_at_odd_addresses(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(3, dtype=np.uint8),
        "none": np.zeros((0, 4), np.float32),
        "b": np.arange(24, dtype=np.int64).reshape(8, 3),
        "nothing": np.zeros((4, 0), np.float32),
        "c": np.arange(1, dtype=np.uint8),
        "d": np.arange(40, dtype=np.float32).reshape(5, 2, 4),
    }
    path = odd_file(tmp_path / "x.safetensors", tensors)
    for name, array in tensors.items():
        if len(array):
            with MmapStore.safetensors(path, name) as store:
                wanted = np.random.default_rng(0).integers(0, len(array), 20)
                np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
                np.testing.assert_array_equal(gathered(store, np.arange(len(array))), array)
    with pytest.raises(errors.StoreError, match="has no rows"):
        MmapStore.safetensors(path, "none")


def test_a_write_to_one_tensor_leaves_the_others(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.arange(24, dtype=np.int64).reshape(8, 3),
        "c": np.ones(7, np.float32),
    }
    path = odd_file(tmp_path / "x.safetensors", tensors)
    with MmapStore.safetensors(path, "b", mode="r+") as store:
        store.scatter(np.arange(8), -tensors["b"])
    for name, sign in (("a", 1), ("b", -1), ("c", 1)):
        with MmapStore.safetensors(path, name) as store:
            np.testing.assert_array_equal(
                gathered(store, np.arange(store.n_rows)), sign * tensors[name].astype(store.dtype)
            )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        "w": torch.ones(4, 3),
        "scalar": torch.tensor(3.0),
        "f8": torch.zeros(4, dtype=torch.float8_e5m2),
        "behind": torch.ones(2),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v", "no tensor 'v'; expected one of 'behind', 'f8', 'scalar', 'w'"),
        ("__metadata__", "no tensor '__metadata__'"),
        ("scalar", r"'scalar' is a single number \(shape \(\)\)"),
        ("f8", r"'f8' has dtype F8_E5M2, .* \.view\(torch\.uint8\)"),
    ],
)
def test_tensors_that_cannot_be_served(model: Path, name: str, message: str) -> None:
    with pytest.raises(errors.StoreError, match=rf"x\.safetensors.*{message}"):
        MmapStore.safetensors(model, name)


def test_not_every_name_of_a_large_model_is_listed(tmp_path: Path) -> None:
    save_file({f"layer{i}": torch.zeros(1) for i in range(1000)}, tmp_path / "x.safetensors")
    with pytest.raises(errors.StoreError, match="and 980 more") as caught:
        MmapStore.safetensors(tmp_path / "x.safetensors", "x")
    assert len(str(caught.value)) < 600
    save_file({}, tmp_path / "x.safetensors")
    with pytest.raises(errors.StoreError, match="it has no tensors"):
        MmapStore.safetensors(tmp_path / "x.safetensors", "x")


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff" * 100, npy(np.zeros(9)), b"\0" * 8, b"\x02" + b"\0" * 7 + b"[]"],
    ids=repr,
)
def test_what_is_no_safetensors_file(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(damage)
    with pytest.raises(errors.StoreError, match="is not a safetensors file, or it is damaged"):
        MmapStore.safetensors(tmp_path / "x.safetensors", "x")


def test_every_truncation_of_a_safetensors_file_is_noticed(model: Path) -> None:
    content = model.read_bytes()
    for size in range(0, len(content), 7):
        model.write_bytes(content[:size])
        with pytest.raises(errors.StoreError, match="damaged"):
            MmapStore.safetensors(model, "w")


@settings(deadline=None, max_examples=300)
@given(position=st.integers(0, 300), byte=st.integers(0, 255))
def test_one_damaged_byte_of_a_safetensors_file(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file({"w": torch.ones(4, 3), "v": torch.ones(5)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = byte
    path.write_bytes(content)
    try:
        with MmapStore.safetensors(path, "w") as store:
            gathered(store, np.arange(store.n_rows))
    except errors.StoreError:
        pass


def test_safetensors_of_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(errors.FileMissing, match=r"x\.safetensors: no such file"):
        MmapStore.safetensors(tmp_path / "x.safetensors", "x")
    with pytest.raises(errors.StoreError, match="is a directory"):
        MmapStore.safetensors(tmp_path, "x")


def test_packages_that_are_not_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(errors.MissingDependency, match=r'pip install "pinfeed\[safetensors\]"'):
        MmapStore.safetensors(model, "w")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(errors.MissingDependency, match=r'pip install "pinfeed\[remote\]"'):
        RemoteStore("memory://x.npy")


# ---- remote files --------------------------------------------------------------------------------


class Shaky(MemoryFileSystem):
    """Files in memory, behind a connection that fails as it is told to."""

    protocol = "shaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[collections.deque[Any]] = collections.deque()
    """What becomes of the requests to come: an exception, a number of bytes, or None for an answer as it should be."""
    requests: ClassVar[list[tuple[int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("shaky:/"))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        self.requests.append((start or 0, end or 0))
        return self._suffer(super().cat_file(path, start, end, **options))

    def open(self, path: str, *args: Any, **options: Any) -> Any:
        if "block_size" in options:
            self._suffer(b"")
        return super().open(path, *args, **options)

    def _suffer(self, answer: bytes) -> bytes:
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, BaseException):
            raise fault
        return answer if fault is None else (answer + bytes(100))[:fault]


class Crowd(AsyncFileSystem):
    """Answers no request before ``Crowd.least`` are waiting at the same time."""

    protocol = "crowd"
    least = 1
    waiting = 0
    content = b""

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.content), "type": "file"}

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        Crowd.waiting += 1
        while Crowd.waiting < self.least:
            await asyncio.sleep(0)
        return self.content[start:end]

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        return io.BytesIO(self.content)


fsspec.register_implementation("shaky", Shaky, clobber=True)
fsspec.register_implementation("crowd", Crowd, clobber=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(byte_ranges, "_FIRST_DELAY_S", 0)
    for fs in (MemoryFileSystem, Shaky):
        fs.store.clear()
    Shaky.faults.clear()
    Shaky.requests.clear()
    yield
    for fs in (MemoryFileSystem, Shaky):
        fs.store.clear()


def put(
    array: np.ndarray, url: str = "memory://x.npy", version: tuple[int, int] | None = None
) -> str:
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(path, npy(array, version))
    return url


PROTOCOLS = ["memory", "file"]


def urls_of(protocol: str, array: np.ndarray, tmp_path: Path, cuts: list[int]) -> list[str]:
    root = f"file://{tmp_path}" if protocol == "file" else f"{protocol}://data"
    return [
        put(array[start:stop], f"{root}/x-{i}.npy")
        for i, (start, stop) in enumerate(itertools.pairwise([0, *cuts, len(array)]))
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("order", "<>")
def test_remote_rows_of_every_dtype_and_rank(
    protocol: str, dtype: str, order: str, tmp_path: Path
) -> None:
    for row_shape in ROW_SHAPES:
        array = sample(13, row_shape, DTYPES[dtype])
        saved = array if dtype == "bfloat16" else array.astype(array.dtype.newbyteorder(order))
        with RemoteStore(urls_of(protocol, saved, tmp_path, [1, 1, 5]), dtype=dtype) as store:
            assert (store.n_rows, store.row_shape, store.dtype, store.writable) == (
                13,
                row_shape,
                DTYPES[dtype],
                False,
            )
            wanted = np.array([12, 0, 5, 5, 1, 4])
            np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
            np.testing.assert_array_equal(gathered(store, np.arange(13)), array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_remote_headers_of_every_version(version: tuple[int, int]) -> None:
    array = sample(9, (4,), np.dtype(np.int32))
    np.testing.assert_array_equal(
        gathered(RemoteStore(put(array, version=version)), [8, 3]), array[[8, 3]]
    )


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_rows_of_any_remote_shards(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With ranges, windows and gaps of all sizes beside the rows: what is asked for, at most once, in answers that are not too large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "RANGE_BYTES", 8 << data.draw(st.integers(0, 6), "range"))
        patch.setattr(byte_ranges, "WINDOW_BYTES", 8 << data.draw(st.integers(6, 9), "window"))
        patch.setattr(
            byte_ranges, "_GAP_BYTES", data.draw(st.sampled_from([0, 1, 23, 24, 100, 1000]), "gap")
        )
        patch.setattr(
            byte_ranges, "_MAX_REQUESTS", data.draw(st.sampled_from([1, 2, 1000]), "requests")
        )
        dtype = np.dtype(
            data.draw(st.sampled_from(["<f4", ">f4", "u1", "<i8", ">i8", "?"]), "dtype")
        )
        array = sample(
            data.draw(st.integers(1, 60), "n"), (data.draw(st.integers(0, 9), "width"),), dtype
        )
        cuts = sorted(data.draw(st.lists(st.integers(0, len(array)), max_size=4), "cuts"))
        protocol = data.draw(st.sampled_from(["shaky", "file"]), "protocol")
        store = RemoteStore(urls_of(protocol, array, tmp_path_factory.getbasetemp(), cuts))
        run = st.tuples(st.integers(0, len(array)), st.integers(0, len(array))).map(
            lambda ends: list(range(min(ends), max(ends)))
        )
        wanted = np.array(
            data.draw(
                st.one_of(st.lists(st.integers(0, len(array) - 1), max_size=80), run), "rows"
            ),
            np.int64,
        )
        positions = np.array(
            data.draw(st.permutations(range(len(wanted) + 3)), "positions")[: len(wanted)], np.int64
        )
        out = np.full((len(wanted) + 3, *store.row_shape), 3, store.dtype)
        expected = out.copy()
        expected[positions] = array[wanted]
        Shaky.requests.clear()
        store.gather_at(wanted, out, positions)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
        assert all(
            0 < end - begin <= max(byte_ranges.RANGE_BYTES, store.row_nbytes)
            for begin, end in Shaky.requests
        )


def test_neighbours_are_fetched_by_one_request_and_strangers_are_not() -> None:
    store = RemoteStore(put(sample(1000, (1024,), np.dtype(np.uint8)), "shaky://x.npy"))
    # 64 KiB between 1 and 66, and between 500 and 564; more between 66 and 500.
    gathered(store, [500, 3, 1, 564, 66, 1])
    assert [(begin - 128, end - 128) for begin, end in Shaky.requests] == [
        (1 << 10, 67 << 10),
        (500 << 10, 565 << 10),
    ]


@pytest.mark.parametrize("case", ["run", "shuffled", "one row, often", "large rows"])
def test_a_gather_takes_no_more_memory_than_it_says(case: str) -> None:
    array = np.zeros(
        (20, 3 << 20) if case == "large rows" else (60_000, 1024),
        ">u2" if case == "shuffled" else np.uint8,
    )
    store = RemoteStore(put(array))
    wanted = np.arange(len(array))
    if case != "run":
        wanted = (
            np.full(len(array), 7)
            if case == "one row, often"
            else np.random.default_rng(0).permutation(len(array))
        )
    out = np.zeros((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted[:2], out[:2])
    tracemalloc.start()
    try:
        store.gather(wanted, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < store.resident_bytes


def test_requests_wait_at_the_same_time() -> None:
    array = sample(32, (1 << 20,), np.dtype(np.uint8))
    # Eight ranges are a window.
    Crowd.content = npy(array)
    Crowd.least = 8
    Crowd.waiting = 0
    store = RemoteStore("crowd://x.npy")
    np.testing.assert_array_equal(gathered(store, np.arange(16)), array[:16])
    Crowd.least = 3
    Crowd.waiting = 0
    np.testing.assert_array_equal(gathered(store, [31, 0, 15]), array[[31, 0, 15]])


def test_shards_are_asked_at_the_same_time() -> None:
    Crowd.content = npy(np.arange(10.0))
    Crowd.least = 100
    Crowd.waiting = 0
    store = RemoteStore([f"crowd://{i}.npy" for i in range(100)])
    assert gathered(store, np.arange(100) * 10 + 3).tolist() == [3] * 100


def test_threads_gather_at_the_same_time() -> None:
    array = sample(5000, (64,), np.dtype(np.float32))
    store = RemoteStore(urls_of("memory", array, Path(), [10, 700, 701, 4000]))
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        rng = np.random.default_rng(seed)
        for _ in range(10):
            wanted = rng.integers(0, 5000, 500)
            np.testing.assert_array_equal(gathered(store, wanted), array[wanted])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_feeder_of_urls(depth: int) -> None:
    """By their names, opened and closed by the feeder; equal to the array at any depth."""
    array, labels = sample(500, (7,), np.dtype(np.float32)), np.arange(500)
    urls_of("memory", array, Path(), [100, 333])
    with Feeder(
        {"x": "memory://data/x-*.npy", "y": put(labels)},
        batch_size=64,
        shuffle=True,
        depth=depth,
        device="cpu",
    ) as feeder:
        for epoch in range(2):
            order = rows.shuffled(0).bind(500, epoch)(np.arange(500))
            batches = list(feeder)
            np.testing.assert_array_equal(
                torch.cat([batch["x"] for batch in batches]).numpy(), array[order]
            )
            np.testing.assert_array_equal(
                torch.cat([batch["y"] for batch in batches]).numpy(), order
            )


def test_an_error_of_a_remote_file_reaches_the_loop() -> None:
    put(np.arange(1000.0), "shaky://x.npy")
    with (
        Feeder("shaky://x.npy", batch_size=10, device="cpu") as feeder,
        pytest.raises(errors.ReadError, match=r"shaky://x\.npy.*Permission"),
    ):
        for i, _batch in enumerate(feeder):
            if i == 20:
                Shaky.faults.append(PermissionError("Permission denied"))


def test_a_pattern_is_expanded_in_sorted_order() -> None:
    for name in ("b", "a", "c"):
        put(np.full(2, ord(name)), f"memory://data/{name}.npy")
    put(np.arange(3), "memory://data/[d].npy")
    assert gathered(RemoteStore("memory://data/?.npy"), np.arange(6)).tolist() == [
        97,
        97,
        98,
        98,
        99,
        99,
    ]
    assert RemoteStore("memory://data/[d].npy").n_rows == 3, "a file of that very name"
    with pytest.raises(errors.FileMissing, match=r"memory://data/e\*: no file matches"):
        RemoteStore("memory://data/e*")


def test_a_chain_of_file_systems(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(5), b=np.arange(5, 12))
    store = RemoteStore([f"zip://{name}.npy::file://{tmp_path}/x.npz" for name in "ab"])
    assert gathered(store, [11, 0, 4, 5]).tolist() == [11, 0, 4, 5]


def test_the_same_file_twice() -> None:
    url = put(np.arange(5))
    assert gathered(RemoteStore([url, url]), np.arange(10)).tolist() == [*range(5), *range(5)]


# ---- what fails, and what is tried again ---------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        OSError(5, "I/O"),
        TimeoutError(),
        ConnectionResetError(),
        RuntimeError("of a client library"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("n", [1, 4])
def test_what_may_pass_is_tried_again(fault: Exception, n: int) -> None:
    array = sample(100, (64, 1024), np.dtype(np.uint8))
    put(array, "shaky://x.npy")
    Shaky.faults.extend([fault] * n)
    store = RemoteStore("shaky://x.npy")
    wanted = [90, 3, 40]
    # One of three, n times.
    Shaky.faults.extend([None, fault, None, *[fault] * (n - 1)])
    np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
    assert len(Shaky.requests) == 3 + n
    assert len(set(Shaky.requests[3:])) == 1, "only what failed is asked for again"


def test_a_file_system_that_fails_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    faults = [ConnectionError("gone"), TimeoutError()]

    def cat_ranges(self: Any, *args: Any, **options: Any) -> list[Any]:
        if faults:
            raise faults.pop()
        return MemoryFileSystem.cat_ranges(self, *args, **options)

    monkeypatch.setattr(Shaky, "cat_ranges", cat_ranges)
    assert gathered(store, [5, 50]).tolist() == [5, 50]


def test_what_does_not_pass_in_so_many_attempts() -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"), attempts=3)
    Shaky.faults.extend([ConnectionError("no route")] * 3)
    message = r"shaky://x\.npy, bytes 168 to 176: ConnectionError: no route \(attempt 3 of 3; RemoteStore\(\.\.\., attempts=6\)"
    with pytest.raises(errors.ReadError, match=message) as caught:
        gathered(store, [5])
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert gathered(store, [5]).tolist() == [5], "the next gather is a new one"
    Shaky.faults.extend([ConnectionError("no route")] * 5)
    with pytest.raises(
        errors.ReadError, match=r"shaky://x\.npy: ConnectionError: no route \(attempt 5 of 5"
    ):
        RemoteStore("shaky://x.npy")


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (PermissionError("not yours"), errors.ReadError),
        (ValueError("cannot be"), errors.ReadError),
        (NotImplementedError("no ranges"), errors.ReadError),
        (HttpError(403), errors.ReadError),
        (FileNotFoundError("x.npy"), errors.FileMissing),
    ],
    ids=repr,
)
def test_what_does_not_pass_is_not_tried_again(fault: Exception, error: type[Exception]) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(fault)
    with pytest.raises(error, match=r"shaky://x\.npy"):
        gathered(store, [5])
    assert len(Shaky.requests) == 1
    Shaky.faults.append(fault)
    with pytest.raises(error, match=r"shaky://x\.npy"):
        RemoteStore("shaky://x.npy")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_web_server_is_asked_again(status: int) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(HttpError(status))
    assert gathered(store, [5]).tolist() == [5]


@pytest.mark.parametrize(("fault", "n"), [(0, 0), (7, 7), (HttpError(416), 0)], ids=str)
def test_a_range_that_is_short_means_that_the_file_has_shrunk(fault: Any, n: int) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(fault)
    with pytest.raises(
        errors.ReadError, match=rf"shaky://x\.npy, bytes 168 to 176: only {n} of them .* has shrunk"
    ):
        gathered(store, [5])
    assert len(Shaky.requests) == 1


def test_a_remote_file_that_is_replaced_by_a_shorter_one() -> None:
    store = RemoteStore(put(np.arange(100)))
    put(np.arange(50))
    assert gathered(store, [49]).tolist() == [49]
    with pytest.raises(errors.ReadError, match="has shrunk"):
        gathered(store, [49, 50])
    MemoryFileSystem.store.clear()
    with pytest.raises(errors.FileMissing, match="not there any more"):
        gathered(store, [49])


def test_a_server_that_gives_more_than_a_range() -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(50)
    with pytest.raises(
        errors.ReadError, match="got 50 bytes; its server does not give parts of files"
    ):
        gathered(store, [5])


# ---- what is no remote file ----------------------------------------------------------------------


def test_remote_files_that_cannot_be_served() -> None:
    with pytest.raises(errors.FileMissing, match=r"memory://x\.npy: no such file"):
        RemoteStore("memory://x.npy")
    with pytest.raises(errors.FileMissing, match=r"memory://y\.npy: no such file"):
        RemoteStore([put(np.arange(3)), "memory://y.npy"])
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy is in Fortran order"):
        RemoteStore(put(np.asfortranarray(np.zeros((3, 2)))))
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy has no rows"):
        RemoteStore(put(np.zeros((0, 2))))
    with pytest.raises(errors.StoreError, match="shards do not match"):
        RemoteStore([put(np.zeros(3)), put(np.zeros((3, 2)), "memory://y.npy")])
    fsspec.filesystem("memory").pipe_file("/x.npy", npy(np.arange(100))[:-1])
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy is truncated"):
        RemoteStore("memory://x.npy")
    fsspec.filesystem("memory").pipe_file("/x.npy", b"text")
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy is not a \.npy file"):
        RemoteStore("memory://x.npy")


def test_a_remote_directory(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreError, match="is a directory"):
        RemoteStore(f"file://{tmp_path}")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x.npy", "'x.npy' is not a URL"),
        ("C:/data/x.npy", "is not a URL"),
        (Path("s3://bucket/x.npy"), "is not a URL; .*pathlib takes a slash away"),
        (["memory://x.npy", "x.npy"], "'x.npy' is not a URL"),
        ([3], "3 is not a URL"),
        (3, "path=3"),
        ([], "an empty list"),
        ("nonsense://x.npy", "nonsense://x.npy: Protocol not known"),
    ],
    ids=str,
)
def test_what_is_no_url(path: Any, message: str) -> None:
    put(np.arange(3))
    with pytest.raises(errors.ArgumentError, match=message):
        RemoteStore(path)


def test_a_number_of_attempts_that_is_none() -> None:
    with pytest.raises(errors.ArgumentError, match="attempts=0"):
        RemoteStore("memory://x.npy", attempts=0)


def test_a_file_system_that_is_not_installed() -> None:
    fsspec.register_implementation(
        "absent", "no_such_package.FileSystem", clobber=True, errtxt="Install no_such_package"
    )
    with pytest.raises(errors.MissingDependency, match=r"absent://x\.npy: Install no_such_package"):
        RemoteStore("absent://x.npy")


@pytest.mark.parametrize(
    "path",
    [
        "s3://b/x.npy",
        "https://h/x.npy?a=b",
        "file:///x",
        "simplecache::s3://b/x",
        "zip://x.npy::s3://b/x.zip",
    ],
)
def test_urls(path: str) -> None:
    assert has_protocol(path)
    for store in (MmapStore, PinnedStore):
        with pytest.raises(errors.ArgumentError, match=r"is a URL; .* RemoteStore\('"):
            store(path)
    with pytest.raises(errors.ArgumentError, match=r"is a URL; .* RemoteStore\('"):
        MmapStore(["x.npy", path])


@pytest.mark.parametrize(
    "path",
    [
        "x.npy",
        "/data/x.npy",
        r"C:\x.npy",
        "C://x.npy",
        "a:b",
        "a::b.npy",
        "/mnt/s3://x",
        Path("s3://x"),
        None,
    ],
)
def test_local_paths(path: Any) -> None:
    assert not has_protocol(path)


def test_a_remote_store_is_read_only_and_can_be_closed_twice() -> None:
    store = RemoteStore(put(np.arange(3)), storage_options={})
    assert "memory://x.npy" in repr(store)
    with pytest.raises(errors.StoreError, match="read-only"):
        store.scatter(np.array([0]), np.array([1]))
    store.flush()
    store.close()
    store.close()
    with pytest.raises(errors.ClosedError, match="closed"):
        gathered(store, [0])
