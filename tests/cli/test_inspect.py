"""``pinfeed inspect``: what files hold, and what is wrong with them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.command import X, run, values

import pinfeed
from pinfeed.cli.inspect import inspected


def test_inspect_describes_an_npy_file() -> None:
    result = run("inspect", "x.npy")
    assert result.exit_code == 0
    for said in (
        "500 of shape (3, 8)",
        "float32",
        "C: each row is contiguous",
        "96 bytes",
        "multiples of 32 bytes",
        "version 1.0, 128 bytes",
    ):
        assert said in result.stdout
    (file,) = values("inspect", "x.npy")["files"]
    assert file == {
        "path": "x.npy",
        "kind": "npy",
        "bytes": 48128,
        "version": 1,
        "shape": [500, 3, 8],
        "dtype": "float32",
        "order": "C",
        "header_bytes": 128,
        "row_bytes": 96,
        "expected_bytes": 48128,
        "row_alignment": 32,
        "damage": [],
    }


def test_inspect_of_the_other_byte_order() -> None:
    np.save("big.npy", X.astype(">f4"))
    assert inspected("big.npy").details["dtype"] == "float32, big-endian"
    assert not inspected("big.npy").damage


def test_inspect_shards() -> None:
    result = run("inspect", "s-*.npy")
    assert result.exit_code == 0
    assert "Together: 500 rows, 46.9 KiB, in 2 shards" in result.stdout
    assert values("inspect", "s-0.npy", "s-1.npy")["source"] == {
        "files": 2,
        "rows": 500,
        "bytes": 48000,
    }


def test_advice_about_a_format_that_is_no_source() -> None:
    Path("x.csv").write_text("1,2\n3,4\n")
    (finding,) = values("inspect", "x.csv", status=1)["findings"]
    assert "looks like a table as text: give pyarrow.csv.read_csv(path)" in finding


def test_inspect_of_one_npy_file_among_others_has_no_total(folder: Path) -> None:
    pinfeed.checkpoint.save("run", step=7)
    Path("run/00000001/manifest.json").unlink()
    result = run("inspect", "x.npy", "run", "missing.npy")
    assert result.exit_code == 1
    assert "Together" not in result.stdout
    assert " 0 B" not in result.stdout
    Path("empty.npy").touch()
    assert " 0 B " in run("inspect", "x.npy", "empty.npy").stdout


def test_inspect_files_that_are_not_shards_of_one_source() -> None:
    np.save("s-2.npy", X.reshape(500, -1))
    result = run("inspect", "s-*.npy")
    assert result.exit_code == 1
    assert "not shards of one source: s-0.npy has rows of shape (3, 8), float32" in " ".join(
        result.stdout.split()
    )
    assert values("inspect", "s-*.npy", status=1)["source"] is None


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


def raw(change: Callable[[bytes], bytes]) -> Callable[[str], None]:
    return lambda path: void(Path(path).write_bytes(change(Path("x.npy").read_bytes())))


def void(_: object) -> None:
    """Return None."""


def saved(array: Any) -> Callable[[str], None]:
    return lambda path: np.save(path, array, allow_pickle=True)


DAMAGE: dict[str, tuple[Callable[[str], None], str]] = {
    "missing": (lambda path: None, "no such file"),
    "empty": (lambda path: Path(path).touch(), "is empty (0 bytes)"),
    "text": (raw(lambda b: b"a,b\n1,2\n3,4\n5,6\n"), "is not a .npy file (it starts with b'a,b"),
    "zip": (
        raw(lambda b: b"PK\x03\x04" + b[4:]),
        "looks like a zip archive: for a .npz file, save each array alone",
    ),
    "pickle": (raw(lambda b: b"\x80\x04" + b[2:]), "looks like a pickle"),
    "hdf5": (raw(lambda b: b"\x89HDF\r\n\x1a\n" + b[8:]), "looks like an HDF5 file"),
    "cut in the header": (raw(lambda b: b[:60]), "the .npy header is damaged"),
    "bad header": (raw(lambda b: b[:20] + b"?????" + b[25:]), "the .npy header is damaged"),
    "negative shape": (raw(lambda b: b.replace(b"(500,", b"(-50,")), "the .npy header is damaged"),
    "unknown version": (raw(lambda b: b[:6] + b"\x09" + b[7:]), ".npy version 9.0 is not known"),
    "huge header": (
        raw(lambda b: b[:6] + b"\x02\x00\xff\xff\xff\x7f" + b[12:]),
        "a header of 2147483647 bytes",
    ),
    "truncated": (
        raw(lambda b: b[:-100]),
        "is truncated: 500 rows of 96 bytes from byte 128 on need 48128 bytes",
    ),
    "extra bytes": (raw(lambda b: b + b[-192:]), "192 bytes more than its header says, 2.00 rows"),
    "objects": (saved(np.array([{}, Bomb()], dtype=object)), "Python objects are never unpickled"),
    "structured": (
        saved(np.zeros(3, [("a", "f4"), ("b", "i8")])),
        "save each field as a separate array",
    ),
    "dates": (saved(np.zeros(3, "M8[s]")), 'convert with .view("int64")'),
    "bfloat16": (saved(X.astype(ml_dtypes.bfloat16)), 'NpyStore(path, dtype="bfloat16")'),
    "fortran": (saved(np.asfortranarray(X)), "Fortran order"),
    "no rows": (saved(X[:0]), "has no rows"),
    "a number": (saved(np.float32(3)), "holds a single number"),
    "a folder": (
        lambda path: Path(path).mkdir(),
        "is a directory; it contains no .npy files and no checkpoint",
    ),
    "a pipe": (os.mkfifo, "is not a regular file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_inspect_says_what_is_wrong(kind: str) -> None:
    make, said = DAMAGE[kind]
    make("d.npy")
    result = run("inspect", "d.npy")
    assert result.exit_code == 1
    assert said in " ".join(result.stdout.split())
    assert not result.stderr
    found = values("inspect", "x.npy", "d.npy", status=1)
    assert said in found["findings"][0]
    assert [bool(file["damage"]) for file in found["files"]] == [False, True]
    assert not Path("unpickled").exists()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "missing"),
        ("empty", "damaged"),
        ("bad header", "damaged"),
        ("truncated", "damaged"),
        ("extra bytes", "damaged"),
        ("zip", "not supported"),
        ("fortran", "not supported"),
        ("objects", "not supported"),
        ("a folder", "not supported"),
    ],
)
def test_only_broken_files_are_called_damaged(kind: str, problem: str) -> None:
    DAMAGE[kind][0]("d.npy")
    (line,) = [
        line for line in run("inspect", "x.npy", "d.npy").stdout.splitlines() if "d.npy  " in line
    ]
    assert line.endswith(f"  {problem}")


def test_inspect_of_a_folder_with_files_names_them(folder: Path) -> None:
    (damage,) = inspected(str(folder)).damage
    assert damage.endswith(f"give its files: {folder}/*.npy")


def test_inspect_of_a_checkpoint_of_ranks(folder: Path) -> None:
    for rank in range(2):
        pinfeed.checkpoint.save(folder / "run" / f"{rank}-of-2", step=rank)
    assert (
        "give the parts of its checkpoint, one for each rank: run/*-of-*"
        in values("inspect", "run", status=1)["findings"][0]
    )
    assert [part["kind"] for part in values("inspect", "run/*-of-*")["files"]] == ["checkpoint"] * 2


def test_inspect_safetensors() -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"embedding.weight": X, "bias": X[0, 0]}, "m.safetensors")
    result = run("inspect", "m.safetensors")
    assert result.exit_code == 0
    assert "embedding.weight  (500, 3, 8)  F32" in result.stdout
    assert values("inspect", "m.safetensors")["files"][0]["tensors"][0] == {
        "name": "bias",
        "shape": [8],
        "dtype": "F32",
    }
    Path("m.safetensors").write_bytes(b"\xff" * 100)
    assert (
        "is not a safetensors file, or it is damaged"
        in values("inspect", "m.safetensors", status=1)["findings"][0]
    )


def test_inspect_checkpoint() -> None:
    pinfeed.checkpoint.save("run", model=torch.nn.Linear(2, 2), step=7)
    result = run("inspect", "run")
    assert result.exit_code == 0
    assert "All files match their checksums." in result.stdout
    assert values("inspect", "run")["files"][0]["objects"] == {"model": "state", "step": "value"}
    path = Path("run/00000001/model.pt")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "its checksum is wrong in chunk 0" in values("inspect", "run", status=1)["findings"][0]
