"""Page-locked memory: who locks it, who unlocks it, and what remains when that fails."""

import gc
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.made_memory import address_of

from pinfeed import Feeder
from pinfeed.errors import DeviceError
from pinfeed.memory import page_locked as page_locked_memory
from pinfeed.memory.host import resident_bytes
from pinfeed.memory.page_locked import locked_bytes, page_locked, unlock_freed
from pinfeed.memory.pages import PAGE, BufferPool, block_nbytes


def is_mapped(address: int) -> bool:
    spans = (
        line.split(maxsplit=1)[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


class Driver:
    """A driver that records which pages it would lock."""

    def __init__(self, refuse: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.refuse = refuse

    def lock(self, address: int, nbytes: int) -> None:
        if len(self.calls) == self.refuse:
            raise RuntimeError(f"the driver refuses {nbytes} bytes")
        assert address % PAGE == nbytes % PAGE == 0
        assert address not in self.locked
        assert is_mapped(address)
        assert is_mapped(address + nbytes - 1)
        self.locked[address] = nbytes
        self.calls.append(("lock", address))

    def unlock(self, address: int) -> None:
        assert is_mapped(address)
        assert is_mapped(address + self.locked.pop(address) - 1)
        self.calls.append(("unlock", address))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver that locks two pages at a time, so that little memory is locked in many calls."""
    monkeypatch.setattr(page_locked_memory, "_LOCK_BYTES", 2 * PAGE)
    yield
    gc.collect()


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 9 * PAGE])
def test_locked_memory_is_unlocked_after_its_last_array(nbytes: int) -> None:
    driver = Driver()
    memory = page_locked(nbytes, driver.lock, driver.unlock)
    address = address_of(memory)
    assert memory.shape == (block_nbytes(nbytes),)
    assert not memory.any()
    assert driver.locked == {address: block_nbytes(nbytes)}
    memory[:] = 1
    tensor = torch.from_numpy(memory[1:])[2:]
    del memory
    unlock_freed()
    assert len(driver.locked) == 1
    before = locked_bytes()
    del tensor
    assert len(driver.locked) == 1, (
        "a finalizer may run in a thread that captures a CUDA graph, and must not call the driver"
    )
    assert locked_bytes() == before
    unlock_freed()
    assert driver.locked == {}
    assert locked_bytes() == before - block_nbytes(nbytes)
    assert driver.calls == [("lock", address), ("unlock", address)]
    unlock_freed()
    assert len(driver.calls) == 2


@pytest.mark.parametrize("pages", [1, 2, 3, 4, 7])
@pytest.mark.usefixtures("small_pieces")
def test_large_memory_is_locked_in_pieces(pages: int) -> None:
    driver = Driver()
    memory = page_locked(pages * PAGE, driver.lock, driver.unlock)
    address = address_of(memory)
    starts = list(range(address, address + pages * PAGE, 2 * PAGE))
    assert list(driver.locked) == starts
    assert sum(driver.locked.values()) == pages * PAGE
    assert all(nbytes <= 2 * PAGE for nbytes in driver.locked.values())
    del memory
    unlock_freed()
    assert driver.locked == {}
    assert len(driver.calls) == 2 * len(starts)


def test_locked_memory_leaves_the_process_with_its_last_array() -> None:
    driver, before = Driver(), resident_bytes()["anonymous"]
    memory = page_locked(64 << 20, driver.lock, driver.unlock)
    memory[::PAGE] = 1
    assert resident_bytes()["anonymous"] - before > 60 << 20
    del memory
    unlock_freed()
    assert resident_bytes()["anonymous"] - before < 8 << 20


def test_pages_exist_before_they_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads touch the pages, each in its own part of the memory."""
    monkeypatch.setattr(page_locked_memory, "_TOUCH_BYTES", 1 << 20)
    before, there = resident_bytes()["anonymous"], []
    memory = page_locked(
        (16 << 20) + 5,
        lambda address, nbytes: there.append(resident_bytes()["anonymous"]),
        lambda address: None,
    )
    assert there[0] - before > 15 << 20
    assert not memory.any()


@pytest.mark.parametrize("refuse", [0, 1, 2])
@pytest.mark.usefixtures("small_pieces")
def test_a_refused_lock_leaves_nothing_locked(refuse: int) -> None:
    driver = Driver(refuse)
    message = (
        rf"{6 * PAGE} bytes cannot be page-locked \(RuntimeError: the driver refuses "
        rf"{2 * PAGE} bytes; `ulimit -l` is .* bytes are locked\)"
    )
    with pytest.raises(DeviceError, match=message):
        page_locked(6 * PAGE, driver.lock, driver.unlock)
    assert driver.locked == {}
    assert [call for call, _ in driver.calls] == ["lock"] * refuse + ["unlock"] * refuse


@pytest.mark.usefixtures("small_pieces")
def test_nothing_is_locked_while_a_refusal_is_handled() -> None:
    driver = Driver(refuse=2)
    try:
        page_locked(6 * PAGE, driver.lock, driver.unlock)
    except DeviceError:
        assert driver.locked == {}, "the caller may want to try again with less"


@pytest.mark.parametrize("failing", ["mmap", "madvise"])
def test_memory_that_the_system_does_not_have_cannot_be_locked(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's refusal is the same error as the driver's."""

    class Mapping(mmap.mmap):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if failing == "mmap":
                raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, *args, **kwargs)

        def madvise(self, *args: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(page_locked_memory.mmap, "mmap", Mapping)
    driver = Driver()
    reason = "(Cannot allocate memory|Invalid argument)"
    message = rf"{6 * PAGE} bytes cannot be page-locked \(.*{reason}"
    with pytest.raises(DeviceError, match=message):
        page_locked(6 * PAGE, driver.lock, driver.unlock)
    assert driver.calls == []


def test_memory_freed_before_it_is_locked_again() -> None:
    """A large table may follow another that has just been dropped."""
    driver = Driver()
    memory = page_locked(PAGE, driver.lock, driver.unlock)
    del memory
    page_locked(PAGE, driver.lock, driver.unlock)
    assert [call for call, _ in driver.calls] == ["lock", "unlock", "lock"]


def test_a_loop_unlocks_what_was_freed_when_it_asks_for_a_batch() -> None:
    driver = Driver()
    memory = page_locked(PAGE, driver.lock, driver.unlock)
    with Feeder(np.zeros((4, 1)), batch_size=1, depth=1, device="cpu") as feeder:
        loop = iter(feeder)
        next(loop)
        del memory
        assert driver.locked
        next(loop)
        assert not driver.locked


def test_memory_that_the_driver_does_not_unlock_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another array at its address would be copied from the pages that the driver knows."""

    def unlock(address: int) -> None:
        raise RuntimeError("cudaHostUnregister failed with CUDA error 900")

    # Memory of earlier tests is unlocked first.
    unlock_freed()
    monkeypatch.setattr(page_locked_memory, "_kept", [])
    before = locked_bytes()
    memory = page_locked(PAGE, lambda address, nbytes: None, unlock)
    address = address_of(memory)
    del memory
    unlock_freed()
    assert (
        f"{PAGE} bytes of page-locked memory could not be unlocked, and stay mapped "
        "(cudaHostUnregister failed"
    ) in caplog.text
    assert is_mapped(address)
    assert locked_bytes() == before + PAGE
    page_locked_memory._locked.discard((address, PAGE))


def test_an_interrupt_loses_no_memory() -> None:
    driver = Driver()

    def unlock(address: int) -> None:
        if not interrupted:
            interrupted.append(address)
            raise KeyboardInterrupt
        driver.unlock(address)

    interrupted: list[int] = []
    memory = page_locked(PAGE, driver.lock, unlock)
    del memory
    with pytest.raises(KeyboardInterrupt):
        unlock_freed()
    unlock_freed()
    assert not driver.locked


def test_a_pool_of_locked_memory_locks_a_block_once() -> None:
    driver = Driver()
    pool = BufferPool(1, lambda nbytes: page_locked(nbytes, driver.lock, driver.unlock))
    for _ in range(5):
        pool.take(5000)[:] = 1
    assert len(driver.calls) == 1
    one, other = pool.take(5000), pool.take(5000)
    del one, other
    unlock_freed()
    assert [call for call, _ in driver.calls] == ["lock", "lock", "unlock"]
    pool.close()
    unlock_freed()
    assert driver.locked == {}


PROGRAM = """
import os, sys
import numpy as np
from pinfeed.memory.pages import anonymous
from pinfeed.memory.page_locked import page_locked, unlock_freed
calls = []
def unlock(address):
    os.write(1, b"unlocked ")
memory = page_locked(1 << 16, lambda address, nbytes: None, unlock)
memory[:] = 1
{rest}
"""


def test_memory_is_unlocked_when_the_interpreter_ends() -> None:
    assert run("") == "unlocked "


def test_a_forked_process_does_not_inherit_locked_memory() -> None:
    rest = """
here = f"{memory.ctypes.data:x}-"
inherited = lambda: any(line.startswith(here) for line in open("/proc/self/maps"))
os.write(1, f"{inherited()} ".encode())
other = page_locked(1 << 16, lambda address, nbytes: None, unlock)
del other
child = os.fork()
if child == 0:
    os.write(1, f"{inherited()} ".encode())
    # These fill the holes that the memory has left here.
    arrays = [np.full(1 << 16, 3, np.uint8) for _ in range(200)]
    blocks = [anonymous(1 << 16) for _ in range(200)]
    del memory
    unlock_freed()
    is_kept = all((array == 3).all() for array in arrays)
    is_kept = is_kept and not any(block.any() for block in blocks)
    os._exit(0 if is_kept else 1)
os.write(1, f"{os.waitpid(child, 0)[1]} ".encode())
"""
    assert run(rest).split() == ["True", "False", "0", "unlocked", "unlocked"]


def run(rest: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(rest=rest)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
