"""The objects that a checkpoint saves, returns or refuses."""

import pathlib
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pinfeed import checkpoint
from pinfeed.errors import ArgumentError, CheckpointError
from pinfeed.tensors.dtypes import BFLOAT16


@pytest.mark.parametrize("name", ["random", ".x", "a/b", "../x", ""])
def test_names_that_are_no_files(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ArgumentError, match="expected a valid variable name"):
        checkpoint.save(tmp_path / "c", **{name: 1})
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path: pathlib.Path) -> None:
    values = {
        "step": np.int64(3),
        "loss": np.float32(0.1),
        "done": np.bool_(True),
        "more": [np.uint8(1), {"a": np.float16(0.5)}],
    }
    checkpoint.save(tmp_path, **values)
    found = checkpoint.resume(tmp_path)
    assert found == {
        "step": 3,
        "loss": float(np.float32(0.1)),
        "done": True,
        "more": [1, {"a": 0.5}],
    }
    assert [type(found[name]) for name in ("step", "loss", "done")] == [int, float, bool]


def test_one_state_is_in_memory_at_a_time(tmp_path: pathlib.Path) -> None:
    states: list[weakref.ref[Any]] = []

    class Stateful:
        def state_dict(self) -> Any:
            assert all(state() is None for state in states)
            state = OrderedDict(numbers=torch.ones(3))
            states.append(weakref.ref(state))
            return state

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    checkpoint.save(tmp_path / "c", first=Stateful(), second=Stateful(), third=Stateful())
    assert len(states) == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nn.Linear, r"x: Linear is a class; expected an instance; give x=Linear\(\.\.\.\)"),
        (
            nn.Linear(1, 1).state_dict(),
            "x: got OrderedDict of tensors, which cannot be saved; .* give x=model, whose state_d",
        ),
        ({"a": torch.ones(1)}, "x: got dict of tensors, which cannot be saved"),
    ],
    ids=["class", "state_dict", "dict"],
)
def test_classes_and_states_in_place_of_modules_are_refused(
    tmp_path: pathlib.Path, value: Any, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        checkpoint.save(tmp_path / "c", x=value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("path", [None, 3, b"c", ["c"]], ids=repr)
@pytest.mark.parametrize(
    "function", [checkpoint.save, checkpoint.resume, checkpoint.exists, checkpoint.check]
)
def test_a_directory_that_is_no_path(function: Any, path: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a path, as a str or a"):
        function(path)


def test_one_save_in_place_of_the_directory(tmp_path: pathlib.Path) -> None:
    one = checkpoint.save(tmp_path / "c", step=1)
    for function in (checkpoint.resume, checkpoint.check):
        with pytest.raises(
            CheckpointError, match=f"00000001 is a single save; .* give {str(tmp_path / 'c')!r}"
        ):
            function(one)


@pytest.mark.parametrize("value", [{1: 2}, [(1, 2)], {"a": {2: 3}}])
def test_values_that_would_be_resumed_as_others(tmp_path: pathlib.Path, value: object) -> None:
    with pytest.raises(ArgumentError, match="with str keys"):
        checkpoint.save(tmp_path / "c", value=value)


TENSORS = {
    "a number": torch.tensor(3),
    "bfloat16": torch.arange(6.0).to(torch.bfloat16).view(2, 3),
    "part": torch.arange(1000.0)[10:12],
    "transposed": torch.arange(6).view(2, 3).T,
    "expanded": torch.ones(1, 3).expand(2, 3),
    "parameter": nn.Parameter(torch.ones(2)),
    "not a number": torch.tensor([float("nan"), -0.0]),
    "empty": torch.empty(0, 3),
    "conjugated": torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("given", [False, True])
def test_tensors_are_saved_exactly(tmp_path: pathlib.Path, name: str, given: bool) -> None:
    tensor = TENSORS[name]
    directory = checkpoint.save(tmp_path, step=tensor, n=3, model=nn.Linear(2, 2))
    assert (directory / "step.pt").stat().st_size < 4000, "only the elements of the view are saved"
    other = {"step": torch.zeros(9)} if given else {}
    found = checkpoint.resume(tmp_path, model=nn.Linear(2, 2), **other)
    assert {name: type(value) for name, value in found.items()} == {"step": torch.Tensor, "n": int}
    assert found["step"].dtype == tensor.dtype
    torch.testing.assert_close(found["step"], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert all((value == 0).all() for value in other.values()), "the given object is not changed"
    assert checkpoint.check(tmp_path)["objects"]["step"] == "tensor"


@pytest.mark.parametrize(
    "array",
    [
        np.array(2.5),
        np.arange(12.0).reshape(3, 4)[::-1, ::2],
        np.ones(3, BFLOAT16),
        np.array([True, False]),
        np.arange(3, dtype="u2"),
    ],
    ids=str,
)
def test_arrays_are_saved_exactly(tmp_path: pathlib.Path, array: np.ndarray) -> None:
    checkpoint.save(tmp_path, x=array)
    found = checkpoint.resume(tmp_path, x=array)["x"]
    assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        [torch.ones(2)],
        np.array(["a"]),
        np.ones(2, ">f4"),
        np.complex64(3),
        np.datetime64(3, "s"),
        (np.int64(3),),
        np.ma.masked_array([1]),
    ],
    ids=repr,
)
def test_tensors_and_arrays_that_cannot_be_saved(tmp_path: pathlib.Path, value: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"x: got .*, which cannot be saved; expected .* dense tensors and arrays of numbers",
    ):
        checkpoint.save(tmp_path / "c", x=value)
    assert not (tmp_path / "c").exists()
