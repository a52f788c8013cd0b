"""TransitionRing: a step waits until the transitions that it replaces have been gathered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pinfeed.stores.ring_layout import RingLayout
from pinfeed.stores.transition_ring import Draw, FrameRing, TransitionRing


def ring_of(n_steps: int) -> TransitionRing:
    parts: Any = {"x": ((), np.dtype(np.int64)), "y": ((), np.dtype(np.int64))}
    return TransitionRing(RingLayout(n_steps, 1, parts, {}, frozenset(), 1, 0.9))


def add(ring: TransitionRing, value: int) -> None:
    with ring.changed:
        ring.add(ring.layout.checked({"x": value, "y": -value}))


def protected(ring: TransitionRing, rows: list[int]) -> Draw:
    found = np.array(rows)
    with ring.changed:
        draw = Draw(found, ring.numbers_of(found), ring.n_added)
        ring.protect(draw, 2)
    return draw


def gathered(ring: TransitionRing, name: str, draw: Draw) -> list[int]:
    out = np.empty(len(draw.rows), np.int64)
    ring.gather(name, draw, out)
    ring.release(draw, 1)
    return out.tolist()


def test_a_step_waits_for_the_batch_that_has_the_oldest() -> None:
    ring = ring_of(3)
    for value in range(3):
        add(ring, value)
    draw = protected(ring, [0, 2])
    actor = threading.Thread(target=add, args=(ring, 3))
    actor.start()
    # The actor waits in the condition, or has ended against the rule.
    while actor.is_alive() and not ring.changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    assert ring.n_added == 3
    assert gathered(ring, "x", draw) == [0, 2]
    assert ring.n_added == 3
    assert gathered(ring, "y", draw) == [0, -2]
    actor.join()
    assert gathered(ring, "x", protected(ring, [0])) == [3]


def test_a_step_does_not_wait_for_other_transitions() -> None:
    ring = ring_of(3)
    for value in range(3):
        add(ring, value)
    draw = protected(ring, [1, 2])
    add(ring, 3)
    assert gathered(ring, "x", draw) == [1, 2]


def test_numbers_of_transitions_are_never_used_again() -> None:
    ring = ring_of(4)
    for value in range(11):
        add(ring, value)
        rows = np.arange(ring.n_kept)
        draw = protected(ring, rows.tolist())
        assert ring.numbers_of(rows).tolist() == gathered(ring, "x", draw)
        assert gathered(ring, "y", draw) == [-n for n in ring.numbers_of(rows).tolist()]
        assert ring.is_kept(ring.numbers_of(rows)).all()
        assert ring.rows_of(ring.numbers_of(rows)).tolist() == rows.tolist()
    assert not ring.is_kept(np.array([6, 11, -1])).any()


class Watched(np.ndarray):
    """Array that calls a function before it is written."""

    before_write: Callable[[], object] = staticmethod(lambda: None)

    def __setitem__(self, key: Any, value: Any) -> None:
        type(self).before_write()
        super().__setitem__(key, value)


def test_frames_are_gathered_while_the_array_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gathers has no lock, so it must not see an array without its frames."""

    def make_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.zeros(shape, dtype).view(Watched)

    ring = FrameRing("x", (4, 1, 1), (3,), np.dtype(np.int64), make_array)
    seen: list[list[int]] = []

    def gather() -> None:
        out = np.empty((2, 3), np.int64)
        ring.gather(0, np.arange(2), out)
        seen.append(out[:, 0].tolist())

    # Every step has two frames that no other one has.
    for k in range(4):
        ring.add(k, k - 1 if k else None, *np.full((2, 1, 1, 3), [[[[k + 1]]], [[[-k - 1]]]]))
    monkeypatch.setattr(ring, "_n_copied", 1)
    monkeypatch.setattr(Watched, "before_write", gather)
    ring.reserve(12)
    assert len(seen) == 8
    assert set(map(tuple, seen)) == {(1, 2)}
