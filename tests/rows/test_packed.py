"""Packed sequences have every element once, within their length, on any number of ranks."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import ArgumentError, Feeder, RaggedStore, Ranks, rows
from pinfeed.rows.packed import Packed, best_fit

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(0, 12, 83)
OFFSETS = np.concatenate(([0], np.cumsum(LENGTHS)))
VALUES = np.arange(1, OFFSETS[-1] + 1)


def plain_best_fit(lengths: list[int], most: int) -> list[list[int]]:
    """Return best fit decreasing by its definition: the positions in each sequence."""
    found: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [n for n, room in enumerate(rooms) if room >= lengths[i]]
        if not fitting:
            found.append([])
            rooms.append(most)
            fitting = [len(rooms) - 1]
        best = min(fitting, key=lambda n: (rooms[n], n))
        found[best].append(i)
        rooms[best] -= lengths[i]
    return found


def make(world: tuple[int, int] | None = None, uneven: Any = "join", **options: Any) -> Feeder:
    options = {"batch_size": 2, "window": 16, "order": rows.shuffled(3), **options}
    store = RaggedStore(VALUES, OFFSETS, layout="packed")
    ranks = None if world is None else Ranks(uneven, rank=world[0], world_size=world[1])
    batches = rows.packed(store.lengths, options.pop("most", 12), **options)
    return Feeder(store, rows=batches, ranks=ranks, device="cpu", depth=2)


def elements(batches: list[Any]) -> list[int]:
    found = np.concatenate([batch.values.numpy().ravel() for batch in batches])
    return found[found > 0].tolist()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
@settings(max_examples=80)
def test_sequences_equal_those_of_the_definition(lengths: list[int], most: int) -> None:
    found = best_fit(np.array(lengths), most).tolist()
    want = plain_best_fit(lengths, most)
    assert [sorted(np.flatnonzero(np.array(found) == i)) for i in range(len(want))] == [
        sorted(one) for one in want
    ]


@pytest.mark.parametrize("split", ["never", "long", "always"])
@pytest.mark.parametrize("most", [12, 5, 40])
@pytest.mark.parametrize("window", [1, 16, 1000])
def test_an_epoch_has_each_element_once(split: Any, most: int, window: int) -> None:
    if split == "never" and most == 5:
        pytest.skip("rows are too long")
    with make(most=most, split=split, window=window) as feeder:
        epochs = [list(feeder) for _ in range(2)]
    for batches in epochs:
        assert sorted(elements(batches)) == VALUES.tolist()
        assert all(batch.values.shape[1] == most for batch in batches)
        assert all(len(batch.values) == 2 for batch in batches[:-1])
    assert elements(epochs[0]) != elements(epochs[1])


def test_runs_of_elements_follow_the_order_of_the_rows() -> None:
    order = rows.shuffled(3)
    stream = np.concatenate(
        [VALUES[OFFSETS[i] : OFFSETS[i + 1]] for i in order.bind(83, 0)(np.arange(83))]
    )
    with make(split="always", most=7) as feeder:
        assert elements(list(feeder)) == stream.tolist()


@pytest.mark.parametrize("split", ["long", "always"])
def test_documents_positions_and_bounds_agree(split: Any) -> None:
    with make(split=split, most=9) as feeder:
        for batch in feeder.batches():
            values, documents, positions, bounds = (part.numpy() for part in batch.data)
            assert documents.dtype == positions.dtype == bounds.dtype == np.int32
            assert np.array_equal(values > 0, documents >= 0)
            assert bounds[0] == 0
            assert bounds[-1] == values.size
            for begin, end in itertools.pairwise(bounds.tolist()):
                assert begin // 9 == (end - 1) // 9
                assert positions.ravel()[begin:end].tolist() == list(range(end - begin))
                (document,) = set(documents.ravel()[begin:end].tolist())
                if document >= 0:
                    row = batch.rows[document]
                    whole = VALUES[OFFSETS[row] : OFFSETS[row + 1]].tolist()
                    part = values.ravel()[begin:end].tolist()
                    at = whole.index(part[0])
                    assert whole[at : at + len(part)] == part


def test_other_batches_are_one_sequence() -> None:
    store = RaggedStore(VALUES, OFFSETS, layout="packed")
    with Feeder(store, batch_size=5, device="cpu") as feeder:
        batch = next(iter(feeder))
    assert batch.values.tolist() == [VALUES[: OFFSETS[5]].tolist()]
    assert batch.cu_seqlens.tolist() == sorted(set(OFFSETS[:6].tolist()))
    with Feeder(RaggedStore(VALUES, [0, 0, 0], layout="packed"), batch_size=2) as feeder:
        assert next(iter(feeder)).values.shape == (1, 0)


@pytest.mark.parametrize("split", ["never", "always"])
def test_a_feeder_resumes_at_every_batch(split: Any) -> None:
    with make(split=split) as feeder:
        want = [batch.values.tolist() for batch in feeder]
    for n in range(1, len(want) + 1):
        with make(split=split) as feeder:
            for i, _ in enumerate(feeder, 1):
                if i == n:
                    break
            state = feeder.state_dict()
        with make(split=split) as feeder:
            feeder.load_state_dict(state)
            found = [batch.values.tolist() for batch in feeder]
        if n < len(want):
            assert found == want[n:]


@pytest.mark.parametrize("split", ["never", "always"])
def test_a_resumed_epoch_plans_from_its_window_on(split: Any) -> None:
    batches = rows.packed(LENGTHS, 12, window=16, split=split)
    marks: list[Any] = []
    whole = list(batches.units(0, note=marks.append))
    assert len(marks) == 6
    for mark in marks:
        rest = list(batches.units(0, mark))
        pairs = zip(rest, whole[mark.unit :], strict=True)
        assert all(
            np.array_equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True)
        )


@pytest.mark.parametrize("split", ["never", "always"])
@pytest.mark.parametrize("n_batches", [1, 3])
def test_other_numbers_of_ranks_continue(split: Any, n_batches: int) -> None:
    state = None
    found: list[int] = []
    for world_size in (1, 3, 2, 5):
        states = []
        for rank in range(world_size):
            size = 1 if world_size == 3 else 2
            with make((rank, world_size), split=split, batch_size=size) as feeder:
                if state is not None:
                    feeder.load_state_dict(state)
                batches = []
                for batch in feeder:
                    batches.append(batch)
                    if len(batches) == n_batches and world_size != 5:
                        break
                states.append(feeder.state_dict()["sequences"])
                found += elements(batches)
                last = feeder.state_dict()
        assert all({**one, "mark": 0} == {**states[0], "mark": 0} for one in states)
        state = last
        if len(found) == len(VALUES):
            break
    assert sorted(found) == VALUES.tolist()


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_ranks_have_equally_many_sequences(uneven: Any) -> None:
    shapes = []
    found: set[int] = set()
    for rank in range(3):
        with make((rank, 3), uneven) as feeder:
            batches = list(feeder)
        shapes.append([tuple(batch.values.shape) for batch in batches])
        found |= set(elements(batches))
    assert shapes[0] == shapes[1] == shapes[2]
    assert uneven == "drop" or found == set(VALUES.tolist())


def test_windows_of_1024_rows_fill_98_percent() -> None:
    lengths = np.exp(np.random.default_rng(1).normal(6, 1, 8192)).astype(int) + 1
    for most in (4096, 8192):
        fill = rows.packed(lengths, most, order=rows.shuffled(1), split="long").fill()
        assert fill >= 0.98


def test_batches_have_at_most_the_planned_rows() -> None:
    for split in ("never", "long", "always"):
        batches = rows.packed(LENGTHS, 12, batch_size=3, split=split)  # type: ignore[arg-type]
        assert max(len(batch) for batch in batches) <= batches.batch_size


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1, 9, 2], {}, "row 1 has 9 elements, but max_elements=8"),
        ([0, 0], {}, "all rows have 0 elements"),
        ([1], {"window": 0}, "window=0"),
        ([1], {"split": True}, "split=True: expected 'never'"),
        ([1], {"batch_size": 0}, "batch_size=0"),
        ([1], {"seed": 0.5}, "seed=0.5"),
        ([1], {"order": [0]}, "order=[0]: expected an order"),
    ],
)
def test_bad_input_is_refused(lengths: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        rows.packed(lengths, 8, **options)


def test_a_feeder_refuses_what_does_not_fit() -> None:
    store = RaggedStore(VALUES, OFFSETS, layout="packed")
    with pytest.raises(ArgumentError, match="expected equally many"):
        Feeder(store, rows=rows.packed(LENGTHS + 1, 40), device="cpu")
    with pytest.raises(ArgumentError, match="verify=True"):
        Feeder(store, rows=rows.packed(LENGTHS, 40), device="cpu", verify=True)
    with pytest.raises(ArgumentError, match="leaves rows out"):
        Feeder(store, rows=rows.packed(LENGTHS, 40, drop_last=True), ranks="join", device="cpu")
    with make() as feeder:
        state = {**feeder.state_dict(), "sequences": {"done": -1, "mark": [0, 0, 0]}}
        with pytest.raises(ArgumentError, match="not a state"):
            feeder.load_state_dict(state)
    assert isinstance(rows.packed(LENGTHS, 40), Packed)
