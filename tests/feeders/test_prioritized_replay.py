"""Prioritized draws: those of a plain segment tree, with importance weights."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pinfeed
from pinfeed.errors import ArgumentError
from pinfeed.feeders.replay_draws import SumTree


class PlainTree:
    """Segment tree of OpenAI Baselines: one call for each row."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.sums = [0.0] * (2 * n_rows - 1)

    def set(self, row: int, priority: float) -> None:
        node = row + self.n_rows - 1
        self.sums[node] = priority
        while node:
            node = (node - 1) // 2
            self.sums[node] = self.sums[2 * node + 1] + self.sums[2 * node + 2]

    def row_at(self, value: float) -> int:
        node = 0
        while 2 * node + 1 < len(self.sums):
            left = 2 * node + 1
            if value <= self.sums[left]:
                node = left
            else:
                value -= self.sums[left]
                node = left + 1
        return node - (self.n_rows - 1)


class PlainPriorities:
    """Prioritized replay of Rainbow, with numbers of transitions as their contents."""

    def __init__(self, n_rows: int, alpha: float, beta: float, epsilon: float, seed: int) -> None:
        self.tree = PlainTree(n_rows)
        self.numbers: dict[int, int] = {}
        self.alpha, self.beta, self.epsilon = alpha, beta, epsilon
        self.random = np.random.RandomState(seed)
        self.most = 1.0
        self.n_added = 0

    def add(self) -> None:
        row = self.n_added % self.tree.n_rows
        self.numbers[row] = self.n_added
        self.tree.set(row, self.most**self.alpha)
        self.n_added += 1

    def sample(self, n: int) -> tuple[Any, Any]:
        total = self.tree.sums[0]
        segment = total / n
        values = [self.random.uniform(segment * i, segment * (i + 1)) for i in range(n)]
        rows = [self.tree.row_at(value) for value in values]
        shares = np.array([self.tree.sums[row + self.tree.n_rows - 1] for row in rows]) / total
        weights = (len(self.numbers) * shares) ** -self.beta
        return [self.numbers[row] for row in rows], (weights / weights.max()).astype(np.float32)

    def update(self, numbers: Any, priorities: Any) -> None:
        kept = set(self.numbers.values())
        pairs = [pair for pair in zip(numbers, priorities, strict=True) if pair[0] in kept]
        priorities = [abs(priority) + self.epsilon for _, priority in pairs]
        self.most = max([self.most, *priorities])
        for (number, _), priority in zip(pairs, priorities, strict=True):
            self.tree.set(number % self.tree.n_rows, priority**self.alpha)


@settings(max_examples=30)
@given(
    n_rows=st.one_of(st.integers(1, 40), st.integers(60, 300)),
    sets=st.lists(
        st.lists(st.tuples(st.integers(0, 299), st.integers(0, 5)), max_size=50), max_size=4
    ),
)
def test_a_tree_equals_a_plain_one(n_rows: int, sets: list[list[tuple[int, int]]]) -> None:
    tree, plain = SumTree(n_rows), PlainTree(n_rows)
    for pairs in sets:
        rows = np.array([row % n_rows for row, _ in pairs], np.int64)
        priorities = np.array([priority for _, priority in pairs], float)
        tree.set(rows, priorities)
        for row, priority in zip(rows.tolist(), priorities.tolist(), strict=True):
            plain.set(row, priority)
    assert tree.total == plain.sums[0]
    assert tree.priorities.tolist() == plain.sums[n_rows - 1 :]
    values = np.linspace(0, tree.total, 50)[1:]
    rows = tree.rows_at(values)
    if tree.total:
        assert rows.tolist() == [plain.row_at(value) for value in values.tolist()]
        assert (tree.priorities[rows] > 0).all()


def test_rounding_never_draws_a_row_without_priority() -> None:
    tree = SumTree(10)
    tree.set(np.arange(4), [0.1, 0.2, 0.3, 0.4])
    assert (tree.rows_at(np.array([tree.total * 1.0001, 0.0])) < 4).all()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("n_rows", [5, 64])
def test_draws_and_weights_equal_a_plain_buffers(depth: int, n_rows: int) -> None:
    plain = PlainPriorities(n_rows, 0.6, 0.4, 1e-6, seed=3)
    buffer = pinfeed.ReplayBuffer(
        n_rows, {"x": ((), "int64")}, alpha=0.6, generator=np.random.RandomState(3)
    )
    x = itertools.count()

    def add() -> None:
        plain.add()
        buffer.add(x=next(x))

    for _ in range(4):
        add()
    drawn: list[tuple[Any, Any]] = []
    for i, batch in enumerate(buffer.batches(8, n=60, depth=depth, device="cpu")):
        while len(drawn) <= depth:
            drawn.append(plain.sample(8))
        numbers, weights = drawn.pop(0)
        assert batch["row"].tolist() == batch["x"].tolist() == numbers
        assert np.array_equal(batch["weight"].numpy(), weights)
        priorities = np.abs(np.sin(np.arange(8) + i))
        plain.update(numbers, priorities.tolist())
        buffer.update_priorities(batch["row"], priorities)
        for _ in range(i % 3):
            add()
        plain.beta = buffer.beta = min(1.0, 0.4 + i / 100)


def test_rows_are_drawn_in_proportion_to_their_priorities() -> None:
    buffer = pinfeed.ReplayBuffer(4, {"x": ((), "int64")}, alpha=1.0, epsilon=0.0)
    for x in range(4):
        buffer.add(x=x)
    buffer.update_priorities(np.arange(4), [1.0, 0.0, 2.0, 5.0])
    (batch,) = buffer.batches(800, n=1, device="cpu")
    assert np.bincount(batch["x"].numpy(), minlength=4).tolist() == [100, 0, 200, 500]


def test_priorities_of_overwritten_transitions_are_left_out() -> None:
    buffer = pinfeed.ReplayBuffer(2, {"x": ((), "int64")}, alpha=1.0, epsilon=0.0)
    for x in range(3):
        buffer.add(x=x)
    # Transition 0 was where transition 2 is now.
    buffer.update_priorities([0, 1], [50.0, 3.0])
    (batch,) = buffer.batches(400, n=1, device="cpu")
    assert np.bincount(batch["x"].numpy()).tolist() == [0, 300, 100]


@pytest.mark.parametrize(
    ("rows", "priorities", "message"),
    [
        ([0, 1], [1.0], "as many priorities"),
        ([0.5], [1.0], "the part 'row' of a batch"),
        ([0], [np.nan], "NaN or infinite"),
        ([0], ["high"], "priorities of shape .*, <U4; expected the part 'row'"),
        ([0], [1j], "complex128; expected the part 'row'"),
        ([0], [[1], [2, 3]], "cannot read the priorities, a list .*; expected an array"),
        ([[0], [1, 2]], [1.0], "cannot read the rows, a list .*; expected an array"),
    ],
)
def test_wrong_priorities_are_refused(rows: Any, priorities: Any, message: str) -> None:
    buffer = pinfeed.ReplayBuffer(2, {"x": ((), "int64")}, alpha=1.0)
    buffer.add(x=0)
    with pytest.raises(ArgumentError, match=message):
        buffer.update_priorities(rows, priorities)


def test_priorities_have_the_dtype_of_the_loss() -> None:
    buffer = pinfeed.ReplayBuffer(2, {"x": ((), "int64")}, alpha=1.0, epsilon=0.0)
    for x in range(2):
        buffer.add(x=x)
    errors = torch.tensor([1.0, -3.0], dtype=torch.bfloat16, requires_grad=True)
    buffer.update_priorities(torch.arange(2), errors)
    (batch,) = buffer.batches(400, n=1, device="cpu")
    assert np.bincount(batch["x"].numpy()).tolist() == [100, 300]


def test_transitions_without_any_priority_are_refused() -> None:
    buffer = pinfeed.ReplayBuffer(2, {"x": ((), "int64")}, alpha=1.0, epsilon=0.0)
    buffer.add(x=0)
    buffer.update_priorities([0], [0.0])
    with pytest.raises(ArgumentError, match="give epsilon=1e-6"):
        next(iter(buffer.batches(4, device="cpu")))
    with pytest.raises(ArgumentError, match=r"beta=-1: expected a number, at least 0"):
        buffer.beta = -1


@pytest.mark.parametrize("rows", [[-1], [0, 5]])
def test_rows_that_were_never_added_have_no_priority(rows: list[int]) -> None:
    buffer = pinfeed.ReplayBuffer(9, {"x": ((), "int64")}, alpha=0.5)
    for k in range(5):
        buffer.add(x=k)
    with pytest.raises(ArgumentError, match="5 transitions were added"):
        buffer.update_priorities(rows, [1.0] * len(rows))
