"""A state is loaded with another batch size: the epoch continues with the next row."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import Feeder, Ranks, errors, rows, wrap_dataset, wrap_readers

N = 47
X = np.arange(N)
ORDERS = [
    rows.shuffled(3),
    rows.block_shuffled(3, block_rows=4, window_blocks=3),
    rows.mixed({"a": 30, "b": 17}, until=40),
    rows.bucketed(X % 5, batch_size=4, window_batches=3),
]


def read(number: int) -> Any:
    yield number
    yield -number


def feeder_of(kind: str, batch_size: int, order: Any, **options: Any) -> Any:
    if kind == "rows":
        return Feeder(X, batch_size=batch_size, rows=order, device="cpu", **options)
    if kind == "dataset":
        return wrap_dataset(X.tolist(), batch_size=batch_size, rows=order, threads=1, **options)
    return wrap_readers(
        X.tolist(),
        X.tolist(),
        read_input=read,
        get_output=read,
        one_read_count=2,
        batch_size=2 * batch_size,
        shuffle=True,
        device="cpu",
        **options,
    )


def numbers_of(kind: str, batch: Any) -> list[int]:
    numbers: list[int] = (batch[0][::2] if kind == "readers" else batch).tolist()
    return numbers


@pytest.mark.parametrize("kind", ["rows", "dataset", "readers"])
@given(data=st.data())
@settings(max_examples=25)
def test_the_epoch_continues_with_the_next_row(kind: str, data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(ORDERS))
    depth = data.draw(st.sampled_from([0, 2]))
    with feeder_of(kind, 5, order) as feeder:
        whole = [[n for batch in feeder for n in numbers_of(kind, batch)] for _ in range(2)]
    seen: list[int] = []
    state: Any = None
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    for size in sizes:
        with feeder_of(kind, size, order, depth=depth) as feeder:
            if state is not None:
                feeder.load_state_dict(json.loads(json.dumps(state)))
            left = len(whole[0]) - len(seen)
            # A state after the last batch begins the next epoch.
            most = max(0, -(-left // size) - 1)
            n = data.draw(st.integers(0, most))
            for _, batch in zip(range(n), feeder, strict=False):
                assert len(numbers_of(kind, batch)) == size
                seen += numbers_of(kind, batch)
                state = feeder.state_dict()
    with feeder_of(kind, 4, order, depth=depth) as feeder:
        if state is not None:
            feeder.load_state_dict(state)
        for batch in feeder:
            seen += numbers_of(kind, batch)
        assert seen == whole[0]
        assert [n for batch in feeder for n in numbers_of(kind, batch)] == whole[1]


@given(data=st.data())
@settings(max_examples=50)
def test_ranks_share_what_is_left(data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(ORDERS))
    is_split = data.draw(st.booleans())
    n = order.length(N)
    seen: list[int] = []
    state: Any = None
    for world_size in (*data.draw(st.lists(st.integers(1, 3), max_size=3)), 1):
        size = data.draw(st.integers(1, 4))
        # Every rank has this many full batches, and more rows than that.
        most = max(0, ((n - len(seen)) // world_size - 1) // size)
        n_steps = data.draw(st.integers(0, most))
        states = []
        for rank in range(world_size):
            ranks = Ranks("join", split_batches=is_split, rank=rank, world_size=world_size)
            given_size = size * (world_size if is_split else 1)
            with Feeder(X, batch_size=given_size, rows=order, ranks=ranks, device="cpu") as feeder:
                if state is not None:
                    feeder.load_state_dict(state)
                for _, batch in zip(range(n_steps), feeder, strict=False):
                    assert len(batch) == size
                    seen += batch.tolist()
                states.append(feeder.state_dict())
        state = states[-1] if n_steps else state
    with Feeder(X, batch_size=3, rows=order, ranks=Ranks("join", is_split), device="cpu") as feeder:
        if state is not None:
            feeder.load_state_dict(state)
        for batch in feeder:
            seen += batch.tolist()
    assert sorted(seen) == sorted(order.bind(N, 0)(np.arange(n)).tolist())


def test_a_last_batch_that_is_not_full_is_left_out() -> None:
    with Feeder(X, batch_size=10, drop_last=True, device="cpu") as feeder:
        for _, _ in zip(range(2), feeder, strict=False):
            state = feeder.state_dict()
    with Feeder(X, batch_size=9, drop_last=True, device="cpu") as feeder:
        feeder.load_state_dict(state)
        assert [batch.tolist() for batch in feeder] == [X[i : i + 9].tolist() for i in (20, 29, 38)]
        assert [len(batch) for batch in feeder] == [9] * 5
    with Feeder(X, batch_size=30, drop_last=True, device="cpu") as feeder:
        # The epoch has no batch of 30 rows left, so the next run is the next epoch.
        feeder.load_state_dict(state)
        assert [len(batch) for batch in feeder] == [30]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": {"world_size": 1, "done": [[1, -10]]}}, "not a state of a feeder"),
        ({"ranks": {"world_size": 0, "done": []}}, "not a state of a feeder"),
        ({"batch": 6}, "expected 0 to 5, the number of batches in that epoch"),
        ({"source": {"batch_size": 0}}, "batch_size=0"),
        ({"source": {"batch_size": None}}, "batch_size=None"),
    ],
    ids=str,
)
def test_states_that_no_feeder_has_made(changes: dict[str, Any], message: str) -> None:
    with Feeder(X, batch_size=10, device="cpu") as feeder:
        state = feeder.state_dict()
        state |= changes | {"source": state["source"] | changes.get("source", {})}
        with pytest.raises(errors.ArgumentError, match=message):
            feeder.load_state_dict(state)
        assert [len(batch) for batch in feeder] == [10, 10, 10, 10, 7]
