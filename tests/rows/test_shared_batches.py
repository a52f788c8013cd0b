"""Ranks share the batches of ``element_batches``, and any number of ranks continues an epoch."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ragged import plain_batches

from pinfeed import ArgumentError, Config, Feeder, MiB, RaggedStore, Ranks, rows
from pinfeed.rows import element_batches
from pinfeed.rows.orders import At, Rows
from pinfeed.rows.ragged_batches import ElementBatches
from pinfeed.rows.shared_batches import SharedBatches, shared_batches

LENGTHS = np.random.default_rng(0).integers(0, 12, 83)
WORLDS = (1, 3, 2, 5)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 16, "seed": 4},
    {"window": 16, "padded": True, "drop_last": True},
    {"padded": True, "order": rows.block_shuffled(2, block_rows=4, window_blocks=2)},
]


def batches_of(**options: Any) -> ElementBatches:
    return element_batches(LENGTHS, 30, **{"order": rows.shuffled(3), **options})


def make(rank: int, world_size: int, uneven: Any = "join", **options: Any) -> Feeder:
    ranks = Ranks(uneven, rank=rank, world_size=world_size)
    batches = batches_of(**options)
    return Feeder(np.arange(83), rows=batches, ranks=ranks, device="cpu", depth=2)


def plain_share(
    units: list[list[int]], done: int, rank: int, world_size: int, uneven: str
) -> list[list[int]]:
    """Return the batches of a rank after ``done`` batches of an epoch, by the definition."""
    found = []
    for begin in range(done, len(units), world_size):
        step = units[begin : begin + world_size]
        if len(step) < world_size and uneven == "drop":
            break
        if uneven == "pad":
            step = [*step, *itertools.islice(itertools.cycle(units), world_size - len(step))]
        found += step[rank : rank + 1]
    return found


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=60),
    window=st.none() | st.integers(1, 70),
    padded=st.booleans(),
    uneven=st.sampled_from(["pad", "drop", "join"]),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    run_rows=st.integers(1, 50),
    data=st.data(),
)
@settings(max_examples=150)
def test_ranks_continue_as_the_definition_says(
    lengths: list[int],
    window: int | None,
    padded: bool,
    uneven: Any,
    worlds: list[int],
    run_rows: int,
    data: st.DataObject,
) -> None:
    epoch = data.draw(st.integers(0, 2))
    drop_last = uneven != "join" and data.draw(st.booleans())
    given_batches = element_batches(
        lengths, 14, order=rows.shuffled(5), padded=padded, window=window, drop_last=drop_last
    )
    given_batches.set_epoch(epoch)
    units = [batch.tolist() for batch in given_batches]
    state: dict[str, Any] = {}
    done = 0
    with pytest.MonkeyPatch.context() as patch:
        # Marks are noted once in a run.
        patch.setattr("pinfeed.rows.ragged_batches._RUN_ROWS", run_rows)
        for world_size in worlds:
            n_steps = len(plain_share(units, done, 0, world_size, uneven))
            n_steps = data.draw(st.integers(0, n_steps))
            states = []
            for rank in range(world_size):
                ours = SharedBatches(given_batches, rank, world_size, uneven, 1)
                start = 0
                if state:
                    start, is_over = ours.resume(state, float("inf"))
                    has_batches = bool(plain_share(units, done, 0, world_size, uneven))
                    assert is_over == (start > 0 and not has_batches)
                want = plain_share(units, done, rank, world_size, uneven)
                run = ours.epoch(epoch, start)
                found = [one.rows().tolist() for one in itertools.islice(run, n_steps)]
                states.append({"epoch": epoch, "batch": start + n_steps})
                states[-1] |= ours.state(epoch, start + n_steps)
                assert found == want[:n_steps]
                assert [one.rows().tolist() for one in run] == want[n_steps:]
            assert all(one["batch"] == states[0]["batch"] for one in states)
            state = json.loads(json.dumps(states[-1]))
            done += n_steps * world_size


@pytest.mark.parametrize("padded", [False, True])
def test_windows_have_the_batches_of_a_plain_loop(padded: bool) -> None:
    batches = batches_of(window=16, padded=padded)
    given_rows = rows.shuffled(3).bind(83, 0)(np.arange(83)).tolist()
    found = [batch.tolist() for batch in batches]
    for begin in range(0, 83, 16):
        by_length = sorted(given_rows[begin : begin + 16], key=lambda row: -LENGTHS[row])
        want = plain_batches(
            LENGTHS, by_length, 30, batch_size=None, padded=padded, drop_last=False
        )
        assert sorted(found[: len(want)]) == sorted(want)
        del found[: len(want)]
    assert not found


@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[3:])
@pytest.mark.parametrize("n_steps", [1, 2])
def test_each_row_occurs_once_on_1_3_2_and_5_ranks(options: Any, n_steps: int) -> None:
    state = None
    found: list[int] = []
    for world_size in WORLDS:
        for rank in range(world_size):
            with make(rank, world_size, **options) as feeder:
                if state is not None:
                    feeder.load_state_dict(state)
                for i, batch in enumerate(feeder, 1):
                    found += batch.tolist()
                    if i == n_steps and world_size != 5:
                        break
                last = feeder.state_dict()
        state = last
    assert sorted(found) == list(range(83))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_feeder_resumes_at_every_batch(options: Any) -> None:
    for rank in range(2):
        with make(rank, 2, "pad", **options) as feeder:
            want = [[batch.tolist() for batch in feeder] for _ in range(2)]
        for n in range(1, len(want[0]) + 1):
            with make(rank, 2, "pad", **options) as feeder:
                for i, _ in enumerate(feeder, 1):
                    if i == n:
                        break
                state = feeder.state_dict()
            with make(rank, 2, "pad", **options) as feeder:
                feeder.load_state_dict(state)
                # A loop at the end of its epoch is the next epoch.
                assert [batch.tolist() for batch in feeder] == (want[0][n:] or want[1])


@pytest.mark.parametrize("uneven", ["pad", "drop", "join"])
def test_ranks_have_the_batches_of_one_process(uneven: Any) -> None:
    units = [batch.tolist() for batch in batches_of(window=16)]
    for rank in range(5):
        with make(rank, 5, uneven, window=16) as feeder:
            found = [batch.tolist() for batch in feeder]
        assert found == plain_share(units, 0, rank, 5, uneven)
    assert len(units) % 5


def test_an_epoch_with_fewer_batches_than_ranks_repeats_them() -> None:
    found = []
    for rank in range(5):
        ranks = Ranks("pad", rank=rank, world_size=5)
        batches = element_batches([2, 2, 2], 4)
        with Feeder(np.arange(3), rows=batches, ranks=ranks, device="cpu") as feeder:
            found += [batch.tolist() for batch in feeder]
    assert found == [[0, 1], [2], [0, 1], [2], [0, 1]]


def test_ragged_rows_are_those_of_the_batches() -> None:
    offsets = np.concatenate(([0], np.cumsum(LENGTHS)))
    store = RaggedStore(np.arange(offsets[-1]), offsets)
    ranks = Ranks("join", rank=1, world_size=3)
    with Feeder(store, rows=batches_of(window=16), ranks=ranks, device="cpu") as feeder:
        for batch in feeder.batches():
            values, bounds = batch.data
            want = [np.arange(offsets[row], offsets[row + 1]) for row in batch.rows]
            assert values.tolist() == np.concatenate(want).tolist()
            assert len(values) <= 30
            assert len(bounds) == len(want) + 1


class Noted:
    """A shuffled order that notes the positions at which it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def length(self, n_rows: int) -> int:
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> At:
        at = rows.shuffled(3).bind(n_rows, epoch)

        def noted(positions: Rows) -> Rows:
            self.asked.append(int(positions[0]))
            return at(positions)

        return noted

    def __repr__(self) -> str:
        return "Noted()"


@pytest.mark.parametrize("window", [None, 8])
def test_a_resumed_epoch_is_planned_from_its_mark_on(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pinfeed.rows.ragged_batches._RUN_ROWS", 8)
    order = Noted()
    with make(0, 2, order=order, window=window) as feeder:
        assert len(list(itertools.islice(feeder, 6))) == 6
        state = feeder.state_dict()
    unit = state["batches"]["mark"][2]
    assert 0 < unit <= 12
    order.asked.clear()
    with make(1, 3, order=order, window=window) as feeder:
        feeder.load_state_dict(state)
        assert list(feeder)
    first_units = itertools.islice(batches_of(window=window), unit)
    assert min(order.asked) == sum(map(len, first_units))


@pytest.mark.parametrize("window", [None, 16])
def test_ranks_continue_an_epoch_of_a_process_without_ranks(window: int | None) -> None:
    with Feeder(np.arange(83), rows=batches_of(window=window), device="cpu") as feeder:
        found = [batch.tolist() for batch in itertools.islice(feeder, 4)]
        state = feeder.state_dict()
    for rank in range(3):
        with make(rank, 3, window=window) as feeder:
            feeder.load_state_dict(state)
            found += [batch.tolist() for batch in feeder]
    assert sorted(found) == sorted(batch.tolist() for batch in batches_of(window=window))


def test_a_complete_epoch_is_not_continued() -> None:
    n = batches_of(window=16).count(0)
    for uneven in ("pad", "join"):
        with make(0, 2, uneven, window=16) as feeder:
            for i, _ in enumerate(feeder, 1):
                if i == -(-n // 2):
                    break
            state = feeder.state_dict()
        for world_size in (1, 2, 3):
            with make(0, world_size, uneven, window=16) as feeder:
                want = [list(feeder) for _ in range(2)][1]
                feeder.load_state_dict(state)
                assert [batch.tolist() for batch in feeder] == [one.tolist() for one in want]


def test_a_rank_without_batches_waits_for_the_end_of_the_epoch() -> None:
    n = batches_of(window=16).count(0)
    with make(0, 1, "join", window=16) as feeder:
        for i, _ in enumerate(feeder, 1):
            if i == n - 2:
                break
        state = feeder.state_dict()
    counts = []
    for rank in range(3):
        with make(rank, 3, "join", window=16) as feeder:
            feeder.load_state_dict(state)
            counts.append(len(list(feeder)))
            assert feeder.state_dict()["epoch"] == 1
    assert counts == [1, 1, 0]


def test_the_owner_may_run_a_resumed_epoch_again() -> None:
    with make(0, 1) as feeder:
        want = [batch.tolist() for batch in feeder]
        for i, _ in enumerate(feeder, 1):
            if i == 4:
                break
        feeder.set_epoch(0)
        next(iter(feeder))
        state = feeder.state_dict()
    batches = batches_of()
    ranks = Ranks("join", rank=0, world_size=3)
    with Feeder(np.arange(83), rows=batches, ranks=ranks, device="cpu") as feeder:
        feeder.load_state_dict(state)
        assert [batch.tolist() for batch in feeder] == want[1::3]
        # The feeder sets the epoch, and follows its owner.
        assert batches.epoch == 1
        batches.set_epoch(0)
        assert feeder.state_dict()["batches"] == {"done": 0, "mark": [0, 0, 0]}
        for i, batch in enumerate(feeder):
            assert batch.tolist() == want[3 * i]
            assert feeder.state_dict()["batches"]["done"] == 3 * (i + 1)
        assert feeder.state_dict()["epoch"] == 1


def test_packed_rows_follow_the_epoch_of_their_owner() -> None:
    lengths = LENGTHS + 1
    batches = rows.packed(lengths, 12, window=16, order=rows.shuffled(3))
    want = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        want.append([sorted(batch.tolist()) for batch in batches])
    batches.set_epoch(2)
    with Feeder(np.arange(83), rows=batches, device="cpu") as feeder:
        assert [sorted(batch.tolist()) for batch in feeder] == want[2]
        assert batches.epoch == 3
        batches.set_epoch(1)
        assert [sorted(batch.tolist()) for batch in feeder] == want[1]


BAD: list[Callable[[dict[str, Any]], Any]] = [
    lambda state: state.pop("batches"),
    lambda state: state.update(batch=-1),
    lambda state: state.update(batch=0),
    lambda state: state["batches"].update(done=0, mark=[0, 0, 0]),
    lambda state: state["batches"].pop("done"),
    lambda state: state["batches"].update(done="x"),
    lambda state: state["batches"].update(done=-99),
    lambda state: state["batches"].update(mark=[0, 0]),
    lambda state: state["batches"].update(mark=[0, -1, 0]),
    lambda state: state["batches"].update(mark=[0, 0, 99]),
    lambda state: state["batches"].update(mark="abc"),
    lambda state: state["batches"].update(mark=None),
    lambda state: state.update(batches=3),
]


@pytest.mark.parametrize("change", BAD)
def test_a_bad_state_is_refused_before_anything_changes(change: Callable[[Any], Any]) -> None:
    with make(0, 3) as feeder:
        next(iter(feeder))
        state = feeder.state_dict()
    with make(1, 2) as feeder:
        feeder.load_state_dict(state)
        before = feeder.state_dict()
        assert (before["batch"], before["batches"]["done"]) == (1, 3)
        bad = json.loads(json.dumps(before))
        change(bad)
        with pytest.raises(ArgumentError, match=r"not a state of a feeder with rows=element_bat"):
            feeder.load_state_dict(bad)
        assert feeder.state_dict() == before
        want = plain_share([batch.tolist() for batch in batches_of()], 3, 1, 2, "join")
        assert [batch.tolist() for batch in feeder] == want


@pytest.mark.parametrize(
    "options",
    [{"window": 9}, {"batch_size": 3}, {"padded": True}, {"order": rows.shuffled(4)}],
)
def test_a_state_of_other_batches_is_refused(options: dict[str, Any]) -> None:
    with make(0, 3) as feeder:
        state = feeder.state_dict()
    with make(0, 2, **options) as feeder, pytest.raises(ArgumentError, match="another feeder"):
        feeder.load_state_dict(state)
    with make(0, 2, "pad") as feeder, pytest.raises(ArgumentError, match="ranks was 'join'"):
        feeder.load_state_dict(state)
    lengths = LENGTHS.copy()
    lengths[:2] = lengths[1::-1]
    assert (lengths != LENGTHS).any()
    other = element_batches(lengths, 30, order=rows.shuffled(3))
    assert other.fingerprint != batches_of().fingerprint


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"order": rows.per_rank(rows.shuffled(), rank=0, world_size=2)}, "pad", "share of one"),
        ({"drop_last": True}, "join", "drop_last=True leaves rows out"),
        ({}, Ranks("pad", split_batches=True), "leave out split_batches"),
        ({}, "even", "ranks='even': expected 'pad'"),
        ({}, 3, "ranks=3: expected 'pad'"),
    ],
)
def test_ranks_that_cannot_share_are_refused(options: Any, ranks: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Feeder(np.arange(83), rows=batches_of(**options), ranks=ranks, device="cpu")


def test_packed_rows_of_one_rank_are_not_shared_again() -> None:
    order = rows.per_rank(rows.shuffled(), rank=0, world_size=2)
    with pytest.raises(ArgumentError, match="already the share of one rank"):
        shared_batches(rows.packed(LENGTHS, 12, order=order), "pad")


def test_the_number_of_batches_is_counted_over_all_ranks() -> None:
    with (
        make(0, 3) as feeder,
        pytest.raises(TypeError, match=r"element_batches has count\(epoch\)"),
    ):
        len(feeder)
    n = 0
    for rank in range(3):
        with make(rank, 3) as feeder:
            n += len(list(feeder))
    assert n == batches_of().count(0)


def test_limits_of_config_hold_for_each_rank() -> None:
    ranks = Ranks("join", rank=1, world_size=2)
    with Feeder(
        np.arange(83),
        rows=batches_of(window=16),
        ranks=ranks,
        config=Config(cpu_memory_limit=MiB(64)),
        device="cpu",
    ) as feeder:
        found = [batch.tolist() for batch in feeder]
    assert found == [batch.tolist() for batch in batches_of(window=16)][1::2]


@pytest.mark.parametrize("name", ["element_batches", "packed"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_are_in_the_windows_of_their_positions(
    name: str, world_size: int, window: int | None, drop_last: bool
) -> None:
    """Rows without elements, and those of a last batch that is left out, take positions, too."""
    order = rows.block_shuffled(1, block_rows=4, window_blocks=2)
    options: Any = {"drop_last": drop_last} | ({} if window is None else {"window": window})
    batches = getattr(rows, name)(LENGTHS, 30, order=order, **options)
    for start in (0, 1, 3):
        for rank in range(world_size):
            shared = shared_batches(batches, Ranks("drop", rank=rank, world_size=world_size))
            assert shared is not None
            found, position, stop = shared.windows(0, start)
            assert found is not None
            of_epoch = list(found.needed(position, stop))
            for batch in shared.epoch(0, start):
                assert batch.n_positions is not None
                end = position + batch.n_positions
                here = [w for w in of_epoch if w.begin < end and position < w.end]
                runs = itertools.chain.from_iterable(window.runs for window in here)
                assert set(batch.rows().tolist()) <= {row for run in runs for row in range(*run)}
                position = end
            assert position <= stop


def test_processes_without_ranks_are_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    own = rows.per_rank(rows.shuffled(), rank=0, world_size=2)
    # The warning appears once for each number of processes.
    for world_size, batches, n in (
        (91, batches_of(), 1),
        (92, batches_of(order=own), 0),
        (93, rows.packed(LENGTHS, 12), 1),
    ):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        caplog.clear()
        with Feeder(np.arange(83), rows=batches, device="cpu"):
            pass
        said = [one for one in caplog.messages if f"each of the {world_size} processes" in one]
        assert len(said) == n
