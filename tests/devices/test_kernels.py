"""Kernels that move rows, tested without a GPU.

They are compiled as C++ and run thread by thread, and compiled for GPUs.
"""

import ctypes
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed.devices import kernels
from pinfeed.devices.kernels import MAX_TABLES, SOURCE, Move, RowIndices, launches

# Definitions that CUDA provides for a kernel. Alignment is checked at every access, because a GPU
# stops at a word that is not aligned.
CUDA = r"""
#include <cstdint>
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Dim { unsigned x; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
static long long n_wrong;
#define __global__
#define __launch_bounds__(n)
#define __device__ static
template <class T> static void check(const T* p) { n_wrong += (uintptr_t)p % sizeof(T) != 0; }
template <class T> static T __ldcs(const T* p) { check(p); return *p; }
template <class T> static void __stcs(T* p, T v) { check(p); *p = v; }
"""
RUN = r"""
#define PARAMETERS(k) char *table##k, char *packed##k, long long row_nbytes##k, int width##k
#define ARGUMENTS(k) table##k, packed##k, row_nbytes##k, width##k
extern "C" long long run(unsigned n_blocks, unsigned n_threads, int gather, int index_nbytes,
                         const void* rows, unsigned n_rows,
                         PARAMETERS(0), PARAMETERS(1), PARAMETERS(2), PARAMETERS(3))
{
    gridDim.x = n_blocks, blockDim.x = n_threads, n_wrong = 0;
    for (blockIdx.x = 0; blockIdx.x < n_blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < n_threads; threadIdx.x++)
            if (index_nbytes == 4)
                (gather ? gather_rows_int32 : scatter_rows_int32)(
                    (const int*)rows, n_rows,
                    ARGUMENTS(0), ARGUMENTS(1), ARGUMENTS(2), ARGUMENTS(3));
            else
                (gather ? gather_rows_int64 : scatter_rows_int64)(
                    (const long long*)rows, n_rows,
                    ARGUMENTS(0), ARGUMENTS(1), ARGUMENTS(2), ARGUMENTS(3));
    return n_wrong;
}
"""
Run = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(CUDA + SOURCE + RUN)
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
    subprocess.run(
        [compiler, *options, "-o", folder / "kernels.so", folder / "kernels.cpp"], check=True
    )
    function: Any = ctypes.CDLL(str(folder / "kernels.so")).run
    function.restype = ctypes.c_longlong
    table = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int]
    function.argtypes = [
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_uint,
        *table * MAX_TABLES,
    ]
    return function


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
    st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 24, 48, 100, 512, 600, 4096]), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=150)
@given(
    sizes=SIZES,
    offsets=st.lists(st.sampled_from([0, 0, 1, 2, 4, 8]), min_size=6, max_size=6),
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

    def move(gather: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_STEP_BYTES", step)
            indices = RowIndices(rows.ctypes.data, len(rows), rows.itemsize)
            for n_blocks, arguments in launches(indices, moves, shape[0]):
                assert 0 < n_blocks <= shape[0]
                n_wrong = run(n_blocks, shape[1], gather, rows.itemsize, *arguments)
                assert n_wrong == 0, "a word is not aligned"

    move(gather=True)
    for table, there, whole, old in zip(tables, packed, memory, before, strict=True):
        np.testing.assert_array_equal(there, table[rows])
        np.testing.assert_array_equal(whole, old)
    new = [there.copy() for there in packed]
    for there, values in zip(packed, new, strict=True):
        values[...] = rng.integers(256, size=there.shape, dtype=np.uint8)
        there[...] = values
    wanted = [table.copy() for table in tables]
    move(gather=False)
    for table, values, old, whole, was in zip(tables, new, wanted, memory, before, strict=True):
        old[rows] = values
        np.testing.assert_array_equal(table, old)
        begin = table.ctypes.data - whole.ctypes.data
        np.testing.assert_array_equal(whole[:begin], was[:begin])
        np.testing.assert_array_equal(whole[begin + table.size :], was[begin + table.size :])


@pytest.mark.parametrize("index_nbytes", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "n_rows"), [([512] * 3, 10**7), ([1], 10**9), ([1 << 29], 5), ([600 << 10, 4], 10**5)]
)
def test_a_launch_counts_words_in_32_bits(sizes: list[int], n_rows: int, index_nbytes: int) -> None:
    done = 0
    moves = [Move(0, 0, size) for size in sizes]
    for n_blocks, (_rows, n, *rest) in launches(
        RowIndices(1 << 40, n_rows, index_nbytes), moves, 32
    ):
        assert n_blocks == 32
        assert _rows == (1 << 40) + index_nbytes * done
        assert rest[1] == done * sizes[0]
        assert max(size * n for size in sizes) < 1 << 31
        done += n
    assert done == n_rows


@pytest.mark.parametrize(
    ("sizes", "n_rows", "n_blocks"),
    [([24], 6, 1), ([512], 1000, 63), ([64, 1, 512], 32, 2), ([512], 8192, 64)],
)
def test_a_small_batch_takes_few_blocks(sizes: list[int], n_rows: int, n_blocks: int) -> None:
    moves = [Move(0, 0, size) for size in sizes]
    assert [blocks for blocks, _ in launches(RowIndices(0, n_rows, 4), moves, 64)] == [n_blocks]


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
    assert Move(table, packed, row_nbytes).width == width


KERNELS = [f"{name}_rows_int{bits}" for name in ("gather", "scatter") for bits in (32, 64)]


def compiled(architecture: int, source: str = SOURCE) -> dict[str, tuple[int, int]]:
    """Return the registers of each kernel per thread, and the bytes that it spills from them.

    NVRTC compiles without a GPU.
    """
    nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc")

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result
        return result[1] if len(result) == 2 else result[1:]

    try:
        known = checked(nvrtc.nvrtcGetSupportedArchs())
    except RuntimeError as error:
        pytest.skip(f"no NVRTC library: {error}")
    if architecture not in known:
        pytest.skip(f"this NVRTC compiles for {known}")
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    options = [b"-std=c++17", b"--gpu-architecture=sm_%d" % architecture, b"--ptxas-options=-v"]
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    # The binding writes into ``log``.
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode()
    assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    assert checked(nvrtc.nvrtcGetCUBINSize(program)) > 0
    checked(nvrtc.nvrtcDestroyProgram(program))
    found = re.findall(
        r"properties for (\w+)\n.*?(\d+) bytes spill stores.*?Used (\d+) registers", text, re.DOTALL
    )
    return {name: (int(n_registers), int(nbytes)) for name, nbytes, n_registers in found}


@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_they_compile_for_gpus_and_spill_no_register(architecture: int) -> None:
    found = compiled(architecture)
    assert sorted(found) == sorted(KERNELS)
    for n_registers, spilled in found.values():
        # With 512 threads, a block leaves half of a multiprocessor's registers to the model.
        assert n_registers <= 64
        assert spilled == 0


def test_spilled_registers_are_noticed() -> None:
    bounds = "__launch_bounds__(512)"
    assert bounds in SOURCE
    # These bounds leave 32 registers for a thread.
    found = compiled(90, SOURCE.replace(bounds, "__launch_bounds__(1024, 2)"))
    assert min(spilled for _, spilled in found.values()) > 0


def test_launches_in_a_stream_of_torchs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of a launch have the number and widths of those of the kernels in C."""
    current: list[Any] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *exc_info: object) -> None:
            current.pop()

    class Stream(Device):
        @classmethod
        def from_external(cls, other: Any) -> Any:
            assert current == [3], "made for another GPU"
            return cls(other.__cuda_stream__())

    class Module:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            assert (code, options, current) == (SOURCE, ("-std=c++17",), [3])

        def get_function(self, name: str) -> Callable[..., None]:
            assert name in KERNELS

            def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
                assert current == [3, (0, 77)]
                assert [argument.nbytes for argument in arguments] == [
                    8,
                    4,
                    *[8, 8, 8, 4] * MAX_TABLES,
                ]
                assert (
                    run(
                        *grid,
                        *block,
                        name.startswith("gather"),
                        4 if name.endswith("int32") else 8,
                        *(int(argument) for argument in arguments),
                    )
                    == 0
                )

            return launch

    cuda = types.SimpleNamespace(Device=Device, Stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, RawModule=Module))
    found = kernels.RowKernels(3)
    for index in (np.int32, np.int64):
        table, rows = np.arange(40, dtype=np.int64).reshape(10, 4), np.array([7, 1, 2], index)
        indices = RowIndices(rows.ctypes.data, 3, rows.itemsize)
        packed = np.zeros((3, 4), np.int64)
        moves = [Move(table.ctypes.data, packed.ctypes.data, 32)]
        assert len(list(found.gather(77, indices, moves, n_blocks=2))) == 1
        np.testing.assert_array_equal(packed, table[rows])
        packed += 100
        for _ in found.scatter(77, indices, moves, n_blocks=2):
            assert current == [], "another GPU or stream stays current between launches"
        np.testing.assert_array_equal(table[rows], packed)
