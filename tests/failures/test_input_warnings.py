"""One warning about input that is valid but probably a mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed import (
    Feeder,
    NpyStore,
    Ranks,
    wrap_readers,
)


def test_a_list_of_similar_files_causes_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [str(tmp_path / f"part-{i}.npy") for i in range(4)]
    for file in files:
        np.save(file, np.zeros((5, 2)))
    for source in (files[:2], files[:2], {"x": (files, np.zeros(5))}):
        with Feeder(source, batch_size=5, device="cpu") as feeder:
            list(feeder)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2
    assert said[0] == (
        f"source=[{files[0]!r}, {files[1]!r}] is a list of 2 files with equally many rows "
        "of one shape and dtype, so each batch is a list of 2 tensors, one per file; if the files "
        "are shards of one source, give NpyStore([...]) or a pattern; if they are separate "
        "sources, give a tuple, which avoids this warning"
    )
    assert said[1].startswith(f"source=[{files[0]!r}, {files[1]!r}, ...] is a list of 4 files")


def test_parallel_sources_cause_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, dtype in (("a-0", "f4"), ("a-1", "f4"), ("b-0", "f4"), ("b-1", "f4"), ("c-0", "i4")):
        np.save(tmp_path / f"{name}.npy", np.zeros((5, 2), dtype))
    at = {path.stem: str(path) for path in tmp_path.iterdir()}
    with NpyStore(at["a-0"]) as one, NpyStore(at["a-1"]) as other:
        for source in (
            (at["a-0"], at["a-1"]),
            [at["a-0"], at["c-0"]],
            [at["a-0"], np.zeros((5, 2), "f4")],
            [str(tmp_path / "a-*.npy"), str(tmp_path / "b-*.npy")],
            {"x": at["a-0"], "y": at["a-1"]},
            [one, other],
        ):
            with Feeder(source, batch_size=5, device="cpu") as feeder:
                list(feeder)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_an_empty_epoch_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Feeder(np.zeros((8, 2)), batch_size=9, drop_last=True) as feeder:
        assert list(feeder) == []
    assert (
        "epochs have no batch of 9 rows, with 8 of 8, drop_last=True; give more rows, lower"
        in caplog.text
    )


NO_BATCH: list[Any] = [
    (
        {"ranks": Ranks("drop", rank=0, world_size=1000)},
        "epochs have no batch of 2 {}, with 0 of 8 on rank 0 of 1000; give more",
    ),
    (
        {"ranks": Ranks("join", rank=9, world_size=10)},
        "epochs have no batch of 2 {}, with 0 of 8 on rank 9 of 10; give more",
    ),
    (
        {"ranks": Ranks("drop", rank=1, world_size=8), "drop_last": True},
        ("epochs have no batch of 2 {}, with 1 of 8 on rank 1 of 8, drop_last=True; give more"),
    ),
]


@pytest.mark.parametrize(("arguments", "message"), NO_BATCH)
def test_ranks_without_batches_cause_a_warning(
    arguments: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Feeder(np.zeros((8, 2)), batch_size=2, **arguments) as feeder:
        assert list(feeder) == []
    functions: dict[str, Any] = {"read_input": lambda i: [i], "get_output": lambda i: [i]}
    with wrap_readers(range(8), range(8), batch_size=2, **functions, **arguments) as reader:
        assert list(reader) == []
    wanted = [message.format("rows"), message.format("inputs")]
    assert [said[: len(one)] for said, one in zip(caplog.messages, wanted, strict=True)] == wanted


def test_ranks_with_a_batch_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Feeder(
        np.zeros((8, 2)), batch_size=2, ranks=Ranks("join", rank=7, world_size=8)
    ) as feeder:
        assert [len(batch) for batch in feeder] == [1]
    assert caplog.messages == []


@pytest.mark.parametrize(
    "arguments",
    [{}, {"shuffle": True, "depth": 0}, {"ranks": Ranks(rank=0, world_size=2)}],
    ids=str,
)
def test_an_empty_list_of_identities_causes_a_warning(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with wrap_readers(
        [], [], read_input=lambda i: [i], get_output=lambda i: [i], batch_size=2, **arguments
    ) as reader:
        assert list(reader) == []
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("epochs have no batch of 2 inputs, with 0 of 0")
