"""The benchmark of small batches compares equal batches, and reports medians of rounds."""

import json
import logging
from collections.abc import Iterator

import pytest
import torch

from benchmarks import small_batches
from benchmarks.environment import RESULTS
from benchmarks.small_batches import GROUPS, STEPS, summary

N_BATCHES = 3


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """Restore the settings that are made for a process of the benchmark."""
    n_threads = torch.get_num_threads()
    logger = logging.getLogger("pinfeed")
    level = logger.level
    yield
    small_batches._loop.cache_clear()
    small_batches._rows.cache_clear()
    logger.setLevel(level)
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("group", GROUPS)
def test_all_ways_yield_the_same_batches(group: str) -> None:
    expected, *others = (small_batches.checksums(group, name, N_BATCHES) for name in GROUPS[group])
    # The two epochs have different orders.
    assert len(set(expected)) == 2
    assert all(found == expected for found in others)


@pytest.mark.parametrize("step", STEPS)
def test_an_epoch_is_measured(step: str) -> None:
    losses = []
    for name in ("plain loop", "Feeder, depth=2"):
        for _ in range(2):
            found = small_batches.run_epoch("rows in memory", name, N_BATCHES, step)
            assert found["wall"] > 0
            assert found["cpu"] > 0
            losses.append(found["loss"])
    assert losses[:2] == losses[2:]


def test_the_first_round_is_reported_apart() -> None:
    walls = [(90.0, 70.0), (10.0, 10.0), (30.0, 10.0), (20.0, 10.0)]
    rounds = [
        {
            "plain": {"wall": plain, "cpu": 5.0, "faults": 0.0},
            "ours": {"wall": ours, "cpu": plain, "faults": 1.0},
        }
        for plain, ours in walls
    ]
    assert summary("ours", "plain", rounds) == {
        "first_us": 70.0,
        "us": 10.0,
        "cpu_us": 20.0,
        "faults": 1.0,
        "ratio": 2.0,
        "over_us": -10.0,
    }


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    for path in RESULTS.glob("small-batches-*.json"):
        results = json.loads(path.read_text())["results"]
        assert path.with_suffix(".md").read_text() == small_batches.report(results) + "\n"
