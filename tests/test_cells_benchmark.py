"""The benchmark of loaders of cells: its checksum tells other cells apart."""

from pathlib import Path

import pytest

from benchmarks import cells


def test_ways_have_the_same_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("scipy")
    cells.prepare(tmp_path, 300)
    ways = ["dense, pinfeed", "dense, scipy in memory"]
    sums = [cells.check(way, str(tmp_path)) for way in ways]
    assert sums[0] == sums[1] == sums[0][:1] * cells.N_EPOCHS
    assert len(cells.times(ways[0], str(tmp_path))["rates"]) == cells.N_EPOCHS
    monkeypatch.setattr(cells, "_batches", lambda n: [range(n - 1)])
    assert cells.check(ways[1], str(tmp_path)) != sums[1]
