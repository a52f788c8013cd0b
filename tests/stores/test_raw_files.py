"""Rows of files without a header."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import Programs

from pinfeed import NpyStore, errors
from pinfeed.tensors.dtypes import BFLOAT16
from pinfeed.testing.suites import StoreTests


class TestRaw(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> NpyStore:
        (tmp_path / "x.bin").write_bytes(b"head!" + array.tobytes() + b"tail")
        return NpyStore.raw(
            tmp_path / "x.bin", shape=array.shape, dtype=array.dtype, offset=5, mode="r+"
        )


class TestRawShardsOfTheOtherByteOrder(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> NpyStore:
        if array.dtype == BFLOAT16:
            pytest.skip("numpy has no byte order for bfloat16")
        dtype = array.dtype.newbyteorder(">")
        for i, (start, stop) in enumerate(itertools.pairwise([0, 1, 1, 5, 6, len(array)])):
            (tmp_path / f"x-{i}.bin").write_bytes(
                b"odd" + array[start:stop].astype(dtype).tobytes()
            )
        return NpyStore.raw(
            tmp_path / "x-*.bin", shape=(-1, *array.shape[1:]), dtype=dtype, offset=3, mode="r+"
        )


def raw(tmp_path: Path, nbytes: int, **how: Any) -> NpyStore:
    (tmp_path / "x.bin").write_bytes(bytes(nbytes))
    return NpyStore.raw(tmp_path / "x.bin", **how)


def test_raw_computes_the_number_of_rows(tmp_path: Path) -> None:
    with raw(tmp_path, 26, shape=(-1, 3), dtype="bfloat16", offset=2) as store:
        assert (store.n_rows, store.row_shape, store.dtype) == (4, (3,), BFLOAT16)
    with raw(tmp_path, 26, shape=[-1, np.int64(3)], dtype="i2", offset=np.int64(2)) as store:
        assert (store.n_rows, store.row_shape) == (4, (3,))
    with raw(tmp_path, 24, shape=(2, 3), dtype="<i2") as store:
        # The bytes that follow the rows are not read.
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
        (25, {"shape": (-1, 3), "dtype": "i2"}, "4 rows of 6 bytes and 1 more bytes"),
        (24, {"shape": (-1, 3), "dtype": "i2", "offset": 2}, "3 rows of 6 bytes and 4 more bytes"),
        (
            24,
            {"shape": (-1, 3), "dtype": "i2", "offset": 30},
            "from byte 30 on need 30 bytes in all; the file has 24",
        ),
        (24, {"shape": (-1, 0), "dtype": "i2"}, "rows of 0 bytes"),
        (24, {"shape": (), "dtype": "i2"}, r"expected \(n_rows, \.\.\.\)"),
        (24, {"shape": (-2, 3), "dtype": "i2"}, "expected"),
        (24, {"shape": (2, -1), "dtype": "i2"}, "expected"),
        (24, {"shape": (2, 2), "dtype": "i2", "offset": -4}, "offset=-4"),
        (24, {"shape": (2, 0), "dtype": "i2"}, "rows of 0 bytes"),
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


def test_raw_of_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(errors.FileMissing, match=r"x\.bin: no such file"):
        NpyStore.raw(tmp_path / "x.bin", shape=(-1,), dtype="f4")
    with pytest.raises(errors.StoreError, match="is a directory"):
        NpyStore.raw(tmp_path, shape=(-1,), dtype="u1")


def test_shards_that_hold_more_than_the_limit_of_descriptors(
    tmp_path: Path, programs: Programs
) -> None:
    for i in range(1000):
        (tmp_path / f"{i:04}.bin").write_bytes(np.array([i, i + 0.5]).tobytes())
    code = f"""
import resource
import numpy as np
from pinfeed import NpyStore
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
with NpyStore.raw({str(tmp_path / "*.bin")!r}, shape=(2,), dtype="f8", mode="r+") as store:
    rows = np.random.default_rng(0).permutation(2000)
    out = np.empty(2000)
    store.gather(rows, out)
    assert (out == rows / 2).all()
    store.scatter(rows, -out)
    store.gather(np.arange(2000), out)
    assert (out == -np.arange(2000) / 2).all()
"""
    done = programs.run(code, warnings="error")
    assert done.returncode == 0, done.stderr
