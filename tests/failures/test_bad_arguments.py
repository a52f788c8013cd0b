"""Bad arguments and sources of a feeder: the error names them and says what to give instead."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed import (
    ArrayStore,
    Config,
    Feeder,
    MiB,
    errors,
    rows,
)


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, errors.ArgumentError, "neither batch_size nor config"),
        (
            {"batch_size": 0},
            errors.ArgumentError,
            "batch_size=0: expected a whole number, at least 1",
        ),
        ({"batch_size": 2.5}, errors.ArgumentError, "batch_size=2.5: expected a whole number"),
        (
            {"batch_size": 2, "depth": 1.5},
            errors.ArgumentError,
            "depth=1.5: expected a whole number",
        ),
        ({"config": 5}, errors.ArgumentError, "config=5: expected a pinfeed.Config"),
        ({"batch_size": 2, "rows": 5}, errors.ArgumentError, "rows=5: expected an order"),
        ({"batch_size": 3, "config": Config()}, errors.ArgumentError, "both batch_size and config"),
        ({"batch_size": 3, "depth": -1}, errors.ArgumentError, "depth=-1"),
        (
            {"batch_size": 3, "rows": rows.sequential(), "shuffle": True},
            errors.ArgumentError,
            "both rows and shuffle",
        ),
        (
            {"batch_size": 3, "rows": [[1], [2]]},
            errors.ArgumentError,
            "yields whole batches",
        ),
        ({"rows": [1, 2]}, errors.ArgumentError, "give batch_size="),
        (
            {"batch_size": 3, "rows": np.zeros((4, 2))},
            errors.RowIndexError,
            "rows: got ndarray of float64; expected an order of",
        ),
        (
            {"batch_size": 3, "rows": ["1", "2"]},
            errors.RowIndexError,
            "rows: got list of <U1; expected an order of",
        ),
        (
            {"batch_size": 3, "rows": lambda: [1]},
            errors.ArgumentError,
            "row indices; call the function$",
        ),
        (
            {"batch_size": 3, "rows": rows.shuffled},
            errors.ArgumentError,
            "call the function$",
        ),
        (
            {"batch_size": 3, "rows": rows.block_shuffled},
            errors.ArgumentError,
            "call the function$",
        ),
        ({"rows": []}, errors.ArgumentError, "rows is empty"),
        (
            {"rows": [[1, 100]]},
            errors.RowIndexError,
            "batch 0 of rows: row 100 is out of range; expected 0 <= row < 100",
        ),
        ({"rows": [[1], [-1]]}, errors.RowIndexError, "batch 1 of rows: row -1"),
        ({"rows": [[1.5]]}, errors.RowIndexError, "float64"),
        ({"rows": np.ones(100, bool), "batch_size": 3}, errors.RowIndexError, "bool"),
        ({"rows": np.array([5, 200]), "batch_size": 3}, errors.RowIndexError, "row 200"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
def test_invalid_arguments_are_refused(
    x: np.ndarray, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Feeder(x, **arguments)


def test_sources_of_unequal_length(x: np.ndarray) -> None:
    with pytest.raises(errors.StoreError, match=r"source\['a'\] has 100, source\['b'\] has 99"):
        Feeder({"a": x, "b": x[:99]}, batch_size=3)


def test_invalid_sources_are_refused(x: np.ndarray, tmp_path: Path) -> None:
    for source, message in [
        ((), "no arrays"),
        ({"a": None}, "got NoneType"),
        ((x, 3), r"source\[1\]: got int"),
    ]:
        with pytest.raises(errors.StoreError, match=message):
            Feeder(source, batch_size=3)
    with pytest.raises(FileNotFoundError, match="no such file"):
        Feeder(str(tmp_path / "none.npy"), batch_size=3)


def test_a_custom_store_with_impossible_properties() -> None:
    for said, message in [
        ({"n_rows": 0}, "n_rows=0"),
        ({"dtype": np.dtype(">f4")}, "byte order"),
        ({"dtype": np.dtype("U3")}, "no torch"),
    ]:
        store = ArrayStore(np.zeros(3))
        with pytest.raises(errors.StoreError, match=message):
            Feeder(type("Odd", (ArrayStore,), said)(store.array), batch_size=1)


def test_invalid_states_are_refused(x: np.ndarray) -> None:
    with Feeder(x, batch_size=10) as feeder:
        state = feeder.state_dict()
        for wrong in ({"batch": 11}, {"batch": -1}, {"epoch": -1}):
            with pytest.raises(errors.ArgumentError, match=r"expected 0 to 10|an epoch has 10"):
                feeder.load_state_dict(state | wrong)
        with pytest.raises(errors.ArgumentError, match="expected a whole number"):
            feeder.set_epoch("a")  # type: ignore[arg-type]


def test_bad_row_indices_are_raised_after_the_good_batches(x: np.ndarray) -> None:
    def sampler() -> Iterator[int]:
        yield from [1, 2, 3, 4, 100]

    with Feeder(x, rows=sampler(), batch_size=2) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)), len(next(loop))] == [2, 2]
        with pytest.raises(errors.RowIndexError, match="row 100"):
            next(loop)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": "shuffled"}, "rows='shuffled': expected an order"),
        ({"rows": rows.block_shuffled}, "call the function"),
        ({"shuffle": "False"}, "shuffle='False': expected True or False"),
        ({"device": "gpu"}, "device='gpu' is not a device; expected 'auto', 'cpu'"),
    ],
)
def test_strings_in_the_place_of_objects(options: dict[str, Any], words: str) -> None:
    with pytest.raises((errors.ArgumentError, errors.DeviceError), match=words):
        Feeder(np.zeros((8, 2)), batch_size=4, **options)


def test_paths_of_shards_are_no_parallel_sources(tmp_path: Path) -> None:
    for i in (1, 2):
        np.save(tmp_path / f"{i}.npy", np.zeros((i, 2)))
    with pytest.raises(
        errors.StoreError,
        match=r"unequal numbers of rows: .*; give shards of one source as a pattern",
    ):
        Feeder([str(tmp_path / "1.npy"), str(tmp_path / "2.npy")], batch_size=1)


def test_sizes_are_numbers() -> None:
    with pytest.raises(errors.ArgumentError, match=r"MiB\('64'\): expected a number"):
        MiB("64")  # type: ignore[arg-type]
