"""``pinfeed index``: writes the indexes of archives."""

import io
import tarfile

from support.command import run, values

from pinfeed import TarDataset


def write(path: str, *names: str) -> None:
    with tarfile.open(path, "w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))


def test_it_writes_the_index_of_each_archive() -> None:
    write("s-0.tar", "0.jpg", "0.cls", "1.jpg", "README")
    write("s-1.tar", "2.jpg")
    result = run("index", "s-0.tar", "s-1.tar")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["archive", "samples", "members", "left", "out", "extensions"],
        ["-" * 9, "-" * 9, "-" * 9, "-" * 10, "-" * 12],
        ["s-0.tar", "2", "3", "1", "jpg", "cls"],
        ["s-1.tar", "1", "1", "0", "jpg"],
    ]
    assert [sample["__key__"] for sample in TarDataset("s-*.tar")] == ["0", "1", "2"]


def test_it_reports_values_and_errors() -> None:
    write("s-0.tar", "0.jpg", "0.cls")
    found = values("index", "s-*.tar", "x.npy", "missing.tar", status=2)
    counts = {"samples": 1, "members": 2, "left out": 0, "extensions": "jpg cls"}
    assert found["archives"] == [{"archive": "s-0.tar", **counts}]
    assert ["x.npy is not" in found["errors"][0], "missing.tar" in found["errors"][1]] == [True] * 2


def test_a_bad_archive_does_not_stop_those_after_it() -> None:
    with open("s-0.tar", "wb") as file:
        file.write(b"text")
    write("s-1.tar", "0.jpg")
    found = values("index", "s-*.tar", status=2)
    assert [archive["archive"] for archive in found["archives"]] == ["s-1.tar"]
    assert ["s-0.tar is not" in error for error in found["errors"]] == [True]
