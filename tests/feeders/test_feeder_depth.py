"""Feeders and wrapped loaders without a depth: what they choose on the CPU, and their reports.

A loop that changes between prefetching and the synchronous loop gives the results of the latter.
"""

import copy
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.depth_choices import script
from support.internals import counters_of, runner_of
from support.simulated_loops import Clock, simulated
from support.unwrapped import unwrapped

from pinfeed import ArrayStore, Config, Feeder, wrap_loader, wrap_readers
from pinfeed.errors import ArgumentError

N = 3000
SIZE = 4
WAYS = {
    "synchronous": [True],
    "synchronous after two slots": [False, False, True],
    "alternating": [*5 * [False, False, True, True, True], *3 * [False, True]],
}
AHEAD = "depth=31: 0.1 ms per batch, 0.2 ms with depth=0"
SYNCHRONOUS = "depth=0: 0.1 ms per batch, 0.2 ms with depth=31"


class Resumable:
    """A loader with a state, whose batches depend on that state."""

    def __init__(self) -> None:
        self.n = 0
        self.asked_by: list[str] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(100):
            self.n += 1
            self.asked_by.append(threading.current_thread().name)
            yield torch.tensor([self.n, 2 * self.n])

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def rows_of(n: int = N) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, 3)).astype(np.float32)


def read(depth: int | None, ways: list[bool] | None) -> list[Any]:
    """Iterate two epochs of a Feeder, with its states."""
    found: list[Any] = []
    rows = rows_of(300)
    rows.flags.writeable = False
    with Feeder(rows, batch_size=SIZE, shuffle=True, device="cpu", depth=depth) as feeder:
        for _ in range(2):
            if ways is not None:
                script(feeder, ways)
            found += [(batch.tolist(), feeder.state_dict()) for batch in feeder]
    return found


def train(depth: int | None, ways: list[bool] | None) -> list[Any]:
    """Write rows back that later batches have, too; return the batches and the rows at the end."""
    found: list[Any] = []
    store = ArrayStore(rows_of(40))
    order = np.random.default_rng(2).permuted(np.tile(np.arange(40), (60, 1)), axis=1)[:, :7]
    with Feeder(store, rows=order.tolist(), device="cpu", depth=depth) as feeder:
        for _ in range(2):
            if ways is not None:
                script(feeder, ways)
            for batch in feeder.batches():
                found.append(batch.data.tolist())
                batch.write_back(batch.data * 1.5 + 1)
        feeder.flush_writes()
        found.append(store.array.tolist())
    return found


def wrap(depth: int | None, ways: list[bool] | None) -> list[Any]:
    """Iterate two epochs of a wrapped loader with a state, and resume it."""
    found: list[Any] = []
    with wrap_loader(Resumable(), device="cpu", depth=depth) as batches:
        state = None
        for _ in range(2):
            if ways is not None:
                script(batches, ways)
            for batch in batches:
                found.append((batch.tolist(), batches.state_dict()))
                state = state or copy.deepcopy(batches.state_dict())
        batches.load_state_dict(state)
        found.append(next(iter(batches)).tolist())
    return found


@pytest.mark.parametrize("ways", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("loop", [read, train, wrap])
def test_a_loop_that_changes_its_depth_stays_exact(
    loop: Callable[[int | None, list[bool] | None], list[Any]], ways: list[bool]
) -> None:
    assert loop(None, ways) == loop(0, None)


def test_a_synchronous_loop_asks_its_loader_in_its_own_thread() -> None:
    loader = Resumable()
    with wrap_loader(loader, device="cpu") as batches:
        script(batches, [False, True, True, True, True, False])
        list(batches)
    names = [name == "MainThread" for name in loader.asked_by]
    assert names == [*3 * [False], *2 * [True], *95 * [False]]


def run(
    feeder: Feeder, clock: Clock, ahead_s: float, synchronous_s: float, n: int = 10**9
) -> list[bool]:
    """Iterate an epoch whose batches take given times; return which were synchronous."""
    ways = []
    for _, _ in zip(range(n), feeder, strict=False):
        ways.append(runner_of(feeder)._choice.is_synchronous)
        clock.pass_s(synchronous_s if ways[-1] else ahead_s)
    return ways


def measured_feeder(**options: Any) -> tuple[Feeder, Clock]:
    clock = Clock()
    feeder = Feeder(rows_of(), batch_size=SIZE, device="cpu", **options)
    counters_of(feeder).now = clock
    return feeder, clock


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize(("ahead_s", "chosen"), [(1e-4, AHEAD), (2e-4, SYNCHRONOUS)])
def test_short_batches_are_measured_on_the_cpu(tmp_path: Path, ahead_s: float, chosen: str) -> None:
    feeder, clock = measured_feeder(timeline=True)
    assert feeder.depth_reason == "depth=31, not measured yet"
    assert "depth=31 (0 if measured to be faster), rows are copied straight" in unwrapped(
        feeder.plan
    )
    run(feeder, clock, ahead_s, 3e-4 - ahead_s, 80)
    run(feeder, clock, ahead_s, 3e-4 - ahead_s)
    assert feeder.depth_reason == chosen
    assert repr(feeder).endswith(f"on cpu, {chosen}>")
    depth = int(chosen.partition(":")[0].removeprefix("depth="))
    assert feeder.stats.depth == depth
    assert set(run(feeder, clock, 1e-4, 1e-4)) == {depth == 0}
    # The timeline has the changes of the measurement, and the depth that was chosen.
    depths = [found for _, found in feeder.timeline.depths]
    assert depths == [31, 0, 31, 0, *[31] * (depth == 31)]
    feeder.timeline.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["args"]["depth"] for event in events if event["name"] == "depth"] == depths
    feeder.close()


@pytest.mark.usefixtures("without_native")
def test_the_synchronous_loop_that_was_chosen_has_no_threads() -> None:
    feeder, clock = measured_feeder()
    run(feeder, clock, 2e-4, 1e-4)
    for _ in feeder:
        assert not [one for one in threading.enumerate() if one.name.startswith("pinfeed")]
    feeder.close()


def test_epochs_of_few_batches_are_measured_together() -> None:
    feeder, clock = measured_feeder(rows=range(40))
    depths = []
    for _ in range(7):
        run(feeder, clock, 2e-4, 1e-4)
        depths.append(feeder.stats.depth)
    assert depths == [31, 31, 0, 31, 0, 0, 0]
    assert feeder.depth_reason == SYNCHRONOUS
    feeder.close()


@pytest.mark.usefixtures("without_native")
def test_long_batches_are_always_prefetched() -> None:
    feeder, clock = measured_feeder()
    assert not any(run(feeder, clock, 0.004, 0.001))
    assert feeder.depth_reason == "depth=31: 4 ms per batch; depth=0 is timed only below 2 ms"
    feeder.close()


@pytest.mark.parametrize(
    "options", [{"depth": 2}, {"depth": 0}, {"verify": True}, {"config": Config(depth=3)}]
)
def test_a_given_depth_and_a_verified_loop_are_not_measured(options: Any) -> None:
    if "config" not in options:
        options = {"batch_size": SIZE, **options}
    with Feeder(rows_of(), device="cpu", **options) as feeder:
        assert not feeder.depth_reason
        assert "measured" not in str(feeder.plan)


def test_a_loop_over_batches_of_a_gpu_is_not_measured() -> None:
    feeder, _, device = simulated(depth=None)
    wrapped = wrap_loader([torch.zeros(2)], device=device)
    for one in (feeder, wrapped):
        assert not one.depth_reason
        one.close()
    assert "measured" not in str(feeder.plan)


def test_transforms_are_not_measured() -> None:
    """Their calls may be slow or have effects, so the thread that makes them does not change."""
    with pytest.raises(ArgumentError, match="depth=None: expected a whole number"):
        wrap_readers([1], [1], read_input=list, get_output=list, batch_size=1, depth=None)
