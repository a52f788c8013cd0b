"""Kernels that move rows, tested without a GPU.

They are compiled as C++ and run thread by thread, and compiled for GPUs.
"""

import ctypes
import sys
import types
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_compiler import ARCHITECTURES, compiled_for_cpu, compiled_for_gpu
from support.launches import Launching, Run, moves_of

from pinfeed.devices import kernels
from pinfeed.devices.kernels import (
    N_THREADS,
    NAMES,
    OPTIONS,
    SOURCE,
    word_width,
)
from pinfeed.native import library as native
from pinfeed.native import row_moves
from pinfeed.native.engine import Engine, Staged
from pinfeed.native.row_moves import MAX_TABLES, RowMover
from pinfeed.stores.array import ArrayStore

RUN = r"""
template <typename Index>
static void call(void* kernel, const void* moves)
{
    ((void (*)(const Moves<Index>))kernel)(*(const Moves<Index>*)moves);
}

extern "C" long long run(void* kernel, int kind, unsigned n_blocks, unsigned n_threads,
                         const void* moves)
{
    void (*const calls[])(void*, const void*) = {call<int>, call<long long>, call<Pair>};
    gridDim.x = n_blocks, blockDim.x = n_threads, n_wrong = 0;
    for (blockIdx.x = 0; blockIdx.x < n_blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < n_threads; threadIdx.x++)
            calls[kind](kernel, moves);
    return n_wrong;
}
"""
KINDS = ["int32", "int64", "pair"]


@pytest.fixture(scope="module", params=[1, 2, 4])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs kernels whose threads have some words in flight."""
    numbers = (f"MAX_TABLES={MAX_TABLES}", f"IN_FLIGHT={request.param}")
    numbers += ("N_THREADS=blockDim.x",)
    library = compiled_for_cpu(SOURCE + RUN, tmp_path_factory.mktemp("kernels"), numbers)
    library.run.restype = ctypes.c_longlong
    library.run.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
    ]

    def run_kernel(name: str, n_blocks: int, n_threads: int, moves: np.ndarray) -> int:
        kernel = ctypes.cast(library[name], ctypes.c_void_p)
        kind = KINDS.index(name.rpartition("_")[2])
        found: int = library.run(kernel, kind, n_blocks, n_threads, moves.ctypes.data)
        return found

    return run_kernel


def bytes_at(
    offset: int, shape: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of random bytes, and the memory around them.

    The rows begin a given number of bytes after a multiple of 16.
    """
    whole = rng.integers(256, size=shape[0] * shape[1] + 96, dtype=np.uint8)
    begin = -whole.ctypes.data % 16 + 32 + offset
    return whole[begin : begin + shape[0] * shape[1]].reshape(shape), whole


def launches(
    stores: Any, n_rows: int, n_blocks: int, index_nbytes: int = 4, indices: int = 1 << 40
) -> Any:
    """Return a driver after the launches that gather rows; their kernels do not run."""
    driver: Any = Launching(lambda *_: 0)
    mover = RowMover(moves_of(stores, "gather", index_nbytes, n_blocks=n_blocks), "gather")
    driver.move_rows(0, mover.move(-1, n_rows, indices, [1 << 30] * len(stores)))
    return driver


class Rows:
    """A store whose rows are not allocated.

    Args:
        row_nbytes: Bytes of a row.
        address: Address of the first row.
    """

    def __init__(self, row_nbytes: int, address: int = 0) -> None:
        self.n_rows = 100
        self.row_shape = (row_nbytes,)
        self.dtype = np.dtype(np.uint8)
        self.array = types.SimpleNamespace(ctypes=types.SimpleNamespace(data=address))


SIZES = st.lists(
    st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 24, 48, 100, 512, 600, 4096]),
    min_size=1,
    max_size=10,
)


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@settings(max_examples=60)
@given(
    sizes=SIZES,
    offsets=st.lists(st.sampled_from([0, 0, 1, 2, 4, 8]), min_size=10, max_size=10),
    n_table=st.integers(1, 60),
    share=st.floats(0, 1),
    n_blocks=st.integers(1, 3),
    index=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 99),
)
def test_rows_are_gathered_and_scattered(
    run: Run,
    sizes: list[int],
    offsets: list[int],
    n_table: int,
    share: float,
    n_blocks: int,
    index: type[np.integer[Any]],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(n_table) < share).astype(index)
    tables, memory = zip(
        *(
            bytes_at(offset, (n_table, size), rng)
            for size, offset in zip(sizes, offsets, strict=False)
        ),
        strict=True,
    )
    packed, room = zip(*(bytes_at(0, (len(rows), size), rng) for size in sizes), strict=True)
    stores = [ArrayStore(table) for table in tables]
    before = [whole.copy() for whole in (*memory, *room)]

    def move(kind: Any) -> None:
        driver: Any = Launching(run)
        mover = RowMover(moves_of(stores, kind, rows.itemsize, n_blocks=n_blocks), kind)
        packed_at = [there.ctypes.data for there in packed]
        driver.move_rows(0, mover.move(-1, len(rows), rows.ctypes.data, packed_at))
        assert bool(driver.launched) == bool(len(rows))
        assert all(0 < n <= n_blocks for n in driver.n_blocks)

    move("gather")
    for table, there, whole, old in zip(tables, packed, memory, before, strict=False):
        np.testing.assert_array_equal(there, table[rows])
        np.testing.assert_array_equal(whole, old)
    new = [rng.integers(256, size=there.shape, dtype=np.uint8) for there in packed]
    for there, values in zip(packed, new, strict=True):
        there[...] = values
    wanted = [table.copy() for table in tables]
    move("scatter")
    for table, values, old in zip(tables, new, wanted, strict=True):
        old[rows] = values
        np.testing.assert_array_equal(table, old)
    for inside, whole, was in zip((*tables, *packed), (*memory, *room), before, strict=True):
        begin = inside.ctypes.data - whole.ctypes.data
        np.testing.assert_array_equal(whole[:begin], was[:begin])
        np.testing.assert_array_equal(whole[begin + inside.size :], was[begin + inside.size :])


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize("index_nbytes", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "n_rows"),
    [([512] * 3, 10**7), ([1], 10**9), ([1 << 29], 5), ([600 << 10, 32], 10**5)],
)
def test_a_launch_counts_words_in_32_bits(sizes: list[int], n_rows: int, index_nbytes: int) -> None:
    driver = launches([Rows(size) for size in sizes], n_rows, 32, index_nbytes)
    assert set(driver.n_blocks) == {32}
    done: Counter[str] = Counter()
    for name, argument in zip(driver.launched, driver.arguments, strict=True):
        assert argument["rows"] == (1 << 40) + index_nbytes * done[name]
        table = argument["tables"][0]
        assert table["packed"] == (1 << 30) + done[name] * int(table["row_nbytes"])
        assert max(sizes) * int(argument["n_rows"]) < 1 << 31
        done[name] += int(argument["n_rows"])
    assert set(done.values()) == {n_rows}


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize(
    ("sizes", "n_rows", "n_blocks"),
    [([24], 6, 1), ([512], 1000, 63), ([512], 8192, 64), ([64, 512], 32, 2)],
)
def test_a_small_batch_takes_few_blocks(sizes: list[int], n_rows: int, n_blocks: int) -> None:
    assert launches([Rows(size) for size in sizes], n_rows, 64).n_blocks == [n_blocks]


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_tables_of_one_word_width_share_a_launch() -> None:
    """Weights and state of a table are one launch, and a scalar for each row is another."""
    driver = launches([Rows(size) for size in (512, 4, 512, 512, 1, 4)], 100, 8)
    assert driver.launched == [f"gather_rows_{width}_int32" for width in (16, 4, 1)]
    assert [int(argument["n_tables"]) for argument in driver.arguments] == [3, 2, 1]


@pytest.mark.parametrize(
    ("address", "row_nbytes", "width"),
    [
        (0, 512, 16),
        (8, 512, 8),
        (4, 512, 4),
        (16, 24, 8),
        (16, 12, 4),
        (2, 16, 2),
        (0, 7, 1),
        (1, 16, 1),
    ],
)
def test_the_widest_word_that_fits(address: int, row_nbytes: int, width: int) -> None:
    assert word_width(address | row_nbytes) == width
    (launch,) = moves_of([Rows(row_nbytes, address)], "gather").launches
    assert launch.width == width


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_compile_for_gpus_and_spill_no_register(architecture: int) -> None:
    """A block leaves half of the registers of its multiprocessor to the model."""
    found = compiled_for_gpu(architecture, SOURCE, OPTIONS)
    assert sorted(found) == sorted(NAMES)
    assert max(n for n, _ in found.values()) * N_THREADS <= 32 << 10
    assert max(spilled for _, spilled in found.values()) == 0


def test_spilled_registers_are_noticed() -> None:
    few = [option.replace("=64", "=24") for option in OPTIONS]
    assert few != list(OPTIONS)
    found = compiled_for_gpu(90, SOURCE, few)
    assert max(spilled for _, spilled in found.values()) > 0


def device_class(current: list[Any]) -> type:
    """Return a class like CuPy's, whose objects put a GPU on a list while they are entered."""

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *exc_info: object) -> None:
            current.pop()

    return Device


def test_a_handle_belongs_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy has a kernel for each GPU, and gives that of the current one."""
    current = [0]

    device = device_class(current)

    class Kernel:
        @property
        def kernel(self) -> Any:
            return types.SimpleNamespace(ptr=100 + current[-1])

    class Module:
        def __init__(self, **_: Any) -> None: ...

        def get_function(self, name: str) -> Kernel:
            return Kernel()

    cuda = types.SimpleNamespace(
        Device=device, Stream=types.SimpleNamespace(from_external=lambda stream: stream)
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, RawModule=Module))
    stored: Any = {0: ArrayStore(np.zeros((4, 2)))}
    reads = kernels.RowKernels(1).moves("gather", stored)
    assert [launch.kernel for launch in reads.launches] == [101]


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@settings(max_examples=60)
@given(
    sizes=SIZES,
    n_table=st.integers(1, 60),
    n=st.integers(0, 90),
    is_run=st.booleans(),
    is_sorted=st.booleans(),
    is_long=st.booleans(),
    n_blocks=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_an_engine_launches_them(
    run: Run,
    sizes: list[int],
    n_table: int,
    n: int,
    is_run: bool,
    is_sorted: bool,
    is_long: bool,
    n_blocks: int,
    seed: int,
) -> None:
    """The argument, the entries of the rows, and the kernels fit each other."""
    rng = np.random.default_rng(seed)
    stores = [ArrayStore(rng.integers(256, size=(n_table, k), dtype=np.uint8)) for k in sizes]
    rows = rng.integers(n_table, size=n)
    if is_run:
        rows = np.arange(n_table)[rng.integers(n_table) :]
    packed = [np.zeros((len(rows), k), np.uint8) for k in sizes]
    driver: Any = Launching(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_moves, "_LARGE_NBYTES", 0 if is_sorted else 1 << 60)
        reads = moves_of(stores, "gather", n_blocks=n_blocks)
    assert (reads.shift >= 0) == (is_sorted and max(sizes) < 1024)
    if is_long and reads.shift < 0:
        by_name = {name: 1 + i for i, name in enumerate(driver.names)}
        launches = [
            one._replace(kernel=by_name[f"gather_rows_{one.width}_int64"]) for one in reads.launches
        ]
        reads = reads._replace(index_nbytes=8, launches=launches)
    nbytes = reads.indices.row_nbytes * len(rows)
    staging, indices = (np.zeros(nbytes + 8, np.uint8) for _ in range(2))
    read = reads.description(lambda table: 1 + table.store, 0)
    staged = Staged(driver, 0, [staging.ctypes.data], 1 + len(sizes), staging, read)
    options: Any = {"n_threads": 0, "n_jobs": 1, "ring_at": 1, "bypass": False}
    engine = Engine([reads.indices], staged=staged, **options)
    devices = [indices.ctypes.data, *(there.ctypes.data for there in packed)]
    job = engine.submit(rows.ctypes.data, len(rows), [0], rows, devices)
    engine.wait(job)
    engine.shutdown()
    for store, there in zip(stores, packed, strict=True):
        np.testing.assert_array_equal(there, store.array[rows])
    follow = np.array_equal(rows, np.arange(len(rows)) + (rows[0] if len(rows) else 0))
    assert bool(driver.launched) != follow
    assert all(name.endswith("pair") == (reads.shift >= 0) for name in driver.launched)
