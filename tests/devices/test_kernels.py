"""Kernels that move rows, tested without a GPU.

They are compiled as C++ and run thread by thread, and compiled for GPUs.
"""

import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_compiler import ARCHITECTURES, compiled_for_cpu, compiled_for_gpu

from pinfeed.devices import kernels
from pinfeed.devices.kernels import (
    KERNELS,
    PAIRED,
    SOURCE,
    THICK,
    THIN,
    DeviceIndices,
    Grid,
    Move,
    launches,
    names_of,
    options,
    word_width,
)
from pinfeed.native import library as native
from pinfeed.native import row_moves
from pinfeed.native.driver import DriverTable
from pinfeed.native.engine import Engine, Staged
from pinfeed.native.row_moves import MAX_TABLES
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
Run = Callable[[str, int, int, np.ndarray], int]
"""Runs the kernel of a name with blocks, threads of a block, and its argument."""


@pytest.fixture(scope="module", params=[1, 2, 4])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs kernels whose threads have some words in flight."""
    numbers = (f"MAX_TABLES={MAX_TABLES}", f"IN_FLIGHT={request.param}")
    numbers += ("N_THREADS=blockDim.x", "PAIRED=1")
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


SIZES = st.lists(
    st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 24, 48, 100, 512, 600, 4096]),
    min_size=1,
    max_size=10,
)


@settings(deadline=None, max_examples=60)
@given(
    sizes=SIZES,
    offsets=st.lists(st.sampled_from([0, 0, 1, 2, 4, 8]), min_size=10, max_size=10),
    n_table=st.integers(1, 60),
    share=st.floats(0, 1),
    shape=st.sampled_from([(1, 1), (1, 32), (3, 32), (2, 512)]),
    step=st.sampled_from([1, 1 << 10, 64 << 20]),
    index=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 99),
)
def test_rows_are_gathered_and_scattered(
    run: Run,
    sizes: list[int],
    offsets: list[int],
    n_table: int,
    share: float,
    shape: tuple[int, int],
    step: int,
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
    packed, _room = zip(
        *(
            bytes_at(offset, (len(rows), size), rng)
            for size, offset in zip(sizes, reversed(offsets), strict=False)
        ),
        strict=True,
    )
    moves = [
        Move(table.ctypes.data, there.ctypes.data, size)
        for table, there, size in zip(tables, packed, sizes, strict=True)
    ]
    before = [whole.copy() for whole in memory]

    def move(name: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_STEP_BYTES", step)
            indices = DeviceIndices(rows.ctypes.data, len(rows), rows.itemsize)
            for width, n_blocks, argument in launches(indices, moves, Grid(*shape)):
                assert 0 < n_blocks <= shape[0]
                kernel = KERNELS[name, width, rows.itemsize]
                assert run(kernel, n_blocks, shape[1], argument) == 0, "a word is not aligned"

    move("gather")
    for table, there, whole, old in zip(tables, packed, memory, before, strict=True):
        np.testing.assert_array_equal(there, table[rows])
        np.testing.assert_array_equal(whole, old)
    new = [there.copy() for there in packed]
    for there, values in zip(packed, new, strict=True):
        values[...] = rng.integers(256, size=there.shape, dtype=np.uint8)
        there[...] = values
    wanted = [table.copy() for table in tables]
    move("scatter")
    for table, values, old, whole, was in zip(tables, new, wanted, memory, before, strict=True):
        old[rows] = values
        np.testing.assert_array_equal(table, old)
        begin = table.ctypes.data - whole.ctypes.data
        np.testing.assert_array_equal(whole[:begin], was[:begin])
        np.testing.assert_array_equal(whole[begin + table.size :], was[begin + table.size :])


@pytest.mark.parametrize("index_nbytes", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "n_rows"),
    [([512] * 3, 10**7), ([1], 10**9), ([1 << 29], 5), ([600 << 10, 32], 10**5)],
)
def test_a_launch_counts_words_in_32_bits(sizes: list[int], n_rows: int, index_nbytes: int) -> None:
    done = 0
    moves = [Move(0, 0, size) for size in sizes]
    indices = DeviceIndices(1 << 40, n_rows, index_nbytes)
    for _, n_blocks, (argument,) in launches(indices, moves, Grid(32)):
        assert n_blocks == 32
        assert argument["rows"] == (1 << 40) + index_nbytes * done
        assert argument["tables"]["packed"][0] == done * sizes[0]
        assert max(sizes) * int(argument["n_rows"]) < 1 << 31
        done += int(argument["n_rows"])
    assert done == n_rows


@pytest.mark.parametrize(
    ("sizes", "n_rows", "grid", "n_blocks"),
    [
        ([24], 6, Grid(64), 1),
        ([512], 1000, Grid(64), 63),
        ([512], 8192, Grid(64), 64),
        ([64, 512], 32, Grid(64), 2),
        ([512], 100, Grid(132, THIN), 100),
        ([512], 1000, Grid(132, THIN), 132),
    ],
)
def test_a_small_batch_takes_few_blocks(
    sizes: list[int], n_rows: int, grid: Grid, n_blocks: int
) -> None:
    moves = [Move(0, 0, size) for size in sizes]
    found = [launch.n_blocks for launch in launches(DeviceIndices(0, n_rows, 4), moves, grid)]
    assert found == [n_blocks]


def test_tables_of_one_word_width_share_a_launch() -> None:
    """Weights and state of a table are one launch, and a scalar for each row is another."""
    moves = [Move(0, 0, size) for size in (512, 4, 512, 512, 1, 4)]
    found = list(launches(DeviceIndices(0, 100, 4), moves, Grid(8)))
    assert [(launch.width, int(launch.moves["n_tables"][0])) for launch in found] == [
        (16, 3),
        (4, 2),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("table", "packed", "row_nbytes", "width"),
    [
        (0, 0, 512, 16),
        (8, 0, 512, 8),
        (0, 4, 512, 4),
        (16, 16, 24, 8),
        (16, 16, 12, 4),
        (16, 2, 16, 2),
        (0, 0, 7, 1),
        (1, 0, 16, 1),
    ],
)
def test_the_widest_word_that_fits(table: int, packed: int, row_nbytes: int, width: int) -> None:
    assert word_width(table | packed | row_nbytes) == width


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("n_threads", "n_registers"), [(THICK, 64), (THIN, 32)])
def test_they_compile_for_gpus_and_spill_no_register(
    architecture: int, n_threads: int, n_registers: int
) -> None:
    """A thick block leaves half of the registers to the model, and a thin one takes 1,024."""
    found = compiled_for_gpu(architecture, SOURCE, options(n_threads))
    assert sorted(found) == sorted(names_of(n_threads))
    assert max(n for n, _ in found.values()) <= n_registers
    assert max(spilled for _, spilled in found.values()) == 0


def test_spilled_registers_are_noticed() -> None:
    few = [option.replace("=64", "=24") for option in options(THICK)]
    assert few != list(options(THICK))
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


def test_launches_in_a_stream_of_torchs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch has the kernel, blocks and argument that the kernels in C take."""
    current: list[Any] = []

    device = device_class(current)

    class Stream(device):
        @classmethod
        def from_external(cls, other: Any) -> Any:
            assert current == [3], "made for another GPU"
            return cls(other.__cuda_stream__())

    class Module:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            assert (code, current) == (SOURCE, [3])
            found = [option for option in options if option.startswith("-DN_THREADS=")]
            self.n_threads = int(found[0].partition("=")[2])

        def get_function(self, name: str) -> Callable[..., None]:
            def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
                assert current == [3, (0, 77)]
                assert block == (self.n_threads,)
                (argument,) = arguments
                # CuPy passes an array of one element by value.
                assert argument.size == 1
                assert run(name, *grid, *block, argument) == 0

            return launch

    cuda = types.SimpleNamespace(Device=device, Stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, RawModule=Module))
    found = kernels.RowKernels(3)
    for index, grid in ((np.int32, Grid(2)), (np.int64, Grid(2)), (np.int32, Grid(2, THIN))):
        table, rows = np.arange(40, dtype=np.int64).reshape(10, 4), np.array([7, 1, 2], index)
        indices = DeviceIndices(rows.ctypes.data, 3, rows.itemsize)
        packed = np.zeros((3, 4), np.int64)
        moves = [Move(table.ctypes.data, packed.ctypes.data, 32)]
        assert len(list(found.move("gather", 77, indices, moves, grid))) == 1
        np.testing.assert_array_equal(packed, table[rows])
        packed += 100
        for _ in found.move("scatter", 77, indices, moves, grid):
            assert current == [], "another GPU or stream stays current between launches"
        np.testing.assert_array_equal(table[rows], packed)


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
    reads = kernels.RowKernels(1).moves("gather", stored, Grid(2))
    assert [launch.kernel for launch in reads.launches] == [101]


class Launching:
    """A driver without streams, whose launches run kernels that were compiled for the CPU.

    Args:
        run: Runs a kernel.
    """

    def __init__(self, run: Run) -> None:
        kinds = {
            "create": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint],
            "copy": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
            "launch": [
                *(ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p),
                *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
            ],
        }
        names = "push pop exchange_capture_mode create destroy record wait query sync copy launch"
        self._run = run
        self.names = [*KERNELS.values(), *PAIRED.values()]
        self.launched: list[str] = []
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *kinds.get(name, [ctypes.c_void_p] * 2))(
                getattr(self, f"_{name}", lambda *_: 0)
            )
            for name in names.split()
        }
        self._table = DriverTable.of(0, self._functions)
        self.address = self._table.address

    def start(self, engine: Engine, n_threads: int) -> None:
        engine.start(n_threads)

    def raise_error(self, code: int) -> None:
        raise AssertionError(f"error {code}")

    def _copy(self, to: int, source: int, nbytes: int, stream: int | None) -> int:
        ctypes.memmove(to, source, nbytes)
        return 0

    def _launch(self, kernel: int, *rest: Any) -> int:
        n_blocks, _, _, n_threads, *_, arguments, _ = rest
        name = self.names[kernel - 1]
        self.launched.append(name)
        moves = np.frombuffer(ctypes.string_at(arguments[0], kernels.MOVES.itemsize), np.uint8)
        return self._run(name, n_blocks, n_threads, moves.copy())


class Module:
    """Kernels by name, whose handles are numbers."""

    def __init__(self, index: int, source: str, options: Any, names: Any) -> None:
        self._names = list(names)

    def handle(self, name: str) -> int:
        return 1 + self._names.index(name)


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@settings(deadline=None, max_examples=60)
@given(
    sizes=SIZES,
    n_table=st.integers(1, 60),
    n=st.integers(0, 90),
    is_run=st.booleans(),
    is_sorted=st.booleans(),
    is_long=st.booleans(),
    grid=st.sampled_from([Grid(1, THIN), Grid(3, THIN), Grid(2, THICK)]),
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
    grid: Grid,
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
        patch.setattr(kernels, "CudaModule", Module)
        stored: Any = dict(enumerate(stores))
        reads = kernels.RowKernels(0).moves("gather", stored, grid)
    assert (reads.shift >= 0) == (is_sorted and max(sizes) < 1024 and grid.n_threads == THICK)
    if is_long and reads.shift < 0:
        by_name = {name: 1 + i for i, name in enumerate(driver.names)}
        launches = [
            one._replace(kernel=by_name[KERNELS["gather", one.width, 8]]) for one in reads.launches
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
