"""Every order of the steps of some threads, for models of compiled code."""

import gc
import graphlib
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import pytest

S = TypeVar("S", bound=Hashable)


def check_every_order(
    start: S,
    following: Callable[[S], Iterator[S]],
    check_state: Callable[[S], None],
    check_end: Callable[[S], None],
) -> int:
    """Check every state that some order of steps reaches, and return their number.

    Args:
        start: The first state.
        following: Returns the states after the next step of each thread.
        check_state: Checks a state.
        check_end: Checks a state after which no thread makes a step.

    Raises:
        AssertionError: If an order of steps breaks a rule, or lets a thread sleep forever.
        graphlib.CycleError: If an order of steps does not end.
    """
    numbers = {start: 0}
    graph: dict[int, list[int]] = {}
    todo = [start]
    while todo:
        state = todo.pop()
        check_state(state)
        next_states = list(following(state))
        if not next_states:
            check_end(state)
        for one in next_states:
            if one not in numbers:
                numbers[one] = len(numbers)
                todo.append(one)
        graph[numbers[state]] = [numbers[one] for one in next_states]
    graphlib.TopologicalSorter(graph).prepare()
    return len(numbers)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off, which would look at all states again and again."""
    gc.disable()
    yield
    gc.enable()
