"""The benchmark of small batches compares equal batches, and reports medians of rounds."""

import logging
from collections.abc import Iterator

import pytest
import torch

from benchmarks import small_batch_ways, small_batches
from benchmarks.small_batch_ways import GROUPS, STEPS
from benchmarks.small_batches import BEFORE, summary

N_BATCHES = 3


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """Restore the settings that are made for a process of the benchmark."""
    n_threads = torch.get_num_threads()
    logger = logging.getLogger("pinfeed")
    level = logger.level
    yield
    small_batch_ways._loop.cache_clear()
    small_batch_ways._rows.cache_clear()
    logger.setLevel(level)
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("group", GROUPS)
def test_all_ways_yield_the_same_batches(group: str) -> None:
    expected, *others = (
        small_batch_ways.checksums(group, name, N_BATCHES) for name in GROUPS[group]
    )
    assert expected is not None
    # The two epochs have different orders.
    assert len(set(expected)) == 2
    assert all(found in (None, expected) for found in others)


@pytest.mark.parametrize("step", STEPS)
def test_an_epoch_is_measured(step: str) -> None:
    losses = []
    for name in ("plain loop", "Feeder, depth=2"):
        for _ in range(2):
            found = small_batch_ways.run_epoch("rows in memory", name, step, N_BATCHES)
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


def test_the_report_names_goals_that_are_missed() -> None:
    figures = {"first_us": 50.0, "us": 20.0, "cpu_us": 20.0, "faults": 0.0}
    figures |= {"ratio": 1.0, "over_us": 0.0}
    fast = figures | {"ratio": 1.75, "over_us": -15.0}
    ways = {
        "DataLoader": figures,
        "Feeder, depth=None": fast,
        f"Feeder, depth=None{BEFORE}": figures,
    }
    wrapped = {"DataLoader": figures, "wrap_loader, depth=2": figures | {"over_us": 15.2}}
    results = [
        {"group": "rows in memory", "step": "no step", "ways": ways, "choices": {"Feeder": "0"}},
        {"group": "a DataLoader", "step": "no step", "ways": wrapped, "choices": {}},
        {"group": "a DataLoader", "step": "training step", "ways": wrapped, "choices": {}},
    ]
    report = small_batches.report(results)
    assert "Rows in memory, no step, µs and page faults of a batch:\n\n|" in report
    assert "| -15     | 1.75            |" in report
    assert "- Feeder: 0" in report
    lines = small_batches.goals(results).splitlines()
    assert lines[0] == (
        "rows in memory: Feeder, depth=None to DataLoader: 1.75 times as fast, goal 1.5: met"
    )
    assert lines[1].endswith("1.00 times as fast, goal 1.5: missed")
    assert lines[2:] == [
        "a DataLoader: wrap_loader, depth=2 to DataLoader: +15.2 µs of a batch, goal 15: missed"
    ]
