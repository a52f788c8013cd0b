"""Blocks go back to their pool when the last array on them dies, and never sooner."""

import gc
import mmap
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pinfeed import Feeder
from pinfeed.errors import DeviceError
from pinfeed.memory import buffer_pool
from pinfeed.memory.buffer_pool import (
    PAGE,
    BufferPool,
    Bytes,
    anonymous,
    block_nbytes,
    locked_bytes,
    page_locked,
    unlock_freed,
)
from pinfeed.memory.host import resident_bytes


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def is_mapped(address: int) -> bool:
    spans = (
        line.split(maxsplit=1)[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


class System:
    """Makes memory, and knows which of it is still there."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._made: list[weakref.ref[Bytes]] = []

    def make(self, nbytes: int) -> Bytes:
        memory = anonymous(nbytes)
        self.sizes.append(nbytes)
        self._made.append(weakref.ref(memory))
        return memory

    @property
    def alive(self) -> list[bool]:
        """Of each memory made, in this order."""
        return [made() is not None for made in self._made]


# -- sizes -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(nbytes=st.integers(0, 1 << 62))
def test_a_block_is_whole_pages(nbytes: int) -> None:
    size = block_nbytes(nbytes)
    assert size % PAGE == 0
    assert max(nbytes, 1) <= size < max(nbytes, 1) + PAGE


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 10 * PAGE + 3])
def test_memory_is_zero_aligned_and_of_exact_size(nbytes: int) -> None:
    memory = anonymous(nbytes)
    assert (memory.shape, memory.dtype) == ((block_nbytes(nbytes),), np.uint8)
    assert address_of(memory) % PAGE == 0
    assert not memory.any()
    memory[:] = 255
    pool = BufferPool(1)
    taken = pool.take(nbytes)
    assert (taken.shape, taken.dtype) == ((nbytes,), np.uint8)
    assert address_of(taken) % PAGE == 0
    taken[:] = 255


def test_anonymous_memory_leaves_the_process_with_its_last_array() -> None:
    before = resident_bytes()["anonymous"]
    memory = anonymous(64 << 20)
    memory[::PAGE] = 1
    view = memory[5:6]
    del memory
    assert resident_bytes()["anonymous"] - before > 60 << 20
    del view
    assert resident_bytes()["anonymous"] - before < 8 << 20


# -- the pool --------------------------------------------------------------------------------------


def test_a_block_is_used_again_when_its_array_dies() -> None:
    system = System()
    pool = BufferPool(1, system.make)
    array = pool.take(100)
    address, array[:] = address_of(array), 7
    del array
    # As many pages
    again = pool.take(PAGE)
    assert address_of(again) == address
    assert (again[:100] == 7).all(), "old contents"
    assert system.sizes == [100]


VIEWS: dict[str, Any] = {
    "slice": lambda array: array[3:5],
    "empty slice": lambda array: array[:0],
    "other dtype and shape": lambda array: array[16:].view(np.int64).reshape(-1, 2).T,
    "ndarray": lambda array: np.ndarray((4,), np.float32, array, 16),
    "memoryview": lambda array: memoryview(array)[1:2],
    "frombuffer": lambda array: np.frombuffer(array, np.int16),
    "asarray of a view": lambda array: np.asarray(array[1:]),
    "tensor": torch.from_numpy,
    "tensor of a slice": lambda array: torch.from_numpy(array[8:24]),
    "slice of a tensor": lambda array: torch.from_numpy(array[8:24])[1:2],
    "view of a tensor": lambda array: (
        torch.from_numpy(array[8:24]).view(torch.float32).reshape(2, 2)
    ),
    "storage of a tensor": lambda array: torch.from_numpy(array).untyped_storage(),
    "array of a tensor": lambda array: torch.from_numpy(array)[5:].numpy(),
    "dlpack": lambda array: torch.from_dlpack(array),
    "parameter": lambda array: torch.nn.Parameter(torch.from_numpy(array[:16]).view(torch.float32)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_block_is_not_used_again_while_any_view_lives(name: str) -> None:
    system = System()
    pool = BufferPool(2, system.make)
    array = pool.take(PAGE)
    address = address_of(array)
    view = VIEWS[name](array)
    del array
    other = pool.take(PAGE)
    assert address_of(other) != address
    assert len(system.sizes) == 2
    del view
    assert address_of(pool.take(PAGE)) == address
    assert len(system.sizes) == 2


def test_a_block_in_a_cycle_comes_back_with_the_collector() -> None:
    system = System()
    pool = BufferPool(1, system.make)
    cycle: list[Any] = [pool.take(1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    pool.take(1)
    assert len(system.sizes) == 1


def test_a_loop_runs_on_the_same_blocks() -> None:
    system = System()
    pool = BufferPool(3, system.make)
    held: list[Bytes] = []
    for _ in range(100):
        held = [*held[-2:], pool.take(5000)]
    assert len(system.sizes) == 4, "three are held while the next is taken, then one of them dies"
    assert set(system.sizes) == {5000}


def test_so_many_free_blocks_are_kept_of_all_sizes() -> None:
    system = System()
    pool = BufferPool(2, system.make)
    held = [pool.take(1) for _ in range(5)]
    assert system.alive == [True] * 5
    held.clear()
    assert sum(system.alive) == 2
    held = [pool.take(PAGE + 1) for _ in range(3)]
    held.clear()
    assert sum(system.alive[:5]) == 0, "those that were free for longest go first"
    assert sum(system.alive[5:]) == 2
    pool.close()
    assert sum(system.alive) == 0


def test_a_pool_without_spare_blocks_keeps_none() -> None:
    system = System()
    pool = BufferPool(0, system.make)
    for _ in range(2):
        pool.take(PAGE)
    assert system.alive == [False, False]


def test_closing_gives_back_what_is_free() -> None:
    system = System()
    pool = BufferPool(4, system.make)
    free, used = pool.take(PAGE), pool.take(PAGE)
    del free
    pool.close()
    assert system.alive == [False, True]
    used[:] = 1


def test_what_is_in_use_when_a_pool_is_closed_is_given_back_later() -> None:
    system = System()
    pool = BufferPool(4, system.make)
    one, other = pool.take(PAGE), pool.take(PAGE)
    pool.close()
    pool.close()
    one[:] = other[:] = 1
    assert system.alive == [True, True]
    del one
    assert system.alive == [False, True]
    del other
    assert system.alive == [False, False]


def test_a_pool_that_dies_with_blocks_in_use_leaves_them_alone() -> None:
    system = System()
    pool = BufferPool(4, system.make)
    free, used = pool.take(PAGE), pool.take(PAGE)
    del free, pool
    gc.collect()
    used[:] = 3
    assert system.alive[1]
    assert (used == 3).all()
    del used
    gc.collect()
    assert system.alive == [False, False]


def test_memory_that_cannot_be_had_leaves_the_pool_as_it_was() -> None:
    def make(nbytes: int) -> Bytes:
        if nbytes > PAGE:
            raise MemoryError(f"no {nbytes} bytes")
        return anonymous(nbytes)

    pool = BufferPool(2, make)
    with pytest.raises(MemoryError, match="no 5000 bytes"):
        pool.take(5000)
    assert pool.take(PAGE).shape == (PAGE,)


def test_a_pool_may_be_used_from_several_threads() -> None:
    pool, n_threads = BufferPool(4), 4
    start = threading.Barrier(n_threads)

    def work(mark: int) -> int:
        wrong = 0
        start.wait()
        for i in range(300):
            array = pool.take(PAGE)
            array[:] = mark
            view = torch.from_numpy(array[i % PAGE :])
            del array
            other = pool.take(PAGE)
            other[:] = mark + 100
            wrong += int((view != mark).sum())
        return wrong

    with ThreadPoolExecutor(n_threads) as executor:
        assert sum(executor.map(work, range(n_threads))) == 0


def test_an_array_may_die_in_another_thread() -> None:
    system = System()
    pool = BufferPool(1, system.make)
    box = [pool.take(PAGE)]
    with ThreadPoolExecutor(1) as executor:
        executor.submit(box.clear).result()
    pool.take(PAGE)
    assert len(system.sizes) == 1


class PoolModel(RuleBasedStateMachine):
    """Takes, views and deaths in any order: every living array holds what was written to it, and few blocks are kept."""

    arrays: Any = Bundle("arrays")

    def __init__(self) -> None:
        super().__init__()
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.system = System()
        self.next_mark = 0
        self.pool = BufferPool(2, self.system.make)

    @rule(target=arrays, pages=st.integers(1, 2))
    def take(self, pages: int) -> Any:
        self.next_mark += 1
        array = self.pool.take(pages * PAGE - 5)
        array[:] = self.next_mark % 256
        return Held(self, array, self.next_mark)

    @rule(target=arrays, held=arrays, begin=st.integers(0, 100))
    def view(self, held: Any, begin: int) -> Any:
        return Held(self, held.array[begin:], held.mark)

    @rule(held=consumes(arrays))
    def drop(self, held: Any) -> None:
        held.array = None
        self.alive.discard(held)

    @invariant()
    def nothing_is_overwritten(self) -> None:
        for held in self.alive:
            assert (held.array == held.mark % 256).all()

    @invariant()
    def few_are_kept(self) -> None:
        assert sum(self.system.alive) <= len({held.mark for held in self.alive}) + 2 * 2, (
            "two free blocks of each of two sizes"
        )


class Held:
    """An array with what was written to it."""

    def __init__(self, model: PoolModel, array: Any, mark: int) -> None:
        self.array = array
        self.mark = mark
        model.alive.add(self)


TestPool = PoolModel.TestCase
TestPool.settings = settings(deadline=None, max_examples=60)


# -- page-locked memory ----------------------------------------------------------------------------


class Driver:
    """Locks pages, as far as it says."""

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
    """A driver that locks two pages at a time: as with hundreds of gigabytes, without them."""
    monkeypatch.setattr(buffer_pool, "_LOCK_BYTES", 2 * PAGE)
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


def test_pages_are_there_before_they_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads, each with pieces of its own."""
    monkeypatch.setattr(buffer_pool, "_TOUCH_BYTES", 1 << 20)
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
    message = rf"{6 * PAGE} bytes cannot be page-locked \(RuntimeError: the driver refuses {2 * PAGE} bytes; `ulimit -l` is .* bytes are locked\)"
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

    monkeypatch.setattr(buffer_pool.mmap, "mmap", Mapping)
    driver = Driver()
    with pytest.raises(
        DeviceError,
        match=rf"{6 * PAGE} bytes cannot be page-locked \(.*(Cannot allocate memory|Invalid argument)",
    ):
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

    # Of earlier tests
    unlock_freed()
    monkeypatch.setattr(buffer_pool, "_kept", [])
    before = locked_bytes()
    memory = page_locked(PAGE, lambda address, nbytes: None, unlock)
    address = address_of(memory)
    del memory
    unlock_freed()
    assert (
        f"{PAGE} bytes of page-locked memory could not be unlocked, and stay as they are (cudaHostUnregister failed"
        in caplog.text
    )
    assert is_mapped(address)
    assert locked_bytes() == before + PAGE
    buffer_pool._locked.discard((address, PAGE))


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
from pinfeed.memory.buffer_pool import anonymous, page_locked, unlock_freed
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
    os._exit(0 if all((array == 3).all() for array in arrays) and not any(block.any() for block in blocks) else 1)
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
