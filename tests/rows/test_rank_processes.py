"""The ranks of a job follow from the environment, and worker processes are warned of repetition."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pinfeed import Feeder, Ranks, rows, wrap_readers
from pinfeed.devices import cuda_index
from pinfeed.errors import ArgumentError
from pinfeed.rows.ranks import world


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1)),
        ({"RANK": "1"}, "the environment has RANK=1; expected both RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE=2; expected both"),
        (
            {"RANK": "1", "WORLD_SIZE": "two"},
            "the environment has RANK=1, WORLD_SIZE=two; expected whole numbers",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "the environment has RANK=2, WORLD_SIZE=2: expected 0 <= rank < world_size",
        ),
    ],
)
def test_rank_and_world_size_are_read_from_the_environment(
    environment: dict[str, str], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(found, tuple):
        assert world() == found
        with Feeder(np.arange(12), batch_size=3, ranks="pad", device="cpu") as feeder:
            assert (
                torch.cat(list(feeder)).tolist()
                == np.arange(12).reshape(-1, found[1], 3)[:, found[0]].ravel().tolist()
            )
    else:
        with pytest.raises(ArgumentError, match=re.escape(found)):
            Feeder(np.arange(12), batch_size=3, ranks="pad", device="cpu")


@pytest.mark.parametrize(
    ("local_rank", "n_devices", "current", "index"),
    [
        (None, 8, 0, 0),
        (None, 8, 3, 3),
        ("", 8, 0, 0),
        ("5", 8, 0, 5),
        ("5", 8, 2, 2),
        ("5", 1, 0, 0),
        ("3", 2, 1, 1),
    ],
)
def test_each_process_of_a_machine_takes_a_gpu(
    local_rank: str | None, n_devices: int, current: int, index: int
) -> None:
    """It takes its own GPU, the GPU that was set before, or the only one that it sees."""
    assert cuda_index(local_rank, n_devices, current) == index


# ---- worker processes of a DataLoader ------------------------------------------------------------


class Looping(IterableDataset[Any]):
    """Loops over a feeder in the process that iterates it, and logs messages to a file."""

    def __init__(self, log: Path, make: Callable[[int, int], Any]) -> None:
        self._log = log
        self._make = make

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is not None:
            logging.getLogger("pinfeed").addHandler(logging.FileHandler(self._log, delay=True))
        with self._make(*((0, 1) if info is None else (info.id, info.num_workers))) as feeder:
            for _ in range(2):
                for batch in feeder:
                    yield from (
                        batch[0].tolist() if isinstance(batch, (tuple, list)) else batch.tolist()
                    )


def read_by(**arguments: Any) -> Callable[[int, int], Any]:
    reading: dict[str, Any] = {
        "read_input": lambda i: [i],
        "get_output": lambda i: [i],
        "batch_size": 2,
        "device": "cpu",
    }
    return lambda rank, world_size: wrap_readers(range(6), range(6), **reading, **arguments)


def fed_by(**arguments: Any) -> Callable[[int, int], Any]:
    return lambda rank, world_size: Feeder(np.arange(6), batch_size=2, device="cpu", **arguments)


WORKERS: dict[str, tuple[Callable[[int, int], Any], int, bool]] = {
    "all rows": (fed_by(), 2, True),
    "all rows shuffled": (fed_by(shuffle=True), 2, True),
    "ranks of the job": (fed_by(ranks="pad"), 2, True),
    "identities": (read_by(), 2, True),
    "one worker": (fed_by(), 1, False),
    "intended": (fed_by(ranks="all"), 2, False),
    "identities, intended": (read_by(ranks="all"), 2, False),
    "a part each": (
        lambda i, n: fed_by(rows=rows.per_rank(rows.sequential(), rank=i, world_size=n))(i, n),
        2,
        False,
    ),
    "ranks of the workers": (
        lambda i, n: fed_by(ranks=Ranks(rank=i, world_size=n))(i, n),
        2,
        False,
    ),
    "a sampler for each worker": (lambda i, n: fed_by(rows=range(i, 6, n))(i, n), 2, False),
    "no workers": (fed_by(), 0, False),
}


@pytest.mark.parametrize("case", WORKERS)
def test_workers_that_each_have_all_rows_are_warned_of_once(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, n_workers, is_warned = WORKERS[case]
    loader = DataLoader(Looping(tmp_path / "log", make), batch_size=None, num_workers=n_workers)
    n_times = Counter(loader)
    is_repeated = is_warned or "intended" in case
    assert set(n_times.values()) == {2 * (2 if is_repeated else 1)}, "of two epochs"
    said = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
    assert (len(said), caplog.messages) == (is_warned, [])
    assert all(
        "each of the 2 worker processes of a DataLoader loops over all rows" in line
        for line in said
    )
    assert all("each row occurs 2 times. Give each worker its part" in line for line in said)
