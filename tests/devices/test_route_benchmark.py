"""Routes of page-locked rows: decided from measured rates, which a file keeps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed.devices import route_benchmark
from pinfeed.devices.route import STAGED, Rates, decide
from pinfeed.devices.route_benchmark import BLOCKS, measure
from pinfeed.devices.route_cache import _cache_folder, cached_rates
from pinfeed.stores.array import ArrayStore
from pinfeed.testing.sim import SimDevice

RATES = Rates({4: 20.0, 8: 33.0, 16: 33.5, 32: 30.0}, staged=12.0, both=50.0, in_turn=45.0)
SLOW = Rates({4: 2.0, 8: 3.0}, staged=12.0, both=3.0, in_turn=4.0)


def test_the_fewest_blocks_that_are_nearly_the_fastest() -> None:
    route = decide(RATES, None)
    assert (route.n_blocks, route.duplex) == (8, True)
    assert route.why == (
        "the GPU reads page-locked rows itself: 33.0 GB/s by 8 blocks of a kernel, 12.0 GB/s "
        "gathered by the CPU and copied; rows are gathered and scattered at the same time"
    )


@pytest.mark.parametrize(
    ("rates", "wanted", "n_blocks"),
    [(RATES, None, 8), (RATES, "direct", 8), (SLOW, None, 0), (SLOW, "direct", 8)],
)
def test_what_is_wanted_is_done(rates: Rates, wanted: str | None, n_blocks: int) -> None:
    route = decide(rates, wanted)
    assert route.n_blocks == n_blocks
    assert route.why.startswith("the GPU reads" if n_blocks else "page-locked rows are staged")


def test_in_turn_where_that_is_faster() -> None:
    assert not decide(SLOW, "direct").duplex


def test_measured_once(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure() -> Rates:
        measured.append("again")
        return RATES

    for _ in range(3):
        assert cached_rates("a GPU", measure, tmp_path) == RATES
    assert cached_rates("another", lambda: SLOW, tmp_path) == SLOW
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
        '{"format": 1, "a GPU": {"direct": 3}}',
        '{"format": 1, "a GPU": 7}',
        '{"format": 1, "a GPU": {"direct": {}, "staged": 1, "both": 1, "in_turn": 1}}',
        '{"format": 1, "a GPU": {"direct": {"4": NaN}, "staged": 1, "both": 1, "in_turn": 1}}',
    ],
)
def test_a_file_that_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "routes.json").write_text(text)
    assert cached_rates("a GPU", lambda: RATES, tmp_path) == RATES
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
    """Device that keeps the number of blocks and of groups of each read."""

    route = STAGED

    def __init__(self) -> None:
        super().__init__(direct=True)
        self.moved: list[tuple[int, int]] = []

    def read(self, parts: Any, stream: Any) -> Any:
        self.moved.append((self.route.n_blocks, len({id(part.rows) for part, _ in parts})))
        return super().read(parts, stream)


def test_every_way_is_timed_and_the_tables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [
        np.arange(300.0).reshape(100, 3),
        np.arange(100, dtype=np.int16),
        np.ones((7, 2), np.uint8),
    ]
    stores, device = [ArrayStore(array.copy()) for array in arrays], Moving()

    def locked(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayStore:
        return ArrayStore(
            device.staging(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
        )

    monkeypatch.setattr(route_benchmark.PinnedStore, "empty", locked)
    # Small chunks, so that several threads gather.
    monkeypatch.setattr(route_benchmark, "_CHUNK_BYTES", 256)
    rates = measure(device, stores, 50)
    assert list(rates.direct) == list(BLOCKS)
    assert min(*rates.direct.values(), rates.staged, rates.both, rates.in_turn) > 0
    assert {n_blocks for n_blocks, _ in device.moved} == set(BLOCKS)
    assert {n_groups for _, n_groups in device.moved} == {2}, (
        "stores of as many rows are read in one launch"
    )
    for store, array in zip(stores, arrays, strict=True):
        np.testing.assert_array_equal(store.array, array)
