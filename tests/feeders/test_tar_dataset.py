"""TarDataset: samples of archives by index, equal to those of a WebDataset."""

import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import pinfeed
from pinfeed import TarDataset, wrap_dataset
from pinfeed.errors import ArgumentError, FileMissing, ReadError, StoreError

Members = list[tuple[str, bytes]]


def write(path: Path, members: Members, **options: Any) -> str:
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return str(path)


def entry(path: Path, kind: bytes, name: str) -> str:
    """Write an archive with a sample, and an entry that is not a file."""
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("0.txt")
        archive.addfile(member)
        other = tarfile.TarInfo(name)
        other.type = kind
        other.linkname = "0.txt"
        archive.addfile(other)
    return str(path)


def opened(path: str) -> TarDataset:
    TarDataset.write_index(path)
    return TarDataset(path)


def numbers(n: int, first: int = 0) -> Members:
    found = []
    for i in range(first, first + n):
        found.append((f"{i:06}.npy", np.full(i % 5, i, np.int32).tobytes()))
        found.append((f"{i:06}.cls", str(i).encode()))
    return found


def decode(sample: dict[str, Any]) -> tuple[int, torch.Tensor]:
    values = np.frombuffer(sample["npy"], np.int32)
    return int(sample["cls"]), torch.tensor([len(values), values.sum()])


def test_samples_are_grouped_by_their_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.tar",
        [
            ("a/0.JPG", b"image"),
            ("a/0.seg.png", b"mask"),
            ("a/1.jpg", b""),
            ("./b.c/1.jpg", b"other"),
            ("b.c/1.txt", b"text"),
            # The same key again, but not consecutive.
            ("a/0.txt", b"late"),
        ],
    )
    dataset = opened(path)
    assert list(dataset) == [
        {"__key__": "a/0", "jpg": b"image", "seg.png": b"mask"},
        {"__key__": "a/1", "jpg": b""},
        {"__key__": "./b.c/1", "jpg": b"other"},
        {"__key__": "b.c/1", "txt": b"text"},
        {"__key__": "a/0", "txt": b"late"},
    ]
    assert repr(dataset) == "<TarDataset: 5 samples in 1 archives>"


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_all_formats(tmp_path: Path, kind: int) -> None:
    long = "d" * 90 + "/" + "e" * (80 if kind == tarfile.USTAR_FORMAT else 300)
    path = write(tmp_path / "x.tar", [(f"{long}.Größe", b"1"), ("ü.bin", b"2")], format=kind)
    assert list(opened(path)) == [
        {"__key__": long, "größe": b"1"},
        {"__key__": "ü", "bin": b"2"},
    ]


def test_folders_and_files_without_extension_are_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.tar", [("0.a", b"1"), ("README", b""), ("0.b", b"2"), ("__m__", b"")]
    )
    with tarfile.open(path, "a") as archive:
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    assert list(opened(path)) == [{"__key__": "0", "a": b"1", "b": b"2"}]


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_equal_those_of_the_plain_loop(tmp_path: Path, depth: int) -> None:
    for number in range(3):
        write(tmp_path / f"shard-{number}.tar", numbers(21, first=21 * number))
    dataset = opened(str(tmp_path / "shard-*.tar"))
    assert len(dataset) == 63
    loader = DataLoader([decode(dataset[i]) for i in range(63)], batch_size=8)
    with wrap_dataset(dataset, decode, batch_size=8, depth=depth, threads=2) as feeder:
        for (label, x), (label_of_loader, x_of_loader) in zip(feeder, loader, strict=True):
            assert torch.equal(label, label_of_loader)
            assert torch.equal(x, x_of_loader)


def test_a_shuffled_loop_resumes(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "x.tar", numbers(50)))

    def loop() -> Any:
        return wrap_dataset(dataset, lambda one: int(one["cls"]), batch_size=8, shuffle=True)

    with loop() as feeder:
        batches = iter(feeder)
        next(batches)
        state = feeder.state_dict()
        rest = [batch.tolist() for batch in batches]
    with loop() as feeder:
        feeder.load_state_dict(state)
        assert [batch.tolist() for batch in feeder] == rest


def test_a_dataset_is_pickled_with_its_index(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "x.tar", numbers(5)))
    os.remove(tmp_path / "x.tar.index")
    assert list(pickle.loads(pickle.dumps(dataset))) == list(dataset)


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(write(tmp_path / "x.tar", numbers(5)))
    monkeypatch.chdir(tmp_path)
    dataset = TarDataset("x.tar")
    monkeypatch.chdir("/")
    assert dataset[4]["cls"] == b"4"


@pytest.mark.parametrize("index", [-1, 5])
def test_samples_out_of_range_are_refused(tmp_path: Path, index: int) -> None:
    dataset = opened(write(tmp_path / "x.tar", numbers(5)))
    with pytest.raises(IndexError, match=f"sample {index} of 5 samples"):
        dataset[index]


def test_a_changed_archive_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", numbers(5))
    dataset = opened(path)
    write(tmp_path / "x.tar", numbers(5, first=5))
    os.utime(path, ns=(0, 0))
    for use in (lambda: dataset[0], lambda: TarDataset(path)):
        with pytest.raises(ReadError, match=f"another size or time.*run: pinfeed index {path}"):
            use()
    assert opened(path)[0]["cls"] == b"5"


def test_an_archive_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", numbers(5))
    with open(path, "r+b") as file:
        file.truncate(512 + 100)
    TarDataset.write_index(write(tmp_path / "y.tar", numbers(5)))
    os.replace(tmp_path / "y.tar.index", tmp_path / "x.tar.index")
    with pytest.raises(ReadError, match="another size"):
        TarDataset(path)


def test_a_missing_or_damaged_index_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", numbers(5))
    TarDataset.write_index(write(tmp_path / "y.tar", numbers(5)))
    with pytest.raises(FileMissing, match=f"x.tar has no index.*run: pinfeed index {path}"):
        TarDataset(path)
    encrypted = bytearray((tmp_path / "y.tar.index").read_bytes())
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    for data in (b"", b"text", b"PK\x03\x04", encrypted):
        (tmp_path / "x.tar.index").write_bytes(data)
        with pytest.raises(StoreError, match=r"is not an index .*run: pinfeed index"):
            TarDataset(path)
    with pytest.raises(FileMissing, match=r"z.tar: no such file"):
        TarDataset(tmp_path / "z.tar")


def test_an_index_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", numbers(5))
    os.mkdir(f"{path}.index")
    with pytest.raises(StoreError, match=r"x.tar.index cannot be written: .* another folder"):
        TarDataset.write_index(path)
    assert sorted(os.listdir(tmp_path)) == ["x.tar", "x.tar.index"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (tarfile.LNKTYPE, "hard"),
        (tarfile.SYMTYPE, "1.txt"),
        (tarfile.FIFOTYPE, "1.txt"),
    ],
)
def test_links_are_refused(tmp_path: Path, kind: bytes, name: str) -> None:
    path = entry(tmp_path / "x.tar", kind, name)
    with pytest.raises(StoreError, match=f"'{name}' is a link or .*tar --dereference"):
        TarDataset.write_index(path)
    assert os.listdir(tmp_path) == ["x.tar"]


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("0.a", b"x" * 2000), ("1.a", b"y" * 2000)])
    whole = Path(path).read_bytes()
    cases = {
        "ends within '1.a'": whole[:4000],
        "damaged header at byte 2,560": whole[:2560] + b"?" * 512 + whole[3072:],
        "is not an intact .tar archive .*decompress": b"\x1f\x8b" + whole,
        "is not an intact .tar": b"",
        "has no samples": whole[-1024:],
    }
    for problem, data in cases.items():
        Path(path).write_bytes(data)
        with pytest.raises(StoreError, match=problem):
            TarDataset.write_index(path)
    write(tmp_path / "x.tar", [("0.a", b""), ("0.A", b"")])
    with pytest.raises(StoreError, match=r"'0.A' is the second member .* extension 'a'"):
        TarDataset.write_index(path)
    write(tmp_path / "x.tar", [("0.__key__", b"")])
    with pytest.raises(StoreError, match=r"not '__key__'"):
        TarDataset.write_index(path)


def test_urls_are_refused() -> None:
    for use in (TarDataset, TarDataset.write_index):
        with pytest.raises(ArgumentError, match=r"is a URL; expected .* or copy the file first"):
            use("s3://bucket/shard-0.tar")


def test_other_sources_name_the_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", numbers(5))
    with pytest.raises(StoreError, match=r"wrap_dataset\(pinfeed.TarDataset\(path\), decode\)"):
        pinfeed.Feeder(path, batch_size=2)
