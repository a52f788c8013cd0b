"""Errors of functions, samples and arguments of wrap_readers."""

import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.reader_functions import DEPTHS_AND_READERS, several, stack, wrapped

from pinfeed import errors


def until_error(batches: Any, kind: type[BaseException]) -> tuple[list[list[int]], BaseException]:
    """Return the labels of each batch, and the error that ended the loop.

    ``pytest.raises`` would make a reference cycle of the error and the frames of the loop.
    """
    got: list[list[int]] = []
    try:
        got.extend(y.tolist() for _, y in batches)
    except kind as error:
        return got, error
    pytest.fail(f"a silent end after {got}")


def frames(error: BaseException | None) -> list[str]:
    assert error is not None
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def broken(i: int) -> Iterator[int]:
    yield i if i != 5 else {}["five"]


def broken_at_once(i: int) -> list[int]:
    return [i if i != 5 else {}["five"]]


PATHS = [f"images/{i}.png" for i in range(8)]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
@pytest.mark.parametrize("function", [broken, broken_at_once])
@pytest.mark.parametrize("kind", ["input", "output"])
def test_errors_follow_the_good_batches_with_their_identity(
    kind: str, function: Any, depth: int, n_readers: int, applied: bool
) -> None:
    name = {"input": "read_input", "output": "get_output"}[kind]
    arguments: dict[str, Any] = {name: lambda path: function(PATHS.index(path)), f"{kind}s": PATHS}
    if applied:
        arguments[f"apply_on_{kind}_batch"] = stack
    with wrapped(8, depth=depth, n_readers=n_readers, **arguments) as feeder:
        for _ in range(2):
            # An error ends its loop, not the feeder.
            got, error = until_error(feeder, KeyError)
            assert got == [[0, 1], [2, 3]]
            assert error.args == ("five",)
            assert frames(error)[-1] == function.__name__
            if sys.version_info >= (3, 11):
                assert f"in {name}({kind}s[5]), {kind}s[5] = 'images/5.png'" in notes(error)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
@pytest.mark.parametrize(
    ("count", "wanted"),
    [(0, "got 0 samples"), (1, "got 1 samples"), (3, "got more than 2 samples")],
)
@pytest.mark.parametrize("identity", [2, 3])
def test_a_count_that_does_not_match(
    identity: int, count: int, wanted: str, depth: int, n_readers: int, applied: bool
) -> None:
    def reading(i: int) -> Iterator[int]:
        yield from range(count if i == identity else 2)

    arguments: dict[str, Any] = {"apply_on_output_batch": stack} if applied else {}
    with wrapped(
        6,
        **{**several(2), "get_output": reading},
        batch_size=4,
        depth=depth,
        n_readers=n_readers,
        **arguments,
    ) as feeder:
        got, error = until_error(feeder, errors.ArgumentError)
    assert got == [[0, 1, 0, 1]]
    call = rf"get_output\(outputs\[{identity}\]\), outputs\[{identity}\] = {identity}"
    assert re.match(f"{call}: {wanted}; expected one_read_count=2 from every input", str(error))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing yielded": (
        {"read_input": lambda i: None},
        r"read_input\(inputs\[0\]\), inputs\[0\] = 0: got NoneType; expected an iterable",
    ),
    "not yielded": (
        {"read_input": lambda i: np.ones((3, 2))},
        "got more than 1 samples.*return it in a list",
    ),
    "shapes": (
        {"read_input": lambda i: [np.ones(i + 1)]},
        r"inputs\[1\] = 1: got a sample of shape \(2,\); expected \(1,\).*apply_on_input",
    ),
    "dtypes": (
        {"get_output": lambda i: [i / 2 if i else 0]},
        r"outputs\[1\] = 1: got a sample of float64; expected int64.*output_dtype",
    ),
    "apply": (
        {"apply_on_input_batch": lambda samples: next(samples)},
        r"apply_on_input_batch consumed 1 samples of inputs \[0, 1\]; expected .* 2",
    ),
    "lazy": ({"apply_on_input_batch": lambda samples: samples}, "consumed 0 samples"),
}


@pytest.mark.parametrize("n_readers", [1, 2])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", BAD)
def test_bad_samples(name: str, depth: int, n_readers: int) -> None:
    arguments, message = BAD[name]
    with (
        wrapped(6, depth=depth, n_readers=n_readers, **arguments) as feeder,
        pytest.raises(errors.ArgumentError, match=message),
    ):
        list(feeder)


@pytest.mark.parametrize(
    "sample",
    [{"a": 1}, np.array(["a"]), torch.eye(2).to_sparse(), np.datetime64("2020-01-01")],
    ids=str,
)
def test_samples_that_torch_does_not_have(sample: Any) -> None:
    with pytest.raises(
        errors.StoreError, match=r"read_input\(inputs\[0\]\), inputs\[0\] = 0: a sample"
    ):
        list(wrapped(read_input=lambda i: [sample]))


def test_a_batch_that_torch_does_not_have() -> None:
    with pytest.raises(errors.StoreError, match=r"apply_on_input_batch\['names'\]: dtype <U1"):
        list(
            wrapped(
                apply_on_input_batch=lambda samples: {"names": np.array(["x" for _ in samples])}
            )
        )


def stopping(i: int) -> list[int]:
    return [i if i != 5 else next(iter([]))]


def exiting(i: int) -> Iterator[int]:
    yield i if i != 5 else sys.exit(3)


def stopped(i: int) -> Iterator[int]:
    yield i if i != 5 else next(iter([]))


@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
@pytest.mark.parametrize("function", [stopping, exiting, stopped])
def test_exceptions_that_end_loops_silently_are_worker_errors(
    function: Any, depth: int, n_readers: int
) -> None:
    got, error = until_error(
        wrapped(8, get_output=function, depth=depth, n_readers=n_readers), errors.WorkerError
    )
    assert got == [[0, 1], [2, 3]]
    assert re.match(
        rf"{function.__name__} .*raised (StopIteration\(\)|SystemExit\(3\)), which would end the "
        r"loop without an error",
        str(error),
    )
    if sys.version_info >= (3, 11):
        assert "outputs[5] = 5" in notes(error)


@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
def test_a_keyboard_interrupt_is_raised_unchanged(depth: int, n_readers: int) -> None:
    def interrupted(i: int) -> Iterator[int]:
        if i == 5:
            raise KeyboardInterrupt
        yield i

    got, _ = until_error(
        wrapped(8, get_output=interrupted, depth=depth, n_readers=n_readers), KeyboardInterrupt
    )
    assert got == [[0, 1], [2, 3]]


@pytest.mark.parametrize("depth", [0, 2])
def test_apply_that_asks_for_too_many_samples(depth: int) -> None:
    got, error = until_error(
        wrapped(
            5, apply_on_input_batch=lambda samples: [next(samples), next(samples)], depth=depth
        ),
        errors.WorkerError,
    )
    assert got == [[0, 1], [2, 3]]
    if sys.version_info >= (3, 11):
        assert notes(error) == "in apply_on_input_batch of inputs [4]"


def test_a_value_that_cannot_be_shown() -> None:
    class Short(list[int]):
        def __getitem__(self, i: Any) -> Any:
            return super().__getitem__(i if i < 3 else 100)

    got, error = until_error(wrapped(inputs=Short(range(6))), IndexError)
    assert got == [[0, 1]]
    if sys.version_info >= (3, 11):
        assert "inputs[3] = unknown (IndexError)" in notes(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": range(5)}, "got 5 inputs and 6 outputs; expected as many inputs as outputs"),
        ({"inputs": iter(range(6))}, "inputs: got range_iterator; expected a list"),
        ({"outputs": "labels"}, "outputs: got str; expected a list"),
        ({"outputs": {0: 1}}, "outputs: got dict; expected a list"),
        ({"batch_size": 0}, "batch_size=0: expected a whole number, at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"one_read_count": 0}, "one_read_count=0"),
        ({"n_readers": True}, "n_readers=True"),
        ({"depth": -1}, "depth=-1"),
        (
            {"batch_size": 16, "one_read_count": 3},
            r"batch_size=16 is not a multiple of one_read_count=3.*give batch_size=15 or 18",
        ),
        ({"batch_size": 2, "one_read_count": 3}, r"give batch_size=3$"),
        ({"read_input": 5}, "read_input=5: expected a function"),
        ({"get_output": None}, "get_output=None: expected a function"),
        ({"apply_on_output_batch": "stack"}, "apply_on_output_batch='stack': expected a function"),
        (
            {"apply_on_input_batch": stack, "input_dtype": "f4"},
            "both apply_on_input_batch and input_dtype",
        ),
        ({"input_dtype": "float33"}, "input_dtype='float33' is no dtype"),
        ({"output_dtype": object}, "output_dtype=<class 'object'> is no dtype"),
        ({"output_dtype": torch.quint8}, "output_dtype=torch.quint8 is no dtype"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        wrapped(**arguments)


def test_a_column_of_a_table_is_refused() -> None:
    class Series(list[int]):
        iloc = None

    with pytest.raises(errors.ArgumentError, match=r"inputs: got Series.*\.tolist"):
        wrapped(inputs=Series(range(6)))
