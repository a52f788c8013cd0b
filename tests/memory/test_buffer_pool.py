"""Buffers that return to their pool: their size and alignment, and when they are used again."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.made_memory import System, address_of

from pinfeed.memory import pages
from pinfeed.memory.host import resident_bytes
from pinfeed.memory.pages import PAGE, BufferPool, Bytes, anonymous, block_nbytes


# -- sizes -----------------------------------------------------------------------------------------
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
    # This block has the same number of pages.
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


def test_a_block_in_a_reference_cycle_is_freed_by_the_collector() -> None:
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


def test_the_number_of_free_blocks_is_bounded() -> None:
    system = System()
    pool = BufferPool(2, system.make)
    held = [pool.take(1) for _ in range(5)]
    assert system.alive == [True] * 5
    held.clear()
    assert sum(system.alive) == 2
    held = [pool.take(PAGE + 1) for _ in range(3)]
    held.clear()
    assert sum(system.alive[:5]) == 0, "those that were free for longest are dropped first"
    assert sum(system.alive[5:]) == 2
    pool.close()
    assert sum(system.alive) == 0


def test_a_pool_without_spare_blocks_keeps_none() -> None:
    system = System()
    pool = BufferPool(0, system.make)
    for _ in range(2):
        pool.take(PAGE)
    assert system.alive == [False, False]


def test_closing_releases_free_blocks() -> None:
    system = System()
    pool = BufferPool(4, system.make)
    free, used = pool.take(PAGE), pool.take(PAGE)
    del free
    pool.close()
    assert system.alive == [False, True]
    used[:] = 1


def test_blocks_in_use_are_released_after_their_pool_was_closed() -> None:
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


def test_an_array_may_die_after_the_names_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, the interpreter sets the names of modules to None before the last arrays die."""
    system = System()
    pool = BufferPool(1, system.make)
    array = pool.take(PAGE)
    with monkeypatch.context() as patch:
        for name in [name for name in vars(pages) if not name.startswith("__")]:
            patch.setattr(pages, name, None)
        # If the callback raises, pytest fails the test.
        del array
    pool.take(PAGE)
    assert len(system.sizes) == 1


def test_no_python_code_returns_a_block() -> None:
    """The interpreter drops errors of such code, so an interrupt within it would be lost."""
    calls: list[str] = []
    pool = BufferPool(1)
    array = pool.take(PAGE)
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        del array
    finally:
        sys.setprofile(None)
    assert calls == []


def test_a_failed_allocation_leaves_the_pool_unchanged() -> None:
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
    """Takes, views and deaths in any order.

    Every living array holds what was written to it, and few blocks are kept.
    """

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
    """An array, and the value that was written to it."""

    def __init__(self, model: PoolModel, array: Any, mark: int) -> None:
        self.array = array
        self.mark = mark
        model.alive.add(self)


TestPool = PoolModel.TestCase
TestPool.settings = settings(max_examples=60)
