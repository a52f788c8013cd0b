"""Schedules of the simulated device: which of its threads and streams moves next."""

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial

from pinfeed.testing import SimDevice, favour
from pinfeed.testing.sim import Choose

SLOTS = ("pinfeed-read", "pinfeed-write")
STREAMS = ("compute", "read", "write")
FAVOURED: list[tuple[str, ...]] = [
    (),
    ("read", "pinfeed-read"),
    ("compute",),
    ("write",),
    ("compute", "pinfeed-read"),
    ("pinfeed-read",),
    ("write", "pinfeed-write"),
    ("read", "pinfeed-read", "write", "pinfeed-write"),
    ("compute", "read", "pinfeed-read"),
    (*STREAMS, *SLOTS),
]


def sharing_function() -> str:
    """Return the name of the function that calls ``Device.share``, which calls this."""
    caller = sys._getframe(2)
    if caller.f_code.co_name == "share_each":
        assert caller.f_back is not None
        caller = caller.f_back
    return caller.f_code.co_name


def stalling(name: str, moves: int, late: tuple[str, ...]) -> Choose:
    """Let all but the ``late`` ones move; the stream ``name`` is late after ``moves`` moves."""
    left = moves

    def choose(ready: Sequence[str]) -> str | None:
        nonlocal left
        chosen = next(
            (actor for actor in ready if actor not in late and (actor != name or left)), None
        )
        left -= chosen == name
        return chosen

    return choose


def next_stream(batch: int, switch_after: int | None, switch_once: int | None) -> str | None:
    """Return the stream that a loop changes to after a batch; None if it keeps its stream.

    Args:
        batch: Number of the batch.
        switch_after: Number of batches after which the loop changes its stream after each batch.
        switch_once: Number of batches after which the loop changes its stream for good.
    """
    if switch_once == batch + 1:
        return "another"
    if switch_after is not None and batch + 1 >= switch_after:
        return ("another", "compute")[(batch + 1 - switch_after) % 2]
    return None


def switch(device: SimDevice, name: str) -> None:
    """Change to another stream, in which later work waits for the work queued in this one."""
    done = device.current_stream().record()
    device.switch(name)
    device.current_stream().wait(done)


def randomly(seed: int) -> Choose:
    rng = random.Random(seed)
    return lambda ready: rng.choice([None, *ready])


def corners(stalls: dict[str, tuple[int, ...]]) -> dict[str, Callable[[], Choose]]:
    """Return schedules with fast streams, and with streams that stall after some moves, by name."""
    found: dict[str, Callable[[], Choose]] = {
        f"fast {'+'.join(names)}": partial(favour, *names) for names in FAVOURED
    }
    return found | {
        f"{name} stalls after {moves}, late {'+'.join(late)}": partial(stalling, name, moves, late)
        for name, every in stalls.items()
        for moves in every
        for late in ((), ("write",), ("pinfeed-write",), ("pinfeed-read",))
    }
