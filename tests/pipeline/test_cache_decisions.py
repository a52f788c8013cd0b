"""The rows that the device has while later decisions are made, or one is carried out."""

from typing import Any

import numpy as np
import pytest

from pinfeed.native import library as native
from pinfeed.pipeline.cache_decisions import CacheDecisions, CachedRows

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

CACHE: Any = None


def decide(decisions: CacheDecisions, *rows: int) -> CachedRows:
    return decisions.decide(CACHE, np.array(rows, np.int64))


def begun() -> CacheDecisions:
    """Return decisions about a cache of two rows, which the device has."""
    decisions = CacheDecisions(10, 2)
    decisions.begin()
    cached = decide(decisions, 3, 4)
    cached.may_have_moved = True
    decisions.note_done(cached)
    return decisions


def changed(decisions: CacheDecisions) -> tuple[list[int], list[int]]:
    rows, slots = decisions.changed_rows()
    return rows.tolist(), slots.tolist()


def test_rows_that_later_batches_evict_are_still_on_the_device() -> None:
    decisions = begun()
    later = [decide(decisions, *rows) for rows in ((5, 6), (6, 7), (3, 7, 8))]
    assert [cached.evicted.tolist() for cached in later] == [[3, 4], [5], [6]]
    assert changed(decisions) == ([3, 4], [0, 1])
    for cached, expected in zip(later, ([5, 6], [6, 7], [3, 7]), strict=True):
        decisions.note_done(cached)
        assert changed(decisions)[0] == expected


def test_a_flush_returns_the_rows_of_the_last_and_later_batches() -> None:
    decisions = begun()
    decisions.note_done(decide(decisions, 3))
    decisions.note_done(decide(decisions, 3))
    decisions.note_flushed()
    # The last batch may change its rows after the flush.
    assert changed(decisions)[0] == [3]
    decide(decisions, 4)
    assert changed(decisions)[0] == [3, 4]


def test_an_interrupt_after_a_decision_loses_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions = begun()
    policy = decisions._policy
    decided = policy.decide

    def interrupted(*args: Any) -> None:
        decided(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(policy, "decide", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decide(decisions, 5, 6)
    assert policy.rows_of_slots.tolist() == [5, 6]
    assert changed(decisions) == ([3, 4], [0, 1])


def test_a_signal_handler_before_a_decision_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = begun()
    policy = decisions._policy
    decided = policy.decide

    def handled(*args: Any) -> None:
        assert changed(decisions) == ([3, 4], [0, 1])
        decided(*args)

    monkeypatch.setattr(policy, "decide", handled)
    later = decide(decisions, 5, 6)
    assert later.evicted.tolist() == [3, 4]
    assert changed(decisions) == ([3, 4], [0, 1])


def test_slots_that_may_be_overwritten_are_not_read() -> None:
    """The stores have the rows that enter, and the batch has those that leave."""
    decisions = begun()
    decide(decisions, 4, 5).may_have_moved = True
    assert changed(decisions) == ([4], [1])
    # A reader continues to decide.
    decide(decisions, 5)
    assert changed(decisions) == ([4], [1])
