"""A model of engine.c: every order of the steps of its threads, for a few small jobs.

Each step is one atomic operation of engine.c, in the order in which the C code makes them. The
model has two places, so that a place is used again while a slow thread still looks at its earlier
job.

Every order ends with all pieces copied, because no order comes back to an earlier state, and none
leaves a thread asleep. The loop needs no thread for that, also if it never rings for one.
``test_send_model.py`` has the steps that move a job to a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from support.orders_of_steps import check_every_order, without_collector

pytestmark = pytest.mark.usefixtures(without_collector.__name__)

N_PLACES = 2
# Steps of pf_engine_submit, and of a thread that looks for a job and goes to sleep.
SUBMIT = ("fill", "count_job", "publish", "advance", "decide", "ring", "see_sleepers", "wake_all")
REST = ("work", "listen", "find", "count_sleeper", "look_again", "rest", "rise")
# Mistakes in the order of these steps.
REORDERED = {
    "counts a job late": ("fill", "publish", "count_job", *SUBMIT[3:]),
    "rings before it submits": ("fill", "count_job", "publish", *SUBMIT[4:], "advance"),
    "sees sleepers before it rings": (*SUBMIT[:5], "see_sleepers", "ring", "wake_all"),
    "listens late": ("work", "find", "listen", *REST[3:]),
    "counts a sleeper late": (*REST[:3], "look_again", "rest", "count_sleeper", "rise"),
    "rests although the engine has stopped": (*REST[:4], "rest", "rise"),
}
RUNNING, AWAITED, ENDED = "running", "awaited", "ended"


class Job(NamedTuple):
    """A place of the ring. ``owner`` stands for the fields that only takers of pieces may read."""

    owner: int = -1
    ticket: int = -1
    left: int = 0
    unfinished: int = 0
    state: str = ENDED


class State(NamedTuple):
    places: tuple[Job, ...] = (Job(),) * N_PLACES
    head: int = 0
    n_untaken: int = 0
    bell: int = 0
    n_asleep: int = 0
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
        places[number % N_PLACES] = self.job(number)._replace(**changes)
        return self._replace(places=tuple(places))

    def go(self, thread: int, *step: Any) -> State:
        threads = list(self.threads)
        threads[thread] = step
        return self._replace(threads=tuple(threads))

    def add(self, **changes: int) -> State:
        changed = {name: getattr(self, name) + change for name, change in changes.items()}
        return self._replace(**changed)

    def sleep(self, thread: int, word: Any) -> State:
        asleep = list(self.asleep)
        asleep[thread] = word
        return self._replace(asleep=tuple(asleep))

    def wake(self, word: Any) -> State:
        asleep = tuple(None if one == word else one for one in self.asleep)
        return self._replace(asleep=asleep)


class Model:
    """Steps of the threads: 0 is the loop, 1 may be the one that stops the engine, others work.

    Args:
        pieces: Number of pieces of each job.
        n_workers: Number of working threads.
        ring_at: Jobs with pieces to take at which sleeping threads are woken.
        stops: Whether another thread stops the engine.
        fault: Name of a mistake that the model makes, which must be found.
    """

    def __init__(
        self,
        pieces: tuple[int, ...],
        n_workers: int,
        *,
        ring_at: int = 1,
        stops: bool = False,
        fault: str = "",
    ) -> None:
        self.pieces = pieces
        self.n_workers = n_workers
        self.ring_at = ring_at
        self.fault = fault
        order = REORDERED.get(fault, ())
        submit = order if "fill" in order else SUBMIT
        rest = order if "work" in order else REST
        # The next step of each of these steps.
        self.following = dict(itertools.pairwise((*submit, "")))
        self.following |= itertools.pairwise((*rest, "work"))
        others = (("stop",),) * stops + (("work", 0, 0),) * n_workers
        self.start = State(
            threads=(("fill", 0, False), *others), asleep=(None,) * (1 + len(others))
        )

    def steps(self, state: State, thread: int) -> State:
        """Return the state after the next step of a thread."""
        name, *variables = state.threads[thread]
        return getattr(self, name)(state, thread, *variables)

    def go_on(self, s: State, t: int, *variables: Any) -> State:
        """Return the state in which a thread has made a step of ``SUBMIT`` or ``REST``."""
        following = self.following[s.threads[t][0]]
        return s.go(t, following, *variables) if following else self.submitted(s, t, *variables)

    # The loop submits jobs while a place is free, and waits for them in order.

    def fill(self, s: State, t: int, number: int, rings: bool) -> State:
        s = s.with_job(number, owner=number, unfinished=self.pieces[number], state=RUNNING)
        return self.go_on(s, t, number, rings)

    def count_job(self, s: State, t: int, number: int, rings: bool) -> State:
        return self.go_on(s.add(n_untaken=1), t, number, rings)

    def publish(self, s: State, t: int, number: int, rings: bool) -> State:
        s = s.with_job(number, ticket=number, left=self.pieces[number])
        return self.go_on(s, t, number, rings)

    def advance(self, s: State, t: int, number: int, rings: bool) -> State:
        return self.go_on(s.add(head=1), t, number, rings)

    def decide(self, s: State, t: int, number: int, _: bool) -> State:
        return self.go_on(s, t, number, s.n_untaken >= self.ring_at)

    def ring(self, s: State, t: int, number: int, rings: bool) -> State:
        return self.go_on(s.add(bell=rings), t, number, rings)

    def see_sleepers(self, s: State, t: int, number: int, rings: bool) -> State:
        return self.go_on(s, t, number, rings and s.n_asleep > 0)

    def wake_all(self, s: State, t: int, number: int, rings: bool) -> State:
        return self.go_on(s.wake("bell") if rings else s, t, number, rings)

    def submitted(self, s: State, t: int, number: int, _: bool) -> State:
        n_submitted = number + 1
        if n_submitted < min(N_PLACES, len(self.pieces)):
            return s.go(t, "fill", n_submitted, False)
        return self.wait(s, t, max(0, n_submitted - N_PLACES), n_submitted)

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
            if submitted < len(self.pieces):
                return s.go(t, "fill", submitted, False)
            return self.wait(s, t, number + 1, submitted)
        return s.go(t, "doze", number, submitted)

    def doze(self, s: State, t: int, number: int, submitted: int) -> State:
        """Sleep on the state of the job, unless it has changed."""
        s = s.go(t, "look", number, submitted)
        if s.job(number).state == AWAITED or self.fault == "sleeps unchecked":
            return s.sleep(t, number % N_PLACES)
        return s

    def quit(self, s: State, t: int) -> State:
        return s._replace(is_stopped=True).go(t, "ring_all")

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
        s = s.with_job(number, left=left - 1)
        return s.go(t, "copy" if left > 1 else "count_taken", number, left, again)

    def count_taken(self, s: State, t: int, number: int, left: int, again: Any) -> State:
        return s.add(n_untaken=-1).go(t, "copy", number, left, again)

    def copy(self, s: State, t: int, number: int, left: int, again: Any) -> State:
        assert s.job(number).owner == number, "a thread has read the fields of another job"
        assert (number, left) not in s.copied, "a piece was copied twice"
        s = s._replace(copied=s.copied | {(number, left)})
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

    def work(self, s: State, t: int, number: int, bell: int) -> State:
        return s.go(t, "over") if s.is_stopped else self.go_on(s, t, number, bell)

    def listen(self, s: State, t: int, number: int, _: int) -> State:
        return self.go_on(s, t, number, s.bell)

    def find(self, s: State, t: int, number: int, bell: int) -> State:
        if number == s.head:
            return self.go_on(s, t, number, bell)
        return s.go(t, "help", number)

    def help(self, s: State, t: int, number: int) -> State:
        if s.is_stopped:
            return s.go(t, "over")
        return s.go(t, "take", number, ("help", number), ("work", number + 1, 0))

    def count_sleeper(self, s: State, t: int, number: int, bell: int) -> State:
        return self.go_on(s.add(n_asleep=1), t, number, bell)

    def look_again(self, s: State, t: int, number: int, bell: int) -> State:
        return s.go(t, "rise", number, bell) if s.is_stopped else self.go_on(s, t, number, bell)

    def rest(self, s: State, t: int, number: int, bell: int) -> State:
        """Sleep on the bell, unless it has changed."""
        s = self.go_on(s, t, number, bell)
        return s.sleep(t, "bell") if s.bell == bell or self.fault == "rests unchecked" else s

    def rise(self, s: State, t: int, number: int, _: int) -> State:
        return self.go_on(s.add(n_asleep=-1), t, number, 0)

    # The thread that stops the engine, which the loop does, too, when it quits.

    def stop(self, s: State, t: int) -> State:
        return s._replace(is_stopped=True).go(t, "ring_all")

    def ring_all(self, s: State, t: int) -> State:
        if self.fault != "stops without a ring":
            s = s._replace(bell=s.bell + 1)
        return s.wake("bell").go(t, "over")

    def following_states(self, state: State) -> Iterator[State]:
        for thread, (name, *_) in enumerate(state.threads):
            if name != "over" and state.asleep[thread] is None:
                yield self.sorted_workers(self.steps(state, thread))

    def sorted_workers(self, s: State) -> State:
        """Sort the working threads, because states that only exchange them are alike."""
        n = len(s.threads) - self.n_workers
        workers = zip(s.threads[n:], s.asleep[n:], strict=True)
        workers = sorted(workers, key=lambda worker: (worker[0], worker[1] is None))
        threads, asleep = zip(*workers, strict=True)
        return s._replace(threads=s.threads[:n] + threads, asleep=s.asleep[:n] + asleep)

    def run(self) -> int:
        """Check every state that some order of steps reaches, and return their number.

        Raises:
            AssertionError: If an order of steps breaks a rule, or lets a thread sleep forever.
            graphlib.CycleError: If an order of steps does not end.
        """
        return check_every_order(
            self.start, self.following_states, self.check_state, self.check_end
        )

    def check_state(self, s: State) -> None:
        n_untaken = sum(job.left > 0 for job in s.places)
        assert s.n_untaken >= n_untaken, "a job is not counted, or was subtracted twice"
        is_submitting = s.threads[0][0] in SUBMIT[2:]
        if n_untaken >= self.ring_at and not is_submitting:
            assert "bell" not in s.asleep, "a thread sleeps while enough jobs wait"

    def check_end(self, s: State) -> None:
        assert not any(word is not None for word in s.asleep), "a thread sleeps on"
        assert all(job.state == ENDED for job in s.places)
        assert len(s.copied) == sum(self.pieces)
        assert s.n_untaken == 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("pieces", "n_workers", "ring_at"),
    [
        ((1, 1, 1), 1, 1),
        ((1, 1, 1), 1, 2),
        # Never wakes a thread.
        ((1, 1, 1), 1, N_PLACES + 1),
        ((2, 1, 2), 1, 1),
        ((2, 1, 2), 1, 2),
        ((2,), 2, 1),
        ((1, 1, 1), 2, 2),
    ],
)
def test_every_order_of_steps_copies_each_piece_once_and_ends(
    pieces: tuple[int, ...], n_workers: int, ring_at: int
) -> None:
    assert Model(pieces, n_workers, ring_at=ring_at).run() > 100


@pytest.mark.parametrize("ring_at", [1, 2])
def test_every_order_of_steps_ends_when_the_engine_is_stopped(ring_at: int) -> None:
    assert Model((1, 1, 1), 1, ring_at=ring_at, stops=True).run() > 100


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ignores the number", "fields of another job"),
        ("sleeps unchecked", "a thread sleeps on"),
        ("ends silently", "a thread sleeps on"),
        ("rests unchecked", "a thread sleeps"),
        ("stops without a ring", "a thread sleeps on"),
        ("counts a job late", "a job is not counted"),
        ("rings before it submits", "sleeps while enough jobs wait"),
        ("sees sleepers before it rings", "sleeps while enough jobs wait"),
        ("listens late", "sleeps while enough jobs wait"),
        ("counts a sleeper late", "sleeps while enough jobs wait"),
        ("rests although the engine has stopped", "a thread sleeps on"),
    ],
)
def test_each_precaution_is_needed(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        Model((1, 1, 1), 1, stops=True, fault=fault).run()
