"""Sizes of the caches of tables: what users give, what limits leave, and what the plan says."""

from __future__ import annotations

import fractions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import Config, GiB, HostEmbedding, RowOptimizer, train_rows
from pinfeed.errors import ArgumentError, BudgetError, NotEnoughGPUMemory, UnknownArgument
from pinfeed.native import library as native
from pinfeed.profiling.spans import CacheCounts
from pinfeed.profiling.timeline import trace
from pinfeed.training.row_loop.train_rows import RowLoop

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

ROWS = 100
# Adam keeps two tensors of state. A row of 4 float32 has 48 bytes with them.
ROW_NBYTES = 48


def loop_over(*tables: HostEmbedding, config: Config | None = None) -> RowLoop:
    optimizer = RowOptimizer(torch.optim.Adam, tables, lr=0.1)
    ids: Any = dict.fromkeys(tables, lambda batch: batch)
    return train_rows([torch.arange(9)], ids, optimizer=optimizer, config=config, device="cpu")


def table_of(size: Any, path: Path | None = None) -> HostEmbedding:
    name = path.stem if path else "words"
    return HostEmbedding(ROWS, 4, name=name, init="zeros", store=path, device_cache=size)


@pytest.mark.parametrize(
    ("size", "n_rows"),
    [
        (0.07, 7),
        (np.float32(0.1), 10),
        (fractions.Fraction(1, 3), 33),
        (1e-9, 1),
        (ROW_NBYTES * 5 + 47, 5),
        (np.int64(ROW_NBYTES), 1),
    ],
)
def test_a_cache_is_never_larger_than_asked(size: Any, n_rows: int) -> None:
    plan = loop_over(table_of(size)).plan
    assert plan.items[0].what == f"cache of words: {n_rows} of 100 rows"
    assert plan.items[0].nbytes == n_rows * ROW_NBYTES
    assert not plan.notes


@pytest.mark.parametrize("size", [1.0, GiB(1)])
def test_a_table_that_fits_its_cache(size: float) -> None:
    plan = loop_over(table_of(size)).plan
    assert plan.items[0].what == "cache of words: all rows"
    assert len(plan.notes) == 1
    assert plan.notes[0].startswith("words fits its cache as a whole: ")


@pytest.mark.parametrize(
    "size", [0, -1, True, 0.0, 1.5, float("nan"), "10%", b"auto", [1], np.array([0.1, 0.2])]
)
def test_invalid_cache_sizes_are_refused(size: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"^device_cache=.*: expected a whole number.* or a share"
    ):
        table_of(size)
    table = table_of(None)
    table.device_cache = size
    with pytest.raises(ArgumentError, match=r"^device_cache="):
        loop_over(table)


def test_bytes_that_hold_no_row() -> None:
    with pytest.raises(ArgumentError, match=r"device_cache=47 of words holds no row.* 48 B"):
        loop_over(table_of(47))


def test_automatic_caches_share_what_the_others_leave(tmp_path: Path) -> None:
    tables = [
        HostEmbedding(n, 4, init="zeros", store=tmp_path / f"{n}.npy", device_cache="auto")
        for n in (100, 300)
    ]
    config = Config(device_cache=ROW_NBYTES * 50)
    found = loop_over(*tables, table_of(0.1), config=config).plan.items[::2]
    assert [item.nbytes // ROW_NBYTES for item in found] == [10, 30, 10]


def test_automatic_caches_take_three_quarters_of_a_limit(tmp_path: Path) -> None:
    table = table_of("auto", tmp_path / "file.npy")
    config = Config(cpu_memory_limit=ROW_NBYTES * 40)
    assert loop_over(table, config=config).plan.items[0].nbytes == ROW_NBYTES * 30


def test_the_plan_says_why_a_table_has_no_cache(tmp_path: Path) -> None:
    plan = loop_over(
        table_of("auto"),
        table_of("auto", tmp_path / "file.npy"),
        config=Config(device_cache=ROW_NBYTES - 1),
    ).plan
    assert plan.items == ()
    assert plan.notes == (
        "words has no cache: on the CPU, reading rows in memory is as fast as a cache",
        "file has no cache: the remaining memory is smaller than a row with its optimizer state",
    )


@pytest.mark.usefixtures("without_native")
def test_a_table_has_no_cache_without_the_compiled_functions() -> None:
    table = table_of(0.1)
    loop = loop_over(table)
    assert loop.plan.items == ()
    assert loop.plan.notes == (
        "words has no cache: compiled functions choose its rows, but PINFEED_NATIVE=0 is set",
    )
    assert len([table(ids) for ids in loop]) == 1
    assert not loop.stats.cache_lookups
    table.device_cache = 1.5
    with pytest.raises(ArgumentError, match=r"^device_cache=1.5"):
        loop_over(table)


@pytest.mark.parametrize("name", ["device_cache", "cpu_memory_limit"])
def test_caches_that_exceed_a_limit(name: str) -> None:
    config = Config(**{name: 1000})
    match = rf"the caches take 4.7 KiB .*4.7 KiB of words.* leaves 1000 B .* raise {name} of"
    with pytest.raises(BudgetError, match=match):
        loop_over(table_of(1.0), config=config)


def test_a_config_whose_caches_exceed_its_limit() -> None:
    with pytest.raises(ArgumentError, match="device_cache=2048: expected at most gpu_memory_limit"):
        Config(gpu_memory_limit=1024, device_cache=2048)
    with pytest.raises(NotEnoughGPUMemory, match=r"1.0 GiB caches of tables.* lower device_cache"):
        Config(
            gpu_memory_limit=GiB(1),
            device_cache=GiB(1),
            model=torch.nn.Linear(4, 4),
            input_shape=(4,),
        )
    assert repr(Config(device_cache=GiB(1))) == "<Config: device_cache=1.0 GiB>"


def test_a_depth_of_a_config_is_taken_if_none_is_given() -> None:
    ids = {table_of(None): lambda batch: batch}
    assert train_rows([], ids, config=Config(depth=4)).plan.depth == 4
    assert train_rows([], ids, config=Config(depth=4), depth=1).plan.depth == 1


def test_arguments_at_the_wrong_place() -> None:
    options: dict[str, Any] = {"device_cache": 0.1}
    with pytest.raises(UnknownArgument, match="give it to the table: HostEmbedding"):
        train_rows([], {}, **options)
    options = {"gpu_memory_limit": GiB(1)}
    with pytest.raises(UnknownArgument, match=r"config=pinfeed\.Config"):
        train_rows([], {}, **options)
    options = {"cache_ratio": 0.1}
    with pytest.raises(UnknownArgument, match="device_cache="):
        HostEmbedding(9, 4, **options)


def test_each_table_has_counters_of_its_own_in_a_trace() -> None:
    counts = [(0.1, CacheCounts(name, 0, 9, 5, 64)) for name in ("users", "items")]
    found = trace([], counts, 0.0, 1.0)["traceEvents"]
    events = [event for event in found if event["ph"] == "C"]
    assert [event["name"] for event in events] == ["cache of users, rows", "cache of items, rows"]
    assert events[0]["args"] == {"hits": 5, "read": 4}
