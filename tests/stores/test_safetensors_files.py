"""Rows of tensors in safetensors files."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.remote_files import npy
from support.stores import gathered

from pinfeed import NpyStore, RemoteStore, errors
from pinfeed.tensors.dtypes import BFLOAT16
from pinfeed.testing.suites import StoreTests, sample


def torch_of(array: np.ndarray) -> torch.Tensor:
    return (
        torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        if array.dtype == BFLOAT16
        else torch.from_numpy(array)
    )


class TestSafetensors(StoreTests):
    """The tensor lies between those of other dtypes, at an address that is not aligned."""

    def make(self, array: np.ndarray, tmp_path: Path) -> NpyStore:
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
        return NpyStore.safetensors(tmp_path / "x.safetensors", "x", mode="r+")


def test_a_tensor_in_shards(tmp_path: Path) -> None:
    array = sample(13, (3, 5), BFLOAT16)
    for i, (start, stop) in enumerate(itertools.pairwise([0, 1, 1, 5, 6, 13])):
        save_file(
            {"x": torch_of(array[start:stop]), "y": torch.zeros(i)}, tmp_path / f"x-{i}.safetensors"
        )
    with NpyStore.safetensors(tmp_path / "x-*.safetensors", "x") as store:
        wanted = np.random.default_rng(0).integers(0, 13, 50)
        np.testing.assert_array_equal(gathered(store, wanted), array[wanted])


def odd_file(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write tensors at odd addresses, which the format allows and no library uses."""
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
            with NpyStore.safetensors(path, name) as store:
                wanted = np.random.default_rng(0).integers(0, len(array), 20)
                np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
                np.testing.assert_array_equal(gathered(store, np.arange(len(array))), array)
    with pytest.raises(errors.StoreError, match="has no rows"):
        NpyStore.safetensors(path, "none")


def test_a_write_to_one_tensor_leaves_the_others(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.arange(24, dtype=np.int64).reshape(8, 3),
        "c": np.ones(7, np.float32),
    }
    path = odd_file(tmp_path / "x.safetensors", tensors)
    with NpyStore.safetensors(path, "b", mode="r+") as store:
        store.scatter(np.arange(8), -tensors["b"])
    for name, sign in (("a", 1), ("b", -1), ("c", 1)):
        with NpyStore.safetensors(path, name) as store:
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
        NpyStore.safetensors(model, name)


def test_not_every_name_of_a_large_model_is_listed(tmp_path: Path) -> None:
    save_file({f"layer{i}": torch.zeros(1) for i in range(1000)}, tmp_path / "x.safetensors")
    with pytest.raises(errors.StoreError, match="and 980 more") as caught:
        NpyStore.safetensors(tmp_path / "x.safetensors", "x")
    assert len(str(caught.value)) < 600
    save_file({}, tmp_path / "x.safetensors")
    with pytest.raises(errors.StoreError, match="expected one of none"):
        NpyStore.safetensors(tmp_path / "x.safetensors", "x")


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff" * 100, npy(np.zeros(9)), b"\0" * 8, b"\x02" + b"\0" * 7 + b"[]"],
    ids=repr,
)
def test_damaged_safetensors_files_are_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(damage)
    with pytest.raises(errors.StoreError, match="is not a safetensors file, or it is damaged"):
        NpyStore.safetensors(tmp_path / "x.safetensors", "x")


def test_every_truncation_of_a_safetensors_file_is_noticed(model: Path) -> None:
    content = model.read_bytes()
    for size in range(0, len(content), 7):
        model.write_bytes(content[:size])
        with pytest.raises(errors.StoreError, match="damaged"):
            NpyStore.safetensors(model, "w")


@settings(max_examples=150)
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
        with NpyStore.safetensors(path, "w") as store:
            gathered(store, np.arange(store.n_rows))
    except errors.StoreError:
        pass


def test_safetensors_of_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(errors.FileMissing, match=r"x\.safetensors: no such file"):
        NpyStore.safetensors(tmp_path / "x.safetensors", "x")
    with pytest.raises(errors.StoreError, match="is a directory"):
        NpyStore.safetensors(tmp_path, "x")


def test_packages_that_are_not_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(errors.MissingDependency, match=r'pip install "safetensors>=0\.4"'):
        NpyStore.safetensors(model, "w")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(errors.MissingDependency, match=r'pip install "fsspec>=2024\.2"'):
        RemoteStore("memory://x.npy")
