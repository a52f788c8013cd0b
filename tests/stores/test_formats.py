"""FileFormat: a format that is registered is known to feeders, to the command and to advice."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command import run, values

import pinfeed
from pinfeed.cli.inspect import source_of
from pinfeed.stores.formats import FORMATS, FileFormat, Part, register
from pinfeed.validation import suggestions

NAMES = ("a", "b")


class Columns:
    """An open file of the format, as its library would give it."""


def columns(path: Any, name: str = "") -> pinfeed.ArrayStore:
    table = np.loadtxt(path, skiprows=1, dtype=np.float32)
    return pinfeed.ArrayStore(table[:, NAMES.index(name)].copy())


@pytest.fixture
def plain_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileFormat]:
    """Register a format of text with two columns, and write ``x.cols`` into the current folder."""
    for table in ("BY_START", "BY_SUFFIX", "BY_CONTENT", "REQUIREMENTS"):
        monkeypatch.setattr(suggestions, table, dict(getattr(suggestions, table)))

    @register
    class PlainFormat(FileFormat):
        kind = "plain"
        usage = "open_columns(path, name) reads a column"
        advice = "plain columns: give open_columns(path)"
        magic = b"COLS"
        suffixes = (".cols",)
        requirement = "plain>=1"
        store = staticmethod(columns)

        def parts(self, path: str, name: str | None) -> list[Part]:
            return [self.described(path, one) for one in (NAMES if name is None else (name,))]

        def columns_of(self, source: Any) -> Mapping[Any, Any] | None:
            is_ours = str(source).endswith(self.suffixes)
            return {name: columns(source, name) for name in NAMES} if is_ours else None

        def store_of(self, source: Any) -> Any:
            return pinfeed.ArrayStore(np.arange(3)) if isinstance(source, Columns) else None

    monkeypatch.chdir(tmp_path)
    Path("x.cols").write_text("COLS\n1 2\n3 4\n5 6\n")
    yield FORMATS["plain"]
    del FORMATS["plain"]


def test_a_feeder_reads_its_paths_and_objects(plain_format: FileFormat) -> None:
    with pinfeed.Feeder("x.cols", batch_size=3, device="cpu") as feeder:
        (batch,) = feeder
    assert {name: column.tolist() for name, column in batch.items()} == {
        "a": [1, 3, 5],
        "b": [2, 4, 6],
    }
    with pinfeed.Feeder(Columns(), batch_size=3, device="cpu") as feeder:
        assert next(iter(feeder)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["x.cols", "y.data"])
def test_the_command_lists_its_sources(plain_format: FileFormat, name: str) -> None:
    Path("x.cols").replace(name)
    found = values("inspect", name)["sources"]
    assert [(one["source"], one["kind"], one["shape"]) for one in found] == [
        (f"{name}:a", "plain", [3]),
        (f"{name}:b", "plain", [3]),
    ]
    assert run("inspect", name).stdout.endswith("open_columns(path, name) reads a column.\n")
    assert source_of([f"{name}:b"]).nbytes == 12


def test_errors_advise_its_store(plain_format: FileFormat) -> None:
    with pytest.raises(pinfeed.StoreError, match=r"looks like plain columns: give open_columns"):
        pinfeed.NpyStore("x.cols")
    assert suggestions.install_line("plain") == 'pip install "plain>=1"'


def test_a_damaged_file_is_left_to_the_library_of_its_suffix() -> None:
    assert {kind: one.suffixes[:1] for kind, one in FORMATS.items() if one.suffixes} == {
        "hdf5": (".h5",),
        "npy": (".npy",),
        "parquet": (".parquet",),
        "safetensors": (".safetensors",),
        "zarr": (".zarr",),
    }
    suffixes = [suffix for one in FORMATS.values() for suffix in one.suffixes]
    assert len(set(suffixes)) == len(suffixes)


def test_a_format_is_named_in_few_files() -> None:
    """Only the modules of a format name it, the lists of public names, and the feeder's page."""
    folder = Path(pinfeed.__file__).parent
    named = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if "parquet" in path.read_text().lower()
    }
    others = {name for name in named if not name.startswith("stores/parquet")}
    assert others == {"__init__.py", "stores/__init__.py", "feeders/feeder.py"}
