"""Pages that cannot be loaded while rows are copied: errors instead of the end of the process."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.programs import Programs

import pinfeed
from pinfeed.native import library as native

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

SHRINK = """
import faulthandler, os, sys
import numpy as np
import pinfeed

if sys.argv[1] == "before":
    faulthandler.enable()
path = sys.argv[2]
feeder = pinfeed.Feeder(path, batch_size=100, shuffle=True, depth=int(sys.argv[3]), device="cpu")
for _ in feeder:
    pass
if sys.argv[1] == "after":
    faulthandler.enable()
n = 0
for batch in feeder:
    n += 1
    if n == 3:
        os.truncate(path, 5000)
"""

FAULT = """
import faulthandler, mmap, os, signal, sys
import numpy as np
import pinfeed

if sys.argv[1] == "ignored":
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
feeder = pinfeed.Feeder(sys.argv[2], batch_size=100, device="cpu")
for _ in feeder:
    pass
if sys.argv[1] in ("after", "disabled"):
    faulthandler.enable()
for _ in feeder:
    pass
if sys.argv[1] == "disabled":
    faulthandler.disable()
with open(sys.argv[2] + ".other", "w+b") as file:
    file.truncate(8192)
    other = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
if sys.argv[3] == "sent":
    os.kill(os.getpid(), 7)
else:
    print(other[5000])
print("not reached")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((3000, 50), np.float32))
    return path


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("handler", "depth"), [("none", 0), ("before", 2), ("after", 2)])
def test_a_file_that_shrinks_in_a_loop_is_an_error(
    path: Path, handler: str, depth: int, programs: Programs
) -> None:
    done = programs.run(SHRINK, handler, path, depth)
    assert done.returncode == 1
    assert "ReadError" in done.stderr
    assert f"{path} has shrunk to 5000 bytes" in done.stderr
    assert "Fatal Python error" not in done.stderr


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("handler", "how"),
    [
        ("none", "touched"),
        ("after", "sent"),
        ("after", "touched"),
        ("disabled", "touched"),
        ("ignored", "touched"),
    ],
)
def test_other_faults_end_the_process_as_without_pinfeed(
    path: Path, handler: str, how: str, programs: Programs
) -> None:
    done = programs.run(FAULT, handler, path, how)
    assert done.returncode == -signal.SIGBUS
    assert "not reached" not in done.stdout
    assert done.stderr.count("Fatal Python error: Bus error") == (handler == "after")


@pytest.mark.parametrize("depth", [0, 2, None])
def test_the_error_names_which_of_several_files_has_shrunk(
    tmp_path: Path, depth: int | None
) -> None:
    paths = [str(tmp_path / f"{i}.npy") for i in range(3)]
    for path in paths:
        np.save(path, np.zeros((3000, 50), np.float32))
    store = pinfeed.NpyStore(paths)
    with pinfeed.Feeder(store, batch_size=100, device="cpu", depth=depth, shuffle=True) as feeder:
        assert sum(len(batch) for batch in feeder) == 9000
        os.truncate(paths[1], 300_000)
        with pytest.raises(pinfeed.errors.ReadError, match="has shrunk to 300000"):
            for _ in feeder:
                pass


def test_training_goes_on_after_the_error(path: Path) -> None:
    array = np.load(path)
    feeder = pinfeed.Feeder(path, batch_size=100, device="cpu", depth=2)
    batches = iter(feeder)
    next(batches)
    os.truncate(path, 5000)
    with pytest.raises(pinfeed.errors.ReadError, match="has shrunk"):
        for _ in batches:
            pass
    feeder.close()
    np.save(path, array)
    with pinfeed.Feeder(path, batch_size=100, device="cpu", depth=2) as again:
        assert sum(len(batch) for batch in again) == 3000


@pytest.mark.parametrize("size", [5000, 600_127])
def test_all_threads_of_a_process_survive(path: Path, size: int) -> None:
    """A file of 600,128 bytes that is one byte shorter raises no signal, but has shrunk."""
    feeders = [
        pinfeed.Feeder(path, batch_size=500, shuffle=True, depth=depth, device="cpu")
        for depth in (0, 1, 3)
    ]
    loops = [iter(feeder) for feeder in feeders]
    for loop in loops:
        next(loop)
    os.truncate(path, size)
    for loop in loops:
        with pytest.raises(pinfeed.errors.ReadError, match=f"has shrunk to {size} bytes"):
            for _ in loop:
                pass
    for feeder in feeders:
        feeder.close()


def test_the_handler_is_installed_only_while_files_are_mapped(
    path: Path, programs: Programs
) -> None:
    program = """
import ctypes, gc, sys, signal
import pinfeed
libc = ctypes.CDLL(None)
def handler():
    action = (ctypes.c_char * 160)()
    libc.sigaction(signal.SIGBUS, None, action)
    return int.from_bytes(action[:8], "little")
print(handler() != 0)
with pinfeed.Feeder(sys.argv[1], batch_size=100, device="cpu", depth=2) as feeder:
    for _ in feeder:
        pass
    print(handler() != 0)
del feeder, _
gc.collect()
print(handler() != 0)
"""
    assert programs.run(program, path).stdout.split() == ["False", "True", "False"]


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile handlers.c with the functions that it tests."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    program = tmp_path_factory.mktemp("handlers") / "handlers"
    folder = Path(__file__).parent
    sources = [
        folder / "handlers.c",
        *(native.PATH.with_name(name) for name in ("guard.c", "copy.c")),
    ]
    subprocess.run(["cc", "-std=c11", "-O1", "-pthread", *sources, "-o", program], check=True)
    return program


@pytest.mark.parametrize(
    ("steps", "output"),
    [
        ("mof", "r"),
        ("Amof", "rA"),
        # A later handler comes first until the next copy begins.
        ("AmBof", "BrBA"),
        ("AmBoof", "BrBrBA"),
        ("AmBaoof", "rrBA"),
        ("AmBaCaof", "rCBA"),
        ("AmBaCof", "CrCBA"),
        # Later handlers that are removed, or installed again.
        ("AmBdaof", "rA"),
        ("AmBadBaof", "rBA"),
        ("mSaof", "r"),
        ("mSaduf", ""),
        # No file is mapped for a while.
        ("Amuf", "A"),
        ("AmBuf", "BA"),
        ("AmBauf", "BA"),
        ("AmBumof", "rBA"),
        ("AmuBmof", "rBA"),
    ],
)
def test_a_fault_of_others_reaches_each_handler_once(
    handlers: Path, steps: str, output: str
) -> None:
    """The steps are those of handlers.c; a copy that fails (o) gives r, and f ends the process."""
    done = subprocess.run([handlers, steps], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.returncode) == (output, -signal.SIGBUS)


def test_a_fork_while_another_thread_installs_the_handler(handlers: Path) -> None:
    done = subprocess.run([handlers, "F"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("k", 0)
