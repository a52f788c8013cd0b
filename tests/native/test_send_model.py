"""A model of how engine.c moves jobs: the threads at the gate of a job, and the one that sends.

It begins where ``test_engine_model.py`` ends, and has the rest of the steps: a step is one atomic
operation of engine.c, or work of the only thread that does it. What the other model shows is one
step here: a thread takes a piece, and a thread without work waits for the next job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from support.orders_of_steps import check_every_order, without_collector

pytestmark = pytest.mark.usefixtures(without_collector.__name__)

CLOSED, OPENING, OPEN = "closed", "opening", "open"
TAKEN, DONE = "taken", "done"


class Job(NamedTuple):
    """A place of the ring, and the slot of its job."""

    owner: int = -1
    left: int = 0
    pieces: tuple[str, ...] = ()
    """Whether each piece is taken, or done."""
    n_sent: int = 0
    gate: str = OPEN
    is_recorded: bool = False
    has_ended: bool = False
    is_copying: bool = False
    """Whether copies of the slot's last job may still read its staging memory."""


class State(NamedTuple):
    places: tuple[Job, ...]
    threads: tuple[tuple[Any, ...], ...]
    """For each thread its next step, and its variables. Thread 0 is the loop."""
    asleep: tuple[int | None, ...]
    """For each thread the place on whose gate it sleeps, or None."""
    head: int = 0
    next: int = 0
    n_to_send: int = 0
    gathered: frozenset[tuple[int, int]] = frozenset()
    sent: tuple[tuple[int, int], ...] = ()
    """Pieces in the order in which their copies were queued, as (job, piece)."""

    def job(self, number: int) -> Job:
        return self.places[number % len(self.places)]

    def with_job(self, number: int, **changes: Any) -> State:
        places = list(self.places)
        places[number % len(places)] = self.job(number)._replace(**changes)
        return self._replace(places=tuple(places))

    def go(self, thread: int, *step: Any) -> State:
        threads = list(self.threads)
        threads[thread] = step
        return self._replace(threads=tuple(threads))

    def sleep(self, thread: int, gate: int) -> State:
        asleep = list(self.asleep)
        asleep[thread] = gate
        return self._replace(asleep=tuple(asleep))

    def wake(self, gate: int) -> State:
        return self._replace(asleep=tuple(None if one == gate else one for one in self.asleep))


SENDING = ("look", "scan", "queue", "record", "end", "advance")


class Model:
    """Steps of the threads: 0 is the loop, the others work; the device ends copies at any time.

    Args:
        pieces: Number of pieces of each job.
        n_workers: Number of working threads.
        n_places: Number of places, and of slots.
        has_gates: Whether copies read staging memory for some time. Otherwise they end at once.
        fault: Name of a mistake that the model makes, which must be found.
    """

    def __init__(
        self,
        pieces: tuple[int, ...],
        n_workers: int,
        *,
        n_places: int,
        has_gates: bool = False,
        fault: str = "",
    ) -> None:
        self.pieces = pieces
        self.n_workers = n_workers
        self.n_places = n_places
        self.has_gates = has_gates
        self.fault = fault
        self.start = State(
            places=(Job(),) * n_places,
            threads=(("submit", 0), *(("find", 0),) * n_workers),
            asleep=(None,) * (1 + n_workers),
        )

    # The loop submits jobs while a place is free, and waits for them in order.

    def submit(self, s: State, t: int, number: int) -> State:
        """Fill the place of a job, whose ticket no thread can have."""
        n = self.pieces[number]
        is_closed = s.job(number).is_copying and self.fault != "leaves the gate open"
        if not n and self.fault != "closes the gate of a job without pieces":
            is_closed = False
        job = s.job(number)._replace(
            owner=number,
            left=n,
            pieces=("",) * n,
            n_sent=0,
            gate=CLOSED if is_closed else OPEN,
            is_recorded=False,
            has_ended=False,
        )
        return s.with_job(number, **job._asdict()).go(t, "publish", number)

    def publish(self, s: State, t: int, number: int) -> State:
        n_submitted = number + 1
        s = s._replace(head=n_submitted)
        if n_submitted < min(self.n_places, len(self.pieces)):
            return s.go(t, "submit", n_submitted)
        return self.wait(s, t, max(0, n_submitted - self.n_places), n_submitted)

    def wait(self, s: State, t: int, number: int, submitted: int) -> State:
        """Wait for job ``number``; then submit job ``submitted``, if there is one."""
        if number == len(self.pieces):
            return s.go(t, "over")
        receive = ("receive", number, submitted)
        is_sender = not self.pieces[number] and self.fault != "waits for a job without pieces"
        return s.go(t, "take", number, ("count", receive) if is_sender else receive)

    def receive(self, s: State, t: int, number: int, submitted: int) -> State:
        job = s.job(number)
        assert job.is_recorded, "a job ended before its copies were queued"
        assert job.n_sent == self.pieces[number]
        if submitted < len(self.pieces):
            return s.go(t, "submit", submitted)
        return self.wait(s, t, number + 1, submitted)

    # Any thread takes pieces, through the gate of their job.

    def find(self, s: State, t: int, number: int) -> State:
        return s.go(t, "over" if number == len(self.pieces) else "take", number, ())

    def take(self, s: State, t: int, number: int, otherwise: tuple[Any, ...]) -> State:
        job = s.job(number)
        if job.owner != number or not job.left:
            return s.go(t, *(otherwise or ("find", number + 1)))
        return s.go(t, "see_gate", number, job.left, otherwise)

    def see_gate(self, s: State, t: int, *taking: Any) -> State:
        return s.go(t, "exchange" if s.job(taking[0]).gate == OPEN else "begin_open", *taking)

    def begin_open(self, s: State, t: int, number: int, *taking: Any) -> State:
        job = s.job(number)
        if job.gate == CLOSED:
            first = "open" if self.fault == "opens the gate first" else "sync"
            s = s.with_job(number, gate=OPENING)
            return s.go(t, first, job.owner, number, *taking)
        return s.go(t, "see_again" if job.gate == OPENING else "exchange", number, *taking)

    def sync(self, s: State, t: int, opened: int, *taking: Any) -> State:
        assert s.job(opened).owner == opened, "a thread waits for the slot of another job"
        following = "exchange" if self.fault == "opens the gate first" else "open"
        rest = taking if following == "exchange" else (opened, *taking)
        return s.go(t, following, *rest)

    def open(self, s: State, t: int, opened: int, *taking: Any) -> State:
        assert s.job(opened).owner == opened, "a thread has opened the gate of another job"
        return s.with_job(opened, gate=OPEN).go(t, "wake_all", opened, *taking)

    def wake_all(self, s: State, t: int, opened: int, *taking: Any) -> State:
        if self.fault != "opens the gate silently":
            s = s.wake(opened % self.n_places)
        if self.fault == "opens the gate first":
            return s.go(t, "sync", opened, *taking)
        return s.go(t, "exchange", *taking)

    def see_again(self, s: State, t: int, *taking: Any) -> State:
        is_opening = s.job(taking[0]).gate == OPENING
        if self.fault == "passes a gate that opens":
            is_opening = False
        return s.go(t, "doze" if is_opening else "exchange", *taking)

    def doze(self, s: State, t: int, *taking: Any) -> State:
        """Sleep on the gate, unless it has changed."""
        is_opening = s.job(taking[0]).gate == OPENING or self.fault == "sleeps unchecked"
        s = s.go(t, "see_again", *taking)
        return s.sleep(t, taking[0] % self.n_places) if is_opening else s

    def exchange(self, s: State, t: int, number: int, left: int, other: tuple[Any, ...]) -> State:
        job = s.job(number)
        if (job.owner, job.left) != (number, left):
            return s.go(t, "take", number, other)
        piece = len(job.pieces) - left
        s = s.with_job(number, left=left - 1, pieces=changed(job.pieces, piece, TAKEN))
        return s.go(t, "gather", number, piece, ("take", number, other))

    def gather(self, s: State, t: int, number: int, piece: int, again: Any) -> State:
        assert not s.job(number).is_copying, "copies still read the staging memory"
        s = s._replace(gathered=s.gathered | {(number, piece)})
        if self.fault == "counts a piece before it is done":
            return s.go(t, "count", ("mark", number, piece, again))
        return s.go(t, "mark", number, piece, ("count", again))

    def mark(self, s: State, t: int, number: int, piece: int, following: Any) -> State:
        job = s.job(number)
        assert job.owner == number, "a thread has changed another job"
        return s.with_job(number, pieces=changed(job.pieces, piece, DONE)).go(t, *following)

    # One thread at a time sends.

    def count(self, s: State, t: int, again: Any) -> State:
        is_sender = not s.n_to_send or self.fault == "sends at any time"
        s = s._replace(n_to_send=s.n_to_send + 1)
        return s.go(t, "look", 1, again) if is_sender else s.go(t, *again)

    def look(self, s: State, t: int, seen: int, again: Any) -> State:
        if s.next == s.head:
            return s.go(t, "leave", seen, again)
        number = s.next
        if self.fault == "sends the newest job":
            number = s.head - 1
        return s.go(t, "scan", number, s.job(number).n_sent, seen, again)

    def scan(self, s: State, t: int, number: int, n: int, *sending: Any) -> State:
        pieces = s.job(number).pieces
        if n < len(pieces) and pieces[n] == DONE:
            return s.go(t, "scan", number, n + 1, *sending)
        return s.go(t, "queue", number, n, *sending)

    def queue(self, s: State, t: int, number: int, n: int, *sending: Any) -> State:
        """Queue the copies of the pieces that are done."""
        job = s.job(number)
        copies = tuple((number, piece) for piece in range(job.n_sent, n))
        assert set(copies) <= s.gathered, "a piece was copied before it was gathered"
        is_copying = job.is_copying or (self.has_gates and n > 0)
        s = s._replace(sent=s.sent + copies).with_job(number, n_sent=n, is_copying=is_copying)
        if n < len(job.pieces):
            return s.go(t, "leave", *sending)
        early = self.fault == "ends a job before its record"
        return s.go(t, "end" if early else "record", number, *sending)

    def record(self, s: State, t: int, number: int, *sending: Any) -> State:
        s = s.with_job(number, is_recorded=True)
        early = self.fault == "ends a job before its record"
        return s.go(t, "advance" if early else "end", number, *sending)

    def end(self, s: State, t: int, number: int, *sending: Any) -> State:
        s = s.with_job(number, has_ended=True)
        early = self.fault == "ends a job before its record"
        return s.go(t, "record" if early else "advance", number, *sending)

    def advance(self, s: State, t: int, number: int, *sending: Any) -> State:
        return s._replace(next=number + 1).go(t, "look", *sending)

    def leave(self, s: State, t: int, seen: int, again: Any) -> State:
        """Stop sending, unless more pieces were counted since this thread last looked."""
        if self.fault == "forgets to look again":
            return s._replace(n_to_send=0).go(t, *again)
        left = s.n_to_send - seen
        s = s._replace(n_to_send=left)
        return s.go(t, "look", left, again) if left else s.go(t, *again)

    # Every order of the steps.

    def is_blocked(self, s: State, thread: int) -> bool:
        name, *variables = s.threads[thread]
        if name == "find":
            return s.head <= variables[0] < len(self.pieces)
        if name == "receive":
            return not s.job(variables[0]).has_ended
        if name == "sync":
            return s.job(variables[0]).is_copying
        return name == "over" or s.asleep[thread] is not None

    def following_states(self, s: State) -> Iterator[State]:
        for thread, (name, *variables) in enumerate(s.threads):
            if not self.is_blocked(s, thread):
                yield self.sorted_workers(getattr(self, name)(s, thread, *variables))
        for place, job in enumerate(s.places):
            # A job that has queued copies may queue more.
            if job.is_copying and (job.has_ended or not job.n_sent):
                yield s.with_job(place, is_copying=False)

    def sorted_workers(self, s: State) -> State:
        """Sort the working threads, because states that only exchange them are alike."""
        workers = sorted(zip(s.threads[1:], s.asleep[1:], strict=True), key=repr)
        if not workers:
            return s
        threads, asleep = zip(*workers, strict=True)
        return s._replace(threads=s.threads[:1] + threads, asleep=s.asleep[:1] + asleep)

    def run(self) -> int:
        return check_every_order(
            self.start, self.following_states, self.check_state, self.check_end
        )

    def check_state(self, s: State) -> None:
        n_senders = sum(name in SENDING for name, *_ in s.threads)
        assert n_senders <= 1, "two threads send"
        assert list(s.sent) == sorted(set(s.sent)), "copies are queued twice, or not in order"

    def check_end(self, s: State) -> None:
        assert not any(gate is not None for gate in s.asleep), "a thread sleeps on"
        assert all(name == "over" for name, *_ in s.threads), "a thread waits forever"
        assert len(s.sent) == sum(self.pieces)
        assert s.n_to_send == 0


def changed(pieces: tuple[str, ...], piece: int, state: str) -> tuple[str, ...]:
    return (*pieces[:piece], state, *pieces[piece + 1 :])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("pieces", "n_workers", "n_places"),
    [
        ((2, 1, 2), 1, 2),
        ((1, 0, 1), 1, 2),
        ((0, 1, 0), 1, 2),
        ((2, 2), 2, 2),
        ((1, 1, 1), 2, 2),
    ],
)
def test_every_order_of_steps_sends_each_piece_in_order(
    pieces: tuple[int, ...], n_workers: int, n_places: int
) -> None:
    assert Model(pieces, n_workers, n_places=n_places).run() > 100


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("pieces", "n_workers", "n_places"),
    [
        ((1, 1, 1), 1, 1),
        ((1, 1), 2, 1),
        ((1, 0, 1), 1, 1),
        ((1, 1, 1), 1, 2),
    ],
)
def test_every_order_of_steps_waits_for_earlier_copies(
    pieces: tuple[int, ...], n_workers: int, n_places: int
) -> None:
    assert Model(pieces, n_workers, n_places=n_places, has_gates=True).run() > 100


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sends at any time", "two threads send"),
        ("counts a piece before it is done", "a thread waits forever"),
        ("forgets to look again", "a thread waits forever"),
        ("sends the newest job", "a thread waits forever"),
        ("ends a job before its record", "before its copies were queued"),
        ("waits for a job without pieces", "a thread waits forever"),
    ],
)
def test_each_precaution_of_the_sender_is_needed(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        Model((1, 2, 0), 1, n_places=2, fault=fault).run()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("leaves the gate open", "still read the staging memory"),
        ("opens the gate first", "still read the staging memory"),
        ("passes a gate that opens", "still read the staging memory"),
        ("sleeps unchecked", "a thread sleeps on"),
        ("opens the gate silently", "a thread sleeps on"),
        ("closes the gate of a job without pieces", "of another job"),
    ],
)
def test_each_precaution_at_the_gate_is_needed(fault: str, message: str) -> None:
    pieces = (1, 1, 0, 1)
    with pytest.raises(AssertionError, match=message):
        Model(pieces, 1, n_places=1, has_gates=True, fault=fault).run()
