"""Routes of page-locked rows, chosen from measured rates that a file keeps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed.devices import route_benchmark
from pinfeed.devices.kernels import THIN, Grid
from pinfeed.devices.route import (
    STAGED,
    Rates,
    Timing,
    _cache_folder,
    _entry,
    cached_rates,
    decide,
)
from pinfeed.devices.route_benchmark import grids_of, measure
from pinfeed.stores.array import ArrayStore
from pinfeed.testing.sim import SimDevice

# More blocks move rows faster and slow down the computation of products.
RATES = Rates(
    {
        Grid(4): Timing(20.0, 0.8e-3),
        Grid(8): Timing(33.0, 0.51e-3),
        Grid(16): Timing(33.5, 0.5e-3),
    },
    staged=Timing(12.0, 1.6e-3),
    products_s=0.5e-3,
    both=50.0,
    in_turn=45.0,
)
SLOW = Rates(
    {Grid(4): Timing(2.0, 8e-3), Grid(8): Timing(3.0, 6e-3)},
    staged=Timing(12.0, 1.6e-3),
    products_s=1.5e-3,
    both=3.0,
    in_turn=4.0,
)


def test_the_fewest_threads_that_are_nearly_the_fastest() -> None:
    route = decide(RATES, None)
    assert (route.grid, route.duplex) == (Grid(8), True)
    assert route.why == (
        "the GPU reads page-locked rows directly: 33.0 GB/s by a kernel with 8 blocks of 512 "
        "threads, 12.0 GB/s gathered by the CPU and copied (0.51 ms and 1.60 ms together with "
        "matrix products of 0.50 ms); rows are gathered and scattered at the same time"
    )


def test_the_joint_time_decides() -> None:
    """The blocks that are fastest on an idle GPU may slow the products down."""
    kernel = {Grid(8): Timing(20.0, 0.6e-3), Grid(32): Timing(40.0, 0.9e-3)}
    assert decide(replace(RATES, kernel=kernel), None).grid == Grid(8)
    staged = Timing(12.0, 0.5e-3)
    assert decide(replace(RATES, kernel=kernel, staged=staged), None).grid is None
    # A direct route leaves the CPU to the loop, so the staged route must be clearly faster.
    staged = Timing(12.0, 0.59e-3)
    assert decide(replace(RATES, kernel=kernel, staged=staged), None).grid == Grid(8)


@pytest.mark.parametrize(
    ("rates", "wanted", "grid"),
    [
        (RATES, None, Grid(8)),
        (RATES, "direct", Grid(8)),
        (SLOW, None, None),
        (SLOW, "direct", Grid(8)),
    ],
)
def test_a_requested_route_is_taken(rates: Rates, wanted: str | None, grid: Grid | None) -> None:
    route = decide(rates, wanted)
    assert route.grid == grid
    assert route.why.startswith(
        "the GPU reads" if grid else "page-locked rows take the staged route"
    )


def test_thin_blocks_are_chosen_where_they_leave_products_alone() -> None:
    """Thin blocks have few threads each, so they count by their threads."""
    thin = Grid(132, THIN)
    kernel = {**RATES.kernel, thin: Timing(33.0, 0.50e-3)}
    assert decide(replace(RATES, kernel=kernel), None).grid == Grid(8)
    # The model's kernels may leave thin blocks no room, so they must be clearly faster.
    kernel[thin] = Timing(33.0, 0.46e-3)
    assert decide(replace(RATES, kernel=kernel), None).grid == Grid(8)
    kernel[thin] = Timing(33.0, 0.40e-3)
    route = decide(replace(RATES, kernel=kernel), None)
    assert route.grid == thin
    assert "by a kernel with 132 blocks of 32 threads" in route.why


def test_thin_blocks_run_on_every_multiprocessor() -> None:
    assert [grid.n_blocks for grid in grids_of(132) if grid.n_threads == THIN] == [132, 264]


def test_rows_move_in_turn_where_that_is_faster() -> None:
    assert not decide(SLOW, "direct").duplex


def test_measured_once(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure() -> Rates:
        measured.append("again")
        return RATES

    for _ in range(3):
        assert cached_rates("a GPU", measure, tmp_path) == RATES
    other = replace(SLOW, staged=Timing(40.0, 0.5e-3))
    for _ in range(2):
        assert cached_rates("another", lambda: other, tmp_path) == other
    assert cached_rates("a GPU", measure, tmp_path) == RATES
    assert len(measured) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["routes.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"format": 0, "a GPU": {}}',
        '{"format": 1, "a GPU": {"direct": {"4": 1}, "staged": 1, "both": 1, "in_turn": 1}}',
        '{"format": 2, "a GPU": {"kernel": {"4": {"rate": 1, "joint_s": 1}}}}',
        '{"format": 4, "a GPU": 7}',
        '{"format": 4, "a GPU": {"kernel": 3}}',
        *(
            json.dumps({"format": 4, "a GPU": {**_entry(RATES), **damage}})
            for damage in (
                {"kernel": [[4, 1.0]]},
                {"staged": {"rate": 1.0}},
                {"both": None},
            )
        ),
    ],
)
def test_rates_are_measured_again_if_their_file_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "routes.json").write_text(text)
    assert cached_rates("a GPU", lambda: SLOW, tmp_path) == SLOW
    assert "a GPU" in json.loads((tmp_path / "routes.json").read_text())


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "folder", Path("/dev/null")):
        assert cached_rates("a GPU", lambda: RATES, folder) == RATES


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert _cache_folder() == Path("/dev/null")


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


class Moving(SimDevice):
    """Device that keeps the grid and the number of groups of each read."""

    route = STAGED
    grids = grids_of(10)

    def __init__(self) -> None:
        super().__init__(direct=True)
        self.moved: list[tuple[Grid | None, int]] = []

    def read(self, parts: Any, stream: Any) -> Any:
        n_groups = len({id(part.rows) for part, _ in parts})
        self.moved.append((self.route.grid, n_groups))
        return super().read(parts, stream)


def test_every_way_is_timed_and_the_tables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.zeros((100, 3)), np.arange(100, dtype=np.int16), np.ones((7, 2), np.uint8)]
    stores, device = [ArrayStore(array.copy()) for array in arrays], Moving()
    n_products: list[int] = []

    def locked(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayStore:
        return ArrayStore(
            device.staging(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
        )

    monkeypatch.setattr(route_benchmark.PinnedStore, "empty", locked)
    # Small chunks, so that several threads gather.
    monkeypatch.setattr(route_benchmark, "_CHUNK_BYTES", 256)
    rates = measure(device, stores, 50, n_products.append)
    assert list(rates.kernel) == list(device.grids)
    timings = [*rates.kernel.values(), rates.staged]
    assert min(min(timing.rate, timing.joint_s) for timing in timings) > 0
    assert min(rates.products_s, rates.both, rates.in_turn) > 0
    assert {grid for grid, _ in device.moved} == set(device.grids)
    assert {n_groups for _, n_groups in device.moved} == {2}, (
        "stores of equal length are read in one launch"
    )
    assert 0 < max(n_products) <= 64
    assert n_products.count(0) > 4 * len(device.grids), "each route is also timed alone"
    for store, array in zip(stores, arrays, strict=True):
        np.testing.assert_array_equal(store.array, array)
