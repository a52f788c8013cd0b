"""Checkpoints with any bytes: they are resumed or refused, and no code of theirs is executed."""

import io
import json
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzzing import N_STRESS, QUIET, mutated, mutations, npy_file
from torch import nn

from pinfeed import HostEmbedding, checkpoint, errors


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


class Run:
    """Objects that are saved, and that a damaged save must leave unchanged."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.table = HostEmbedding(20, 3, name="table")
        self.model = nn.Linear(3, 2)
        self.parts: dict[str, Any] = {"table": self.table, "model": self.model}

    @property
    def values(self) -> list[bytes]:
        arrays = [
            self.table.read(range(20)),
            *self.model.state_dict().values(),
            torch.get_rng_state(),
        ]
        return [array.numpy().tobytes() for array in arrays]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("whole"), **Run().parts, step=3)


def signed(directory: Path, body: Any) -> None:
    """Write a manifest whose checksum is right."""
    text = json.dumps(body)
    (directory / "manifest.json").write_text(
        json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    )


def forge(directory: Path, name: str, content: bytes) -> None:
    """Replace a file, and let the manifest say that it is right."""
    (directory / name).write_bytes(content)
    body = json.loads(json.loads((directory / "manifest.json").read_text())["body"])
    body["files"][name] = {
        "bytes": len(content),
        "crc32": [
            zlib.crc32(content[i : i + (16 << 20)]) for i in range(0, len(content), 16 << 20)
        ],
    }
    signed(directory, body)


def refused_or_resumed(root: Path, whole: Path, change: Callable[[Path], object]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    directory = Path(shutil.copytree(whole, root / whole.name))
    change(directory)
    run = Run()
    before = run.values
    try:
        checkpoint.resume(root, **run.parts)
    except errors.CheckpointError as error:
        if "cannot load its state" not in str(error):
            # The object itself raises the other error, and may have loaded half of its state.
            assert run.values == before, "refused, but changed"


FILES = ["manifest.json", "table.npy", "model.pt", "random.pt"]
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 2**70),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["../x", "/etc/passwd", "table.npy", ".", "a\0b"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["bytes", "crc32", "kind", "stores", "value", "../x", "a\0", ""]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


def changed_body(whole: Path, path: list[str], value: Any) -> Any:
    body = json.loads(json.loads((whole / "manifest.json").read_text())["body"])
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return body


places = st.sampled_from(
    [
        ["files"],
        ["objects"],
        ["format"],
        ["files", "table.npy"],
        ["files", "table.npy", "bytes"],
        ["files", "table.npy", "crc32"],
        ["files", "../x"],
        ["files", "random.pt"],
        ["objects", "table"],
        ["objects", "table", "kind"],
        ["objects", "table", "stores"],
        ["objects", "step"],
        ["objects", "step", "kind"],
    ]
)


@settings(max_examples=50, **QUIET)
@given(name=st.sampled_from(FILES), changes=mutations, forged=st.booleans())
def test_any_file_of_a_checkpoint(
    scratch: Path, whole: Path, name: str, changes: Any, forged: bool
) -> None:
    content = mutated((whole / name).read_bytes(), changes)
    forged = forged and name != "manifest.json"
    refused_or_resumed(
        scratch / "run",
        whole,
        lambda directory: (
            forge(directory, name, content) if forged else (directory / name).write_bytes(content)
        ),
    )


@settings(max_examples=50, **QUIET)
@given(path=places, value=json_values)
def test_any_manifest_of_a_checkpoint(
    scratch: Path, whole: Path, path: list[str], value: Any
) -> None:
    body = changed_body(whole, path, value)
    refused_or_resumed(scratch / "run", whole, lambda directory: signed(directory, body))


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
@settings(max_examples=N_STRESS // 2, **QUIET)
@given(name=st.sampled_from(FILES), changes=mutations, forged=st.booleans())
def test_any_file_of_a_checkpoint_for_long(
    scratch: Path, whole: Path, name: str, changes: Any, forged: bool
) -> None:
    content = mutated((whole / name).read_bytes(), changes)
    forged = forged and name != "manifest.json"
    refused_or_resumed(
        scratch / "run",
        whole,
        lambda directory: (
            forge(directory, name, content) if forged else (directory / name).write_bytes(content)
        ),
    )


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
@settings(max_examples=N_STRESS // 2, **QUIET)
@given(path=places, value=json_values)
def test_any_manifest_of_a_checkpoint_for_long(
    scratch: Path, whole: Path, path: list[str], value: Any
) -> None:
    body = changed_body(whole, path, value)
    refused_or_resumed(scratch / "run", whole, lambda directory: signed(directory, body))


class Executed:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.modules[__name__].Executed._ran, ()

    @staticmethod
    def _ran() -> None:
        raise SystemExit("code of a checkpoint was executed")


@pytest.mark.parametrize("name", ["model.pt", "random.pt", "table.npy"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_no_code_of_a_checkpoint_is_executed(
    scratch: Path, whole: Path, name: str, how: str
) -> None:
    file = io.BytesIO()
    torch.save({"weight": Executed()}, file) if how == "torch" else pickle.dump(Executed(), file)
    refused_or_resumed(
        scratch / "run", whole, lambda directory: forge(directory, name, file.getvalue())
    )
    objects = io.BytesIO()
    np.save(objects, np.array([Executed()] * 20, dtype=object), allow_pickle=True)
    refused_or_resumed(
        scratch / "run", whole, lambda directory: forge(directory, "table.npy", objects.getvalue())
    )


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link outside": lambda path: _linked_outside(path),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "depth": lambda path: path.write_text("[" * 100_000),
    "size": lambda path: os.truncate(path, 1 << 40),
}


FORGED: dict[str, bytes] = {
    "nothing": b"",
    "no .npy file": b"PK\x03\x04",
    "a damaged header": npy_file("{'descr': '<f4', 'fortran_order': 1, 'shape': (20, 3)}", 1, 240),
    "fewer rows than declared": npy_file(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2000, 3)}", 1, 0
    ),
    "another shape": npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (20, 4)}", 1, 240),
    "another order": npy_file("{'descr': '<f4', 'fortran_order': True, 'shape': (20, 3)}", 1, 240),
    "another dtype": npy_file("{'descr': '<f8', 'fortran_order': False, 'shape': (20, 3)}", 1, 240),
    "the other byte order": npy_file(
        "{'descr': '>f4', 'fortran_order': False, 'shape': (20, 3)}", 1, 240
    ),
    "objects": npy_file("{'descr': '|O', 'fortran_order': False, 'shape': (20, 3)}", 1, 240),
    "a single number": npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", 1, 240),
}


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.parametrize("name", ["table.npy", "model.pt", "random.pt"])
def test_a_forged_file_of_a_checkpoint(scratch: Path, whole: Path, name: str, how: str) -> None:
    """The manifest says that the file is right."""
    root, run = scratch / "run", Run()
    shutil.rmtree(root, ignore_errors=True)
    forge(Path(shutil.copytree(whole, root / whole.name)), name, FORGED[how])
    before = run.values
    with pytest.raises(errors.CheckpointError, match=name.replace(".", r"\.")) as refusal:
        checkpoint.resume(root, **run.parts)
    assert refusal.value.__cause__ is not None or "expected (20, 3), float32" in str(refusal.value)
    assert run.values == before


def _linked_outside(path: Path) -> None:
    elsewhere = path.parents[2] / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("name", FILES)
def test_hostile_objects_in_place_of_a_file_of_a_checkpoint(
    scratch: Path, whole: Path, name: str, how: str
) -> None:
    root = scratch / "run"
    shutil.rmtree(root, ignore_errors=True)
    HOSTILE[how](Path(shutil.copytree(whole, root / whole.name)) / name)
    with pytest.raises(errors.CheckpointError, match=name.replace(".", r"\.")):
        checkpoint.resume(root, **Run().parts)


def test_saves_that_are_links_or_files_are_ignored(scratch: Path, whole: Path) -> None:
    root = scratch / "linked"
    root.mkdir()
    (root / "00000009").symlink_to(whole)
    (root / "20240101").write_text("a file of the user's")
    assert not checkpoint.exists(root)
    assert checkpoint.save(root, step=1).name == "00000001"
    assert checkpoint.save(root, step=2).name == "00000002"
    assert sorted(os.listdir(root)) == ["00000002", "00000009", "20240101"]
    assert checkpoint.resume(root) == {"step": 2}
