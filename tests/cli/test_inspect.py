"""``pinfeed inspect``: sources in files and folders, and why something cannot be one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.command import X, run, values
from support.unwrapped import unwrapped

import pinfeed

h5py = pytest.importorskip("h5py")


def sources(*names: str, status: int = 0) -> dict[str, dict[str, Any]]:
    """Return the values of each source, by its name on the command line."""
    found = values("inspect", *names, status=status)["sources"]
    return {one["source"]: one for one in found}


@pytest.mark.parametrize("extension", ["h5", "nc", "nc4", "he5", "mat", "npy", "data"])
@pytest.mark.parametrize("userblock", [0, 512, 4096])
def test_hdf5_is_opened_by_its_signature(extension: str, userblock: int) -> None:
    name = f"f.{extension}"
    with h5py.File(name, "w", userblock_size=userblock) as file:
        file["a/x"] = [[1.0, 2.0]]
    (one,) = sources(name).values()
    assert (one["source"], one["kind"], one["shape"]) == (f"{name}:a/x", "hdf5", [1, 2])
    assert values("plan", name)["plan"] == values("plan", f"{name}:a/x")["plan"]


def test_other_formats_are_opened_by_their_signature() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    os.rename("x.npy", "x.h5")
    pyarrow.parquet.write_table(pyarrow.table({"age": [1, 2]}), "x.csv")
    save_file({"w": X}, "x.bin")
    found = sources("x.h5", "x.csv", "x.bin")
    assert {name: one["kind"] for name, one in found.items()} == {
        "x.h5": "npy",
        "x.csv:age": "parquet",
        "x.bin:w": "safetensors",
    }
    for name in found:
        assert values("plan", name)["plan"]["batch_size"] in (2, 500)


def test_a_remote_file_is_a_source() -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/remote.npy", Path("x.npy").read_bytes())
    assert sources("memory://remote.npy")["memory://remote.npy"]["shape"] == [500, 3, 8]
    assert values("plan", "memory://remote.npy")["rows"] == 500


def test_a_name_after_a_colon_that_is_a_part_of_the_path() -> None:
    os.rename("x.npy", "a:b.npy")
    assert sources("a:b.npy")["a:b.npy"]["shape"] == [500, 3, 8]


def test_the_source_of_a_npy_file() -> None:
    assert sources("x.npy") == {
        "x.npy": {
            "source": "x.npy",
            "path": "x.npy",
            "kind": "npy",
            "name": "",
            "shape": [500, 3, 8],
            "dtype": "float32",
            "nbytes": 48000,
            "stored": "",
            "problem": "",
        }
    }
    shown = run("inspect", "x.npy", "s-*.npy").stdout
    assert "x.npy     (500, 3, 8)  float32  46.9 KiB\n" in shown
    assert "s-0.npy   (300, 3, 8)  float32  28.1 KiB\n" in shown
    assert shown.endswith("\nNpyStore(path) or the path itself reads a .npy file.\n")


def test_a_folder_lists_its_files(folder: Path) -> None:
    Path("data/inner").mkdir(parents=True)
    os.rename("x.npy", "data/x.npy")
    Path("data/cut.npy").write_bytes(Path("s-0.npy").read_bytes()[:-1])
    Path("data/notes.txt").write_text("text")
    result = run("inspect", "data")
    assert result.exit_code == 2
    assert "data/x.npy  (500, 3, 8)  float32" in result.stdout
    assert "- data/notes.txt is not a .npy file" in result.stdout
    assert result.stderr.startswith("pinfeed: data/cut.npy is truncated")
    Path("data/cut.npy").unlink()
    assert run("inspect", "data/").exit_code == 0
    assert "a folder without files" in run("inspect", "data/inner").stderr


def test_a_checkpoint_is_named(folder: Path) -> None:
    pinfeed.checkpoint.save("run", step=7)
    assert "call pinfeed.checkpoint.check('run')" in run("inspect", "run").stderr
    assert pinfeed.checkpoint.check("run")["objects"] == {"step": "value"}


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


def raw(change: Callable[[bytes], bytes]) -> Callable[[str], object]:
    return lambda path: Path(path).write_bytes(change(Path("x.npy").read_bytes()))


def saved(array: Any) -> Callable[[str], object]:
    return lambda path: np.save(path, array, allow_pickle=True)


DAMAGE: dict[str, tuple[Callable[[str], object], str]] = {
    "missing": (lambda path: None, "no such file"),
    "empty": (lambda path: Path(path).touch(), "is empty (0 bytes)"),
    "text": (raw(lambda b: b"a,b\n1,2\n3,4\n5,6\n"), "is not a .npy file (it starts with b'a,b"),
    "zip": (raw(lambda b: b"PK\x03\x04" + b[4:]), "looks like a zip archive"),
    "pickle": (raw(lambda b: b"\x80\x04" + b[2:]), "looks like a pickle"),
    "hdf5": (raw(lambda b: b"\x89HDF\r\n\x1a\n" + b[8:]), "h5py cannot open it"),
    "parquet": (raw(lambda b: b"PAR1" + b[4:]), "pyarrow"),
    "cut in the header": (raw(lambda b: b[:60]), "the .npy header is damaged"),
    "unknown version": (raw(lambda b: b[:6] + b"\x09" + b[7:]), ".npy version 9.0 is not known"),
    "truncated": (raw(lambda b: b[:-100]), "is truncated: 500 rows of 96 bytes"),
    "objects": (saved(np.array([{}, Bomb()], dtype=object)), "Python objects are never unpickled"),
    "bfloat16": (saved(X.astype(ml_dtypes.bfloat16)), 'NpyStore(path, dtype="bfloat16")'),
    "fortran": (saved(np.asfortranarray(X)), "Fortran order"),
    "no rows": (saved(X[:0]), "no rows"),
    "a number": (saved(np.float32(3)), "holds a single number"),
    "a pipe": (os.mkfifo, "is a pipe"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_inspect_says_what_is_wrong(kind: str) -> None:
    make, said = DAMAGE[kind]
    make("d.npy")
    result = run("inspect", "d.npy", "x.npy")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "x.npy     (500, 3, 8)" in result.stdout
    assert said in values("inspect", "d.npy", status=2)["errors"][0]
    assert not Path("unpickled").exists()


@pytest.mark.parametrize("name", ["x.h5", "x.h5ad", "x.parquet", "x.zarr", "x.safetensors"])
def test_missing_and_damaged_files(name: str) -> None:
    assert f"{name}: no such file" in run("inspect", name).stderr
    if name == "x.zarr":
        Path(name).mkdir()
    else:
        Path(name).write_bytes(b"junk" * 16)
    result = run("inspect", name)
    assert result.exit_code == 2
    assert not result.stdout
    assert name in result.stderr
    assert result.stderr.count("\n") == 1


def test_long_lists_are_shortened_for_people() -> None:
    with h5py.File("x.h5", "w") as file:
        for i in range(50):
            file[f"x{i:02}"] = np.arange(3)
            file[f"text{i:02}"] = "a"
    text = run("inspect", "x.h5").stdout
    assert "… and 10 more (--json lists all)" in text
    assert "… and 42 more (--json lists all)" in text
    alone = unwrapped(run("inspect", "x.h5:text07").stdout)
    assert alone.startswith("Not sources - x.h5:/text07 has text; convert it")
