"""Damaged checkpoints, and those of other objects, are refused before anything changes."""

import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.resumable_training import DIM, N, Training

from pinfeed import HostEmbedding, checkpoint
from pinfeed.errors import ArgumentError, CheckpointError, ClosedError


def test_a_tensor_of_a_checkpoint_that_is_damaged(tmp_path: pathlib.Path) -> None:
    table = HostEmbedding(4, 2, init="ones", name="table")
    directory = checkpoint.save(tmp_path, table=table, x=torch.ones(3))
    table.reset_parameters("zeros")
    sign(directory, lambda body: body["files"].pop("x.pt"))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: x.pt is missing in it"):
        checkpoint.resume(tmp_path, table=table)
    torch.save({"no": "tensor"}, directory / "x.pt")
    sign(directory, lambda body: body["files"].update({"x.pt": of_file(directory / "x.pt")}))
    with pytest.raises(
        CheckpointError, match=r"x.pt is damaged: it has a dict, expected a dense tensor"
    ):
        checkpoint.resume(tmp_path, table=table)
    assert table.read(range(4)).tolist() == [[0, 0]] * 4


def of_file(path: pathlib.Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "crc32": [zlib.crc32(path.read_bytes())]}


def test_a_state_that_is_refused_leaves_the_rows_as_they_are(tmp_path: pathlib.Path) -> None:
    table = HostEmbedding(4, 2, init="ones", name="table")
    checkpoint.save(tmp_path, table=table, model=torch.nn.Linear(2, 2))
    table.reset_parameters("zeros")
    with pytest.raises(CheckpointError, match="model cannot load its state: RuntimeError: Error"):
        checkpoint.resume(tmp_path, table=table, model=torch.nn.Linear(3, 2))
    assert table.read(range(4)).tolist() == [[0, 0]] * 4


def test_the_cause_of_a_refused_state_is_reported(tmp_path: pathlib.Path) -> None:
    class Refusing(Unsafe):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise MemoryError

    checkpoint.save(tmp_path, mine=Refusing())
    with pytest.raises(
        CheckpointError, match=r"mine cannot load its state: MemoryError$"
    ) as refusal:
        checkpoint.resume(tmp_path, mine=Refusing())
    assert isinstance(refusal.value.__cause__, MemoryError)


def sign(directory: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and update its checksum."""
    body = json.loads(json.loads((directory / "manifest.json").read_text())["body"])
    change(body)
    text = json.dumps(body)
    (directory / "manifest.json").write_text(
        json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    )


def test_rows_that_the_manifest_does_not_list(tmp_path: pathlib.Path) -> None:
    table = HostEmbedding(4, 2, name="table")
    sign(checkpoint.save(tmp_path, table=table), lambda body: body["files"].pop("table.npy"))
    with pytest.raises(
        CheckpointError, match=r"manifest.json is damaged: table.npy is missing in it"
    ):
        checkpoint.resume(tmp_path, table=table)


def test_a_manifest_with_invalid_checksums(tmp_path: pathlib.Path) -> None:
    sign(checkpoint.save(tmp_path), lambda body: body["files"]["random.pt"]["crc32"].append(None))
    with pytest.raises(
        CheckpointError, match=r"random.pt is damaged: its checksum is wrong in chunk 1 of 1"
    ):
        checkpoint.check(tmp_path)


def test_rows_are_plain_npy_files(tmp_path: pathlib.Path) -> None:
    training = Training().run(1)
    directory = checkpoint.save(tmp_path, **training.parts)
    assert np.array_equal(np.load(directory / "table.npy"), training.result[0])
    assert np.array_equal(np.load(directory / "rows.0.exp_avg.npy"), training.result[1])
    training.table.export(tmp_path / "words.npy")
    assert np.array_equal(np.load(tmp_path / "words.npy"), training.result[0])
    assert torch.equal(training.table.to_embedding().weight, torch.from_numpy(training.result[0]))
    assert not [name for name in os.listdir(tmp_path) if "writing" in name]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "name",
    ["table.npy", "rows.0.max_exp_avg_sq.npy", "rows.pt", "model.pt", "random.pt", "manifest.json"],
)
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "longer"])
def test_a_damaged_file_is_named_and_nothing_is_changed(
    tmp_path: pathlib.Path, name: str, damage: str
) -> None:
    training = Training().run(1)
    path = checkpoint.save(tmp_path, **training.parts) / name
    data = path.read_bytes()
    at = len(data) - 9
    changed = {
        "a bit": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
        "cut": data[:-5],
        "longer": data + b"\0",
    }
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    other = Training()
    before, generator = other.result, torch.get_rng_state()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        checkpoint.resume(tmp_path, **other.parts)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, other.result, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_file_is_never_looked_for_outside(tmp_path: pathlib.Path) -> None:
    directory = checkpoint.save(tmp_path, **Training().parts)
    (tmp_path / "elsewhere.npy").write_bytes((directory / "table.npy").read_bytes())
    (directory / "table.npy").unlink()
    (directory / "table.npy").symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(CheckpointError, match=r"table\.npy cannot be read"):
        checkpoint.resume(tmp_path, **Training().parts)


def test_other_objects_are_refused(tmp_path: pathlib.Path) -> None:
    training = Training()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.resume(tmp_path / "nowhere", **training.parts)
    assert not checkpoint.exists(tmp_path)
    checkpoint.save(tmp_path, **training.parts)
    assert checkpoint.exists(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"resume was given table; expected .*: batches, dense, model, rows, scheduler, table",
    ):
        checkpoint.resume(tmp_path, table=training.table)
    wrong = {**training.parts, "table": HostEmbedding(N, DIM + 1)}
    with pytest.raises(
        CheckpointError, match=r"table\.npy has shape \(40, 6\), float32; expected \(40, 7\)"
    ):
        checkpoint.resume(tmp_path, **wrong)
    with pytest.raises(ArgumentError, match="x: got object, which cannot be saved"):
        checkpoint.save(tmp_path, x=object())
    with pytest.raises(ArgumentError, match="other than tensors and plain values"):
        checkpoint.save(tmp_path, x=Unsafe())
    assert len(os.listdir(tmp_path)) == 1, "a refused save leaves nothing behind"
    iterator = iter(training.batches)
    next(iterator)
    with pytest.raises(ClosedError, match="a loop over rows of words is running"):
        checkpoint.resume(tmp_path, **training.parts)
    training.batches.close()


class Unsafe:
    def state_dict(self) -> dict[str, Any]:
        return {"a": pathlib.Path("x")}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError
