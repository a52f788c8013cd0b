"""A model of crew.c: every order of the steps of its threads, for a few small jobs.

Each step is one atomic operation of crew.c, in the order in which the C code makes them. The model
has two places, so that a place is used again while a slow thread still looks at its earlier job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

N_PLACES = 2
RUNNING, AWAITED, ENDED = "running", "awaited", "ended"


@dataclasses.dataclass(frozen=True)
class Job:
    """A place of the ring. ``owner`` stands for the fields that only takers of pieces may read."""

    owner: int = -1
    ticket: int = -1
    left: int = 0
    unfinished: int = 0
    state: str = ENDED


@dataclasses.dataclass(frozen=True)
class State:
    places: tuple[Job, ...] = (Job(),) * N_PLACES
    head: int = 0
    bell: int = 0
    is_stopped: bool = False
    threads: tuple[tuple[Any, ...], ...] = ()
    """For each thread its next step, and its variables."""
    asleep: tuple[Any, ...] = ()
    """For each thread the word on which it sleeps, or None."""
    copied: frozenset[tuple[int, int]] = frozenset()
    """Pieces that were copied, as (job, pieces left when it was taken)."""

    def job(self, number: int) -> Job:
        return self.places[number % N_PLACES]

    def with_job(self, number: int, **changes: Any) -> State:
        places = list(self.places)
        places[number % N_PLACES] = dataclasses.replace(self.job(number), **changes)
        return dataclasses.replace(self, places=tuple(places))

    def go(self, thread: int, *step: Any) -> State:
        threads = list(self.threads)
        threads[thread] = step
        return dataclasses.replace(self, threads=tuple(threads))

    def sleep(self, thread: int, word: Any) -> State:
        asleep = list(self.asleep)
        asleep[thread] = word
        return dataclasses.replace(self, asleep=tuple(asleep))

    def wake(self, word: Any) -> State:
        asleep = tuple(None if one == word else one for one in self.asleep)
        return dataclasses.replace(self, asleep=asleep)


class Model:
    """Steps of the threads: 0 is the loop, 1 may be the one that stops the crew, others work.

    Args:
        pieces: Number of pieces of each job.
        n_workers: Number of working threads.
        stops: Whether another thread stops the crew.
        fault: Name of a mistake that the model makes, which must be found.
    """

    def __init__(
        self, pieces: tuple[int, ...], n_workers: int, *, stops: bool = False, fault: str = ""
    ) -> None:
        self.pieces = pieces
        self.fault = fault
        others = (("stop",),) * stops + (("work", 0),) * n_workers
        self.start = State(threads=(("submit", 0), *others), asleep=(None,) * (1 + len(others)))

    def steps(self, state: State, thread: int) -> State:
        """Return the state after the next step of a thread."""
        name, *variables = state.threads[thread]
        return getattr(self, name)(state, thread, *variables)

    # The loop submits jobs while a place is free, and waits for them in order.

    def submit(self, s: State, t: int, number: int) -> State:
        if number == len(self.pieces):
            return s.go(t, "wait", number - min(N_PLACES, number), number)
        n = self.pieces[number]
        s = s.with_job(number, owner=number, unfinished=n, state=RUNNING)
        return s.go(t, "publish", number)

    def publish(self, s: State, t: int, number: int) -> State:
        s = s.with_job(number, ticket=number, left=self.pieces[number])
        return s.go(t, "advance", number)

    def advance(self, s: State, t: int, number: int) -> State:
        return dataclasses.replace(s, head=number + 1).go(t, "ring", number)

    def ring(self, s: State, t: int, number: int) -> State:
        s = dataclasses.replace(s, bell=s.bell + 1).wake("bell")
        if number + 1 < N_PLACES and number + 1 < len(self.pieces):
            return s.go(t, "submit", number + 1)
        return s.go(t, "wait", number + 1 - N_PLACES, number + 1)

    def wait(self, s: State, t: int, number: int, submitted: int) -> State:
        """Wait for job ``number``; then submit job ``submitted``, if there is one."""
        if number == len(self.pieces):
            return s.go(t, "quit")
        return s.go(t, "take", number, ("wait", number, submitted), ("announce", number, submitted))

    def announce(self, s: State, t: int, number: int, submitted: int) -> State:
        if s.job(number).state == RUNNING:
            s = s.with_job(number, state=AWAITED)
        return s.go(t, "look", number, submitted)

    def look(self, s: State, t: int, number: int, submitted: int) -> State:
        if s.job(number).state == ENDED:
            self.check(s, number)
            done = ("submit", submitted) if submitted < len(self.pieces) else None
            return s.go(t, *(done or ("wait", number + 1, submitted)))
        return s.go(t, "doze", number, submitted)

    def doze(self, s: State, t: int, number: int, submitted: int) -> State:
        """Sleep on the state of the job, unless it has changed."""
        s = s.go(t, "look", number, submitted)
        if s.job(number).state == AWAITED or self.fault == "sleeps unchecked":
            return s.sleep(t, number % N_PLACES)
        return s

    def quit(self, s: State, t: int) -> State:
        return dataclasses.replace(s, is_stopped=True).go(t, "ring_all")

    def check(self, s: State, number: int) -> None:
        copied = {piece for job, piece in s.copied if job == number}
        assert copied == set(range(1, self.pieces[number] + 1)), "a job ended before its copies"

    # Any thread takes pieces.

    def take(self, s: State, t: int, number: int, again: Any, otherwise: Any) -> State:
        job = s.job(number)
        if job.ticket != number or not job.left:
            return s.go(t, *otherwise)
        return s.go(t, "exchange", number, job.left, again, otherwise)

    def exchange(self, s: State, t: int, number: int, left: int, again: Any, other: Any) -> State:
        job = s.job(number)
        same = job.left == left and (job.ticket == number or self.fault == "ignores the number")
        if not same:
            return s.go(t, "take", number, again, other)
        return s.with_job(number, left=left - 1).go(t, "copy", number, left, again)

    def copy(self, s: State, t: int, number: int, left: int, again: Any) -> State:
        assert s.job(number).owner == number, "a thread has read the fields of another job"
        assert (number, left) not in s.copied, "a piece was copied twice"
        s = dataclasses.replace(s, copied=s.copied | {(number, left)})
        return s.go(t, "finish", number, again)

    def finish(self, s: State, t: int, number: int, again: Any) -> State:
        s = s.with_job(number, unfinished=s.job(number).unfinished - 1)
        if s.job(number).unfinished:
            return s.go(t, *again)
        return s.go(t, "end", number, again)

    def end(self, s: State, t: int, number: int, again: Any) -> State:
        was = s.job(number).state
        s = s.with_job(number, state=ENDED)
        wakes = was == AWAITED and self.fault != "ends silently"
        return s.go(t, "wake_loop", number, again) if wakes else s.go(t, *again)

    def wake_loop(self, s: State, t: int, number: int, again: Any) -> State:
        return s.wake(number % N_PLACES).go(t, *again)

    # Workers.

    def work(self, s: State, t: int, number: int) -> State:
        if s.is_stopped:
            return s.go(t, "over")
        return s.go(t, "find", number, s.bell)

    def find(self, s: State, t: int, number: int, bell: int) -> State:
        if number == s.head:
            return s.go(t, "rest", number, bell)
        return s.go(t, "take", number, ("help", number), ("work", number + 1))

    def help(self, s: State, t: int, number: int) -> State:
        if s.is_stopped:
            return s.go(t, "over")
        return s.go(t, "take", number, ("help", number), ("work", number + 1))

    def rest(self, s: State, t: int, number: int, bell: int) -> State:
        s = s.go(t, "work", number)
        if s.bell == bell or self.fault == "rests unchecked":
            return s.sleep(t, "bell")
        return s

    # The thread that stops the crew, which the loop does, too, when it quits.

    def stop(self, s: State, t: int) -> State:
        return dataclasses.replace(s, is_stopped=True).go(t, "ring_all")

    def ring_all(self, s: State, t: int) -> State:
        if self.fault != "stops without a ring":
            s = dataclasses.replace(s, bell=s.bell + 1)
        return s.wake("bell").go(t, "over")

    def reachable(self) -> Iterator[State]:
        """Yield every state that some order of steps reaches."""
        todo = [self.start]
        known = {self.start}
        while todo:
            state = todo.pop()
            yield state
            for thread, (name, *_) in enumerate(state.threads):
                if name == "over" or state.asleep[thread] is not None:
                    continue
                following = self.steps(state, thread)
                if following not in known:
                    known.add(following)
                    todo.append(following)

    def run(self) -> int:
        """Check every state, and return their number.

        Raises:
            AssertionError: If an order of steps breaks a rule, or lets a thread sleep forever.
        """
        n_states = 0
        for state in self.reachable():
            n_states += 1
            is_stuck = all(
                name == "over" or asleep is not None
                for (name, *_), asleep in zip(state.threads, state.asleep, strict=True)
            )
            if is_stuck:
                assert not any(asleep is not None for asleep in state.asleep), "a thread sleeps on"
        return n_states


@pytest.mark.parametrize(("pieces", "n_workers"), [((1, 1, 1), 1), ((2, 1, 2), 1), ((1, 1, 1), 2)])
def test_every_order_of_steps_copies_each_piece_once(
    pieces: tuple[int, ...], n_workers: int
) -> None:
    assert Model(pieces, n_workers).run() > 100


def test_every_order_of_steps_ends_when_another_thread_stops_the_crew() -> None:
    assert Model((1, 1, 1), 1, stops=True).run() > 100


@pytest.mark.parametrize(
    "fault",
    [
        "ignores the number",
        "sleeps unchecked",
        "ends silently",
        "rests unchecked",
        "stops without a ring",
    ],
)
def test_each_precaution_is_needed(fault: str) -> None:
    with pytest.raises(AssertionError):
        Model((1, 1, 1), 1, stops=True, fault=fault).run()
