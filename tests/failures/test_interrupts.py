"""Ctrl-C, and the end of the interpreter, with a loop that is running."""

import os
import signal
import sys
import textwrap
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.programs import Programs

from pinfeed import ArrayStore, Feeder

PROGRAM = """
    import sys, time, numpy as np, threading, pinfeed
    from pinfeed import ArrayStore

    class Slow(ArrayStore):
        calls = 0

        def gather(self, rows, out):
            self.calls += 1
            if {slow} and self.calls > 1:
                if self.calls == 3:
                    print("ready", flush=True)
                time.sleep(0.2)
            super().gather(rows, out)

    table = np.zeros((2, 256 << 20), np.uint8) if {slow} else np.zeros((1000, 2))
    store = Slow(table.reshape(-1, 4096) if {slow} else table)
    feeder = pinfeed.Feeder(store, batch_size={batch_size}, depth={depth})
    try:
        while True:
            for batch in feeder:
                if not {slow}:
                    print("ready", flush=True)
                time.sleep(0.01)
    except KeyboardInterrupt:
        feeder.close()
        left = [t.name for t in threading.enumerate() if t.name.startswith("pinfeed")]
        print("interrupted", left, "#", store.calls, flush=True)
"""


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("slow", [False, True], ids=["in the training step", "in a large batch"])
def test_ctrl_c_ends_a_loop_at_once(depth: int, slow: bool, programs: Programs) -> None:
    """A batch of 256 MiB is gathered in sixteen steps of 0.2 seconds each.

    The loop does not wait for the last one.
    """
    program = textwrap.dedent(
        PROGRAM.format(depth=depth, slow=slow, batch_size=1 << 16 if slow else 10)
    )
    read, write = os.pipe()
    with open(read) as stdout:
        with open(write, "w") as output:
            running = programs.start(program, stdout=output, stderr=sys.__stderr__)
        assert stdout.readline() == "ready\n"
        os.kill(running.pid, signal.SIGINT)
        status = running.wait()
        out = stdout.read()
    left, n_steps = out.rpartition("interrupted ")[2].split("#")
    assert left == "[] "
    assert not slow or int(n_steps) < 16, "the steps before the signal, and the interrupted one"
    assert status == 0


def test_the_interpreter_can_end_with_a_live_feeder(programs: Programs) -> None:
    program = (
        "import numpy as np, pinfeed; f = pinfeed.Feeder(np.zeros((1000, 2)), batch_size=2);"
        "i = iter(f); next(i); print('end')"
    )
    done = programs.run(program, warnings="error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


class OwnStore(ArrayStore):
    """A store of the user, whose rows reader threads gather."""

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)


@pytest.mark.parametrize("n_values", [2, 16384], ids=["one reader", "several readers"])
def test_a_loop_ends_wherever_its_thread_is_interrupted(n_values: int) -> None:
    """The loop's thread fills slots, too, so an interrupt may leave a turn of the readers open."""
    rows = np.zeros((400, n_values), np.float32)
    left = n_interrupts = 0

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename.endswith(("filler.py", "pool.py")):
            left -= 1
            if not left:
                raise KeyboardInterrupt

    for n_calls in range(1, 100):
        with Feeder(OwnStore(rows), batch_size=10, depth=3, device="cpu") as feeder:
            batches = iter(feeder)
            next(batches)
            left = n_calls
            sys.settrace(trace)
            try:
                list(batches)
            except KeyboardInterrupt:
                n_interrupts += 1
            finally:
                sys.settrace(None)
    assert n_interrupts > 10
